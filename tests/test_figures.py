"""Figures and the sweep table: what they draw, what they refuse to draw, and what they say of it."""

from __future__ import annotations

import csv
import io
import json
import math

import pandas as pd
import pytest
from bs4 import BeautifulSoup

from inference_wall import chart, figures, tables
from inference_wall.percentiles import needed
from inference_wall.site import mime
from inference_wall.stats import LATENCIES, UNIT_S, knee

SLO = {"ttft_percentile": 90, "ttft_s": 1.0, "completed_ratio": 0.9}


def point(rate, ttft_ms, n=40, **overrides):
    """One row of the frame that pages read. Every latency's p50 is `ttft_ms`, p90 twice and p99 three times that, if n bears it."""
    row = {
        "rig": "cpu", "source": "measured", "pass": "measured", "request_rate": float(rate),
        "rate_label": "inf" if math.isinf(rate) else f"{rate:g}", "repeat": 0, "num_prompts": n, "completed": n, "failed": 0,
        "completed_req_s": min(rate * 0.95, 2.5), "output_tok_s": 80.0, "steady_req_s": min(rate, 2.6), "steady_output_tok_s": 83.0,
        "running_mean": min(2 * rate, 7.5), "running_max": min(3 * rate, 8.0), "waiting_max": 0.0 if rate < 3 else 20.0,
        "kv_cache_usage_max": 0.1, "preemptions": 0, "valid": True, "reasons": [],
    }
    for latency in LATENCIES:
        row |= {f"{latency}_n": n, f"{latency}_mean_ms": 1.1 * ttft_ms, f"{latency}_max_ms": 4.0 * ttft_ms}
        row |= {f"{latency}_p{p}_ms": factor * ttft_ms if n >= needed(p) else None for p, factor in ((50, 1.0), (90, 2.0), (99, 3.0))}
    return row | overrides


def frame(*points):
    return pd.DataFrame(list(points))


@pytest.fixture
def sweep():
    """A CPU sweep of 40 requests a point: no p99 anywhere, one invalid point, a flood, and a cold pass that no sweep shows."""
    return frame(
        point(1.0, 9000.0, **{"pass": "cold"}),
        point(1.0, 100.0), point(2.0, 200.0), point(3.0, 1500.0, valid=False, reasons=["littles_law"]), point(4.0, 2500.0),
        point(math.inf, 9000.0),
    )


@pytest.fixture
def published():
    """Published figures: p50 and p99 only, no n of the gaps, validity unknown."""
    rows = [point(rate, ttft, n=200, rig="a10g-published", source="published", valid=None, steady_req_s=None, reasons=[
        "published by the author, not re-measured here"]) for rate, ttft in ((1.0, 95.5), (8.0, 400.0), (16.0, 800.0), (math.inf, 5000.0))]
    for row in rows:
        for latency in LATENCIES:
            row |= {f"{latency}_p99_ms": 3.0 * row["ttft_p50_ms"], f"{latency}_p90_ms": None, f"{latency}_max_ms": None}
        row["itl_n"] = None
    return frame(*rows)


def drawn(figure, **wanted):
    """The traces whose attributes have the wanted values."""
    return [trace for trace in figure.data if all(trace[key] == value for key, value in wanted.items())]


def hover(trace, index=0):
    return " | ".join(str(part) for part in trace.customdata[index])


# --- every figure -----------------------------------------------------------------------------------------------------


def raw_point(n=6, fail=()):
    """Requests a second apart: sent after 10 ms, first token 1 s after arrival, four tokens with a stall of 2 s, end 4 s after."""
    requests = pd.DataFrame({
        "request": range(n), "intended": [round(i / UNIT_S) + 500_000 for i in range(n)], "prompt_tokens": 10, "output_tokens": 4,
        "outcome": ["failed" if i in fail else "completed" for i in range(n)],
    })
    for name, after in (("sent", 0.01), ("first_token", 1.0), ("end", 4.0)):
        requests[name] = requests["intended"] + round(after / UNIT_S)
    requests["first_token"] = requests["first_token"].astype("Int64")
    requests.loc[requests["request"].isin(fail), "first_token"] = pd.NA
    chunks = pd.DataFrame([
        {"request": i, "time": start + round(after / UNIT_S), "tokens": 1}
        for i, start in enumerate(requests["intended"]) if i not in fail for after in (1.0, 1.5, 3.5, 4.0)
    ])
    metrics = pd.DataFrame({"time": range(400_000, 1_500_000, 50_000)})
    return requests, chunks, metrics.assign(running=[float(i % 5) for i in range(len(metrics))], waiting=0.0)


def every_figure(sweep, published):
    found, found_published = knee(sweep, SLO), knee(published.iloc[:3], {"ttft_s": 1.0, "completed_ratio": 0.0})
    yield "percentile_curves", figures.percentile_curves([sweep, published], "ttft", SLO, [found, found_published])
    yield "one rig", figures.percentile_curves([sweep], "itl")
    yield "completed_against_offered", figures.completed_against_offered([sweep, published], found)
    yield "normalised", figures.normalised([sweep, published], [found, found_published])
    yield "running_batch", figures.running_batch([sweep, published], {"cpu": 8})
    yield "cold_against_warm", figures.cold_against_warm(sweep)
    yield "request_timeline", figures.request_timeline(*raw_point(fail=(2,)))


def test_every_figure_keeps_the_rules_of_the_site(sweep, published):
    for name, figure in every_figure(sweep, published):
        document = json.loads(figure.to_json())
        json.dumps(document, allow_nan=False)
        assert len(figure.to_json()) < 60_000, name
        assert {trace["type"] for trace in document["data"]} <= {"scatter", "bar"}, name
        assert mime.unknown_trace_types(document) == set(), name
        layout = document["layout"]
        # The caption is on the page; paper, font and their colours are the site's, light or dark.
        assert not {"title", "paper_bgcolor", "plot_bgcolor", "font"} & set(layout), name
        assert layout.get("template", {}) == {}, name
        assert layout["meta"]["csv"].endswith(".csv") and len(layout["meta"]["alt"]) > 60, name
        assert "nan" not in layout["meta"]["alt"].lower() and "e+" not in layout["meta"]["alt"], name
        for key, axis in layout.items():
            if key in ("xaxis", "yaxis"):
                assert axis["automargin"] is True, (name, key)
        assert any("title" in axis for key, axis in layout.items() if key.startswith("xaxis")), name


def test_a_figure_of_two_long_sweeps_stays_small():
    many = [frame(*(point(2.0**i, 100.0 * 2**i, n=400, rig=rig, repeat=repeat) for i in range(10) for repeat in range(3)),
                  point(math.inf, 9e5, n=400, rig=rig)) for rig in ("h200-4b", "h200-27b")]
    assert len(figures.percentile_curves(many, slo=SLO).to_json()) < 90_000  # 3 kB on the wire: it is repetitive
    assert len(figures.percentile_curves(many[:1], slo=SLO).to_json()) < 60_000


@pytest.mark.parametrize("paint", [*chart.RIG_COLOURS.values(), chart.RED, chart.GREY])
@pytest.mark.parametrize("paper", ["#ffffff", "#14181f"])
def test_colours_stand_out_on_both_pages(paint, paper):
    """WCAG 2 contrast of at least 3 : 1 between a line and the page."""
    def luminance(text):
        shares = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(paint), luminance(paper)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3.5


def test_rigs_have_colours_of_their_own_and_unknown_ones_a_steady_one():
    assert len(set(chart.RIG_COLOURS.values())) == len(chart.RIG_COLOURS)
    assert chart.colour("my-laptop") == chart.colour("my-laptop")


@pytest.mark.parametrize("bad", [frame(point(1, 1)).iloc[:0], frame(point(1, 1), point(2, 1, rig="other"))])
def test_a_frame_holds_one_rig(bad):
    with pytest.raises(ValueError, match="one rig"):
        figures.percentile_curves([bad])


# --- over offered rate ------------------------------------------------------------------------------------------------


def test_curves_carry_the_values_of_the_frame(sweep):
    figure = figures.percentile_curves([sweep])
    (p50,) = drawn(figure, name="p50", xaxis="x", visible=True)
    assert list(p50.x) == [1.0, 2.0, 3.0, 4.0]
    assert list(p50.y) == [100.0, 200.0, 1500.0, 2500.0]
    assert hover(p50) == "1/s | TTFT | 40 | valid; withheld: p99 (n = 40, needs 299)"
    assert "inverted_cdf" in p50.hovertemplate
    (worst,) = drawn(figure, name="max", xaxis="x", visible=True)
    assert "inverted_cdf" not in worst.hovertemplate


def test_the_cold_and_the_calibration_pass_are_not_the_sweep(sweep):
    others = [point(5.0, 7777.0, **{"pass": name}) for name in ("cold", "calibration")]
    (p50,) = drawn(figures.percentile_curves([pd.concat([sweep, frame(*others)])]), name="p50", xaxis="x", visible=True)
    assert list(p50.x) == [1.0, 2.0, 3.0, 4.0]


def test_a_flood_has_a_place_of_its_own_and_no_number(sweep):
    figure = figures.percentile_curves([sweep])
    (flood,) = drawn(figure, name="p50", xaxis="x2", visible=True)
    assert list(flood.x) == [chart.FLOOD] and list(flood.y) == [9000.0]
    assert flood.showlegend is False and flood.legendgroup == drawn(figure, name="p50", xaxis="x", visible=True)[0].legendgroup
    assert figure.layout.xaxis2.type == "category"
    assert figure.layout.xaxis.domain[1] < figure.layout.xaxis2.domain[0]  # the break
    assert "9,000 ms all at once" in figure.layout.meta["alt"]
    for trace in figure.data:
        assert all(math.isfinite(x) for x in trace.x if not isinstance(x, str))


def test_without_a_flood_there_is_no_second_axis(sweep):
    figure = figures.percentile_curves([sweep[sweep["request_rate"] < math.inf]])
    assert "xaxis2" not in json.loads(figure.to_json())["layout"]


def test_an_invalid_point_is_hollow_and_says_why(sweep):
    figure = figures.percentile_curves([sweep])
    (p50,) = drawn(figure, name="p50", xaxis="x", visible=True)
    assert list(p50.marker.symbol) == ["circle", "circle", "circle-open", "circle"]
    assert "NOT VALID: littles_law" in hover(p50, 2)
    assert "(not valid: 3/s)" in figure.layout.meta["alt"]
    (worst,) = drawn(figure, name="max", xaxis="x", visible=True)
    assert worst.marker.symbol[2] == "circle-open"


def test_a_withheld_percentile_is_named_and_not_drawn(sweep):
    figure = figures.percentile_curves([sweep])
    assert drawn(figure, name="p99") == []
    assert "p99 of TTFT is withheld at every rate (n = 40, needs 299)" in figure.layout.meta["alt"]


def test_a_percentile_withheld_at_one_rate_leaves_a_gap():
    figure = figures.percentile_curves([frame(point(1, 100, n=400), point(2, 200, n=40), point(4, 400, n=400))])
    (p99,) = drawn(figure, name="p99", visible=True)
    assert list(p99.x) == [1.0, 4.0] and list(p99.y) == [300.0, 1200.0]


def test_repeats_are_a_median_with_their_range():
    repeats = [point(2.0, ttft, n=400, repeat=i) for i, ttft in enumerate((100.0, 300.0, 200.0))]
    broken = point(2.0, 9000.0, n=400, repeat=3, valid=False, reasons=["throttle"])
    figure = figures.percentile_curves([frame(point(1.0, 50.0, n=400), *repeats, broken)])
    (p50,) = drawn(figure, name="p50", visible=True)
    assert list(p50.y) == [50.0, 200.0]
    assert list(p50.error_y.array) == [0.0, 100.0] and list(p50.error_y.arrayminus) == [0.0, 100.0]
    assert "400 × 3 repeats" in hover(p50, 1)
    assert "1 of 4 repeats left out: throttle" in hover(p50, 1)


def test_the_buttons_show_one_latency_each(sweep, published):
    figure = figures.percentile_curves([sweep, published], "itl", SLO)
    (menu,) = figure.layout.updatemenus
    assert [button.label for button in menu.buttons] == ["TTFT", "ITL", "TPOT", "stall", "E2E"]
    assert menu.buttons[menu.active].label == "ITL"
    shown = [button.args[0]["visible"] for button in menu.buttons]
    assert all(sum(column) == 1 for column in zip(*shown, strict=True))  # each trace belongs to exactly one button
    assert [trace.visible for trace in figure.data] == list(shown[1])
    for button, mask in zip(menu.buttons, shown, strict=True):
        what = {trace.customdata[0][1] for trace, on in zip(figure.data, mask, strict=True) if on and trace.customdata}
        assert what == {button.label}
        assert button.args[1]["yaxis.title.text"] == f"{button.label}, milliseconds"
        assert len(button.args[1]["yaxis.tickvals"]) == len(button.args[1]["yaxis.ticktext"]) >= 4
    limit = [trace.name for trace, on in zip(figure.data, shown[0], strict=True) if on and trace.customdata is None]
    assert limit == ["limit, p90 ≤ 1 s"]


def test_an_unknown_latency_is_an_error(sweep):
    with pytest.raises(ValueError, match="unknown latency 'ttfb'"):
        figures.percentile_curves([sweep], "ttfb")


def test_the_knee_is_a_band_where_the_bracket_is_closed(sweep):
    figure = figures.percentile_curves([sweep], "ttft", SLO, knee(sweep, SLO))
    (band,) = figure.layout.shapes
    assert (band.x0, band.x1) == (2.0, 4.0)  # 3 is not valid
    assert [note.x for note in figure.layout.annotations if "knee" in note.text] == [pytest.approx(math.log10(math.sqrt(8)))]
    words = figure.layout.meta["alt"]
    assert "Knee of cpu (p90 TTFT at most 1 s and at least 90% of the load completed): bracketed between 2 and 4" in words
    below = sweep[sweep["request_rate"] < 3]
    open_ended = figures.percentile_curves([below], "ttft", SLO, knee(below, SLO))
    assert not open_ended.layout.shapes
    assert "no knee in range" in open_ended.layout.meta["alt"]


def test_two_knees_are_two_bands(sweep, published):
    found = [knee(sweep, SLO), knee(published.iloc[:3], {"completed_ratio": 0.0})]
    shapes = figures.completed_against_offered([sweep, published], found).layout.shapes
    assert [(shape.x0, shape.x1) for shape in shapes] == [(2.0, 4.0), (1.0, 8.0)]
    assert [shape.fillcolor for shape in shapes] == [chart.colour("cpu"), chart.colour("a10g-published")]


def test_completed_against_offered(sweep, published):
    figure = figures.completed_against_offered([sweep, published])
    (diagonal,) = drawn(figure, name="completed = offered")
    assert list(diagonal.x) == list(diagonal.y) == [1.0, 16.0]
    (steady,) = drawn(figure, name="cpu, steady", xaxis="x")
    assert list(steady.y) == [1.0, 2.0, 2.6, 2.6]
    (whole,) = drawn(figure, name="cpu, whole point", xaxis="x")
    assert list(whole.y) == pytest.approx([0.95, 1.9, 2.5, 2.5])
    assert not drawn(figure, name="a10g (published), steady")
    assert "published, not re-measured" in hover(drawn(figure, name="a10g (published), whole point")[0])


def test_normalised_by_hand(sweep, published):
    found = [knee(sweep, SLO), knee(published.iloc[:3], {"completed_ratio": 0.0})]
    figure = figures.normalised([sweep, published], found)
    (cpu,) = drawn(figure, name="cpu")
    # The knee is between 2 and 4, middle 2.8284; both rigs have p50 only.
    assert list(cpu.x) == pytest.approx([1 / 8**0.5, 2 / 8**0.5, 3 / 8**0.5, 4 / 8**0.5], abs=1e-4)
    assert list(cpu.y) == [1.0, 2.0, 15.0, 25.0]
    assert cpu.marker.symbol[2] == "circle-open"
    assert "p50 TTFT" in figure.layout.yaxis.title.text


def test_a_rig_without_a_closed_bracket_is_left_out_and_named(sweep, published):
    below = sweep[sweep["request_rate"] < 3]
    figure = figures.normalised([below, published], [knee(below, SLO), knee(published.iloc[:3], {"completed_ratio": 0.0})])
    assert [trace.name for trace in figure.data] == ["a10g (published)"]
    assert "cpu is left out: no knee in range" in figure.layout.meta["alt"]


def test_the_running_batch(sweep):
    figure = figures.running_batch([sweep], {"cpu": 8})
    (mean,) = drawn(figure, name="running, mean", xaxis="x")
    assert list(mean.y) == [2.0, 4.0, 6.0, 7.5]
    (waiting,) = drawn(figure, name="waiting, max", xaxis="x3")
    assert list(waiting.y) == [0.0, 0.0, 20.0, 20.0]
    assert drawn(figure, name="waiting, max", xaxis="x4")
    assert [shape.y0 for shape in figure.layout.shapes] == [8]
    # A fixed range on the flood's axis breaks plotly.js's automatic range of every other axis that matches it.
    assert figure.layout.xaxis2.range is None and figure.layout.xaxis4.range is None


def test_an_unknown_gauge_draws_nothing(published):
    blind = published.assign(running_mean=None, running_max=None, waiting_max=None)
    figure = figures.running_batch([blind])
    assert len(figure.data) == 0
    assert "running, mean: no values" in figure.layout.meta["alt"]


def test_cold_against_warm(sweep):
    figure = figures.cold_against_warm(sweep)
    (cold,) = drawn(figure, name="cold, max", xaxis="x")
    (warm,) = drawn(figure, name="warm, max", xaxis="x")
    assert list(cold.y) == [36_000.0] and warm.y[0] == 400.0
    assert cold.line.color != warm.line.color


def test_cold_against_warm_takes_p99_where_no_maximum_was_published(published):
    both = pd.concat([published.assign(**{"pass": "main"}), published.iloc[:1].assign(**{"pass": "warm"})])
    figure = figures.cold_against_warm(both, cold="main", warm="warm")
    assert {trace.name for trace in figure.data} == {"cold, p50", "cold, p99", "warm, p50", "warm, p99"}


@pytest.mark.parametrize(
    ("rates", "ticks"),
    [
        ([], []),
        ([2.0], [2.0]),
        ([1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0, 8.0]),
        ([1.0, 1.01, 2.0, 4.0, 8.0], [1.01, 2.0, 4.0, 8.0]),
    ],
)
def test_labels_of_the_rate_axis_do_not_touch(rates, ticks):
    assert chart.spread_ticks(rates) == ticks


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([100.0, 30_000.0], ["100", "200", "500", "1,000", "2,000", "5,000", "10,000", "20,000"]),
        ([1.0, 9e4], ["1", "10", "100", "1,000", "10,000", "100,000"]),
        ([155.0, 240.0], ["140", "160", "180", "200", "250", "300"]),
        ([0.5, 2.1], ["0.5", "0.7", "1", "1.5", "2"]),
        ([0.0, None, 3.0], ["2.5", "3", "3.5"]),
        ([], ["1", "2", "5", "10"]),
    ],
)
def test_labels_of_a_logarithmic_axis_are_whole_numbers_to_read(values, labels):
    assert chart.log_ticks(values)["ticktext"] == labels


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.05, "0.0500"), (1.234, "1.23"), (99.96, "100.0"), (12345.6, "12,346")])
def test_digits(value, text):
    assert chart.digits(value) == text


# --- one point --------------------------------------------------------------------------------------------------------


def test_the_timeline_by_hand():
    figure = figures.request_timeline(*raw_point(), what="2 requests/s")
    (waiting,) = drawn(figure, name="waiting for the first token")
    (streaming,) = drawn(figure, name="streaming")
    (stall,) = drawn(figure, name="worst stall")
    assert list(waiting.base) == [0, 1, 2, 3, 4, 5] and list(waiting.x) == [1.0] * 6
    assert list(streaming.base) == [1, 2, 3, 4, 5, 6] and list(streaming.x) == [3.0] * 6
    assert list(stall.base) == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5] and list(stall.x) == [2.0] * 6
    assert list(waiting.y) == [1, 2, 3, 4, 5, 6]
    assert figure.layout.meta["alt"].startswith("Timeline of 2 requests/s: 6 requests over 9.0 s. Waits for a first token last from 1.00")
    (running,) = drawn(figure, name="running (server)")
    assert min(running.x) >= 0 and max(running.x) <= 9.5  # what came before and after is another point's


def test_a_failed_request_is_drawn_as_such():
    figure = figures.request_timeline(*raw_point(fail=(2, 4)))
    (failed,) = drawn(figure, name="failed or cancelled")
    assert list(failed.y) == [3, 5]
    assert 3 not in list(drawn(figure, name="waiting for the first token")[0].y)
    assert "2 of those shown failed or were cancelled" in figure.layout.meta["alt"]


@pytest.mark.parametrize(("n", "bars", "said"), [(200, 200, False), (201, 101, True), (1200, 200, True)])
def test_a_long_timeline_is_thinned_evenly(n, bars, said):
    requests, chunks, metrics = raw_point(n)
    figure = figures.request_timeline(requests, chunks, metrics)
    (streaming,) = drawn(figure, name="streaming")
    assert len(streaming.y) == bars
    assert len({b - a for a, b in zip(streaming.y, streaming.y[1:], strict=False)}) == 1
    assert ("shown" in figure.layout.meta["alt"]) is said
    assert len(figure.to_json()) < 60_000


def test_a_timeline_without_metrics_has_one_panel():
    requests, _, metrics = raw_point()
    for empty in (None, metrics.iloc[:0], metrics[["time"]]):
        figure = figures.request_timeline(requests, metrics=empty)
        assert "yaxis2" not in json.loads(figure.to_json())["layout"]
        assert {trace.type for trace in figure.data} == {"bar"}


def test_a_point_without_requests_has_no_timeline():
    with pytest.raises(ValueError, match="nothing to draw"):
        figures.request_timeline(raw_point()[0].iloc[:0])


# --- the table --------------------------------------------------------------------------------------------------------


def cells(text):
    soup = BeautifulSoup(text, "html.parser")
    heads = [cell.get_text() for cell in soup.find("thead").find_all("tr")[1].find_all("th")]
    groups = [(cell.get_text(), int(cell["colspan"])) for cell in soup.find("thead").tr.find_all("th")]
    rows = {row.th.get_text(): row.find_all("td") for row in soup.find("tbody").find_all("tr")}
    return soup, groups, heads, rows


def test_the_sweep_table(sweep):
    soup, groups, heads, rows = cells(tables.sweep_table(sweep, caption="A <sweep>", csv="a.csv"))
    assert soup.table["class"] == ["wall-table"] and soup.table["data-csv"] == "a.csv"
    assert soup.caption.get_text() == "A <sweep>"
    assert list(rows) == ["1", "2", "3", "4", "all at once"]
    assert sum(width for _, width in groups) + 2 == len(heads)
    assert all(len(row) + 1 == len(heads) for row in rows.values())
    first = heads.index("p50") - 1
    assert [cell.get_text() for cell in rows["2"][first : first + 3]] == ["200", "400", "–"]
    assert rows["2"][first + 2]["title"] == "n = 40, needs 299"
    assert rows["4"][first]["data-value"] == "2500"
    assert rows["1"][-1].get_text() == "✓"
    assert rows["3"][-1].get_text() == "✗ littles_law" and rows["3"][-1]["title"] == "littles_law"
    assert soup.find("th", string="all at once")["data-value"] == "inf"


def test_the_table_of_published_figures_leaves_out_what_nobody_published(published):
    _, groups, heads, rows = cells(tables.sweep_table(published))
    assert ("TTFT, ms", 2) in groups  # p50 and p99, no p90
    assert "steady" not in heads
    assert rows["8"][-1].get_text() == "–" and "published by the author" in rows["8"][-1]["title"]


def test_the_table_shows_the_range_of_repeats():
    repeats = frame(*(point(2.0, ttft, n=400, repeat=i) for i, ttft in enumerate((100.0, 300.0, 200.0))))
    _, _, heads, rows = cells(tables.sweep_table(repeats))
    cell = rows["2"][heads.index("p50") - 1]
    assert (cell.get_text(), cell["title"]) == ("200", "100 to 300 over the repeats")


def test_csv_round_trip(sweep):
    rows = list(csv.DictReader(io.StringIO(tables.to_csv(sweep))))
    assert len(rows) == len(sweep)
    assert rows[0]["pass"] == "cold" and rows[-1]["request_rate"] == "inf"
    assert rows[3]["reasons"] == "littles_law" and rows[3]["valid"] == "False"
    assert rows[1]["ttft_p99_ms"] == "" and float(rows[1]["ttft_p90_ms"]) == 200.0
