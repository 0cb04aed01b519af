"""The engine's imports, made once for many server starts.

What:   `launch` starts a process that imports the engine and waits; `serve` forks a server from it. Both are `multiprocessing`'s fork server.
Why:    a start whose kernels are compiled already takes 42 s on an H200, and 31 of them are imports, made in two processes one after the
        other. A forked server has them at once.
Use:    launch(environment); process = serve(argv, log, environment); process.pid, process.poll(), process.wait()   (see `server.Server`)
Not:    anything that computes: a server forked here runs the same code with the same flags as one started from its command line, and
        falls back to that command line where a forked process could not use the GPU.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from .errors import WallError

PR_SET_PDEATHSIG = 1
MAIN = "vllm.entrypoints.cli.main"
# A server forked from here forks its own engine process, which is then spared the imports too.
ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "fork",
               # torch would ask the driver how many GPUs there are; a process whose parent has asked cannot use them.
               "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
SAID = re.compile(r"forked with its imports made \(in ([\d.]+) s; waited for them ([\d.]+) s\)")


def launch(environment: dict[str, str]) -> None:
    """Start the process, with the environment that its servers will have. Returns at once; launching again does nothing.

    It ends when the calling process ends. Call it from the main thread: the kernel's notice of a parent's end is bound to the thread.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["inference_wall.standby_imports"])
    before = dict(os.environ)
    os.environ.update({**environment, **ENVIRONMENT})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


class Forked:
    """A forked server, with the part of `subprocess.Popen` that a supervisor needs."""

    def __init__(self, process: multiprocessing.process.BaseProcess):
        self._process = process
        self.pid: int = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode


def serve(argv: list[str], log: Path, environment: dict[str, str]) -> Forked:
    """Fork a server: the command line `argv`, as `server.serve_argv` makes it, with output appended to `log`, in a session of its own.

    WallError when the process that makes the imports has ended, most likely in one of them.
    """
    process = multiprocessing.get_context("forkserver").Process(target=_server, args=(argv, str(log), {**environment, **ENVIRONMENT}, time.time()))
    try:
        process.start()
    except (OSError, EOFError) as problem:
        raise WallError(f"the process that makes the engine's imports has ended ({type(problem).__name__})",
                        "look at the end of benchmarks/local/measure.log; keep_imports = false in the rig starts servers the plain way") from problem
    return Forked(process)


def facts(log: str) -> dict[str, float] | None:
    """What a forked server's log says about its imports: import_s (once, for all servers) and waited_s of this start; null for another start."""
    found = SAID.search(log)
    return {"import_s": float(found[1]), "waited_s": float(found[2])} if found else None


def end_with_parent() -> None:
    """In a child: the kernel ends it when the process that made it ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _server(argv: list[str], log: str, environment: dict[str, str], asked: float) -> None:
    """In the forked process: become the server."""
    from . import standby_imports

    end_with_parent()
    os.setsid()
    sink = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ.clear()
    os.environ.update(environment)
    if not standby_imports.CAN_BE_FORKED:
        print("not forked: a forked process cannot use this GPU", flush=True)
        os.environ.pop("VLLM_WORKER_MULTIPROC_METHOD")
        os.execve(argv[0], argv, dict(os.environ))
    print(f"forked with its imports made (in {standby_imports.IMPORT_S:.2f} s; waited for them {time.time() - asked:.2f} s)", flush=True)
    sys.argv = ["vllm", *argv[argv.index(MAIN) + 1:]]
    _main()


def _main() -> Any:
    from vllm.entrypoints.cli.main import main

    return main()
