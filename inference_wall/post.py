"""What a post's notebook calls: run or read, then look.

What:   `open_runs` gives the records that a page is about, one an arm: the newest ones (`mode = "recorded"`), or measured now
        (`mode = "live"`) by the measure process, whose progress it shows.
Why:    a notebook should read like the post: open the run, show a table, show a figure. Servers and clean-up are elsewhere.
Use:    arms = open_runs("part_2", rig="auto", mode="recorded"); arms.first where there is but one
Not:    how a run is measured (`measure`), what is drawn (`figures`), the named numbers of the prose (`headline`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import arms, evidence, records, rigs
from .arms import ArmSet
from .errors import WallError

# Set by `regenerate`: where to append the measure process's reports, and where to note which record the page shows.
EVENTS_VARIABLE, PAGE_VARIABLE = "WALL_EVENTS", "WALL_PAGE"
# ... what a batch of posts shares, as JSON: {"also": {post: parameters}, "since": ISO time or null}; and whether local records count.
BATCH_VARIABLE, COMMITTED_VARIABLE = "WALL_BATCH", "WALL_COMMITTED"
STOP_S = 60.0

Event = dict[str, Any]


def open_runs(post: str, *, rig: str = "auto", mode: str = "recorded", **parameters: Any) -> ArmSet:
    """The records for a page, one an arm. `parameters` are those of the post's protocol; an unknown one is an error at once.

    Raises WallError when there is no record to read, or with what went wrong in a live run.
    """
    protocol = rigs.load_protocol(post)
    values = rigs.check_parameters(protocol, {"rig": rig, "mode": mode, **parameters})
    if values["mode"] == "live":
        show = _forward if os.environ.get(EVENTS_VARIABLE) else _Line()
        chosen = rigs.pick_rig(values["rig"])
        batch = json.loads(os.environ.get(BATCH_VARIABLE) or "{}")
        # Outside a batch whoever executes a notebook live wants it measured now.
        since = batch["since"] if batch else records.now()
        found = arms.of_runs(records.open_run(path) for path in
                             measure({post: {**parameters, "mode": mode}}, chosen.name, show, also=batch.get("also", {}), since=since))
    else:
        found = recorded(post, values["rig"], committed_only=committed_only())
    page = os.environ.get(PAGE_VARIABLE)
    if page:
        records.write_json(Path(page), page_facts(found))
    return found


def committed_only() -> bool:
    """Whether the page that is being executed may show committed records alone."""
    return bool(os.environ.get(COMMITTED_VARIABLE))


def page_facts(found: ArmSet) -> dict[str, Any]:
    """Which records a page shows: what `regenerate` keeps beside an executed notebook."""
    return {"post": found.post, "rig": found.rig, "runs": [run.name for run in found], "local": any(run.is_local for run in found)}


def recorded(post: str, rig: str = "auto", committed_only: bool = False) -> ArmSet:
    """The newest whole records: of the named rig, or for `auto` of the rig with the best evidence (see `evidence.sets`)."""
    for found in evidence.sets(post, committed_only).values() if rig == "auto" else [arms.newest(post, rig, committed_only)]:
        if found is not None and found.testable:
            return found
    which = "committed record" if committed_only else "record"
    raise WallError(f"there is no {which} of {post} on rig {rig}", f"measure one: wall run {post} --rig {rig}"
                    + (", then wall keep" if committed_only else ""))


def measure(posts: dict[str, dict[str, Any]], rig: str, show: Callable[[Event], None], *, also: dict[str, dict[str, Any]] | None = None,
            since: str | None = None) -> list[Path]:
    """Run the measure process to its end and return the records' folders, one an arm; `show` gets each of its reports.

    `posts`: what to measure, with parameters. `also`: posts with their parameters whose arms may ride along on the same servers. `since`: see
    `records.find`.

    The process holds our end of a pipe: if this process dies, however it dies, the pipe closes and the server is stopped.
    """
    process = subprocess.Popen([sys.executable, "-m", "inference_wall.measure"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=_error_log(), text=True, start_new_session=True, cwd=rigs.root())
    last: Event = {}
    try:
        request = {"posts": posts, "rig": rig, "also": also or {}, "since": since}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            last = json.loads(line)
            show(last)
        process.wait()
    finally:
        # Also on an interrupt: close the pipe, and do not leave before the server is gone.
        process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if last.get("event") == "error":
        raise WallError(last["message"], last["remedy"])
    if last.get("event") != "done":
        raise WallError(f"the measure process ended with status {process.returncode} before it was done. {_error_tail()}",
                        "run the same command again: finished points are kept")
    return [Path(path) for path in last["runs"]]


def _error_path() -> Path:
    return records.benchmarks() / "local" / "measure.log"


def _error_log() -> Any:
    _error_path().parent.mkdir(parents=True, exist_ok=True)
    return _error_path().open("w")


def _error_tail() -> str:
    lines = [line for line in _error_path().read_text(errors="replace").splitlines() if line.strip()]
    return f"Its log ({_error_path()}) ends with: " + " | ".join(lines[-5:] or ["(nothing)"])


def _forward(event: Event) -> None:
    with open(os.environ[EVENTS_VARIABLE], "a", encoding="utf-8") as sink:
        sink.write(json.dumps(event) + "\n")


def describe(event: Event) -> str | None:
    """One line for a person, or null for a report that needs none."""
    match event["event"]:
        case "plan":
            kept = f", {event['kept']} already measured" if event["kept"] else ""
            return f"{event['points']} points{kept} in {len(event['jobs'])} arms"
        case "note":
            return event["text"]
        case "server" if event["state"] == "starting":
            return f"starting the server for {', '.join(event['arms'])} (log: {event['log']})"
        case "server":
            return "the server is ready" + (f" after {event['seconds']:.0f} s" if event.get("seconds") else "")
        case "point_done":
            invalid = "" if event["valid"] else f"; not valid: {', '.join(event['reasons'])}"
            rate = event["completed_req_s"]
            return (f"{event['arm']}, {event['pass']} pass, {event['label']}: "
                    + (f"{rate:.2f} requests/s" if rate is not None else "no request completed") + f" in {event['seconds']:.0f} s{invalid}")
        case "sealed":
            return f"record: {event['run']}"
    return None


class _Line:
    """Progress inside a live notebook: one line that changes, replaced by the last one at the end."""

    def __init__(self) -> None:
        from IPython.display import Markdown, display

        self._markdown = Markdown
        self._handle = display(Markdown("preparing ..."), display_id=True)

    def __call__(self, event: Event) -> None:
        text = describe(event)
        if event["event"] == "progress":
            return
        if text and self._handle is not None:
            self._handle.update(self._markdown(text))
