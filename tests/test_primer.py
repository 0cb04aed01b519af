"""The primer: steps out of arrivals, its two figures, and its page's numbers and terms."""

import re

import pandas as pd
import pytest

from inference_wall import arms, bytes_per_step, primer_figures, published, rigs
from inference_wall.primer_figures import engine_steps, step_picture, step_sentence, window

NOTEBOOK = (rigs.root() / "notebooks" / "primer.py").read_text(encoding="utf-8")


def chunks_of(arrivals):
    """{request: times} as a frame of chunks of one token."""
    rows = [(request, time, 1) for request, times in arrivals.items() for time in times]
    return pd.DataFrame(rows, columns=["request", "time", "tokens"])


def requests_of(sent):
    return pd.DataFrame({"request": list(sent), "sent": pd.array(list(sent.values()), dtype="Int64")})


# Steps every 1,000 units (10 ms); request 2 comes in at step 4, which takes 3,000; within a step arrivals differ by some units.
TIMES = [1_000, 2_000, 3_000, 4_000, 7_000, 8_000, 9_000, 10_000]
ARRIVALS = {0: TIMES, 1: [time + 20 for time in TIMES], 2: [time + 40 for time in TIMES[4:]]}
SENT = {0: 0, 1: 0, 2: 3_500}


def test_arrivals_of_a_step_belong_together():
    steps = engine_steps(chunks_of(ARRIVALS))
    assert steps.groupby("step")["request"].agg(list).tolist() == [[0, 1]] * 4 + [[0, 1, 2]] * 4


def test_half_a_median_gap_is_the_border():
    # Gaps of 1,000: at 500 an arrival still belongs to the step; at 501 it begins one, which the arrival at 1,000 joins.
    near = chunks_of({0: [0, 1_000, 2_000], 1: [500]})
    far = chunks_of({0: [0, 1_000, 2_000], 1: [501]})
    assert engine_steps(near)["step"].tolist() == [0, 0, 1, 2]
    assert engine_steps(far)["step"].tolist() == [0, 1, 1, 2]


def test_no_request_gets_two_chunks_in_a_step():
    steps = engine_steps(chunks_of({0: [0, 1, 1_000, 2_000, 3_000]}))
    assert steps["step"].tolist() == [0, 1, 2, 3, 4]


def test_chunks_without_a_token_are_no_step():
    frame = chunks_of({0: [0, 10]})
    frame.loc[1, "tokens"] = 0
    assert len(engine_steps(frame)) == 1
    with pytest.raises(ValueError, match="no token arrived"):
        window(requests_of({0: 0}), frame.iloc[:0])


def test_the_window_shows_a_prompt_being_read():
    seen = window(requests_of(SENT), chunks_of(ARRIVALS), steps=6)
    # Of three stretches of six steps, the one with most requests that still has two steps before the prompt's.
    assert seen.tokens["step"].min() == 2 and seen.tokens["step"].nunique() == 6
    assert seen.mixed == [4] and seen.newcomers[2] == 4
    assert seen.durations_ms[4] == pytest.approx(30) and seen.durations_ms[3] == pytest.approx(10)


def test_time_without_a_request_is_no_step():
    # Request 0 ends at 3,000; request 1 begins at 90,000: the pause between them is nobody's.
    seen = window(requests_of({0: 0, 1: 89_000}), chunks_of({0: [1_000, 2_000, 3_000], 1: [90_000, 91_000, 92_000]}))
    assert sorted(seen.durations_ms) == [1, 2, 4, 5] and max(seen.durations_ms.values()) == pytest.approx(10)
    assert seen.mixed == []


def test_the_picture_has_a_mark_a_token_and_a_bar_to_the_first():
    figure = step_picture(requests_of(SENT), chunks_of(ARRIVALS), what="a test")
    traces = {trace.name: trace for trace in figure.data}
    assert len(traces["a token"].x) + len(traces["first token"].x) == 20
    assert len(traces["first token"].x) == 3
    bar = traces["sent, no token yet"]
    assert dict(zip(bar.y, zip(bar.base, bar.x, strict=True), strict=True))["C"] == (35.0, pytest.approx(35.4))
    assert len(figure.layout.shapes) == 4  # every other of eight steps
    assert "a test" in figure.layout.meta["alt"] and "C: 4 chunks in steps 5 to 8" in figure.layout.meta["alt"]
    assert {trace.type for trace in figure.data} <= {"bar", "scatter"}


def test_a_picture_holds_so_many_rows_and_says_so():
    arrivals = {request: TIMES for request in range(30)}
    figure = step_picture(requests_of(dict.fromkeys(range(30), 0)), chunks_of(arrivals))
    assert len(figure.layout.yaxis.categoryarray) == primer_figures.ROWS
    assert "30 requests got tokens in them, 12 are drawn" in figure.layout.meta["alt"]


def test_a_request_whose_sending_is_lost_has_no_bar():
    figure = step_picture(requests_of({0: 0, 1: 0, 2: None}), chunks_of(ARRIVALS))
    bar = next(trace for trace in figure.data if trace.type == "bar")
    assert set(bar.y) == {"A", "B"}


@pytest.mark.parametrize(("stretch", "said"), [
    (7_000, "It took 30.0 ms, longer than any step without. **Everybody in it waited"),
    (5_000, "no longer than the longest step without"),
])
def test_words_say_whether_the_prompt_was_felt(stretch, said):
    times = [1_000, 2_000, 3_000, 4_000, stretch, *(stretch + 1_000 * n for n in range(1, 4))]
    arrivals = {0: times, 1: times, 2: times[4:]}
    text = step_sentence(requests_of({0: 0, 1: 0, 2: 3_500}), chunks_of(arrivals))
    assert said in text and "10.0 ms (median of 6 steps" in text and "2 to 3 requests" in text


def test_words_without_a_prompt_or_without_enough_steps():
    text = step_sentence(requests_of({0: 0}), chunks_of({0: TIMES}))
    assert "No prompt was read here" in text and "for 1 request." in text
    few = step_sentence(requests_of({0: 0}), chunks_of({0: TIMES[:3]}))
    assert "Too few of them" in few


def test_bars_are_the_frame():
    rows = bytes_per_step.frame(published.MODEL, [1, 8], 256)
    figure = primer_figures.bytes_bars(rows)
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert [sum(trace.y[place] for trace in bars) for place in (0, 1)] == pytest.approx(rows["total_gb"].tolist(), rel=1e-5)
    assert "8 requests: 9.28 GB" in figure.layout.meta["alt"]
    dense = primer_figures.bytes_bars(bytes_per_step.frame(bytes_per_step.EVERYWHERE, [1, 8], 256))
    assert "recurrent state, each its own" not in [trace.name for trace in dense.data]


class Record:
    def __init__(self, post, points):
        self.points, self.name, self.document = points, f"{post}-record", {"rig": {"name": "cpu"}}


def test_sources_choose_points_that_can_be_read(monkeypatch):
    def sweep(point, running, valid=True, rate=1.0, pass_name="measured"):
        return {"point": point, "pass": pass_name, "request_rate": rate, "rate_label": "1", "input_len": 64, "num_prompts": 30,
                "summary": {"running_mean": running}, "validity": {"valid": valid}}

    def streams(point, batch):
        return {"point": point, "pass": "measured", "kind": "streams", "num_prompts": batch, "input_len": 32, "request_rate": None}

    sets = {"part_1": [sweep(0, 4.0, pass_name="cold"), sweep(1, 4.0, valid=False), sweep(2, 3.0), sweep(3, 7.5), sweep(4, 4.0, rate=None)],
            "part_3": [streams(0, 1), streams(1, 8), streams(2, 64)]}

    def newest(post, rig, committed_only=False):
        return arms.ArmSet(post, rig, ["a"], {"a": Refusable(post, sets[post])}) if rig == "cpu" else None

    class Refusable(Record):
        not_testable = None

    monkeypatch.setattr(primer_figures.arms, "newest", newest)
    found = primer_figures.sources("cpu")
    assert {name: source.point["point"] for name, source in found.items()} == {
        "visitors who come and go": 2, "one request alone": 0, "8 equal requests at once": 1}
    assert "1 requests a second" in found["visitors who come and go"].what
    assert found["one request alone"].caption().startswith("One request alone, prompts of 32 tokens, rig cpu. Record `part_3-record`")
    assert primer_figures.sources("h200-4b") == {} and primer_figures.newest_run("h200-4b") is None
    assert primer_figures.newest_run("cpu").name == "part_1-record"
    sets["part_1"] = []
    assert "visitors who come and go" not in primer_figures.sources("cpu")


# --- the page -----------------------------------------------------------------------------------------------------


def test_every_number_of_the_page_exists_and_fits_its_format():
    numbers = published.numbers()
    found = re.findall(r"\{num\}`([^`]+)`", re.sub(r"\n# ", " ", NOTEBOOK))
    assert len(found) > 50
    for content in found:
        key, _, spec = content.removesuffix(" unit").partition(":")
        format(numbers[key]["value"], spec)


def test_every_term_of_the_page_is_in_the_glossary():
    glossary = (rigs.root() / "book" / "glossary.md").read_text(encoding="utf-8")
    for content in re.findall(r"\{term\}`([^`]+)`", NOTEBOOK):
        shown = re.search(r"<(.+)>$", content)
        assert re.search(rf"^{re.escape(shown.group(1) if shown else content)}$", glossary, flags=re.M), content


def test_parameters_of_the_page_are_those_of_the_protocol():
    protocol = rigs.load_protocol("primer")
    cell = NOTEBOOK.split('# %% tags=["parameters"]\n')[1].split("\n\n")[0]
    assert re.findall(r"^(\w+) = ", cell, flags=re.M) == list(protocol.parameters)
    assert rigs.check_parameters(protocol, {"mode": "live"})["batch"] == 8
