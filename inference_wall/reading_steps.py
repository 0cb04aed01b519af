"""What a prompt costs everybody else: the steps that read prompts, as the other readers felt them. No profiler is involved.

What:   `of_point` finds the steps in which prompts were read and how long each was; `of_run` pools a sweep; `price` draws a line through them:
        so much for any step that reads, so much more for each prompt in it. `table` and the sentences show it.
Why:    whether a prompt is dear because of its tokens or because of its step decides where the wall is, and what helps against it.
Use:    found = of_run(run); display(HTML(table(found, 256))); price(found)["step_ms"]
Not:    traces (`launch_bound`), long prompts among victims (`freeze`).

The rule. Prompts whose first tokens arrive within `JOIN_S` of one another were read in one step (or their last pieces were). The server passes
out a new answer's first token after the tokens of those that were running, or one step later. So the length of the step is the longer
of the last two gaps of each running answer before that first token, the median over all of them; at least `NEIGHBOURS` must be running.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from . import records
from .chart import digits
from .percentiles import summarise
from .records import Run
from .samples import UNIT_S, ticks
from .tables import plain_table

JOIN_S = 3e-3
NEIGHBOURS = 3
CLASSES = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, math.inf))  # prompts in a step
ENOUGH = 3  # steps of a class, and classes, that a line needs
PER_STEP = 0.5  # share of a one-prompt step that any reading step costs, from which the price is called one by the step
FAR = 1.5  # flood over the first failing load, from which the two are said to differ


def of_point(requests: pd.DataFrame, chunks: pd.DataFrame) -> pd.DataFrame:
    """One row a step that read prompts, by time: at_s (run's clock), prompts, neighbours, ms (NaN with too few neighbours)."""
    first = np.sort(ticks(requests["first_token"].dropna())) * UNIT_S
    steps = np.split(first, np.flatnonzero(np.diff(first) > JOIN_S) + 1) if len(first) else []
    moments = np.array([step[0] for step in steps])
    ordered = chunks[chunks["tokens"] > 0].sort_values(["request", "time"], kind="stable")
    streams = [ticks(mine["time"]) * UNIT_S for _, mine in ordered.groupby("request")]
    felt = np.full((len(steps), len(streams)), np.nan)
    for column, time in enumerate(streams):
        at = np.searchsorted(time, moments) - 1
        running = (at >= 2) & (moments <= time[-1])
        at = at[running]
        felt[running, column] = np.maximum(time[at] - time[at - 1], time[at - 1] - time[at - 2])
    counts = (~np.isnan(felt)).sum(axis=1) if len(streams) else np.zeros(len(steps), int)
    ms = [1e3 * float(np.nanmedian(row)) if count >= NEIGHBOURS else math.nan for row, count in zip(felt, counts, strict=True)]
    return pd.DataFrame({"at_s": moments, "prompts": [len(step) for step in steps], "neighbours": counts, "ms": ms})


def of_run(run: Run) -> pd.DataFrame:
    """`of_point` of all measured, valid points of a sweep, with point, rate_label, request_rate (inf for a flood), repeat, num_prompts."""
    frame = records.points_frame(run)
    rows = frame[(frame["pass"] == "measured") & frame["valid"].astype(bool)]
    found = [of_point(run.frame("requests", int(row.point)), run.frame("chunks", int(row.point))).assign(
        point=row.point, rate_label=row.rate_label, request_rate=row.request_rate, repeat=row.repeat, num_prompts=row.num_prompts)
        for row in rows.itertuples()]
    empty = pd.DataFrame(columns=["at_s", "prompts", "neighbours", "ms", "point", "rate_label", "request_rate", "repeat", "num_prompts"])
    return pd.concat(found, ignore_index=True) if found else empty


def by_class(found: pd.DataFrame) -> list[tuple[str, float, dict[str, Any]]]:
    """(prompts as text, their mean, `percentiles.summarise` of the lengths) for each class of `CLASSES` that occurs with a length."""
    known, result = found[found["ms"].notna()], []
    for low, high in CLASSES:
        mine = known[(known["prompts"] >= low) & (known["prompts"] <= high)]
        if len(mine):
            name = f"{low}" if low == high else f"{low} or more" if math.isinf(high) else f"{low} to {high}"
            result.append((name, float(mine["prompts"].mean()), summarise(mine["ms"] / 1e3)))
    return result


def price(found: pd.DataFrame) -> dict[str, Any]:
    """{"step_ms", "prompt_ms", "one_ms", "n", "share", "per_step", "reason"}: the line step + prompts x cost through the medians of the classes,
    weighted by the root of their n. `share` is that of step_ms in a step with one prompt; `per_step` is true from `PER_STEP` on. Null, with
    the reason, with fewer than three classes of at least three steps, or where the cost does not come out positive."""
    classes = [(mean, summary["p50_ms"] or summary["max_ms"], summary["n"]) for _, mean, summary in by_class(found) if summary["n"] >= ENOUGH]
    empty = {"step_ms": None, "prompt_ms": None, "one_ms": None, "share": None, "per_step": None, "n": sum(n for *_, n in classes)}
    if len(classes) < ENOUGH:
        return empty | {"reason": f"a line needs {ENOUGH} different numbers of prompts in a step, and {len(classes)} were seen"}
    prompts, lengths, n = np.array(classes).T
    cost, fixed = np.polyfit(prompts, lengths, 1, w=np.sqrt(n))
    if cost <= 0:
        return empty | {"reason": "a step does not grow with its prompts here"}
    share = float(max(0.0, fixed) / (max(0.0, fixed) + cost))
    return empty | {"step_ms": float(fixed), "prompt_ms": float(cost), "one_ms": float(fixed + cost), "share": share,
                    "per_step": share >= PER_STEP, "reason": ""}


def table(found: pd.DataFrame, input_len: int) -> str:
    """One row a class of steps: prompts in it, prompt tokens, steps seen, median and longest, in milliseconds."""
    rows = [(name, f"{mean * input_len:,.0f}", f"{summary['n']:,}", "too few" if summary["p50_ms"] is None else digits(summary["p50_ms"]),
             digits(summary["max_ms"])) for name, mean, summary in by_class(found)]
    return plain_table(["prompts", "tokens, mean", "steps", "median, ms", "longest, ms"], rows, "part_1_reading_steps.csv")


def price_sentence(found: pd.DataFrame, input_len: int, output_len: int, seats: int | None) -> str:
    """What a step that reads costs, and whether it is the step or the tokens that are paid for."""
    line = price(found)
    if line["reason"]:
        return f"**What a prompt costs cannot be read from this sweep:** {line['reason']}."
    text = (f"The line through these medians: **{digits(max(0.0, line['step_ms']))} ms for any step that reads, and {digits(line['prompt_ms'])} ms "
            f"more for each prompt in it** ({line['prompt_ms'] / input_len:.3f} ms a token). ")
    if not line["per_step"]:
        return text + ("So a prompt is paid for mostly by its tokens: a step that reads twice as much takes nearly twice as long, and packing "
                       "prompts together saves little.")
    text += (f"So a prompt is paid for **by the step, not by the token**: the fixed part is {line['share']:.0%} of a step with one prompt. At most "
             f"{1e3 / line['one_ms']:.0f} steps a second can read anything.")
    if seats:
        text += (f" Were every step such a step, an answer of {output_len} tokens would take {output_len} × {digits(line['one_ms'])} ms = "
                 f"{output_len * line['one_ms'] / 1e3:.1f} s, and {seats} seats would let through "
                 f"**{seats / (output_len * line['one_ms'] / 1e3):.0f} requests a second**. Some steps read nothing, so the real limit may lie "
                 "above that; but it has nothing to do with the bytes of the first bound.")
    return text


def packing_sentence(found: pd.DataFrame) -> str:
    """In how many steps the same prompts were read: at the heaviest finite load, and in the flood. Empty without both."""
    parts = []
    finite = found[found["request_rate"] != math.inf]
    heaviest = finite["request_rate"].max() if len(finite) else None
    for rate, how in ((heaviest, f"Arriving at random, {heaviest:g} a second," if heaviest is not None else ""), (math.inf, "Sent all at once,")):
        mine = found[found["request_rate"] == rate]
        if mine.empty:
            return ""
        steps = mine.groupby("point").size()
        span = f"{steps.min()}" if steps.min() == steps.max() else f"{steps.min()} to {steps.max()}"
        parts.append((how, int(mine["num_prompts"].iloc[0]), span, mine["prompts"].median()))
    (how, many, span, median), (flood_how, _, flood_span, flood_median) = parts
    return (f"{how} {many} prompts were read in {span} steps, {median:g} in a typical one. {flood_how} they were read in {flood_span}, "
            f"{flood_median:g} in a typical one.")


def ceiling_sentence(found: pd.DataFrame, flood: tuple[float, float] | None, fails_at: float | None,
                     heaviest: tuple[float, float] | None = None) -> str:
    """What the flood's rate says about the wall: `flood` is its completed rate over the repeats (low, high), `heaviest` that of the heaviest finite
    load, `fails_at` the first load that missed the service level. Empty where flood or wall is missing."""
    if flood is None or fails_at is None:
        return ""
    span, packed = _span(flood), packing_sentence(found)
    if flood[0] < FAR * fails_at:
        return (f"{packed} The flood answered {span} requests a second, and arrivals at random first failed at {fails_at:g}: here the two are close, "
                "and the flood is a fair sign of where the wall stands.")
    why = (" The flood pays for few steps that read, and its answers are then written together; arrivals at random put a prompt into step after step."
           if price(found)["per_step"] else "")
    most = "" if heaviest is None else f" At the heaviest load at random it answered {_span(heaviest)}."
    return (f"{packed} **The flood answered {span} requests a second, yet arrivals at random missed the service level from {fails_at:g} on.**{most}"
            f"{why} A server can look far faster in a flood than it will ever be for visitors: its rate in a flood is no capacity to plan with.")


def _span(rates: tuple[float, float]) -> str:
    low, high = digits(rates[0]), digits(rates[1])
    return low if low == high else f"{low} to {high}"
