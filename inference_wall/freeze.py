"""The prefill freeze: which gaps between tokens fall to an injected long prompt, and what they cost whom.

What:   `rounds`, `gaps` and `populations` turn the raw rows of a `victims` load into gaps with a place (calm, window, tail),
        into percentiles that name their samples, and into the count of tokens hurt. `read` does so for all arms of a set.
Why:    the same stall can be the worst case of a short window and invisible in the p99 of a long test. So the window is a
        rule that is written down here, and not a choice that is made while looking at the result.
Use:    cases = read(arms); cases["unchunked", "heavy"].populations["window"]["max_ms"]; roles(cases, "heavy")["off"]
Not:    what is expected (`freeze_bound`), figures (`freeze_figures`), tables (`freeze_tables`), sentences (`freeze_words`), numbers (`part_2`).

The rule. Round r is one injection: `sent` is when its first long prompt was sent, `last first` when the last of them got its
first token, `last end` when the last of them was answered. A gap of a victim, from one token to its next, is in the
    window  when the later token came after `sent` and the earlier one before `last first`: long prompts were being read;
    tail    when it is not in the window and the earlier token came before `last end`: their answers were being written;
    unclear when it lies in a round whose prompts never got a first token, so that nobody knows where its window ends;
    calm    otherwise.
`broad` is window and tail together, nearly the window of the published figures (there a token must also have come before `last
end`, and waits for a first token are gaps). A gap over two windows is counted once in all pooled figures, and in each of the two
rounds. The wait for a first token is TTFT, never a gap, and has the same places.

Frames: `requests` and `chunks` of docs/decisions/0001 and 0004, of one point or of several (then with the column `point`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from .percentiles import percentile, summarise
from .samples import UNIT_S, ticks

HURT = 3.0  # a token is hurt when its gap is longer than this many calm medians
MANY = 10  # rounds a side from which medians are compared, where single rounds overlap
LOADS = ("light", "heavy")
PLACES = ("calm", "unclear", "tail", "window")  # the later wins where two apply


# --- one load on one server -------------------------------------------------------------------------------------------


def rounds(requests: pd.DataFrame) -> pd.DataFrame:
    """One row an injection, in order: point, round, injected, started (how many got a first token), sent_s, last_first_s,
    last_end_s (seconds on the run's clock, NaN where it did not happen), why_not (text, empty where the window is known)."""
    injected = _with_point(requests)
    injected = injected[(injected["role"] == "injected") & injected["sent"].notna()]
    rows = []
    for (point, number), mine in injected.groupby(["point", "round"], sort=True):
        first = ticks(mine["first_token"]) * UNIT_S
        ends = ticks(mine["end"]) * UNIT_S
        rows.append({
            "point": point, "round": int(number), "injected": len(mine), "started": int(np.isfinite(first).sum()),
            "sent_s": float(ticks(mine["sent"]).min()) * UNIT_S,
            "last_first_s": float(np.nanmax(first)) if np.isfinite(first).any() else math.nan,
            "last_end_s": float(np.nanmax(ends)) if np.isfinite(ends).any() else math.nan,
            "why_not": "" if np.isfinite(first).any() else "no injected prompt got a first token",
        })  # fmt: skip
    columns = ["point", "round", "injected", "started", "sent_s", "last_first_s", "last_end_s", "why_not"]
    return pd.DataFrame(rows, columns=columns)


def gaps(requests: pd.DataFrame, chunks: pd.DataFrame) -> pd.DataFrame:
    """One row a gap between two tokens of one victim request, in order of time: point, request, stream, start_s, end_s, gap_s,
    where (`PLACES`), round (the first whose window, tail or unclear stretch it touches, else null), windows (how many it touches).

    A chunk of k tokens is one gap and k - 1 gaps of 0, as in `samples.token_gaps`. Victims that failed or were cut off keep the
    gaps that they saw: leaving them out would leave out those whom the freeze hit hardest.
    """
    victims = _with_point(requests)
    victims = victims[victims["role"] == "victim"]
    with_tokens = _with_point(chunks)
    with_tokens = with_tokens[with_tokens["tokens"] > 0]
    joined = with_tokens.merge(victims[["point", "request", "stream"]], on=["point", "request"])
    joined = joined.sort_values(["point", "request", "time"], kind="stable", ignore_index=True)
    time = ticks(joined["time"])
    before = ticks(joined.groupby(["point", "request"])["time"].shift())
    pairs = joined[["point", "request", "stream"]].assign(start_s=before * UNIT_S, end_s=time * UNIT_S, gap_s=(time - before) * UNIT_S)
    bundled = pairs.loc[pairs.index.repeat(joined["tokens"].to_numpy(int) - 1)]
    bundled = bundled.assign(start_s=bundled["end_s"], gap_s=0.0)
    found = pd.concat([pairs[pairs["start_s"].notna()], bundled]).sort_values(["point", "end_s"], kind="stable", ignore_index=True)
    return _placed(found, rounds(requests))


def victim_starts(requests: pd.DataFrame) -> pd.DataFrame:
    """The waits of victims for a first token, placed by the same rule as gaps: point, request, stream, start_s, end_s, gap_s (the
    TTFT in seconds), where, round, windows."""
    victims = _with_point(requests)
    victims = victims[(victims["role"] == "victim") & victims["first_token"].notna() & victims["sent"].notna()]
    sent, first = ticks(victims["sent"]), ticks(victims["first_token"])
    found = victims[["point", "request", "stream"]].assign(start_s=sent * UNIT_S, end_s=first * UNIT_S, gap_s=(first - sent) * UNIT_S)
    return _placed(found.reset_index(drop=True), rounds(requests))


def _placed(found: pd.DataFrame, windows: pd.DataFrame) -> pd.DataFrame:
    start, end, point = (found[name].to_numpy() for name in ("start_s", "end_s", "point"))
    rank = np.zeros(len(found), int)
    owner = np.full(len(found), -1)
    count = np.zeros(len(found), int)
    for each in windows.itertuples():
        after = (point == each.point) & (end > each.sent_s)
        last = math.inf if math.isnan(each.last_end_s) else each.last_end_s
        if each.why_not:
            places = {1: after & (start < last)}
        else:
            inside = after & (start < each.last_first_s)
            places = {2: after & (start < last), 3: inside}
            count += inside
        for level, hit in places.items():
            better = hit & (level > rank)
            rank[better], owner[better] = level, each.round
    owners = pd.array(owner, dtype="Int64")
    owners[owner < 0] = pd.NA
    return found.assign(where=np.array(PLACES)[rank], round=owners, windows=count)


def by_round(found: pd.DataFrame, windows: pd.DataFrame) -> pd.DataFrame:
    """One row a round whose window is known: point, round, gaps (in its window), streams (that had one), worst_s (NaN without)."""
    rows = []
    for each in windows[windows["why_not"] == ""].itertuples():
        mine = found[_in_window(found, each)]
        rows.append({"point": each.point, "round": each.round, "gaps": len(mine), "streams": mine["stream"].nunique(),
                     "worst_s": float(mine["gap_s"].max()) if len(mine) else math.nan})
    return pd.DataFrame(rows, columns=["point", "round", "gaps", "streams", "worst_s"])


def _in_window(found: pd.DataFrame, each: Any) -> pd.Series:
    return (found["point"] == each.point) & (found["end_s"] > each.sent_s) & (found["start_s"] < each.last_first_s)


def populations(requests: pd.DataFrame, chunks: pd.DataFrame, found: pd.DataFrame | None = None,
                calm_wait_ms: float | None = None) -> dict[str, Any]:
    """What a load did to its victims, by population. Latencies are results of `percentiles.summarise`, in milliseconds. `found`: the `gaps`
    of these rows, where they are at hand. `calm_wait_ms`: the calm median wait for a first token of the same server, where more loads than this
    one show it; else that of these rows.

    all, calm, window, broad           gaps between tokens (see the module's header)
    victim_ttft, ..._window, ..._calm  waits of victims for a first token; those that touch a window; those in calm
    injected_ttft                      waits of the long prompts themselves
    hurt                               {"times", "limit_ms", "window", "broad", "calm", "all", "share_of_all", "reason"}: gaps longer than
                                       `HURT` calm medians; counts are null where the calm median is unknown or 0, with the reason
    calm_wait_ms                       the calm median wait that lost time is counted from; null where too few are known
    lost_ms, lost_reason               what a victim lost to one injection, mean over rounds and all its streams (see `_lost`); its parts
                                       lost_between_ms and lost_waiting_ms; lost_by_round_ms; lost_waits, how many waits are in it
    worst_by_round_ms                  the worst gap of each round's window, in order
    reading_by_round_ms                from the sending of a round's long prompts to the first token of the last of them, in order
    unfinished_gap_ms                  the longest silence of a victim that failed, from its last token to its end: a stall that never
                                       closed is no gap, but it was at least this long; null where none failed
    rounds, rounds_without_window      counts; outcomes: {"victim": {"completed": ...}, "injected": {...}}
    asked_prompt_tokens, prompt_tokens of one injected prompt (median), asked for and as counted by the server; null where not recorded
    """
    requests, chunks = _with_point(requests), _with_point(chunks)
    windows, starts = rounds(requests), victim_starts(requests)
    found = gaps(requests, chunks) if found is None else found
    chosen = {"all": found, "calm": found[found["where"] == "calm"], "window": found[found["where"] == "window"],
              "broad": found[found["where"].isin(["window", "tail"])]}
    result: dict[str, Any] = {name: summarise(rows["gap_s"]) for name, rows in chosen.items()}
    injected = requests[requests["role"] == "injected"]
    result["victim_ttft"] = summarise(starts["gap_s"])
    result["victim_ttft_window"] = summarise(starts.loc[starts["where"] == "window", "gap_s"])
    result["victim_ttft_calm"] = summarise(starts.loc[starts["where"] == "calm", "gap_s"])
    result["injected_ttft"] = summarise((ticks(injected["first_token"]) - ticks(injected["sent"])) * UNIT_S)
    calm_ms = result["calm"]["p50_ms"]
    result["hurt"] = _hurt(chosen, calm_ms, result["calm"])
    result["calm_wait_ms"] = result["victim_ttft_calm"]["p50_ms"] if calm_wait_ms is None else calm_wait_ms
    result |= _lost(requests, found, starts, windows, calm_ms, result["calm_wait_ms"])
    result["reading_by_round_ms"] = [round(1e3 * (each.last_first_s - each.sent_s), 3) for each in windows.itertuples() if not each.why_not]
    result["worst_by_round_ms"] = [round(1e3 * worst, 3) for worst in by_round(found, windows)["worst_s"] if math.isfinite(worst)]
    result["unfinished_gap_ms"] = _unfinished_gap_ms(requests, chunks)
    result["rounds"], result["rounds_without_window"] = len(windows), int((windows["why_not"] != "").sum())
    result["outcomes"] = {role: requests.loc[requests["role"] == role, "outcome"].value_counts().to_dict() for role in ("victim", "injected")}
    for name in ("asked_prompt_tokens", "prompt_tokens"):
        known = injected[name].dropna() if name in injected else pd.Series(dtype=float)
        result[name] = int(percentile(known, 50)) if len(known) else None
    return result


def _lost(requests: pd.DataFrame, found: pd.DataFrame, starts: pd.DataFrame, windows: pd.DataFrame, calm_gap_ms: float | None,
          calm_wait_ms: float | None) -> dict[str, Any]:
    """The time that one victim lost to one injection: each gap in the window less the calm median gap, and each wait for a first token in
    the window less the calm median wait; divided over all streams, so that one that spent the freeze waiting and had no gap counts too.

    A wait counts whole, as a gap does: what is cut off at the window's end would be compared with a whole calm one. Null, with the reason,
    where a calm median that is needed is unknown. A wait that never ended has no length and is left out.
    """
    known = windows[windows["why_not"] == ""]
    touched = [(each, found[_in_window(found, each)], starts[_in_window(starts, each)]) for each in known.itertuples()]
    waits = sum(len(mine) for _, _, mine in touched)
    empty = {"lost_ms": None, "lost_between_ms": None, "lost_waiting_ms": None, "lost_by_round_ms": [], "lost_waits": waits}
    if not waits and not any(len(mine) for _, mine, _ in touched):
        return empty | {"lost_reason": "no gap and no wait in any window"}
    if not calm_gap_ms:
        return empty | {"lost_reason": "no calm median to compare with"}
    if waits and calm_wait_ms is None:
        return empty | {"lost_reason": "too few calm waits for a first token to compare with"}
    streams = requests[requests["role"] == "victim"].groupby("point")["stream"].nunique()
    parts = [((1e3 * between["gap_s"].sum() - calm_gap_ms * len(between)) / streams[each.point],
              (1e3 * waiting["gap_s"].sum() - (calm_wait_ms or 0) * len(waiting)) / streams[each.point]) for each, between, waiting in touched]
    between, waiting = (float(value) for value in np.mean(parts, axis=0))
    return {"lost_ms": between + waiting, "lost_between_ms": between, "lost_waiting_ms": waiting, "lost_waits": waits, "lost_reason": "",
            "lost_by_round_ms": [round(float(sum(part)), 3) for part in parts]}


def _hurt(chosen: dict[str, pd.DataFrame], calm_ms: float | None, calm: dict[str, Any]) -> dict[str, Any]:
    hurt: dict[str, Any] = {"times": HURT, "limit_ms": None, "share_of_all": None, "reason": "", **dict.fromkeys(chosen)}
    if not calm_ms:
        return hurt | {"reason": "the calm median is 0: most tokens come bundled" if calm_ms == 0
                       else f"no calm median: {calm['withheld'].get('p50', 'no sample')}"}
    limit = HURT * calm_ms
    hurt |= {name: int((1e3 * rows["gap_s"] > limit).sum()) for name, rows in chosen.items()}
    return hurt | {"limit_ms": limit, "share_of_all": hurt["broad"] / len(chosen["all"])}


def _unfinished_gap_ms(requests: pd.DataFrame, chunks: pd.DataFrame) -> float | None:
    failed = requests[(requests["role"] == "victim") & (requests["outcome"] == "failed") & requests["end"].notna()]
    last = chunks.groupby(["point", "request"])["time"].max().rename("last")
    silent = failed.join(last, on=["point", "request"]).dropna(subset="last")
    return float((ticks(silent["end"]) - ticks(silent["last"])).max()) * UNIT_S * 1e3 if len(silent) else None


def widening(found: pd.DataFrame, windows: pd.DataFrame, steps: int = 14) -> pd.DataFrame:
    """The same stalls in ever larger company: gaps of the windows, then those nearest to them in time, up to all.

    Rows by rising n: n, seconds (how far from a window the farthest gap lies), p50_ms, p90_ms, p99_ms, max_ms. A percentile that n
    cannot bear is null. Empty without a window that holds a gap.
    """
    known = windows[windows["why_not"] == ""]
    away = np.full(len(found), math.inf)
    for each in known.itertuples():
        distance = np.maximum(each.sent_s - found["end_s"].to_numpy(), found["start_s"].to_numpy() - each.last_first_s)
        away = np.where(found["point"].to_numpy() == each.point, np.minimum(away, distance), away)
    order = np.argsort(away, kind="stable")
    order = order[np.isfinite(away[order])]
    inside = int((away[order] < 0).sum())
    columns = ["n", "seconds", "p50_ms", "p90_ms", "p99_ms", "max_ms"]
    if not inside:
        return pd.DataFrame(columns=columns)
    sizes = sorted({inside, *(round(size) for size in np.geomspace(inside, len(order), steps))})
    rows = []
    for size in sizes:
        summary = summarise(found["gap_s"].to_numpy()[order[:size]])
        rows.append({"n": size, "seconds": max(0.0, float(away[order[size - 1]])), **{name: summary[name] for name in columns[2:]}})
    return pd.DataFrame(rows, columns=columns)


def hides_after(case: Case, p: float = 99) -> tuple[int | None, float | None, str]:
    """How many tokens, and seconds, to watch around one injection until percentile p no longer shows a hurt token: (tokens, seconds, "")
    or (None, None, reason). With h hurt tokens that is from h / (1 - p/100) tokens on, because percentile p leaves out that share.

    Seconds: at the calm pace of one token a median gap for each victim.
    """
    result = case.populations
    windows = result["rounds"] - result["rounds_without_window"]
    if not result["hurt"]["broad"] or not windows:
        return None, None, result["hurt"]["reason"] or "no token was hurt"
    tokens = math.ceil(result["hurt"]["broad"] / windows / (1 - p / 100) - 1e-9)
    return tokens, tokens * result["calm"]["p50_ms"] / 1e3 / case.victims, ""


def _with_point(frame: pd.DataFrame) -> pd.DataFrame:
    return frame if "point" in frame else frame.assign(point=0)


# --- all arms of a set ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One load on one arm, its valid points pooled (all of them, with `valid` false, where none is valid)."""

    arm: str
    load: str
    run: Any
    asked_chunked: bool
    chunked: bool | None  # what the server's log said
    budget: int | None  # tokens a step, as the server's log said, else as it was asked for
    victims: int
    injected: int
    points: list[dict[str, Any]]
    valid: bool
    reasons: list[str]
    requests: pd.DataFrame
    chunks: pd.DataFrame
    rounds: pd.DataFrame
    gaps: pd.DataFrame
    populations: dict[str, Any]

    @property
    def as_asked(self) -> bool:
        """False when the server said that it does the opposite of what the arm's name promises."""
        return self.chunked is None or self.chunked == self.asked_chunked

    @property
    def usable(self) -> bool:
        return self.valid and self.as_asked

    @property
    def worst_ms(self) -> float | None:
        """The worst gap in any window."""
        return self.populations["window"]["max_ms"]

    @property
    def typical_worst_ms(self) -> float | None:
        """The median over the rounds of each round's worst gap: an observed value, steadier than the worst of all."""
        return percentile(self.populations["worst_by_round_ms"], 50)

    @property
    def reading_ms(self) -> float | None:
        """The median over the rounds of the time until the last long prompt had its first token: an observed value."""
        return percentile(self.populations["reading_by_round_ms"], 50)

    @property
    def step_tokens(self) -> int | None:
        """The most prompt tokens that one step can hold, from budget, prompt length, copies and seats; null where one is unknown.

        Running victims take one token each of the budget before prompts get the rest (vLLM schedules running requests first).
        Without chunking a step takes whole prompts only.
        """
        prompt, budget = self.populations["prompt_tokens"], self.budget
        seats = self.run.document.get("flags", {}).get("max-num-seqs")
        copies = max(1, min(self.injected, int(seats) - self.victims)) if seats else self.injected
        if prompt is None:
            return None
        if not (self.asked_chunked if self.chunked is None else self.chunked):
            if copies == 1:
                return prompt
            return None if budget is None else prompt * max(1, min(copies, (budget - self.victims) // prompt))
        return None if budget is None else min(budget - self.victims, copies * prompt)


Cases = dict[tuple[str, str], Case]


def read(arms: Any) -> Cases:
    """Every load of every testable arm of an `ArmSet`, by (arm, load), in the order of the set. Only the pass `measured` counts."""
    cases: Cases = {}
    for arm, run in arms.testable.items():
        points = [point for point in run.points if point["pass"] == "measured" and point.get("kind") == "victims"]
        loads = list(dict.fromkeys(point["load"] for point in points))
        calm_wait_ms = _calm_wait_ms(run, points)
        for load in sorted(loads, key=lambda name: LOADS.index(name) if name in LOADS else len(LOADS)):
            cases[arm, load] = _case(arm, load, run, [point for point in points if point["load"] == load], calm_wait_ms)
    return cases


def _calm_wait_ms(run: Any, points: list[dict[str, Any]]) -> float | None:
    """The calm median wait of a victim for its first token, over all valid loads of one server: one load alone has few."""
    starts = [victim_starts(run.frame("requests", point["point"])) for point in points if point["validity"]["valid"]]
    calm = [rows.loc[rows["where"] == "calm", "gap_s"] for rows in starts]
    return summarise(pd.concat(calm))["p50_ms"] if calm else None


def _case(arm: str, load: str, run: Any, points: list[dict[str, Any]], calm_wait_ms: float | None) -> Case:
    valid = [point for point in points if point["validity"]["valid"]]
    used = valid or points
    frames = {name: pd.concat([run.frame(name, point["point"]) for point in used], ignore_index=True) for name in ("requests", "chunks")}
    found, said = gaps(**frames), run.said or {}
    return Case(
        arm=arm, load=load, run=run, asked_chunked=arm != "unchunked", chunked=said.get("chunked_prefill"),
        budget=said.get("max_num_batched_tokens") or run.document["flags"].get("max-num-batched-tokens"),
        victims=used[0]["victims"], injected=used[0]["injected"],
        points=points, valid=bool(valid), reasons=sorted({reason for point in points for reason in point["validity"]["reasons"]}),
        rounds=rounds(frames["requests"]), gaps=found, populations=populations(**frames, found=found, calm_wait_ms=calm_wait_ms), **frames,
    )  # fmt: skip


def chunked(cases: Cases, load: str) -> list[Case]:
    """The usable cases with chunking under one load, by rising budget."""
    mine = [case for case in cases.values() if case.load == load and case.asked_chunked and case.usable]
    return sorted(mine, key=lambda case: (case.budget or 0, case.arm))


def roles(cases: Cases, load: str) -> dict[str, Case]:
    """The cases that prose compares, by part: `off` (no chunking), `smallest` and `largest` budget. A part that was not measured, is not valid
    or did the opposite is absent.

    No part is chosen by its result: the best of several noisy maxima would look better than any of them is.
    """
    found = {}
    off = cases.get(("unchunked", load))
    if off and off.usable:
        found["off"] = off
    sizes = chunked(cases, load)
    return found | ({"smallest": sizes[0], "largest": sizes[-1]} if sizes else {})


def apart(mine: list[float], other: list[float]) -> int | None:
    """Two samples, one value a round: 1 where `mine` lies above `other`, -1 where below, 0 where that is not shown. Null where a side has fewer
    than two rounds: one value has no range.

    Few rounds: every value must lie above every other. From `MANY` rounds a side on, it is also enough that the 95 % intervals of the two medians
    (binomial order statistics, `percentiles`) do not overlap: with more rounds the extremes only ever meet more easily.
    """
    if min(len(mine), len(other)) < 2:
        return None
    way = int(min(mine) > max(other)) - int(max(mine) < min(other))
    if way or min(len(mine), len(other)) < MANY:
        return way
    (low, high), (other_low, other_high) = (summarise(np.array(values) / 1e3)["intervals"]["p50"] for values in (mine, other))
    if None in (low, high, other_low, other_high):
        return 0
    return int(low > other_high) - int(high < other_low)


def disjoint(mine: list[float], other: list[float]) -> bool:
    """Whether every value of one side lies above every value of the other."""
    return min(mine) > max(other) or max(mine) < min(other)
