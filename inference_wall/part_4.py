"""What Part 4, cache starvation, says of its records.

What:   `look` reads a set once; `numbers` and `published` name its numbers; the other functions give the sentences whose words depend
        on the data.
Why:    prose that is typed must stay true however a measurement comes out, also when an arm is refused or nothing was put out.
Use:    found = look(arms); numbers(arms)["headline"]; display(Markdown(result_sentence(found)))
Not:    the analysis (`starvation`, `block_rules`), the author's runs (`starvation_published`), tables and figures (`starvation_tables`,
        `starvation_figures`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from . import headline, starvation, starvation_figures
from .arms import ArmSet
from .starvation import CONTROL
from .starvation_published import published

LOADS = (CONTROL, "balanced", "long")  # named by every rig; a rig may add others
__all__ = ["Findings", "look", "numbers", "published", "verdict"]
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


def look(arms: ArmSet) -> Findings:
    """Bounds, counts and price of a set. Never raises for a missing or refused arm; what is not there is null or empty."""
    roomy, cut = starvation.natural(arms), starvation.tightest(arms)
    counts = starvation.counts(arms)
    price = starvation.price(counts, roomy, cut) if roomy and cut and len(counts) else pd.DataFrame()
    found = Findings(arms, roomy, cut, starvation.bounds(arms), counts, price, pd.DataFrame())
    control = found.point(cut, CONTROL)
    if control is None:
        return found
    run, index = arms[cut], int(control["point"])
    victims = starvation.pauses(run.frame("requests", index), run.frame("chunks", index))
    return Findings(arms, roomy, cut, found.bounds, counts, price, victims)


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
    book.put("headline", headline_text(found), reason="no positive control on a cut cache was counted")
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
    book.put("repeats", int(found.counts["repeat"].max()) + 1 if len(found.counts) else None, "repeats", reason="no flood was measured")


def _cache(book: headline.Book, side: str, arm: str | None, found: Findings) -> None:
    cache, why = starvation.cache_of(found.arms[arm]) if arm else (None, f"no arm with a {side} cache was measured")
    formula = starvation.formula_concurrency(found.arms[arm])[0] if arm else None
    said = found.arms[arm].said if arm else {}
    book.put(f"{side}_arm", arm, reason=why)
    book.put(f"{side}_blocks", cache.blocks + 1 if cache else None, "blocks", reason=why)
    book.put(f"{side}_usable", cache.blocks if cache else None, "blocks", reason=why)
    book.put(f"{side}_block_size", cache.block_size if cache else None, "tokens", reason=why)
    book.put(f"{side}_state_blocks", cache.state_blocks if cache else None, "blocks", reason=why)
    book.put(f"{side}_longest_formula", formula, "requests", reason=why)
    book.put(f"{side}_longest_said", said.get("max_concurrency"), "requests", reason=why or "the server did not say")


def _flood(book: headline.Book, side: str, arm: str | None, load: str, found: Findings) -> None:
    bound, point, stem = found.bound(arm, load), found.point(arm, load), f"{side}_{load}"
    why = "was not measured" if arm is None or not bound else bound.get("reason") or "not recorded"
    for name, unit in (("num_prompts", "requests"), ("input_len", "tokens"), ("output_len", "tokens"), ("need_start", "blocks"),
                       ("need_end", "blocks"), ("admitted", "requests"), ("fits", "requests"), ("demand", "blocks"), ("demand_over_room", "x"),
                       ("rules", "preemptions"), ("rules_before", "preemptions"), ("read_again", "tokens")):
        value = none_of(bound.get(name))
        whole = value is not None and name != "demand_over_room"
        book.put(f"{stem}_{name}", int(value) if whole else value, unit, reason=bound.get("rules_reason") or why)
    rows = found.rows(arm, load)
    why = "was not measured" if rows.empty else "no valid point" if point is None else "not recorded"
    point = point or {}
    for name, unit in (("preemptions", "preemptions"), ("before", "preemptions"), ("after", "preemptions"), ("excess", "tokens"),
                       ("pauses", "answers"), ("completed", "requests"), ("running_max", "requests"), ("waiting_max", "requests")):
        value = none_of(point.get(name))
        told = point.get("why") if name in ("preemptions", "before", "after") else None
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
    """`8 preemptions in the positive control`, a range over repeats; null where nothing was counted."""
    rows = found.rows(found.cut, CONTROL)
    known = [] if rows.empty else [int(value) for value in rows.loc[rows["valid"].astype(bool), "preemptions"].dropna()]
    if not known:
        return None
    low, high = min(known), max(known)
    return f"{_count(low, 'preemption') if low == high else f'{low} to {high} preemptions'} in the positive control"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def verdict(found: Findings) -> tuple[str, str]:
    """Whether the shape held: the cut cache preempts in the control, the natural one with room does not, and all complete, later.

    (`held`, `moved`, `did not hold` or `not measured here`, why). `moved`: the natural cache has no room for the control either.
    """
    cut, roomy = found.point(found.cut, CONTROL), found.point(found.natural, CONTROL)
    if cut is None or roomy is None:
        refused = "; ".join(f"{arm}: {why}" for arm, why in found.arms.refused.items())
        return "not measured here", f"the control needs a natural and a cut cache, each with a valid point{f' ({refused})' if refused else ''}"
    if none_of(cut["raw"]) is None or none_of(roomy["raw"]) is None:
        return "not measured here", f"preemptions were not counted: {cut['why'] or roomy['why']}"
    if not cut["raw"]:
        must = found.bound(found.cut, CONTROL).get("must")
        return "did not hold", "the counter stood still in the positive control" + (" although more blocks are needed than there are" if must else "")
    lost = int(cut["num_prompts"] - cut["completed"])
    if lost:
        return "did not hold", f"{_count(lost, 'request')} of the control did not complete on the cut cache"
    if roomy["raw"]:
        if found.bound(found.natural, CONTROL).get("must"):
            return "moved", f"the natural cache has no room for the control either and preempted {_count(int(roomy['raw']), 'time')}"
        return "did not hold", f"the natural cache preempted {_count(int(roomy['raw']), 'time')} although the load fits"
    if cut["duration_s"] <= roomy["duration_s"]:
        return "did not hold", "the control ended no later on the cut cache than on the natural one"
    if not roomy["proof"]:
        return "not measured here", f"the natural cache's zero is not proven: {roomy['why']}"
    return "held", (f"{_count(int(cut['raw']), 'preemption')} on the cut cache, none on the natural one, and all {int(cut['completed'])} requests "
                    f"completed, the last one {cut['duration_s'] / roomy['duration_s']:.2f} times as late")


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


def traces(found: Findings) -> dict[str, Path]:
    """The profiler's traces of the set: name to file. Empty where no load ran under the profiler."""
    return {f"{arm}, {point['load']}": path for arm, run in found.arms.testable.items() for point in run.points
            if point["pass"] == "trace" and (path := run.trace(point["point"])) is not None}


# --- sentences --------------------------------------------------------------------------------------------------------


def arms_sentence(found: Findings) -> str:
    """Which caches stand beside one another, and which do not and why. Markdown."""
    parts = [f"The caches that were measured: {', '.join(f'`{arm}`' for arm in found.arms.testable) or 'none'}."]
    parts += [f"The engine refused `{arm}`: {why}." for arm, why in found.arms.refused.items()]
    if found.arms.missing:
        parts.append(f"Not measured: {', '.join(f'`{arm}`' for arm in found.arms.missing)}. What the text says of them is left open.")
    return " ".join(parts)


def expectation_sentence(found: Findings) -> str:
    """What room formula and rules say of the control on the smallest cache, before the measurement. Markdown."""
    bound = found.bound(found.cut, CONTROL)
    if not bound or none_of(bound.get("admitted")) is None:
        return f"What must happen cannot be worked out here: {bound.get('reason') or NO_PAIR}."
    text = (f"On `{found.cut}` the control lets {int(bound['admitted'])} requests in, and {int(bound['fits'])} of them fit at their end. "
            f"Together they will ask for {int(bound['demand'])} blocks of {int(bound['usable'])}: ")
    text += "**somebody must be put out.**" if bound["must"] else "nobody has to be put out."
    if none_of(bound.get("rules")) is not None:
        text += (f" Played to the end, the rules give **{_count(int(bound['rules']), 'preemption')}**, {int(bound['rules_before'])} of them before "
                 f"the first request ends, and {_count(int(bound['read_again']), 'token')} to be worked out again.")
    return text


def result_sentence(found: Findings) -> str:
    """The result, whichever way it came out. Markdown."""
    shape, because = verdict(found)
    opening = {"held": "The shape of the series' correction held", "moved": "The shape held, in another place",
               "did not hold": "The shape did not hold", "not measured here": "No verdict here"}[shape]
    return f"**{opening}:** {because}."


def zero_sentence(found: Findings) -> str:
    """Which zeros may be believed. Markdown."""
    if found.counts.empty:
        return "No flood was measured."
    names = {"control": "is a zero of a counter that was seen to move on the same server", "room": "is zero by arithmetic: the load fits at its end"}
    parts = []
    for proof, text in names.items():
        rows = found.counts[found.counts["proof"] == proof]
        if len(rows):
            parts.append(f"{_listed(rows)} {text}.")
    unknown = found.counts[found.counts["preemptions"].isna()]
    if len(unknown):
        parts.append(f"{_listed(unknown)} is **unknown**: {'; '.join(dict.fromkeys(unknown['why']))}.")
    return " ".join(parts) or "Every load moved the counter, so there is no zero to defend."


def _listed(rows: pd.DataFrame) -> str:
    return ", ".join(dict.fromkeys(f"`{arm}`/{load}" for arm, load in zip(rows["arm"], rows["load"], strict=True)))


def rules_sentence(found: Findings) -> str:
    """How the counts compare with the rules alone. Markdown."""
    rows = [(row, found.bound(row["arm"], row["load"]).get("rules")) for row in found.counts.to_dict("records")] if len(found.counts) else []
    known = [(int(row["raw"]), int(rules), row) for row, rules in rows if none_of(row["raw"]) is not None and none_of(rules) is not None]
    if not known:
        return "The counts cannot be compared with the rules here."
    off = [f"`{row['arm']}`/{row['load']}: counted {raw}, by the rules {rules}" for raw, rules, row in known if raw != rules]
    same = len(known) - len(off)
    text = f"Of {_count(len(known), 'flood')}, {same} moved the counter exactly as often as the rules say."
    return text + (f" The others: {'; '.join(off)}." if off else "")


def onset_sentence(found: Findings) -> str:
    """Whether preemptions belong to the start of the flood or go on. Markdown."""
    point = found.point(found.cut, CONTROL)
    if point is None or none_of(point["before"]) is None or none_of(point["after"]) is None or not point["raw"]:
        return "How preemptions spread over the control cannot be said here: none was counted."
    before, after, first, end = int(point["before"]), int(point["after"]), point["first_end_s"], point["end_s"]
    text = f"Until the first request ended, at {first:.1f} s, the counter rose by {before}; in the {end - first:.1f} s after that by {after}. "
    if not after:
        return text + "It is an **onset**: the batch over-fills once, and what is put out then comes back when there is room."
    if not before:
        return text + "It is **churn**: nobody was put out while the batch first filled."
    rates = before / first, after / (end - first)
    more = "more" if rates[1] > rates[0] else "less"
    return text + (f"That is {rates[0]:.2f} a second, then {rates[1]:.2f}: an onset, and after it **churn**, which is {more} dense.")


def victims_sentence(found: Findings) -> str:
    """Who was put out in the control on the smallest cache. Markdown."""
    point, victims = found.point(found.cut, CONTROL), found.victims
    if point is None:
        return "Who was put out cannot be said: the control was not measured on a cut cache."
    counted = none_of(point["raw"])
    if victims.empty:
        return f"No answer stopped while others went on; the server counted {'nothing that is known' if counted is None else counted}."
    last = int((victims["behind"] == 0).sum())
    who = sorted(set(victims["request"]))
    counted = "an unknown number" if counted is None else _count(int(counted), "preemption")
    text = (f"In the streams {_count(len(victims), 'pause')} began while others went on, each of {victims['pause_s'].min():.2f} to "
            f"{victims['pause_s'].max():.2f} s; the server counted {counted}. ")
    text += f"At {last} of {len(victims)} nobody in the batch had been let in later"
    text += ": **last in, first out.**" if last == len(victims) else "."
    return text + f" By arrival they were numbers {_ranges([int(each) + 1 for each in who])} of {int(point['num_prompts'])}."


def _ranges(numbers_of: list[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers_of:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join(f"{span[0]} to {span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


def unseen_sentence(found: Findings) -> str:
    """Whether the token counter shows what was worked out twice. Markdown."""
    point, bound = found.point(found.cut, CONTROL), found.bound(found.cut, CONTROL)
    if point is None or none_of(point["excess"]) is None:
        return "Whether the server's token counter shows the work done twice cannot be said here."
    again = none_of(bound.get("read_again"))
    claim = "" if again is None else f" By the rules {_count(int(again), 'token')} were worked out twice."
    if point["excess"] == 0:
        return f"The server's counter of prompt tokens rose by exactly what was sent: an excess of **0** tokens.{claim} The counter sees none of it."
    return f"The server's counter of prompt tokens rose by {int(point['excess']):,} more than was sent.{claim}"


def price_sentence(found: Findings) -> str:
    """What the cut cache costs each load. Markdown."""
    rows = found.price[found.price["repeat"] == found.price["repeat"].min()] if len(found.price) else found.price
    if rows.empty:
        return f"The price cannot be given: it {NO_PAIR}."
    parts = [f"{row.load} took {row.duration_x:.2f} times as long ({int(row.cut_completed)} of {int(row.cut_num_prompts)} completed)"
             for row in rows.itertuples()]
    return f"With `{found.cut}` instead of `{found.natural}`: {'; '.join(parts)}."
