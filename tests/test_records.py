"""Records: nothing half-written counts, nothing finished is lost."""

import errno
import json

import pandas as pd
import pytest

from inference_wall import records
from inference_wall.errors import WallError

IDENTITY = {"post": "part_1", "rig": "cpu", "plan": [1, 2]}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WALL_BENCHMARKS", str(tmp_path))
    return tmp_path


def frames(point=0, requests=3):
    base = pd.DataFrame({"request": range(requests), "intended": [10, 20, 30], "sent": [11, 21, None], "first_token": [15, 25, None],
                         "end": [40, 50, None], "prompt_tokens": [8, 8, None], "output_tokens": [2, 2, 0],
                         "outcome": ["completed", "completed", "failed"], "error": [None, None, "boom"]})
    base = base.astype({"sent": "Int64", "first_token": "Int64", "end": "Int64", "prompt_tokens": "Int64"})
    chunks = pd.DataFrame({"request": [0, 0, 1, 1], "time": [15, 40, 25, 50], "tokens": [1, 1, 1, 1]})
    metrics = pd.DataFrame({"time": [0, 25, 60], "running": [0.0, 2.0, 0.0], "preemptions_total": [None, None, None]}, dtype="float64")
    return base, chunks, metrics.astype({"time": "int64"})


def point(index):
    return {"point": index, "pass": "measured", "arm": "default", "start_s": 0.0, "end_s": 0.001, "request_rate": 1.0, "rate_label": "1"}


def test_a_point_and_a_run_come_back_as_they_were_written(folder):
    draft = records.Draft.open("part_1", "cpu", "default", IDENTITY)
    draft.save_point(point(0), *frames())
    draft.save_point(point(1), *frames(1))
    path = draft.finish({"post": "part_1", "parameters": {}}, {"server-0.log": "hello from the server\n"})
    assert not draft.folder.exists()
    run = records.open_run(path)
    assert [p["point"] for p in run.points] == [0, 1]
    assert "hello from the server" in run.log()
    requests = run.frame("requests", 1)
    assert requests["end"].tolist()[:2] == [40, 50] and pd.isna(requests["end"].iloc[2])
    assert run.frame("metrics")["preemptions_total"].isna().all()
    assert run.document["run_id"] == records.run_id(IDENTITY)
    assert records.newest("part_1", "cpu").path == path
    assert records.find("part_1", "cpu", records.run_id(IDENTITY)).path == path
    assert records.find("part_1", "cpu", records.run_id({**IDENTITY, "plan": [1]})) is None


def test_resume_finds_the_finished_points_and_drops_the_half_written_one():
    draft = records.Draft.open("part_1", "cpu", "default", IDENTITY)
    draft.save_point(point(0), *frames())
    draft.save_point(point(1), *frames())
    (draft.folder / "points" / "0001" / "requests.parquet").write_bytes(b"half")
    (draft.folder / "points" / "0002.writing").mkdir()
    (draft.folder / "points" / "0003").mkdir()
    again = records.Draft.open("part_1", "cpu", "default", IDENTITY)
    assert again.folder == draft.folder
    assert again.done == [0]


def test_another_identity_is_another_draft():
    first = records.Draft.open("part_1", "cpu", "default", IDENTITY)
    assert records.Draft.open("part_1", "cpu", "default", {**IDENTITY, "plan": [3]}).folder != first.folder
    assert records.run_id(IDENTITY) == records.run_id(dict(reversed(IDENTITY.items())))


@pytest.mark.parametrize(("damage", "said"), [
    (lambda path: (path / "COMPLETE").unlink(), "not finished"),
    (lambda path: (path / "COMPLETE").write_text("{"), "COMPLETE file is damaged"),
    (lambda path: (path / "COMPLETE").write_text("[]"), "COMPLETE file is damaged"),
    (lambda path: (path / "points.jsonl").write_text("{}"), "points.jsonl"),
    (lambda path: (path / "chunks.parquet").unlink(), "chunks.parquet"),
    (lambda path: (path / "extra").write_text("x"), "extra"),
])
def test_a_damaged_record_is_refused_and_passed_over(folder, damage, said):
    draft = records.Draft.open("part_1", "cpu", "default", IDENTITY)
    draft.save_point(point(0), *frames())
    path = draft.finish({"post": "part_1"}, {})
    damage(path)
    with pytest.raises(WallError) as caught:
        records.open_run(path)
    assert said in caught.value.message
    assert records.newest("part_1", "cpu") is None
    assert records.inventory()[0]["state"].startswith("damaged")


def test_a_record_of_a_newer_schema_is_refused():
    draft = records.Draft.open("part_1", "cpu", "default", IDENTITY)
    draft.save_point(point(0), *frames())
    path = draft.finish({"schema_version": 99}, {})
    with pytest.raises(WallError, match="newer than this code reads"):
        records.open_run(path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_full_disk_is_a_clear_error_and_keeps_the_finished_points(monkeypatch, code):
    draft = records.Draft.open("part_1", "cpu", "default", IDENTITY)
    draft.save_point(point(0), *frames())

    def full(*_args, **_options):
        raise OSError(code, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records.pq, "write_table", full)
        with pytest.raises(WallError, match="finished points are kept") as caught:
            draft.save_point(point(1), *frames())
        assert "No space left" in caught.value.message
    assert records.Draft.open("part_1", "cpu", "default", IDENTITY).done == [0]


def test_json_is_strict(tmp_path):
    with pytest.raises(ValueError):
        records.write_json(tmp_path / "x.json", {"rate": float("inf")})


def test_keep_moves_a_local_record_and_refuses_a_scaled_one(folder):
    for scale, refused in ((0.5, True), (1.0, False)):
        draft = records.Draft.open("part_1", "cpu", "default", {**IDENTITY, "scale": scale})
        draft.save_point(point(0), *frames())
        path = draft.finish({"post": "part_1", "rig": {"name": "cpu"}, "parameters": {"scale": scale}}, {})
        if refused:
            with pytest.raises(WallError, match="scale"):
                records.keep(path)
        else:
            final = records.keep(path)
            assert final == folder / "part_1" / "cpu" / path.name and not path.exists()
            assert not records.open_run(final).is_local
            assert json.loads((final / "run.json").read_text())["post"] == "part_1"


def test_records_are_compact():
    draft = records.Draft.open("part_1", "cpu", "default", IDENTITY)
    n = 20_000
    chunks = pd.DataFrame({"request": [i // 100 for i in range(n)], "time": [i * 450 for i in range(n)], "tokens": [1] * n})
    draft.save_point(point(0), frames()[0], chunks, frames()[2])
    assert (draft.folder / "points" / "0000" / "chunks.parquet").stat().st_size < n * 2
