"""Sets of arms: what was asked for together is shown together."""

import pytest

from inference_wall import arms, records
from inference_wall.errors import WallError

POINT = {"point": 0, "pass": "measured", "arm": "a", "load": "flood", "kind": "bench", "start_s": 1.0, "end_s": 4.0, "request_rate": None,
         "rate_label": "inf"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WALL_BENCHMARKS", str(tmp_path))
    return tmp_path


def record(arm, started, set_id="one", names=("a", "b"), starts=(), refused=None, points=0):
    """A sealed record of part_2 on the CPU rig."""
    draft = records.Draft.open("part_2", "cpu", arm, {"arm": arm, "set": set_id, "at": started})
    identity = draft.folder / "identity.json"
    identity.write_text(identity.read_text().replace(records.json.loads(identity.read_text())["started"], started))
    document = {"post": "part_2", "arm": arm, "set_id": set_id, "set_arms": list(names), "rig": {"name": "cpu"}, "starts": list(starts)}
    return draft.finish(document | ({"not_testable": refused} if refused else {}), {})


def test_the_newest_complete_set_is_shown():
    record("a", "2026-01-01T00:00:00+00:00")
    record("b", "2026-01-01T00:01:00+00:00")
    record("a", "2026-01-02T00:00:00+00:00", set_id="two")  # begun, not complete
    found = arms.newest("part_2", "cpu")
    assert list(found.runs) == ["a", "b"] and not found.missing and {run.set_id for run in found} == {"one"}
    record("b", "2026-01-02T00:01:00+00:00", set_id="two")
    assert {run.set_id for run in arms.newest("part_2", "cpu")} == {"two"}


def test_a_begun_set_is_shown_where_there_is_no_complete_one_and_says_what_is_missing():
    record("b", "2026-01-01T00:00:00+00:00")
    found = arms.newest("part_2", "cpu")
    assert list(found.runs) == ["b"] and found.missing == ["a"]
    with pytest.raises(WallError, match="no record of arm a"):
        assert found["a"]
    assert arms.newest("part_2", "gpu") is None


def test_of_two_records_of_an_arm_the_newer_one_counts():
    record("a", "2026-01-01T00:00:00+00:00", names=["a"])
    newer = record("a", "2026-01-03T00:00:00+00:00", names=["a"])
    assert arms.newest("part_2", "cpu")["a"].path == newer


def test_a_refused_arm_belongs_to_the_set_with_its_reason_and_is_no_result():
    record("a", "2026-01-01T00:00:00+00:00")
    record("b", "2026-01-01T00:01:00+00:00", refused={"reason": "no kernel", "remedy": ""})
    found = arms.newest("part_2", "cpu")
    assert not found.missing and list(found.testable) == ["a"] and found.refused == {"b": "no kernel"}
    assert found.first.arm == "a" and found["b"].not_testable["reason"] == "no kernel"


def test_where_every_arm_is_refused_the_error_gives_the_reasons():
    record("a", "2026-01-01T00:00:00+00:00", names=["a"], refused={"reason": "no kernel", "remedy": ""})
    with pytest.raises(WallError, match="no kernel"):
        assert arms.newest("part_2", "cpu").first


def test_a_shared_start_is_counted_once():
    start = {"id": "s1", "server_start": 0, "server": {"ready_s": 20.0}}
    other = {"id": "s2", "server_start": 0, "server": {"refused_after_s": 12.0}}
    record("a", "2026-01-01T00:00:00+00:00", starts=[start])
    record("b", "2026-01-01T00:01:00+00:00", starts=[start, other])
    took = arms.accounting(arms.newest("part_2", "cpu"))
    assert (took["starts"], took["start_s"], took["load_s"], took["attached"]) == (2, 32.0, 0.0, 0)


def test_a_record_of_before_is_a_set_of_its_own():
    draft = records.Draft.open("part_1", "cpu", "default", {"old": True})
    draft.finish({"post": "part_1", "arm": "default", "rig": {"name": "cpu"}, "starts": []}, {})
    found = arms.newest("part_1", "cpu")
    assert found.names == ["default"] and not found.missing
