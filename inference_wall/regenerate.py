"""Posts in batch: jupytext source to notebook, papermill to execute it, one progress bar over everything.

What:   `execute` runs one post with checked parameters and puts the executed notebook at `build/executed/<post>.ipynb`, in one
        step, only when every cell has succeeded. Beside it `<post>.json` says which record the page shows and from what.
Why:    papermill only warns about an unknown parameter and leaves a half-run notebook at the output path; a page must never
        be made from either.
Use:    execute("part_1", {"rig": "cpu", "mode": "live"}); what `wall run` and `wall site` call.
Not:    rendering (`site.build`).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import papermill
import psutil
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError
from traitlets import default

from . import records, rigs
from .errors import WallError
from .post import BATCH_VARIABLE, COMMITTED_VARIABLE, EVENTS_VARIABLE, PAGE_VARIABLE, STOP_S, Event


class _LocalKernel(AsyncKernelManager):
    """The kernel talks over sockets in the file system, which no other machine and no other user can reach."""

    transport = "ipc"

    @default("ip")
    def _ip_default(self) -> str:
        """Where the sockets lie. Jupyter's own choice is one name a folder, over which two kernels that start at once would meet."""
        return str(Path(tempfile.gettempdir()) / f"wall-kernel-{uuid.uuid4().hex[:16]}")


HIDDEN = {"parameters", "injected-parameters"}


def executed(page: str) -> Path:
    """Where the executed notebook of a page is put: that of a post, or of a post for one rig (`evidence.page_of`)."""
    return rigs.root() / "build" / "executed" / f"{page}.ipynb"


def page_note(page: str) -> dict[str, Any] | None:
    """What is known of the executed notebook (`runs`, `rig`, `asked`, `mode`, `source`, `beside`), or null when there is none."""
    path = executed(page).with_suffix(".json")
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() and executed(page).is_file() else None


def source_digest(post: str) -> str:
    """Digest of everything that decides what an executed page looks like, but for the records."""
    protocol = rigs.load_protocol(post)
    package = sorted(Path(__file__).parent.glob("*.py"))
    figures = sorted(path for path in (records.benchmarks() / "published").rglob("*") if path.suffix in (".csv", ".json"))
    order = rigs.root() / "experiments" / "prominence.toml"
    files = [rigs.root() / protocol.notebook, protocol.folder / "protocol.toml", *package, *figures, *([order] if order.is_file() else [])]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def records_digest(post: str, committed_only: bool = False) -> str:
    """Digest of all records that a page may draw from: those of the post on every rig, which are laid over one another; of all posts for the
    primer."""
    own = records.record_folders(post if post in rigs.protocol_names() else None, committed_only=committed_only)
    seals = (folder / records.SEAL for folder in own)
    return hashlib.sha256(b"".join(path.read_bytes() for path in seals if path.is_file())).hexdigest()


def is_current(post: str, runs: list[str], *, page: str | None = None, rig: str | None = None, committed_only: bool = False) -> bool:
    """Whether the executed notebook (`page`, by default the post's own) shows those records and was made from the present sources and with
    the present records beside them. `rig`: also whether it was executed for that rig by name."""
    note = page_note(page or post)
    return (bool(note) and note.get("runs") == runs and (rig is None or note.get("asked") == rig) and note["source"] == source_digest(post)
            and note.get("beside") == records_digest(post, committed_only))


def execute(post: str, parameters: dict[str, Any], on_event: Callable[[Event], None] = lambda event: None, *,
            batch: dict[str, Any] | None = None, committed_only: bool = False, page: str | None = None) -> Path:
    """Execute a post's notebook and return its path. `on_event` gets progress (see `post.describe`).

    `batch`: what a batch of posts shares, see `post.BATCH_VARIABLE`. `committed_only`: no record of this machine may be shown. `page`: the
    name of the page, where it is not that of the post.

    Raises WallError for a bad parameter (before anything starts), for a failed cell and for a kernel that died.
    """
    protocol = rigs.load_protocol(post)
    rigs.check_parameters(protocol, parameters)
    final = executed(page or post)
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_suffix(".partial.ipynb")
    source = source_digest(post)
    with tempfile.TemporaryDirectory(prefix="wall-") as scratch:
        notebook = jupytext.read(rigs.root() / protocol.notebook)
        for number, cell in enumerate(notebook.cells):
            cell["id"] = f"cell-{number:03d}"
        plain = Path(scratch) / f"{post}.ipynb"
        nbformat.write(notebook, plain)
        events, note = Path(scratch) / "events.jsonl", Path(scratch) / "page.json"
        events.touch()
        environment = {EVENTS_VARIABLE: str(events), PAGE_VARIABLE: str(note), "WALL_ROOT": str(rigs.root()),
                       BATCH_VARIABLE: json.dumps(batch) if batch else "", COMMITTED_VARIABLE: "1" if committed_only else ""}
        with _environment(environment), _followed(events, on_event):
            # papermill wants plain values; an empty parameter keeps the notebook's default.
            given = {name: value for name, value in parameters.items() if value not in (None, "")}
            _run(plain, partial, given, on_event)
        finished = _clean(nbformat.read(partial, as_version=4))
        nbformat.write(finished, partial)
        shown = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {"runs": [], "rig": None}
    # The sources as they were before, the records as they are now: a live run has just added some.
    records.write_json(final.with_suffix(".json"), {**shown, "asked": parameters.get("rig"), "mode": parameters.get("mode", "recorded"),
                                                    "source": source, "beside": records_digest(post, committed_only)})
    os.replace(partial, final)
    return final


def _run(plain: Path, partial: Path, parameters: dict[str, Any], on_event: Callable[[Event], None]) -> None:
    on_event({"event": "note", "text": f"executing {plain.stem}"})
    try:
        papermill.execute_notebook(str(plain), str(partial), parameters=parameters, kernel_name="python3", progress_bar=False,
                                   log_output=False, cwd=str(rigs.root()), request_save_on_cell_execute=False, kernel_manager_class=_LocalKernel,
                                   # A kernel is interrupted before it is shut down, and would complain of that on the terminal.
                                   extra_arguments=["--log-level=CRITICAL"])
    except PapermillExecutionError as problem:
        if problem.ename == "WallError":
            # The cell raised our own error: its two lines are all that a user needs.
            message, _, remedy = problem.evalue.partition("\n")
            raise WallError(message.removeprefix("error: "), remedy.removeprefix("remedy: ")) from None
        raise WallError(f"cell {problem.exec_count} of {plain.stem} failed: {problem.ename}: {problem.evalue}",
                        f"see {partial}, the notebook as far as it got") from problem
    except DeadKernelError as problem:
        raise WallError(f"the kernel of {plain.stem} died (killed, or out of memory)",
                        "run the same command again: finished points are kept") from problem
    except CellTimeoutError as problem:
        raise WallError(f"a cell of {plain.stem} did not end in time", f"see {partial}") from problem


def _clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Same input, same bytes: drop timings and machine paths; keep parameter cells out of the page."""
    notebook.metadata.pop("papermill", None)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:03d}"
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if not _shows_nothing(output)]
        tags = cell.metadata.get("tags", [])
        if HIDDEN & set(tags):
            cell.metadata["tags"] = [*tags, "remove-cell"]
    return notebook


def _shows_nothing(output: nbformat.NotebookNode) -> bool:
    """An empty sentence or table: all that is left of it is the name of its Python object, which is not for readers."""
    data = output.get("data", {})
    return output.output_type == "display_data" and data.get("text/plain", "").startswith("<IPython.core.display.") and not any(
        text for kind, text in data.items() if kind != "text/plain")


@contextmanager
def _environment(extra: dict[str, str]):
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


@contextmanager
def _followed(events: Path, on_event: Callable[[Event], None]):
    """Hand on the measure process's reports as they are written, and do not leave before that process has left."""
    stop, seen = threading.Event(), {"pid": None}

    def follow() -> None:
        with events.open(encoding="utf-8") as lines:
            pending = ""
            while True:
                ending = stop.is_set()
                pending += lines.read()
                *whole, pending = pending.split("\n")
                for line in whole:
                    event = json.loads(line)
                    seen["pid"] = event["pid"] if event["event"] == "hello" else seen["pid"]
                    on_event(event)
                if ending:
                    return
                time.sleep(0.1)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=5)
        if seen["pid"]:
            _wait_gone(seen["pid"])


def _wait_gone(pid: int) -> None:
    """After an interrupt or a dead kernel the measure process stops by itself; wait for it, and insist if it does not."""
    try:
        process = psutil.Process(pid)
        if "inference_wall.measure" not in " ".join(process.cmdline()):
            return
        process.wait(STOP_S)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
