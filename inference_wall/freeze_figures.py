"""The freeze in pictures: one victim's beat, the gaps by population, the dial of the step budget, ours beside the published.

What:   each function takes the cases of `freeze.read` (and a load) and returns a plotly figure whose `layout.meta` holds the same in
        words and the name of its CSV file.
Why:    a stall is a thing in time: it must be seen once as a flat piece of one reader's line before it turns into a percentile.
Use:    token_beats(cases, "light"); gap_percentiles(cases, "heavy"); budget_dial(cases, "heavy"); population_trap(case)
Not:    counting (`freeze`), tables (`freeze_tables`), the look (`chart` and the site's templates).
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from . import chart, freeze, freeze_bound
from .chart import BLUE, GREEN, GREY, OCHRE, ORANGE, PURPLE, RED, TEAL, digits, log_ticks, set_words
from .freeze import Case, Cases
from .percentiles import needed, percentile

SHADES = (BLUE, GREEN, PURPLE, TEAL, OCHRE, ORANGE)  # of budgets; red is the arm without chunking
GRID = (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 85, 90, 93, 95, 97, 98, 99, 99.5, 99.9, 99.99)
POPULATIONS = {"broad": "to the end", "window": "window", "all": "all", "calm": "calm"}


def arm_label(case: Case) -> str:
    """An arm for a legend: `512 tokens a step` or `no chunking`, marked when its points are not valid or it did the opposite."""
    name = f"{case.budget:,} tokens a step" if case.asked_chunked and case.budget else "no chunking" if not case.asked_chunked else case.arm
    return name + ("" if case.usable else " (not valid)" if not case.valid else " (not as asked)")


def _of_load(cases: Cases, load: str) -> list[Case]:
    """The cases of a load: budgets falling, the arm without chunking first, since it is the step without a limit."""
    mine = [case for case in cases.values() if case.load == load]
    return sorted(mine, key=lambda case: (case.asked_chunked, -(case.budget or 0)))


def _colours(cases: list[Case]) -> dict[str, str]:
    sizes = [case.arm for case in cases if case.asked_chunked]
    return {case.arm: RED if not case.asked_chunked else SHADES[sizes.index(case.arm) % len(SHADES)] for case in cases}


def _finish(figure: go.Figure, height: int, columns: list[str], words: list[str], csv: str, bottom: int = 96) -> go.Figure:
    figure.layout.template = None  # the site lays its own over the figure
    figure.update_layout(height=height, hovermode="closest", legend=chart.LEGEND, margin={"t": 28, "r": 12, "b": bottom, "l": 56},
                         meta={"columns": columns})
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return set_words(figure, words, csv)


def _nothing(what: str, csv: str) -> go.Figure:
    figure = go.Figure()
    figure.add_annotation(x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, text=what)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return _finish(figure, 140, [], [what], csv, bottom=20)


def _round(values: Any, places: int = 4) -> list[float]:
    return [round(float(value), places) for value in values]


# --- one victim ---------------------------------------------------------------------------------------------------------


def typical_round(case: Case) -> tuple[Any, Any] | None:
    """The round to draw, and its victim: (row of `case.rounds`, stream), or null. The round whose worst gap is the median one (the lower
    of two); in it the victim that had the worst gap."""
    each = freeze.by_round(case.gaps, case.rounds).dropna(subset="worst_s").sort_values("worst_s", kind="stable", ignore_index=True)
    if each.empty:
        return None
    chosen = each.iloc[(len(each) - 1) // 2]
    window = case.rounds[(case.rounds["point"] == chosen["point"]) & (case.rounds["round"] == chosen["round"])].iloc[0]
    mine = case.gaps[(case.gaps["point"] == window["point"]) & (case.gaps["end_s"] > window["sent_s"])
                     & (case.gaps["start_s"] < window["last_first_s"])]
    return window, mine.loc[mine["gap_s"].idxmax(), "stream"]


def token_beats(cases: Cases, load: str = "light") -> go.Figure:
    """Tokens that one victim has received, over the seconds around one injection; one panel an arm, all with the same axes.

    A flat piece is a stall. The longest is drawn thick. The bar at the foot is the time in which long prompts were being read. A line
    breaks where a request ended and the next had not yet its first token: that wait is TTFT.
    """
    mine = [(case, found) for case in _of_load(cases, load) if (found := typical_round(case))]
    if not mine:
        return _nothing(f"no injection of the {load} load was measured", f"token_beats_{load}.csv")
    longest = max(window["last_first_s"] - window["sent_s"] for _, (window, _) in mine)
    before = max(0.2 * longest, 0.1)
    figure = make_subplots(rows=len(mine), cols=1, shared_xaxes=True, vertical_spacing=0.2 / len(mine),
                           subplot_titles=[arm_label(case) for case, _ in mine])
    colours, words, most = _colours([case for case, _ in mine]), [], 1
    for row, (case, (window, stream)) in enumerate(mine, start=1):
        x, y, details, worst = _beat(case, window, stream, before, longest + 2 * before)
        most = max([most, *(value for value in y if value is not None)])
        figure.add_scatter(row=row, col=1, x=x, y=y, mode="lines+markers", name=arm_label(case), showlegend=False, customdata=details,
                           line={"color": colours[case.arm], "shape": "hv", "width": 1.5}, marker={"size": 3, "color": colours[case.arm]},
                           hovertemplate="token %{y} at %{x:.4~r} s, after a gap of %{customdata[0]} ms<extra></extra>")
        if worst:
            figure.add_scatter(row=row, col=1, x=worst[0], y=worst[1], mode="lines", name="its longest gap in the window", legendgroup="worst",
                               showlegend=row == 1, line={"color": ORANGE, "width": 5}, hoverinfo="skip")
        reading = window["last_first_s"] - window["sent_s"]
        figure.add_scatter(row=row, col=1, x=[0, round(reading, 4)], y=[0, 0], mode="lines", name="long prompts being read",
                           legendgroup="reading", showlegend=row == 1, line={"color": GREY, "width": 5}, hoverinfo="skip")
        words.append(f"{arm_label(case)}: longest gap {digits(1e3 * worst[2])} ms, long prompts read in {digits(1e3 * reading)} ms" if worst
                     else f"{arm_label(case)}: this victim had no gap in the window")
    figure.update_yaxes(range=[-0.05 * most, 1.1 * most], nticks=4)
    figure.update_yaxes(row=(len(mine) + 1) // 2, col=1, title={"text": "tokens received", "standoff": 6})
    figure.update_xaxes(row=len(mine), col=1, title={"text": "seconds since the injection", "standoff": 8})
    figure.update_annotations(font_size=12)
    opening = f"Tokens received by one victim around one typical injection of the {load} load ({mine[0][0].injected} long prompts at once)"
    return _finish(figure, 110 + 130 * len(mine), ["gap before it, ms"], [opening, *words], f"token_beats_{load}.csv")


def _beat(case: Case, window: Any, stream: Any, before: float, until: float) -> tuple[list, list, list, tuple | None]:
    """x, y and gaps (ms) of one victim's tokens, and its longest gap in the window: ([x0, x1], [y, y], seconds)."""
    requests = case.requests[(case.requests["point"] == window["point"]) & (case.requests["stream"] == stream)]
    chunks = case.chunks[(case.chunks["point"] == window["point"]) & case.chunks["request"].isin(requests["request"]) & (case.chunks["tokens"] > 0)]
    chunks = chunks.sort_values(["time", "request"], kind="stable")
    x, y, details = [], [], []
    count, last, worst = 0, None, None
    for chunk in chunks.itertuples():
        at = chunk.time * freeze.UNIT_S - window["sent_s"]
        if not -before <= at <= until:
            continue
        same = last is not None and last[0] == chunk.request
        if last is not None and not same:
            x.append(None), y.append(None), details.append([None])
        gap = at - last[1] if same else None
        reading = window["last_first_s"] - window["sent_s"]
        if same and at > 0 and last[1] < reading and (worst is None or gap > worst[2]):
            worst = (_round([last[1], at]), [count, count], gap)
        count += chunk.tokens
        x.append(round(at, 4)), y.append(count), details.append([None if gap is None else round(1e3 * gap, 2)])
        last = (chunk.request, at)
    return x, y, details, worst


# --- all gaps -----------------------------------------------------------------------------------------------------------


def gap_percentiles(cases: Cases, load: str = "heavy", population: str = "broad") -> go.Figure:
    """Gap against percentile, one curve an arm; buttons choose the population. The scale is stretched towards the tail, so that each nine
    takes as much room as the one before. Percentiles that n cannot bear are not drawn; the cross is the longest gap."""
    mine = [case for case in _of_load(cases, load) if case.populations["all"]["n"]]
    if not mine:
        return _nothing(f"no gap of the {load} load was measured", f"gap_percentiles_{load}.csv")
    figure, colours, owners, words = go.Figure(), _colours(mine), [], []
    for name, title in POPULATIONS.items():
        for case in mine:
            rows = case.gaps
            chosen = {"all": rows, "broad": rows[rows["where"].isin(["window", "tail"])]}.get(name, rows[rows["where"] == name])
            values, n = 1e3 * chosen["gap_s"], len(chosen)
            borne = [p for p in GRID if n >= needed(p)]
            shape = {"visible": name == population, "legendgroup": case.arm, "name": arm_label(case)}
            figure.add_scatter(
                x=[-math.log10(1 - p / 100) for p in borne], y=_round(percentile(values, p) for p in borne), mode="lines", **shape,
                line={"color": colours[case.arm], "width": 2, "dash": "solid" if case.usable else "dot"},
                customdata=[[f"p{p:g}", title, n] for p in borne],
                hovertemplate="<b>%{fullData.name}</b><br>%{customdata[0]} %{y:,.4~r} ms, %{customdata[1]}<br>n: %{customdata[2]}"
                              + chart.RULE + "<extra></extra>",
            )  # fmt: skip
            figure.add_scatter(
                x=[math.log10(n + 1)] if n else [], y=_round([values.max()]) if n else [], mode="markers", showlegend=False, **shape,
                marker={"color": colours[case.arm], "symbol": "x", "size": 9}, customdata=[["max", title, n]] if n else [],
                hovertemplate="<b>%{fullData.name}</b><br>longest of %{customdata[2]}: %{y:,.4~r} ms, %{customdata[1]}<extra></extra>",
            )  # fmt: skip
            owners += [name, name]
            summary = case.populations[name]
            if name in ("broad", "all"):
                words.append(f"{arm_label(case)}, {title}: n {summary['n']}, " + ", ".join(
                    f"{key} {digits(summary[f'{key}_ms'])} ms" if summary[f"{key}_ms"] is not None else f"{key} withheld"
                    for key in ("p50", "p90", "p99", "max")))
    # Bundled tokens arrive 0 apart, which a logarithmic axis cannot show: such parts of a curve are left out by plotly.
    figure.update_yaxes(type="log", title={"text": "gap, milliseconds", "standoff": 6}, **log_ticks([y for trace in figure.data for y in trace.y]))
    ticks = {0.301: "p50", 1: "p90", 2: "p99", 3: "p99.9", 4: "p99.99"}
    furthest = max((x for trace in figure.data for x in trace.x), default=2)
    figure.update_xaxes(tickvals=[x for x in ticks if x <= furthest + 0.3], ticktext=[ticks[x] for x in ticks if x <= furthest + 0.3],
                        title={"text": "share of gaps that are shorter", "standoff": 8})
    buttons = [{"label": title, "method": "update", "args": [{"visible": [owner == name for owner in owners]}]}
               for name, title in POPULATIONS.items()]
    figure.update_layout(updatemenus=[{
        "type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "pad": {"t": 0, "b": 4},
        "showactive": True, "active": list(POPULATIONS).index(population), "buttons": buttons, "bordercolor": GREY, "bgcolor": "#d5dbe3",
        "font": {"color": "#1f2733"}}])  # light buttons with dark letters on either page, as in `figures`
    opening = f"Gap between two tokens of a victim against percentile, {load} load, by population"
    return _finish(figure, 470, ["percentile", "population", "n"], [opening, *words], f"gap_percentiles_{load}.csv").update_layout(margin_t=52)


# --- the dial -----------------------------------------------------------------------------------------------------------


def budget_dial(cases: Cases, load: str = "heavy") -> go.Figure:
    """Worst stall, median gap while the injection lasts, and the long prompts' own wait, against the step budget; without chunking at the end.

    The worst stall has its range over the rounds; the dashed line is what `freeze_bound` expects, only where the measurement is a test of it.
    """
    mine = [case for case in _of_load(cases, load) if case.worst_ms is not None]
    if not mine:
        return _nothing(f"no gap of the {load} load lies in a window", f"budget_dial_{load}.csv")
    sizes = sorted((case for case in mine if case.asked_chunked and case.budget), key=lambda case: case.budget)
    off = [case for case in mine if not case.asked_chunked]
    figure = make_subplots(cols=2, shared_yaxes=True, column_widths=[0.86, 0.14], horizontal_spacing=0.03)
    expected, _ = freeze_bound.expectation(cases)
    series = (
        ("worst stall", RED, "solid", "diamond", lambda case: (case.worst_ms, case.populations["worst_by_round_ms"])),
        ("long prompts read", OCHRE, "solid", "square", lambda case: (case.reading_ms, case.populations["reading_by_round_ms"])),
        ("median gap, to the end", BLUE, "solid", "circle", lambda case: (case.populations["broad"]["p50_ms"], [])),
        ("calm median", GREY, "dot", "circle", lambda case: (case.populations["calm"]["p50_ms"], [])),
        ("expected stall", GREY, "dash", "line-ew", lambda case: (expected.stall_ms(case) if expected and expected.tests(case) else None, [])),
    )
    words = []
    for name, paint, dash, symbol, read in series:
        said = []
        for part, col in ((sizes, 1), (off, 2)):
            known = [(case, *read(case)) for case in part if read(case)[0] is not None]
            if not known:
                continue
            ranged = any(spread for _, _, spread in known)
            figure.add_scatter(
                row=1, col=col, name=name, legendgroup=name, showlegend=col == 1 or not sizes, mode="markers" if col == 2 else "lines+markers",
                x=[case.budget if col == 1 else "no<br>chunks" for case, _, _ in known], y=_round(value for _, value, _ in known),
                line={"color": paint, "dash": dash, "width": 2},
                marker={"color": paint, "size": 8, "symbol": [symbol if case.usable or name.startswith("expected") else f"{symbol}-open"
                                                              for case, _, _ in known], "line": {"color": paint, "width": 2}},
                error_y={"type": "data", "symmetric": False, "thickness": 1, "width": 3,
                         "array": _round(max(spread) - value for _, value, spread in known),
                         "arrayminus": _round(value - min(spread) for _, value, spread in known)} if ranged else None,
                customdata=[[name, case.populations["rounds"] - case.populations["rounds_without_window"], case.populations["broad"]["n"],
                             "; ".join(case.reasons) or "valid"] for case, _, _ in known],
                hovertemplate="<b>%{customdata[0]}</b> %{y:,.4~r} ms at %{x}<br>rounds: %{customdata[1]}, gaps: %{customdata[2]}"
                              "<br>%{customdata[3]}<extra></extra>",
            )  # fmt: skip
            said += [f"{digits(value)} ms with {arm_label(case)}" for case, value, _ in known]
        words.append(f"{name}: {', '.join(said) or 'not known'}")
    figure.update_yaxes(type="log", **log_ticks([y for trace in figure.data for y in trace.y]))
    figure.update_yaxes(col=1, title={"text": "milliseconds", "standoff": 6})
    figure.update_yaxes(col=2, ticks="", showticklabels=False, showgrid=False)
    budgets = [case.budget for case in sizes]
    figure.update_xaxes(col=1, type="log", tickvals=budgets, ticktext=[f"{budget:,}" for budget in budgets],
                        title={"text": "step budget, tokens", "standoff": 8})
    figure.update_xaxes(col=2, type="category")
    return _finish(figure, 460, ["what", "rounds", "gaps", "status"],
                   [f"The step budget as a dial, {load} load, both axes logarithmic", *words], f"budget_dial_{load}.csv", bottom=120)


def population_trap(case: Case) -> go.Figure:
    """The same stalls in growing company: percentiles of the gaps nearest to the injections, against how many of them are counted."""
    wide = freeze.widening(case.gaps, case.rounds)
    csv = "population_trap.csv"
    if wide.empty:
        return _nothing("no gap lies in a window: there is no stall to hide", csv)
    figure, words = go.Figure(), []
    for column, name in (("max_ms", "max"), ("p99_ms", "p99"), ("p90_ms", "p90"), ("p50_ms", "p50")):
        known = wide[wide[column].notna()]
        dash, marker, width = chart.STYLES[name]
        figure.add_scatter(
            x=known["n"].tolist(), y=_round(known[column]), mode="lines+markers", name=name,
            line={"color": RED if not case.asked_chunked else BLUE, "dash": dash, "width": width}, marker={"symbol": marker, "size": 7},
            customdata=[[name, row.n, round(row.seconds, 3)] for row in known.itertuples()],
            hovertemplate="%{customdata[0]} %{y:,.4~r} ms of %{customdata[1]} gaps, up to %{customdata[2]:.3~r} s from an injection"
                          + chart.RULE + "<extra></extra>",
        )  # fmt: skip
        words.append(f"{name}: {digits(known[column].iloc[0])} ms of {known['n'].iloc[0]} gaps, {digits(known[column].iloc[-1])} ms of "
                     f"{known['n'].iloc[-1]}" if len(known) else f"{name}: withheld, too few gaps at every size")
    figure.update_yaxes(type="log", title={"text": "gap, milliseconds", "standoff": 6}, **log_ticks([y for trace in figure.data for y in trace.y]))
    figure.update_xaxes(type="log", title={"text": "gaps counted, nearest first", "standoff": 8},
                        **log_ticks(wide["n"].tolist()))
    opening = f"Percentiles of a victim's gaps against how many gaps around the injections are counted, {arm_label(case)}, {case.load} load"
    return _finish(figure, 420, ["statistic", "gaps counted", "seconds around"], [opening, *words], csv)


# --- ours beside the published ------------------------------------------------------------------------------------------


def beside_published(cases: Cases, published: pd.DataFrame, load: str = "heavy") -> go.Figure:
    """Gaps while the injection lasts, divided by the calm median, with chunking and without: ours and the published ones.

    `published`: rows of `part_2.published_rows`. Ours with chunking is the smallest budget.
    """
    found, series = freeze.roles(cases, load), []
    rig = next((case.run.document["rig"]["name"] for case in cases.values()), "cpu")
    for role, symbol in (("off", "diamond"), ("smallest", "circle")):
        if role in found:
            case = found[role]
            base, summary = case.populations["calm"]["p50_ms"], case.populations["broad"]
            series.append((f"{rig}, {arm_label(case)}", chart.colour(rig), symbol, base, summary["p50_ms"], summary["max_ms"], summary["n"]))
    for row in published[published["injection"] == load].itertuples():
        name = "no chunking" if row.chunked_prefill == "off" else "chunked"
        series.append((f"a10g (published), {name}", chart.colour("a10g-published"), "diamond-open" if row.chunked_prefill == "off" else "circle-open",
                       row.base_ms, row.window_p50_ms, row.window_max_ms, row.n_tokens))
    figure, words = go.Figure(), []
    for name, paint, symbol, base, median, worst, n in series:
        known = [(what, value) for what, value in (("median", median), ("worst stall", worst)) if value is not None and base]
        figure.add_scatter(x=[what for what, _ in known], y=_round(value / base for _, value in known), mode="lines+markers", name=name,
                           line={"color": paint, "width": 1, "dash": "dot"}, marker={"color": paint, "size": 10, "symbol": symbol},
                           customdata=[[what, n, digits(value), digits(base)] for what, value in known],
                           hovertemplate="<b>%{fullData.name}</b><br>%{customdata[0]}: %{y:,.3~r} calm medians (%{customdata[2]} ms over "
                                         "%{customdata[3]} ms)<br>n: %{customdata[1]}<extra></extra>")
        words.append(f"{name}: " + (", ".join(f"{what} {value / base:.1f} calm medians" for what, value in known) or "not known"))
    figure.update_yaxes(type="log", title={"text": "gap / calm median", "standoff": 6}, **log_ticks([y for trace in figure.data for y in trace.y]))
    figure.update_xaxes(type="category", range=[-0.4, 1.4])
    opening = f"Gaps from the injection to the end of its answers, divided by the calm median, {load} load"
    return _finish(figure, 420, ["statistic", "n", "ms", "calm median, ms"], [opening, *words], "freeze_normalised.csv", bottom=130)
