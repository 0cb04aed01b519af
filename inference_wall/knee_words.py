"""The knee of a sweep in words: where it is, how firm that is over the repeats, and whether the sweep has reached it at all.

What:   `sentence(found, frame)` puts the result of `stats.knee` into Markdown; `stops_short(frame, slo)` says why a sweep ends before the wall.
Why:    a bracket by the worst of a few repeats can be a matter of chance. Whoever reads it should see what each repeat says by itself, which of the
        two conditions failed, and whether anybody waited too long.
Use:    sentence(stats.knee(sweep, slo), sweep)
Not:    finding the knee (`knee`), the table of rates (`tables.knee_table`).
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from .knee import WHOLE_POINT, knee


def sentence(found: dict[str, Any], frame: pd.DataFrame | None = None) -> str:
    """The result of `stats.knee` as Markdown, whichever way it came out; with the sweep's frame also how firm it is over the repeats."""
    low, high = found["bracket"]
    texts = {
        "bracketed": f"**The wall stands between {rate_text(low)} and {rate_text(high)} requests a second.**",
        "no knee in range": f"**No wall was found:** every offered load up to {rate_text(low)} requests a second met the service level.",
        "fails at the lowest rate": f"**Already the lightest load, {rate_text(high)} requests a second, missed the service level.** "
                                    "The wall is below it.",
        "not monotone": f"**The wall is not sharp here:** {rate_text(high)} requests a second missed the service level, yet a heavier load met it. "
                        f"The last load below it that held was {rate_text(low)}.",
        "cannot judge": "**No verdict:** no point can bear the percentile of the service level, or none is valid.",
    }
    notes = [f"{note[:1].upper()}{note[1:]}." for note in found["notes"] if note and (frame is None or note != WHOLE_POINT)]
    places = [] if frame is None else _by_repeat(found, frame)
    firm = [] if frame is None else [*_firmness(found, frame, places), *_whole_points(frame)]
    if found["status"] == "bracketed" and places:
        lows, highs = ([one["bracket"][end] for one in places if one["bracket"][end] is not None] for end in (0, 1))
        if lows and highs and (min(lows), max(highs)) != (low, high):
            end = rate_text(max(highs)) if all(one["bracket"][1] is not None for one in places) else "beyond the heaviest load"
            texts["bracketed"] = (
                f"**The wall stands between {rate_text(low)} and {rate_text(high)} requests a second by the strict rule: the worst repeat counts. "
                f"Over the repeats it lies anywhere from {rate_text(min(lows))} to {end}:** these points are too few and too short "
                "to say more.")
    short = "" if frame is None else stops_short(frame, found["slo"])
    if short:
        rest = texts[found["status"]].replace("**", "")
        return " ".join([f"**{short[:1].upper()}{short[1:]}.** What the strict rule says, for the record: {rest}", *firm, *notes])
    return " ".join([texts[found["status"]], *firm, *notes])


def stops_short(frame: pd.DataFrame, slo: dict[str, Any]) -> str:
    """Why the sweep ends before the wall; empty where it does not, or where nobody can tell.

    It does when at the heaviest finite load no repeat made visitors wait too long, and most repeats met the whole service level.
    """
    finite = frame[(frame["pass"] == "measured") & (frame["request_rate"] != math.inf)]
    heaviest = finite[finite["request_rate"] == finite["request_rate"].max()]
    verdicts = [[each["verdict"] for asked in ({**slo, "completed_ratio": 0.0}, slo) for each in knee(part, asked)["rates"]]
                for _, part in heaviest.groupby("repeat")]
    whole = sum(each[1:] == ["meets"] for each in verdicts)
    if not verdicts or any(each[:1] != ["meets"] for each in verdicts) or 2 * whole <= len(verdicts):
        return ""
    many = "its only repeat" if len(verdicts) == 1 else f"{whole} of its {len(verdicts)} repeats"
    return (f"the heaviest finite load, {rate_text(heaviest['request_rate'].iloc[0])} a second, made nobody wait too long and met the service level "
            f"in {many}: the sweep ends before the wall, which lies further up")


def _by_repeat(found: dict[str, Any], frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The knee of each repeat by itself, where there are several; a load that was measured once stands for every repeat."""
    repeats = sorted(frame.loc[frame["pass"] == "measured", "repeat"].unique())
    once = _measured_once(frame)
    return [knee(frame[(frame["repeat"] == repeat) | once], found["slo"]) for repeat in repeats] if len(repeats) > 1 else []


def _measured_once(frame: pd.DataFrame) -> pd.Series:
    return frame[frame["pass"] == "measured"].groupby("request_rate")["repeat"].transform("nunique").reindex(frame.index) == 1


def _firmness(found: dict[str, Any], frame: pd.DataFrame, each: list[dict[str, Any]]) -> list[str]:
    """How much the bracket rests on: why the first load failed, the bracket of each repeat (`each`: `_by_repeat`), and that of the wait for a first
    token alone."""
    high, said = found["bracket"][1], []
    if high is not None:
        said.append(f"At {rate_text(high)} the reason was: {next(rate['reason'] for rate in found['rates'] if rate['request_rate'] == high)}.")
    if each:
        once = _measured_once(frame)
        places = list(dict.fromkeys(_place(one) for one in each))
        alone = ", ".join(rate_text(rate) for rate in sorted(frame.loc[once & (frame["pass"] == "measured"), "request_rate"].unique()))
        alone = f" ({alone} a second was measured once and counts for each.)" if alone else ""
        said.append(f"Each of the {len(each)} repeats by itself says the same.{alone}" if len(places) == 1 else
                    f"The rule takes the worst repeat. Each by itself says: {'; '.join(_place(one) for one in each)}.{alone}")
    waits = knee(frame, {**found["slo"], "completed_ratio": 0.0})
    if high is not None and waits["bracket"] != found["bracket"]:
        said.append(f"By the wait for a first token alone: {_place(waits)}. In between, first tokens come in time, and yet fewer answers are "
                    "finished than asked for while the load lasts: a queue that grows, or answers that last long beside so short a test.")
    return said


def _place(found: dict[str, Any]) -> str:
    low, high = found["bracket"]
    return f"{rate_text(low)} to {rate_text(high)}" if None not in (low, high) else f"above {rate_text(low)}" if low is not None else \
        f"below {rate_text(high)}" if high is not None else "no verdict"


def _whole_points(frame: pd.DataFrame) -> list[str]:
    """Which finite loads have a repeat without a steady window."""
    rows = frame[(frame["pass"] == "measured") & (frame["request_rate"] != math.inf)]
    rows = rows[rows["steady_req_s"].isna() & rows["completed_req_s"].notna()]
    if rows.empty:
        return []
    rates = ", ".join(rate_text(rate) for rate in sorted(rows["request_rate"].unique()))
    return [f"At {rates} the test was too short for a steady window in some repeat; there the completed share is over the whole point, and its drain "
            "makes it too low."]


def rate_text(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:g}"
