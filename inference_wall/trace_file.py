"""A torch trace in memory: its events, and the steps that the engine marked in it.

What:   `opened(path)` gives a `Trace`, raw or cut; `inside`, `union` and `busy_us` ask which events lie in a stretch of it.
Why:    what a step is decides every number of a trace. Steps come from the engine's own marks, never from gaps between events.
Use:    trace = opened(path); [step.number for step in trace.steps]; busy_us(trace.steps[0], trace.work())
Not:    tables and sentences (`trace`), cutting (`trace_excerpt`).

vLLM marks a step as `execute_context_C(P)_generation_G(T)`. In it, C requests whose answer has not begun read P prompt tokens
together, and G requests whose answer has begun get T tokens together. T above G means that answers were recomputed after a
preemption, or that several tokens of an answer were guessed and checked at once. On a GPU the mark is taken from the device's
own time line, because the host runs ahead of it. Choosing the next token (sampling) comes after the mark: between two steps.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .errors import WallError

# With `detailed_trace_annotation` there are sums over the requests behind each number of tokens: (sq1500sk1500sqsq...).
STEP = re.compile(r"execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)[^)]*\)_generation_(\d+)\((?:sq)?(\d+)[^)]*\)")
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # what keeps a device busy; a copy counts
HOST_MARK, DEVICE_MARK = "user_annotation", "gpu_user_annotation"
MOST_RAW_BYTES = 600_000_000  # unpacked; parsed it takes about ten times as much memory
AGAIN = "take the trace again: wall run POST --again"



@dataclass(frozen=True)
class Step:
    """One mark of the engine. Times in microseconds on the trace's clock."""

    number: int  # counted from the start of the raw trace
    name: str
    start: float
    end: float
    said: tuple[int, int, int, int]  # context requests and tokens, generation requests and tokens
    mark: dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """A parsed file; `document` is all of it."""

    document: dict[str, Any]
    events: list[dict[str, Any]]  # complete ones ("ph": "X") with a name, by start
    steps: list[Step]
    on_device: bool
    threads: set[tuple[Any, Any]]  # (pid, tid) that the engine marks its steps on

    def work(self) -> list[dict[str, Any]]:
        """What the steps are made of: the device's kernels and copies; without a device, the engine thread's operators."""
        if self.on_device:
            return [event for event in self.events if event.get("cat") in DEVICE]
        return [event for event in self.events if event.get("cat") == "cpu_op" and lane(event) in self.threads]


def _read(path: Path, most: int) -> bytes:
    try:
        with _stream(path) as stream:
            content = stream.read(most + 1)
    except FileNotFoundError:
        raise WallError(f"there is no trace {path.name}", AGAIN) from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise WallError(f"the trace {path.name} is broken off or damaged", AGAIN) from None
    if not content:
        raise WallError(f"the trace {path.name} is empty", AGAIN)
    if len(content) > most:
        raise WallError(f"the trace {path.name} has more than {most / 1e6:,.0f} MB", "profile a shorter stretch")
    return content


def is_whole(path: Path) -> bool:
    """Whether the file can be read to its end and ends like a JSON object: whoever writes it is done."""
    last = b""
    try:
        with _stream(path) as stream:
            while part := stream.read(1 << 20):
                last = part
    except (OSError, EOFError, zlib.error):
        return False
    return last.rstrip().endswith(b"}")


def _stream(path: Path) -> Any:
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")


def parse(path: Path) -> Trace:
    """Read a trace, raw or cut. WallError for a file that is missing, empty, damaged, too large, or without a marked step."""
    path = Path(path)
    try:
        document = json.loads(_read(path, MOST_RAW_BYTES))
        events = document["traceEvents"]
        events = sorted((event for event in events if event.get("ph") == "X" and "name" in event and "dur" in event),
                        key=lambda event: (event["ts"], -event["dur"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WallError(f"{path.name} is not a trace of the torch profiler", AGAIN) from None
    marks = [event for event in events if event.get("cat") == HOST_MARK and STEP.fullmatch(event["name"])]
    threads = {lane(event) for event in marks}
    device = [event for event in events if event.get("cat") in DEVICE]
    if device:
        marks = _busiest_lane([event for event in events if event.get("cat") == DEVICE_MARK and STEP.fullmatch(event["name"])], device)
    if not marks:
        where = " on the device's time line" if device else ""
        raise WallError(f"the trace {path.name} marks no step of the engine{where}",
                        "trace a server with vLLM 0.18 or later while it answers requests")
    steps = []
    for position, mark in enumerate(marks):
        said = tuple(int(text) for text in STEP.fullmatch(mark["name"]).groups())
        number = mark.get("args", {}).get("step", position)
        steps.append(Step(number, mark["name"], mark["ts"], mark["ts"] + mark["dur"], said, mark))
    return Trace(document, events, steps, bool(device), threads)


@lru_cache(maxsize=2)
def _cached(path: Path, _size: int, _changed: int) -> Trace:
    return parse(path)


def opened(path: Path) -> Trace:
    """`parse`, remembering the last two files: a page asks one file many questions."""
    path = Path(path)
    if not path.is_file():
        raise WallError(f"there is no trace {path.name}", AGAIN)
    return _cached(path, path.stat().st_size, path.stat().st_mtime_ns)


def lane(event: dict[str, Any]) -> tuple[Any, Any]:
    """The thread or stream of an event: (pid, tid)."""
    return event.get("pid"), event.get("tid")


def _busiest_lane(marks: list[dict[str, Any]], device: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The marks on the stream with the most work: a step is marked once on every stream that it uses, and a stream that only copies
    the next step's inputs would make steps overlap. An excerpt has numbered them."""
    if numbered := [mark for mark in marks if "step" in mark.get("args", {})]:
        return numbered
    busy: dict[tuple[Any, Any], float] = {}
    for event in device:
        busy[lane(event)] = busy.get(lane(event), 0.0) + event["dur"]
    busiest = max({lane(mark) for mark in marks}, key=lambda one: (busy.get(one, 0.0), str(one)), default=None)
    return [mark for mark in marks if lane(mark) == busiest]


def inside(events: list[dict[str, Any]], start: float, end: float) -> Iterator[dict[str, Any]]:
    """The events, sorted by start, that start in [start, end)."""
    for at in range(bisect.bisect_left(events, start, key=lambda event: event["ts"]), len(events)):
        if events[at]["ts"] >= end:
            return
        yield events[at]


def union(events: Iterable[dict[str, Any]], start: float, end: float) -> float:
    """Microseconds of [start, end] that at least one of the events, sorted by start, covers."""
    covered, reached = 0.0, start
    for event in events:
        low, high = max(event["ts"], reached), min(event["ts"] + event["dur"], end)
        if high > low:
            covered, reached = covered + high - low, high
    return covered


def busy_us(step: Step, work: list[dict[str, Any]]) -> float:
    """Microseconds of a step in which something of `Trace.work` ran. An excerpt has noted them: it may have lost short events."""
    noted = step.mark.get("args", {}).get("busy_us")
    return noted if noted is not None else union(inside(work, step.start, step.end), step.start, step.end)
