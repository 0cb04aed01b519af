"""One look inside the engine: a bounded profiler trace, and what its steps and operators say.

What:   `profiler_config` and `Profiler` make a vLLM server write a torch trace of a stretch of its work; `excerpt` cuts
        that to some whole steps; `steps`, `operators` and `words` read a trace, raw or cut.
Why:    a latency says that something took long, a trace says what. A raw trace grows with every operator; a page needs a
        dozen steps of it, in a file that any trace viewer (Perfetto, chrome://tracing) opens.
Use:    profiler = Profiler(base_url, folder); await profiler.start(); ...; await profiler.stop()
        raw = profiler.result();  excerpt(raw, target);  steps(target);  operators(target);  words(target)
Not:    latencies. The profiler slows the engine, unevenly: steps of one trace compare with one another only.
        What a step is stands in `trace_file`, families of operators in `trace_families`, figures in `trace_figures`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path
from typing import Any

import aiohttp
import pandas as pd

from .trace_excerpt import LEFT_OUT, excerpt
from .trace_families import FAMILIES, NO_OPERATOR, family
from .trace_file import busy_us, inside, is_whole, lane, opened, union

__all__ = ["DECODE", "MIXED", "PREFILL", "Profiler", "excerpt", "families", "kinds", "operators", "profiler_config", "steps", "words"]

CALL_S = 120.0  # start and stop: stopping writes the trace, a few seconds for a few hundred steps
DECODE, MIXED, PREFILL = "decode only", "decode and prefill", "prefill only"  # kinds of steps, in this order


# --- making a trace ---------------------------------------------------------------------------------------------------


def profiler_config(folder: Path) -> dict[str, Any]:
    """The value of vLLM's flag `profiler-config` (the same fields in 0.18 to 0.32); traces go to `folder`.

    No stacks, because they multiply size and cost; no trace of the API server, which would not stop with the engine's; no table of
    totals on the device, which makes stopping slow. `max_iterations` would bound the trace, but in some versions a profile that it
    ended can never be started again; `excerpt` bounds it instead.
    """
    return {
        "profiler": "torch", "torch_profiler_dir": str(Path(folder).absolute()), "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": True, "torch_profiler_dump_cuda_time_total": False, "ignore_frontend": True,
    }


class Profiler:
    """Starts and stops the profiler of a running server, and finds the trace it wrote into `folder`.

    Nothing here raises because of the server: a point is worth more than its trace. `problem` says in words why there is no trace.
    """

    def __init__(self, base_url: str, folder: Path):
        self.base_url, self.folder = base_url.rstrip("/"), Path(folder)
        self.problem: str | None = "no profile was started"
        self._before: set[Path] = set()
        self._started = False

    async def start(self) -> None:
        """Begin to profile. A server without a profiler sets `problem`."""
        self.problem, self._before = None, set(self._files())
        self._started = await self._call("start_profile")

    async def stop(self) -> None:
        """End the profile; returns when the server says that the trace is written. Does nothing unless `start` succeeded."""
        if self._started:
            self._started = False
            await self._call("stop_profile")

    def result(self, timeout_s: float = 60.0) -> Path | None:
        """The newest trace written since `start` (of the first worker), complete to its end; else null, and `problem` says why.

        Blocks for at most `timeout_s` seconds.
        """
        deadline, path = time.monotonic() + timeout_s, None
        while self.problem is None:
            path = _newest([path for path in self._files() if path not in self._before])
            if path and is_whole(path):
                return path
            if time.monotonic() >= deadline:
                self.problem = "the trace was not complete in time" if path else "the server wrote no trace"
            else:
                time.sleep(0.1)
        return None

    async def _call(self, name: str) -> bool:
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S)) as session, \
                    session.post(f"{self.base_url}/{name}") as answer:
                if answer.status == 404:
                    self.problem = "the server has no profiler: it was started without profiler-config"
                elif answer.status >= 400:
                    self.problem = f"the server answered {name} with status {answer.status}"
        except TimeoutError:
            self.problem = f"the server did not answer {name} within {CALL_S:g} s"
        except aiohttp.ClientError as error:
            self.problem = f"{name} failed: {type(error).__name__}"
        return self.problem is None

    def _files(self) -> list[Path]:
        # The API server's own trace has no steps.
        return [path for path in self.folder.glob("*.pt.trace.json*") if "async_llm" not in path.name.lower()]


def _newest(paths: list[Path]) -> Path | None:
    """Every worker of a tensor-parallel engine writes a trace; all do the same steps, so the first one's is enough."""
    first = [path for path in paths if re.search(r"rank[-_]?0(?!\d)", path.name)]
    return max(first or paths, key=lambda path: path.stat().st_mtime_ns, default=None)


# --- questions --------------------------------------------------------------------------------------------------------


def steps(path: Path) -> pd.DataFrame:
    """One row a step of a trace, raw or cut, by time; WallError for a file that is not such a trace.

    step (counted from the start of the raw trace), start_ms (from the first row), duration_ms, context_requests, context_tokens,
    generation_requests, generation_tokens (see `trace_file`), gap_before_ms (from the end of the step before; null for the first
    row), busy_ms, busy_share (0 to 1). Busy is the union of the intervals of kernels and copies on the device inside the step;
    on a CPU, of the operators of the engine's thread, which leaves the time in Python between operators.
    """
    trace = opened(path)
    work, rows, before = trace.work(), [], None
    for step in trace.steps:
        duration, busy = (step.end - step.start) / 1e3, busy_us(step, work) / 1e3
        rows.append({
            "step": step.number, "start_ms": (step.start - trace.steps[0].start) / 1e3, "duration_ms": duration,
            **dict(zip(("context_requests", "context_tokens", "generation_requests", "generation_tokens"), step.said, strict=True)),
            "gap_before_ms": (step.start - before.end) / 1e3 if before and before.number == step.number - 1 else None,
            "busy_ms": busy, "busy_share": busy / duration if duration else None,
        })
        before = step
    frame = pd.DataFrame(rows)
    return frame.astype({name: float for name in ("gap_before_ms", "busy_ms", "busy_share")}).round(6)


def operators(path: Path, step: int | Iterable[int] | None = None) -> pd.DataFrame:
    """Self time by name inside the steps (all, one number, or several), longest first: name, family, calls, self_ms, share.

    Self time is the event's duration without that of the operators that it calls on the same thread; kernels call none. `share`
    is of the steps' whole time. The row `trace_families.NO_OPERATOR` holds the rest (calls: null): waiting, Python between
    operators, and events that the excerpt left out because they are short. Kernels on several streams can overlap; then the
    shares add up to more than 1. ValueError for a step that the trace does not hold.
    """
    trace = opened(path)
    wanted = None if step is None else {step} if isinstance(step, Integral) else set(step)
    chosen = [one for one in trace.steps if wanted is None or one.number in wanted]
    if not chosen or (wanted and len(chosen) < len(wanted)):
        raise ValueError(f"the trace holds steps {trace.steps[0].number} to {trace.steps[-1].number}")
    work, calls, self_us, rest = trace.work(), {}, {}, 0.0
    for one in chosen:
        within = list(inside(work, one.start, one.end))
        rest += one.end - one.start - union(within, one.start, one.end)
        for event, own in zip(within, _self_us(within, nested=not trace.on_device), strict=True):
            name = event["name"]
            calls[name], self_us[name] = calls.get(name, 0) + 1, self_us.get(name, 0.0) + own
    whole = sum(one.end - one.start for one in chosen)
    rows = [{"name": name, "family": family(name), "calls": calls[name], "self_ms": own / 1e3, "share": own / whole if whole else None}
            for name, own in self_us.items()]
    rows.append({"name": NO_OPERATOR, "family": NO_OPERATOR, "calls": None, "self_ms": rest / 1e3, "share": rest / whole if whole else None})
    frame = pd.DataFrame(rows).astype({"calls": "Int64"}).sort_values(["self_ms", "name"], ascending=[False, True], ignore_index=True)
    return frame.round({"self_ms": 6, "share": 6})


def _self_us(events: list[dict[str, Any]], nested: bool) -> list[float]:
    own = [event["dur"] for event in events]
    if not nested:
        return own
    open_calls: dict[tuple[Any, Any], list[tuple[float, int]]] = {}
    for at, event in enumerate(events):
        stack = open_calls.setdefault(lane(event), [])
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        if stack:
            own[stack[-1][1]] -= min(event["ts"] + event["dur"], stack[-1][0]) - event["ts"]
        stack.append((event["ts"] + event["dur"], at))
    return [max(0.0, value) for value in own]


# --- kinds of steps, and words ----------------------------------------------------------------------------------------


def kinds(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of `steps` by what the step did (`DECODE`, `MIXED`, `PREFILL`), without kinds that do not occur."""
    reads, writes = frame["context_tokens"] > 0, frame["generation_requests"] > 0
    parts = {DECODE: frame[~reads], MIXED: frame[reads & writes], PREFILL: frame[reads & ~writes]}
    return {kind: part for kind, part in parts.items() if len(part)}


def families(path: Path) -> pd.DataFrame:
    """One row a kind of steps and family that occurs in the trace: kind, family, steps, step_ms (mean), self_ms (mean a step), share."""
    rows = []
    for kind, part in kinds(steps(path)).items():
        found = operators(path, part["step"]).groupby("family")["self_ms"].sum()
        whole = part["duration_ms"].sum()
        rows += [{"kind": kind, "family": name, "steps": len(part), "step_ms": whole / len(part), "self_ms": found.get(name, 0.0) / len(part),
                  "share": found.get(name, 0.0) / whole if whole else None} for name in (*FAMILIES, NO_OPERATOR)]
    frame = pd.DataFrame(rows)
    occurs = frame.groupby("family")["self_ms"].transform("max") > 0
    return frame[occurs].reset_index(drop=True)


def words(path: Path) -> str:
    """What the steps of a trace took and did, in some sentences that hold whichever way it came out. Ranges, no percentiles."""
    other, frame, shares = opened(path).document.get("otherData", {}), steps(path), families(path)
    found = kinds(frame)
    said = []
    if DECODE in found:
        usual = found[DECODE]["generation_requests"].value_counts().sort_index().idxmax()
        same = found[DECODE][found[DECODE]["generation_requests"] == usual]
        running = _plural(usual, "running request")
        if len(same) == len(frame):
            said.append(f"each had {running} and took {_range(same)}")
        elif len(same) == 1:
            said.append(f"a step with {running} took {_range(same)}")
        else:
            said.append(f"{len(same)} steps with {running} took {_range(same)} each")
    if MIXED in found:
        said.append(_reading(found[MIXED], "that also read"))
    if PREFILL in found:
        said.append(_reading(found[PREFILL], "that only read"))
    whole = "this excerpt" if "steps_kept" in other else "this trace"
    sentences = [f"In {whole} of {_plural(len(frame), 'step')}, {'; '.join(said)}."]
    if MIXED not in found and PREFILL not in found:
        sentences.append("No step read a prompt.")
    gaps = frame["gap_before_ms"].dropna()
    if len(gaps):
        sentences.append(f"Between the end of a step and the start of the next lay {_span(gaps)}.")
    for kind in found:
        largest = shares[shares["kind"] == kind].nlargest(3, "share")
        parts = ", ".join(f"{row.family} {100 * row.share:.0f} percent" for row in largest.itertuples())
        sentences.append(f"Where the time of a step went ({kind}): {parts}.")
    if other.get(LEFT_OUT):
        sentences.append(f"To stay small, the excerpt leaves out {other[LEFT_OUT]}; their time counts as {NO_OPERATOR}.")
    return " ".join(sentences)


def _reading(part: pd.DataFrame, what: str) -> str:
    tokens = part["context_tokens"]
    if len(part) == 1:
        return f"the step {what} {_plural(tokens.iloc[0], 'prompt token')} took {_range(part)}"
    return (f"{len(part)} steps {what} prompts took {_range(part)} each ({tokens.sum():,} prompt tokens in all, "
            f"at most {tokens.max():,} in one step)")


def _range(part: pd.DataFrame) -> str:
    return _span(part["duration_ms"])


def _span(values_ms: pd.Series) -> str:
    from .chart import digits  # here, because the measure process needs no plotly

    low, high = digits(values_ms.min()), digits(values_ms.max())
    return f"{low} ms" if low == high else f"{low} to {high} ms"


def _plural(count: int, thing: str) -> str:
    return f"{count:,} {thing}" + ("" if count == 1 else "s")
