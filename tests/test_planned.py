"""What a batch would take and took: starts are counted by configuration, minutes come from records."""

import pytest

from inference_wall import jobs, planned, records, rigs


@pytest.fixture(autouse=True)
def no_model(monkeypatch, tmp_path):
    if jobs.installed() is None:
        pytest.skip("vLLM is not installed")
    monkeypatch.setattr(jobs, "model_folder", lambda rig, model: f"models/{model.get('embedded')}")
    monkeypatch.setenv("WALL_BENCHMARKS", str(tmp_path))


def prepared(*posts, **parameters):
    return {post: jobs.prepare(post, "cpu", parameters) for post in posts}


def test_starts_are_configurations_not_arms():
    assert "8 server starts, of unknown length" in planned.describe(prepared(*rigs.protocol_names()))
    assert "4 server starts" in planned.describe(prepared("part_2"))
    assert "2 server starts" in planned.describe(prepared("part_3"))
    assert "0 server starts" in planned.describe(prepared("part_3", base_url="http://127.0.0.1:9"))


def test_every_arm_and_load_is_named_before_anything_starts():
    text = planned.describe(prepared("part_2"))
    for words in ("chunked-2048", "chunked-128", "max-num-batched-tokens=128", "no-enable-chunked-prefill", "light", "heavy", "prompts of 1024"):
        assert words in text, words


def test_minutes_follow_earlier_records_and_stretch_with_the_prompts(monkeypatch):
    (large, small) = jobs.prepare("part_3", "cpu", {})
    draft = records.Draft.open("part_3", "cpu", large.arm.name, large.identity)
    run = draft.finish({"post": "part_3", "arm": large.arm.name, "set_id": large.set_id, "set_arms": large.set_arms, "rig": {"name": "cpu"},
                        "starts": [{"id": "x", "server": {"ready_s": 30.0}}]}, {})
    points = [{**point.as_dict(), "start_s": 0.0, "end_s": 59.0, "overhead_s": 1.0} for point in large.plan()]
    monkeypatch.setattr(records.Run, "points", property(lambda self: points if self.path == run else []))
    text = planned.describe({"part_3": [large, small]})
    assert f"about {len(points):.1f} min of load" in text and "2 server starts, about 1.0 min" in text
    assert f"at least: {len(small.plan())} points have no earlier record" in text
    half = planned.describe({"part_3": jobs.prepare("part_3", "cpu", {"scale": 0.5})[:1]})
    assert float(half.split("about ")[1].split(" min")[0]) < len(points)
