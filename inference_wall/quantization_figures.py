"""The figures of Part 5: bytes, step time, predicted against measured ratios, throughput, and the published card beside ours.

What:   one function a figure, from the tables of `quantization` to a plotly figure with its text alternative.
Why:    a colour always means the same variant on this page, and a mark the same prediction; what was published is drawn apart.
Use:    rows = quantization.variants(arms); bytes_bars(rows); step_lines(rows, steps, fits); ratios(pairs, published_pairs)
Not:    the analysis (`quantization`), the words around a figure (`quantization_words`), the common look (`chart`).

Hollow marks are points whose validity checks failed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from . import chart, quantization
from .chart import BLUE, GREEN, GREY, OCHRE, ORANGE, PURPLE, RED, TEAL, digits, log_ticks, set_words
from .cliff import StepFit

PALETTE = (BLUE, GREEN, PURPLE, OCHRE, TEAL)  # of variants in the order of the plan; ORANGE is the published card's, RED what was measured
COLUMNS = ["variant", "what", "n", "status"]  # of customdata, and so of the downloaded CSV
# prediction -> (name, marker)
MARKS = {"streamed": ("by streamed bytes", "diamond"), "loaded": ("by loaded bytes", "triangle-up"), "parameters": ("by parameters", "square")}


def colours(rows: pd.DataFrame) -> dict[str, str]:
    """Arm -> colour, in the order of `rows`."""
    return {arm: PALETTE[place % len(PALETTE)] for place, arm in enumerate(rows["arm"])}


def _canvas(x_title: str, y_title: str, height: int) -> go.Figure:
    figure = go.Figure()
    figure.layout.template = None  # the site lays its own over the figure
    figure.update_layout(height=height, margin={"t": 16, "r": 12, "b": 112, "l": 56}, legend=chart.LEGEND, hovermode="closest",
                         meta={"columns": COLUMNS})
    figure.update_xaxes(automargin=True, title={"text": x_title, "standoff": 8})
    figure.update_yaxes(automargin=True, title={"text": y_title, "standoff": 6})
    return figure


def nothing(reason: str, csv: str) -> go.Figure:
    """An honest empty figure: it says why it is empty."""
    figure = _canvas("", "", 160)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.add_annotation(text=reason, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    return set_words(figure, [f"Nothing to draw: {reason}"], csv)


def _short(values: Any) -> list[float]:
    return [float(f"{float(value):.6g}") for value in values]


# --- 1: bytes ---------------------------------------------------------------------------------------------------------


def bytes_bars(rows: pd.DataFrame) -> go.Figure:
    """Loaded and streamed bytes of each variant, one pair of bars each; a variant whose bytes are not known is named in the words."""
    known = rows[rows["loaded_gb"].notna() | rows["streamed_gb"].notna()]
    if known.empty:
        return nothing("no record knows the bytes of its model", "bytes.csv")
    figure = _canvas("GB", "", height=170 + 64 * len(known))
    words = ["Bytes of the weights of each variant: loaded into memory, and streamed by one step"]
    for column, name, paint in (("streamed_gb", "streamed in a step", BLUE), ("loaded_gb", "loaded", GREY)):
        part = known[known[column].notna()]
        figure.add_bar(
            orientation="h", name=name, x=_short(part[column]), y=[_wrapped(arm) for arm in part["arm"]],
            marker={"color": paint, "line": {"width": 0}},
            customdata=[[row["arm"], name, "", _parameters(row)] for row in part.to_dict("records")],
            hovertemplate="<b>%{customdata[0]}</b>, %{customdata[1]}: %{x:.4~r} GB<br>%{customdata[3]}<extra></extra>")
    for row in rows.to_dict("records"):
        amounts = [f"{digits(row[f'{name}_gb'])} GB {name}" for name in ("loaded", "streamed") if row[f"{name}_gb"] is not None]
        words.append(f"{row['arm']}: {', '.join(amounts) or 'bytes not known'}, {_parameters(row)}")
    figure.update_layout(barmode="group", bargap=0.25)
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return set_words(figure, words, "bytes.csv")


def _parameters(row: dict[str, Any]) -> str:
    return f"{row['parameters'] / 1e6:,.1f} million parameters" if row["parameters"] is not None else "parameters not known"


def _wrapped(name: str) -> str:
    """A long name on two lines, so that the bars keep their room on a phone."""
    head, dash, tail = name.rpartition("-")
    return f"{head}{dash}<br>{tail}" if head and len(name) > 9 else name


# --- 2: step time -----------------------------------------------------------------------------------------------------


def step_lines(rows: pd.DataFrame, steps: pd.DataFrame, fits: dict[str, StepFit]) -> go.Figure:
    """Step time against batch for each variant: medians of the points, and the fitted line down to a batch of 0."""
    known = steps[steps["step_ms"].notna()]
    if known.empty:
        return nothing("no step time was measured", "step_time.csv")
    figure = _canvas("batch: sequences in the step", "step time, ms", height=460)
    largest, words = float(known["batch"].max()), ["Time of one step against the number of sequences in it, one line a variant"]
    doubts = dict(zip(rows["arm"], rows["line_doubt"], strict=True))
    for arm, paint in colours(rows).items():
        part, fit = known[known["arm"] == arm], fits.get(arm)
        if part.empty:
            words.append(f"{arm}: no step time")
            continue
        if fit is not None and fit.fixed_ms is not None:
            span = np.array([0.0, largest * 1.05])
            poor = f", a poor description: {doubts[arm]}" if doubts[arm] else ""
            figure.add_scatter(x=_short(span), y=_short(fit.step_ms(span)), mode="lines", name=f"{arm}, fit", legendgroup=arm, showlegend=False,
                               line={"color": paint, "width": 2, "dash": "dot" if doubts[arm] else "solid"},
                               hovertemplate=f"{arm}, fit: {digits(fit.fixed_ms)} ms + batch × {digits(fit.slope_ms)} ms{poor}<extra></extra>")
            words.append(f"{arm}: {digits(fit.fixed_ms)} ms and {digits(fit.slope_ms)} ms for each sequence ({fit.n} points){poor}")
        else:
            words.append(f"{arm}: no fit, {fit.reason if fit is not None else 'not measured'}")
        valid = part["valid"].astype(bool)
        figure.add_scatter(
            x=_short(part["batch"]), y=_short(part["step_ms"]), mode="markers", name=arm, legendgroup=arm,
            marker={"color": paint, "size": 8, "symbol": ["circle" if ok else "circle-open" for ok in valid]},
            customdata=[[arm, "step, median", int(row["n"]), "valid" if row["valid"] else f"NOT VALID: {', '.join(row['reasons'])}"]
                        for row in part.to_dict("records")],
            hovertemplate="<b>%{customdata[0]}</b>, batch %{x}<br>%{y:.4~r} ms, median of %{customdata[2]} gaps<br>%{customdata[3]}<extra></extra>")
    figure.update_xaxes(range=[0, largest * 1.05])
    figure.update_yaxes(rangemode="tozero")
    return set_words(figure, words, "step_time.csv")


# --- 3: predictions ---------------------------------------------------------------------------------------------------


def ratios(pairs: pd.DataFrame, published: pd.DataFrame | None = None) -> go.Figure:
    """Predicted and measured ratios of the shared part of a step, one row a pair of variants; the author's pair below, marked as published."""
    both = [(pairs, "", RED)] + ([(published, "A10G, ", ORANGE)] if published is not None else [])
    shown = [(row, prefix, paint) for frame, prefix, paint in both for row in frame.to_dict("records")
             if any(row[name] is not None for name in (*MARKS, "measured"))]
    if not shown:
        return nothing("there is no second variant to compare with", "ratios.csv")
    figure = _canvas("step time / unquantized", "", height=190 + 62 * len(shown))
    labels = [f"{prefix.rstrip(', ')}<br>published" if prefix else _wrapped(row["arm"]) for row, prefix, _ in shown]
    words = ["Ratio of the shared part of a step, variant over the unquantized one: what each rule predicts, and what was measured"]
    for name, (title, symbol) in MARKS.items():
        points = [(row[name], label, prefix + row["arm"]) for (row, prefix, _), label in zip(shown, labels, strict=True) if row[name] is not None]
        if points:
            figure.add_scatter(x=_short(value for value, *_ in points), y=[label for _, label, _ in points], mode="markers", name=title,
                               marker={"color": GREY, "size": 12, "symbol": f"{symbol}-open", "line": {"width": 2}},
                               customdata=[[arm, title, "", "prediction"] for *_, arm in points],
                               hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}: %{x:.3~r}<extra></extra>")
    for wanted, title in ((RED, "measured"), (ORANGE, "published")):
        points = [(row, label, prefix) for (row, prefix, paint), label in zip(shown, labels, strict=True)
                  if paint == wanted and row["measured"] is not None]
        if points:
            figure.add_scatter(
                x=_short(row["measured"] for row, *_ in points), y=[label for _, label, _ in points], mode="markers", name=title,
                marker={"color": wanted, "size": 11, "symbol": "circle"},
                error_x={"type": "data", "array": [_reach(row, "high") for row, *_ in points],
                         "arrayminus": [_reach(row, "low") for row, *_ in points], "thickness": 1.5, "width": 4},
                customdata=[[prefix + row["arm"], title, "", _interval(row)] for row, _, prefix in points],
                hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}: %{x:.3~r}<br>%{customdata[3]}<extra></extra>")
    for row, prefix, _ in shown:
        said = [f"{title} {row[name]:.2f}" for name, (title, _) in MARKS.items() if row[name] is not None]
        result = f"not measured: {row['reason']}"
        if row["measured"] is not None:
            result = f"{'published' if prefix else 'measured'} {row['measured']:.2f} ({_interval(row)})"
        words.append(f"{prefix}{row['arm']}: {', '.join([*said, result])}")
    values = [value for row, *_ in shown for value in (*(row[name] for name in MARKS), row["measured"], row["low"], row["high"]) if value is not None]
    figure.add_vline(x=1, line={"color": GREY, "dash": "longdash", "width": 1.5})
    figure.update_xaxes(type="log", **log_ticks([*values, 1.0]))
    figure.update_yaxes(type="category", autorange="reversed")
    return set_words(figure, words, "ratios.csv")


def _reach(row: dict[str, Any], end: str) -> float:
    return 0.0 if row[end] is None else float(f"{abs(row[end] - row['measured']):.6g}")


def _interval(row: dict[str, Any]) -> str:
    by = f"{row['measured_by']}s" if row["measured_by"] == quantization.FIXED else "steps of one sequence"
    return f"by {by}, " + ("no interval" if row["low"] is None else f"about 95 %: {row['low']:.2f} to {row['high']:.2f}")


# --- 4: throughput ----------------------------------------------------------------------------------------------------


def throughput(rows: pd.DataFrame, steps: pd.DataFrame, fits: dict[str, StepFit]) -> go.Figure:
    """Tokens/s against batch: decode alone (batch / step), the curve of a fit that can be relied on, and the flood at its average batch."""
    known = steps[steps["tok_s"].notna()]
    floods = rows[rows["flood_tok_s"].notna() & rows["flood_running"].notna()]
    if known.empty and floods.empty:
        return nothing("neither a step time nor a flood was measured", "throughput.csv")
    figure = _canvas("running batch", "output tokens/s", height=460)
    words = ["Output tokens per second against running batch, both axes logarithmic: decode alone, and floods, which also read prompts"]
    xs = [*known["batch"].astype(float), *floods["flood_running"].astype(float)]
    doubts = dict(zip(rows["arm"], rows["line_doubt"], strict=True))
    for arm, paint in colours(rows).items():
        part, fit = known[known["arm"] == arm].sort_values("batch"), fits.get(arm)
        if len(part):
            figure.add_scatter(
                x=_short(part["batch"]), y=_short(part["tok_s"]), mode="markers", name=f"{arm}, decode alone", legendgroup=arm,
                marker={"color": paint, "size": 8, "symbol": ["circle" if ok else "circle-open" for ok in part["valid"].astype(bool)]},
                customdata=[[arm, "decode alone", int(row["n"]), "valid" if row["valid"] else f"NOT VALID: {', '.join(row['reasons'])}"]
                            for row in part.to_dict("records")],
                hovertemplate="<b>%{fullData.name}</b>, batch %{x}<br>%{y:,.4~r} tokens/s<br>%{customdata[3]}<extra></extra>")
            words.append(f"{arm}, decode alone: {digits(part['tok_s'].iloc[0])} at a batch of {part['batch'].iloc[0]:g}, "
                         f"{digits(part['tok_s'].iloc[-1])} at {part['batch'].iloc[-1]:g}")
        if len(part) and fit is not None and not doubts[arm]:
            span = np.geomspace(max(1.0, part["batch"].min()), max(part["batch"].max(), 1.0), 30)
            figure.add_scatter(x=_short(span), y=_short(fit.tok_s(span)), mode="lines", name=f"{arm}, fit", legendgroup=arm, showlegend=False,
                               line={"color": paint, "width": 1.5}, hoverinfo="skip")
        flood = floods[floods["arm"] == arm]
        if len(flood):
            row = flood.iloc[0]
            figure.add_scatter(
                x=_short([row["flood_running"]]), y=_short([row["flood_tok_s"]]), mode="markers", name=f"{arm}, flood", legendgroup=arm,
                marker={"color": paint, "size": 13, "symbol": "star" if row["flood_valid"] else "star-open"},
                customdata=[[arm, "flood", str(row["flood_n"]), f"{row['flood_kind']}, {row['flood_repeats']} repeat(s)"]],
                hovertemplate="<b>%{fullData.name}</b>, %{x:.3~r} running on average<br>%{y:,.4~r} tokens/s<br>%{customdata[3]}<extra></extra>")
            words.append(f"{arm}, flood: {digits(row['flood_tok_s'])} with {digits(row['flood_running'])} running" +
                         ("" if row["flood_valid"] else " (not valid)"))
    figure.update_xaxes(type="log", **log_ticks(xs))
    figure.update_yaxes(type="log", **log_ticks([y for trace in figure.data for y in trace.y]))
    return set_words(figure, words, "throughput.csv")


# --- 5: two machines --------------------------------------------------------------------------------------------------


def relative(rows: pd.DataFrame, fits: dict[str, StepFit], published: pd.DataFrame) -> go.Figure:
    """Tokens/s of each variant over those of the unquantized one at the same batch, from the fits; and over floods. 1 is no difference.

    The batch is divided by the unquantized variant's crossover (fixed term over slope), so that unlike machines share the axis. A line that cannot
    be relied on is not drawn. Floods stand at the right edge.
    """
    figure = _canvas("batch / crossover of unquantized", "tokens/s / unquantized", height=440)
    words = ["Tokens per second of a variant over those of the unquantized one at the same batch, from the step fits, and in floods"]
    doubts = dict(zip(rows["arm"], rows["line_doubt"], strict=True))
    ours = {arm: (fit.fixed_ms, fit.slope_ms) for arm, fit in fits.items() if not doubts.get(arm)}
    theirs = {row["arm"]: (row["fixed_ms"], row["slope_ms"]) for row in published.to_dict("records")}
    for frame, lines, prefix in ((rows, ours, ""), (published, theirs, "A10G (published), ")):
        start = frame[frame["role"] == "base"]
        if start.empty:
            words.append(f"{prefix or 'this rig, '}nothing to draw: the unquantized variant was not measured")
            continue
        first = start.iloc[0]
        line = lines.get(first["arm"])
        if not _positive(line):
            words.append(f"{prefix or 'this rig, '}no lines: that of the unquantized variant cannot be relied on")
        paints = colours(rows) if not prefix else {}
        for row in frame[frame["role"] != "base"].to_dict("records"):
            paint, own = paints.get(row["arm"], ORANGE), lines.get(row["arm"])
            if _positive(line) and not _positive(own):
                words.append(f"{prefix}{row['arm']}, no line: its own cannot be relied on")
            elif _positive(line):
                (fixed, slope), span = line, np.geomspace(0.02, EDGE, 40)
                batch = span * fixed / slope
                y = (fixed + slope * batch) / (own[0] + own[1] * batch)
                figure.add_scatter(x=_short(span), y=_short(y), mode="lines", name=f"{prefix}{row['arm']}, steps",
                                   legendgroup=prefix + row["arm"], line={"color": paint, "width": 2, "dash": "dash" if prefix else "solid"},
                                   hovertemplate="<b>%{fullData.name}</b><br>%{y:.3~r} times the tokens/s"
                                                 "<br>at %{x:.3~r} of the crossover<extra></extra>")
                words.append(f"{prefix}{row['arm']}, steps: {fixed / own[0]:.2f} for a small batch, {slope / own[1]:.2f} for a large one")
            valid = row["flood_valid"] and first["flood_valid"] and row["flood_kind"] == first["flood_kind"]
            if valid and row["flood_tok_s"] is not None and first["flood_tok_s"]:
                share = row["flood_tok_s"] / first["flood_tok_s"]
                figure.add_scatter(x=[EDGE], y=_short([share]), mode="markers", name=f"{prefix}{row['arm']}, flood", legendgroup=prefix + row["arm"],
                                   marker={"color": paint, "size": 13, "symbol": "star"},
                                   hovertemplate="<b>%{fullData.name}</b><br>%{y:.3~r} times the tokens/s<extra></extra>")
                words.append(f"{prefix}{row['arm']}, flood: {share:.2f}")
    if not figure.data:
        return nothing("; ".join(words[1:]) or "nothing was measured", "relative.csv")
    figure.add_hline(y=1, line={"color": GREY, "dash": "longdash", "width": 1.5})
    figure.update_xaxes(type="log", **log_ticks([0.02, EDGE]))
    figure.update_yaxes(rangemode="tozero")
    return set_words(figure, words, "relative.csv")


EDGE = 5.0  # crossovers: the right end of the axis


def _positive(line: tuple[float | None, float | None] | None) -> bool:
    return line is not None and all(term is not None and term > 0 for term in line)
