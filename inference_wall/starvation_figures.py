"""The figures of cache starvation: a flood on one clock, demand over room against counts, the price, and the author's timelines.

What:   one function a figure, from raw rows and the tables of `starvation` to a plotly figure with its text alternative.
Why:    a count says that somebody was put out; only requests and counters on one axis show who, when, and what it held up.
Use:    timeline(requests, chunks, metrics, "positive on blocks-17"); demand(starvation.bounds(arms), starvation.counts(arms))
Not:    the analysis (`starvation`), the words around a figure (`part_4`), the common look (`chart`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from . import chart, starvation
from .chart import BLUE, GREEN, GREY, OCHRE, ORANGE, PURPLE, RED, TEAL, digits, set_words
from .percentiles import PERCENTILES, summarise
from .samples import UNIT_S, ticks

MOST_REQUESTS = 200  # bars: more are thinner than a pixel
MOST_SAMPLES = 500
ARM_COLOURS = (GREEN, RED, PURPLE, TEAL)  # natural first, then the cut caches in their order
LOAD_MARKERS = {"positive": "circle", "balanced": "square", "long": "diamond"}
PUBLISHED = chart.colour("a10g-published")


def arm_colours(names: list[str]) -> dict[str, str]:
    """A colour an arm: the natural cache has the first one even where it is missing."""
    ordered = ["natural", *(name for name in names if name != "natural")]
    return {name: ARM_COLOURS[place % len(ARM_COLOURS)] for place, name in enumerate(ordered)}


def _canvas(y_titles: list[str], x_title: str, height: int, heights: list[float] | None = None, shared: bool = True) -> go.Figure:
    figure = make_subplots(rows=len(y_titles), cols=1, shared_xaxes=shared, vertical_spacing=0.045 if shared else 0.16, row_heights=heights)
    figure.layout.template = None  # the site lays its own over the figure
    figure.update_layout(height=height, margin={"t": 16, "r": 12, "b": 112, "l": 56}, legend=chart.LEGEND, hovermode="closest")
    figure.update_xaxes(automargin=True)
    figure.update_xaxes(row=len(y_titles), title={"text": x_title, "standoff": 8})
    for row, title in enumerate(y_titles, start=1):
        figure.update_yaxes(row=row, automargin=True, title={"text": title, "standoff": 6})
    return figure


def nothing(reason: str, csv: str) -> go.Figure:
    """An honest empty figure: it says why it is empty."""
    figure = _canvas([""], "", 200)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.add_annotation(text="<br>".join(_lines(reason)), x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    return set_words(figure, [f"Nothing to draw: {reason}"], csv)


def _lines(text: str, width: int = 40) -> list[str]:
    lines = [""]
    for word in text.split():
        lines[-1:] = [f"{lines[-1]} {word}".strip()] if len(lines[-1]) + len(word) < width else [lines[-1], word]
    return lines


def _round(values: Any) -> list[float]:
    return [round(float(value), 4) for value in values]


# --- a flood on one clock ---------------------------------------------------------------------------------------------


def timeline(requests: pd.DataFrame, chunks: pd.DataFrame, metrics: pd.DataFrame, what: str, csv: str = "starvation_timeline.csv") -> go.Figure:
    """Each request's life, the batch and the queue, the cache's fill and the preemptions so far, on one axis of seconds.

    Frames: the raw rows of one flood. A bar is a request: waiting for its first token, streaming, and stopped (`starvation.pauses`).
    The line across all panels is the first end. At most `MOST_REQUESTS` bars, evenly spread.
    """
    every = requests[requests["sent"].notna()].sort_values(["intended", "sent", "request"], ignore_index=True)
    if every.empty:
        return nothing("no request was sent", csv)
    shown = every.iloc[:: math.ceil(len(every) / MOST_REQUESTS)]
    zero = ticks(every["intended"]).min()
    last = float(np.nanmax((ticks(every["end"]) - zero) * UNIT_S)) if every["end"].notna().any() else 1.0
    figure = _canvas(["request", "requests", "cache, %", "counted"], "seconds since the first arrival", 745, [0.46, 0.2, 0.16, 0.18])
    figure.update_layout(margin_b=140)  # seven entries in the legend, one below the other on a phone
    number = dict(zip(every["request"], every.index + 1, strict=True))
    paused = starvation.pauses(requests, chunks)

    def bars(name: str, paint: str, who: Any, start: Any, stop: Any, hover: str) -> None:
        start, stop = np.asarray(start, float), np.asarray(stop, float)
        known = np.isfinite(start) & np.isfinite(stop)
        if known.any():
            figure.add_bar(row=1, col=1, orientation="h", name=name, marker_color=paint, marker_line_width=0,
                           y=[number[request] for request in np.asarray(who)[known]], base=_round(start[known]),
                           x=_round(stop[known] - start[known]), width=1 if len(shown) > 60 else 0.8,
                           hovertemplate=f"request %{{y}}, {hover} %{{x:.4~r}} s, from second %{{base:.4~r}}<extra></extra>")

    at = {name: (ticks(shown[name]) - zero) * UNIT_S for name in ("intended", "first_token", "end")}
    failed = (shown["outcome"] != "completed").to_numpy()
    who = shown["request"].to_numpy()
    bars("waiting for the first token", OCHRE, who[~failed], at["intended"][~failed], at["first_token"][~failed], "waited")
    bars("streaming", BLUE, who[~failed], at["first_token"][~failed], at["end"][~failed], "streamed")
    bars("failed or cancelled", ORANGE, who[failed], at["intended"][failed], at["end"][failed], "in vain for")
    seen = paused[paused["request"].isin(shown["request"])]
    bars("stopped while others went on", RED, seen["request"].to_numpy(), (seen["start"] - zero) * UNIT_S, (seen["end"] - zero) * UNIT_S,
         "stood still for")

    inside = metrics[(ticks(metrics["time"]) - zero) * UNIT_S >= -0.5]
    inside = inside[(ticks(inside["time"]) - zero) * UNIT_S <= last + 0.5]
    counted = _gauges(figure, inside, zero)
    first_end = every.loc[every["outcome"] == "completed", "end"]
    if first_end.notna().any():
        x = (float(ticks(first_end.dropna()).min()) - zero) * UNIT_S
        for row in range(1, 5):
            figure.add_vline(x=x, row=row, col=1, line={"color": GREY, "dash": "dot", "width": 1.5})
        figure.add_annotation(x=x, xref="x", y=1, yref="y domain", text="first end", showarrow=False, yanchor="top", font_size=11,
                              xanchor="right" if x > 0.7 * last else "left")
    figure.update_layout(barmode="overlay", bargap=0)
    figure.update_yaxes(row=1, autorange="reversed")
    for row in (2, 3, 4):
        figure.update_yaxes(row=row, rangemode="tozero")
    figure.update_xaxes(range=[-0.01 * last, 1.02 * last])
    waits = at["first_token"][~failed] - at["intended"][~failed]
    waits = waits[np.isfinite(waits)]
    words = [
        f"Timeline of {what}: {len(every)} requests over {last:,.1f} s" + (f", {len(shown)} shown" if len(shown) < len(every) else ""),
        f"First tokens came after {waits.min():,.2f} to {waits.max():,.2f} s" if waits.size else "",
        f"The server counted {counted:.0f} preemptions" if counted is not None else "The server's preemptions were not sampled",
        f"{len(paused)} answers stopped while others went on, for {paused['pause_s'].min():,.2f} to {paused['pause_s'].max():,.2f} s"
        if len(paused) else "No answer stopped while others went on",
        f"{int(failed.sum())} of those shown failed or were cancelled" if failed.any() else "",
    ]
    return set_words(figure, words, csv)


def _gauges(figure: go.Figure, samples: pd.DataFrame, zero: float) -> float | None:
    """Draw the server's gauges below the bars; returns the preemptions counted from the first to the last sample, None if unknown."""
    thin = samples.iloc[:: math.ceil(len(samples) / MOST_SAMPLES) or 1]
    x = _round((ticks(thin["time"]) - zero) * UNIT_S)
    curves = (("running", "running (server)", 1.0, "solid", BLUE, 2, "linear"), ("waiting", "waiting (server)", 1.0, "dash", OCHRE, 2, "linear"),
              ("kv_cache_usage", "KV cache in use", 100.0, "solid", TEAL, 3, "linear"),
              ("preemptions_total", "preemptions counted so far", 1.0, "solid", RED, 4, "hv"))
    for column, name, factor, dash, paint, row, shape in curves:
        if column not in thin or thin[column].isna().all():
            continue
        values = thin[column] * factor
        if column == "preemptions_total":
            values = values - values.dropna().iloc[0]
        figure.add_scatter(row=row, col=1, x=x, y=[None if pd.isna(value) else round(float(value), 2) for value in values], name=name, mode="lines",
                           line={"color": paint, "dash": dash, "width": 1.8, "shape": shape},
                           hovertemplate=f"{name}: %{{y:,.3~r}} at second %{{x:.4~r}}<extra></extra>")
    known = samples["preemptions_total"].dropna() if "preemptions_total" in samples else pd.Series(dtype=float)
    return float(known.iloc[-1] - known.iloc[0]) if len(known) else None


# --- demand over room -------------------------------------------------------------------------------------------------


def demand(bounds: pd.DataFrame, counts: pd.DataFrame, published: pd.DataFrame | None = None) -> go.Figure:
    """Preemptions against what the admitted requests need at their end over what there is: counted, and by the rules alone.

    `bounds`, `counts`: of `starvation`. `published`: rows with arm, load, demand_over_room, preemptions, rules, of the author. An
    unknown count is not drawn; the words name it.
    """
    csv = "demand_over_room.csv"
    if bounds.empty or "demand_over_room" not in bounds or bounds["demand_over_room"].isna().all():
        return nothing("no flood with a known cache was measured", csv)
    figure = _canvas(["preemptions"], "blocks needed / blocks there are", 460)
    figure.update_layout(meta={"columns": ["load", "need", "status"]})
    words = ["Preemptions against the blocks that all admitted requests need at their end, relative to the blocks there are (logarithmic)"]
    paints, largest, xs = arm_colours(list(dict.fromkeys(bounds["arm"]))), 1.0, []
    joined = counts.merge(bounds.drop(columns=["num_prompts", "input_len", "output_len"]), on=["arm", "load"])
    for arm, rows in joined.groupby("arm", sort=False):
        rows = rows[rows["demand_over_room"].notna()]
        xs += rows["demand_over_room"].tolist()
        known = rows[rows["preemptions"].notna()]
        for row in rows[rows["preemptions"].isna()].itertuples():
            words.append(f"{arm}, {row.load}: not drawn, the count is unknown ({row.why})")
        largest = max([largest, *known["preemptions"].astype(float), *rows[["rules", "ahead_rules"]].astype(float).max().dropna()])
        if len(known):
            figure.add_scatter(
                x=_round(known["demand_over_room"]), y=known["preemptions"].astype(float).tolist(), mode="markers", name=f"{arm}, counted",
                marker={"color": paints[arm], "size": [15 if load == "positive" else 10 for load in known["load"]],
                        "symbol": [_symbol(load, valid) for load, valid in zip(known["load"], known["valid"], strict=True)], "opacity": 0.85},
                customdata=[[row.load, f"{row.demand} of {row.usable} blocks", _proof(row)] for row in known.itertuples()],
                hovertemplate="<b>%{fullData.name}</b>: %{y:.0f}<br>load %{customdata[0]}, needs %{customdata[1]}<br>%{customdata[2]}<extra></extra>")
            words += [f"{arm}, {row.load}: {row.preemptions} at {row.demand_over_room:.2f}" for row in known.itertuples()]
    expected = bounds[bounds["rules"].notna()]
    if len(expected):
        _rules(figure, expected["demand_over_room"], expected["rules"], expected["arm"] + ", " + expected["load"], "by the rules alone")
        ahead = expected[expected["ahead_rules"] != expected["rules"]]
        if len(ahead):  # with the first request one step ahead of the others
            _rules(figure, ahead["demand_over_room"], ahead["ahead_rules"], ahead["arm"] + ", " + ahead["load"], "by the rules alone", legend=False)
        words += [f"By the rules alone {row.arm}, {row.load} gives {row.rules:.0f}"
                  + ("" if row.ahead_rules == row.rules else f" or {row.ahead_rules:.0f}") for row in expected.itertuples()]
    if published is not None and len(published):
        rows = published[published["preemptions"].notna() & published["demand_over_room"].notna()]
        figure.add_scatter(
            x=_round(rows["demand_over_room"]), y=rows["preemptions"].astype(float).tolist(), mode="markers", name="A10G, published",
            marker={"color": PUBLISHED, "size": 11, "symbol": "cross"},
            customdata=[[f"{row.arm}, {row.load}", "", "published by the author, not re-measured here"] for row in rows.itertuples()],
            hovertemplate="<b>%{customdata[0]}</b>: %{y:.0f}<br>%{customdata[2]}<extra></extra>")
        played = rows[rows["rules"].notna()]
        _rules(figure, played["demand_over_room"], played["rules"], played["arm"] + ", " + played["load"], "by the rules alone", legend=False)
        xs += rows["demand_over_room"].tolist()
        largest = max([largest, *rows["preemptions"].astype(float)])
        words += [f"Published, {row.arm}, {row.load}: {row.preemptions:.0f} at {row.demand_over_room:.2f}"
                  + (f", by the rules {row.rules:.0f}" if pd.notna(row.rules) else "") for row in rows.itertuples()]
    figure.add_vline(x=1, line={"color": GREY, "dash": "longdash", "width": 1.5})
    figure.update_xaxes(type="log", **chart.log_ticks([*xs, 1.0]))
    # A logarithmic axis takes the logarithm here.
    figure.add_annotation(x=0, y=1, yref="y domain", text="just fits", showarrow=False, xanchor="right", yanchor="top", font_size=11)
    figure.update_yaxes(range=[-0.06 * largest, 1.1 * largest])
    return set_words(figure, words, csv)


def _symbol(load: str, valid: Any) -> str:
    marker = LOAD_MARKERS.get(load, "triangle-up")
    return marker if valid else f"{marker}-open"


def _proof(row: Any) -> str:
    text = {"counted": "counted by the engine", "control": "a zero of a counter that was seen to move", "room": "a zero by arithmetic: the load fits"}
    valid = "" if row.valid else f"; NOT VALID: {', '.join(row.reasons)}"
    return text[row.proof] + valid


def _rules(figure: go.Figure, x: Any, y: Any, names: Any, name: str, legend: bool = True) -> None:
    figure.add_scatter(x=_round(x), y=[float(value) for value in y], mode="markers", name=name, legendgroup=name, showlegend=legend,
                       marker={"color": GREY, "size": 22, "symbol": "line-ew-open", "line": {"width": 2, "color": GREY}},
                       customdata=[[each, "", "computed from lengths and blocks alone"] for each in names],
                       hovertemplate="<b>%{customdata[0]}</b>, by the rules: %{y:.0f}<extra></extra>")


# --- the price --------------------------------------------------------------------------------------------------------


def price(sides: dict[str, tuple[pd.DataFrame, pd.DataFrame]], load: str) -> go.Figure:
    """E2E (above) and worst stall (below) of every request of one load: the share of requests against seconds, one curve an arm.

    `sides`: arm name to (requests, chunks) of its point. Each step of a curve is one request. Marks are the percentiles that
    the sample can bear; the words name those that it cannot.
    """
    csv = f"price_{load}.csv"
    if not sides:
        return nothing(f"the load {load} was not measured on both caches", csv)
    figure = _canvas(["share, E2E", "share, stall"], "worst stall, seconds", 560, shared=False)
    figure.update_xaxes(row=1, col=1, title={"text": "E2E, seconds", "standoff": 4})
    figure.update_layout(meta={"columns": ["what"]})
    words = [f"Share of the requests of load {load} against their E2E and against their worst stall"]
    paints = arm_colours(list(sides))
    for arm, (requests, chunks) in sides.items():
        for row, latency in ((1, "e2e"), (2, "stall")):
            values = np.sort(starvation.samples(requests, chunks, latency).dropna().to_numpy(float))
            if not values.size:
                words.append(f"{arm}, {latency}: no values")
                continue
            share = 100 * np.arange(1, values.size + 1) / values.size
            figure.add_scatter(row=row, col=1, x=_round(values), y=_round(share), name=arm, legendgroup=arm, showlegend=row == 1, mode="lines",
                               line={"color": paints[arm], "width": 2, "shape": "hv"}, customdata=[[latency]] * values.size,
                               hovertemplate=f"<b>{arm}</b><br>%{{y:.0f}} % of {values.size} within %{{x:.4~r}} s<extra></extra>")
            found = summarise(values)
            borne = [(p, found[f"p{p}_ms"] / 1e3) for p in PERCENTILES if found[f"p{p}_ms"] is not None]
            if borne:
                figure.add_scatter(row=row, col=1, x=_round([x for _, x in borne]), y=[float(p) for p, _ in borne], name=f"{arm}, percentile",
                                   legendgroup=arm, showlegend=False, mode="markers", marker={"color": paints[arm], "size": 9},
                                   customdata=[[f"p{p}"] for p, _ in borne],
                                   hovertemplate=f"<b>{arm}</b>, %{{customdata[0]}} of {latency}: %{{x:.4~r}} s<br>n: {values.size}{chart.RULE}"
                                   "<extra></extra>")
            withheld = "".join(f"; {name} withheld ({why})" for name, why in found["withheld"].items())
            words.append(f"{arm}, {latency}: " + ", ".join(f"p{p} {digits(x)} s" for p, x in borne)
                         + f"{', ' if borne else ''}largest {digits(values[-1])} s of {values.size}{withheld}")
    figure.update_yaxes(range=[0, 104], ticksuffix=" %")
    figure.update_xaxes(rangemode="tozero")
    return set_words(figure, words, csv)


# --- the author's samples ---------------------------------------------------------------------------------------------


def published_timeline(samples: pd.DataFrame, arm: str) -> go.Figure:
    """The author's counters of one arm, sampled every few seconds: running, waiting, and preemptions so far."""
    rows = samples[samples["arm"] == arm].sort_values("t_s")
    csv = f"published_{arm.lower()}_timeline.csv"
    if rows.empty:
        return nothing(f"no published samples of {arm}", csv)
    figure = _canvas(["running", "waiting", "counted"], "seconds, as published", 480)
    for row, (column, name, paint, shape) in enumerate((("running", "running", PUBLISHED, "linear"), ("waiting", "waiting", OCHRE, "linear"),
                                                        ("preemptions_total", "preemptions counted so far", RED, "hv")), start=1):
        figure.add_scatter(row=row, col=1, x=rows["t_s"].tolist(), y=rows[column].tolist(), name=f"{name} (published)", mode="lines",
                           line={"color": paint, "width": 1.8, "shape": shape},
                           hovertemplate=f"{name}: %{{y:,}} at second %{{x}}<br>published, not re-measured<extra></extra>")
        figure.update_yaxes(row=row, rangemode="tozero")
    moved = rows[rows["preemptions_total"].diff() > 0]
    words = [f"Published counters of {arm} on the A10G over {rows['t_s'].max()} s, not re-measured",
             f"Running peaks at {rows['running'].max()}, waiting at {rows['waiting'].max()}",
             f"Preemptions reach {rows['preemptions_total'].max()}" + (
                 f", first seen at second {moved['t_s'].iloc[0]}, last at second {moved['t_s'].iloc[-1]}" if len(moved) else "")]
    return set_words(figure, words, csv)
