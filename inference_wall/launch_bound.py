"""Does the card wait for the host? A trace's steps: how long the card was busy in them, and what the engine's process did meanwhile.

What:   `busy(path)` gives length and busy time by kind of step, `host(path)` what the host launched for each step and its longest operator;
        `sentence(path)` says it in words, empty for a trace without a device.
Why:    a fast card can finish a kernel sooner than the host hands it the next one. Then a step lasts as long as the launching, however few
        tokens are in it, and neither the bytes nor the arithmetic of the card explain its time.
Use:    display(Markdown(sentence(run.trace(point))))
Not:    steps without a profiler (`reading_steps`), where the time went by family (`trace`).

A step that only writes has the same shape every time, so the engine records its launches once, as a CUDA graph, and replays them with one call.
A step that reads may have any number of tokens. Where no graph fits, the host launches each kernel by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from . import trace
from .chart import digits
from .trace_file import HOST_MARK, STEP, Trace, inside, lane, opened

LAUNCH = ("cudaLaunch", "cuLaunch")
GRAPH = "cudaGraphLaunch"
WAITS, WORKS = 0.5, 0.8  # share of a step in which the card is busy: below the first it mostly waits, from the second on it mostly works


def busy(path: Path) -> pd.DataFrame:
    """One row a kind of step, as in `trace.kinds`: kind, steps, tokens (of prompts), duration_ms and busy_ms (sums), share, share_low,
    share_high (0 to 1). Empty for a trace without a device: there the host computes, and does not wait for itself."""
    columns = ["kind", "steps", "tokens", "duration_ms", "busy_ms", "share", "share_low", "share_high"]
    if not opened(path).on_device:
        return pd.DataFrame(columns=columns)
    rows = [(kind, len(part), int(part["context_tokens"].sum()), part["duration_ms"].sum(), part["busy_ms"].sum(),
             part["busy_ms"].sum() / part["duration_ms"].sum(), part["busy_share"].min(), part["busy_share"].max())
            for kind, part in trace.kinds(trace.steps(path)).items()]
    return pd.DataFrame(rows, columns=columns)


def host(path: Path) -> pd.DataFrame:
    """What the engine's process did for each step, by its own marks: step, context_tokens, launches (of single kernels), graphs (replayed),
    operator (the outermost one with the most time), calls, operator_ms, host_ms (on the host's clock). Empty for a trace without a device or
    without the host's marks of the same steps; operator is null where the excerpt has left the host's events out."""
    found = opened(path)
    marks = [event for event in found.events if event.get("cat") == HOST_MARK and STEP.fullmatch(event["name"]) and lane(event) in found.threads]
    columns = ["step", "context_tokens", "launches", "graphs", "operator", "calls", "operator_ms", "host_ms"]
    if not found.on_device or [mark["name"] for mark in marks] != [step.name for step in found.steps]:
        return pd.DataFrame(columns=columns)
    rows = [(step.number, step.said[1], *_of_step(found, mark), mark["dur"] / 1e3) for step, mark in zip(found.steps, marks, strict=True)]
    return pd.DataFrame(rows, columns=columns)


def _of_step(found: Trace, mark: dict[str, Any]) -> tuple[int, int, str | None, int, float]:
    launches, graphs, reached, spent = 0, 0, 0.0, {}
    for event in inside(found.events, mark["ts"], mark["ts"] + mark["dur"]):
        if lane(event) != lane(mark):
            continue
        graphs += event["name"].startswith(GRAPH)
        launches += event["name"].startswith(LAUNCH)
        if event["cat"] == "cpu_op" and event["ts"] >= reached:  # outermost: not called by the one before
            calls, us = spent.get(event["name"], (0, 0.0))
            spent[event["name"]] = calls + 1, us + event["dur"]
            reached = event["ts"] + event["dur"]
    name = max(spent, key=lambda one: spent[one][1], default=None)
    calls, us = spent.get(name, (0, 0.0))
    return launches, graphs, name, calls, us / 1e3


def sentence(path: Path) -> str:
    """Whether the card waited for the host in this trace's steps, in words; empty for a trace without a device or without a reading step."""
    kinds = busy(path)
    reads = kinds[kinds["kind"] != trace.DECODE]
    if reads.empty:
        return ""
    row = reads.iloc[reads["tokens"].argmax()]
    which = "the step that also read" if row["steps"] == 1 else f"the {row['steps']} steps that also read"
    which = which.replace("also", "only") if row["kind"] == trace.PREFILL else which
    text = (f"Of {which} prompts, {digits(row['duration_ms'])} ms{'' if row['steps'] == 1 else ' together'}, the card was busy for "
            f"{digits(row['busy_ms'])} ms: {row['share']:.0%}. ")
    if row["share"] >= WORKS:
        text += "**Such a step lasts as long as the card works.**"
    elif row["share"] >= WAITS:
        text += "For the rest it waited for the engine's process to {term}`launch <launch>` the next {term}`kernel`."
    else:
        text += ("For the rest it waited for the engine's process to {term}`launch <launch>` the next {term}`kernel`: **the host decides how long "
                 "such a step takes, not the card.**")
    return " ".join(part for part in (text, _host_words(path, row["share"]), _decode_words(kinds)) if part)


def _host_words(path: Path, share: float) -> str:
    found = host(path)
    reads = found[found["context_tokens"] > 0]
    if reads.empty or share >= WORKS:
        return ""
    row = reads.iloc[reads["context_tokens"].argmax()]
    left_out = opened(path).document.get("otherData", {}).get("left_out")
    some = "at least " if left_out else ""
    launched = f"{some}{row['launches']:,} single launches" + (f" and {row['graphs']} replayed pieces" if row["graphs"] else "")
    text = f"For {'that step' if len(reads) == 1 else 'one of them'} the host made {launched}"
    if row["operator"]:
        calls = "1 call" if row["calls"] == 1 else f"{row['calls']} calls"
        text += (f"; of the {digits(row['host_ms'])} ms that it spent on it, {digits(row['operator_ms'])} went into {calls} of "
                 f"`{row['operator']}`")
    writes = found[found["context_tokens"] == 0]
    if len(writes) and (writes["graphs"] > 0).all() and not row["graphs"]:
        text += ". A step that only writes is one recorded graph (a {term}`CUDA graph`), replayed with a single call"
    return text + "."


def _decode_words(kinds: pd.DataFrame) -> str:
    writes = kinds[kinds["kind"] == trace.DECODE]
    if writes.empty:
        return ""
    low, high = writes.iloc[0]["share_low"], writes.iloc[0]["share_high"]
    span = f"{100 * low:.0f}" if f"{100 * low:.0f}" == f"{100 * high:.0f}" else f"{100 * low:.0f} to {100 * high:.0f}"
    return f"In steps that only write it was busy for {span} percent of the time."
