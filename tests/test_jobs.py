"""A checked request: bad ones never get to a server, and a run always knows what it still has to measure."""

import json

import pandas as pd
import pytest

from inference_wall import jobs, plans, rigs
from inference_wall.errors import WallError

SLO = {"ttft_percentile": 90, "ttft_s": 1.0, "completed_ratio": 0.9}


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    monkeypatch.setattr(jobs, "model_folder", lambda rig, model: f"models/{model.get('embedded')}")
    if jobs.installed() is None:
        pytest.skip("vLLM is not installed")


def frame(*points):
    return pd.DataFrame([{"rig": "cpu", "pass": "measured", "request_rate": rate, "valid": True, "ttft_n": 30, "ttft_p50_ms": ttft / 2,
                          "ttft_p90_ms": ttft, "steady_req_s": rate, "completed_req_s": rate} for rate, ttft in points])


@pytest.mark.parametrize(("points", "expected"), [
    ([(1.0, 500), (2.0, 5000)], 1.41),  # inside the bracket
    ([(1.0, 5000), (2.0, 9000)], 0.67),  # below a sweep that fails everywhere
    ([(1.0, 500), (2.0, 600)], 3.0),  # above a sweep that holds everywhere
    ([(1.0, 500), (1.05, 5000)], None),  # close enough
    ([(1.0, 5000), (2.0, 500)], None),  # no order in it: another rate would not help
])
def test_the_refinement_goes_where_the_knee_is_or_must_be(points, expected):
    assert jobs.refinement(frame(*points), SLO) == expected


def test_weights_are_counted_as_the_server_holds_them(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]},
              "q": {"dtype": "I32", "shape": [4], "data_offsets": [30, 46]}}
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(46))
    assert jobs.weight_bytes(str(tmp_path), "float32") == 3 * 5 * 4 + 16
    assert jobs.weight_bytes(str(tmp_path), "bfloat16") == 3 * 5 * 2 + 16
    assert jobs.weight_bytes("Qwen/Qwen3.5-4B", "float16") is None


def test_an_unfinished_run_goes_on_as_it_would_have(monkeypatch):
    (job,) = jobs.prepare("part_1", "cpu", {})
    assert [point.index for point in jobs.missing_points(job, [])] == [0, 1]
    summary = {"completed_req_s": 2.0, "steady_req_s": None}
    plan = job.plan(2.0)
    finished = [{**point.as_dict(), "summary": summary} for point in plan[:3]]
    assert jobs.missing_points(job, finished) == plan[3:]
    finished = [{**point.as_dict(), "summary": summary} for point in plan if point.pass_name != "trace"]
    monkeypatch.setattr(jobs.records, "frame_of_points", lambda points, name: frame((1.2, 500), (2.4, 5000)))
    extra, trace = jobs.missing_points(job, finished)
    assert trace.pass_name == "trace"  # last, whatever else is still to come
    assert (extra.index, extra.request_rate, extra.pass_name) == (len(plan), 1.7, "measured")
    finished.append({**extra.as_dict(), "summary": summary})
    assert jobs.missing_points(job, finished) == [trace]
    assert jobs.missing_points(job, [*finished, {**trace.as_dict(), "summary": summary}]) == []


def test_arms_of_different_posts_share_a_server_where_all_that_decides_it_is_equal():
    every = {job.name: job for post in rigs.protocol_names() for job in jobs.prepare(post, "cpu", {})}
    base = {name for name, job in every.items() if job.server_key == every["part_1 default"].server_key}
    assert base == {"part_1 default", "part_2 chunked-2048", "part_3 cap-16", "part_4 natural", "part_5 float32"}
    assert len({job.server_key for job in every.values()}) == 8


def test_the_identity_depends_on_the_arm_and_the_set_does_not():
    first, second, *_ = jobs.prepare("part_2", "cpu", {})
    assert first.identity != second.identity and first.set_id == second.set_id
    assert first.set_arms == ["chunked-2048", "chunked-512", "chunked-128", "unchunked"]
    assert jobs.prepare("part_2", "cpu", {"rounds": 2})[0].set_id != first.set_id


def test_parameters_as_text_and_as_values_are_the_same_run():
    text = jobs.prepare("part_3", "cpu", {"caps": "1, 16", "scale": "0.5"})[0]
    values = jobs.prepare("part_3", "cpu", text.values)[0]
    assert text.identity == values.identity


def test_an_arm_with_its_own_model_says_so_and_no_trace_of_the_rigs_model_is_left():
    float32, int8, bigger = jobs.prepare("part_5", "cpu", {})
    assert float32.model["name"] == "SmolLM2-135M-Instruct" and int8.model["name"] == "smollm2-135m-instruct-int8"
    assert bigger.model["weights"] == "random" and int8.model["weights"] == "checkpoint"
    assert "load-format" not in bigger.flags  # its random weights lie in a folder


def test_on_somebody_elses_server_only_the_rigs_own_arm_is_measured():
    (job,) = jobs.prepare("part_2", "cpu", {"base_url": "http://127.0.0.1:9"})
    assert job.arm.name == "chunked-2048" and len(job.set_arms) == 4  # so that the set never passes for a complete one
    with pytest.raises(WallError, match="none of the arms"):
        jobs.prepare("part_2", "cpu", {"base_url": "http://127.0.0.1:9", "budgets": "512,128"})


def test_another_machine_is_another_set(monkeypatch):
    here = jobs.prepare("part_2", "cpu", {})[0]
    monkeypatch.setattr(jobs, "machine", lambda: {"cpu": "another", "cores": 1, "gpus": []})
    there = jobs.prepare("part_2", "cpu", {})[0]
    assert here.set_id != there.set_id and here.identity != there.identity


def test_a_flag_both_on_and_off_is_refused(monkeypatch):
    rig = rigs.load_rig("cpu")
    rig.engine["flags"]["enable-chunked-prefill"] = True
    monkeypatch.setattr(rigs, "pick_rig", lambda name: rig)
    with pytest.raises(WallError, match="both on and off"):
        jobs.prepare("part_2", "cpu", {})


def test_plans_know_every_post():
    for post in rigs.protocol_names():
        assert plans.arms(post, plans.settings(rigs.load_rig("cpu"), post, {}), {})
