"""Shapes: model folders without weights, and how many bytes such a model loads, streams and keeps for each request.

What:   `ensure(name)` makes a folder with the configuration of a Qwen3.5 text model and a synthetic tokenizer; vLLM fills the shape with
        random weights (`--load-format dummy`). `facts(name)` counts its bytes from the shape alone.
Why:    a card without a way to a model hub can still be measured: how long a step takes depends on how many bytes go through which
        kernels, not on what they mean. Such a record says nothing about words.
Use:    folder = ensure("qwen3.5-27b"); facts("qwen3.5-27b")["streamed_bytes"];  python -m inference_wall.shapes qwen3.5-4b
Not:    real weights (`weights`), fewer bits made from them (`quantized`), the vision part, multi-token prediction.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import math
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import weights
from .errors import WallError
from .rigs import GIB, digest

RECIPE = 1  # raise it when the tokenizer changes: older folders are then made anew
SPACE_BYTES = 50_000_000  # a folder has 9 MB; an old one may still be there

# What all sizes have in common.
VOCABULARY = 248_320
HEAD_DIM = 256
INTERVAL = 4  # three linear-attention layers, then one of full attention
KEY_HEADS, LINEAR_DIM, CONV_KERNEL = 16, 128, 4
STATE_BYTES = 4  # a value of the recurrent state: float32, as `mamba_ssm_dtype` says
AWQ_BITS, AWQ_GROUP = 4, 128
AWQ_GROUP_BITS = 16 + 16  # a group shares a scale and a zero point, which the kernel Machete holds scaled, so in 16 bits too (Marlin: in 4)
NOT_QUANTIZED = ("visual", "lm_head", "linear_attn", "self_attn", "embed_tokens")  # what remains is the MLP

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|endoftext|>")
VISION_START, VISION_END, IMAGE, VIDEO, END = range(VOCABULARY - len(SPECIAL), VOCABULARY)


@dataclass(frozen=True)
class Shape:
    """The text part of a Qwen3.5 model: widths in values, heads and layers as counts. `mlp_bits`: 16, or 4 for the AWQ form."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    value_heads: int  # of a linear-attention layer
    tied: bool  # the output head is the embedding table
    key_heads: int = KEY_HEADS
    mlp_bits: int = 16

    @property
    def layer_types(self) -> list[str]:
        return ["full_attention" if number % INTERVAL == INTERVAL - 1 else "linear_attention" for number in range(self.layers)]

    @property
    def channels(self) -> int:
        """What the short convolution of a linear-attention layer sees: queries, keys and values."""
        return (2 * self.key_heads + self.value_heads) * LINEAR_DIM


# From the config.json (text_config) of Qwen/Qwen3.5-4B, -9B and -27B. An AWQ form has 4 bits in its MLP alone: that comes near the size of
# the published QuantTrio/Qwen3.5-9B-AWQ, while 4 bits in every linear layer would be far smaller.
# 0.8B: scripts/models/qwen3.5-0.8B.sh of THUDM/slime (its head is tied: unlike the 27B's script it does not untie it); the heads of its
# linear-attention layers: config.json of oopere/Qwen3.5-0.65B-Base-Rearchitected, which has the same widths and fewer layers.
SHAPES = {
    "qwen3.5-tiny": Shape(256, 512, 4, 2, 1, 4, tied=True, key_heads=2),  # no model: the smallest that has every kind of layer
    "qwen3.5-0.8b": Shape(1024, 3584, 24, 8, 2, 16, tied=True),
    "qwen3.5-4b": Shape(2560, 9216, 32, 16, 4, 32, tied=True),
    "qwen3.5-9b": Shape(4096, 12288, 32, 16, 4, 32, tied=False),
    "qwen3.5-9b-awq": Shape(4096, 12288, 32, 16, 4, 32, tied=False, mlp_bits=AWQ_BITS),
    "qwen3.5-27b": Shape(5120, 17408, 64, 24, 4, 48, tied=False),
    "qwen3.5-27b-awq": Shape(5120, 17408, 64, 24, 4, 48, tied=False, mlp_bits=AWQ_BITS),
}


def shape(name: str) -> Shape:
    """The shape of that name; an unknown one is a WallError that names the nearest."""
    if name not in SHAPES:
        close = difflib.get_close_matches(str(name).lower(), SHAPES, n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise WallError(f"no shape is called {name!r}", f"{hint}known: {', '.join(SHAPES)}")
    return SHAPES[name]


def ensure(name: str, cache: Path | None = None) -> Path:
    """The folder of a shape, made now if it is not there yet or if it is damaged (2 s, 9 MB). The same shape gives the same bytes.

    `cache` is the folder that holds `models/` (default: `weights.cache_folder()`). Raises WallError when the name is unknown or the disk
    is full. Safe to call from several processes at once.
    """
    files = {"config.json": config(shape(name)), **PROCESSORS}
    return weights.cached(name, digest({"recipe": RECIPE, "files": files}), lambda folder: _write(folder, files), SPACE_BYTES, cache)


def _write(folder: Path, files: dict[str, Any]) -> None:
    for file, content in {**files, **tokenizer()}.items():
        indent = None if file == "tokenizer.json" else 1
        (folder / file).write_text(json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def config(of: Shape) -> dict[str, Any]:
    """The content of config.json. Multi-token prediction is off; the vision part is a stub that `--language-model-only` never builds."""
    rotary = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10_000_000,
              "partial_rotary_factor": 0.25}
    text = {
        "model_type": "qwen3_5_text", "dtype": "bfloat16", "vocab_size": VOCABULARY, "hidden_size": of.hidden, "intermediate_size": of.intermediate,
        "num_hidden_layers": of.layers, "layer_types": of.layer_types, "full_attention_interval": INTERVAL, "hidden_act": "silu",
        "num_attention_heads": of.heads, "num_key_value_heads": of.kv_heads, "head_dim": HEAD_DIM, "attn_output_gate": True,
        "attention_bias": False, "attention_dropout": 0.0, "linear_num_key_heads": of.key_heads, "linear_num_value_heads": of.value_heads,
        "linear_key_head_dim": LINEAR_DIM, "linear_value_head_dim": LINEAR_DIM, "linear_conv_kernel_dim": CONV_KERNEL,
        "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 0, "max_position_embeddings": 262_144, "partial_rotary_factor": 0.25,
        "rope_parameters": rotary, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": of.tied, "use_cache": True,
        "bos_token_id": None, "eos_token_id": END, "pad_token_id": None,
    }
    vision = {"model_type": "qwen3_5", "depth": 2, "hidden_size": 256, "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "intermediate_size": 512,
              "num_heads": 4, "num_position_embeddings": 2304, "out_hidden_size": of.hidden, "patch_size": 16, "spatial_merge_size": 2,
              "temporal_patch_size": 2, "deepstack_visual_indexes": []}
    awq = {"quant_method": "awq", "version": "gemm", "bits": AWQ_BITS, "group_size": AWQ_GROUP, "zero_point": True,
           "modules_to_not_convert": list(NOT_QUANTIZED)}
    # Without a version transformers 5.19 warns of a tokenizer that is wrong in another family of models.
    return {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "transformers_version": "5.17.0",
            "tie_word_embeddings": of.tied,
            "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END, "image_token_id": IMAGE, "video_token_id": VIDEO,
            "text_config": text, "vision_config": vision, **({"quantization_config": awq} if of.mlp_bits == AWQ_BITS else {})}


# The engine loads these beside the tokenizer for every model of this class, whether pictures will come or not.
PROCESSORS = {
    "preprocessor_config.json": {
        "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2,
        "merge_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    "video_preprocessor_config.json": {
        "processor_class": "Qwen3VLProcessor", "video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 16, "temporal_patch_size": 2,
        "merge_size": 2, "size": {"shortest_edge": 4_096, "longest_edge": 25_165_824}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
}  # fmt: skip


# --- the tokenizer ------------------------------------------------------------------------------------------------------


def tokenizer() -> dict[str, dict[str, Any]]:
    """Content of tokenizer.json and tokenizer_config.json: `VOCABULARY` entries, each made-up word one token.

    `vllm bench serve` draws consecutive token ids, turns them into text and the text into ids again, and a prompt has the length asked
    for only where that gives the same ids. So a word is a space and four letters, `AbCd`, and reads back as itself whatever stands
    beside it. Before the words come printable ASCII, so that any English text has tokens, and the halves that words are made of; those
    read back as themselves in the order of their ids.

    It is a byte-level BPE although a list of words would be shorter: transformers 5.19 rebuilds the tokenizer of this kind of model as
    `Qwen3_5Tokenizer`, from vocabulary and merges alone, and with a plain list of words every prompt would then be empty.
    """
    letters = [chr(code) for code in range(33, 127)]
    pairs = [(first, second) for first in string.ascii_uppercase for second in string.ascii_lowercase]
    halves = ["".join(pair) for pair in pairs]
    starts = [(SPACE, half) for half in halves]
    count = VOCABULARY - len(SPECIAL) - 1 - len(letters) - len(pairs) - len(starts)
    words = list(itertools.islice(((SPACE + start, end) for start in halves for end in halves), count))
    # Upper case before lower case: a pair cannot be read across the border of two. The rank of a merge is its place here.
    merges = [*pairs, *starts, *words]
    entries = [SPACE, *letters, *("".join(parts) for parts in merges)]
    added = [{"id": place, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for place, token in enumerate(SPECIAL, VISION_START)]
    split = {"type": "Split", "pattern": {"Regex": PIECES}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False,
             "byte_fallback": False, "vocab": {token: place for place, token in enumerate(entries)}, "merges": [" ".join(parts) for parts in merges]}
    names = dict(zip(("vision_bos_token", "vision_eos_token", "image_token", "video_token"), SPECIAL, strict=False))
    return {
        "tokenizer.json": {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": {"type": "NFC"},
                           "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}, "post_processor": None,
                           "decoder": {**level, "add_prefix_space": True}, "model": model},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 262_144, "clean_up_tokenization_spaces": False,
                                  "eos_token": SPECIAL[-1], "pad_token": SPECIAL[-1], **names, "extra_special_tokens": names},
    }


SPACE = "\u0120"  # how byte-level BPE writes a space
# How text falls into pieces before the merges: the rule of the family's own tokenizer, which is a parameter like the others.
PIECES = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


# --- bytes ------------------------------------------------------------------------------------------------------------


def tensors(of: Shape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each weight, before any quantization: the modules of `Qwen3_5ForCausalLM` in transformers."""
    hidden, wide, narrow, values = of.hidden, of.heads * HEAD_DIM, of.kv_heads * HEAD_DIM, of.value_heads * LINEAR_DIM
    attention = {
        # The queries' projection also makes the output gate.
        "full_attention": {"self_attn.q_proj": (2 * wide, hidden), "self_attn.k_proj": (narrow, hidden), "self_attn.v_proj": (narrow, hidden),
                           "self_attn.o_proj": (hidden, wide), "self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)},
        # Queries, keys and values; the output gate; two small gates for each value head.
        "linear_attention": {"linear_attn.in_proj_qkv": (of.channels, hidden), "linear_attn.in_proj_z": (values, hidden),
                             "linear_attn.in_proj_b": (of.value_heads, hidden), "linear_attn.in_proj_a": (of.value_heads, hidden),
                             "linear_attn.conv1d": (of.channels, 1, CONV_KERNEL), "linear_attn.A_log": (of.value_heads,),
                             "linear_attn.dt_bias": (of.value_heads,), "linear_attn.norm": (LINEAR_DIM,), "linear_attn.out_proj": (hidden, values)}}
    common = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "mlp.gate_proj": (of.intermediate, hidden),
              "mlp.up_proj": (of.intermediate, hidden), "mlp.down_proj": (hidden, of.intermediate)}
    found: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCABULARY, hidden), "norm": (hidden,)}
    for number, kind in enumerate(of.layer_types):
        found |= {f"layers.{number}.{part}": size for part, size in (attention[kind] | common).items()}
    return found if of.tied else found | {"lm_head": (VOCABULARY, hidden)}


def facts(name: str, dtype_bytes: int = 2) -> dict[str, Any]:
    """Bytes of a shape, served with `dtype_bytes` for each floating-point value. Unknown name: WallError.

    With the keys of `quantized.weight_facts`: `parameters`; `loaded_bytes`, all weights; `streamed_bytes`, what one decode step must
    read of them: all layers and the output head, and not a table that is only looked up; `by_format` ({"16-bit": {"parameters",
    "bytes"}, ...}); `reason` (null). 4-bit weights bring 32 bits for each group of 128, a scale and a scaled zero point: so vLLM's
    `MacheteLinearKernel` holds AWQ, which it takes on Hopper cards. Buffers that the server makes for itself are not counted.

    For a sequence, from the shapes in vLLM's `MambaStateShapeCalculator.gated_delta_net_state_shape` and `MambaStateDtypeCalculator`:

        state_bytes_per_sequence = linear layers x value heads x key size x value size x 4      (recurrent state, float32)
        conv_bytes_per_sequence  = linear layers x (kernel - 1) x (2 x keys + values) x dtype   (kept inputs of the convolution)
        kv_bytes_per_token       = 2 x full-attention layers x KV heads x head size x dtype     (a key and a value)
    """
    of = shape(name)
    by_format: dict[str, dict[str, int]] = {}
    loaded = streamed = parameters = 0

    def note(kind: str, count: int, size: int) -> None:
        entry = by_format.setdefault(kind, {"parameters": 0, "bytes": 0})
        entry["parameters"] += count
        entry["bytes"] += size

    for tensor, dimensions in tensors(of).items():
        count = math.prod(dimensions)
        if ".mlp." in tensor and of.mlp_bits < 16:
            size, extra = count * of.mlp_bits // 8, count // AWQ_GROUP * AWQ_GROUP_BITS // 8
            note(f"int{of.mlp_bits}", count, size)
            note("scales", 0, extra)
        else:
            size, extra = count * dtype_bytes, 0
            note(f"{8 * dtype_bytes}-bit", count, size)
        parameters += count
        loaded += size + extra
        streamed += size + extra if of.tied or tensor != "embed_tokens" else 0
    full = of.layer_types.count("full_attention")
    linear = of.layers - full
    return {"loaded_bytes": loaded, "streamed_bytes": streamed, "parameters": parameters, "by_format": by_format, "reason": None,
            "state_bytes_per_sequence": linear * of.value_heads * LINEAR_DIM * LINEAR_DIM * STATE_BYTES,
            "conv_bytes_per_sequence": linear * (CONV_KERNEL - 1) * of.channels * dtype_bytes,
            "kv_bytes_per_token": 2 * full * of.kv_heads * HEAD_DIM * dtype_bytes}


def main(arguments: list[str] | None = None) -> int:
    """Make the folders that the command line names and print their facts; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m inference_wall.shapes", description="Make model folders without weights and print their bytes.",
                                     epilog=f"Shapes: {', '.join(SHAPES)}.")
    parser.add_argument("names", nargs="+", metavar="NAME", help="a shape; several are made one after the other")
    try:
        for name in parser.parse_args(arguments).names:
            folder, found = ensure(name), facts(name)
            print(f"{name}: {folder}")
            print(f"  {found['parameters'] / 1e9:.2f} billion weights: {found['loaded_bytes'] / GIB:.2f} GiB loaded, "
                  f"{found['streamed_bytes'] / 1e9:.2f} GB streamed in a decode step")
            print(f"  a sequence keeps {found['state_bytes_per_sequence'] / 1e6:.1f} MB of state, "
                  f"and {found['kv_bytes_per_token'] / 1e3:.1f} kB of KV cache for each token")
    except WallError as problem:
        parser.exit(problem.exit_code, f"{problem}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
