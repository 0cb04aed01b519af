"""A set of arms of Part 2 in the record's shape, laid out step by step by a toy engine: every number in it can be worked out by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from inference_wall.stats import LATENCIES

STEP, PER_TOKEN = 2_000, 50  # record units (10 us): a decode step of 20 ms, 0.5 ms for each prompt token


def load(step_tokens, *, victims=2, injected=1, prompt=1000, rounds=2, calm=20, tail=4, output=10_000, whole=False):
    """Requests and chunks of one point. Every step gives each victim a token; while prompts wait, a step also reads up to `step_tokens`
    of them (whole prompts only if `whole`), and takes `PER_TOKEN` longer for each. `calm` steps lie around each injection."""
    requests, chunks, now, number = [], [], 0, victims
    for victim in range(victims):
        requests.append({"request": victim, "role": "victim", "stream": victim, "round": None, "sent": 0, "first_token": STEP, "prompt_tokens": 8})

    def step(tokens=0):
        nonlocal now
        now += STEP + PER_TOKEN * tokens
        chunks.extend({"request": victim, "time": now, "tokens": 1} for victim in range(victims))

    for turn in range(rounds):
        for _ in range(calm):
            step()
        sent, waiting, firsts = now - STEP // 2, injected * prompt, []
        while waiting:
            size = min(waiting, step_tokens)
            step(size // prompt * prompt if whole else size)
            waiting -= size // prompt * prompt if whole else size
            firsts += [now] * (injected - len(firsts) - -(-waiting // prompt))
        for _ in range(tail):
            step()
        for first in firsts:
            requests.append({"request": number, "role": "injected", "stream": None, "round": turn, "sent": sent, "first_token": first,
                             "end": now, "prompt_tokens": prompt, "asked_prompt_tokens": prompt})
            number += 1
    for _ in range(calm):
        step()
    frame = pd.DataFrame(requests)
    frame = frame.reindex(columns=frame.columns.union(["end", "asked_prompt_tokens"], sort=False))
    frame["end"] = frame["end"].fillna(now).astype("int64")
    frame = frame.assign(intended=frame["sent"], outcome="completed", output_tokens=tail, error=None)
    return frame.astype({"round": "Int16", "stream": "Int16", "first_token": "Int64"}), pd.DataFrame(chunks)


class Run:
    """What the pages use of a record."""

    def __init__(self, arm, points, *, said, flags, not_testable=None, traces=None):
        self.arm, self.name, self.said, self.not_testable, self.is_local = arm, f"{arm}-00000000-20261130T000000Z", said, not_testable, False
        self.document = {"post": "part_2", "rig": {"name": "cpu", "title": "a toy engine"},
                         "flags": {"max-num-seqs": 16, "max-model-len": 2048, **flags},
                         "engine": {"version": "0.0", "table_exact": True}, "model": {"name": "toy", "weights": "checkpoint", "dtype": "float32"},
                         "parameters": {"scale": 1.0},
                         "starts": [], "started": "2026-11-30T00:00:00+00:00", "settings": {"rounds": 2}, "arm": arm}
        self.points, self._frames, self._traces = [], {}, traces or {}
        for number, (name, shape, frames) in enumerate(points):
            self.points.append({"point": number, "pass": "measured", "load": name, "kind": "victims", "victims": 2, "rounds": 2, "repeat": 0,
                                "injected_len": 1000, "injected_output_len": 4, "input_len": 8, "output_len": 64, **shape,
                                "validity": {"valid": True, "reasons": []}, "summary": {latency: {} for latency in LATENCIES}, "overhead_s": 0.1,
                                "request_rate": None, "rate_label": "inf", "num_prompts": 2, "start_s": 0.0, "end_s": 60.0})
            self._frames[number] = frames

    def frame(self, name, point=None):
        requests, chunks = self._frames[point]
        return {"requests": requests, "chunks": chunks, "metrics": pd.DataFrame({"time": []})}[name].assign(point=point)

    def trace(self, point) -> Path | None:
        return self._traces.get(point)


def run(arm, budget, whole=False, said=True, **shape):
    # The two victims take a token each of the budget.
    points = [(name, {"injected": copies}, load(budget - 2, injected=copies, whole=whole, **shape)) for name, copies in (("light", 1), ("heavy", 3))]
    facts = {"chunked_prefill": not whole, "max_num_batched_tokens": budget} if said else {}
    flags = {"max-num-batched-tokens": budget} | ({"no-enable-chunked-prefill": True} if arm == "unchunked" else {})
    return Run(arm, points, said=facts, flags=flags)


def refused(arm="unchunked", reason="the engine does not run this model without chunked prefill"):
    return Run(arm, [], said={}, flags={}, not_testable={"reason": reason, "remedy": "leave chunked prefill on"})


def arm_set(*runs, missing=()):
    """Like `arms.ArmSet`."""
    found = {each.arm: each for each in runs}
    testable = {name: each for name, each in found.items() if each.not_testable is None}
    first = next(iter(testable.values()), None)
    return SimpleNamespace(runs=found, testable=testable, missing=list(missing), names=[*found, *missing], rig="cpu", post="part_2", first=first,
                           refused={name: each.not_testable["reason"] for name, each in found.items() if each.not_testable})


def whole_set():
    """Budgets of 100, 250 and 500 tokens, and no chunking with room for one prompt of 1,000 in a step."""
    return arm_set(run("chunked-500", 500), run("chunked-250", 250), run("chunked-100", 100), run("unchunked", 2_000, whole=True))
