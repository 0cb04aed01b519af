"""What the author of the series published, in the shape that our pages read.

What:   reads `benchmarks/published/` (transcribed, not re-measured): the tables, the facts about the rig, and the frame
        of points that a page draws beside our own runs.
Why:    a figure that somebody else measured must reach the page by the same road as ours, and must say whose it is.
Use:    frame = sweep_frame(); printed = sweep_frame(passes="table"); named = numbers()["published.a10g.flood_req_s"]
Not:    judging the figures (claims come with a later post); how a named number is computed (`published_numbers`).

The author's sweep came in passes, and the printed table takes rows from two of them. `pass` names the pass of a row;
`passes="table"` gives the rows of that table, which still carry the name of their own pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from .rigs import root

RIG = "a10g-published"
MODEL = "Qwen/Qwen3.5-4B"
LATENCIES = ("ttft", "tpot", "itl", "stall", "e2e", "client_delay")
STATISTICS = ("n", "mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms")
COLUMNS = (
    "rig", "source", "pass", "request_rate", "rate_label", "repeat", "num_prompts", "completed", "failed",
    "completed_req_s", "output_tok_s", "steady_req_s", "steady_output_tok_s", "running_mean", "running_max",
    "waiting_max", "kv_cache_usage_max", "preemptions", "valid", "reasons",
    *(f"{latency}_{statistic}" for latency in LATENCIES for statistic in STATISTICS),
)  # fmt: skip
P99_NEEDS = 299  # samples for a one-sided 95 % bound on a p99: 0.99 ** 299 < 0.05
COLD = "first point on a fresh server: cold"


def folder() -> Path:
    """`benchmarks/published` of this checkout."""
    return root() / "benchmarks" / "published"


@cache
def _table_at(path: Path) -> pd.DataFrame:
    return pd.read_csv(path)


def table(name: str) -> pd.DataFrame:
    """One published CSV by its path under `benchmarks/published`, such as `a10g/part_1/rate_sweep.csv`."""
    return _table_at(folder() / name).copy()


def rig_facts() -> dict[str, Any]:
    """The published facts about machine, engine, model and load: `rig.json`, each value with its source."""
    return json.loads((folder() / "a10g" / "rig.json").read_text(encoding="utf-8"))


def model_shape(model: str = MODEL) -> dict[str, Any]:
    """The shape of a model's text part, from its published configuration."""
    return json.loads((folder() / "model_shapes.json").read_text(encoding="utf-8"))["models"][model]


def entry(value: Any, unit: str, where: str, n: int | None = None) -> dict[str, Any]:
    """One published number as `headline.collect` wants it, with its place; a missing value is null with a reason."""
    value = value.item() if hasattr(value, "item") else value
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    return {"value": None if missing else value, "unit": unit, "n": n, "run": None, "source": "published",
            "reason": "not published" if missing else None, "where": where}


# --- the frame --------------------------------------------------------------------------------------------------


def sweep_frame(model: str = MODEL, passes: str | Iterable[str] | None = None) -> pd.DataFrame:
    """One row a published point, in exactly the columns that a measured run gives; what was not published is null.

    `passes` is one pass name, several, `"table"` for the rows of the author's printed table, or None for all.
    `valid` is null: none of our checks can be made on figures without raw data. `reasons` says what to know of a row.
    An unknown model or pass is a ValueError.
    """
    rows = table("a10g/part_1/rate_sweep.csv")
    rows = rows[rows["model"] == model]
    if rows.empty:
        raise ValueError(f"no published sweep for model {model!r}")
    if passes == "table":
        rows = rows[rows["in_part_1_table"] == "yes"]
    elif passes is not None:
        wanted = {passes} if isinstance(passes, str) else set(passes)
        if unknown := sorted(wanted - set(rows["pass"])):
            raise ValueError(f"no published pass {', '.join(unknown)}; there are: {', '.join(rows['pass'].unique())}")
        rows = rows[rows["pass"].isin(wanted)]
    points = pd.DataFrame([_point(row) for row in rows.to_dict("records")], columns=list(COLUMNS))
    return points.sort_values(["request_rate", "num_prompts", "pass"], kind="stable", ignore_index=True)


def _point(row: dict[str, Any]) -> dict[str, Any]:
    """One row of the sweep table as a row of the frame."""
    rate, completed = float(row["offered_req_s"]), row["successful_requests"]
    point = {
        "rig": RIG, "source": "published", "pass": row["pass"], "request_rate": rate,
        "rate_label": "inf" if math.isinf(rate) else f"{rate:g}", "repeat": 0,
        "num_prompts": float(row["num_prompts"]), "completed": completed, "failed": row["num_prompts"] - completed,
        "completed_req_s": row["completed_req_s"], "output_tok_s": row["output_tok_s"],
        "valid": None, "reasons": _reasons(row),
    }  # fmt: skip
    for name in LATENCIES:
        for statistic in STATISTICS[1:]:
            point[f"{name}_{statistic}"] = row.get(f"{name}_{statistic}", math.nan)
        # A latency of each request has as many samples as requests that ended well. How many token gaps the published
        # itl pools was not printed, so its n stays null.
        published = any(not math.isnan(point[f"{name}_{statistic}"]) for statistic in STATISTICS[1:])
        point[f"{name}_n"] = completed if published and name != "itl" else math.nan
    return {column: point.get(column, math.nan) for column in COLUMNS}


def _reasons(row: dict[str, Any]) -> list[str]:
    reasons = ["published by the author, not re-measured here"]
    if row["first_point_cold"] == "yes":
        reasons.append(COLD)
    if row["num_prompts"] < P99_NEEDS:
        reasons.append(f"p99 from {row['num_prompts']} requests; our rule asks for {P99_NEEDS}")
    if row["pass"] == "rerun":
        reasons.append("raw log not published")
    return reasons


def judged_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """The same frame ready for `stats.knee`: without the cold point, and with every pass called "measured"."""
    cold = frame["reasons"].map(lambda reasons: COLD in reasons)
    return frame[~cold & frame["ttft_p99_ms"].notna()].assign(**{"pass": "measured"})


def numbers() -> dict[str, dict[str, Any]]:
    """The named numbers of `published_numbers`, ready for `numbers.json`; every key starts with `published.a10g.`."""
    from . import published_numbers

    return published_numbers.numbers()
