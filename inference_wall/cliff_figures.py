"""The figures of the batching cliff: throughput, step time, queue, price, and the published card beside ours.

What:   one function a figure, from the tables of `cliff` to a plotly figure with its text alternative.
Why:    caps are marks and closed loops a line wherever both are drawn, so that a reader sees which is the real switch and which stands
        in for it; a model or a bound is dashed, a measurement is not.
Use:    throughput(cliff.caps_frame(arms), cliff.closed_frame(arms), fit, "cpu")
Not:    the analysis (`cliff`), the words around a figure (`part_3`), the common look (`chart`).

Hollow marks are points whose validity checks failed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from . import chart
from .chart import BAND, GREY, OCHRE, RED, colour, digits, log_ticks, set_words
from .cliff import StepFit

TOGETHER = "cap, or requests in flight"
COLUMNS = ["kind", "what", "n", "status"]  # of customdata, and so of the downloaded CSV
HOVER = ("<b>%{{fullData.name}}</b> at %{{x:,.4~r}}<br>%{{customdata[1]}} %{{y:,.4~r}}{unit}<br>n: %{{customdata[2]}}"
         "<br>%{{customdata[3]}}<extra></extra>")
MOST_MARKS = 200  # of a queue: more are one line
THEORY = {"color": GREY, "dash": "longdash", "width": 1.5}


def _canvas(y_titles: list[str], x_title: str, height: int = 420, shared: bool = True) -> go.Figure:
    figure = make_subplots(rows=len(y_titles), cols=1, shared_xaxes=shared, vertical_spacing=0.07)
    figure.layout.template = None  # the site lays its own over the figure
    figure.update_layout(height=height, margin={"t": 16, "r": 12, "b": 112, "l": 56}, legend=chart.LEGEND, hovermode="closest",
                         meta={"columns": COLUMNS})
    figure.update_xaxes(automargin=True)
    figure.update_xaxes(row=len(y_titles), title={"text": x_title, "standoff": 8})
    for row, title in enumerate(y_titles, start=1):
        figure.update_yaxes(row=row, automargin=True, title={"text": title, "standoff": 6})
    return figure


def _log_x(figure: go.Figure, values: Any) -> None:
    """A logarithmic axis labelled with the values that were measured."""
    shown = chart.spread_ticks(sorted({float(value) for value in values}), most=9)
    figure.update_xaxes(type="log", tickvals=shown, ticktext=[f"{value:g}" for value in shown])


def _log_y(figure: go.Figure, row: int) -> None:
    axis = "y" if row == 1 else f"y{row}"
    figure.update_yaxes(row=row, type="log", **log_ticks([y for trace in figure.data if (trace.yaxis or "y") == axis for y in trace.y]))


def _curve(figure: go.Figure, rows: pd.DataFrame, x: str, y: str, *, name: str, kind: str, what: str, unit: str, paint: str, row: int = 1,
           n: str = "num_prompts", line: bool = True, style: str = "p50", symbol: str | None = None) -> str:
    """Draw one column of a folded table; returns it in words. A row without a value is left out."""
    known = rows[rows[y].notna()] if y in rows else rows.iloc[:0]
    if known.empty:
        return f"{name}, {what}: no values"
    dash, marker, width = chart.STYLES[style]
    marker = symbol or marker
    hollow = "circle-open" if marker == "x" else f"{marker}-open"
    figure.add_scatter(
        row=row, col=1, name=name, legendgroup=name, showlegend=not any(trace.name == name for trace in figure.data),
        x=_short(known[x]), y=_short(known[y]), mode="lines+markers" if line else "markers", line={"color": paint, "width": width, "dash": dash},
        marker={"color": paint, "size": 9 if symbol else 8, "symbol": [marker if valid else hollow for valid in known["valid"]]},
        customdata=[[kind, what, _count(point, n), _status(point)] for point in known.to_dict("records")],
        hovertemplate=HOVER.format(unit=unit and f" {unit}"))
    ends = known.iloc[[0, -1]] if len(known) > 1 else known
    bad = [f"{value:g}" for value in known.loc[~known["valid"].astype(bool), x]]
    return f"{name}, {what}: " + ", ".join(f"{digits(float(end[y]))} {unit} at {end[x]:g}" for end in ends.to_dict("records")) + (
        f" (not valid: {', '.join(bad)})" if bad else "")


def _count(point: dict[str, Any], column: str) -> str:
    n = point.get(column)
    text = "not recorded" if n is None or pd.isna(n) else f"{n:.0f}"
    repeats = point.get("repeats") or 1
    return text + (f" × {repeats} repeats (their median)" if repeats > 1 else "")


def _status(point: dict[str, Any]) -> str:
    running = point.get("running_mean")
    said = "" if running is None or pd.isna(running) else f"; {digits(float(running))} running on average by the server's gauge"
    stretch = f", over the {point['tok_s_kind']}" if point.get("tok_s_kind") else ""
    return ("valid" if point["valid"] else f"NOT VALID: {', '.join(point['reasons'])}") + said + stretch


def _short(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _model(figure: go.Figure, x: Any, y: Any, name: str, row: int = 1, paint: str = GREY, dash: str = "longdash") -> None:
    figure.add_scatter(x=_short(x), y=_short(y), row=row, col=1, mode="lines", name=name, line={"color": paint, "dash": dash, "width": 1.5},
                       hovertemplate="%{fullData.name}<br>%{y:,.4~r} at %{x:,.4~r}<extra></extra>")


def _nothing(height: int, reason: str, csv: str) -> go.Figure:
    """An honest empty figure: it says why it is empty."""
    figure = _canvas([""], "", height)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.add_annotation(text=reason, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    return set_words(figure, [f"Nothing to draw: {reason}"], csv)


# --- 1: throughput ----------------------------------------------------------------------------------------------------


def throughput(caps: pd.DataFrame, closed: pd.DataFrame, fit: StepFit, rig: str, handed_out: float | None = None) -> go.Figure:
    """Output tokens/s (above) and mean running batch by the client (below) against cap and concurrency, with the proportional line and the fit's
    curve. The server's gauge is in the hover. `handed_out`: tokens/s of the front end where it was the limit."""
    every = sorted({*caps["cap"], *closed["max_concurrency"]})
    if not every:
        return _nothing(420, "no flood and no closed loop was measured", "throughput_by_cap.csv")
    figure = _canvas(["output tokens/s", "running batch, mean"], TOGETHER, height=560)
    words = ["Output tokens per second and mean running batch against the number of requests allowed together, all axes logarithmic"]
    lines = ((closed, "max_concurrency", "closed loop", True, None), (caps, "cap", "cap", False, "square"))
    for rows, x, name, line, symbol in lines:
        for column, what, unit, row in (("tok_s", "output", "tokens/s", 1), ("batch_mean", "running batch", "requests", 2)):
            paint = colour(rig) if name == "closed loop" else RED
            words.append(_curve(figure, rows, x, column, name=name, kind=name, what=what, unit=unit, paint=paint, row=row, line=line, symbol=symbol))
    span = np.geomspace(every[0], every[-1], 40) if every[-1] > every[0] else np.array([every[0]])
    base = _first_seat(caps, closed)
    if base is not None:
        _model(figure, span[[0, -1]], base * span[[0, -1]], "in proportion")
    if handed_out:
        _model(figure, span[[0, -1]], [handed_out] * 2, "what the front end handed out", paint=RED, dash="dot")
        words.append(f"The server's front end handed out up to {digits(handed_out)} tokens/s in the steps that were held up")
    if fit.fixed_ms is not None and fit.slope_ms > 0:
        _model(figure, span, fit.tok_s(span), "decode alone, from the step fit", paint=OCHRE, dash="dash")
        words.append(f"A step of pure decode, from its fit, would give {digits(float(fit.tok_s(every[-1])))} tokens/s at {every[-1]}")
    figure.add_scatter(x=[every[0], every[-1]], y=[every[0], every[-1]], row=2, col=1, mode="lines", name="all that is allowed", line=THEORY,
                       showlegend=False, hoverinfo="skip")
    _log_x(figure, every)
    _log_y(figure, 1)
    _log_y(figure, 2)
    return set_words(figure, words, "throughput_by_cap.csv")


def _first_seat(caps: pd.DataFrame, closed: pd.DataFrame) -> float | None:
    """Tokens per second a seat at the smallest size that was measured, of a cap where both kinds have it: what growth in proportion starts from."""
    ends = [rows[rows["tok_s"].notna()].iloc[:1].rename(columns={size: "size"})[["size", "tok_s"]] for rows, size in (
        (caps, "cap"), (closed, "max_concurrency"))]
    known = [end.iloc[0] for end in ends if len(end)]
    return min((float(end["size"]), place, float(end["tok_s"] / end["size"])) for place, end in enumerate(known))[2] if known else None


# --- 2: step time -----------------------------------------------------------------------------------------------------


def step_line(steps: pd.DataFrame, fit: StepFit, rig: str, stream_ms: float | None = None, own_ms: float | None = None) -> go.Figure:
    """Step time against batch with the fit, its 95 % band and the crossover; below all, what bytes allow (`stream_ms` + batch x `own_ms`)."""
    known = steps[steps["step_ms"].notna()]  # also those that were held up: `held_up.mark`
    if known.empty:
        return _nothing(420, "no step time was measured", "step_time.csv")
    figure = _canvas(["step time, ms"], "batch: sequences in the step", height=460)
    largest = float(known["batch"].max())
    inside = fit.unbounded is None and fit.crossover is not None and fit.crossover <= 1.5 * largest
    span = np.linspace(0, max(largest, fit.crossover if inside else 0) * 1.05, 40)
    words = ["Time of one step against the number of sequences in it"]
    if fit.fixed_ms is not None:
        low, high = fit.band_ms(span)
        figure.add_scatter(x=_short([*span, *span[::-1]]), y=_short([*np.maximum(high, 0), *np.maximum(low, 0)[::-1]]), mode="lines",
                           fill="toself", fillcolor=BAND, line={"width": 0}, name="95 % band of the fit", hoverinfo="skip", row=1, col=1)
        beyond = fit.batches[-1] < largest  # batches that were held up are not in the line
        inner = span if not beyond else np.linspace(0, fit.batches[-1], 40)
        _model(figure, inner, fit.step_ms(inner), "fit", paint=colour(rig), dash="solid")
        if beyond:
            outer = np.array([fit.batches[-1], span[-1]])
            _model(figure, outer, fit.step_ms(outer), "fit, drawn on", paint=colour(rig), dash="dash")
        words.append(f"Fit: {digits(fit.fixed_ms)} ms and {digits(fit.slope_ms)} ms for each sequence" + (
            f", R² {fit.r2:.4f}" if fit.r2 is not None else "") + f", {fit.n} points")
    else:
        words.append(f"No fit: {fit.reason}")
    if stream_ms:
        _model(figure, span, stream_ms + span * (own_ms or 0), "bytes over bandwidth")
        words.append(f"Bytes over bandwidth allow {digits(stream_ms)} ms" + (f" and {digits(own_ms)} ms for each sequence" if own_ms else ""))
    held = known[known["held_up"].notna()]
    words.append(_curve(figure, known.drop(held.index), "batch", "step_ms", name="measured, median", kind="steps", what="step", unit="ms",
                        paint=colour(rig), n="n", line=False))
    if len(held):
        words.append(_curve(figure, held, "batch", "step_ms", name="held up by the front end, not in the fit", kind="held up", what="step",
                            unit="ms", paint=RED, n="n", line=False, symbol="circle-open"))
        traced = held[held["traced_ms"].notna()].drop_duplicates("batch")
        words.append(_curve(figure, traced, "batch", "traced_ms", name="the engine's own step, in the trace", kind="trace", what="step and gap",
                            unit="ms", paint=OCHRE, n="not given", line=False, symbol="diamond"))
    if fit.crossover is not None:
        if inside:
            figure.add_vline(x=fit.crossover, line=THEORY)
            figure.add_annotation(x=fit.crossover, y=1, yref="y domain", yanchor="top", xanchor="right", showarrow=False, font_size=11,
                                  text=f"crossover<br>{digits(fit.crossover)}")
        words.append(f"Crossover at a batch of {digits(fit.crossover)}" + (
            "" if inside else f", not drawn: {fit.unbounded}" if fit.unbounded else ", outside of the figure"))
    figure.update_xaxes(rangemode="tozero", range=[0, span[-1]])
    figure.update_yaxes(rangemode="tozero")
    return set_words(figure, words, "step_time.csv")


# --- 3: the queue -----------------------------------------------------------------------------------------------------


def queue(lines: dict[int, pd.DataFrame], service_s: float | None, alone_s: float | None, rig: str) -> go.Figure:
    """TTFT of each request of a flood against its place in the queue. `lines`: cap -> `cliff.queue_positions`, the smallest first.

    The theory of a cap of 1 is drawn where `service_s` (a whole answer alone) is known: place x service_s + alone_s.
    """
    lines = {cap: rows for cap, rows in lines.items() if len(rows)}
    if not lines:
        return _nothing(420, "no request of a flood completed", "queue.csv")
    figure = _canvas(["TTFT, seconds"], "place in the queue (0 = served first)")
    words = ["Time to first token of each request of a flood against its place in the queue"]
    for (cap, rows), paint, symbol in zip(lines.items(), (RED, colour(rig)), ("square", "circle"), strict=False):
        shown = rows.iloc[:: math.ceil(len(rows) / MOST_MARKS)]
        figure.add_scatter(x=shown["position"].astype(int).tolist(), y=_short(shown["ttft_s"]), row=1, col=1, mode="markers", name=f"cap {cap}",
                           marker={"color": paint, "size": 7, "symbol": symbol},
                           customdata=[["flood", "TTFT", len(rows), f"request {request}"] for request in shown["request"]],
                           hovertemplate=f"<b>cap {cap}</b>, place %{{x}} of {len(rows)}<br>TTFT %{{y:.4~r}} s<br>%{{customdata[3]}}<extra></extra>")
        words.append(f"Cap {cap}, {len(rows)} prompts: {digits(float(rows['ttft_s'].iloc[0]))} s at the front, "
                     f"{digits(float(rows['ttft_s'].iloc[-1]))} s at the end")
    smallest = min(lines)
    if service_s and smallest == 1:
        last = float(lines[1]["position"].max())
        _model(figure, [0, last], [alone_s or 0, last * service_s + (alone_s or 0)], "place × time of one answer")
        words.append(f"Theory at a cap of 1: {digits(service_s)} s for each place")
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    return set_words(figure, words, "queue.csv")


# --- 4: the price -----------------------------------------------------------------------------------------------------


def price(caps: pd.DataFrame, closed: pd.DataFrame, rig: str) -> go.Figure:
    """ITL (above) and TTFT (below) against cap and concurrency: the median, and the highest percentile that the samples bear."""
    every = sorted({*caps["cap"], *closed["max_concurrency"]})
    if not every:
        return _nothing(420, "no flood and no closed loop was measured", "price.csv")
    figure = _canvas(["ITL, ms", "TTFT, ms"], TOGETHER, height=600)
    words = ["Gap between tokens and time to first token against the number of requests allowed together, all axes logarithmic. The TTFT of "
             "a flood holds its queue and is not comparable across caps"]
    for row, latency in ((1, "itl"), (2, "ttft")):
        tail = next((name for name in ("p99", "p90", "max") if any(f"{latency}_{name}_ms" in rows and rows[f"{latency}_{name}_ms"].notna().any()
                                                                   for rows in (closed, caps))), "max")
        for rows, x, name, line in ((closed, "max_concurrency", "closed loop", True), (caps, "cap", "cap", False)):
            paint = colour(rig) if line else RED
            for statistic in ("p50", tail):
                symbol = None if line else "square" if statistic == "p50" else "diamond"
                words.append(_curve(figure, rows, x, f"{latency}_{statistic}_ms", name=f"{name}, {statistic}", kind=name, what=latency.upper(),
                                    unit="ms", paint=paint, row=row, n=f"{latency}_n", line=line, style=statistic, symbol=symbol))
    _log_x(figure, every)
    for row in (1, 2):
        _log_y(figure, row)
    return set_words(figure, words, "price.csv")


# --- 5: two machines on one curve -------------------------------------------------------------------------------------


def on_one_curve(machines: list[dict[str, Any]]) -> go.Figure:
    """Batch over crossover against throughput over the fit's ceiling, where every machine lies on x / (1 + x) as long as its step is a line.

    A machine: rig, label, fit (`StepFit`), steps (columns batch, tok_s) and caps (columns batch, tok_s; `batch` is what ran on average).
    One whose crossover is not bounded by its points cannot be placed and is left out, which the words say.
    """
    figure = _canvas(["throughput / ceiling of the fit"], "running batch / crossover", height=460)
    words, places = ["Throughput relative to the ceiling of the step's fit against running batch relative to its crossover"], []
    for machine in machines:
        fit, paint = machine["fit"], colour(machine["rig"])
        if fit.crossover is None or fit.unbounded:
            words.append(f"{machine['label']} is left out: {fit.unbounded}")
            continue
        for name, rows, symbol in (("decode alone", machine["steps"], "circle"), ("flood", machine["caps"], "square")):
            rows = rows[rows["batch"].notna() & rows["tok_s"].notna()]
            if rows.empty:
                continue
            held = rows["held_up"].notna() if "held_up" in rows else pd.Series(False, rows.index)
            x, y = rows["batch"] / fit.crossover, rows["tok_s"] / fit.ceiling_tok_s
            places += x.tolist()
            figure.add_scatter(x=_short(x), y=_short(y), row=1, col=1, mode="markers" if name == "decode alone" else "lines+markers",
                               name=f"{machine['label']}, {name}", line={"color": paint, "width": 1.5, "dash": "dot"},
                               marker={"color": paint, "size": 9, "symbol": [f"{symbol}-open" if late else symbol for late in held]},
                               customdata=[[name, "throughput", "", f"{batch:.4g} running, {tok_s:.4g} tokens/s" + ", held up" * late]
                                           for batch, tok_s, late in zip(rows["batch"], rows["tok_s"], held, strict=True)],
                               hovertemplate="<b>%{fullData.name}</b><br>%{y:.3~r} of the ceiling at %{x:.3~r} of the crossover"
                                             "<br>%{customdata[3]}<extra></extra>")
            if not held.all():
                most = y[~held].idxmax()
                words.append(f"{machine['label']}, {name}: up to {y[most]:.2f} of the ceiling, at {x[most]:.2f} of the crossover" + (
                    f" ({held.sum()} more were held up on their way to the client)" if held.any() else ""))
    if not places:
        return _nothing(420, "; ".join(words[1:]) or "no machine has a fit", "one_curve.csv")
    span = np.geomspace(min(places) * 0.8, max(places) * 1.25, 60)
    _model(figure, span, span / (1 + span), "x / (1 + x)")
    figure.update_xaxes(type="log", **log_ticks(list(places)))
    figure.update_yaxes(rangemode="tozero")
    return set_words(figure, words, "one_curve.csv")
