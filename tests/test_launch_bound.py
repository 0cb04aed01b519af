"""Does the card wait for the host, and what does a prompt cost the others: from traces and from the client's rows, both made up by hand."""

import math

import pandas as pd
import pytest
from test_trace import event, step, write

from inference_wall import arms, launch_bound, part_1, reading_steps

ON_CARD = {"cat": "gpu_user_annotation", "pid": 0, "tid": 7}


def traced(folder, busy_us, graph=True, operators=True):
    """A step that writes, 100 us, and one that reads 512 tokens, 1,000 us, of which the card works `busy_us`."""
    host = [event("vllm::outer", 510.0, 300.0), event("aten::inner", 520.0, 250.0), event("vllm::outer", 820.0, 100.0),
            event("aten::small", 930.0, 5.0)] if operators else []
    launches = [event("cudaLaunchKernel", 530.0 + 10 * at, 1.0, "cuda_runtime") for at in range(7)]
    return write(folder, [
        step(0.0, 50.0, **{"External id": 1}), event("cudaGraphLaunch" if graph else "cuLaunchKernelEx", 10.0, 2.0, "cuda_runtime"),
        step(500.0, 600.0, context=(2, 512), **{"External id": 2}), *host, *launches,
        event("vllm::outer", 500.0, 900.0, tid=9),  # another thread
        step(20.0, 100.0, **ON_CARD, **{"External id": 1}), event("gemm", 20.0, 50.0, "kernel", pid=0, tid=7),
        step(600.0, 1000.0, context=(2, 512), **ON_CARD, **{"External id": 2}), event("gemm", 600.0, busy_us, "kernel", pid=0, tid=7)])


def test_a_step_is_held_against_what_the_host_did_for_it(tmp_path):
    path = traced(tmp_path, 130.0)
    kinds = launch_bound.busy(path).set_index("kind")
    assert kinds.loc["decode and prefill", "share"] == pytest.approx(0.13) and kinds.loc["decode only", "share"] == pytest.approx(0.5)
    row = launch_bound.host(path).iloc[1]
    assert (row["operator"], row["calls"], row["operator_ms"]) == ("vllm::outer", 2, pytest.approx(0.4)), "inner calls count as their caller's"
    assert (row["launches"], row["graphs"], row["context_tokens"]) == (7, 0, 512)


@pytest.mark.parametrize(("busy_us", "said", "not_said"), [
    (130.0, "the host decides", "as long as the card works"), (600.0, "For the rest it waited", "the host decides"),
    (930.0, "as long as the card works", "waited"),
])
def test_the_words_follow_the_share(tmp_path, busy_us, said, not_said):
    words = launch_bound.sentence(traced(tmp_path, busy_us))
    assert said in words and not_said not in words and f"{busy_us / 1000:.0%}" in words


def test_a_graph_is_named_only_where_there_is_one(tmp_path):
    assert "one recorded graph" in launch_bound.sentence(traced(tmp_path, 130.0))
    (tmp_path / "other").mkdir()
    words = launch_bound.sentence(traced(tmp_path / "other", 130.0, graph=False, operators=False))
    assert "graph" not in words and "7 single launches" in words and "vllm::outer" not in words


def test_nothing_is_said_without_a_device_or_a_reading_step(tmp_path):
    assert launch_bound.sentence(write(tmp_path, [step(0.0, 100.0, context=(1, 64)), event("aten::mm", 0.0, 50.0)])) == ""
    only = write(tmp_path, [step(0.0, 9.0, **ON_CARD), event("gemm", 0.0, 9.0, "kernel", pid=0, tid=7)], name="only.pt.trace.json.gz")
    assert launch_bound.sentence(only) == ""


def rows(new, length, neighbours=4, late=0):
    """`new` prompts read in a step of `length` ms beside running answers, whose other steps last 10 ms; first tokens come `late` steps later."""
    requests, chunks = [], []
    times = [10, 20, 30, 40, 40 + length, 50 + length, 60 + length, 70 + length]
    for number in range(neighbours + new):
        mine = times if number < neighbours else [40 + length + 10 * late + 1, 50 + length + 10 * late]
        requests.append({"request": number, "first_token": mine[0] * 100})
        chunks += [{"request": number, "time": at * 100, "tokens": 1} for at in mine]
    return pd.DataFrame(requests).astype({"first_token": "Int64"}), pd.DataFrame(chunks)


@pytest.mark.parametrize("late", [0, 1])
def test_a_reading_step_is_as_long_as_the_pause_of_the_others(late):
    found = reading_steps.of_point(*rows(3, 55, late=late))
    last = found.iloc[-1]
    assert (last["prompts"], last["neighbours"]) == (3, 4) and last["ms"] == pytest.approx(55)
    assert math.isnan(reading_steps.of_point(*rows(3, 55, neighbours=2)).iloc[-1]["ms"]), "two neighbours prove nothing"
    assert found["prompts"].sum() == 7, "each prompt is in one step"


def steps(fixed, each):
    return pd.DataFrame([{"prompts": prompts, "ms": fixed + each * prompts, "request_rate": 5.0, "point": 1, "num_prompts": 9, "neighbours": 4}
                         for prompts in (1, 2, 3, 6) for _ in range(5)])


def test_a_price_is_by_the_step_or_by_the_token():
    line = reading_steps.price(steps(50.0, 2.0))
    assert line["step_ms"] == pytest.approx(50) and line["prompt_ms"] == pytest.approx(2) and line["per_step"] is True
    words = reading_steps.price_sentence(steps(50.0, 2.0), 256, 128, 256)
    assert "by the step, not by the token" in words and f"{256 / (128 * 0.052):.0f} requests a second" in words and "19 steps a second" in words
    assert reading_steps.price(steps(50.0, 100.0))["per_step"] is False
    assert "mostly by its tokens" in reading_steps.price_sentence(steps(50.0, 100.0), 256, 128, 256)
    assert "does not grow" in reading_steps.price_sentence(steps(50.0, -1.0), 256, 128, 256)
    assert "cannot be read" in reading_steps.price_sentence(steps(50.0, 2.0).iloc[:0], 256, 128, None)


@pytest.mark.parametrize(("rig", "by_step"), [("cpu", False), ("h200-4b", True)])
def test_the_shipped_records_say_what_a_prompt_costs(rig, by_step):
    found = arms.newest("part_1", rig, committed_only=True)
    if found is None:
        pytest.skip(f"no committed record of {rig}")
    reading = reading_steps.of_run(found.first)
    assert reading_steps.price(reading)["per_step"] is by_step
    assert reading.groupby("point")["prompts"].sum().tolist() == reading.groupby("point")["num_prompts"].first().tolist()
    said = part_1.trace_sentence(part_1.trace_of(found.first), reading, found.first.document["settings"]["input_len"])
    assert ("did not make up the wait" in said) if by_step else not said
