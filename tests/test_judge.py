"""A record judged again: same rows, today's checks, and a record that says so."""

import json

import pytest
from test_records import IDENTITY, folder, frames, point  # noqa: F401  (folder is a fixture)

from inference_wall import judge, records, stats
from inference_wall.errors import WallError


def sealed(valid: bool) -> "records.Run":
    draft = records.Draft.open("part_1", "cpu", "default", IDENTITY)
    document = {**point(0), "request_rate": 1.0, "input_len": 8, "output_len": 4, "num_prompts": 1, "kind": "bench", "summary": {"old": True},
                "validity": {"valid": valid, "reasons": [] if valid else ["littles_law"], "not_made": [], "checks": {}}}
    draft.save_point(document, *frames())
    return records.open_run(draft.finish({"post": "part_1", "arm": "default", "rig": {"name": "cpu"}, "parameters": {}, "starts": [],
                                          "validity": {}}, {}))


@pytest.mark.parametrize("was_valid", [True, False])
def test_verdicts_are_those_of_today_and_the_record_says_what_changed(folder, monkeypatch, was_valid):  # noqa: F811
    run = sealed(was_valid)
    before = run.frame("requests")
    monkeypatch.setattr(stats, "validity", lambda *a, **k: {"valid": False, "reasons": ["failures"], "not_made": [], "checks": {}})
    changed = judge.judge(run.path)
    again = records.open_run(run.path)  # sealed anew
    assert again.points[0]["validity"]["reasons"] == ["failures"] and "old" not in again.points[0]["summary"]
    assert again.document["validity"]["invalid"] == {"0": ["failures"]}
    (note,) = again.document["judged"]
    assert note["code"] == records.code_version() and note["changed"] == changed == {"0": ["valid" if was_valid else "littles_law", "failures"]}
    assert again.frame("requests").equals(before)
    assert not list(run.path.parent.glob("*.old")) and not list(run.path.parent.glob("*.writing"))
    assert judge.judge(run.path) == {}


def test_a_committed_or_damaged_record_is_left_alone(folder):  # noqa: F811
    committed = records.keep(sealed(True).path)
    before = (committed / "points.jsonl").read_bytes()
    with pytest.raises(WallError, match="committed"):
        judge.judge(committed)
    assert (committed / "points.jsonl").read_bytes() == before
    damaged = sealed(True).path
    (damaged / "run.json").write_text(json.dumps({}))
    with pytest.raises(WallError, match="cannot be used"):
        judge.judge(damaged)
