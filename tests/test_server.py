"""The server supervisor against a fake server that misbehaves: one clear error each, no process left."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from inference_wall import server as module
from inference_wall.engines import engine
from inference_wall.errors import WallError
from inference_wall.server import Attached, Server, flags_to_argv, free_port, require_free_port, serve_argv

FAKE = Path(__file__).parent / "fake_server.py"


@pytest.fixture(autouse=True)
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def make(tmp_path):
    def make(behaviour="ok", port=None, timeout=20.0, name="m"):
        return Server([sys.executable, str(FAKE), "--behaviour", behaviour], served_name=name, engine=engine("0.32.0"),
                      log=tmp_path / "server.log", port=port or free_port(), ready_timeout_s=timeout)

    return make


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_good_server_is_ready_after_a_generation_and_leaves_nothing(make):
    with make() as server:
        pid = server.process.pid
        assert server.facts["first_text"] == " Paris" and server.facts["version"] == "0.32.0"
        server.require_alive()
        assert module.leftovers() == []
    assert gone(pid)
    require_free_port(server.port)


@pytest.mark.parametrize(("behaviour", "said", "timeout"), [
    ("dies", "KV cache", 20.0),
    ("never_ready", "not ready after 2 s", 2.0),
    ("wrong_model", "serves somebody-else, not m", 20.0),
    ("no_generation", "did not finish a generation", 20.0),
])
def test_a_bad_start_is_one_clear_error_with_a_remedy(make, behaviour, said, timeout):
    server = make(behaviour, timeout=timeout)
    with pytest.raises(WallError) as caught, server:
        pass
    assert said in caught.value.message
    assert caught.value.remedy
    assert server.process is None
    require_free_port(server.port)


def test_a_server_killed_in_the_middle_is_noticed_with_its_signal(make):
    with make() as server:
        os.kill(server.process.pid, signal.SIGKILL)
        time.sleep(0.2)
        with pytest.raises(WallError, match="SIGKILL"):
            server.require_alive()


def test_a_busy_port_is_refused_before_anything_starts_and_the_holder_is_named(make):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(WallError, match=f"port {port} .* in use by process {os.getpid()}"):
            make(port=port).start()


def test_the_server_ends_when_its_owner_is_killed_without_mercy(tmp_path):
    port = free_port()
    code = (f"import sys; sys.path[:0] = [{str(FAKE.parent.parent)!r}]\n"
            "from pathlib import Path\nfrom inference_wall.server import Server\nfrom inference_wall.engines import engine\n"
            f"s = Server([sys.executable, {str(FAKE)!r}], served_name='m', engine=engine('0.32.0'), log=Path({str(tmp_path / 'l')!r}), port={port})\n"
            "s.start(); s.wait_ready(); print(s.process.pid, flush=True)\nimport time; time.sleep(60)\n")
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    deadline = time.time() + 10
    while not gone(pid) and time.time() < deadline:
        time.sleep(0.05)
    assert gone(pid)


def test_a_leftover_server_is_found_and_ended_by_its_note(make, monkeypatch):
    server = make()
    server.start()
    pid = server.process.pid
    note = next(module._notes().glob("*.json"))
    note.write_text(note.read_text().replace(f'"owner": {os.getpid()}', '"owner": 4194303'))
    assert [left["pid"] for left in module.leftovers()] == [pid]
    assert module.end_leftovers() == [pid]
    assert gone(pid)
    assert module.leftovers() == []
    server.process.wait()


def test_a_note_about_a_foreign_process_never_ends_it():
    sleeper = subprocess.Popen(["sleep", "30"])
    try:
        module._notes().mkdir(parents=True)
        (module._notes() / "x.json").write_text(
            f'{{"pid": {sleeper.pid}, "created": 1.0, "port": 1, "owner": 4194303, "owner_created": 1.0}}')
        (module._notes() / "broken.json").write_text("{")
        assert module.end_leftovers() == []
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_attached_checks_the_model_and_notices_that_the_server_goes_away(make):
    with make() as server:
        with Attached(server.base_url, "m", engine("0.32.0")) as attached:
            attached.require_alive()
        with pytest.raises(WallError, match="serves m, not other"), Attached(server.base_url, "other", engine("0.32.0")):
            pass
    with pytest.raises(WallError, match="went away"):
        attached.require_alive()
    with pytest.raises(WallError, match="does not answer like a vLLM server"), Attached(server.base_url, "m", engine("0.32.0")):
        pass


def test_flags():
    flags = {"max-num-seqs": 8, "enforce-eager": True, "no": False, "none": None, "profiler-config": {"a": 1}}
    assert flags_to_argv(flags) == ["--max-num-seqs", "8", "--enforce-eager", "--profiler-config", '{"a": 1}']
    with pytest.raises(WallError, match="trust-remote-code"):
        serve_argv("m", "m", {"trust-remote-code": True})
