"""The figure of an overlay: every rig on one pair of axes without units.

What:   `draw` turns a `laid_over.Overlay` into a plotly figure with its text alternative.
Why:    one function for every post, so that a rig looks the same on each: its colour, a dotted line where its figures were published, hollow
        marks where a point failed its checks.
Use:    draw(laid_over.part_4(laid_over.beside(arms)))
Not:    the numbers and what they are divided by (`laid_over`), the common look (`chart`).
"""

from __future__ import annotations

import math

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from . import chart
from .chart import GREY, log_ticks, set_words
from .laid_over import Curve, Overlay

HOVER = "<b>%{fullData.name}</b><br>%{y:,.3~r} at %{x:,.3~r}<br>%{customdata[0]}<br>%{customdata[1]}<extra></extra>"
MODEL = {"color": GREY, "dash": "longdash", "width": 1.5}


def draw(overlay: Overlay) -> go.Figure:
    """The figure; with one rig alone it holds that one and the published figures. The words name every rig that is left out, and why."""
    panels = len(overlay.y_titles)
    figure = make_subplots(rows=panels, cols=1, shared_xaxes=True, vertical_spacing=0.06)
    figure.layout.template = None  # the site lays its own over the figure
    figure.update_layout(height=400 + 200 * (panels - 1), margin={"t": 16, "r": 12, "b": 112, "l": 56}, legend=chart.LEGEND, hovermode="closest",
                         meta={"columns": ["what", "status"]})
    words = [overlay.says]
    for curve in overlay.curves:
        _add(figure, curve, in_legend=curve.panel == min(each.panel for each in overlay.curves if each.rig == curve.rig))
        words.append(_describe(curve, panels > 1 and overlay.y_titles[curve.panel]))
    words += [f"{label} is left out: {reason}" if not any(curve.name.startswith(label) for curve in overlay.curves)
              else f"{label}, not drawn: {reason}" for label, reason in overlay.left_out.items()]
    xs = [x for curve in overlay.curves for x in curve.rows["x"]]
    _mark(figure, overlay, xs)
    figure.update_xaxes(type="log", automargin=True, **log_ticks([*xs, *([1.0] if "x" in overlay.marks else [])]))
    figure.update_xaxes(row=panels, title={"text": overlay.x_title, "standoff": 8})
    for place, (title, log) in enumerate(zip(overlay.y_titles, overlay.log_y, strict=True)):
        ys = [y for curve in overlay.curves if curve.panel == place for y in curve.rows["y"]]
        top = max([*ys, 0.1])
        # A little below zero, so that a mark on the axis is whole.
        scale = {"type": "log", **log_ticks(ys)} if log else {"range": [-0.06 * top, 1.1 * top]}
        figure.update_yaxes(row=place + 1, automargin=True, title={"text": title, "standoff": 6}, **scale)
    return set_words(figure, words, overlay.csv)


def _add(figure: go.Figure, curve: Curve, in_legend: bool) -> None:
    rows, paint = curve.rows, chart.colour(curve.rig)
    low, high = (pd.to_numeric(rows[name]).fillna(rows["y"]) for name in ("low", "high"))
    symbols = [name if valid else f"{name}-open" for name, valid in zip(rows["symbol"], rows["valid"], strict=True)]
    spread = {"type": "data", "array": _short(high - rows["y"]), "arrayminus": _short(rows["y"] - low), "thickness": 1, "width": 3}
    figure.add_scatter(
        row=curve.panel + 1, col=1, name=curve.name, legendgroup=curve.rig, showlegend=in_legend, x=_short(rows["x"]), y=_short(rows["y"]),
        mode="lines+markers" if curve.joined else "markers",
        line={"color": paint, "width": 2, "dash": "dot" if curve.published else "solid"},
        marker={"color": paint, "size": 10, "symbol": symbols},
        error_y=spread if (high > low).any() else None,
        customdata=rows[["what", "from"]].to_numpy().tolist(), hovertemplate=HOVER)


def _mark(figure: go.Figure, overlay: Overlay, xs: list[float]) -> None:
    if "x" in overlay.marks:
        value, text = overlay.marks["x"]
        figure.add_vline(x=value, line=MODEL)
        # A logarithmic axis takes the logarithm here.
        figure.add_annotation(x=math.log10(value), y=1, xref="x", yref="y domain", text=text, showarrow=False, xanchor="right", yanchor="top",
                              font_size=11)
    if "diagonal" in overlay.marks and xs:
        ends = [0.8 * min(xs), 1.25 * max(xs)]
        figure.add_scatter(row=1, col=1, x=_short(ends), y=_short(ends), mode="lines", name=overlay.marks["diagonal"], line=MODEL, hoverinfo="skip")
    if "y" in overlay.marks:
        figure.add_hline(y=overlay.marks["y"], line={"color": GREY, "dash": "dot", "width": 1})


def _describe(curve: Curve, panel: str | bool) -> str:
    """The first and the last mark of a curve, and how many there are."""
    first, last = curve.rows.iloc[0], curve.rows.iloc[-1]
    ends = f"{first['y']:.3g} at {first['x']:.3g}" + (f", {last['y']:.3g} at {last['x']:.3g}" if len(curve.rows) > 1 else "")
    hollow = int((~curve.rows["valid"].astype(bool)).sum())
    return f"{curve.name}{f' ({panel})' if panel else ''}: {len(curve.rows)} marks, {ends}" + (f"; {hollow} not valid" if hollow else "")


def _short(values: pd.Series) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
