"""One vLLM server: start it, prove that it is ours and ready, watch it, stop it with everything it started.

What:   `Server` starts `vllm serve` in its own process group on 127.0.0.1, waits until it has finished one generation, and
        stops the whole group. `Attached` talks to a server that somebody else started. Both give the same small surface.
Why:    a stale server on the port, a server that dies during start-up, or one that outlives its run has spoilt many a
        benchmark. Each of these is one clear error here, with the cause found in the server's own log.
Use:    with Server(...) as server: server.base_url   (used by `measure`; a notebook never starts a server)
Not:    load (`load`), counters (`watch`), what the log's lines mean (`engines`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from . import standby
from .engines import CACHE_CONFIG, Engine
from .errors import EngineRefused, WallError
from .weights import cache_folder

HOST = "127.0.0.1"
STOP_S = 20.0
LOG_TAIL_LINES = 25


def flags_to_argv(flags: dict[str, Any]) -> list[str]:
    """`{"max-num-seqs": 8, "enforce-eager": True}` -> `["--max-num-seqs", "8", "--enforce-eager"]`; false and null drop out."""
    argv: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        argv.append(f"--{name}")
        if value is not True:
            argv.append(json.dumps(value) if isinstance(value, dict | list) else str(value))
    return argv


def require_free_port(port: int) -> None:
    """Raise when something listens on the port, and name it where the system lets us."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            return
        except OSError:
            pass
    holder = ""
    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN and connection.pid:
            holder = f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
            break
    raise WallError(f"port {port} on {HOST} is in use{holder}", "stop that process, or choose another port (--port)")


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


class _Client:
    """What can be asked of any vLLM server over HTTP."""

    base_url: str
    served_name: str

    def _get(self, path: str, timeout: float = 5.0) -> httpx.Response:
        # Environment proxies must never see loopback traffic.
        return httpx.get(self.base_url + path, timeout=timeout, trust_env=False)

    def version(self) -> str | None:
        """The version that the server says it is, or null."""
        try:
            return self._get("/version").json().get("version")
        except (httpx.HTTPError, ValueError):
            return None

    def check_model(self) -> None:
        """Raise unless the server answers with the model that this run is about."""
        try:
            names = [entry["id"] for entry in self._get("/v1/models").json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as problem:
            raise WallError(f"{self.base_url} does not answer like a vLLM server ({type(problem).__name__})",
                            "check the address; a vLLM server lists its models at /v1/models") from problem
        if self.served_name not in names:
            raise WallError(f"{self.base_url} serves {', '.join(names)}, not {self.served_name}",
                            "start the server with the rig's model and --served-model-name, or choose the rig that fits")

    def cache_facts(self, engine: Engine) -> dict[str, Any]:
        """Facts about the KV cache from `/metrics`, which knows the blocks where the log is silent."""
        try:
            families = text_string_to_metric_families(self._get("/metrics").text)
            labels = next(sample.labels for family in families for sample in family.samples if sample.name == CACHE_CONFIG)
        except (httpx.HTTPError, ValueError, StopIteration):
            return {}
        return engine.parse_cache_config(labels)

    def generate(self, max_tokens: int = 4, timeout: float = 120.0) -> str:
        """One finished generation, the only proof of readiness that counts. Returns the text."""
        reply = httpx.post(f"{self.base_url}/v1/completions", timeout=timeout, trust_env=False,
                           json={"model": self.served_name, "prompt": "The capital of France is", "max_tokens": max_tokens,
                                 "temperature": 0})
        reply.raise_for_status()
        return reply.json()["choices"][0]["text"]


class Attached(_Client):
    """A server that somebody else started: it is asked, never stopped; its log is not ours to read."""

    def __init__(self, base_url: str, served_name: str, engine: Engine):
        self.base_url, self.served_name, self.engine = base_url, served_name, engine
        self.facts: dict[str, Any] = {"base_url": base_url, "log": None, "log_reason": "the server was started by somebody else"}

    def __enter__(self) -> Attached:
        self.check_model()
        try:
            self.generate()
        except httpx.HTTPError as problem:
            raise WallError(f"{self.base_url} did not finish a generation: {problem}", "look at that server's log") from problem
        self.facts |= {"version": self.version(), "said": self.cache_facts(self.engine)}
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def require_alive(self) -> None:
        """Raise when the server no longer answers."""
        try:
            self._get("/health").raise_for_status()
        except httpx.HTTPError as problem:
            raise WallError(f"the server at {self.base_url} went away in the middle of the run",
                            "start it again and run the same command: finished points are kept") from problem


class Server(_Client):
    """`vllm serve` in its own process group. Enter to start and wait until ready, leave to stop.

    `argv` is the full command line but for host and port; `log` is the file that takes its output. `keep_imports`: fork it from a process
    that has made the engine's imports (see `standby`).
    """

    def __init__(self, argv: list[str], *, served_name: str, engine: Engine, log: Path, port: int,
                 environment: dict[str, str] | None = None, ready_timeout_s: float = 600.0, keep_imports: bool = False):
        self.argv = [*argv, "--host", HOST, "--port", str(port)]
        self.served_name, self.engine, self.log, self.port = served_name, engine, log, port
        self.environment = dict(environment or {})
        self.ready_timeout_s, self.keep_imports = ready_timeout_s, keep_imports
        self.base_url = f"http://{HOST}:{port}"
        self.process: subprocess.Popen | standby.Forked | None = None
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> Server:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Check the port, then spawn. Returns at once; `wait_ready` waits."""
        require_free_port(self.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = _environment(self.environment)
        self.cached = compile_caches(environment)
        self.started = time.perf_counter()
        if self.keep_imports:
            standby.launch(environment)
            self.process = standby.serve(self.argv, self.log, environment)
        else:
            with self.log.open("ab") as sink:
                self.process = subprocess.Popen(
                    self.argv, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                    env=environment, preexec_fn=standby.end_with_parent)
        _remember(self.process, self.port)

    def wait_ready(self) -> None:
        """Wait for /health, prove that the listener is ours, and finish one generation; all within `ready_timeout_s`."""
        deadline = self.started + self.ready_timeout_s
        while True:
            self.require_alive(starting=True)
            if time.perf_counter() > deadline:
                raise WallError(f"the server was not ready after {self.ready_timeout_s:.0f} s. {self._tail()}",
                                "raise ready_timeout_s in the rig if the machine is slow, else look at the log's last lines above")
            try:
                if self._get("/health", timeout=2.0).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.25)
        self._check_listener()
        self.check_model()
        try:
            text = self.generate(timeout=max(10.0, deadline - time.perf_counter()))
        except (httpx.HTTPError, KeyError, ValueError) as problem:
            self.require_alive(starting=True)
            message = f"the server is up but did not finish a generation ({problem!r}). {self._tail()}"
            words = self.log.read_text(errors="replace")
            if isinstance(problem, httpx.HTTPStatusError) and problem.response.status_code == 500 and self.engine.refuses(words):
                cause = self.engine.last_error(words) or "it answers with an internal error"
                raise EngineRefused(f"the server came up, but its first generation failed ({cause})", message,
                                    "look at the log's last lines above") from problem
            raise WallError(message, "look at the log's last lines above") from problem
        said = self.log.read_text(errors="replace")
        self.facts = {
            "argv": self.argv, "environment": self.environment, "pid": self.process.pid, "version": self.version(),
            "ready_s": round(time.perf_counter() - self.started, 2), "first_text": text,
            "compiled": {"before": self.cached, "after": compile_caches(_environment(self.environment))},
            "imports_kept": standby.facts(said), "said": self.engine.parse_log(said) | self.cache_facts(self.engine), "base_url": self.base_url,
        }

    def require_alive(self, starting: bool = False) -> None:
        """Raise, with the matched cause and the end of the log, when the server has exited."""
        code = self.process.poll()
        if code is None:
            return
        when = "during start-up" if starting else "in the middle of the run"
        ended = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with status {code}"
        tail = self.log.read_text(errors="replace")
        found = self.engine.diagnose(tail)
        cause, remedy = found or (self.engine.last_error(tail) or "no known cause in its log", "read the log's last lines above")
        message = f"the server {ended} {when}: {cause}. {self._tail()}"
        if starting and code > 0 and self.engine.refuses(tail):
            raise EngineRefused(cause, message, remedy)
        raise WallError(message, remedy if starting else f"{remedy}; then run the same command again: finished points are kept")

    def stop(self) -> None:
        """End the whole group: SIGTERM, then SIGKILL after 20 s. Nothing of it is left when this returns."""
        if self.process is None:
            return
        _end_group(self.process.pid)
        self.process.wait()
        _forget(self.process.pid)
        self.process = None

    def _check_listener(self) -> None:
        """Only a process of our own group may hold the port: a stale server must never be measured."""
        group = {self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True))}
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == self.port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is not None and connection.pid not in group:
                    raise WallError(f"port {self.port} is answered by process {connection.pid}, which is not the server started here",
                                    "stop that process, or choose another port (--port)")

    def _tail(self) -> str:
        try:
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        return f"The log ({self.log}) ends with: " + " | ".join(lines[-LOG_TAIL_LINES:] or ["(nothing)"])


def serve_argv(model: str, served_name: str, flags: dict[str, Any]) -> list[str]:
    """The command line of a server without host and port. `--trust-remote-code` is refused: no code from a model repository."""
    if "trust-remote-code" in flags:
        raise WallError("trust-remote-code is not allowed in a rig", "remove it: the models of the series need no code of their own")
    return [sys.executable, "-m", standby.MAIN, "serve", model, "--served-model-name", served_name, *flags_to_argv(flags)]


def _environment(extra: dict[str, str]) -> dict[str, str]:
    quiet = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"), "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
             "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
             # The server drops an idle connection after 5 s, just when a light load wants to use it again: a lost request.
             "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
             # Unless it is named, the kernels tuned at a start go to a folder that the next start does not look into.
             "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or str(cache_folder() / "triton")}
    return {**os.environ, **quiet, **{name: str(value) for name, value in extra.items()}}


def compile_caches(environment: dict[str, str]) -> dict[str, int]:
    """Entries in the caches that a start fills and the next one reads: vLLM's compiled graphs, and Triton's kernels and tuning results.

    A start that leaves both as they were was a warm one.
    """
    graphs = Path(environment.get("VLLM_CACHE_ROOT") or Path.home() / ".cache" / "vllm") / "torch_compile_cache"
    kernels = Path(environment["TRITON_CACHE_DIR"])
    return {"graphs": sum(1 for path in graphs.rglob("*") if path.is_file()), "kernels": sum(1 for _ in kernels.glob("*"))}


def _end_group(pid: int) -> None:
    """SIGTERM then SIGKILL to a process group and to all descendants that left it."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for number, wait in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            pass
        members = _group_members(pid)
        _, alive = psutil.wait_procs({*family, *members}, timeout=wait)
        if not alive and not _group_members(pid):
            return
        for process in alive:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                pass


def _group_members(group: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


# --- servers left over by a run that was killed without mercy ----------------------------------------------------


def _notes() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or Path.home() / ".cache") / "inference-wall" / "servers"


def _remember(process: subprocess.Popen, port: int) -> None:
    note = {"pid": process.pid, "created": psutil.Process(process.pid).create_time(), "port": port, "owner": os.getpid(),
            "owner_created": psutil.Process().create_time()}
    _notes().mkdir(parents=True, exist_ok=True)
    (_notes() / f"{process.pid}.json").write_text(json.dumps(note))


def _forget(pid: int) -> None:
    (_notes() / f"{pid}.json").unlink(missing_ok=True)


def _is_same(pid: int, created: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - created) < 0.05
    except psutil.NoSuchProcess:
        return False


def leftovers() -> list[dict[str, Any]]:
    """Servers that we started, still running although the process that owned them is gone."""
    left = []
    for path in _notes().glob("*.json") if _notes().is_dir() else []:
        try:
            note = json.loads(path.read_text())
        except ValueError:
            path.unlink(missing_ok=True)
            continue
        orphaned = not _is_same(note["owner"], note["owner_created"])
        # A group whose leader is gone is still ours: its number cannot be given away while a member lives.
        running = _is_same(note["pid"], note["created"]) or (not psutil.pid_exists(note["pid"]) and _group_members(note["pid"]))
        if not running:
            path.unlink(missing_ok=True)
        elif orphaned:
            left.append(note)
    return left


def end_leftovers() -> list[int]:
    """Stop them, by the pid and start time we noted, and return their pids."""
    ended = []
    for note in leftovers():
        _end_group(note["pid"])
        _forget(note["pid"])
        ended.append(note["pid"])
    return ended
