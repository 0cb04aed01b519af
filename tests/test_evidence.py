"""Whose records a page shows first, and what its pages are called."""

import pytest

from inference_wall import evidence, post, records, rigs

GPU, CPU = "cuda", "cpu"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WALL_BENCHMARKS", str(tmp_path))
    monkeypatch.setattr("inference_wall.hardware.gpus", lambda: [])
    return tmp_path


def record(where, rig, kind, day=1, refused=None, arms=("default",)):
    draft = records.Draft.open("part_1", rig, "default", {"rig": rig, "day": day}, where=where)
    identity = draft.folder / "identity.json"
    identity.write_text(identity.read_text().replace(draft.started, f"2026-01-0{day}T00:00:00+00:00"))
    document = {"post": "part_1", "arm": "default", "set_arms": list(arms), "rig": {"name": rig, "kind": kind}, "starts": []}
    return draft.finish(document | ({"not_testable": refused} if refused else {}), {})


def test_the_best_evidence_comes_first_whatever_was_measured_last(folder):
    for day, (rig, kind) in enumerate([("h200-27b", GPU), ("h200-4b", GPU), ("gpu", GPU), ("a10g", GPU), ("cpu", CPU)], start=1):
        record(folder, rig, kind, day)
    assert list(evidence.sets("part_1")) == ["h200-27b", "h200-4b", "a10g", "gpu", "cpu"]
    assert post.recorded("part_1").rig == "h200-27b" and post.recorded("part_1", "cpu").rig == "cpu"


def test_what_was_just_measured_here_comes_before_all_of_it_until_it_is_kept(folder):
    record(folder, "h200-27b", GPU, 1)
    path = record(folder / "local", "cpu", CPU, 2)
    assert list(evidence.sets("part_1")) == ["cpu", "h200-27b"]
    assert list(evidence.sets("part_1", committed_only=True)) == ["h200-27b"]
    (folder / "part_1" / "cpu").mkdir(parents=True)
    path.rename(folder / "part_1" / "cpu" / path.name)
    assert list(evidence.sets("part_1")) == ["h200-27b", "cpu"]


def test_of_two_gpus_the_one_that_lacks_an_arm_comes_second_but_before_a_processor(folder):
    record(folder, "h200-27b", GPU, arms=("default", "another"))
    record(folder, "h200-4b", GPU)
    record(folder, "cpu", CPU)
    assert list(evidence.sets("part_1")) == ["h200-4b", "h200-27b", "cpu"]


def test_an_old_local_record_does_not_hide_better_evidence(folder):
    """Local and older than a committed one of the same rig: nobody has just measured it."""
    record(folder / "local", "cpu", CPU, 1)
    record(folder, "cpu", CPU, 2)
    record(folder, "h200-4b", GPU, 1)
    assert list(evidence.sets("part_1")) == ["h200-4b", "cpu"]


def test_of_two_rigs_measured_here_this_machines_own_comes_first(folder):
    record(folder / "local", "h200-27b", GPU, 2)
    record(folder / "local", "cpu", CPU, 1)
    assert list(evidence.sets("part_1")) == ["cpu", "h200-27b"]


def test_a_rig_whose_engine_refused_every_arm_has_no_page(folder):
    record(folder, "h200-27b", GPU, refused={"reason": "no kernel", "remedy": ""})
    record(folder, "cpu", CPU)
    assert list(evidence.sets("part_1")) == ["cpu"]


@pytest.mark.parametrize("rig", ["cpu", "h200-27b", "a10g", "my-own-rig"])
def test_the_name_of_a_page_and_back(rig):
    page = evidence.page_of("part_3", rig, shown="other")
    assert evidence.parse_page(f"build/executed/{page}") == ("part_3", rig)
    assert evidence.page_of("part_3", rig, shown=rig) == "part_3" and evidence.parse_page("build/executed/part_3") is None


@pytest.mark.parametrize("page", ["book/add-a-rig", "build/executed/primer", "build/pages/provenance"])
def test_other_pages_are_nobodys(page):
    assert evidence.parse_page(page) is None


def test_the_list_names_rigs_that_there_are():
    listed = evidence.in_order(rigs.rig_names())[:2]
    assert listed == ["h200-27b", "h200-4b"]
