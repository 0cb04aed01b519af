"""A set of variants of Part 5 in the record's shape: step times lie exactly on a line, so that every ratio can be worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from inference_wall import stats
from inference_wall.arms import ArmSet

LENGTH, BATCHES = 32, (1, 2, 4, 8)
# The three variants of the toy: fixed term and slope in record units (10 us), bytes, parameters.
BASE = {"fixed": 2_000, "slope": 100, "loaded": 540_000_000, "streamed": 500_000_000, "parameters": 135_000_000}
SAME = {"fixed": 1_000, "slope": 100, "loaded": 300_000_000, "streamed": 250_000_000, "parameters": 135_000_000}
BIGGER = {"fixed": 2_200, "slope": 250, "loaded": 700_000_000, "streamed": 525_000_000, "parameters": 360_000_000}
# Steps of a real CPU run: no line. In record units by batch.
UNEVEN = {1: 4_690, 2: 5_590, 4: 3_990, 8: 5_250, 16: 7_160}
WORDS = [[number] * 32 for number in range(8)]  # continuations of the unquantized variant


def streams(batch, fixed, slope, tokens=48, start=100_000):
    """Equal streams at once: each step takes fixed + slope x batch."""
    step = fixed + slope * batch
    times = [start + 500 + step * number for number in range(tokens)]
    requests = pd.DataFrame([{"request": number, "intended": start, "sent": start, "first_token": times[0], "end": times[-1], "prompt_tokens": LENGTH,
                              "output_tokens": tokens, "asked_prompt_tokens": LENGTH, "asked_output_tokens": tokens, "outcome": "completed",
                              "error": None, "role": "stream"} for number in range(batch)])
    chunks = pd.DataFrame([(number, time, 1) for number in range(batch) for time in times], columns=["request", "time", "tokens"])
    return requests, chunks, None


class Run:
    """What the pages use of a record."""

    def __init__(self, arm, facts=None, *, flood=None, quality=None, weights="checkpoint", kernel=None, batches=BATCHES, bandwidth=True,
                 not_testable=None, traces=None, dtype="float32", steps=None, threads=None, engine_threads=None):
        self.arm, self.name, self.not_testable, self.is_local = arm, f"{arm}-00000000-20261130T000000Z", not_testable, False
        self.said = {"kv_cache_tokens": 23_296, "max_concurrency": 11.4}
        self.said |= {"quantization_kernel": kernel, "quantization": "compressed-tensors"} if kernel else {}
        start = {"server_start": 0, "server": {"ready_s": 20.0, "argv": ["vllm", "serve", "toy"], "said": self.said}}
        if bandwidth:
            start["bandwidth"] = {"copy_gb_s": 20.0, "read_gb_s": 25.0 if bandwidth is True else bandwidth, "threads": threads}
        if engine_threads:
            start["server"]["environment"] = {"OMP_NUM_THREADS": str(engine_threads)}
        known = facts and {"loaded_bytes": facts["loaded"], "streamed_bytes": facts["streamed"], "parameters": facts["parameters"], "reason": None,
                           "by_format": {dtype: {"parameters": facts["parameters"], "bytes": facts["loaded"]}}}
        self.document = {"post": "part_5", "rig": {"name": "cpu", "title": "a toy engine"}, "flags": {"max-num-seqs": 16, "max-model-len": 2048},
                         "engine": {"version": "0.0", "table_exact": True}, "starts": [start], "started": "2026-11-30T00:00:00+00:00",
                         "model": {"name": f"toy {arm}", "weights": weights, "dtype": dtype, "weight_bytes": 1, "config": None, "facts": known},
                         "settings": {"repeats": 1}, "parameters": {"scale": 1.0}, "arm": arm}
        self.points, self._frames, self._traces = [], {}, traces or {}
        for batch in steps or (batches if facts else ()):
            line = (steps[batch], 0) if steps else (facts["fixed"], facts["slope"])
            self.add({"load": "steps", "kind": "streams", "num_prompts": batch, "output_len": 48}, streams(batch, *line))
        if flood is not None:
            self.add({"load": "flood", "kind": "bench", "num_prompts": 48, "output_len": 32}, streams(2, 2_000, 100, 32),
                     steady_output_tok_s=flood, steady_req_s=flood / 32, running_mean=14.0)
        if quality is not None:
            self.add({"load": "quality", "kind": "quality", "num_prompts": 1, "output_len": 1, "bench": quality}, streams(1, 2_000, 100, 2))

    def add(self, shape, frames, **summary):
        number = len(self.points)
        self.points.append({"point": number, "arm": self.arm, "pass": "measured", "request_rate": None, "rate_label": "inf", "repeat": 0,
                            "input_len": LENGTH, "max_concurrency": None, "victims": 0, "injected": 0, "injected_len": 0, "rounds": 0,
                            "start_s": 1.0, "end_s": 2.0, "overhead_s": 0.1, "server_start": 0,
                            "summary": stats.point_summary(*frames, None, LENGTH, shape["output_len"]) | summary,
                            "validity": {"valid": True, "reasons": []}, **shape})
        self._frames[number] = dict(zip(("requests", "chunks", "metrics"), frames, strict=True))

    def frame(self, name, point=None):
        frame = self._frames[point][name]
        return (pd.DataFrame() if frame is None else frame).assign(point=point)

    def trace(self, point) -> Path | None:
        return self._traces.get(point)


def said(perplexity=20.0, continuations=None, text_tokens=700):
    """What the quality client says."""
    continuations = WORDS if continuations is None else continuations
    return {"text_tokens": text_tokens, "nll_nats": 2_000.0, "perplexity": perplexity, "continuations": continuations, "windows": 2,
            "continuation_tokens": sum(map(len, continuations)), "reason": None}


def base(**more):
    return Run("float32", BASE, **{"flood": 200.0, "quality": said(), **more})


def same(**more):
    # Two continuations part from the base's: one at its first token, one after 16.
    words = [[99] * 32, [1] * 16 + [99] * 16, *WORDS[2:]]
    return Run("int8", SAME, **{"flood": 300.0, "quality": said(21.0, words), "kernel": "CPUInt8", **more})


def bigger(**more):
    return Run("bigger-int8", BIGGER, **{"flood": 120.0, "weights": "random", "kernel": "CPUInt8", **more})


def refused(arm="int4", reason="its kernel computes in 16 bits"):
    return Run(arm, not_testable={"reason": reason, "remedy": "another dtype"})


def arm_set(*runs, names=None):
    return ArmSet("part_5", "cpu", names or [run.arm for run in runs], {run.arm: run for run in runs})
