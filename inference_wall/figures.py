"""Records to plotly figures.

What:   one function a figure. Each takes the frames that pages read (docs/decisions/0001), one frame a rig, and returns
        a plotly figure whose `layout.meta` holds the same in words and the name of its CSV file.
Why:    measured and published rigs go through the same code, so that a difference on the page is a difference in the
        data.
Use:    percentile_curves([records.points_frame(run), published.judged_frame(published.sweep_frame())])
Not:    the look (`chart`, and the site's templates), captions (the page has them), tables (`tables`).

Hollow markers are points whose validity checks failed; the hover names the reason. A percentile that the sample cannot
bear is not drawn; the hover of those that are drawn names it.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from . import chart
from .chart import BAND, GREY, OCHRE, ORANGE, RED, add_curve, canvas, colour, describe, label, log_ticks, measured, set_words
from .samples import UNIT_S, ticks

METRICS = {
    "ttft": ("TTFT", "time to first token"), "itl": ("ITL", "gap between tokens, all pooled"),
    "tpot": ("TPOT", "mean gap of a request"), "stall": ("stall", "worst gap of a request"),
    "e2e": ("E2E", "whole answer"),
}
STATISTICS = ("p50", "p90", "p99", "max")
# One result of `stats.knee`, which belongs to the first frame, or a list with one (or None) for each.
Knees = dict[str, Any] | list[dict[str, Any] | None] | None
MOST_REQUESTS = 200  # bars of a timeline: more are thinner than a pixel


def percentile_curves(
    frames: list[pd.DataFrame], metric: str = "ttft", slo: dict[str, float] | None = None,
    knee: Knees = None,
) -> go.Figure:
    """p50, p90, p99 and the maximum of a latency against offered rate, with buttons for the other latencies.

    `metric`: the one shown first (`METRICS`). `slo`: draws its TTFT limit. `knee`: a result of `stats.knee`, or a
    list of one for each frame, drawn as a band between the two rates of its bracket.
    """
    if metric not in METRICS:
        raise ValueError(f"unknown latency {metric!r}; there are {', '.join(METRICS)}")
    frames = [measured(frame) for frame in frames]
    figure = canvas(frames, [f"{METRICS[metric][0]}, milliseconds"], height=480)
    words, owners = _add_knees(figure, frames, knee), []
    for key, (short, _) in METRICS.items():
        for frame in frames:
            for statistic in STATISTICS:
                prefix = f"{label(frame)} " if len(frames) > 1 else ""
                curve = add_curve(figure, frame, f"{key}_{statistic}_ms", name=f"{prefix}{statistic}", what=short,
                                  unit="ms", style=statistic, visible=key == metric)
                if key == metric and len(curve):
                    words.append(describe(f"{label(frame)}, {statistic} of {short}", curve, " ms"))
            if key == metric:
                words += [f"{label(frame)}: {name} of {short} is withheld at every rate ({reason})"
                          for name, reason in chart.withheld(frame, key).items()]
        if key == "ttft" and slo:
            _add_limit(figure, frames, slo, visible=key == metric)
        owners += [key] * (len(figure.data) - len(owners))
    figure.update_layout(margin_t=52, updatemenus=[_buttons(figure, owners, metric)])
    short, meaning = METRICS[metric]
    opening = f"{short} ({meaning}) against offered rate, both axes logarithmic"
    return set_words(figure, [opening, *words], f"{metric}_by_rate.csv")


def _buttons(figure: go.Figure, owners: list[str], metric: str) -> dict[str, Any]:
    """A row of buttons, one a latency: it shows that latency's traces (`owners[i]`: the latency of trace i) and labels the axis
    for them."""
    buttons = []
    for key, (short, _) in METRICS.items():
        mine = [owner == key for owner in owners]
        ticks = log_ticks([y for trace, on in zip(figure.data, mine, strict=True) if on for y in trace.y])
        axis = {"yaxis.title.text": f"{short}, milliseconds", **{f"yaxis.{name}": value for name, value in ticks.items()}}
        buttons.append({"label": short, "method": "update", "args": [{"visible": mine}, axis]})
        if key == metric:
            figure.update_yaxes(ticks)
    # plotly.js paints the active button nearly white and cannot be told otherwise, so the others are light with dark
    # letters too, on either page.
    return {
        "type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom",
        "pad": {"t": 0, "b": 4}, "showactive": True, "active": list(METRICS).index(metric), "buttons": buttons,
        "bordercolor": GREY, "bgcolor": "#d5dbe3", "font": {"color": "#1f2733"},
    }


def _add_limit(figure: go.Figure, frames: list[pd.DataFrame], slo: dict[str, float], visible: bool) -> None:
    rates = [rate for frame in frames for rate in frame["request_rate"] if math.isfinite(rate)]
    if rates:
        figure.add_scatter(
            x=[min(rates), max(rates)], y=[slo["ttft_s"] * 1e3] * 2, mode="lines", visible=visible, row=1, col=1,
            name=f"limit, p{slo['ttft_percentile']:g} ≤ {slo['ttft_s']:g} s",
            line={"color": GREY, "dash": "longdash", "width": 1.5},
            hovertemplate="service level: %{fullData.name}<extra></extra>",
        )


def _add_knees(figure: go.Figure, frames: list[pd.DataFrame], knees: Knees) -> list[str]:
    """Draw the brackets as bands, in grey or, where there are several, in the rigs' colours; returns them in words."""
    given = knees if isinstance(knees, list) else [knees]
    pairs = [(frame, knee) for frame, knee in zip(frames, given, strict=False) if knee]
    for frame, knee in pairs:
        low, high = knee["bracket"]
        if low is None or high is None:
            continue
        paint = {"fillcolor": BAND} if len(pairs) == 1 else {
            "fillcolor": colour(str(frame["rig"].iloc[0])), "opacity": 0.22}
        figure.add_shape(type="rect", xref="x", yref="y domain", x0=low, x1=high, y0=0, y1=1, line_width=0,
                         layer="below", **paint)
        # Annotations, unlike shapes, take the logarithm on a logarithmic axis.
        figure.add_annotation(xref="x", yref="y domain", x=math.log10(math.sqrt(low * high)), y=1, yanchor="top",
                              showarrow=False, text=f"knee<br>{low:g}–{high:g}", font_size=11)
    return [_knee_words(frame, knee) for frame, knee in pairs]


def _knee_words(frame: pd.DataFrame, knee: dict[str, Any]) -> str:
    (low, high), slo = knee["bracket"], knee["slo"]
    level = (f"p{slo['ttft_percentile']:g} TTFT at most {slo['ttft_s']:g} s and at least "
             f"{slo['completed_ratio']:.0%} of the load completed")
    ends = f" between {low:g} and {high:g} requests/s" if low is not None and high is not None else ""
    return f"Knee of {label(frame)} ({level}): {knee['status']}{ends}"


def completed_against_offered(frames: list[pd.DataFrame], knee: Knees = None) -> go.Figure:
    """Completed against offered requests/s: in the steady window, over the whole point, and the line on which both are
    equal."""
    frames = [measured(frame) for frame in frames]
    figure = canvas(frames, ["completed, requests/s"])
    rates = [rate for frame in frames for rate in frame["request_rate"] if math.isfinite(rate)]
    if rates:
        figure.add_scatter(
            x=[min(rates), max(rates)], y=[min(rates), max(rates)], mode="lines", name="completed = offered",
            line={"color": GREY, "dash": "longdash", "width": 1.5}, hoverinfo="skip", row=1, col=1,
        )
    words = ["Completed against offered requests per second, both axes logarithmic", *_add_knees(figure, frames, knee)]
    for frame in frames:
        for column, what, dash in (("steady_req_s", "steady", "solid"), ("completed_req_s", "whole point", "dash")):
            style = "mean" if column == "steady_req_s" else "p90"
            curve = add_curve(figure, frame, column, name=f"{label(frame)}, {what}", what="completed",
                              unit="requests/s", style=style, dash=dash)
            if len(curve):
                words.append(describe(f"{label(frame)}, {what}", curve, " requests/s"))
    figure.update_yaxes(log_ticks([y for trace in figure.data for y in trace.y]))
    return set_words(figure, words, "completed_by_rate.csv")


def normalised(frames: list[pd.DataFrame], knees: list[dict[str, Any]], statistic: str | None = None) -> go.Figure:
    """TTFT relative to the lowest rate's against offered rate relative to the knee: unlike machines on one curve.

    `knees[i]`: the result of `stats.knee` for `frames[i]`. The knee is the geometric middle of its bracket; a rig
    without a closed bracket cannot be placed and is left out, which the words say. `statistic`: p50, p90 or p99; by
    default the highest that every rig has at two rates at least.
    """
    placed, words = [], []
    for frame, knee in zip(frames, knees, strict=True):
        low, high = knee["bracket"]
        if low is None or high is None:
            words.append(f"{label(frame)} is left out: {knee['status']}")
        else:
            placed.append((measured(frame), math.sqrt(low * high), math.sqrt(high / low)))
    if statistic is None:
        finite = [frame[frame["request_rate"].map(math.isfinite)] for frame, _, _ in placed]
        shared = [name for name in ("p99", "p90", "p50")
                  if all(frame[f"ttft_{name}_ms"].notna().sum() > 1 for frame in finite)]
        statistic = shared[0] if shared else "p50"
    figure = canvas([], [f"{statistic} TTFT / that at the lowest rate"])
    figure.update_xaxes(title_text="offered rate / knee")
    for frame, middle, factor in placed:
        curve = chart.by_rate(frame, f"ttft_{statistic}_ms")
        curve = curve[curve["request_rate"].map(math.isfinite)]
        if curve.empty:
            words.append(f"{label(frame)} is left out: no {statistic} of TTFT")
            continue
        base = curve["value"].iloc[0]
        scaled = curve.assign(request_rate=curve["request_rate"] / middle, **{
            name: curve[name] / base for name in ("value", "low", "high")})
        paint = colour(str(frame["rig"].iloc[0]))
        figure.add_scatter(
            x=_round(scaled["request_rate"]), y=_round(scaled["value"]), row=1, col=1, name=label(frame),
            mode="lines+markers", line={"color": paint, "width": 2},
            marker={"color": paint, "size": 8, "symbol": ["circle" if ok else "circle-open" for ok in scaled["valid"]]},
            customdata=[[row.offered, f"{statistic} TTFT", row.n, row.status] for row in scaled.itertuples()],
            hovertemplate=f"<b>%{{fullData.name}}</b>, knee {middle:.3g}/s (within a factor of {factor:.2f})<br>"
            f"%{{y:.3~r}} times {chart.digits(base)} ms at %{{x:.3~r}} of the knee, offered %{{customdata[0]}}<br>"
            f"n: %{{customdata[2]}}{'' if frame['source'].iloc[0] == 'published' else chart.RULE}<br>%{{customdata[3]}}<extra></extra>",
        )
        words.append(f"{label(frame)}, knee {middle:.3g} requests/s: {scaled['value'].iloc[-1]:.3g} times the lowest "
                     f"rate's {chart.digits(base)} ms at {scaled['request_rate'].iloc[-1]:.2f} of the knee")
    figure.add_vline(x=1, line={"color": GREY, "dash": "longdash", "width": 1.5})
    figure.update_xaxes(log_ticks([x for trace in figure.data for x in trace.x]))
    figure.update_yaxes(log_ticks([y for trace in figure.data for y in trace.y]))
    opening = f"{statistic} TTFT relative to the lowest rate, against offered rate relative to the knee"
    return set_words(figure, [opening, *words], "normalised.csv")


def running_batch(frames: list[pd.DataFrame], caps: dict[str, int] | None = None) -> go.Figure:
    """Requests running (mean and maximum) above, waiting (maximum) below, against offered rate.

    `caps`: max_num_seqs by rig name, drawn as a line over the running batch.
    """
    frames = [measured(frame) for frame in frames]
    figure = canvas(frames, ["running", "waiting"], height=500, log_y=False)
    words = ["Requests in a step of the engine (running) and in its queue (waiting) against offered rate"]
    curves = (("running_mean", "running, mean", "mean", 1), ("running_max", "running, max", "max", 1),
              ("waiting_max", "waiting, max", "max", 2))
    for frame in frames:
        prefix = f"{label(frame)} " if len(frames) > 1 else ""
        for column, name, style, row in curves:
            curve = add_curve(figure, frame, column, name=prefix + name, what=name, unit="requests", style=style,
                              row=row)
            words.append(describe(f"{label(frame)}, {name}", curve, ""))
        cap = (caps or {}).get(str(frame["rig"].iloc[0]))
        if cap:
            words.append(f"{label(frame)} is capped at {cap} running")
            paint = colour(str(frame["rig"].iloc[0]))
            figure.add_hline(y=cap, row=1, col=1, line={"color": paint, "dash": "longdash", "width": 1})
            figure.add_annotation(x=0, xref="x domain", y=cap, yref="y", text=f"cap {cap}", showarrow=False,
                                  xanchor="left", yanchor="bottom", font_size=11)
    # Explicit, since a linear axis that is matched across panels does not always find its own range.
    tops = {1: ["running_mean", "running_max"], 2: ["waiting_max"]}
    for row, columns in tops.items():
        values = [value for frame in frames for column in columns for value in frame[column].dropna()]
        values += list((caps or {}).values()) if row == 1 else []
        figure.update_yaxes(row=row, range=[0, 1.1 * max([1.0, *map(float, values)])])
    return set_words(figure, words, "running_batch.csv")


def cold_against_warm(
    frame: pd.DataFrame, metric: str = "ttft", cold: str = "cold", warm: str = "measured"
) -> go.Figure:
    """The first pass on a fresh server against the measured one, median and worst case of one latency against offered
    rate.

    `cold` and `warm` name the two passes. The worst case is the maximum, or p99 where no maximum is known (published
    figures).
    """
    short, meaning = METRICS[metric]
    passes = {"cold": frame[frame["pass"] == cold], "warm": frame[frame["pass"] == warm]}
    worst = "max" if all(rows[f"{metric}_max_ms"].notna().any() for rows in passes.values()) else "p99"
    figure = canvas(list(passes.values()), [f"{short}, milliseconds"])
    words = [f"{short} ({meaning}) of the first pass on a fresh server (cold) and of the measured pass (warm)"]
    for name, rows in passes.items():
        for statistic in ("p50", worst):
            if rows.empty:
                continue
            paint = RED if name == "cold" else colour(str(frame["rig"].iloc[0]))
            curve = add_curve(figure, rows, f"{metric}_{statistic}_ms", name=f"{name}, {statistic}", what=short,
                              unit="ms", style=statistic, colour_of=paint)
            words.append(describe(f"{name}, {statistic}", curve, " ms"))
    figure.update_yaxes(log_ticks([y for trace in figure.data for y in trace.y]))
    return set_words(figure, words, "cold_against_warm.csv")


# --- one point --------------------------------------------------------------------------------------------------------


def request_timeline(
    requests: pd.DataFrame, chunks: pd.DataFrame | None = None, metrics: pd.DataFrame | None = None,
    what: str = "one point",
) -> go.Figure:
    """One bar a request on a common time axis: waiting for the first token, then streaming; below, running and waiting.

    Frames: the raw rows of one point. At most `MOST_REQUESTS` bars, evenly spread over the arrivals. `chunks` adds the
    worst stall of each request; `metrics` the server's gauges. `what` names the point in the text alternative.
    """
    every = requests[requests["sent"].notna()].sort_values(["intended", "request"], ignore_index=True)
    if every.empty:
        raise ValueError("no request was sent: there is nothing to draw")
    step = math.ceil(len(every) / MOST_REQUESTS)
    shown = every.iloc[::step]
    zero = ticks(every["intended"]).min()
    at = {name: (ticks(shown[name]) - zero) * UNIT_S for name in ("intended", "sent", "first_token", "end")}
    gauges = metrics is not None and not metrics.empty and {"running", "waiting"} & set(metrics.columns)
    figure = make_subplots(rows=2 if gauges else 1, cols=1, shared_xaxes=True, vertical_spacing=0.05,
                           row_heights=[0.72, 0.28] if gauges else None)
    started = shown["first_token"].notna().to_numpy()
    ended = shown["end"].notna().to_numpy()
    failed = (shown["outcome"] != "completed").to_numpy()
    number = shown.index.to_numpy() + 1

    def bars(name: str, paint: str, rows: Any, start: Any, stop: Any, hover: str) -> None:
        if rows.any():
            figure.add_bar(
                row=1, col=1, orientation="h", name=name, marker_color=paint, marker_line_width=0,
                y=number[rows].tolist(), base=_round(start[rows]), x=_round(stop[rows] - start[rows]),
                width=1 if len(shown) > 60 else 0.8,
                hovertemplate=f"request %{{y}}, {hover} %{{x:.4~r}} s, from second %{{base:.4~r}}<extra></extra>",
            )

    first_or_end = pd.Series(at["first_token"]).fillna(pd.Series(at["end"])).to_numpy()
    bars("waiting for the first token", OCHRE, ~failed, at["intended"], first_or_end, "waited")
    bars("streaming", colour("cpu"), started & ended & ~failed, at["first_token"], at["end"], "streamed")
    bars("failed or cancelled", RED, failed & ended, at["intended"], at["end"], "in vain for")
    if chunks is not None and not chunks.empty:
        stalls = _worst_stalls(chunks)
        known = shown["request"].isin(stalls.index).to_numpy() & ~failed
        stalls = stalls.reindex(shown["request"])
        stop = (stalls["time"].to_numpy(float) - zero) * UNIT_S
        bars("worst stall", ORANGE, known, stop - stalls["gap"].to_numpy(float) * UNIT_S, stop, "its worst stall,")
    last = (ticks(every["end"]).max() - zero) * UNIT_S
    if gauges:
        _add_gauges(figure, metrics, zero, last)
    figure.layout.template = None  # the site lays its own over the figure
    figure.update_layout(barmode="overlay", bargap=0, height=560 if gauges else 420, hovermode="closest",
                         legend=chart.LEGEND, margin={"t": 16, "r": 12, "b": 96, "l": 56})
    figure.update_yaxes(row=1, autorange="reversed", automargin=True,
                        title={"text": "request, by arrival", "standoff": 6})
    figure.update_xaxes(automargin=True)
    figure.update_xaxes(row=2 if gauges else 1, title={"text": "seconds since the first arrival", "standoff": 8})
    wait = (first_or_end - at["intended"])[~failed]
    words = [
        f"Timeline of {what}: {len(every)} requests over {last:,.1f} s"
        + (f", one in {step} shown" if step > 1 else ""),
        f"Waits for a first token last from {min(wait):,.2f} to {max(wait):,.2f} s" if len(wait) else "",
        f"{failed.sum()} of those shown failed or were cancelled" if failed.any() else "",
    ]
    return set_words(figure, words, "request_timeline.csv")


def _worst_stalls(chunks: pd.DataFrame) -> pd.DataFrame:
    """The longest gap of each request and the time at which it ended, in record units, indexed by request."""
    ordered = chunks.sort_values(["request", "time"], kind="stable")
    ordered["gap"] = ordered.groupby("request")["time"].diff()
    worst = ordered.dropna(subset="gap").sort_values("gap", kind="stable").drop_duplicates("request", keep="last")
    return worst.set_index("request")[["gap", "time"]]


def _add_gauges(figure: go.Figure, metrics: pd.DataFrame, zero: float, last: float) -> None:
    time = (ticks(metrics["time"]) - zero) * UNIT_S
    inside = metrics[(time >= 0) & (time <= last + 0.5)]
    inside = inside.iloc[:: math.ceil(len(inside) / 400) or 1]
    for name, dash, paint in (("running", "solid", colour("cpu")), ("waiting", "dash", OCHRE)):
        if name in inside and inside[name].notna().any():
            figure.add_scatter(
                row=2, col=1, x=_round((ticks(inside["time"]) - zero) * UNIT_S), y=inside[name].tolist(),
                name=f"{name} (server)", mode="lines", line={"color": paint, "dash": dash, "width": 1.5},
                hovertemplate=f"{name} %{{y:.0f}} at second %{{x:.4~r}}<extra></extra>",
            )
    figure.update_yaxes(row=2, rangemode="tozero", title={"text": "requests", "standoff": 6}, automargin=True)


def _round(values: Any) -> list[float]:
    return [round(float(value), 4) for value in values]
