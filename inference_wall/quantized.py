"""Fewer bits a weight: the quantized models of Part 5, made here, and how many bytes a model's weights are.

What:   `ensure(name)` returns a folder that vLLM serves (compressed-tensors format), made once from the embedded model and kept
        beside it in the cache. `weight_facts(folder, dtype)` counts what a server loads and what one step streams.
Why:    the CPU rig needs one model in two formats, and a bigger quantized model against a smaller unquantized one, without a
        model hub. The whole quantization is a dozen lines, so that a reader can see what was done to the weights.
Use:    folder = ensure("smollm2-135m-instruct-int8"); weight_facts(folder, "float32")["streamed_bytes"]
Not:    calibration (the scale of a row is its largest weight: methods that look at data lose less), other architectures than
        `llama`, what the server does with the folder (its log says which kernel it picked).

The bigger model has the shape of SmolLM2-360M (public config.json of HuggingFaceTB/SmolLM2-360M) and random weights from a
fixed seed: the right number of bytes in the right layout, and meaningless words.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import weights
from .errors import WallError
from .rigs import digest

if TYPE_CHECKING:
    import torch

RECIPE = 1  # raise it when the arithmetic or the layout changes: older folders are then made anew
SOURCE = "smollm2-135m-instruct"
SEED = 20261130
RANDOM_SCALE = 0.02  # the usual spread of freshly initialised weights; small enough that no activation overflows
SHAPE_360M = {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5,
              "head_dim": 64, "vocab_size": 49152}
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
KEPT = ("embed_tokens", "lm_head", "norm")  # stay as they are: a table that is looked up, the output head, and a few thousand numbers

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
INTEGERS = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}
SERVING_BYTES = {"float32": 4, "float16": 2, "half": 2, "bfloat16": 2, "float": 4}


@dataclass(frozen=True)
class Recipe:
    """How one model is made. `group` is the number of weights of a row that share a scale; None: the whole row."""

    bits: int
    group: int | None
    activation_bits: int | None
    shape: dict[str, int] | None  # None: the source's own shape and weights; else random weights of this shape
    space_bytes: int
    title: str


MODELS = {
    "smollm2-135m-instruct-int8": Recipe(8, None, 8, None, 500_000_000, "SmolLM2-135M-Instruct, W8A8"),
    "smollm2-135m-instruct-int4": Recipe(4, 64, None, None, 400_000_000, "SmolLM2-135M-Instruct, W4A16"),
    "smollm2-360m-shape-int8": Recipe(8, None, 8, SHAPE_360M, 1_000_000_000, "SmolLM2-360M's shape, W8A8"),
}


def ensure(name: str, cache: Path | None = None) -> Path:
    """The folder of a model in `MODELS`, made now if it is not there yet or if it is damaged (seconds, below 500 MB).

    Raises WallError when the name is unknown, the source model cannot be had, or the disk is full. Safe to call from several
    processes at once.
    """
    if name not in MODELS:
        raise WallError(f"no quantized model is called {name!r}", f"use one of: {', '.join(sorted(MODELS))}")
    recipe = MODELS[name]
    source = weights.ensure(SOURCE, cache)
    identity = digest({"recipe": RECIPE, "bits": recipe.bits, "group": recipe.group, "activation_bits": recipe.activation_bits, "shape": recipe.shape,
                       "seed": SEED if recipe.shape else None, "source": weights.MODELS[SOURCE].sha256})
    return weights.cached(name, identity, lambda folder: _write(source, recipe, folder), recipe.space_bytes, cache)


def _write(source: Path, recipe: Recipe, folder: Path) -> None:
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text()) | (recipe.shape or {})
    tensors = {}
    for name, values in _random_tensors(config) if recipe.shape else _stored_tensors(source):
        kept = values.ndim < 2 or any(part in name for part in KEPT)
        tensors |= {name: values} if kept else quantize(name, values, recipe.bits, recipe.group)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config | {"quantization_config": quantization_config(recipe)}, indent=2, allow_nan=False)
    (folder / "config.json").write_text(text + "\n")
    for file in COPIED:
        shutil.copyfile(source / file, folder / file)


def quantize(name: str, values: torch.Tensor, bits: int, group: int | None) -> dict[str, torch.Tensor]:
    """One weight matrix (rows = outputs, columns = inputs, floating) as the tensors of the compressed-tensors format.

    Symmetric: a weight becomes the whole number nearest to weight / scale, and the scale spreads the largest weight of its row
    or group over the 2**bits - 1 steps: scale = 2 * largest / (2**bits - 1). Eight bits are stored one a byte, with one float32
    scale a row; four bits are packed eight to an int32, lowest first, with one bfloat16 scale a group. A ValueError says that
    the columns do not fit the group.
    """
    import torch

    rows, columns = values.shape
    size = group or columns
    if columns % size or bits not in (4, 8):
        raise ValueError(f"cannot quantize {columns} columns in groups of {size} with {bits} bits")
    grouped = values.float().reshape(rows, columns // size, size)
    scale = grouped.abs().amax(2).clamp(min=torch.finfo(torch.float32).tiny) * 2 / (2**bits - 1)
    if group:
        scale = scale.to(torch.bfloat16)  # as it is stored, so that rounding it costs no accuracy beyond its own
    half = 2 ** (bits - 1)
    whole = (grouped / scale.float().unsqueeze(2)).round().clamp(-half, half - 1).reshape(rows, columns).to(torch.int8)
    stem = name.removesuffix(".weight")
    if bits == 8:
        return {f"{stem}.weight": whole, f"{stem}.weight_scale": scale}
    nibbles = (whole.to(torch.int64) + half).reshape(rows, columns // 8, 8)
    packed = (nibbles << (torch.arange(8) * bits)).sum(2)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return {f"{stem}.weight_packed": packed, f"{stem}.weight_scale": scale, f"{stem}.weight_shape": torch.tensor([rows, columns])}


def quantization_config(recipe: Recipe) -> dict[str, Any]:
    """What config.json must say, so that vLLM recognises the format."""
    layout = "int-quantized" if recipe.activation_bits else "pack-quantized"
    weight = {"num_bits": recipe.bits, "type": "int", "symmetric": True, "dynamic": False,
              "strategy": "group" if recipe.group else "channel", "group_size": recipe.group}
    activation = {"num_bits": recipe.activation_bits, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    scheme = {"targets": ["Linear"], "format": layout, "weights": weight, "output_activations": None,
              "input_activations": activation if recipe.activation_bits else None}
    return {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed", "ignore": ["lm_head"],
            "config_groups": {"group_0": scheme}}


def _stored_tensors(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(source / "model.safetensors", "pt") as file:
        for name in file.keys():
            yield name, file.get_tensor(name)


def _random_tensors(config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a llama model of that shape, bfloat16, one at a time; the same ones on each call."""
    import torch

    random = torch.Generator().manual_seed(SEED)
    for name, shape in tensor_shapes(config).items():
        values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * RANDOM_SCALE
        yield name, values.to(torch.bfloat16)


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each tensor of a llama model (`config`: its config.json)."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    layer = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
             "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
             "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{part}.weight": shape for part, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


# --- bytes ------------------------------------------------------------------------------------------------------------


def weight_facts(folder: Path | str, dtype: str) -> dict[str, Any]:
    """Bytes and parameters of the weights in a model folder, as a server of that `dtype` (such as "float32") holds them.

    `loaded_bytes`: all of them; a tied output head is the embedding table and counts once. `streamed_bytes`: what one step must
    read at least once, that is all layers and the output head. A table that is only looked up costs a few rows a step and is
    left out (untied models); a tied one is streamed as output head. `parameters`: weights, without the scales that
    quantization adds. `by_format`: {"int8": {"parameters", "bytes"}, ..., "scales": ...}. Floating tensors count at the
    serving dtype, scales and whole numbers as stored. Only file headers are read. A folder without safetensors gives
    null for each number and says so in `reason`; the bytes of a shape that the server fills with random weights are in `shapes.facts`.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files or dtype not in SERVING_BYTES:
        why = "the model folder holds no safetensors file" if not files else f"the width of dtype {dtype} is not known"
        return {"loaded_bytes": None, "streamed_bytes": None, "parameters": None, "by_format": {}, "reason": why}
    config = json.loads((Path(folder) / "config.json").read_text())
    tensors = {name: entry for file in files for name, entry in header(file).items()}
    tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False))
    if tied:
        tensors.pop("lm_head.weight", None)  # some checkpoints store the tied table twice; the server keeps one
    per_word = _packed_per_word(config)
    by_format: dict[str, dict[str, int]] = {}
    loaded = streamed = 0
    for name, entry in tensors.items():
        kind, parameters, size = _tensor_facts(name, entry, dtype, per_word)
        total = by_format.setdefault(kind, {"parameters": 0, "bytes": 0})
        total["parameters"] += parameters
        total["bytes"] += size
        loaded += size
        streamed += size if tied or "embed_tokens" not in name else 0
    return {"loaded_bytes": loaded, "streamed_bytes": streamed, "parameters": sum(total["parameters"] for total in by_format.values()),
            "by_format": by_format, "reason": None}


def header(file: Path) -> dict[str, dict[str, Any]]:
    """Name -> {"dtype", "shape", "data_offsets"} of each tensor of a safetensors file. WallError when it is none."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            entries = json.loads(stream.read(length))
    except (OSError, ValueError, struct.error, MemoryError, OverflowError) as problem:
        raise WallError(f"{file.name} is not a safetensors file: {problem}", "make or download the model folder again") from problem
    entries.pop("__metadata__", None)
    return entries


def _packed_per_word(config: dict[str, Any]) -> int:
    """How many weights one int32 of a packed tensor holds."""
    method = config.get("quantization_config", {})
    bits = method.get("bits") or next((group["weights"]["num_bits"] for group in method.get("config_groups", {}).values()), 32)
    return 32 // int(bits)


def _tensor_facts(name: str, entry: dict[str, Any], dtype: str, per_word: int) -> tuple[str, int, int]:
    """(format, parameters, bytes) of one tensor."""
    stored, count = entry["dtype"], math.prod(entry["shape"])
    width = FLOATS.get(stored) or INTEGERS.get(stored)
    if width is None:
        raise WallError(f"tensor {name} has the type {stored}, which is not known here", "use a model in safetensors with a common type")
    last = name.rsplit(".", 1)[-1]
    if last in ("weight_scale", "weight_zero_point", "weight_shape", "input_scale", "scales", "qzeros", "g_idx"):
        return "scales", 0, count * width
    if last in ("weight_packed", "qweight"):
        return f"int{32 // per_word}", count * per_word, count * width
    if stored in FLOATS:
        return dtype, count, count * SERVING_BYTES[dtype]
    return ("fp8" if stored.startswith("F8") else f"int{8 * width}"), count, count * width


if __name__ == "__main__":
    for each in MODELS:
        print(ensure(each))
