"""A raw trace cut to some whole steps, small enough for a page and for a repository.

What:   `excerpt(raw, target)` writes a trace of at most so many steps and bytes, and says what it left out.
Why:    a raw trace of half a second has some ten thousand events and names the machine. A reader needs a few steps, whole.
Use:    facts = excerpt(raw, folder / "trace-0003.json.gz"); facts["left_out"]
Not:    making the raw trace and reading either (`trace`).
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
from pathlib import Path
from typing import Any

from .errors import WallError
from .trace_file import DEVICE, DEVICE_MARK, HOST_MARK, STEP, Trace, busy_us, lane, parse

HOST = {"cpu_op", "cuda_runtime", "cuda_driver", HOST_MARK}
ALL = float("inf")
THRESHOLDS_US = (0, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 5_000, ALL)
LEFT_OUT = "left_out"  # in otherData



def excerpt(raw: Path, target: Path, max_steps: int = 12, max_bytes: int = 400_000) -> dict[str, Any]:
    """Cut the raw trace to at most `max_steps` whole steps in a row and write it, gzipped, to `target` in at most `max_bytes`.

    Keeps the engine's threads and the device between the start of the first step and the start of the step after the last, with
    names and times from that start, and no host name or path. The steps in a row are those with a step that reads a prompt beside
    running answers, where there is one, then with a step that reads none, then with the most of the longest prompts. Only if the size
    forces it, events shorter than a threshold are left out, the host's before the device's; `otherData` and the returned `left_out`
    say so, and each step keeps its busy time from before. Returns steps_total, steps_kept, events_total, events_kept, bytes, left_out.
    Raises WallError for a file that is not a trace with steps, and where not even the steps' marks fit.
    """
    trace = parse(raw)
    first, last = _choose([step.said for step in trace.steps], max_steps)
    kept = trace.steps[first:last]
    work = trace.work()
    notes = {id(step.mark): {"step": step.number, "busy_us": round(busy_us(step, work), 2)} for step in kept}
    events = _window(trace, first, last)
    zero = min(event["ts"] for event in events)
    for host_us, device_us in [(us, 0) for us in THRESHOLDS_US] + [(ALL, us) for us in THRESHOLDS_US[1:]]:
        stay = [event for event in events if id(event) in notes or _is_step(event)
                or event["dur"] >= (device_us if event["cat"] in DEVICE else host_us)]
        facts = {"steps_total": len(trace.steps), "steps_kept": len(kept), "events_total": len(trace.events), "events_kept": len(stay),
                 "left_out": _left_out(host_us, device_us, trace.on_device) if len(stay) < len(events) else None}
        content = _packed(trace.document, stay, notes, zero, facts)
        if len(content) <= max_bytes:
            break
    else:
        raise WallError(f"{len(kept)} steps do not fit in {max_bytes:,} bytes", "allow more bytes, or fewer steps")
    target = Path(target)
    partial = target.with_name(f"{target.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, target)
    return {**facts, "bytes": len(content)}


def _choose(said: list[tuple[int, int, int, int]], most: int) -> tuple[int, int]:
    """The first step to keep, and the one after the last (see `excerpt`).

    Prompts much shorter than the longest do not count: short requests come and go around it. It is to begin after a third of the
    excerpt, with running answers before and after it. Without any prompt, the middle is kept: the outer steps can be slowed
    by the profiler's own start and end.
    """
    if most < 1:
        raise ValueError("an excerpt holds at least one step")
    size, longest = min(most, len(said)), max(step[1] for step in said)
    long = [step[1] if longest and 2 * step[1] >= longest else 0 for step in said]

    def worth(start: int) -> tuple[Any, ...]:
        part, reads = said[start:start + size], long[start:start + size]
        first = next((at for at, tokens in enumerate(reads) if tokens), size)
        off = first - size // 3 if longest else start - (len(said) - size) // 2
        return any(step[1] and step[2] for step in part), any(not step[1] for step in part), sum(reads), -abs(off), -start

    start = max(range(len(said) - size + 1), key=worth)
    return start, start + size


def _is_step(event: dict[str, Any]) -> bool:
    return event["cat"] in (HOST_MARK, DEVICE_MARK) and STEP.fullmatch(event["name"]) is not None


def _window(trace: Trace, first: int, last: int) -> list[dict[str, Any]]:
    """The events from the first kept step up to the step after the last, on the engine's threads and on the device."""
    end = trace.steps[last].start if last < len(trace.steps) else ALL
    spans = {True: (trace.steps[first].start, end), False: (trace.steps[first].start, end)}
    if trace.on_device:  # the host runs ahead, so its window is that of its own marks of the same steps
        marks = [event for event in trace.events if event.get("cat") == HOST_MARK and STEP.fullmatch(event["name"])]
        starts = {mark.get("args", {}).get("External id", ("position", at)): mark["ts"] for at, mark in enumerate(marks)}
        bounds = [starts.get(step.mark.get("args", {}).get("External id", ("position", at))) for at, step in enumerate(trace.steps)]
        begin, after = bounds[first], bounds[last] if last < len(bounds) else None
        spans[False] = (begin if begin is not None else ALL, after if after is not None else ALL)
    result = []
    for event in trace.events:
        on_device = event.get("cat") in DEVICE or event.get("cat") == DEVICE_MARK
        low, high = spans[on_device]
        if low <= event["ts"] < high and (on_device or (event.get("cat") in HOST and lane(event) in trace.threads)):
            result.append(event)
    return result


def _left_out(host_us: float, device_us: float, on_device: bool) -> str:
    def rule(what: str, us: float) -> str:
        return "" if not us else f"all {what}" if us == ALL else f"{what} shorter than {us:,} us"

    parts = [rule("host events" if on_device else "operators", host_us), rule("device events", device_us) if on_device else ""]
    return " and ".join(part for part in parts if part)


def _packed(document: dict[str, Any], events: list[dict[str, Any]], notes: dict[int, Any], zero: float, facts: dict[str, Any]) -> bytes:
    lanes = {lane(event) for event in events}
    pids = {pid for pid, _ in lanes}
    named: dict[tuple[Any, ...], dict[str, Any]] = {}
    for event in document["traceEvents"]:
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_labels", "thread_name"):
            text = next(iter(event.get("args", {}).values()), "")
            where = (event.get("pid"), event.get("tid"))
            # A process can be named by its command line, which holds paths of the machine.
            if (where in lanes or (event["name"] != "thread_name" and where[0] in pids)) and isinstance(text, str) and "/" not in text:
                named[(event["name"], *where)] = {key: event[key] for key in ("ph", "name", "pid", "tid", "args") if key in event}
    lines = list(named.values())
    base = math.floor(zero)  # times are so large that their floats end at the nanosecond: first take off a whole number, exactly
    zero_ns = round((zero - base) * 1e3)
    for event in events:
        # Both ends on one grid of 10 ns: what was nested stays nested.
        start_ns = round((event["ts"] - base) * 1e3) - zero_ns
        start, end = start_ns // 10, (start_ns + round(event["dur"] * 1e3)) // 10
        line = {"ph": "X", "cat": event["cat"], "name": event["name"], "pid": event["pid"], "tid": event["tid"],
                "ts": start / 100, "dur": (end - start) / 100}
        lines.append({**line, "args": notes[id(event)]} if id(event) in notes else line)
    devices = [{key: one[key] for key in ("id", "name", "totalGlobalMem", "numSms") if key in one} for one in document.get("deviceProperties", [])]
    result = {"schemaVersion": document.get("schemaVersion", 1), "displayTimeUnit": "ms", "vllm_version": document.get("vllm_version"),
              "deviceProperties": devices, "otherData": {"excerpt": "some whole steps of a trace of the torch profiler", **facts},
              "traceEvents": lines}
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as stream:
        stream.write(json.dumps(result, separators=(",", ":"), allow_nan=False).encode())
    return packed.getvalue()
