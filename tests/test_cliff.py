"""The batching cliff: step times, the line through them, caps against concurrency, the queue, and their figures."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import synthetic_cliff as toy

from inference_wall import cliff, cliff_figures, running_batch
from inference_wall.site import mime


def line(batches, fixed=20.0, slope=2.0, noise=()):
    step = [fixed + slope * batch for batch in batches]
    for place, change in noise:
        step[place] += change
    return pd.DataFrame({"batch": list(batches), "step_ms": step, "n": 100})


@pytest.fixture(scope="module")
def arms():
    return toy.arm_set(toy.cap_16(), toy.cap_1())


# --- one batch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_step_is_the_gap_while_all_streams_decode(batch):
    found = cliff.step_time(*toy.serve(batch, 16, 48)[:2])
    assert found["batch"] == batch
    assert found["step_ms"] == pytest.approx(20 + 2 * batch)  # no prompt is read in the window
    assert found["p10_ms"] == found["p90_ms"] == found["mean_ms"] == found["step_ms"]
    assert found["n"] == 47 * batch and found["steps"] == 47 and found["reason"] is None


def test_the_window_leaves_out_steps_with_a_smaller_batch():
    requests = pd.DataFrame({"request": [0, 1], "first_token": [0, 5_000], "end": [10_000, 15_000], "outcome": "completed"})
    times = {0: [0, 1_000, *range(5_000, 10_001, 1_000)], 1: [*range(5_000, 10_001, 1_000), 15_000]}
    chunks = pd.DataFrame([{"request": request, "time": time, "tokens": 1} for request, row in times.items() for time in row])
    found = cliff.step_time(requests, chunks)
    assert found["step_ms"] == 10.0 and found["n"] == 10 and found["steps"] == 5
    assert found["p90_ms"] is None and "5 steps" in found["reason"]  # ten gaps, but only five steps: both streams share each


def test_bundled_tokens_show_in_the_mean_not_in_invented_gaps():
    requests = pd.DataFrame({"request": [0], "first_token": [0], "end": [40_000], "outcome": "completed"})
    chunks = pd.DataFrame({"request": 0, "time": range(0, 40_001, 2_000), "tokens": [1] + [2] * 20})
    found = cliff.step_time(requests, chunks)
    assert found["n"] == 40 and found["step_ms"] == 0.0 and found["mean_ms"] == 10.0


@pytest.mark.parametrize(("change", "said"), [
    ({"outcome": ["completed", "failed"]}, "1 of 2 streams"),
    ({"first_token": [0, 20_000]}, "never all decoded"),
])
def test_a_batch_that_never_ran_together_has_no_step_time(change, said):
    requests = pd.DataFrame({"request": [0, 1], "first_token": [0, 0], "end": [10_000, 30_000], "outcome": "completed"} | change)
    chunks = pd.DataFrame({"request": [0, 0, 1, 1], "time": [0, 10_000, 20_000, 30_000], "tokens": 1})
    found = cliff.step_time(requests, chunks)
    assert found["step_ms"] is None and said in found["reason"]


# --- the line ---------------------------------------------------------------------------------------------------------


def test_a_straight_line_is_found_again():
    fit = cliff.step_fit(line([1, 2, 4, 8, 16]))
    assert (fit.fixed_ms, fit.slope_ms, fit.crossover) == (pytest.approx(20), pytest.approx(2), pytest.approx(10))
    assert fit.r2 == pytest.approx(1) and fit.n == 5 and fit.reason is None
    assert fit.ceiling_tok_s == pytest.approx(500) and fit.most_gain == pytest.approx(11)
    assert fit.tok_s(10) == pytest.approx(250)  # at the crossover half of the ceiling
    assert fit.tok_s(1e9) / fit.tok_s(1) == pytest.approx(fit.most_gain, rel=1e-6)


def test_the_published_fit_and_its_intervals():
    """Slope and interval as scipy and the closed form give them; the crossover's interval by trying every ratio."""
    x, y = np.array([1, 8, 64, 146.0]), np.array([20.2, 21.9, 37.1, 65.6])
    fit = cliff.step_fit(pd.DataFrame({"batch": x, "step_ms": y, "n": None}))
    assert fit.fixed_ms == pytest.approx(19.070, abs=5e-4) and fit.slope_ms == pytest.approx(0.3129, abs=5e-5)
    from scipy import stats

    theirs = stats.linregress(x, y)
    t = stats.t.ppf(0.975, 2)
    assert fit.slope_interval == pytest.approx((theirs.slope - t * theirs.stderr, theirs.slope + t * theirs.stderr))
    assert fit.fixed_interval == pytest.approx((theirs.intercept - t * theirs.intercept_stderr, theirs.intercept + t * theirs.intercept_stderr))
    low, high = fit.band_ms(0.0)
    assert (low, high) == pytest.approx(fit.fixed_interval)  # the band at no sequence is the interval of the fixed part

    def inside(ratio):  # -ratio is where the line crosses 0: the band there must hold 0
        low, high = fit.band_ms(-ratio)
        return low <= 0 <= high

    low, high = fit.crossover_interval
    assert inside(low * 1.001) and inside(high * 0.999) and not inside(low * 0.999) and not inside(high * 1.001)
    assert low < fit.crossover < high
    assert abs(fit.worst_ms) == max(map(abs, fit.residuals_ms)) and fit.worst_batch == 64


@pytest.mark.parametrize(("frame", "said"), [
    (line([1, 2]), "2 different batches"),
    (line([4, 4, 4]), "1 different batches"),
    (line([1, 2, 4]).assign(step_ms=None), "0 different batches"),
])
def test_too_few_batches_give_no_line(frame, said):
    fit = cliff.step_fit(frame)
    assert fit.fixed_ms is None and fit.crossover is None and said in fit.reason
    assert fit.band_ms(3) is None and fit.step_ms(3) is None and fit.ceiling_tok_s is None


@pytest.mark.parametrize(("slope", "said"), [(-1.0, "does not grow"), (0.0, "does not grow")])
def test_without_growth_nothing_crosses(slope, said):
    fit = cliff.step_fit(line([1, 2, 4], slope=slope))
    assert fit.slope_ms == pytest.approx(slope) and fit.crossover is None and said in fit.reason
    assert fit.ceiling_tok_s is None and fit.most_gain is None


def test_without_a_fixed_part_nothing_crosses():
    fit = cliff.step_fit(line([1, 2, 4], fixed=-0.5))
    assert fit.crossover is None and "no fixed part" in fit.reason


def test_a_slope_that_could_be_nothing_does_not_bound_the_crossover():
    fit = cliff.step_fit(line([1, 2, 4], noise=[(0, 6.0)]))
    assert fit.slope_interval[0] < 0 < fit.slope_interval[1]
    assert fit.crossover is not None and fit.crossover_interval == (None, None)
    assert "do not bound" in fit.unbounded and fit.undetermined == fit.unbounded


def test_a_crossover_is_determined_only_where_batches_were_timed():
    inside = cliff.step_fit(line([1, 2, 4, 8, 16]))
    assert inside.unbounded is None and inside.undetermined is None
    beyond = cliff.step_fit(line([1, 2, 4, 8]))
    assert beyond.unbounded is None and "beyond the largest batch" in beyond.undetermined
    assert cliff.step_fit(line([1, 2, 4], slope=-1)).undetermined == cliff.step_fit(line([1, 2, 4], slope=-1)).reason


def test_a_step_that_is_shorter_than_that_of_a_smaller_batch_is_named():
    """The step times of a real record: a kernel for four rows was faster than the one for one row."""
    fit = cliff.step_fit(pd.DataFrame({"batch": [1, 2, 4, 8, 16], "step_ms": [46.9, 55.9, 39.9, 52.5, 71.6]}))
    assert fit.falls == ((4, 1), (8, 2)) and fit.slope_interval[0] < 0 and fit.unbounded
    assert cliff.step_fit(line([1, 2, 4, 8, 16])).falls == ()
    assert cliff.step_fit(line([1, 2, 4], slope=0.0, noise=[(1, -0.1)])).falls == ()  # half a percent is no fall
    repeats = pd.DataFrame({"batch": [1, 1, 1, 2, 4], "step_ms": [20, 20, 40, 22, 24]})
    assert cliff.step_fit(repeats).falls == ()  # one bad repeat does not make batch 1 slow


# --- the running batch ------------------------------------------------------------------------------------------------


def test_the_batch_by_the_client_counts_prompts_that_the_gauge_misses(arms):
    caps, closed = cliff.caps_frame(arms), cliff.closed_frame(arms)
    assert caps["batch_mean"].tolist() == [1, 16] and closed["batch_mean"].tolist() == [1, 2, 4, 8, 16]
    # In the steady window one step in 32 shows 0 at a cap of 1; at a cap of 16 that step also reads 16 prompts.
    assert caps["running_mean"].iloc[0] < 0.97 and caps["running_mean"].iloc[1] < 15


def test_the_mean_batch_by_hand():
    requests = pd.DataFrame({"sent": [0, 0, 0, 400_000], "end": [100_000, 200_000, 400_000, 600_000]})
    assert running_batch.batch_mean(requests, 2, (0.0, 6.0)) == pytest.approx((2 * 2 + 1 * 2 + 1 * 2) / 6, abs=0.01)
    assert running_batch.batch_mean(requests, 9, (0.0, 2.0)) == pytest.approx((3 + 2) / 2)
    assert running_batch.batch_mean(requests, 9, (0.5, 1.0)) == 3  # within one span
    assert running_batch.batch_mean(requests, 9, None) is None
    assert running_batch.batch_mean(requests.assign(end=[100_000, None, 400_000, 600_000]), 9, (0.0, 2.0)) is None


def test_a_cache_that_seats_fewer_than_the_cap_limits_the_batch():
    run = toy.cap_16()
    run.points[1]["summary"]["running_max"] = 10.0
    assert cliff.caps_frame(toy.arm_set(run))["batch_mean"].tolist() == [10]


# --- sets -------------------------------------------------------------------------------------------------------------


def test_caps_are_ascending_and_without_the_cold_pass(arms):
    caps = cliff.caps_frame(arms)
    assert list(caps["cap"]) == [1, 16] and list(caps["num_prompts"]) == [12, 48]
    assert caps["tok_s"].iloc[0] == pytest.approx(toy.ANSWER / (toy.ONE * 1e-5), rel=1e-4)
    assert caps["tok_s"].iloc[1] == pytest.approx(16 * toy.ANSWER / (toy.WAVE_16 * 1e-5), rel=1e-4)
    assert list(caps["tok_s_kind"]) == ["steady window"] * 2
    assert caps["running_max"].tolist() == [1, 16]


def test_steps_of_a_set_lie_on_the_toy_line(arms):
    steps = cliff.steps_frame(arms)
    assert list(steps["batch"]) == [1, 2, 4, 8, 16]
    fit = cliff.step_fit(steps)
    assert (fit.fixed_ms, fit.slope_ms) == (pytest.approx(20), pytest.approx(2))
    assert steps["tok_s"].iloc[-1] == pytest.approx(16 / 0.052)


def test_a_batch_that_the_server_did_not_run_whole_is_not_quoted():
    run = toy.cap_16()
    steps = [point for point in run.points if point["load"] == "steps"]
    steps[-1]["summary"]["running_max"] = 12.0
    found = cliff.steps_frame(toy.arm_set(run))
    assert found["step_ms"].isna().tolist() == [False] * 4 + [True] and "12 of 16" in found["reason"].iloc[-1]


def rows(**columns):
    base = {"arm": "cap-1", "cap": 1, "valid": True, "reasons": [[]], "output_tok_s": 9.0, "steady_output_tok_s": 10.0, "itl_p50_ms": 5.0}
    count = max(len(value) for value in columns.values())
    return pd.DataFrame({name: columns.get(name, [value] * count if name != "reasons" else value * count) for name, value in base.items()})


def test_repeats_fold_to_the_lower_median_with_their_range():
    (row,) = cliff.fold(rows(steady_output_tok_s=[10.0, 14.0, 12.0, 13.0]), "cap").to_dict("records")
    assert (row["tok_s"], row["tok_s_low"], row["tok_s_high"], row["repeats"]) == (12.0, 10.0, 14.0, 4)


def test_an_invalid_repeat_takes_no_part_unless_all_are():
    (row,) = cliff.fold(rows(steady_output_tok_s=[10.0, 99.0], valid=[True, False], reasons=[[], ["drift"]]), "cap").to_dict("records")
    assert row["tok_s"] == 10.0 and row["valid"] and row["reasons"] == ["drift"]
    (row,) = cliff.fold(rows(steady_output_tok_s=[99.0], valid=[False], reasons=[["drift"]]), "cap").to_dict("records")
    assert row["tok_s"] == 99.0 and not row["valid"]


def test_without_a_steady_window_the_whole_point_counts_and_says_so():
    (row,) = cliff.fold(rows(steady_output_tok_s=[None]), "cap").to_dict("records")
    assert row["tok_s"] == 9.0 and row["tok_s_kind"] == "whole point"


def test_cap_and_concurrency_agree_in_the_toy(arms):
    table = cliff.agreement(cliff.caps_frame(arms), cliff.closed_frame(arms))
    assert sorted(set(table["cap"])) == [1, 16]
    judged = table[~table["column"].isin(["ttft_p50_ms", "running_mean"])]
    assert len(judged) == 6 and set(judged["verdict"]) == {"agree"} and judged["difference_percent"].abs().max() < 1
    waits = table[table["column"] == "ttft_p50_ms"]
    assert set(waits["verdict"]) == {"not comparable"} and "flood of 12" in waits["note"].iloc[0]


def test_a_difference_beyond_the_limit_is_a_difference(arms):
    closed = cliff.closed_frame(arms)
    closed.loc[0, "tok_s"] *= 1.2
    row = cliff.agreement(cliff.caps_frame(arms), closed).iloc[0]
    assert row["verdict"] == "differ" and row["difference_percent"] == pytest.approx(20, abs=1)
    closed.loc[0, "valid"] = False
    assert cliff.agreement(cliff.caps_frame(arms), closed).iloc[0]["verdict"] == "not comparable"


# --- the queue --------------------------------------------------------------------------------------------------------


def test_the_place_in_the_queue_explains_the_wait_of_a_cap_of_one():
    queue = cliff.queue_positions(toy.serve(12, 1)[0])
    assert list(queue["position"]) == list(range(12))
    assert queue["ttft_s"].iloc[0] == pytest.approx(0.030)  # a step of 22 ms that reads a prompt of 8 ms
    found = cliff.fairness(queue, toy.ONE * 1e-5, 0.030)
    assert found["slope_s"] == pytest.approx(0.712) and found["r2"] == pytest.approx(1)
    assert found["difference_percent"] == pytest.approx(0, abs=1e-6) and found["in_order"] == 1 and found["explained"] is True
    assert found["worst_share"] == pytest.approx(0, abs=1e-6) and found["sent_within_s"] == 0


def test_the_order_of_the_queue_is_the_servers_and_the_order_of_sending_is_told_beside_it():
    requests, _, _ = toy.serve(12, 1)
    order = np.random.default_rng(3).permutation(12)
    requests[["first_token", "end"]] = requests[["first_token", "end"]].to_numpy()[order]
    queue = cliff.queue_positions(requests.assign(sent=requests["sent"] + requests.index))
    assert queue["sent_place"].tolist() == np.argsort(order).tolist()
    found = cliff.fairness(queue, 0.712, 0.030)
    assert found["explained"] is True and found["in_order"] == pytest.approx((np.diff(order) > 0).mean()) and found["in_order"] < 1
    assert found["sent_within_s"] == pytest.approx(11e-5)


@pytest.mark.parametrize(("cap", "prompts"), [(2, 12), (4, 16)])
def test_a_server_that_serves_several_at_once_is_not_explained(cap, prompts):
    """Later places wait longer by construction: the slope, and one answer a place, must be able to say no."""
    assert cliff.fairness(cliff.queue_positions(toy.serve(prompts, cap)[0]), toy.ONE * 1e-5, 0.030)["explained"] is False


def test_pairs_with_the_slope_of_theory_are_not_one_at_a_time():
    queue = cliff.queue_positions(toy.serve(12, 1)[0])
    pairs = queue.assign(ttft_s=(queue["position"] // 2) * 2 * 0.712)
    found = cliff.fairness(pairs, 0.712 * 0.99, 0.03)
    assert found["r2"] > 0.95 and abs(found["difference_percent"]) < 10 and found["explained"] is False


def test_a_line_with_the_wrong_slope_is_not_explained():
    found = cliff.fairness(cliff.queue_positions(toy.serve(12, 1)[0]), 0.4, 0.030)
    assert found["r2"] == pytest.approx(1) and found["explained"] is False


def test_what_cannot_be_judged_says_why():
    queue = cliff.queue_positions(toy.serve(12, 1)[0])
    assert cliff.fairness(queue.head(4), 0.7, 0.1)["explained"] is None
    assert "alone" in cliff.fairness(queue, None, None)["reason"]


def test_a_failed_request_leaves_its_place_in_the_order_of_sending():
    requests, _, _ = toy.serve(6, 1)
    requests.loc[2, "outcome"] = "failed"
    queue = cliff.queue_positions(requests)
    assert list(queue["sent_place"]) == [0, 1, 3, 4, 5] and list(queue["position"]) == [0, 1, 2, 3, 4]


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_own_bytes_of_a_dense_model():
    # 30 layers x key and value x 3 heads x 64 x 4 bytes = 46,080 bytes a token
    assert cliff.own_bytes(toy.SMOL, 100, "float32") == (4_608_000, "")
    assert cliff.own_bytes({"text_config": toy.SMOL}, 100, "torch.bfloat16") == (2_304_000, "")


def test_own_bytes_of_a_hybrid_model_hold_its_state():
    config = {"num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 256, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
              "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    found, _ = cliff.own_bytes(config, 10, "float16")
    assert found == 10 * 2 * 4 * 256 * 2 + 3 * 2 * 4 * 32 * 128 * 128


@pytest.mark.parametrize(("config", "dtype"), [(None, "float32"), ({"hidden_size": 576}, "float32"), (toy.SMOL, None)])
def test_own_bytes_are_unknown_with_a_reason(config, dtype):
    found, reason = cliff.own_bytes(config, 10, dtype)
    assert found is None and reason


# --- figures ----------------------------------------------------------------------------------------------------------


def every_figure(arms):
    caps, closed, steps = cliff.caps_frame(arms), cliff.closed_frame(arms), cliff.steps_frame(arms)
    fit = cliff.step_fit(steps)
    queues = {int(cap): cliff.queue_positions(arms[f"cap-{cap:.0f}"].frame("requests", 1 if cap > 1 else 0)) for cap in caps["cap"]}
    yield "throughput", cliff_figures.throughput(caps, closed, fit, "cpu")
    yield "step_line", cliff_figures.step_line(steps, fit, "cpu", 16.0, 0.2)
    yield "queue", cliff_figures.queue(queues, 0.712, 0.03, "cpu")
    yield "price", cliff_figures.price(caps, closed, "cpu")
    yield "on_one_curve", cliff_figures.on_one_curve([{"rig": "cpu", "label": "cpu", "fit": fit, "steps": steps,
                                                      "caps": caps.assign(batch=caps["batch_mean"])}])


@pytest.mark.parametrize("runs", [
    pytest.param(lambda: (toy.cap_16(), toy.cap_1()), id="whole"),
    pytest.param(lambda: (toy.cap_16(),), id="one cap"),
    pytest.param(lambda: (toy.cap_1(),), id="no steps, no loops"),
    pytest.param(lambda: (toy.cap_16(batches=(1, 2)), toy.cap_1()), id="no fit"),
    pytest.param(lambda: (toy.cap_16(slope=0), toy.cap_1()), id="no slope"),
    pytest.param(lambda: (toy.bent(), toy.cap_1()), id="bent"),
    pytest.param(lambda: (toy.held_up(), toy.cap_1()), id="held up"),
    pytest.param(lambda: (toy.refused(),), id="nothing"),
])
def test_every_figure_keeps_the_rules_of_the_site(runs):
    for name, figure in every_figure(toy.arm_set(*runs())):
        document = json.loads(figure.to_json())
        json.dumps(document, allow_nan=False)
        assert mime.unknown_trace_types(document) == set() and len(figure.to_json()) < 60_000, name
        layout = document["layout"]
        assert not {"title", "paper_bgcolor", "plot_bgcolor", "font"} & set(layout) and layout.get("template", {}) == {}, name
        assert layout["meta"]["csv"].endswith(".csv") and len(layout["meta"]["alt"]) > 25, name
        assert "nan" not in layout["meta"]["alt"].lower() and "e+" not in layout["meta"]["alt"], name
        for trace in figure.data:
            assert all(value is None or math.isfinite(value) for value in (*trace.x, *trace.y)), (name, trace.name)


def trace_of(figure, name):
    return next(trace for trace in figure.data if trace.name == name)


def test_throughput_shows_caps_as_marks_and_theory_as_lines(arms):
    figure = dict(every_figure(arms))["throughput"]
    marks = trace_of(figure, "cap")
    assert marks.mode == "markers" and list(marks.x) == [1, 16] and marks.y[1] == pytest.approx(285.7, abs=0.1)
    assert list(trace_of(figure, "closed loop").x) == [1, 2, 4, 8, 16]
    ideal = trace_of(figure, "in proportion")
    assert ideal.y[1] / ideal.y[0] == pytest.approx(16)
    assert trace_of(figure, "decode alone, from the step fit").y[-1] == pytest.approx(16 / 0.052, rel=1e-4)


def test_the_crossover_is_marked_inside_and_told_outside(arms):
    figure = dict(every_figure(arms))["step_line"]
    assert any(shape.x0 == pytest.approx(10) for shape in figure.layout.shapes)
    far = cliff.step_fit(line([1, 2, 4], slope=0.1))
    outside = cliff_figures.step_line(cliff.steps_frame(arms), far, "cpu")
    assert not outside.layout.shapes and "outside of the figure" in outside.layout.meta["alt"]
    below = trace_of(figure, "bytes over bandwidth")
    assert below.y[0] == 16 and below.x[0] == 0


def test_the_theory_of_the_queue_is_drawn_for_a_cap_of_one_only(arms):
    line_of = trace_of(dict(every_figure(arms))["queue"], "place × time of one answer")
    assert list(line_of.y) == pytest.approx([0.03, 11 * 0.712 + 0.03])
    other = cliff_figures.queue({16: cliff.queue_positions(toy.serve(48, 16)[0])}, 0.712, 0.03, "cpu")
    assert [trace.name for trace in other.data] == ["cap 16"]


def test_machines_with_a_straight_step_lie_on_the_curve(arms):
    decode = trace_of(dict(every_figure(arms))["on_one_curve"], "cpu, decode alone")
    for x, y in zip(decode.x, decode.y, strict=True):
        assert y == pytest.approx(x / (1 + x), rel=1e-4)


def test_a_crossover_that_the_points_do_not_bound_places_nothing():
    figures = dict(every_figure(toy.arm_set(toy.bent(), toy.cap_1())))
    curve, step = figures["on_one_curve"], figures["step_line"]
    assert not [trace for trace in curve.data if trace.name] and "cpu is left out: the points do not bound it" in curve.layout.meta["alt"]
    assert not step.layout.shapes and "not drawn: the points do not bound it" in step.layout.meta["alt"]


def test_the_batch_that_is_drawn_is_the_clients_and_the_gauge_is_in_the_hover(arms):
    figure = dict(every_figure(arms))["throughput"]
    lower = next(trace for trace in figure.data if trace.name == "cap" and trace.yaxis == "y2")
    assert list(lower.y) == [1, 16] and "by the server's gauge" in lower.customdata[1][3] and "steady window" in lower.customdata[1][3]


def test_an_invalid_cap_is_hollow():
    run = toy.cap_1()
    run.points[0]["validity"] = {"valid": False, "reasons": ["littles_law"]}
    marks = trace_of(dict(every_figure(toy.arm_set(toy.cap_16(), run)))["throughput"], "cap")
    assert list(marks.marker.symbol) == ["square-open", "square"] and "littles_law" in marks.customdata[0][3]
