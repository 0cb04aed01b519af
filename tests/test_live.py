"""The real thing: real vLLM on the CPU, real papermill; all five parts, killed in every way and taken up again, then the pages.

One story in order, because each step goes on from what the one before left on disk. A server start is a minute of two cores, so the kills share
one batch of all parts at a small scale: two of them hit a server that is up, two hit one that is starting, and a last run goes to the end.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from inference_wall import arms, cliff, freeze, records, trace

pytestmark = [pytest.mark.live, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")]

REPOSITORY = Path(__file__).resolve().parent.parent
COMMON = ["--rig", "cpu", "--scale", "0.15"]
ARGUMENTS = ["run", "all", *COMMON]
PARTS = ["part_1", "part_2", "part_3", "part_4", "part_5"]
PATIENCE_S = 1800
STARTS = 8  # that all parts need on this rig, kills apart


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A repository of its own, so that neither records nor pages of this clone are touched."""
    home = tmp_path_factory.mktemp("clone")
    # The package too: a folder of its name without its code, in the working folder, would hide the installed one.
    for name in ("experiments", "notebooks", "book", "benchmarks/published", "inference_wall"):
        shutil.copytree(REPOSITORY / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy(REPOSITORY / name, home / name)
    return Story(home)


class Story:
    def __init__(self, home):
        self.home = home
        self.environment = {**os.environ, "WALL_ROOT": str(home), "WALL_BENCHMARKS": str(home / "benchmarks"), "COLUMNS": "200"}

    def start(self, *arguments):
        process = subprocess.Popen([sys.executable, "-m", "inference_wall.cli", *arguments], cwd=self.home, env=self.environment, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                                   # A test run in the background may ignore interrupts, and its children would inherit that.
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        return Wall(process)

    @property
    def kept(self):
        """Finished points of Part 1, whose record is the first one to be measured."""
        drafts = list((self.home / "benchmarks" / "local").glob("part_1/cpu/*.partial"))
        return records.Draft(drafts[0]).done if drafts else []

    def arms(self, post):
        """What this story measured: not the records of the clone that the tests run in."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WALL_BENCHMARKS", str(self.home / "benchmarks"))
            found = arms.newest(post, "cpu")
        assert all(run.path.is_relative_to(self.home) for run in found)
        return found

    def family(self):
        """Every process that belongs to this story: they all carry its root in their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("WALL_ROOT") == str(self.home) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def find(self, words):
        return next(process for process in self.family() if words in " ".join(process.cmdline()))

    def server(self):
        """The process that listens, of those forked from the one that keeps the engine's imports: a fork has no command line of its own."""
        family = {process.pid: process for process in self.family() if "multiprocessing.forkserver" in " ".join(process.cmdline())}
        return next(family[connection.pid] for connection in psutil.net_connections("tcp")
                    if connection.status == psutil.CONN_LISTEN and connection.pid in family)

    def assert_nobody_left(self, within_s=60):
        deadline = time.time() + within_s
        while self.family() and time.time() < deadline:
            time.sleep(0.2)
        assert [" ".join(process.cmdline())[:120] for process in self.family()] == []


class Wall:
    """A running `wall`, whose lines are read as they come."""

    def __init__(self, process):
        self.process, self.lines = process, []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)

    def wait_for(self, pattern, count=1):
        deadline = time.time() + PATIENCE_S
        while time.time() < deadline:
            if sum(bool(re.search(pattern, line)) for line in list(self.lines)) >= count:
                return
            assert self.process.poll() is None, "".join(self.lines)
            time.sleep(0.1)
        raise AssertionError(f"never saw {pattern!r} in:\n" + "".join(self.lines))

    def end(self):
        code = self.process.wait(PATIENCE_S)
        self.reader.join(10)
        return code, "".join(self.lines)


def test_papermill_killed_loses_the_point_in_flight_and_nothing_else(story):
    wall = story.start(*ARGUMENTS)
    wall.wait_for(r"calibration pass")
    wall.process.kill()
    wall.end()
    story.assert_nobody_left()
    assert story.kept[:2] == [0, 1] and len(story.kept) <= 3


def test_kernel_killed_is_one_clear_error(story):
    before = story.kept
    wall = story.start("run", "part_1", *COMMON)
    wall.wait_for(r"starting the server")
    story.find("ipykernel").kill()
    code, output = wall.end()
    assert code == 1 and "error: the kernel of part_1 died" in output and "remedy: " in output and "Traceback" not in output
    story.assert_nobody_left()
    assert story.kept == before


def test_server_killed_is_one_clear_error_with_its_cause(story):
    before = len(story.kept)
    wall = story.start("run", "part_1", *COMMON)  # a batch would go on with the other parts
    wall.wait_for(r"measured pass, sweep, rate")
    story.server().kill()
    code, output = wall.end()
    assert code == 1 and "SIGKILL" in output and "finished points are kept" in output and "Traceback" not in output
    story.assert_nobody_left()
    assert len(story.kept) > before


def test_interrupt_keeps_the_points_and_says_so(story):
    before = story.kept
    wall = story.start(*ARGUMENTS)
    wall.wait_for(r"starting the server")
    os.killpg(wall.process.pid, signal.SIGINT)
    code, output = wall.end()
    assert code == 130 and "Finished points are kept" in output and "Traceback" not in output
    story.assert_nobody_left()
    assert story.kept == before


def test_the_last_run_takes_up_what_is_kept_and_measures_every_part(story):
    before = len(story.kept)
    wall = story.start(*ARGUMENTS)
    code, output = wall.end()
    assert code == 0, output
    assert before > 0 and f"{before} already measured" in output
    assert len(re.findall("starting the server", output)) == STARTS
    assert re.search(r"5 posts, \d+ arms, \d+ points: \d+ server starts in [\d.]+ min, load in [\d.]+ min", output)
    story.assert_nobody_left()


@pytest.mark.parametrize("post", PARTS)
def test_every_arm_has_a_whole_record_whose_counts_agree_with_the_server(story, post):
    found = story.arms(post)
    # A processor for which the build has no kernel is a result, not a failure; whatever else is refused is one.
    assert not found.missing and all("kernel" in reason for reason in found.refused.values()), found.refused
    for run in found.testable.values():
        assert run.points and run.document["starts"][-1]["server"]["ready_s"] > 0
        assert run.document["client_import_s"] > 1 and run.document["starts"][-1]["server"]["compiled"]["after"]
        for point in run.points:
            checks = point["validity"]["checks"]
            for exact in ("conservation", "output_length", "stream_tokens", "output_tokens", "time_order", "prefix_cache"):
                assert checks[exact]["ok"] is True, (run.name, point["load"], exact, checks[exact])
        requests, chunks = run.frame("requests"), run.frame("chunks")
        assert requests["output_tokens"].equals(requests["asked_output_tokens"].astype(requests["output_tokens"].dtype))
        assert chunks["tokens"].sum() == requests["output_tokens"].sum()
        everything = json.dumps([run.document, run.points]) + run.log()
        for path in (str(Path.home()), str(story.home), sys.prefix, sys.base_prefix, "/tmp/"):
            assert path not in everything, (run.name, path)


def test_a_resumed_record_names_each_start_that_its_points_ran_on(story):
    run = story.arms("part_1").first
    assert len(run.document["starts"]) >= 2
    assert {point["server_start"] for point in run.points} <= set(range(len(run.document["starts"])))
    assert "Paris" in run.document["starts"][-1]["server"]["first_text"] or run.document["starts"][-1]["server"]["first_text"]


def test_the_freeze_shows_and_the_server_says_how_it_was_set(story):
    found = story.arms("part_2")
    cases = freeze.read(found)
    assert found["unchunked"].said["chunked_prefill"] is False and found["chunked-128"].said["max_num_batched_tokens"] == 128

    injected = found["unchunked"].frame("requests").query("role == 'injected'")
    assert (injected["prompt_tokens"] == injected["asked_prompt_tokens"]).all() and len(injected) > 0
    assert cases["unchunked", "heavy"].worst_ms > cases["chunked-128", "heavy"].worst_ms


def test_a_batch_shares_its_steps(story):
    fit = cliff.step_fit(cliff.steps_frame(story.arms("part_3")))
    assert fit.fixed_ms > 0 and fit.slope_ms < fit.fixed_ms


def test_the_positive_control_moves_the_counter_of_preemptions(story):
    frame = story.arms("part_4").frame()
    cut = frame[(frame["arm"] != "natural") & (frame["load"] == "positive") & (frame["pass"] == "measured")]
    assert (cut["preemptions"] > 0).all() and (cut["completed"] == cut["num_prompts"]).all()


def test_fewer_bits_ran_through_their_own_kernel(story):
    found = story.arms("part_5")
    if "int8" in found.refused:
        pytest.skip(found.refused["int8"])
    assert "Int8" in found["int8"].said["quantization_kernel"] and "quantization_kernel" not in found["float32"].said
    quality = {arm: next(point["bench"] for point in run.points if point["kind"] == "quality") for arm, run in found.testable.items()
               if any(point["kind"] == "quality" for point in run.points)}
    assert set(quality) == {"float32", "int8"}
    assert quality["float32"]["perplexity"] < quality["int8"]["perplexity"] < 2 * quality["float32"]["perplexity"]


@pytest.mark.parametrize("post", PARTS)
def test_every_part_has_a_trace_whose_steps_are_the_engines_own(story, post):
    found = story.arms(post)
    paths = [path for run in found for point in run.points if (path := run.trace(point["point"]))]
    assert paths, [point["bench"].get("trace") for run in found for point in run.points if point["pass"] == "trace"]
    for path in paths:
        steps = trace.steps(path)
        assert len(steps) > 0 and (steps["duration_ms"] > 0).all()


def test_the_same_command_again_measures_nothing(story):
    wall = story.start(*ARGUMENTS)
    started = time.time()
    code, output = wall.end()
    assert code == 0 and output.count("already measured") >= 5 and "starting the server" not in output
    assert time.time() - started < 120


def test_the_records_become_pages(story):
    code, output = story.start("site").end()
    assert code == 0, output
    for post in PARTS:
        page = (story.home / "_build" / "html" / "build" / "executed" / f"{post}.html").read_text()
        for run in story.arms(post):
            assert run.name in page
        assert page.count("wall-figure") >= 4, post


def test_plain_papermill_runs_a_generated_notebook_live(story, tmp_path):
    """Without `wall`: jupytext makes the notebook, papermill sets its parameters, the notebook starts the server and stops it."""
    notebook, done = tmp_path / "part_1.ipynb", tmp_path / "done.ipynb"
    for command in (["jupytext", "--to", "ipynb", "--output", notebook, "notebooks/part_1.py"],
                    ["papermill", notebook, done, "-p", "mode", "live", "-p", "rig", "cpu", "-p", "rates", "inf", "-p", "num_prompts", "4"]):
        result = subprocess.run([sys.executable, "-m", *map(str, command)], cwd=story.home, env=story.environment, capture_output=True, text=True,
                                timeout=PATIENCE_S, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    story.assert_nobody_left()
    record = next(path for path in (story.home / "benchmarks" / "local" / "part_1" / "cpu").glob("default-*Z")
                  if len(records.open_run(path).points) == 3)  # cold, measured, trace
    assert record.name in done.read_text()
