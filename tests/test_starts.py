"""What a start is made of: told from record and log, and never guessed."""

import pytest
import zstandard

from inference_wall import starts
from inference_wall.records import Run

LOG = """==> one <==
INFO Initial profiling/warmup run took 69.97 s
INFO Graph capturing finished in 5 secs, took 0.53 GiB
INFO init engine (profile, create kv cache, warmup model) took 120.28 s (compilation: 28.64 s)
==> two <==
INFO Initial profiling/warmup run took 0.32 s
"""


def run(tmp_path, arm, *ids, compiled=None, log=LOG, **server):
    folder = tmp_path / arm
    folder.mkdir()
    (folder / "server.log.zst").write_bytes(zstandard.compress(log.encode()))
    return Run(folder, {"post": "part_1", "arm": arm, "engine": {"version": "0.25.1"}, "model": {"name": "m"},
                        "starts": [{"id": each, "server": {"ready_s": 159.0, **({"compiled": compiled} if compiled else {}), **server}}
                                   for each in ids]})


@pytest.mark.parametrize(("before", "after", "state"), [
    ((0, 0), (103, 186), "cold"), ((103, 190), (103, 190), "warm"), ((103, 190), (206, 190), "partly warm"), ((103, 190), (103, 194), "partly warm"),
])
def test_a_start_is_warm_when_it_added_nothing_to_the_caches(tmp_path, before, after, state):
    caches = {name: dict(zip(("graphs", "kernels"), counts, strict=True)) for name, counts in (("before", before), ("after", after))}
    (row,) = starts.table([run(tmp_path, "a", "one", compiled=caches)]).itertuples()
    assert row.state == state and (row.new_graphs, row.new_kernels) == (after[0] - before[0], after[1] - before[1])


def test_a_shared_start_is_one_row_and_each_log_belongs_to_its_start(tmp_path):
    found = starts.table([run(tmp_path, "a", "one"), run(tmp_path, "b", "one", "two")])
    assert found["arms"].tolist() == ["part_1 a, part_1 b", "part_1 b"]
    assert found["warmup_run_s"].tolist() == [69.97, 0.32] and found["graph_capture_s"].iloc[0] == 5.0
    assert found["before_engine_s"].iloc[0] == pytest.approx(159.0 - 120.28)
    assert found["state"].isna().all() and found["compile_s"].isna().iloc[1]  # not recorded is not guessed


@pytest.mark.parametrize(("server", "said"), [
    ({}, None), ({"imports_kept": None}, "its own"), ({"imports_kept": {"import_s": 16.0, "waited_s": 16.6}}, "first"),
    ({"imports_kept": {"import_s": 16.0, "waited_s": 0.06}}, "kept"),
])
def test_a_start_says_where_its_imports_were_made(tmp_path, server, said):
    assert starts.table([run(tmp_path, "a", "one", **server)])["imports"].iloc[0] == said


def test_somebody_elses_server_has_no_start(tmp_path):
    attached = run(tmp_path, "a", "one")
    attached.document["starts"][0]["server"] = {"base_url": "http://127.0.0.1:1"}
    assert starts.table([attached]).empty
