"""A KV cache that is too small: what fits, who is put out, and what that costs.

What:   `bounds` says from lengths and blocks alone how many requests of each load fit, and how often the rules would put one out
        (`cache_room`, `block_rules`). `counts` says what the engine counted, and whether a zero may be believed. `pauses` finds in the streams
        the requests that were put out, `read_again` in a trace what their return costs. `onset` splits the counts at the first completion.
        `price` is what it costs.
Why:    "no preemption" was published once because a log line could not print. A zero is worth something only where the
        same counter was seen to move, or where the arithmetic says that there is nothing to put out.
Use:    bounds(arms); counts(arms); pauses(run.frame("requests", point), run.frame("chunks", point))
Not:    drawing (`starvation_figures`), sentences and named numbers (`part_4`), the author's figures.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pandas as pd

from . import block_rules
from .arms import ArmSet
from .block_rules import Cache
from .cache_room import cache_of
from .records import Run
from .samples import UNIT_S, counter_delta, first_s, last_s, request_stalls, series, ticks

CONTROL = "positive"  # the load that must move the counter
LEAST_STEPS = 3  # tokens another request received while one had none: an ordinary step gives everybody one
WHOLE_PROMPT_AFTER = (0, 18)  # up to this version a prompt is taken to be let in by its first piece; see rule 3 of `block_rules`


# --- the floods, before they are measured -----------------------------------------------------------------------------


def cuts(arms: ArmSet) -> list[str]:
    """Names of the testable arms with a cut cache, the largest cache first."""
    return sorted((name for name in arms.testable if name.startswith("blocks-")), key=lambda name: -int(name.rpartition("-")[2]))


def tightest(arms: ArmSet) -> str | None:
    """The arm with the smallest cache that could be tested, or None."""
    return (cuts(arms) or [None])[-1]


def natural(arms: ArmSet) -> str | None:
    return "natural" if "natural" in arms.testable else None


def points(arms: ArmSet) -> pd.DataFrame:
    """The measured floods: the rows of `arms.frame()` with a load of this post, in plan order. May be empty."""
    frame = arms.frame()
    if frame.empty:
        return frame
    return frame[(frame["pass"] == "measured") & (frame["kind"] == "bench")].reset_index(drop=True)


def loads(arms: ArmSet) -> list[str]:
    frame = points(arms)
    return list(dict.fromkeys(frame["load"])) if len(frame) else []


def whole_prompt_rule(version: str) -> bool:
    """Whether this engine lets a prompt in only when all of it fits (rule 3 of `block_rules`)."""
    numbers = re.match(r"(\d+)\.(\d+)", str(version))
    return numbers is None or (int(numbers[1]), int(numbers[2])) > WHOLE_PROMPT_AFTER


def bound(cache: Cache, requests: int, input_len: int, output_len: int, seats: int | None, budget: int | None,
          whole_prompt: bool = True) -> dict[str, Any]:
    """What room formula and rules say of a flood, without a measured time.

    need_start, need_end: blocks of one request when it is let in and just before it ends. cap: how many seats and requests allow at once;
    admitted: how many of these the blocks let in; fits: how many of them fit at their end. demand: blocks of all admitted at their end.
    worst: blocks of `cap` requests, all at their end; where that fits, nobody can be put out. rules: what `block_rules.play` counts, with
    rules_before (the first end), first_batch (requests that begin before it) and read_again (tokens); `ahead_*` is the same with the first
    request one step ahead of the others, because an idle engine does not wait for a flood to be complete. All of these are None where seats
    or budget are not known. must: whether somebody has to go, by the rules; where they could not be played, whether demand is more than
    there is.
    """
    most = input_len + output_len - 1
    cap = min(requests, seats or requests)
    admitted, fits = min(cap, cache.room(input_len)), min(cap, cache.room(most))
    demand = admitted * cache.need(most)
    found = {"usable": cache.blocks, "need_start": cache.need(input_len), "need_end": cache.need(most), "worst": cap * cache.need(most),
             "cap": cap, "admitted": admitted, "fits": fits, "demand": demand, "demand_over_room": demand / cache.blocks,
             "must": demand > cache.blocks, "rules_reason": "",
             **{f"{ahead}{name}": None for ahead in ("", "ahead_") for name in ("rules", "rules_before", "first_batch", "read_again")}}
    if not seats or not budget:
        return found | {"rules_reason": "seats or step budget were left at the engine's default and not said"}
    try:
        played = {ahead: block_rules.play(cache, requests, input_len, output_len, seats, budget, whole_prompt, head)
                  for ahead, head in (("", None), ("ahead_", 1))}
    except ValueError as problem:
        return found | {"rules_reason": str(problem)}
    for ahead, outcome in played.items():
        found |= {f"{ahead}rules": outcome.preemptions, f"{ahead}rules_before": outcome.before_first_end,
                  f"{ahead}first_batch": outcome.first_batch, f"{ahead}read_again": outcome.read_again_tokens}
    return found | {"must": any(outcome.preemptions for outcome in played.values())}


def bounds(arms: ArmSet) -> pd.DataFrame:
    """One row an arm and load: arm, load, num_prompts, input_len, output_len, the entries of `bound`, and reason where there is no cache.

    `input_len` is the longest prompt as the server counted it: one token more than was asked for can take one more block.
    """
    rows = []
    frame = points(arms)
    for arm, load in _pairs(frame):
        row = frame[(frame["arm"] == arm) & (frame["load"] == load)].iloc[0]
        run = arms[arm]
        cache, reason = cache_of(run)
        counted = run.frame("requests", int(row["point"]))["prompt_tokens"].max()
        row = row if pd.isna(counted) else row.mask(row.index == "input_len", counted)
        entry = {"arm": arm, "load": load, **{name: int(row[name]) for name in ("num_prompts", "input_len", "output_len")}, "reason": reason}
        if cache is not None:
            entry |= bound(cache, entry["num_prompts"], entry["input_len"], entry["output_len"], seats_of(run),
                           run.said.get("max_num_batched_tokens"), whole_prompt_rule(run.document["engine"]["version"]))
        rows.append(entry)
    return pd.DataFrame(rows)


def seats_of(run: Run) -> int | None:
    """max_num_seqs of the arm, or None where it was left at the engine's default."""
    return run.document["flags"].get("max-num-seqs")


def _pairs(frame: pd.DataFrame) -> list[tuple[str, str]]:
    return list(dict.fromkeys(zip(frame["arm"], frame["load"], strict=True))) if len(frame) else []


def raw_rows(run: Run, index: int) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Requests, chunks and metrics of a point; the metrics with one sample before it and one after, so that no counter is cut short."""
    point = next(each for each in run.points if each["point"] == index)
    start, end = (round(point[name] / UNIT_S) for name in ("start_s", "end_s"))
    every = run.frame("metrics").sort_values("time", ignore_index=True)
    first, last = (int(every["time"].searchsorted(time, side=side)) for time, side in ((start, "left"), (end, "right")))
    return run.frame("requests", index), run.frame("chunks", index), every.iloc[max(0, first - 1) : last + 1].reset_index(drop=True)


# --- what was counted -------------------------------------------------------------------------------------------------


def counts(arms: ArmSet) -> pd.DataFrame:
    """One row a measured point: the columns of `points` and

    raw         what the counter gained (null: not sampled)        preemptions  the count to quote; null where `raw` proves nothing
    proof       `counted` (above zero), `control` (zero, and the same server's counter moved elsewhere), `room` (zero, and by the
                room formula all that may ever run together fit at their end; no sample shows a full cache), or "" with `why`
    before, after, first_batch, first_end_s, end_s   see `onset`    head  requests whose first token came in the first step of all
    excess, excess_out  prompt tokens that the server counted beyond those sent,
                and generated ones beyond those received; null where a request has no count of its own
    usage_max   largest sampled share of the cache, 0 to 1         pauses  answers that stopped while others went on, see `pauses`
    """
    frame = points(arms)
    if frame.empty:
        return frame
    bound_of = {(row["arm"], row["load"]): row for row in bounds(arms).to_dict("records")}
    rows = []
    for row in frame.to_dict("records"):
        run, index = arms[row["arm"]], int(row["point"])
        requests, chunks, metrics = raw_rows(run, index)
        start, end = first_s(requests["sent"]), last_s(requests["end"])
        time, used, _ = series(metrics, "kv_cache_usage")
        used = used[(time >= start) & (time <= end)]
        usage = float(used.max()) if used.size else None
        raw, why = _known(row["preemptions"]), ""
        if raw is None:
            raw, why = counter_delta(metrics, "preemptions_total", start, end)
        paused = pauses(requests, chunks)
        split = onset(requests, paused)
        proof, quoted = "", None
        if raw:
            proof, quoted = "counted", raw
        elif raw == 0:
            proof, why = _zero(arms, row, bound_of[row["arm"], row["load"]], usage)
            quoted = 0 if proof else None
        excess, excess_out = (_excess(requests, metrics, *names, start, end) for names in (("prompt_tokens_total", "prompt_tokens"),
                                                                                           ("generation_tokens_total", "output_tokens")))
        rows.append(row | {"raw": raw, "preemptions": quoted, "proof": proof, "why": why, "usage_max": usage,
                           "excess": excess, "excess_out": excess_out, "pauses": len(paused), "head": _head(requests, chunks),
                           "duration_s": end - start, **split})
    found = pd.DataFrame(rows)
    whole = ("raw", "preemptions", "before", "after", "first_batch", "head", "excess", "excess_out")
    return found.astype({name: "Int64" for name in whole})


def _zero(arms: ArmSet, row: dict[str, Any], expected: dict[str, Any], usage: float | None) -> tuple[str, str]:
    """Whether a counter that stayed still means that nothing happened: (proof, reason)."""
    frame = points(arms)  # never a load under the profiler
    here = frame[(frame["arm"] == row["arm"]) & (frame["server_start"] == row["server_start"])]
    if (pd.to_numeric(here["preemptions"], errors="coerce").fillna(0) > 0).any():
        return "control", "the same server's counter moved under another load"
    if expected["reason"]:
        return "", f"the counter never moved on this server, and what fits is not known: {expected['reason']}"
    if expected["worst"] <= expected["usable"] and not (usage is not None and usage >= 1):
        return "room", f"the counter never moved on this server; the load can never hold more than {expected['worst']} of {expected['usable']} blocks"
    return "", "the counter never moved on this server, so its zero proves nothing"


def _excess(requests: pd.DataFrame, metrics: pd.DataFrame, counter: str, column: str, start: float, end: float) -> int | None:
    """What a token counter gained beyond the tokens of the requests themselves; None where either is not known."""
    gained, own = counter_delta(metrics, counter, start, end)[0], requests.loc[requests["sent"].notna(), column]
    return None if gained is None or own.isna().any() else gained - int(own.sum())


def _known(value: Any) -> int | None:
    return None if value is None or pd.isna(value) else int(value)


def onset(requests: pd.DataFrame, paused: pd.DataFrame) -> dict[str, Any]:
    """Pauses that began until the first request ended, and from then on; and how many requests had begun by then.

    Until the first end blocks come back only from those that are put out, so the batch can only over-fill; what comes later is how
    the server lives with it. `paused`: of `pauses`. The counter cannot tell the two apart, see `lateness`. Returns first_end_s and
    end_s (seconds since the first request was sent), before, after, first_batch; all null where no request completed.
    """
    start, end = first_s(requests["sent"]), last_s(requests["end"])
    first_end = first_s(requests.loc[requests["outcome"] == "completed", "end"])
    if math.isnan(first_end) or math.isnan(start):
        return dict.fromkeys(("first_end_s", "end_s", "before", "after", "first_batch"))
    before = int((ticks(paused["start"]) * UNIT_S < first_end).sum())
    return {"first_end_s": first_end - start, "end_s": end - start, "before": before, "after": len(paused) - before,
            "first_batch": int((ticks(requests["first_token"]) * UNIT_S < first_end).sum())}


def _head(requests: pd.DataFrame, chunks: pd.DataFrame) -> int | None:
    """How many first tokens came in the first step of all; None where none came."""
    gaps = chunks[chunks["tokens"] > 0].sort_values(["request", "time"]).groupby("request")["time"].diff()
    first = requests["first_token"].dropna()
    # The tokens of one step arrive one after another: half a step tells two steps apart.
    return int((first <= first.min() + gaps.median() / 2).sum()) if len(first) and gaps.notna().any() else None


def lateness(requests: pd.DataFrame, paused: pd.DataFrame, metrics: pd.DataFrame) -> dict[str, Any] | None:
    """What the counter showed in its last sample before the first paused request came back; None where that cannot be said.

    vLLM notes a preemption with the request and reports it with the request's next token (`take_events` in the scheduler, 0.32.0). So its
    counter moves when somebody comes back. Returns at_s (the sample, seconds since the first request was sent), begun (pauses so far) and
    counted (what the counter had gained).
    """
    time, value, why = series(metrics, "preemptions_total")
    if why or paused.empty:
        return None
    start = first_s(requests["sent"])
    between = np.flatnonzero((time > float(paused["start"].min()) * UNIT_S) & (time < float(paused["end"].min()) * UNIT_S))
    before = np.flatnonzero(time <= start)
    if not between.size or not before.size:
        return None
    at = between[-1]
    return {"at_s": float(time[at]) - start, "begun": int((ticks(paused["start"]) * UNIT_S < time[at]).sum()),
            "counted": round(value[at] - value[before[-1]])}


# --- who was put out --------------------------------------------------------------------------------------------------


def pauses(requests: pd.DataFrame, chunks: pd.DataFrame) -> pd.DataFrame:
    """Stretches in which one answer stopped while others went on: one row each, by time.

    Columns: request, start, end (record units), pause_s, missed (tokens that the busiest other request received meanwhile),
    place and behind (how many requests of the batch that went on stood before and behind it, see `_with_places`), tokens_before. A slow
    step stops everybody for one token and is not among them: somebody else must have received `LEAST_STEPS` at least.
    A request that was put out before its first token leaves no trace here.
    """
    columns = ["request", "start", "end", "pause_s", "missed", "place", "behind", "tokens_before"]
    ordered = chunks[chunks["tokens"] > 0].sort_values(["request", "time"], kind="stable", ignore_index=True)
    if ordered.empty:
        return pd.DataFrame(columns=columns)
    before = ordered.groupby("request")["time"].shift()
    gap = ordered["time"] - before
    typical = float(gap.median()) if gap.notna().any() else 0.0
    # Only a gap of several typical ones can hold several tokens of somebody else.
    chosen = ordered.assign(start=before, so_far=ordered.groupby("request")["tokens"].cumsum() - ordered["tokens"])[gap > 1.5 * typical]
    by_time = ordered.sort_values("time", kind="stable")
    times, owners, sizes = (by_time[name].to_numpy() for name in ("time", "request", "tokens"))
    rows = []
    for row in chosen.itertuples():
        inside = slice(np.searchsorted(times, row.start, side="right"), np.searchsorted(times, row.time, side="left"))
        if inside.stop <= inside.start:
            continue
        received = np.bincount(owners[inside].astype(int), weights=sizes[inside])
        if received.max() >= LEAST_STEPS:
            rows.append((row.request, row.start, row.time, (row.time - row.start) * UNIT_S, int(received.max()), None, None, row.so_far))
    found = pd.DataFrame(rows, columns=columns).sort_values(["start", "request"], kind="stable", ignore_index=True)
    return _with_places(found, by_time, typical)


def _with_places(found: pd.DataFrame, by_time: pd.DataFrame, typical: float) -> pd.DataFrame:
    """Where each paused request stood in the running list: how many that went on got their token of that step before and after it.

    The engine runs through its running list, which is in order of admission, and hands out the tokens of a step in that order. So the
    order of arrival within a step is that of the list. Who was put out in the same step is not among those that went on.
    """
    times, owners = by_time["time"].to_numpy(float), by_time["request"].to_numpy()
    places, behinds = [], []
    for row in found.itertuples():
        near = slice(np.searchsorted(times, row.start - typical / 2), np.searchsorted(times, row.start + typical / 2))
        too = set(found.loc[(found["start"] - row.start).abs() <= typical / 2, "request"])
        others = [(owner, time) for owner, time in zip(owners[near], times[near], strict=True) if owner not in too]
        places.append(len({owner for owner, time in others if time <= row.start}))
        behinds.append(len({owner for owner, time in others if time > row.start}))
    return found.assign(place=places, behind=behinds)


def read_again(steps: pd.DataFrame, longest_prompt: float | None) -> pd.Series:
    """Tokens that each step of a trace worked out a second time, as far as the engine's mark shows: whole numbers, by row of `trace.steps`.

    A request that comes back after a preemption reads its prompt and its answer so far. The mark shows that in one of two ways, which
    depends on the version: as more generation tokens than running requests, or as a context request with more tokens than any prompt has
    (`longest_prompt`, tokens; None: this way cannot be told from a prompt). One token a request is new in either case. Nothing guesses tokens
    ahead in this post; that would look like the first way.
    """
    again = (steps["generation_tokens"] - steps["generation_requests"]).clip(lower=0)
    if longest_prompt is None or pd.isna(longest_prompt):
        return again
    longer = steps["context_tokens"] > steps["context_requests"] * longest_prompt
    return again + (steps["context_tokens"] - steps["context_requests"]).where(longer, 0)


# --- what it costs ----------------------------------------------------------------------------------------------------


def price(found: pd.DataFrame, roomy: str, cut: str) -> pd.DataFrame:
    """One row a load and repeat that two arms share, from `counts`: load, repeat, and for both (natural_, cut_) duration_s, output_tok_s,
    completed, num_prompts, e2e and stall (p50, max; ms); duration_x and e2e_p50_x, cut over natural. Valid points only; may be empty."""
    columns = ["duration_s", "output_tok_s", "completed", "num_prompts", "e2e_p50_ms", "e2e_max_ms", "stall_p50_ms", "stall_max_ms"]
    sides = [found[(found["arm"] == arm) & found["valid"].astype(bool)].set_index(["load", "repeat"])[columns].add_prefix(f"{name}_")
             for name, arm in (("natural", roomy), ("cut", cut))]
    joined = sides[0].join(sides[1], how="inner").reset_index()
    for name in ("duration_s", "e2e_p50_ms"):
        stem = name.rpartition("_")[0]
        joined[f"{stem}_x"] = pd.to_numeric(joined[f"cut_{name}"], errors="coerce") / pd.to_numeric(joined[f"natural_{name}"], errors="coerce")
    return joined


def samples(requests: pd.DataFrame, chunks: pd.DataFrame, latency: str) -> pd.Series:
    """One observed value a completed request, in seconds, by request: `e2e` (from the intended time), `ttft` or `stall`."""
    done = requests[requests["outcome"] == "completed"].set_index("request")
    if latency == "stall":
        return request_stalls(chunks[chunks["request"].isin(done.index)])
    until = {"e2e": "end", "ttft": "first_token"}[latency]
    return pd.Series((ticks(done[until]) - ticks(done["intended"])) * UNIT_S, index=done.index, name=latency)
