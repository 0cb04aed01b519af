"""A set of arms of Part 3 in the record's shape, laid out step by step by a toy engine: every number in it can be worked out by hand."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pandas as pd
from test_trace import event, step, write

from inference_wall import stats
from inference_wall.arms import ArmSet

FIXED, SLOPE, PROMPT = 2_000, 200, 800  # record units (10 us): 20 ms a step, 2 ms a sequence in it, 8 ms a prompt that it reads
LENGTH, ANSWER = 32, 32
ONE = ANSWER * (FIXED + SLOPE) + PROMPT  # a whole answer alone: 712 ms
WAVE_16 = ANSWER * (FIXED + 16 * SLOPE) + 16 * PROMPT  # sixteen at once: 1,792 ms


def serve(prompts, cap, answer=ANSWER, closed=None, start=100_000, slope=SLOPE, fixed=FIXED):
    """Requests, chunks and metrics of `prompts` requests at a cap: all at once, or `closed` at a time."""
    now, queue, running, sent, chunks, samples = start, [], {}, 0, [], [(start - 10, 0, 0)]
    rows, shown = {}, (0, 0)  # the gauges, as vLLM has them: refreshed when a step ends, so blind for what came in since

    def send(count):
        nonlocal sent
        for _ in range(min(count, prompts - sent)):
            rows[sent] = {"request": sent, "intended": now, "sent": now}
            queue.append(sent)
            sent += 1

    send(closed or prompts)
    while queue or running:
        new = 0
        while queue and len(running) < cap:
            running[queue.pop(0)] = answer
            new += 1
        step = fixed + slope * len(running) + PROMPT * new
        samples += [(now + step * part // 8, *shown) for part in range(9)]
        now += step
        done = 0
        for request in list(running):
            chunks.append({"request": request, "time": now, "tokens": 1})
            rows[request].setdefault("first_token", now)
            running[request] -= 1
            if not running[request]:
                del running[request]
                rows[request]["end"] = now
                done += 1
        shown = len(running), len(queue)
        if closed:
            send(done)
    samples.append((now + 10, 0, 0))
    requests = pd.DataFrame(rows.values()).assign(prompt_tokens=LENGTH, output_tokens=answer, asked_prompt_tokens=LENGTH, asked_output_tokens=answer,
                                                  outcome="completed", error=None, role="load")
    metrics = pd.DataFrame(samples, columns=["time", "running", "waiting"]).astype({"running": float, "waiting": float})
    return requests, pd.DataFrame(chunks), metrics


class Run:
    """What the pages use of a record."""

    def __init__(self, arm, cap, loads, *, not_testable=None, traces=None, config=None, bandwidth=True):
        self.arm, self.name, self.not_testable, self.is_local = arm, f"{arm}-00000000-20261130T000000Z", not_testable, False
        self.said = {"kv_cache_tokens": 23_296, "kv_cache_blocks": 182, "block_size": 128, "max_concurrency": 11.375, "max_concurrency_tokens": 2048}
        start = {"server_start": 0, "server": {"ready_s": 20.0, "argv": ["vllm", "serve", "toy", "--max-num-seqs", str(cap)], "said": self.said}}
        if bandwidth:
            start["bandwidth"] = {"copy_gb_s": 10.0, "read_gb_s": 8.0}
        self.document = {"post": "part_3", "rig": {"name": "cpu", "title": "a toy engine"}, "flags": {"max-num-seqs": cap, "max-model-len": 2048},
                         "engine": {"version": "0.0", "table_exact": True}, "starts": [start], "started": "2026-11-30T00:00:00+00:00",
                         "model": {"name": "toy", "weights": "checkpoint", "dtype": "float32", "weight_bytes": 160_000_000, "config": config},
                         "settings": {"repeats": 1}, "parameters": {"scale": 1.0}, "arm": arm}
        self.points, self._frames, self._traces = [], {}, traces or {}
        for number, (shape, frames) in enumerate(loads):
            self.add(number, shape, frames)

    def add(self, number, shape, frames):
        shape = {"pass": "measured", "kind": "bench", "max_concurrency": None, "repeat": 0, "output_len": ANSWER, **shape}
        summary = stats.point_summary(*frames, None, LENGTH, shape["output_len"])
        self.points.append({
            "point": number, "arm": self.arm, "request_rate": None, "rate_label": "inf", "num_prompts": len(frames[0]), "input_len": LENGTH,
            "start_s": 1.0, "end_s": 2.0, "overhead_s": 0.1, "server_start": 0, "victims": 0, "injected": 0, "injected_len": 0, "rounds": 0,
            "summary": summary, "validity": {"valid": True, "reasons": []}, **shape})
        self._frames[number] = dict(zip(("requests", "chunks", "metrics"), frames, strict=True))

    def frame(self, name, point=None):
        frame = self._frames[point][name]
        return (pd.DataFrame() if frame is None else frame).assign(point=point)

    def trace(self, point) -> Path | None:
        return self._traces.get(point)


SMOL = {"num_hidden_layers": 30, "num_key_value_heads": 3, "num_attention_heads": 9, "hidden_size": 576}


def flood(prompts, cap, **more):
    return {"load": "flood"}, serve(prompts, cap, **more)


def cap_1(**more):
    return Run("cap-1", 1, [flood(12, 1)], config=SMOL, **more)


def cap_16(batches=(1, 2, 4, 8, 16), concurrency=(1, 2, 4, 8, 16), slope=SLOPE, **more):
    """The largest cap, with its closed loops and its streams."""
    loads = [({"load": "flood", "pass": "cold"}, serve(8, 16)), flood(48, 16, slope=slope)]
    loads += [({"load": "closed", "max_concurrency": seats}, serve(max(12, 3 * seats), 16, closed=seats, slope=slope)) for seats in concurrency]
    loads += [({"load": "steps", "kind": "streams", "output_len": 48}, serve(batch, 16, 48, slope=slope)) for batch in batches]
    return Run("cap-16", 16, loads, config=SMOL, **more)


def bent():
    """The largest cap, with step times that a straight line does not fit: those of a real record, where four rows took less than one."""
    run = cap_16(batches=())
    for batch, length in ((1, 4_690), (2, 5_590), (4, 3_990), (8, 5_250), (16, 7_160)):
        number = len(run.points)
        frames = serve(batch, 16, 48, fixed=length, slope=0)
        run.add(number, {"load": "steps", "kind": "streams", "output_len": 48}, frames)
    return run


def card_trace(folder, batch, length_us, gap_us=1_000.0, state_us=0.0, steps=5):
    """A trace of a card: `steps` steps that only write, the first of them twice as long; the card multiplies half of the time and keeps a state."""
    events, now = [], 0.0
    for number in range(steps):
        length = length_us * (2 if number == 0 else 1)
        events += [step(now, length, generation=(batch, batch), cat="gpu_user_annotation", pid=0, tid=7),
                   event("void cutlass::gemm_bf16", now, length_us / 2, "kernel", pid=0, tid=7)]
        if state_us:
            events.append(event("fused_recurrent_gated_delta_rule_kernel", now + length_us / 2, state_us, "kernel", pid=0, tid=7))
        now += length + gap_us
    return write(Path(folder), events, name=f"batch-{batch}.pt.trace.json.gz")


def traced(run, **batches):
    """The same arm with a trace of a card for each batch: `traced(cap_16(), b16=(30_000.0, 5_000.0))`, step and state in us."""
    run.folder = tempfile.TemporaryDirectory()  # goes with the run
    for name, (length_us, state_us) in batches.items():
        batch, number = int(name.removeprefix("b")), len(run.points)
        run.add(number, {"load": "steps", "kind": "streams", "pass": "trace", "output_len": 48}, serve(batch, 16, 48))
        run._traces[number] = card_trace(run.folder.name, batch, length_us, state_us=state_us)
    return run


def held_up():
    """The largest cap, on a card whose steps of 16 take 30 ms while the client sees 52."""
    run = traced(cap_16(), b1=(40_000.0, 400.0), b16=(30_000.0, 5_000.0))
    run.document["model"] |= {"facts": {"state_bytes_per_sequence": 1_000_000, "conv_bytes_per_sequence": 250_000}, "weights": "random"}
    return run


def refused(arm="cap-16", reason="too many sequences for its state blocks"):
    return Run(arm, 16, [], not_testable={"reason": reason, "remedy": "a smaller cap"})


def arm_set(*runs, names=None):
    return ArmSet("part_3", "cpu", names or [run.arm for run in runs], {run.arm: run for run in runs})
