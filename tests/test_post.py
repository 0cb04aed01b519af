"""What a notebook gets: the newest records of the right rig, or one clear error."""

import json

import pytest

from inference_wall import post, records
from inference_wall.errors import WallError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WALL_BENCHMARKS", str(tmp_path))
    return tmp_path


def record(where, rig="cpu", day=1):
    draft = records.Draft.open("part_1", rig, "default", {"rig": rig, "day": day}, where=where)
    identity = draft.folder / "identity.json"
    content = json.loads(identity.read_text())
    identity.write_text(json.dumps(content | {"started": f"2026-01-0{day}T00:00:00+00:00"}))
    return draft.finish({"post": "part_1", "arm": "default", "rig": {"name": rig}, "starts": []}, {})


def test_the_newest_record_is_shown_and_committed_ones_on_request(folder, monkeypatch):
    kept, local = record(folder, day=1), record(folder / "local", day=2)
    assert post.recorded("part_1").first.path == local
    assert post.recorded("part_1", committed_only=True).first.path == kept
    monkeypatch.setenv(post.COMMITTED_VARIABLE, "1")
    assert post.open_runs("part_1", rig="cpu").first.path == kept


def test_auto_takes_another_rigs_record_where_this_machine_has_none(folder, monkeypatch):
    monkeypatch.setattr("inference_wall.hardware.gpus", lambda: [])
    path = record(folder, rig="h200-4b")
    assert post.recorded("part_1").first.path == path
    with pytest.raises(WallError, match="no record of part_1 on rig cpu") as caught:
        post.recorded("part_1", "cpu")
    assert "wall run part_1 --rig cpu" in caught.value.remedy


def test_without_a_committed_record_the_remedy_says_how_to_keep_one(folder):
    record(folder / "local")
    with pytest.raises(WallError, match="no committed record") as caught:
        post.recorded("part_1", "cpu", committed_only=True)
    assert "wall keep" in caught.value.remedy


def test_a_page_notes_its_records(folder, monkeypatch, tmp_path):
    path = record(folder)
    monkeypatch.setenv(post.PAGE_VARIABLE, str(tmp_path / "page.json"))
    post.open_runs("part_1", rig="cpu")
    assert json.loads((tmp_path / "page.json").read_text()) == {"post": "part_1", "rig": "cpu", "runs": [path.name], "local": False}


def test_an_unknown_parameter_is_refused_before_anything_is_read(monkeypatch):
    with pytest.raises(WallError, match="did you mean 'rates'"):
        post.open_runs("part_1", rate="1")


@pytest.mark.parametrize("event", [
    {"event": "plan", "kept": 2, "points": 5, "jobs": ["part_1 default"]},
    {"event": "server", "state": "starting", "arms": ["part_1 default"], "log": "server.log"},
    {"event": "server", "state": "ready", "seconds": 20.0},
    {"event": "point_done", "arm": "part_1 default", "pass": "measured", "label": "sweep, rate 2", "completed_req_s": None, "seconds": 3.0,
     "valid": False, "reasons": ["client_delay"]},
    {"event": "sealed", "run": "benchmarks/x", "arm": "part_1 default"},
])
def test_every_report_has_words(event):
    assert post.describe(event)
