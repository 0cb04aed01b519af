"""Bytes against parameters: every ratio of the toy by hand, verdicts both ways, words, and figures that say what they show."""

import math

import pytest
import synthetic_quantization as toy

from inference_wall import part_5, quantization, quantization_figures


@pytest.fixture(scope="module")
def arms():
    return toy.arm_set(toy.base(), toy.same(), toy.bigger(), toy.refused())


@pytest.fixture(scope="module")
def rows(arms):
    return quantization.variants(arms)


@pytest.fixture(scope="module")
def pairs(rows):
    return quantization.comparisons(rows)


def row(frame, arm):
    return frame[frame["arm"] == arm].iloc[0]


# --- variants ---------------------------------------------------------------------------------------------------------


def test_one_row_a_testable_variant_with_its_role(rows):
    assert rows["arm"].tolist() == ["float32", "int8", "bigger-int8"]
    assert rows["role"].tolist() == ["base", "same", "bigger"]
    assert rows["real"].tolist() == [True, True, False]


def test_terms_bytes_and_bandwidth_by_hand(rows):
    start = row(rows, "float32")
    assert start["fixed_ms"] == pytest.approx(20) and start["slope_ms"] == pytest.approx(1)  # 2,000 and 100 units of 10 us
    assert start["one_ms"] == pytest.approx(21) and start["streamed_gb"] == 0.5 and start["loaded_gb"] == 0.54
    assert start["bandwidth_gb_s"] == 25  # the better of copy and read
    assert start["stream_ms"] == pytest.approx(20)  # 0.5 GB at 25 GB/s
    assert start["effective_gb_s"] == pytest.approx(25) and start["of_bandwidth_percent"] == pytest.approx(100)
    assert row(rows, "int8")["effective_gb_s"] == pytest.approx(25)  # 0.25 GB in 10 ms
    assert start["bits"] == pytest.approx(8 * 500 / 135)
    assert start["flood_tok_s"] == 200 and start["flood_kind"] == "steady window"


def test_an_invalid_point_is_not_in_the_fit():
    run = toy.base()
    run.points[3]["validity"] = {"valid": False, "reasons": ["failures"]}
    assert quantization.fits(toy.arm_set(run))["float32"].n == 3


def test_roles_without_known_files_go_by_loaded_bytes():
    other = toy.bigger()
    other.document["model"]["facts"] = None
    other.said["weights_gib"] = 0.7
    found = quantization.variants(toy.arm_set(toy.base(), other))
    assert found["role"].tolist() == ["base", "bigger"]
    assert found.iloc[1]["loaded_gb"] == pytest.approx(0.7 * 2**30 / 1e9) and found.iloc[1]["streamed_gb"] is None


def test_a_missing_base_leaves_nothing_to_compare():
    arms = toy.arm_set(toy.same(), names=["float32", "int8"])
    assert quantization.base(arms) is None
    assert quantization.comparisons(quantization.variants(arms)).empty


# --- predictions ------------------------------------------------------------------------------------------------------


def test_predicted_and_measured_ratios_by_hand(pairs):
    same, bigger = row(pairs, "int8"), row(pairs, "bigger-int8")
    assert (same["streamed"], same["parameters"], same["measured"]) == (0.5, 1.0, pytest.approx(0.5))
    assert same["loaded"] == pytest.approx(30 / 54) and same["slope"] == pytest.approx(1) and same["flood"] == pytest.approx(1.5)
    assert bigger["streamed"] == pytest.approx(1.05) and bigger["measured"] == pytest.approx(1.1) and bigger["slope"] == pytest.approx(2.5)
    assert bigger["parameters"] == pytest.approx(360 / 135) and bigger["flood"] == pytest.approx(0.6)
    assert bigger["off_percent"] == pytest.approx(100 * (1.1 / 1.05 - 1))
    assert same["nearest"] == ["streamed bytes"] and same["says"] == "bytes"


def test_the_interval_of_a_ratio_adds_squares():
    over = {"fixed_ms": 10.0, "fixed_high": 11.0}
    under = {"fixed_ms": 20.0, "fixed_high": 20.0 * (1 + math.sqrt(0.03))}
    ratio, low, high = quantization.ratio_interval(over, under, "fixed")
    assert ratio == 0.5 and high == pytest.approx(0.5 * math.exp(0.2)) and low == pytest.approx(0.5 * math.exp(-0.2))
    assert quantization.ratio_interval({"fixed_ms": -1.0, "fixed_high": 1.0}, under, "fixed") == (None, None, None)
    assert quantization.ratio_interval({"fixed_ms": 10.0, "fixed_high": None}, under, "fixed") == (0.5, None, None)


@pytest.mark.parametrize(("predicted", "measured", "interval", "nearest", "says"), [
    ({"streamed": 0.4, "loaded": 0.5, "parameters": 1.0}, 0.42, (0.4, 0.45), ["streamed bytes"], "bytes"),
    ({"streamed": 0.4, "loaded": 0.402, "parameters": 1.0}, 0.39, (0.38, 0.45), ["streamed bytes", "loaded bytes"], "bytes"),
    ({"streamed": 0.4, "loaded": 0.4, "parameters": 1.0}, 0.7, (0.65, 0.75), ["parameters"], "part"),  # 1 / 0.7 < 0.7 / 0.4
    ({"streamed": 0.4, "loaded": 0.4, "parameters": 1.0}, 0.85, (0.8, 0.9), ["parameters"], "parameters"),  # a quarter of what was promised
    ({"streamed": 0.4, "loaded": 0.4, "parameters": 1.0}, 0.7, (0.5, 1.1), ["parameters"], "parameters"),  # perhaps no shorter at all
    ({"streamed": 0.4, "loaded": 0.4, "parameters": 1.0}, 0.7, (None, None), ["parameters"], "part"),
    ({"streamed": 0.4, "loaded": 0.4, "parameters": 1.0}, 0.6, (0.55, 0.65), ["streamed bytes", "loaded bytes"], "bytes"),  # and the other way
    ({"streamed": 1.0, "loaded": 1.3, "parameters": 2.25}, 1.01, (None, None), ["streamed bytes"], "bytes"),
    ({"streamed": 0.9, "loaded": 0.9, "parameters": 1.0}, 0.95, (0.8, 1.1), ["parameters"], "cannot tell"),
    ({"streamed": 1.0, "loaded": None, "parameters": 1.0}, 1.2, (1.1, 1.3), ["streamed bytes", "parameters"], "cannot tell"),
    ({"streamed": None, "loaded": 1.3, "parameters": None}, 1.2, (1.1, 1.3), ["loaded bytes"], "cannot tell"),
    ({"streamed": 1.0, "loaded": 1.0, "parameters": 2.0}, None, (None, None), [], "cannot tell"),
    ({"streamed": 0.4, "loaded": 0.5, "parameters": 1.0}, 3.0, (2.8, 3.2), ["parameters"], "neither"),  # slower, by a factor that nothing predicts
    ({"streamed": 0.4, "loaded": 0.5, "parameters": 1.0}, 0.2, (None, None), ["streamed bytes"], "neither"),
    ({"streamed": 0.4, "loaded": 0.5, "parameters": 1.0}, 1.51, (0.9, 2.5), ["parameters"], "parameters"),  # within its interval
    ({"streamed": 1.0, "loaded": 1.0, "parameters": 1.0}, 2.0, (None, None), ["streamed bytes", "loaded bytes", "parameters"], "neither"),
])
def test_the_nearest_prediction(predicted, measured, interval, nearest, says):
    found = quantization.judge(predicted, measured, *interval)
    assert (found["nearest"], found["says"]) == (nearest, says)
    assert bool(found["reason"]) == (says in ("cannot tell", "neither"))


@pytest.mark.parametrize(("fixed_same", "fixed_bigger", "expected"), [
    (1_000, 2_200, "held"), (1_000, 3_000, "moved"), (1_800, 2_200, "did not hold"), (1_000, 5_000, "did not hold"),
    (6_000, 2_200, "did not hold"), (300, 2_200, "did not hold"),  # neither is near
])
def test_the_verdict_goes_both_ways(fixed_same, fixed_bigger, expected):
    same, bigger = (toy.Run(arm, facts | {"fixed": fixed}) for arm, facts, fixed in
                    (("int8", toy.SAME, fixed_same), ("bigger-int8", toy.BIGGER, fixed_bigger)))
    verdict, because = quantization.verdict(quantization.comparisons(quantization.variants(toy.arm_set(toy.base(), same, bigger))))
    assert verdict == expected and "int8: measured" in because


@pytest.mark.parametrize(("bandwidth", "engine_threads", "expected", "because"), [
    (41.0, None, "held", "uses 61 percent of the bandwidth"),
    (43.0, None, "moved", "uses 58 percent of the bandwidth, so it does not wait for bytes"),
    (250.0, None, "moved", "fewer bits also change the arithmetic"), (None, None, "moved", "the bandwidth was not measured"),
    (25.0, 1, "moved", "with 2 threads, and the engine computes with 1"), (25.0, 2, "held", "uses 100 percent"),
])
def test_bytes_prove_nothing_unless_the_step_waits_for_them(bandwidth, engine_threads, expected, because):
    more = {"bandwidth": bandwidth, "threads": 2, "engine_threads": engine_threads}
    arms = toy.arm_set(toy.base(**more), toy.same(**more), toy.bigger(**more))
    verdict, said = quantization.verdict(quantization.comparisons(quantization.variants(arms)))
    assert verdict == expected and because in said


def test_steps_that_are_no_line_are_compared_as_measured():
    half = {batch: time // 2 for batch, time in toy.UNEVEN.items()}
    rows = quantization.variants(toy.arm_set(toy.Run("float32", toy.BASE, steps=toy.UNEVEN), toy.Run("int8", toy.SAME, steps=half)))
    start = row(rows, "float32")
    assert start["line_doubt"] == "the interval of its slope includes 0" and start["crossover"] is None
    assert start["shared_ms"] == start["one_ms"] == pytest.approx(46.9) and start["shared_by"] == quantization.ONE
    assert start["effective_gb_s"] == pytest.approx(0.5 / 0.0469) and (start["largest_batch"], start["largest_ms"]) == (16, pytest.approx(71.6))
    pair = quantization.comparisons(rows).iloc[0]
    assert pair["measured"] == pair["one"] == pytest.approx(0.5) and pair["measured_by"] == quantization.ONE and pair["low"] is None
    assert pair["largest"] == pytest.approx(0.5) and pair["largest_batch"] == 16 and pair["slope"] is None and "includes 0" in pair["line_doubt"]


def test_one_bad_line_puts_all_variants_on_measured_steps():
    rows = quantization.variants(toy.arm_set(toy.base(), toy.Run("int8", toy.SAME, steps=toy.UNEVEN), toy.bigger()))
    assert [doubt is None for doubt in rows["line_doubt"]] == [True, False, True] and set(rows["shared_by"]) == {quantization.ONE}
    assert quantization.comparisons(rows).iloc[1]["measured"] == pytest.approx(24.5 / 21)  # 22 + 2.5 over 20 + 1
    pair = quantization.comparisons(rows).iloc[0]
    assert pair["measured"] == pytest.approx(46.9 / 21) and pair["largest_batch"] == 8  # the largest that both ran


def test_one_variant_decides_nothing():
    verdict, because = quantization.verdict(quantization.comparisons(quantization.variants(toy.arm_set(toy.base()))))
    assert verdict == "not measured here" and "no second variant" in because


def test_too_few_batches_give_a_reason():
    pairs = quantization.comparisons(quantization.variants(toy.arm_set(toy.base(), toy.same(batches=(2, 4)))))
    assert pairs.iloc[0]["measured"] is None and "needs 3" in pairs.iloc[0]["reason"]
    assert quantization.verdict(pairs)[0] == "not measured here"


# --- words ------------------------------------------------------------------------------------------------------------


def test_quality_by_hand(arms):
    found = quantization.quality(arms).set_index("arm")
    assert found.loc["int8", "perplexity_ratio"] == pytest.approx(1.05)
    assert found.loc["int8", "identical"] == 6 and found.loc["int8", "agreed_tokens"] == 6 * 32 + 16
    assert found.loc["int8", "agreed_percent"] == pytest.approx(100 * 208 / 256)
    assert found.loc["float32", "perplexity_ratio"] is None and found.loc["float32", "reason"] is None
    assert "random" in found.loc["bigger-int8", "reason"] and found.loc["bigger-int8", "perplexity"] is None


def test_another_text_is_not_compared():
    found = quantization.quality(toy.arm_set(toy.base(), toy.same(quality=toy.said(text_tokens=699)))).set_index("arm")
    assert found.loc["int8", "perplexity_ratio"] is None and "not comparable" in found.loc["int8", "reason"]


@pytest.mark.parametrize(("left", "right", "identical", "agreed"), [
    ([[1, 2, 3]], [[1, 2, 3]], 1, 3), ([[1, 2, 3]], [[1, 9, 3]], 0, 1), ([[1, 2, 3]], [[1, 2]], 0, 2), ([[1, 2], [3, 4]], [[1, 2], []], 1, 2),
])
def test_agreement_ends_at_the_first_difference(left, right, identical, agreed):
    found = quantization.agreement(left, right)
    assert (found["identical"], found["agreed_tokens"]) == (identical, agreed)


def test_nothing_said_is_not_agreement():
    assert quantization.agreement([], [[1]]) == {"identical": None, "agreed_tokens": None, "agreed_percent": None}


# --- figures ----------------------------------------------------------------------------------------------------------

SETS = {
    "whole": lambda: toy.arm_set(toy.base(), toy.same(), toy.bigger(), toy.refused()),
    "one variant": lambda: toy.arm_set(toy.base()),
    "no facts": lambda: toy.arm_set(*(_without_facts(run) for run in (toy.base(), toy.same()))),
    "base missing": lambda: toy.arm_set(toy.same(), names=["float32", "int8"]),
    "no steps": lambda: toy.arm_set(toy.base(batches=()), toy.same(batches=())),
    "no flood": lambda: toy.arm_set(toy.base(flood=None), toy.same(flood=None), toy.bigger(flood=None)),
    "uneven": lambda: toy.arm_set(*(toy.Run(arm, facts, steps=toy.UNEVEN, flood=flood, kernel="CPUInt8") for arm, facts, flood in
                                    (("float32", toy.BASE, 200.0), ("int8", toy.SAME, 300.0), ("bigger-int8", toy.BIGGER, 120.0)))),
    "hub": lambda: toy.arm_set(*(_from_a_hub(run, size) for run, size in ((toy.base(), 8.61), (toy.bigger(), 11.21)))),
    "other threads": lambda: toy.arm_set(*(make(threads=2, engine_threads=1) for make in (toy.base, toy.same, toy.bigger))),
    "no bandwidth": lambda: toy.arm_set(toy.base(bandwidth=None), toy.same(bandwidth=False)),
    "all refused": lambda: toy.arm_set(toy.refused("float32"), toy.refused("int8")),
    "no slope": lambda: toy.arm_set(toy.Run("float32", toy.BASE | {"slope": 0}, flood=10.0), toy.Run("int8", toy.SAME | {"slope": 0}, flood=12.0)),
}


def _from_a_hub(run, gib):
    """Weights that the server read from a hub: only its log says how much it loaded."""
    run.said["weights_gib"] = gib
    return _without_facts(run)


def _without_facts(run):
    run.document["model"]["facts"] = None
    return run


@pytest.mark.parametrize("name", SETS)
def test_every_figure_can_be_drawn_for_every_set(name):
    found = part_5.look(SETS[name]())
    figures = [quantization_figures.bytes_bars(found.rows), quantization_figures.step_lines(found.rows, found.steps, found.fits),
               quantization_figures.ratios(found.pairs, part_5.published_pairs()), quantization_figures.ratios(found.pairs),
               quantization_figures.throughput(found.rows, found.steps, found.fits),
               quantization_figures.relative(found.rows, found.fits, part_5.published_frame())]
    for figure in figures:
        meta = figure.layout.meta
        assert meta["alt"].endswith(".") and meta["csv"].endswith(".csv") and meta["columns"]
        assert not any(word in meta["alt"] for word in ("None", "nan", "inf "))
        assert {trace.type for trace in figure.data} <= {"scatter", "bar"}
        figure.to_json()


def test_the_ratio_figure_shows_predictions_and_results(pairs):
    figure = quantization_figures.ratios(pairs, part_5.published_pairs())
    by_name = {trace.name: trace for trace in figure.data}
    assert list(by_name["by streamed bytes"].x)[:2] == [0.5, 1.05]
    assert list(by_name["measured"].x) == pytest.approx([0.5, 1.1]) and list(by_name["published"].x) == pytest.approx([19.32 / 19.08], rel=1e-4)
    assert "int8: by streamed bytes 0.50" in figure.layout.meta["alt"]


def test_relative_speed_goes_from_the_ratio_of_fixed_terms_to_that_of_slopes(arms):
    found = part_5.look(arms)
    figure = quantization_figures.relative(found.rows, found.fits, part_5.published_frame())
    line = next(trace for trace in figure.data if trace.name == "bigger-int8, steps")
    # batch = x * 20: (20 + 20 x) / (22 + 50 x)
    assert line.y[0] == pytest.approx((20 + 0.4) / (22 + 1.0), rel=1e-4) and line.y[-1] == pytest.approx(120 / 272, rel=1e-4)
    assert next(trace for trace in figure.data if trace.name == "int8, flood").y[0] == pytest.approx(1.5)


def test_a_line_that_is_none_is_not_used_in_figures():
    found = part_5.look(SETS["uneven"]())
    figure = quantization_figures.relative(found.rows, found.fits, part_5.published_frame())
    ours = [trace.name for trace in figure.data if not trace.name.startswith("A10G")]
    assert ours == ["int8, flood", "bigger-int8, flood"] and "cannot be relied on" in figure.layout.meta["alt"]
    curves = [trace for trace in quantization_figures.throughput(found.rows, found.steps, found.fits).data if trace.mode == "lines"]
    assert not curves
    drawn = quantization_figures.step_lines(found.rows, found.steps, found.fits)
    assert all(trace.line.dash == "dot" for trace in drawn.data if trace.mode == "lines") and "a poor description" in drawn.layout.meta["alt"]
    assert "by steps of one sequence" in quantization_figures.ratios(found.pairs).layout.meta["alt"]


def test_bars_hold_the_bytes(rows):
    figure = quantization_figures.bytes_bars(rows)
    streamed = next(trace for trace in figure.data if trace.name == "streamed in a step")
    assert list(streamed.x) == [0.5, 0.25, 0.525] and "0.540 GB loaded" in figure.layout.meta["alt"]
