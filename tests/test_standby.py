"""The process that keeps the engine's imports: servers forked from it are real, and nothing of it outlives the run."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from inference_wall import standby
from inference_wall.engines import installed

SCRIPT = """
import sys, time
from pathlib import Path
from inference_wall import standby

if __name__ == "__main__":
    folder, environment = Path(sys.argv[1]), dict(__import__("os").environ)
    standby.launch(environment)
    command = [sys.executable, "-m", standby.MAIN]
    first = standby.serve([*command, "--version"], folder / "version.log", environment)
    print(first.wait(), flush=True)
    waiting = standby.serve([*command, "serve", str(folder), "--port", "1"], folder / "serve.log", environment | {"VLLM_LOGGING_LEVEL": "DEBUG"})
    print(waiting.pid, waiting.poll(), flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(installed() is None, reason="vLLM is not installed")
def test_a_forked_server_is_the_real_one_and_nothing_outlives_the_run(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    os.mkfifo(tmp_path / "config.json")  # whoever reads the model's configuration waits
    owner = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline().strip() == "0"
    log = (tmp_path / "version.log").read_text()
    assert installed().version in log
    assert standby.facts(log)["import_s"] > 1 and standby.facts("some other log") is None
    pid, state = owner.stdout.readline().split()
    _until(lambda: standby.facts(_read(tmp_path / "serve.log")))
    family = psutil.Process(owner.pid).children(recursive=True)
    assert state == "None" and int(pid) in {process.pid for process in family} and os.getpgid(int(pid)) == int(pid)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    _until(lambda: not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE])
    assert standby.facts(_read(tmp_path / "serve.log"))["waited_s"] < 2  # the imports were there


BROKEN = """
import os, sys
from pathlib import Path
from inference_wall import standby
from inference_wall.errors import WallError

if __name__ == "__main__":
    standby.launch(dict(os.environ))
    try:
        standby.serve([sys.executable, "-m", standby.MAIN, "--version"], Path(sys.argv[1]), dict(os.environ))
    except WallError as problem:
        print(problem)
"""


def test_imports_that_fail_are_one_clear_error(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('no such kernel')\n")
    script = tmp_path / "run.py"
    script.write_text(BROKEN)
    done = subprocess.run([sys.executable, str(script), str(tmp_path / "log")], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.stdout.startswith("error: the process that makes the engine's imports has ended") and "keep_imports = false" in done.stdout, done
    assert "no such kernel" in done.stderr


def _read(path):
    return path.read_text() if path.exists() else ""


def _until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
