"""The real thing: real vLLM on the CPU, real papermill, killed in every way and taken up again, then a page.

One story in order, because each step goes on from what the one before left on disk. A server start is a minute of two cores,
so the kills share one run: four points, one kill after each of the first three, an interrupt, and a last run to the end.
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

from inference_wall import records

pytestmark = [pytest.mark.live, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")]

REPOSITORY = Path(__file__).resolve().parent.parent
ARGUMENTS = ["run", "part_1", "--rig", "cpu", "-p", "rates=4,inf", "-p", "num_prompts=6"]
POINTS = 4  # two rates, cold and measured
PATIENCE_S = 400


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
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        return Wall(process)

    @property
    def kept(self):
        drafts = list((self.home / "benchmarks" / "local").glob("part_1/cpu/*.partial"))
        return records.Draft(drafts[0]).done if drafts else []

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
    wall.wait_for(r"cold pass, rate 4")
    wall.process.kill()
    wall.end()
    story.assert_nobody_left()
    assert story.kept[:1] == [0] and len(story.kept) <= 2


def test_kernel_killed_is_one_clear_error(story):
    before = len(story.kept)
    wall = story.start(*ARGUMENTS)
    wall.wait_for(r"(cold|measured) pass, rate", count=1)
    story.find("ipykernel").kill()
    code, output = wall.end()
    assert code == 1 and "error: the kernel of part_1 died" in output and "remedy: " in output and "Traceback" not in output
    story.assert_nobody_left()
    assert len(story.kept) >= before + 1


def test_server_killed_is_one_clear_error_with_its_cause(story):
    before = len(story.kept)
    wall = story.start(*ARGUMENTS)
    wall.wait_for(r"the server is ready")
    wall.wait_for(r"pass, rate")
    story.find("vllm.entrypoints.cli.main").kill()
    code, output = wall.end()
    assert code == 1 and "SIGKILL" in output and "finished points are kept" in output and "Traceback" not in output
    story.assert_nobody_left()
    assert len(story.kept) >= before


def test_interrupt_keeps_the_points_and_says_so(story):
    before = len(story.kept)
    assert before < POINTS
    wall = story.start(*ARGUMENTS)
    wall.wait_for(r"the server is ready")
    os.killpg(wall.process.pid, signal.SIGINT)
    code, output = wall.end()
    assert code == 130 and "Finished points are kept" in output and "Traceback" not in output
    story.assert_nobody_left()
    assert len(story.kept) >= before


def test_the_last_run_takes_up_what_is_kept_and_ends_in_a_valid_record(story):
    before = len(story.kept)
    wall = story.start(*ARGUMENTS)
    code, output = wall.end()
    assert code == 0, output
    assert before > 0 and f"{before} already measured" in output
    story.assert_nobody_left()
    run = records.open_run(next((story.home / "benchmarks" / "local").glob("part_1/cpu/default-*Z")))
    # Where even the lowest rate misses the service level, one rate below it is measured as well.
    assert [point["point"] for point in run.points] in (list(range(POINTS)), list(range(POINTS + 1)))
    assert len(run.document["starts"]) >= 2
    assert run.document["starts"][-1]["server"]["first_text"].startswith(" Paris")
    for point in run.points:
        checks = point["validity"]["checks"]
        for exact in ("conservation", "output_length", "stream_tokens", "prompt_tokens", "output_tokens", "time_order", "prefix_cache"):
            assert checks[exact]["ok"] is True, (exact, checks[exact])
    requests, chunks = run.frame("requests"), run.frame("chunks")
    assert requests["output_tokens"].eq(32).all() and chunks["tokens"].sum() == 32 * len(requests)
    everything = json.dumps([run.document, run.points]) + run.log()
    for path in (str(Path.home()), str(story.home), sys.prefix, sys.base_prefix, "/tmp/"):
        assert path not in everything, path


def test_the_same_command_again_measures_nothing(story):
    wall = story.start(*ARGUMENTS)
    started = time.time()
    code, output = wall.end()
    assert code == 0 and "already measured" in output and "starting the server" not in output
    assert time.time() - started < 60


def test_the_record_becomes_a_page(story):
    code, output = story.start("site").end()
    assert code == 0, output
    page = (story.home / "_build" / "html" / "build" / "executed" / "part_1.html").read_text()
    record = next((story.home / "benchmarks" / "local").glob("part_1/cpu/default-*Z")).name
    assert record in page and "not measured" not in re.sub(r"<[^>]+>", "", page).split("What this page does not show")[0][:200]
    assert page.count("application/vnd.plotly.v1+json") >= 6 or page.count("wall-figure") >= 6
