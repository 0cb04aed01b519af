"""Figures of one trace: its steps on a time axis, and what they spend their time on.

What:   `step_strip` draws one bar a step, `operator_bars` the share of each family of operators by kind of step.
Why:    a step that reads a long prompt is long for everybody in it. On a time axis that is seen at once; the shares say
        whether it does other work or more of the same.
Use:    step_strip(run.trace(point)); operator_bars(run.trace(point))
Not:    the numbers (`trace`), every single event (open the file in a trace viewer).

A colour means the same kind of step in both figures: blue writes tokens only, orange also reads a prompt, purple only reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from . import trace
from .chart import BLUE, LEGEND, ORANGE, PURPLE, digits, set_words

COLOURS = {trace.DECODE: BLUE, trace.MIXED: ORANGE, trace.PREFILL: PURPLE}
ROWS = {trace.DECODE: "decode<br>only", trace.MIXED: "decode and<br>prefill", trace.PREFILL: "prefill<br>only"}
STEP_COLUMNS = ["step", "start ms", "prompt requests", "prompt tokens", "running requests", "tokens written", "gap before ms", "busy percent",
                "what the step did"]
FAMILY_COLUMNS = ["mean ms a step", "steps", "mean step ms"]


def step_strip(source: Path | pd.DataFrame) -> go.Figure:
    """One bar a step from its start to its end, on one row for each kind of step; the hover says what the engine's mark means.

    `source`: a trace, raw or cut, or a result of `trace.steps`.
    """
    frame = source if isinstance(source, pd.DataFrame) else trace.steps(source)
    found = trace.kinds(frame)
    figure = _empty(height=150 + 60 * len(found), columns=STEP_COLUMNS)
    for kind, part in found.items():
        figure.add_bar(
            name=kind, orientation="h", y=[ROWS[kind]] * len(part), base=_short(part["start_ms"]), x=_short(part["duration_ms"]),
            # Paler than its edge, so that steps that touch stay apart, and a short one is still a line.
            marker={"color": _pale(COLOURS[kind]), "line": {"color": COLOURS[kind], "width": 1}},
            width=0.7, customdata=[_details(row) for row in part.itertuples()],
            hovertemplate="<b>step %{customdata[0]}</b>: %{x:,.4~r} ms<br>%{customdata[8]}<br>busy for %{customdata[7]} percent of it<extra></extra>",
        )
    figure.update_layout(barmode="overlay", showlegend=False)
    figure.update_xaxes(title={"text": "milliseconds since the first step", "standoff": 8}, rangemode="tozero", automargin=True, nticks=6)
    figure.update_yaxes(automargin=True, autorange="reversed", categoryorder="array", categoryarray=[ROWS[kind] for kind in found])
    end = (frame["start_ms"] + frame["duration_ms"]).max()
    sentences = [f"{len(frame)} steps of the engine in {digits(end)} ms, one bar each"]
    sentences += [_kind_words(kind, part) for kind, part in found.items()]
    return set_words(figure, sentences, "trace_steps.csv")


def operator_bars(path: Path) -> go.Figure:
    """The share of the steps' time that each family of operators takes, one bar a kind of step, side by side.

    Shares, because the kinds can differ a hundredfold in length; the mean length is in the legend, milliseconds in the hover.
    """
    frame = trace.families(path)
    names = list(dict.fromkeys(frame["family"]))
    found = {kind: frame[frame["kind"] == kind] for kind in COLOURS if (frame["kind"] == kind).any()}
    figure = _empty(height=140 + (22 + 16 * len(found)) * len(names), columns=FAMILY_COLUMNS)
    for kind, part in found.items():
        figure.add_bar(
            name=f"{kind} (a step: {digits(part['step_ms'].iloc[0])} ms)", orientation="h", marker_color=COLOURS[kind],
            y=[_wrapped(name) for name in part["family"]], x=_short(100 * part["share"]),
            customdata=[[_one(row.self_ms), int(row.steps), _one(row.step_ms)] for row in part.itertuples()],
            hovertemplate="<b>%{y}</b>: %{x:,.3~r} percent<br>%{customdata[0]:,.4~r} ms of %{customdata[2]:,.4~r} ms a step, "
                          f"mean of %{{customdata[1]}}<br>{kind}<extra></extra>",
        )
    figure.update_layout(barmode="group", bargap=0.25, legend={**LEGEND, "traceorder": "normal"})
    figure.update_xaxes(title={"text": "percent of the steps' time", "standoff": 8}, rangemode="tozero", automargin=True, nticks=6)
    figure.update_yaxes(automargin=True, autorange="reversed", categoryorder="array", categoryarray=[_wrapped(name) for name in names])
    sentences = ["Self time by family of operators, in percent of the steps' time"]
    for kind, part in found.items():
        shares = ", ".join(f"{row.family} {digits(100 * row.share)}" for row in part.itertuples())
        steps = int(part["steps"].iloc[0])
        sentences.append(f"{kind}, {steps} step{'' if steps == 1 else 's'} of {digits(part['step_ms'].iloc[0])} ms on average: {shares}")
    return set_words(figure, sentences, "trace_operators.csv")


def _empty(height: int, columns: list[str]) -> go.Figure:
    figure = go.Figure()
    figure.layout.template = None  # the site lays its own over the figure
    figure.update_layout(height=height, margin={"t": 16, "r": 12, "b": 56, "l": 56}, hovermode="closest", meta={"columns": columns})
    return figure


def _details(row: Any) -> list[Any]:
    gap, busy = _one(row.gap_before_ms), None if pd.isna(row.busy_share) else round(100 * row.busy_share, 1)
    return [int(row.step), _one(row.start_ms), int(row.context_requests), int(row.context_tokens), int(row.generation_requests),
            int(row.generation_tokens), gap, busy, _meaning(row)]


def _meaning(row: Any) -> str:
    """The mark `execute_context_C(P)_generation_G(T)` in words. T above G: recomputed, or guessed and checked."""
    parts = []
    if row.context_tokens:
        parts.append(f"read {_count(row.context_tokens, 'prompt token')} of {_count(row.context_requests, 'request')}")
    if row.generation_requests:
        parts.append(f"{_count(row.generation_tokens, 'token')} for {_count(row.generation_requests, 'running request')}")
    return "<br>".join(parts) or "no tokens"


def _kind_words(kind: str, part: pd.DataFrame) -> str:
    low, high = digits(part["duration_ms"].min()), digits(part["duration_ms"].max())
    tokens = int(part["context_tokens"].sum())
    took = f"{low} ms" if low == high else f"{low} to {high} ms"
    return f"{kind}: {_count(len(part), 'step')} of {took}" + (f", which read {_count(tokens, 'prompt token')}" if tokens else "")


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def _pale(colour: str) -> str:
    return f"rgba({int(colour[1:3], 16)}, {int(colour[3:5], 16)}, {int(colour[5:7], 16)}, 0.45)"


def _wrapped(name: str) -> str:
    """A family on two lines, so that the bars keep their room on a phone."""
    head, _, tail = name.rpartition(" ")
    return f"{head}<br>{tail}" if head and len(name) > 12 else name


def _one(value: float) -> float | None:
    return None if pd.isna(value) else float(f"{value:.6g}")


def _short(values: pd.Series) -> list[float | None]:
    return [_one(value) for value in values]
