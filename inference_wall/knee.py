"""The knee of a sweep: between which two offered rates does the service level break?

What:   `knee` judges each offered rate against a service level objective (SLO) and gives a bracket: the last rate that
        meets it in every repeat, and the first that fails in any. `next_rate` says where to measure to halve the
        bracket.
Why:    curve-shape detectors (Kneedle) move with the highest rate of the sweep: the same system has its knee at 8 or at
        18 requests/s depending on where the sweep stopped. A bracket depends on the system and on a stated SLO, and
        says how finely the sweep looked.
Use:    knee(frame, {"ttft_percentile": 99, "ttft_s": 1.0, "completed_ratio": 0.95})["bracket"]  ->  [5.0, 6.0]
Not:    floods, which have no offered rate, and the cold pass. A bracket is of this SLO, workload and number of prompts.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

DEFAULT_SLO = {"ttft_percentile": 99, "ttft_s": 1.0, "completed_ratio": 0.95}
WHOLE_POINT = "where no steady rate is known, completed/offered is over the whole point: the drain makes it too low"
PUBLISHED = "validity unknown: published figures are taken as they are"


def knee(points_frame: pd.DataFrame, slo: dict[str, float] | None = None) -> dict[str, Any]:
    """The knee bracket of one rig's sweep. `points_frame`: one row a point, columns of docs/decisions/0001; only rows
    with pass "measured" that are not invalid count. `slo`: `DEFAULT_SLO` with any of its keys replaced.

    A point meets the SLO when its TTFT percentile is at most ttft_s and completed/offered at least completed_ratio.
    Both are taken over the steady window (steady_req_s / steady_offered_req_s), where arrivals are random and so are
    counted, or over the whole point where there is none (completed_req_s / request_rate). A low ratio convicts only
    when the requests that are short are more than chance: what arrives and is not completed in a window is the growth
    of the number in flight, whose two ends each vary with a variance of about their mean (Poisson), so the limit is
    two standard deviations, 2 sqrt(2 running_mean) requests. A point may fail without its percentile: a lower one
    above the limit, or a low completion ratio, is enough. It cannot meet the SLO without it.

    Returns status, bracket [low, high] in requests/s (None for an open end), rates (a verdict "meets", "fails" or
    "cannot judge" for each offered rate, ascending, with the reason), notes, slo. Status is one of
    "bracketed"; "no knee in range" (no rate fails); "fails at the lowest rate"; "not monotone" (a rate meets the SLO
    above one that fails: the bracket is that of the lowest failing rate, and the notes name the others); "cannot judge"
    (no verdict at all). Raises ValueError for more than one rig, an unknown SLO key or a percentile that the frame
    lacks.
    """
    slo = _checked(points_frame, slo)
    counted = points_frame[points_frame["pass"].eq("measured") & points_frame["request_rate"].map(math.isfinite)]
    rates, notes = [], []
    for rate, points in counted.groupby("request_rate", sort=True):
        valid = points[points["valid"].map(lambda value: pd.isna(value) or bool(value))]
        judged = [_judge(point, slo) for _, point in valid.iterrows()]
        verdict, reason = _all_repeats(judged, len(points))
        ratios = [point["completed_ratio"] for point in judged if point["completed_ratio"] is not None]
        ttfts = [point["ttft_ms"] for point in judged if point["ttft_ms"] is not None]
        rates.append({
            "request_rate": float(rate), "verdict": verdict, "reason": reason,
            "repeats": len(valid), "invalid": len(points) - len(valid),
            "ttft_ms": max(ttfts, default=None), "completed_ratio": min(ratios, default=None),
        })
        if any(point["whole_point"] for point in judged) and WHOLE_POINT not in notes:
            notes.append(WHOLE_POINT)
        if valid["valid"].isna().any() and PUBLISHED not in notes:
            notes.append(PUBLISHED)

    meets = [rate["request_rate"] for rate in rates if rate["verdict"] == "meets"]
    fails = [rate["request_rate"] for rate in rates if rate["verdict"] == "fails"]
    high = min(fails, default=None)
    low = max((rate for rate in meets if high is None or rate < high), default=None)
    above = [rate for rate in meets if high is not None and rate > high]
    if above:
        status = "not monotone"
        notes.append(f"{_listed(above)} requests/s met the SLO although {high:g} did not: more repeats are needed")
    elif high is not None:
        status = "fails at the lowest rate" if low is None else "bracketed"
    else:
        status = "cannot judge" if low is None else "no knee in range"
    skipped = [rate["request_rate"] for rate in rates if rate["verdict"] == "cannot judge"]
    if skipped:
        notes.append(f"no verdict at {_listed(skipped)} requests/s")
    return {"status": status, "bracket": [low, high], "slo": slo, "rates": rates, "notes": notes}


def next_rate(points_frame: pd.DataFrame, slo: dict[str, float] | None = None, resolution: float = 1.1) -> float | None:
    """The offered rate, in requests/s, that halves the knee bracket on a log scale, to three significant digits.

    None when there is no closed bracket, when its ends are already within a factor of `resolution` (> 1), or when that
    rate has been measured before without a verdict: measuring it again is the caller's decision.
    """
    if not resolution > 1:
        raise ValueError(f"resolution is a factor above 1 between the ends of the bracket, not {resolution}")
    found = knee(points_frame, slo)
    low, high = found["bracket"]
    if found["status"] != "bracketed" or high / low <= resolution:
        return None
    middle = float(f"{math.sqrt(low * high):.3g}")
    return middle if middle not in [rate["request_rate"] for rate in found["rates"]] else None


def _checked(frame: pd.DataFrame, slo: dict[str, float] | None) -> dict[str, float]:
    unknown = set(slo or {}) - set(DEFAULT_SLO)
    if unknown:
        raise ValueError(f"unknown SLO key {', '.join(sorted(unknown))}; known: {', '.join(DEFAULT_SLO)}")
    if frame["rig"].nunique() > 1:
        raise ValueError(f"a knee belongs to one rig, not to {_listed(sorted(frame['rig'].unique()))}")
    merged = DEFAULT_SLO | (slo or {})
    if f"ttft_p{merged['ttft_percentile']:g}_ms" not in frame:
        raise ValueError(f"the frame has no p{merged['ttft_percentile']:g} of TTFT")
    return merged


def _judge(point: pd.Series, slo: dict[str, float]) -> dict[str, Any]:
    """Verdict of one point: {"verdict", "reason", "ttft_ms", "completed_ratio", "whole_point"}."""
    limit_ms, p = slo["ttft_s"] * 1e3, slo["ttft_percentile"]
    ttft = _known(point, f"ttft_p{p:g}_ms")
    steady, whole = _known(point, "steady_req_s"), _known(point, "completed_req_s")
    completed = whole if steady is None else steady
    offered = (_known(point, "steady_offered_req_s") if steady is not None else None) or point["request_rate"]
    ratio = None if completed is None else completed / offered
    result = {"ttft_ms": ttft, "completed_ratio": None if ratio is None else round(ratio, 4),
              "whole_point": steady is None and whole is not None}

    # A lower percentile bounds a higher one from below, so it can convict where the higher one is withheld.
    bounds = {q: _known(point, f"ttft_p{q}_ms") for q in (50, 90) if q < p} | {p: ttft}
    too_slow = [(q, value) for q, value in bounds.items() if value is not None and value > limit_ms]
    reasons = [f"p{q:g} TTFT {value:,.0f} ms, above {limit_ms:,.0f} ms" for q, value in too_slow[-1:]]
    low = ratio is not None and ratio < slo["completed_ratio"]
    by_chance = low and _may_be_chance(ratio, point)
    if low and not by_chance:
        reasons.append(f"completed {ratio:.0%} of the offered load, below {slo['completed_ratio']:.0%}")
    if reasons:
        return result | {"verdict": "fails", "reason": "; ".join(reasons)}
    if ttft is None:
        n = _known(point, "ttft_n")
        because = "" if n is None else f": n = {n:.0f} cannot bear it"
        return result | {"verdict": "cannot judge", "reason": f"no p{p:g} TTFT{because}"}
    if ratio is None:
        return result | {"verdict": "cannot judge", "reason": "no completion rate"}
    chance = f" (of {point['num_prompts']:.0f} requests: no more than chance)" if by_chance else ""
    return result | {"verdict": "meets", "reason": f"p{p:g} TTFT {ttft:,.0f} ms, completed {ratio:.0%}{chance}"}


def _may_be_chance(ratio: float, point: pd.Series) -> bool:
    """Whether so few requests are short that the ends of the window explain them; False where the number in flight is unknown."""
    running, requests = _known(point, "running_mean"), _known(point, "num_prompts")
    return running is not None and requests is not None and (1 - ratio) * requests <= 2 * math.sqrt(2 * max(running, 1.0))


def _all_repeats(judged: list[dict[str, Any]], measured: int) -> tuple[str, str]:
    """One verdict for a rate: fails if any repeat fails, meets if all do. The reason is that of the repeat with the longest TTFT among those."""
    if not judged:
        return "cannot judge", f"none of {measured} points is valid"
    for verdict in ("fails", "cannot judge"):
        found = [point for point in judged if point["verdict"] == verdict]
        if found:
            worst = max(found, key=lambda point: point["ttft_ms"] or 0.0)["reason"]
            which = ", this one with the longest TTFT" if len(found) > 1 else ""
            return verdict, worst + (f" (in {len(found)} of {len(judged)} repeats{which})" if len(judged) > 1 else "")
    return "meets", judged[0]["reason"] + (f" (in each of {len(judged)} repeats)" if len(judged) > 1 else "")


def _known(point: pd.Series, column: str) -> float | None:
    value = point.get(column)
    return None if value is None or pd.isna(value) else float(value)


def _listed(values: list[Any]) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
