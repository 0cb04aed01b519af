"""The visual language that every figure shares: colours, line styles, the offered-rate axis, hover text.

What:   `canvas` makes the axes over offered rate, `add_curve` draws one statistic of one rig on them, `by_rate` folds
        the repeats of a rate into one value with its range.
Why:    over offered rates a colour always means the same rig, and a dash the same statistic; a flood is never drawn as
        if it were a number of requests per second; an invalid point is hollow wherever it appears.
Use:    figure = canvas(frames); add_curve(figure, frame, "ttft_p99_ms", name="cpu p99", latency="TTFT", unit="ms")
Not:    what a figure shows (`figures`), paper and font colours (the site's templates, light and dark).
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .percentiles import needed

# Each has a contrast of at least 3.5 : 1 with the light and with the dark page (WCAG 1.4.11 asks 3 : 1 of a line).
BLUE, ORANGE, GREEN, PURPLE = "#2f80d8", "#d9661f", "#1f9070", "#a862b8"
OCHRE, TEAL, RED, GREY = "#8d7a1a", "#1590a8", "#d84a72", "#7b8696"
RIG_COLOURS = {
    "cpu": BLUE,
    "a10g-published": ORANGE,
    "a10g": OCHRE,
    "h200-4b": GREEN,
    "h200-27b": PURPLE,
    "h200-9b-awq": TEAL,
}
BAND = "rgba(123, 134, 150, 0.22)"  # GREY, see-through on either page

# statistic -> (dash, marker, line width): the further out in the tail, the heavier, and what one request saw is dotted
STYLES = {
    "p50": ("solid", "circle", 1.5),
    "p90": ("dash", "square", 2),
    "p99": ("solid", "diamond", 3),
    "mean": ("solid", "circle", 2),
    "max": ("dot", "x", 1.5),
}
FLOOD = "all<br>at once"
FLOOD_SHARE = 0.1  # of the width, for the flood's own axis
LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "yref": "container", "y": 0, "yanchor": "bottom"}
COLUMNS = ["offered", "what", "n", "status"]  # of customdata, and so of the downloaded CSV
HOVER = (
    "<b>%{{fullData.name}}</b><br>%{{customdata[1]}} %{{y:,.4~r}}{unit}, offered %{{customdata[0]}}"
    "<br>n: %{{customdata[2]}}{rule}<br>%{{customdata[3]}}<extra></extra>"
)
RULE = "; an observed value (inverted_cdf)"


def colour(rig: str) -> str:
    """The fixed colour of a rig; one that we do not know gets one by its name, the same on every page."""
    spare = (RED, TEAL, OCHRE)
    return RIG_COLOURS.get(rig, spare[zlib.crc32(rig.encode()) % len(spare)])


def label(frame: pd.DataFrame) -> str:
    """What to call the rig of a frame: its name, marked when its figures were published and not measured by us."""
    rig = str(frame["rig"].iloc[0])
    return f"{rig.removesuffix('-published')} (published)" if _is_published(frame) else rig


def _is_published(frame: pd.DataFrame) -> bool:
    return "source" in frame and frame["source"].iloc[0] == "published"


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of one rig's frame that belong to its sweep: neither cold nor calibration nor under the profiler.

    ValueError for an empty frame or for more than one rig.
    """
    if frame.empty or frame["rig"].nunique() != 1:
        raise ValueError(
            f"a frame holds the points of one rig, not of {frame['rig'].nunique() if len(frame) else 'none'}"
        )
    return frame[~frame["pass"].isin(["cold", "calibration", "trace"])]


def by_rate(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """One row for each offered rate that has a value of `column`, ascending: request_rate, offered, value, low, high,
    n, status, valid.

    Several repeats of a rate give their median (the lower of two middle ones, an observed value) with their range low
    to high. Invalid points take part only where no repeat is valid, and are then marked. `n` and `status` are texts for
    the hover.
    """
    rows = []
    latency = column.rsplit("_", 2)[0] if column.endswith("_ms") else None
    for rate, points in frame.groupby("request_rate", sort=True):
        # Null, of published figures, is not invalid: nobody could check them.
        invalid = points["valid"].map(lambda value: not (pd.isna(value) or value))
        used = points if invalid.all() else points[~invalid]
        values = pd.to_numeric(used[column]).dropna().sort_values()
        if values.empty:
            continue
        rows.append(
            {
                "request_rate": float(rate),
                "offered": "all at once" if math.isinf(rate) else f"{rate:g}/s",
                "value": float(values.iloc[(len(values) - 1) // 2]),
                "low": float(values.iloc[0]),
                "high": float(values.iloc[-1]),
                "n": _sample_text(used, latency, len(values)),
                "status": _status(points, used, invalid, latency),
                "valid": not invalid.all(),
            }
        )
    return pd.DataFrame(rows, columns=["request_rate", "offered", "value", "low", "high", "n", "status", "valid"])


def _sample_text(used: pd.DataFrame, latency: str | None, repeats: int) -> str | int:
    counts = used.get(f"{latency}_n" if latency else "completed", pd.Series(dtype=float)).dropna()
    if counts.empty:
        return "not published" if _is_published(used) else "not recorded"
    return int(counts.min()) if repeats == 1 else f"{int(counts.min())} × {repeats} repeats (their median)"


def withheld(points: pd.DataFrame, latency: str) -> dict[str, str]:
    """The percentiles of a latency that the rows do not have, each with its reason."""
    reasons = {}
    for p in (50, 90, 99):
        column = f"{latency}_p{p}_ms"
        if column in points and points[column].isna().all():
            n = pd.to_numeric(points[f"{latency}_n"]).max()
            too_few = pd.notna(n) and n < needed(p)
            reasons[f"p{p}"] = (
                f"n = {n:.0f}, needs {needed(p)}"
                if too_few
                else ("not published" if _is_published(points) else "not recorded")
            )
    return reasons


def _status(points: pd.DataFrame, used: pd.DataFrame, invalid: pd.Series, latency: str | None) -> str:
    breaches = sorted({reason for reasons in points.loc[invalid, "reasons"] for reason in reasons})
    if invalid.all():
        parts = [f"NOT VALID: {', '.join(breaches)}"]
    elif invalid.any():
        parts = [f"{invalid.sum()} of {len(points)} repeats left out: {', '.join(breaches)}"]
    else:
        parts = ["published, not re-measured" if _is_published(points) else "valid"]
    if latency and (missing := withheld(used, latency)):
        parts.append("withheld: " + ", ".join(f"{name} ({reason})" for name, reason in missing.items()))
    return "; ".join(parts)


# --- axes -------------------------------------------------------------------------------------------------------------


def canvas(frames: list[pd.DataFrame], y_titles: list[str], height: int = 420, log_y: bool = True) -> go.Figure:
    """An empty figure with one panel a y title over a shared logarithmic axis of offered rate (requests/s).

    If any frame holds a flood, each panel gets a narrow second axis at its right end: a flood has no offered rate, so
    it gets a place of its own behind a break instead of a number.
    """
    rates = sorted({rate for frame in frames for rate in frame["request_rate"] if math.isfinite(rate)})
    flood = any(frame["request_rate"].map(math.isinf).any() for frame in frames)
    shape = (
        {"cols": 2, "column_widths": [1 - FLOOD_SHARE, FLOOD_SHARE], "horizontal_spacing": 0.025}
        if flood
        else {"cols": 1}
    )
    figure = make_subplots(
        rows=len(y_titles), shared_xaxes="columns", shared_yaxes="rows", vertical_spacing=0.07, **shape
    )
    figure.update_layout(
        height=height,
        margin={"t": 16, "r": 12, "b": 96, "l": 56},
        legend=LEGEND,
        hovermode="closest",
        meta={"columns": COLUMNS},
    )
    figure.layout.template = None  # the site lays its own over the figure
    ticks = spread_ticks(rates)
    figure.update_xaxes(col=1, type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks], automargin=True)
    figure.update_xaxes(row=len(y_titles), col=1, title={"text": "offered rate, requests/s", "standoff": 8})
    for row, title in enumerate(y_titles, start=1):
        figure.update_yaxes(row=row, type="log" if log_y else "linear", automargin=True)
        figure.update_yaxes(row=row, col=1, title={"text": title, "standoff": 6})
        if not log_y:
            figure.update_yaxes(row=row, rangemode="tozero")
    if flood:
        figure.update_xaxes(col=2, type="category", automargin=True)
        figure.update_yaxes(col=2, ticks="", showticklabels=False, showgrid=False)
        gap = (figure.layout.xaxis.domain[1] + figure.layout.xaxis2.domain[0]) / 2
        figure.add_annotation(
            x=gap, y=0, xref="paper", yref="paper", text="<b>//</b>", showarrow=False, yanchor="middle"
        )
    return figure


def spread_ticks(rates: list[float], most: int = 12) -> list[float]:
    """Those of the ascending measured rates to label on a logarithmic axis: about `most`, the highest always.

    A label needs 1 / (most - 1) of the axis, that is a constant factor from its neighbour.
    """
    least = (rates[-1] / rates[0]) ** (1 / (most - 1)) if rates else 1.0
    chosen: list[float] = []
    for rate in reversed(rates):
        if not chosen or chosen[-1] / rate >= least * 0.999:
            chosen.append(rate)
    return chosen[::-1]


def log_ticks(values: list[float], least: int = 4) -> dict[str, list]:
    """Round numbers to label on a logarithmic axis over positive `values`: {"tickvals", "ticktext"}.

    The coarsest of a few sets of leading digits that puts `least` labels between the lowest and the highest value. plotly.js
    itself labels such an axis with single digits ("2", "5"), which read as values.
    """
    positive = [value for value in values if value and value > 0]
    low, high = (min(positive) * 0.8, max(positive) * 1.25) if positive else (1.0, 10.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits_of in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)):
        found = [float(f"{digit * 10.0**power:.3g}") for power in powers for digit in digits_of]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) >= least:
            break
    return {"tickvals": found, "ticktext": [f"{tick:,.10g}" for tick in found]}


def add_curve(
    figure: go.Figure,
    frame: pd.DataFrame,
    column: str,
    *,
    name: str,
    what: str,
    unit: str = "",
    style: str = "mean",
    row: int = 1,
    visible: bool = True,
    colour_of: str | None = None,
    dash: str | None = None,
) -> pd.DataFrame:
    """Draw `column` of one rig's frame: a line over the offered rates, and the flood on its own axis. Returns
    `by_rate`."""
    curve = by_rate(frame, column) if column in frame else by_rate(frame.iloc[:0], "request_rate")
    finite = curve[curve["request_rate"].map(math.isfinite)]
    line_dash, marker, width = STYLES[style]
    paint = colour_of or colour(str(frame["rig"].iloc[0]))
    # The author's percentiles are interpolated by vLLM's load generator; its rule is not ours.
    percentiles = column.endswith("_ms") and style.startswith("p") and not _is_published(frame)
    for part, at_once in ((finite, False), (curve[~curve.index.isin(finite.index)], True)):
        if part.empty:
            continue
        ranged = (part["high"] > part["low"]).any()
        figure.add_scatter(
            row=row,
            col=2 if at_once else 1,
            name=name,
            legendgroup=f"{name} {what}",
            visible=visible,
            showlegend=not at_once or finite.empty,
            x=[FLOOD] * len(part) if at_once else part["request_rate"].tolist(),
            y=_short(part["value"]),
            mode="markers" if at_once else "lines+markers",
            line={"color": paint, "width": width, "dash": dash or line_dash},
            marker={"color": paint, "size": 8, "symbol": _symbols(part, marker)},
            error_y={
                "type": "data",
                "array": _short(part["high"] - part["value"]),
                "thickness": 1,
                "width": 3,
                "arrayminus": _short(part["value"] - part["low"]),
            }
            if ranged
            else None,
            customdata=[[point.offered, what, point.n, point.status] for point in part.itertuples()],
            hovertemplate=HOVER.format(unit=unit and f" {unit}", rule=RULE if percentiles else ""),
        )
    return curve


def _symbols(part: pd.DataFrame, marker: str) -> str | list[str]:
    """Hollow where the point is not valid; an x has no inside, so it turns into a hollow circle."""
    hollow = "circle-open" if marker == "x" else f"{marker}-open"
    return marker if part["valid"].all() else [marker if valid else hollow for valid in part["valid"]]


def _short(values: pd.Series) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def describe(name: str, curve: pd.DataFrame, unit: str) -> str:
    """A curve in words: its lowest and its highest rate, the flood, and where it is not valid."""
    if curve.empty:
        return f"{name}: no values"
    places = {math.inf: " all at once"}
    finite = [rate for rate in curve["request_rate"] if math.isfinite(rate)]
    places |= {rate: f" at {rate:g} requests/s" for rate in finite[:1] + finite[-1:]}
    parts = [f"{digits(point.value)}{unit}{places[point.request_rate]}"
             for point in curve.itertuples() if point.request_rate in places]
    hollow = curve[~curve["valid"].astype(bool)]["offered"].tolist()
    return f"{name}: {', '.join(parts)}" + (f" (not valid: {', '.join(hollow)})" if hollow else "")


def digits(value: float) -> str:
    """Three significant digits for reading, without an exponent, and all digits before the point."""
    decimals = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def set_words(figure: go.Figure, sentences: list[str], csv: str) -> go.Figure:
    """Attach the text alternative and the file name of the downloadable data."""
    alt = " ".join(sentence.rstrip(".") + "." for sentence in sentences if sentence)
    meta: dict[str, Any] = {**(figure.layout.meta or {}), "alt": alt, "csv": csv}
    figure.update_layout(meta=meta)
    return figure
