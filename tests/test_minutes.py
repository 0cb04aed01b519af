"""Minutes of a rig: each counted once, and the plain way estimated from what was timed."""

import pytest

from inference_wall import minutes, records
from inference_wall.arms import ArmSet


def run(tmp_path, name, *, start_id, ready, model="m", started="00:00", finished="00:10", cold=0.0, load=60.0, imports=None):
    folder = tmp_path / name
    folder.mkdir()
    points = [{"pass": "measured", "start_s": 100.0, "end_s": 100.0 + load}]
    points += [{"pass": "cold", "start_s": 10.0, "end_s": 10.0 + cold}] if cold else []
    (folder / "points.jsonl").write_text("".join(records.json.dumps(point) + "\n" for point in points))
    document = {"arm": name, "started": f"2026-01-01T{started}:00+00:00", "finished": f"2026-01-01T{finished}:00+00:00",
                "rig": {"name": "gpu", "title": "A GPU", "kind": "cuda"}, "model": {"name": model},
                "starts": [{"id": start_id, "server_start": 0, "server": {"ready_s": ready} if ready else {}}]}
    return records.Run(folder, document | ({minutes.IMPORTS: imports} if imports else {}))


def test_a_shared_start_and_a_shared_minute_count_once(tmp_path):
    runs = [run(tmp_path, "a", start_id="1", ready=120.0, cold=30.0),
            run(tmp_path, "b", start_id="1", ready=120.0, started="00:05", finished="00:15"),
            run(tmp_path, "c", start_id="2", ready=60.0, started="01:00", finished="01:10")]
    took = minutes.spent(runs)
    assert (took["starts"], took["start_s"], took["load_s"], took["warm_s"]) == (2, 180.0, 210.0, 30.0)
    assert took["span_s"] == 25 * 60 and took["idle_s"] == 25 * 60 - 180 - 210


def test_the_plain_way_has_a_longest_start_for_every_arm(tmp_path):
    runs = [run(tmp_path, "a", start_id="1", ready=120.0), run(tmp_path, "b", start_id="1", ready=120.0),
            run(tmp_path, "c", start_id="2", ready=60.0),
            run(tmp_path, "d", start_id="3", ready=10.0, model="small")]
    plain = minutes.plainly(runs)
    assert plain["arms"] == 4 and plain["cold_start_s"] == 3 * 120 + 10 and plain["total_s"] == 370 + 4 * 60 and plain["import_s"] is None
    named = minutes.entries([ArmSet("part_1", "gpu", ["a"], {each.name: each for each in runs})])
    assert named["plain_import_min"]["value"] is None and "imports" in named["plain_import_min"]["reason"]
    assert named["plain_min"]["value"] == pytest.approx(610 / 60) and named["kind"]["value"] == "GPU"


def test_imports_count_once_a_point_where_every_record_knows_them(tmp_path):
    runs = [run(tmp_path, "a", start_id="1", ready=120.0, imports=20.0, cold=1.0)]
    assert minutes.plainly(runs)["import_s"] == 40.0 and minutes.plainly(runs)["total_s"] == 120 + 61 + 40
    half = [*runs, run(tmp_path, "b", start_id="2", ready=120.0)]
    assert minutes.plainly(half)["import_s"] is None


def test_a_foreign_server_leaves_numbers_open_with_a_reason(tmp_path):
    runs = [run(tmp_path, "a", start_id=None, ready=None)]
    named = minutes.entries([ArmSet("part_1", "gpu", ["a"], {"a": runs[0]})])
    for name in ("idle_min", "plain_min", "plain_over_span"):
        assert named[name]["value"] is None and named[name]["reason"]
    assert named["load_min"]["value"] == 1.0
