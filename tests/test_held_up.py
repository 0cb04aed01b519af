"""Step times that the front end set and not the engine: who is convicted, who is suspect, and what the page then says."""

from types import SimpleNamespace

import pandas as pd
import pytest
import synthetic_cliff as toy
from bs4 import BeautifulSoup
from test_trace import event, step, write

from inference_wall import arms, cliff, cliff_figures, held_up, part_3, records
from inference_wall.site import mime

H200 = "cap-256-c23543ee-20261201T004911Z"


def steps(**batches):
    """Rows of `cliff.steps_frame`, before `mark`: one arm; a batch has a step in ms or one a repeat."""
    rows = [{"arm": "a", "batch": int(name[1:]), "repeat": repeat, "step_ms": ms, "tok_s": 1e3 * int(name[1:]) / ms, "valid": True}
            for name, each in batches.items() for repeat, ms in enumerate(each if isinstance(each, list) else [each])]
    return pd.DataFrame(rows)


@pytest.fixture
def mark(monkeypatch):
    def marked(frame, **traced):
        """`traced`: of each arm, step and gap of the engine by batch."""
        monkeypatch.setattr(held_up, "traced_steps", lambda run: traced.get(run, {}))
        return held_up.mark(frame, SimpleNamespace(testable={arm: arm for arm in frame["arm"].unique()}))
    return marked


def held(frame):
    return {(row.arm, row.batch): row.held_up for row in frame.itertuples() if pd.notna(row.held_up)}


# --- the engine's own step --------------------------------------------------------------------------------------------


def one_run(*traces):
    points = [{"point": number, "pass": "trace", "load": "steps", "num_prompts": batch} for number, (batch, _) in enumerate(traces)]
    return SimpleNamespace(points=points, trace=lambda point: traces[point][1])


def test_the_engines_step_is_its_length_and_the_gap_by_medians(tmp_path):
    path = toy.card_trace(tmp_path, 16, 30_000.0, gap_us=500.0)
    assert held_up.traced_steps(one_run((16, path))) == {16: pytest.approx(30.5)}  # not the first step, which took twice as long


def test_steps_that_read_or_hold_another_batch_do_not_count(tmp_path):
    card = {"cat": "gpu_user_annotation", "pid": 0, "tid": 7}
    spans = [(0.0, 10.0, (0, 0), 4), (12.0, 500.0, (1, 64), 4), (514.0, 10.0, (0, 0), 4), (526.0, 90.0, (0, 0), 5), (618.0, 10.0, (0, 0), 4)]
    path = write(tmp_path, [made for at, length, context, batch in spans for made in (
        step(at, length, context=context, generation=(batch, batch), **card), event("gemm", at, length, "kernel", pid=0, tid=7))])
    assert held_up.traced_steps(one_run((4, path))) == {4: pytest.approx(0.012)}
    assert held_up.traced_steps(one_run((16, path))) == {}


def test_a_trace_that_cannot_be_read_says_nothing(tmp_path):
    (tmp_path / "broken.json.gz").write_bytes(b"no")
    assert held_up.traced_steps(one_run((4, tmp_path / "broken.json.gz"), (8, tmp_path / "absent"), (16, None))) == {}


# --- who is held up ---------------------------------------------------------------------------------------------------


def test_a_step_longer_than_the_traced_one_was_not_set_by_the_engine(mark):
    frame = steps(b64=5.7, b128=8.9, b256=[17.4, 18.9, 19.3])  # 11,228, 14,382 and 13,545 tokens/s
    found = mark(frame, a={64: 5.8, 256: 12.7})
    assert held(found) == {("a", 128): held_up.SUSPECT, ("a", 256): held_up.TRACED}
    assert held(mark(frame, a={64: 5.8})) == {}, "without a trace of it nobody is convicted"


@pytest.mark.parametrize(("ms", "convicted"), [(10.9, False), (11.1, True)])
def test_the_margin_is_ten_percent(mark, ms, convicted):
    assert bool(held(mark(steps(b16=ms), a={16: 10.0}))) is convicted


@pytest.mark.parametrize(("ms", "suspect"), [(8.88, True), (8.90, False)])  # 8 / 8.888 ms are 90 percent of 20 / 20 ms
def test_who_comes_near_the_rate_of_a_held_up_batch_is_suspect(mark, ms, suspect):
    assert (("a", 8) in held(mark(steps(b8=ms, b20=20.0), a={20: 10.0}))) is suspect


def test_a_profiler_that_slows_convicts_nobody(mark):
    assert held(mark(steps(b1=3.6, b8=3.9), a={1: 6.7, 8: 5.4})) == {}


def test_repeats_count_by_their_median_and_invalid_ones_not_at_all(mark):
    assert held(mark(steps(b16=[10.0, 10.0, 30.0]), a={16: 10.0})) == {}
    frame = steps(b16=[10.0, 30.0, 30.0])
    assert held(mark(frame, a={16: 10.0}))
    frame.loc[1:, "valid"] = False
    assert held(mark(frame, a={16: 10.0})) == {}


def test_each_arm_is_judged_by_itself(mark):
    frame = pd.concat([steps(b16=20.0), steps(b16=20.0).assign(arm="b")], ignore_index=True)
    assert held(mark(frame, a={16: 10.0}, b={16: 21.0})) == {("a", 16): held_up.TRACED}


def test_the_line_leaves_out_who_was_held_up(mark):
    frame = mark(steps(b1=22.0, b2=24.0, b4=28.0, b16=90.0), a={16: 50.0})
    fit = cliff.step_fit(frame)
    assert (fit.n, fit.fixed_ms, fit.slope_ms) == (3, pytest.approx(20), pytest.approx(2))
    assert cliff.step_fit(frame.drop(columns="held_up")).slope_ms > 3


# --- on a page --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    return part_3.look(toy.arm_set(toy.held_up(), toy.cap_1()))


def test_a_set_with_a_held_up_batch(found):
    assert found.batches.set_index("batch")["held_up"].dropna().to_dict() == {16: held_up.TRACED}
    assert found.fit.n == 4 and found.fit.slope_ms == pytest.approx(2)
    assert found.decode_at_large == (pytest.approx(16 / 0.031), "by the engine's own steps in the trace")
    row = held_up.surely(found.batches)
    assert row["traced_ms"] == pytest.approx(31) and row["engine_tok_s"] == pytest.approx(16 / 0.031) and row["step_ms"] == pytest.approx(52)


def test_the_sentence_says_what_client_engine_and_line_say(found):
    text = held_up.sentence(found.batches, found.fit)
    for said in ("**At a batch of 16", "every 52.0 ms", "every 31.0 ms", "at least 516 tokens", "the client gets 308.",
                 "gives 52.0 ms; the trace, 31.0"):
        assert said in text, said
    assert f"{held_up.client_capacity()['events_s']:,}" in text and text.count("**") == 2


def test_suspects_are_named_with_their_reason(mark):
    batches = held_up.by_batch(mark(steps(b1=3.6, b64=5.7, b128=8.9, b256=[17.4, 19.3]), a={256: 12.7}))
    text = held_up.sentence(batches, cliff.StepFit(n=2, reason="two batches"))
    assert "At batches of 128 and 256" in text and "17.4 to 19.3 ms" in text and "At 128 the client gets 14,382" in text
    assert "the line gives" not in text
    rows = BeautifulSoup(held_up.table(batches), "html.parser").select("tbody tr")
    assert [row.find_all("td")[-1]["data-value"][:2] for row in rows] == ["ye", "ye", "no", "no"]
    assert "(17.4 to 19.3)" in rows[-1].text and "(" not in rows[0].text
    assert all(cell.text != "–" or cell["title"] for row in rows for cell in row.find_all("td"))


def test_nothing_is_said_where_nobody_was_held_up():
    whole = part_3.look(toy.arm_set(toy.cap_16(), toy.cap_1()))
    assert held_up.sentence(whole.batches, whole.fit) == "" and held_up.table(whole.batches) == "" and held_up.surely(whole.batches) is None


def test_held_up_points_stay_in_the_figures_and_are_marked(found):
    figure = cliff_figures.step_line(found.steps, found.fit, found.rig, 16.0, 0.2)
    drawn = {trace.name: trace for trace in figure.data}
    assert list(drawn["held up by the front end, not in the fit"].x) == [16] and 16 not in drawn["measured, median"].x
    assert list(drawn["the engine's own step, in the trace"].y) == [31] and drawn["fit, drawn on"].line.dash == "dash"
    assert max(drawn["fit"].x) == 8 and "held up by the front end" in figure.layout.meta["alt"]
    curve = cliff_figures.on_one_curve([{"rig": "cpu", "label": "cpu", "fit": found.fit, "steps": found.steps, "caps": pd.DataFrame(
        {"batch": [4.0], "tok_s": [100.0]})}])
    assert list(curve.data[0].marker.symbol) == ["circle"] * 4 + ["circle-open"] and "1 more were held up" in curve.layout.meta["alt"]
    limit = cliff_figures.throughput(found.caps, found.closed, found.fit, found.rig, 308.0)
    assert "what the front end handed out" in {trace.name for trace in limit.data}
    assert all(mime.unknown_trace_types(each.to_plotly_json()) == set() for each in (figure, curve, limit))


# --- the record that showed it ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def h200():
    return part_3.look(arms.of_runs([records.open_run(records.benchmarks() / "part_3" / "h200-4b" / H200)]))


def test_the_card_whose_front_end_could_not_follow(h200):
    assert h200.batches.set_index("batch")["held_up"].dropna().to_dict() == {128: held_up.SUSPECT, 256: held_up.TRACED}
    row = held_up.surely(h200.batches)
    assert row["tok_high"] < 0.8 * row["engine_tok_s"]
    # The line through the rest, drawn on, meets the trace that was not in it; bytes alone are most of its slope.
    assert h200.fit.step_ms(256) == pytest.approx(row["traced_ms"], rel=0.06) and 0.7 < h200.bound["own_ms"] / h200.fit.slope_ms < 1


def test_the_client_takes_more_than_that_front_end_gives(h200):
    assert held_up.client_capacity()["events_s_low"] > 3 * held_up.surely(h200.batches)["tok_high"]
