"""What a run still has to measure: it follows from the finished points alone."""

import pandas as pd
import pytest

from inference_wall import measure, rigs

SLO = {"ttft_percentile": 90, "ttft_s": 1.0, "completed_ratio": 0.9}


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
    assert measure.refinement(frame(*points), SLO) == expected


def test_weights_are_counted_as_the_server_holds_them(tmp_path):
    import json

    header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]},
              "q": {"dtype": "I32", "shape": [4], "data_offsets": [30, 46]}}
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(46))
    assert measure.weight_bytes(str(tmp_path), "float32") == 3 * 5 * 4 + 16
    assert measure.weight_bytes(str(tmp_path), "bfloat16") == 3 * 5 * 2 + 16
    assert measure.weight_bytes("Qwen/Qwen3.5-4B", "float16") is None


def test_paths_of_this_machine_do_not_reach_a_record(monkeypatch):
    monkeypatch.setattr(measure, "_PATHS", {"/home/somebody": "~", "/home/somebody/wall": "<repo>"})
    assert measure.scrub({"a": ["/home/somebody/wall/x", 3], "b": "/home/somebody/.cache"}) == {"a": ["<repo>/x", 3], "b": "~/.cache"}


def test_an_unfinished_run_goes_on_as_it_would_have(monkeypatch):
    rig = rigs.load_rig("cpu")
    values = rigs.check_parameters(rigs.load_protocol("part_1"), {})
    settings = rigs.settings(rig, "part_1", values)
    job = measure.Job(rigs.load_protocol("part_1"), rig, {"name": "default"}, values, settings, None, "", {}, {})

    class Draft:
        finished: list = []

        def points(self):
            return self.finished

    draft = Draft()
    assert [point.index for point in measure.missing_points(job, draft)] == [0, 1]
    summary = {"completed_req_s": 2.0, "steady_req_s": None}
    plan = rigs.plan(rig, "part_1", values, ceiling_req_s=2.0)
    draft.finished = [{**point.as_dict(), "summary": summary} for point in plan[:3]]
    assert measure.missing_points(job, draft) == plan[3:]
    draft.finished = [{**point.as_dict(), "summary": summary} for point in plan]
    monkeypatch.setattr(measure.records, "frame_of_points", lambda points, name: frame((1.2, 500), (2.4, 5000)))
    (extra,) = measure.missing_points(job, draft)
    assert (extra.index, extra.request_rate, extra.pass_name) == (len(plan), 1.7, "measured")
    draft.finished.append({**extra.as_dict(), "summary": summary})
    assert measure.missing_points(job, draft) == []
