"""What Part 4, cache starvation, says of its records.

What:   `look` reads a set once; `numbers` and `published` name its numbers; `verdict` says whether the shape held; `timelines`, `prices`
        and `traces` are what the page shows one of at a time.
Why:    the page, the home page and the table of rigs must say the same, also when an arm is refused or nobody was put out.
Use:    found = look(arms); numbers(arms)["headline"]; verdict(found)
Not:    the analysis (`starvation`, `cache_room`, `block_rules`), the author's runs (`starvation_published`), sentences, tables and
        figures (`starvation_words`, `starvation_tables`, `starvation_figures`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from . import cache_room, headline, starvation, starvation_figures
from .arms import ArmSet
from .samples import sampling_s, series
from .starvation import CONTROL
from .starvation_published import published

LOADS = (CONTROL, "balanced", "long")  # named by every rig; a rig may add others
__all__ = ["Findings", "Traced", "look", "numbers", "published", "verdict"]
NO_PAIR = "needs a natural and a cut cache, both measured"


@dataclass(frozen=True)
class Findings:
    """One set of records, looked at once. `natural` and `cut` are arm names or null; `counts` has one row a measured flood."""

    arms: ArmSet
    natural: str | None
    cut: str | None
    bounds: pd.DataFrame
    counts: pd.DataFrame
    price: pd.DataFrame
    victims: pd.DataFrame  # pauses of the control on the smallest cache, see `starvation.pauses`
    late: dict[str, Any] | None  # how far the counter was behind them, see `starvation.lateness`

    def point(self, arm: str | None, load: str) -> dict[str, Any] | None:
        """The first valid flood of a load on an arm, as a row of `counts`; null where there is none."""
        rows = self.rows(arm, load)
        rows = rows[rows["valid"].astype(bool)] if len(rows) else rows
        return rows.iloc[0].to_dict() if len(rows) else None

    def rows(self, arm: str | None, load: str) -> pd.DataFrame:
        return self.counts if self.counts.empty else self.counts[(self.counts["arm"] == arm) & (self.counts["load"] == load)]

    def bound(self, arm: str | None, load: str) -> dict[str, Any]:
        rows = self.bounds[(self.bounds["arm"] == arm) & (self.bounds["load"] == load)] if len(self.bounds) else self.bounds
        return rows.iloc[0].to_dict() if len(rows) else {}

    @property
    def loads(self) -> list[str]:
        return list(dict.fromkeys(self.counts["load"])) if len(self.counts) else []


@dataclass(frozen=True)
class Traced:
    """One load under the profiler: its row of `points.jsonl`, the excerpt (null: `reason` says why) and the longest prompt in tokens."""

    name: str
    point: dict[str, Any]
    path: Path | None
    reason: str
    longest: float | None


def look(arms: ArmSet) -> Findings:
    """Bounds, counts and price of a set. Never raises for a missing or refused arm; what is not there is null or empty."""
    roomy, cut = starvation.natural(arms), starvation.tightest(arms)
    counts = starvation.counts(arms)
    price = starvation.price(counts, roomy, cut) if roomy and cut and len(counts) else pd.DataFrame()
    found = Findings(arms, roomy, cut, starvation.bounds(arms), counts, price, pd.DataFrame(), None)
    control = found.point(cut, CONTROL)
    if control is None:
        return found
    run, index = arms[cut], int(control["point"])
    requests, chunks, metrics = starvation.raw_rows(run, index)
    victims = starvation.pauses(requests, chunks)
    return Findings(arms, roomy, cut, found.bounds, counts, price, victims, starvation.lateness(requests, victims, metrics))


def none_of(value: Any) -> Any:
    """The value, or None for any way in which a table says that it has none."""
    return None if value is None or (not isinstance(value, str | list) and pd.isna(value)) else value


# --- named numbers ----------------------------------------------------------------------------------------------------


def numbers(arms: ArmSet) -> dict[str, dict[str, Any]]:
    """All named numbers of a set of Part 4. Names start with the side (`natural_`, `cut_`: the smallest cache) and the load."""
    found = look(arms)
    book = headline.Book(arms.first)
    _setup(book, found)
    for side, arm in (("natural", found.natural), ("cut", found.cut)):
        book.run = arms[arm] if arm else arms.first
        _cache(book, side, arm, found)
        for load in dict.fromkeys([*LOADS, *found.loads]):
            _flood(book, side, arm, load, found)
    book.run = arms[found.cut] if found.cut else arms.first
    for load in dict.fromkeys([*LOADS, *found.loads]):
        rows = found.price[found.price["load"] == load] if len(found.price) else found.price
        for name in ("duration_x", "e2e_p50_x"):
            book.put(f"{load}_{name}", rows.iloc[0][name] if len(rows) else None, "x", reason=NO_PAIR if rows.empty else "not recorded")
    _who(book, found)
    shape, because = verdict(found)
    why = because if shape == "not measured here" else "no positive control on a cut cache was counted"
    book.put("headline", headline_text(found), reason=why)
    printed = published()
    book.put("headline_published", f"{printed['starvation_low']['value']:.0f} to {printed['starvation_high']['value']:.0f} preemptions, "
                                   f"first published as {printed['starvation_seed']['value']:.0f}")
    book.put("shape", shape)
    book.put("shape_because", because)
    return book.entries


def _setup(book: headline.Book, found: Findings) -> None:
    headline.setup(book)
    book.put("points", len(found.counts), "points")
    book.put("invalid_points", int((~found.counts["valid"].astype(bool)).sum()) if len(found.counts) else 0, "points")
    time, _, why = series(found.arms.first.frame("metrics"), "running")
    book.put("sampling_s", None if why else sampling_s(time), "s", reason=why)
    book.put("repeats", int(found.counts["repeat"].max()) + 1 if len(found.counts) else None, "repeats", reason="no flood was measured")


def _cache(book: headline.Book, side: str, arm: str | None, found: Findings) -> None:
    room = cache_room.room(found.arms[arm]) if arm else cache_room.Room(None, f"no arm with a {side} cache was measured")
    cache, why = room.cache, room.reason
    book.put(f"{side}_arm", arm, reason=why)
    book.put(f"{side}_blocks", cache.blocks + 1 if cache else None, "blocks", reason=why)
    book.put(f"{side}_usable", cache.blocks if cache else None, "blocks", reason=why)
    book.put(f"{side}_block_size", cache.block_size if cache else None, "tokens", reason=why)
    book.put(f"{side}_state_blocks", cache.state_blocks if cache else None, "blocks", reason=why)
    state = None if cache is None else "the model's layers" if room.from_layers else "the server's number"
    book.put(f"{side}_state_from", state, reason=why)
    book.put(f"{side}_longest_fit", room.fits, "requests", reason=why or "the server did not say its longest request")
    book.put(f"{side}_longest_formula", room.formula, "requests", reason=why or "the server did not say its longest request")
    book.put(f"{side}_longest_said", room.printed, "requests", reason=why or "the server did not say")


def _flood(book: headline.Book, side: str, arm: str | None, load: str, found: Findings) -> None:
    bound, point, stem = found.bound(arm, load), found.point(arm, load), f"{side}_{load}"
    why = "was not measured" if arm is None or not bound else bound.get("reason") or "not recorded"
    for name, unit in (("num_prompts", "requests"), ("input_len", "tokens"), ("output_len", "tokens"), ("need_start", "blocks"),
                       ("need_end", "blocks"), ("admitted", "requests"), ("fits", "requests"), ("demand", "blocks"), ("demand_over_room", "x"),
                       *((f"{ahead}{name}", unit) for ahead in ("", "ahead_") for name, unit in
                         (("rules", "preemptions"), ("rules_before", "preemptions"), ("first_batch", "requests"), ("read_again", "tokens")))):
        value = none_of(bound.get(name))
        whole = value is not None and name != "demand_over_room"
        book.put(f"{stem}_{name}", int(value) if whole else value, unit, reason=bound.get("rules_reason") or why)
    rows = found.rows(arm, load)
    why = "was not measured" if rows.empty else "no valid point" if point is None else "not recorded"
    point = point or {}
    for name, unit in (("preemptions", "preemptions"), ("before", "answers"), ("after", "answers"), ("first_batch", "requests"), ("excess", "tokens"),
                       ("excess_out", "tokens"), ("pauses", "answers"), ("completed", "requests"), ("running_max", "requests"),
                       ("waiting_max", "requests")):
        value = none_of(point.get(name))
        told = point.get("why") if name == "preemptions" else None
        book.put(f"{stem}_{name}", None if value is None else int(value), unit, reason=told or why)
    for name, unit, factor in (("usage_max", "%", 100), ("duration_s", "s", 1), ("first_end_s", "s", 1), ("output_tok_s", "tok/s", 1)):
        value = none_of(point.get(name))
        book.put(f"{stem}_{name.replace('usage_max', 'usage_percent')}", None if value is None else value * factor, unit, reason=why)
    for latency in ("ttft", "e2e", "stall"):
        for statistic in ("p50_ms", "p90_ms", "max_ms"):
            n = none_of(point.get(f"{latency}_n"))
            book.put(f"{stem}_{latency}_{statistic}", none_of(point.get(f"{latency}_{statistic}")), "ms", n=n,
                     reason=why if n is None else f"n = {n:.0f} cannot bear it")


def _who(book: headline.Book, found: Findings) -> None:
    victims = found.victims
    why = "no valid control on a cut cache" if found.point(found.cut, CONTROL) is None else "no answer stopped while others went on"
    seen = bool(len(victims))
    book.put("victims", len(victims) if found.point(found.cut, CONTROL) is not None else None, "answers", reason=why)
    book.put("victims_last_in", int((victims["behind"] == 0).sum()) if seen else None, "answers", reason=why)
    book.put("victims_longest_s", float(victims["pause_s"].max()) if seen else None, "s", reason=why)
    book.put("victims_shortest_s", float(victims["pause_s"].min()) if seen else None, "s", reason=why)


def headline_text(found: Findings) -> str | None:
    """`8 preemptions in the positive control`, a range over repeats; null where nothing was counted, or nobody had to go."""
    rows = found.rows(found.cut, CONTROL)
    known = [] if rows.empty else [int(value) for value in rows.loc[rows["valid"].astype(bool), "preemptions"].dropna()]
    if not known or (not any(known) and not none_of(found.bound(found.cut, CONTROL).get("must"))):
        return None
    low, high = min(known), max(known)
    return f"{amount(low, 'preemption') if low == high else f'{low} to {high} preemptions'} in the positive control"


def either(bound: dict[str, Any], name: str) -> str | None:
    """What the rules give, all at once or with the first request one step ahead: `8` or `8 or 9`; null where they could not be played."""
    both = [none_of(bound.get(f"{ahead}{name}")) for ahead in ("", "ahead_")]
    return None if None in both else " or ".join(f"{int(value):,}" for value in sorted(set(both)))


def amount(number: int, what: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def verdict(found: Findings) -> tuple[str, str]:
    """Whether the shape held: the cut cache preempts in the control, the natural one with room does not, and all complete, later.

    (`held`, `moved`, `did not hold` or `not measured here`, why). `moved`: the natural cache has no room for the control either. A cut cache
    that holds the control tests nothing.
    """
    cut, roomy = found.point(found.cut, CONTROL), found.point(found.natural, CONTROL)
    if cut is None or roomy is None:
        refused = "; ".join(f"{arm}: {why}" for arm, why in found.arms.refused.items())
        return "not measured here", f"the control needs a natural and a cut cache, each with a valid point{f' ({refused})' if refused else ''}"
    if none_of(cut["raw"]) is None or none_of(roomy["raw"]) is None:
        return "not measured here", f"preemptions were not counted: {cut['why'] or roomy['why']}"
    if not cut["raw"]:
        return _still(found)
    lost = int(cut["num_prompts"] - cut["completed"])
    if lost:
        return "did not hold", f"{amount(lost, 'request')} of the control did not complete on the cut cache"
    if roomy["raw"]:
        must = none_of(found.bound(found.natural, CONTROL).get("must"))
        if must is None:
            return "not measured here", f"the natural cache preempted {amount(int(roomy['raw']), 'time')}, and whether it had room is not known"
        if must:
            return "moved", f"the natural cache has no room for the control either and preempted {amount(int(roomy['raw']), 'time')}"
        return "did not hold", f"the natural cache preempted {amount(int(roomy['raw']), 'time')} although the load fits"
    if cut["duration_s"] <= roomy["duration_s"]:
        return "did not hold", "the control ended no later on the cut cache than on the natural one"
    if not roomy["proof"]:
        return "not measured here", f"the natural cache's zero is not proven: {roomy['why']}"
    return "held", (f"{amount(int(cut['raw']), 'preemption')} on the cut cache, none on the natural one, and all {int(cut['completed'])} requests "
                    f"completed, the last one {cut['duration_s'] / roomy['duration_s']:.2f} times as late")


def _still(found: Findings) -> tuple[str, str]:
    """The verdict where the counter of the cut cache stood still in the control: it is broken only where somebody had to go."""
    bound = found.bound(found.cut, CONTROL)
    must = none_of(bound.get("must"))
    if must is None:
        why = none_of(bound.get("reason")) or "not recorded"
        return "not measured here", f"the counter stood still in the control, and whether anybody had to be put out is not known ({why})"
    if must:
        return "did not hold", "the counter stood still in the positive control although somebody had to be put out"
    need = (f" (it asks for {int(bound['demand'])} of {amount(int(bound['usable']), 'block')})" if bound["demand"] <= bound["usable"] else
            " (some requests end before the others have grown)")
    return "not measured here", f"the cut cache holds the control{need}, so nothing was tested"


# --- what a page shows one of at a time ---------------------------------------------------------------------------------


def timelines(found: Findings) -> dict[str, Any]:
    """A figure a cache and load, the control on the smallest cache first: name to figure. May be empty."""
    order = list(dict.fromkeys([name for name in (found.cut, found.natural) if name] + list(found.arms.testable)))
    figures = {}
    for arm in order:
        for load in found.loads:
            rows = found.rows(arm, load)
            if len(rows):
                run, index = found.arms[arm], int((found.point(arm, load) or rows.iloc[0])["point"])
                figures[f"{arm}, {load}"] = starvation_figures.timeline(
                    *starvation.raw_rows(run, index), f"load {load} on {arm}", f"timeline_{arm}_{load}.csv")
    return figures


def prices(found: Findings) -> dict[str, Any]:
    """A figure a load that natural and smallest cache share: name to figure. May be empty."""
    figures = {}
    for load in found.loads:
        sides = {arm: point for arm in (found.natural, found.cut) if (point := found.point(arm, load)) is not None}
        if len(sides) == 2:
            figures[load] = starvation_figures.price({arm: tuple(found.arms[arm].frame(name, int(point["point"])) for name in ("requests", "chunks"))
                                                      for arm, point in sides.items()}, load)
    return figures


def traces(found: Findings) -> list[Traced]:
    """The loads that ran under the profiler, by arm and point. They are in no count, price or verdict. Empty where there was none."""
    traced = []
    for arm, run in found.arms.testable.items():
        for point in run.points:
            if point["pass"] == "trace":
                path, bench = run.trace(point["point"]), point.get("bench", {})
                why = bench.get("profile_error") or bench.get("trace", {}).get("reason") or "not recorded"
                longest = none_of(run.frame("requests", point["point"])["prompt_tokens"].max())
                traced.append(Traced(f"{arm}, {point['load']}", point, path, "" if path else why, longest))
    return traced
