"""The measure process without an engine: servers and clients are stand-ins, everything between them and the record is real."""

import contextlib
from typing import ClassVar

import pandas as pd
import pytest

from inference_wall import arms, jobs, measure, records, run_document
from inference_wall.errors import EngineRefused, WallError
from inference_wall.load import LoadResult


class Server:
    """Remembers its starts; refuses or dies as told."""

    started: ClassVar[list] = []
    refuse: ClassVar[dict] = {}

    def __init__(self, job):
        self.job, self.base_url = job, "http://127.0.0.1:1"
        self.facts = {"ready_s": 1.5, "argv": ["serve"], "said": {"prefix_caching": False}}

    def __enter__(self):
        Server.started.append(self.job.name)
        if self.job.arm.name in self.refuse:
            raise self.refuse[self.job.arm.name]
        return self

    def __exit__(self, *_):
        return None

    def require_alive(self):
        return None


class Watcher:
    def __init__(self, *_):
        pass

    __enter__ = lambda self: self  # noqa: E731
    __exit__ = lambda self, *_: None  # noqa: E731

    def settle(self):
        return {}

    def frame(self, start, end):
        return pd.DataFrame({"time": pd.Series([0, 1], dtype="int64"), "running": [0.0, 0.0]})


class Client:
    """One request of two tokens a point. Stops the run, as a kill would, before the point numbered `stop_at`."""

    import_s = 1.5
    stop_at = None
    ran: ClassVar[list] = []

    def run(self, point, *, timeout_s, on_done, profile=None):
        if Client.stop_at == len(Client.ran):
            raise measure.Stopped(143)
        Client.ran.append((point.arm, point.load, point.pass_name))
        requests = pd.DataFrame([{"request": 0, "role": "load", "stream": None, "round": None, "intended": 100, "sent": 100, "first_token": 200,
                                  "end": 300, "asked_prompt_tokens": 8, "asked_output_tokens": 2, "prompt_tokens": 8, "output_tokens": 2,
                                  "outcome": "completed", "error": None}])
        chunks = pd.DataFrame({"request": [0, 0], "time": [200, 300], "tokens": [1, 1]})
        return LoadResult(requests, chunks, {}, 0.0, 0.01, 0.001, 0.003)


@pytest.fixture(autouse=True)
def stand_ins(tmp_path, monkeypatch):
    if jobs.installed() is None:
        pytest.skip("vLLM is not installed")
    monkeypatch.setenv("WALL_BENCHMARKS", str(tmp_path))
    monkeypatch.setattr(jobs, "model_folder", lambda rig, model: f"models/{model.get('embedded')}")
    monkeypatch.setattr(measure, "_server", lambda job, folder: Server(job))
    monkeypatch.setattr(measure, "_clients", lambda job, url: dict.fromkeys(("bench", "probe", "quality"), Client()))
    monkeypatch.setattr(measure, "Watcher", Watcher)
    monkeypatch.setattr(measure, "before", lambda job, report: {"host": {}, "gpus": [], "bandwidth": {"copy_gb_s": 1.0}})
    monkeypatch.setattr(measure, "_excerpt", lambda profiler, folder, index: (None, {"reason": "no profiler"}))
    monkeypatch.setattr(Server, "started", [])
    monkeypatch.setattr(Server, "refuse", {})
    monkeypatch.setattr(Client, "ran", [])
    monkeypatch.setattr(Client, "stop_at", None)
    return tmp_path


def run(post="part_2", events=None, parameters=None, **more):
    posts = {post: parameters or {}} if isinstance(post, str) else post
    seen = [] if events is None else events
    return measure.measure({"posts": posts, "rig": "cpu", **more}, lambda event, **facts: seen.append((event, facts)))


def test_one_start_an_arm_and_one_record_an_arm():
    paths = run()
    assert Server.started == ["part_2 chunked-2048", "part_2 chunked-512", "part_2 chunked-128", "part_2 unchunked"]
    found = arms.of_runs(records.open_run(path) for path in paths)
    assert list(found.runs) == found.names == ["chunked-2048", "chunked-512", "chunked-128", "unchunked"]
    assert arms.accounting(found)["starts"] == 4 and found.first.said == {"prefix_caching": False}
    assert set(found.frame()["load"]) == {"light", "heavy"} and set(found.frame()["pass"]) == {"cold", "measured", "trace"}


def test_posts_that_can_use_the_same_server_share_its_start():
    run("part_2", also={"part_3": {}, "part_4": {}})
    assert Server.started[0] == "part_2 chunked-2048" and len(Server.started) == 4  # nothing was started for the riders alone
    assert arms.newest("part_3", "cpu").missing == ["cap-1"] and arms.newest("part_4", "cpu").missing == ["blocks-17"]
    run("part_3", also={"part_4": {}})
    assert Server.started[4:] == ["part_3 cap-1"]
    run("part_4")
    assert Server.started[5:] == ["part_4 blocks-17"]
    every = [each for post in ("part_2", "part_3", "part_4") for each in arms.newest(post, "cpu")]
    assert arms.accounting(every)["starts"] == 6 and not any(arms.newest(post, "cpu").missing for post in ("part_2", "part_3", "part_4"))


def test_several_posts_in_one_process_start_each_server_once():
    paths = run({"part_2": {}, "part_3": {}, "part_4": {}})
    assert len(Server.started) == 6 and len(paths) == 8
    assert not any(arms.newest(post, "cpu").missing for post in ("part_2", "part_3", "part_4"))


def test_a_post_that_fails_stops_no_other_one_and_is_an_error_at_the_end(monkeypatch):
    Server.refuse = {"cap-1": WallError("the server died", "look")}
    with pytest.raises(WallError, match=r"not measured to the end: part_3\. part_3: the server died"):
        run({"part_3": {}, "part_4": {}})
    assert arms.newest("part_3", "cpu").missing == ["cap-1"] and not arms.newest("part_4", "cpu").missing

    real = measure._Station._one_point

    def fail(self, point, number, *, keep):
        if self.job.name == "part_5 float32":
            raise WallError("no token came", "look")
        real(self, point, number, keep=keep)

    monkeypatch.setattr(measure._Station, "_one_point", fail)
    with pytest.raises(WallError, match="not measured to the end: part_5"):
        run({"part_5": {}, "part_2": {}})
    assert not arms.newest("part_2", "cpu").missing and arms.newest("part_5", "cpu").missing == ["float32"]


def test_a_refused_arm_is_recorded_and_the_rest_goes_on():
    Server.refuse = {"unchunked": EngineRefused("chunking off is not supported", "the server ended with status 1", "leave it on")}
    events = []
    found = arms.of_runs(records.open_run(path) for path in run(events=events))
    assert found.refused == {"unchunked": "chunking off is not supported"} and len(found.testable) == 3
    assert found["unchunked"].points == [] and len(found["unchunked"].frame("requests")) == 0
    assert any("not testable here" in facts.get("text", "") for _, facts in events)
    assert arms.accounting(found)["starts"] == 4  # the refused start cost time too
    run()
    assert len(Server.started) == 4  # a refusal is a result: it is not tried again


def test_a_refusal_of_the_rigs_own_flags_is_an_error():
    Server.refuse = {"chunked-2048": EngineRefused("no such flag", "the server ended with status 2", "mend the rig")}
    with pytest.raises(WallError, match="ended with status 2"):
        run()


def test_an_arm_that_was_measured_is_not_refused_when_a_later_start_fails():
    Client.stop_at = 13  # in the last arm, after its first point
    with pytest.raises(measure.Stopped):
        run()
    Client.stop_at = None
    Server.refuse = {"unchunked": EngineRefused("no such flag", "the server ended with status 2", "mend the rig")}
    with pytest.raises(WallError, match="ended with status 2"):
        run()


def test_the_profiler_comes_after_every_other_point_of_every_job_on_a_server():
    run("part_2", also={"part_3": {}})
    shared = Client.ran[: Client.ran.index(("chunked-512", "light", "cold"))]
    passes = [name for _, _, name in shared]
    assert {arm for arm, _, _ in shared} == {"chunked-2048", "cap-16"}
    assert "trace" not in passes[: passes.index("trace")] and set(passes[passes.index("trace"):]) == {"trace"}


def test_a_rider_that_fails_is_left_for_its_own_turn_and_the_wanted_post_goes_on(monkeypatch):
    run_point = Client.run

    def failing(self, point, **more):
        if point.arm == "cap-16":
            raise WallError("no tokenizer", "mend it")
        return run_point(self, point, **more)

    monkeypatch.setattr(Client, "run", failing)
    events = []
    run("part_2", also={"part_3": {}}, events=events)
    assert not arms.newest("part_2", "cpu").missing and arms.newest("part_3", "cpu") is None
    assert any("part_3 cap-16 is left for later" in facts.get("text", "") for _, facts in events)


def test_two_measurements_at_once_are_refused(stand_ins):
    import fcntl

    (stand_ins / "local").mkdir()
    with (stand_ins / "local" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        with pytest.raises(WallError, match="process 4711"):
            run()
    assert Server.started == []


def test_what_lies_in_the_machine_is_no_refusal():
    Server.refuse = {"unchunked": WallError("the disk is full", "free some space")}
    with pytest.raises(WallError, match="the disk is full"):
        run()
    assert arms.newest("part_2", "cpu").missing == ["unchunked"]


def test_a_stopped_run_loses_the_point_in_flight_and_nothing_else():
    Client.stop_at = 5  # in the second arm
    with pytest.raises(measure.Stopped):
        run()
    before = list(Client.ran)
    assert len(before) == 5
    Client.stop_at, Client.ran = None, []
    run()
    assert Server.started.count("part_2 chunked-2048") == 1
    repeated = [each for each in Client.ran if each in before and each[2] != "cold"]
    assert repeated == [] and len(before) + len(Client.ran) >= 16


def test_the_same_request_measures_nothing_again_unless_it_asks_for_newer_records():
    run()
    starts = len(Server.started)
    run()
    assert len(Server.started) == starts
    with contextlib.suppress(TypeError):  # nothing can be newer than that: every arm is measured, and none is found
        run(since="2999-01-01T00:00:00+00:00")
    assert len(Server.started) == 2 * starts


def test_paths_of_this_machine_do_not_reach_a_record(monkeypatch):
    monkeypatch.setattr(run_document, "PATHS", {"/home/somebody": "~", "/home/somebody/wall": "<repo>", "/": "<models>"})
    given = {"a": ["/home/somebody/wall/x", 3], "b": "/home/somebody/.cache", "c": "/home/somebodyelse http://127.0.0.1:1/v1"}
    assert run_document.scrub(given) == {"a": ["<repo>/x", 3], "b": "~/.cache", "c": "/home/somebodyelse http://127.0.0.1:1/v1"}
