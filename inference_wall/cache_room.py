"""How many requests an arm's cache holds, worked out from the model's layers and put beside what the server printed.

What:   `state_blocks` reads from a model's configuration how many blocks each request takes besides those of its tokens; `room` makes an
        arm's `Cache` of that and compares it with the server's own number; `cache_of` is the cache alone.
Why:    a formula with one number fitted to the server's answer agrees with that answer whatever it is. Only a number that comes from
        somewhere else can be checked against it.
Use:    found = room(arms["natural"]); found.cache.room(2048); found.formula, found.printed, found.agrees
Not:    who is let in and put out (`block_rules`), bytes and memory (`bytes_per_step`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from .block_rules import Cache
from .records import Run

# Keys of a configuration that speak of layers without a cache that grows to the end of the text.
OTHER_LAYERS = re.compile(r"mamba|ssm|linear_|recurrent|hybrid|full_attention_interval|attn_layer|block_types|sliding_window")
ROUNDING = 0.0051  # the log prints two digits behind the point


@dataclass(frozen=True)
class Room:
    """An arm's cache and the longest request that its server takes. What is not known is None; `reason` says why there is no cache."""

    cache: Cache | None
    reason: str
    length: int | None = None  # tokens of the longest request
    printed: float | None = None  # how many of them the server says fit
    from_layers: bool = False  # whether the blocks of state come from the model's configuration; else from `printed`
    layers_reason: str = ""  # why they do not

    @property
    def formula(self) -> float | None:
        """Requests of full length in the form in which the server prints them: over all blocks, the engine's own included, unrounded."""
        return (self.cache.blocks + 1) / self.cache.need(self.length) if self.cache and self.length else None

    @property
    def fits(self) -> int | None:
        """Requests of full length by the room formula: over usable blocks, rounded down."""
        return self.cache.room(self.length) if self.cache and self.length else None

    @property
    def agrees(self) -> bool | None:
        """Whether formula and server say the same; None where one of them is not known, or the formula was fitted to the server."""
        if not self.from_layers or self.formula is None or self.printed is None:
            return None
        return abs(self.formula - self.printed) <= ROUNDING


def state_blocks(config: dict[str, Any] | None) -> tuple[int | None, str]:
    """Blocks that a request takes for its recurrent state: (blocks, "") or (None, reason). `config`: a Hugging Face configuration.

    vLLM makes groups of equally many layers, and every group draws blocks of its own from one pool. The full-attention layers are
    one group, which takes a block whenever its tokens fill one. The linear-attention layers are linear / full groups, and each takes
    one block for the whole request, as long as no prefixes are cached (`_get_kv_cache_groups_uniform_page_size`, vLLM 0.32.0).
    """
    if not config:
        return None, "the record does not hold the model's configuration"
    config = config.get("text_config") or config
    kinds = config.get("layer_types")
    if kinds:
        full, linear = (sum(kind == f"{name}_attention" for kind in kinds) for name in ("full", "linear"))
        others = sorted({str(kind) for kind in kinds} - {"full_attention", "linear_attention"})
        if others:
            return None, f"the model has layers of another kind ({', '.join(others)})"
        if linear and (not full or linear % full):
            return None, f"{linear} linear-attention layers do not make whole groups of {full}"
        return (linear // full if linear else 0), ""
    unused = {"sliding_window"} if config.get("use_sliding_window") is False else set()
    hints = sorted(name for name, value in config.items() if value and name not in unused and OTHER_LAYERS.search(name))
    if hints:
        return None, f"the model's configuration has {', '.join(hints[:3])} and does not list the kind of each layer"
    if not (config.get("num_hidden_layers") and config.get("num_attention_heads")):
        return None, "the model's configuration does not name its layers"
    return 0, ""


def room(run: Run) -> Room:
    """The cache of an arm. One block of the pool is the engine's own (it points at nothing) and holds no tokens."""
    said = run.said
    length, printed = said.get("max_concurrency_tokens") or said.get("max_model_len"), said.get("max_concurrency")
    lacking = [name for name in ("kv_cache_blocks", "block_size") if said.get(name) is None]
    if lacking:
        return Room(None, f"the server did not say its {' and '.join(lacking)}", length, printed)
    blocks, size = said["kv_cache_blocks"], said["block_size"]
    state, layers_reason = state_blocks(run.document["model"].get("config"))
    from_layers, reason = state is not None, ""
    if state is None:
        state, reason = _printed_state(blocks, size, length, printed)
    cache = None if state is None else Cache(blocks - 1, size, state)
    return Room(cache, reason, length, printed, from_layers, layers_reason)


def cache_of(run: Run) -> tuple[Cache | None, str]:
    """The cache of an arm: (cache, "") or (None, reason)."""
    found = room(run)
    return found.cache, found.reason


def _printed_state(blocks: int, size: int, length: int | None, printed: float | None) -> tuple[int | None, str]:
    """The blocks of state that make the server's own number come out: blocks / printed - ceil(length / size)."""
    if not printed or not length:
        return None, "the server did not say how many requests of full length fit"
    each = blocks / printed
    whole = round(each)
    # An error of `ROUNDING` in the printed number moves `each` by so much.
    if abs(each - whole) > 0.02 + ROUNDING * each / printed or whole < math.ceil(length / size):
        return None, (f"{blocks} blocks and a concurrency of {printed:g} give {each:.3g} blocks a request, which is not "
                      f"ceil({length} / {size}) and whole blocks of state")
    return whole - math.ceil(length / size), ""
