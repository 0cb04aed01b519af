"""Where the minutes of a rig went, and what the plain way would have taken.

What:   `spent` adds up server starts, load, warm-up and the rest over the records of one rig; `plainly` estimates the same load with one
        client process a point and one cold server start an arm; `entries` names both for the prose and the table of rigs.
Why:    minutes on a card are the cost. Shared starts and one client for all points are there to save some, and whether they do must be
        worked out from what was timed, not claimed.
Use:    entries(evidence_sets_of_one_rig)["span_min"]
Not:    minutes that a batch would take (`planned`), starts counted once over posts (`arms.accounting`, which this uses).
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from . import arms
from .arms import ArmSet
from .records import Run

IMPORTS = "client_import_s"  # of run.json: seconds until a fresh client process could have sent its first request
NO_IMPORTS = "the records do not say how long a client's imports take"


def spent(runs: list[Run]) -> dict[str, Any]:
    """Seconds by what they went into: `arms.accounting` and warm_s (cold passes; part of load_s), span_s, idle_s.

    span_s: the time in which at least one of the records was being made. idle_s: what of it is neither start nor load: bandwidth tests,
    draining, writing, stopping servers, and any pause of a run that was taken up again. Null where a record was made on somebody else's
    server, whose starts nobody timed.
    """
    took = arms.accounting(runs)
    cold = sum(point["end_s"] - point["start_s"] for run in runs for point in run.points if point["pass"] == "cold")
    span = _union((_moment(run.document["started"]), _moment(run.document["finished"])) for run in runs)
    rest = None if took["attached"] else max(0.0, span - took["start_s"] - took["load_s"])
    return took | {"warm_s": cold, "span_s": span, "idle_s": rest}


def plainly(runs: list[Run]) -> dict[str, Any]:
    """The same points with a cold start for every arm and a client process for every point: arms, points, cold_start_s (all of them), import_s (of
    all points), total_s, reason.

    A cold start takes as long as the longest start of that model on record. Null, with the reason, where a model's starts were never timed.
    Imports that were not recorded count as nothing, so that the estimate is then a lower bound; import_s is null.
    """
    longest: dict[str, float] = {}
    for run in runs:
        for start in run.document["starts"]:
            seconds = start.get("server", {}).get("ready_s") or start.get("server", {}).get("refused_after_s")
            if seconds:
                longest[_model(run)] = max(seconds, longest.get(_model(run), 0.0))
    took = arms.accounting(runs)
    result = {"arms": len(runs), "points": took["points"], "cold_start_s": None, "import_s": None, "total_s": None, "reason": None}
    if unknown := sorted({_model(run) for run in runs} - longest.keys()):
        return result | {"reason": f"no start of {', '.join(unknown)} was timed"}
    imports = [run.document.get(IMPORTS) for run in runs]
    import_s = None if None in imports else sum(each * len(run.points) for each, run in zip(imports, runs, strict=True))
    cold = sum(longest[_model(run)] for run in runs)
    return result | {"cold_start_s": cold, "import_s": import_s, "total_s": cold + took["load_s"] + (import_s or 0.0)}


def entries(found: Iterable[ArmSet]) -> dict[str, dict[str, Any]]:
    """Named numbers of one rig over all its posts, keys without prefix; minutes where the name ends with `_min`."""
    runs = [run for each in found for run in each]
    took, plain = spent(runs), plainly(runs)
    attached = "a record was made on a server that somebody else had started"
    named: dict[str, dict[str, Any]] = {}

    def put(name: str, value: Any, unit: str, reason: str = "not recorded") -> None:
        named[name] = {"value": value, "unit": unit, "n": len(runs), "run": None, "source": "measured", "reason": reason if value is None else None}

    put("title", runs[0].document["rig"].get("title") or runs[0].document["rig"]["name"], "")
    put("kind", {"cuda": "GPU", "cpu": "CPU"}.get(runs[0].document["rig"].get("kind")), "", "the record does not say")
    put("records", len(runs), "records")
    put("points", took["points"], "points")
    put("starts", took["starts"], "starts")
    for name, key in (("start_min", "start_s"), ("load_min", "load_s"), ("warm_min", "warm_s"), ("span_min", "span_s"), ("idle_min", "idle_s")):
        put(name, None if took[key] is None else took[key] / 60, "min", attached)
    put("plain_starts", plain["arms"], "starts")
    for name, key in (("plain_start_min", "cold_start_s"), ("plain_min", "total_s"), ("plain_import_min", "import_s")):
        put(name, None if plain[key] is None else plain[key] / 60, "min", plain["reason"] or NO_IMPORTS)
    both = plain["total_s"] and took["span_s"]
    put("plain_over_span", plain["total_s"] / took["span_s"] if both else None, "x", plain["reason"] or "no time was recorded")
    return named


def _model(run: Run) -> str:
    return run.document["model"]["name"]


def _moment(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of what the intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
