"""What an operator or kernel is for: a family by its name.

What:   `family(name)` of a CPU operator or a GPU kernel; `FAMILIES`, their names in the order of a legend; `short(name)` for a page.
Why:    a step calls some fifty operators or kernels, under names that differ with the machine and the version. A reader asks what
        they are for: multiplying by the weights, attention, the rest.
Use:    family("_C::onednn_mm") -> "matrix multiplication"
Not:    times (`trace.operators`).

Names are matched in the order below, because a name can hold several words: `reshape_and_cache_flash_kernel` writes the KV
cache, and a CUTLASS kernel of flash attention is attention. A name that no pattern knows is "other".
"""

from __future__ import annotations

import re
from functools import cache

OTHER = "other"
NO_OPERATOR = "in no operator"

_PATTERNS = {
    "KV cache write": r"reshape_and_cache|kv_cache_update|slot_mapping|concat_and_cache|copy_blocks",
    # The layers of hybrid models that keep a state of fixed size instead of a KV cache.
    "recurrent state": r"delta_?rule|gated_delta|gdn|causal_conv1d|selective_scan|mamba|chunk_(fwd|scaled|local|state|cumsum|scan)"
                       r"|recompute_w_u|merge_16x16|solve_tril|l2norm|fused_recurrent",
    # Routing of a mixture of experts also takes the largest k of something, but inside the layers.
    "sampling": r"argmax|(?<!re)sampl|top_?[kp](?!.*gating)|multinomial|exponential|radix_?sort|::sort\b|penalt|rejection|aten::_?(log_)?softmax",
    # With rotary: turning queries and keys by their position is part of attention.
    "attention": r"attention|attn|flash|fmha|paged|rotary|scheduler_metadata",
    # A fused kernel of torch's compiler lists what it fuses, and may end on the name of the product that it feeds.
    "matrix multiplication": r"^(?!triton_(?:poi|red|per)_fused).*(?:gemm|gemv|matmul|(^|::|_)b?mm\b|addmm|::linear\b|nvjet|cublas|cutlass|splitk"
                             r"|marlin|awq|gptq|machete|wna16|scaled_mm|fused_moe|triton_tem_)",
    # A CPU runs a normalisation as its single steps: squares, mean, inverse root, product.
    "normalisation and activation": r"norm|silu|gelu|relu|sigmoid|act_and_mul|functor_?add|mulfunctor"
                                    r"|^aten::(pow|mean|sum|div|rsqrt|mul|add|sub)_?$|^triton_(poi|red|per)_fused.*(rsqrt|mul|add|pow|mean)",
}
FAMILIES = ("matrix multiplication", "attention", "normalisation and activation", "sampling", "KV cache write", "recurrent state", OTHER)
# What runs a kernel, as against what it does: of no interest in a short name.
_WRAPPERS = re.compile(r"^(cutlass|cute|cub|thrust)::")
_COMPILED = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _PATTERNS.items()}


@cache
def family(name: str) -> str:
    """One of `FAMILIES` for the name of a CPU operator (`aten::mm`) or of a GPU kernel; `NO_OPERATOR` is its own."""
    if name == NO_OPERATOR:
        return NO_OPERATOR
    return next((found for found, pattern in _COMPILED.items() if pattern.search(name)), OTHER)


@cache
def short(name: str) -> str:
    """The name of a kernel without its template arguments: `void cutlass::device_kernel<... machete::MacheteCollectiveMma<...> ...>(...)` becomes
    `machete::MacheteCollectiveMma (in cutlass::device_kernel)`. Other names stay."""
    if "<" not in name:
        return name
    outer = name.partition("<")[0].removeprefix("void ").strip()
    if not _WRAPPERS.match(outer):
        return outer
    inner = next((word for word in re.findall(r"[A-Za-z_][\w:]*(?=<)", name.partition("<")[2]) if not _WRAPPERS.match(word)), None)
    return f"{inner} (in {outer})" if inner else outer
