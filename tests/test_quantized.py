"""Quantization against arithmetic done by hand and against the library that vLLM reads the format with; bytes of a folder."""

import importlib.util
import json
import struct

import pytest

from inference_wall import quantized, weights
from inference_wall.errors import WallError

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

CONFIG = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
          "vocab_size": 24, "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A tiny llama folder in place of the embedded model."""
    folder = tmp_path / "source"
    folder.mkdir()
    random = torch.Generator().manual_seed(1)
    save_file({name: torch.randn(shape, generator=random).to(torch.bfloat16) for name, shape in quantized.tensor_shapes(CONFIG).items()},
              folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in quantized.COPIED:
        (folder / name).write_text(name)
    monkeypatch.setattr(weights, "ensure", lambda name, cache=None: folder)
    for name, recipe in (("tiny-int8", quantized.Recipe(8, None, 8, None, 1000, "")), ("tiny-int4", quantized.Recipe(4, 8, None, None, 1000, "")),
                         ("tiny-shape", quantized.Recipe(8, None, 8, {"hidden_size": 16, "num_attention_heads": 4}, 1000, ""))):
        monkeypatch.setitem(quantized.MODELS, name, recipe)
    return folder


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def test_eight_bits_by_hand():
    found = quantized.quantize("a.weight", torch.tensor([[-1.0, 2.0, 0.5], [0.0, 0.0, 0.0]]), 8, None)
    # largest 2: scale 4 / 255; -1 / scale = -63.75, 2 / scale = 127.5 (clamped to 127), 0.5 / scale = 31.875
    assert found["a.weight"].tolist() == [[-64, 127, 32], [0, 0, 0]] and found["a.weight"].dtype == torch.int8
    assert found["a.weight_scale"][0].item() == pytest.approx(4 / 255) and found["a.weight_scale"].shape == (2, 1)


def test_four_bits_are_packed_lowest_first():
    row = torch.tensor([[-7.5, 7.5, 0.0, 1.0, 2.0, 3.0, -1.0, -2.0]])
    found = quantized.quantize("a.weight", row, 4, 8)
    # scale 15 / 15 = 1; -7.5 to even -8, 7.5 clamped to 7; stored with 8 added
    nibbles = [0, 15, 8, 9, 10, 11, 7, 6]
    word = sum(nibble << (4 * place) for place, nibble in enumerate(nibbles))
    assert found["a.weight_packed"].tolist() == [[word - 2**32 if word >= 2**31 else word]] and found["a.weight_packed"].dtype == torch.int32
    assert found["a.weight_scale"].tolist() == [[1.0]] and found["a.weight_scale"].dtype == torch.bfloat16
    assert found["a.weight_shape"].tolist() == [1, 8]


def test_a_group_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="12 columns in groups of 8"):
        quantized.quantize("a.weight", torch.ones(2, 12), 4, 8)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_library_reads_back_what_was_meant(bits):
    """compressed-tensors, with which vLLM reads the format, must come to values within half a step of the weights."""
    if not importlib.util.find_spec("compressed_tensors"):
        pytest.skip("compressed-tensors is not installed")
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    values = torch.randn(6, 128, generator=torch.Generator().manual_seed(2))
    found = quantized.quantize("a.weight", values, bits, 64 if bits == 4 else None)
    whole = unpack_from_int32(found["a.weight_packed"], 4, torch.Size((6, 128))) if bits == 4 else found["a.weight"]
    scale = found["a.weight_scale"].float().repeat_interleave(64 if bits == 4 else 128, dim=1)
    # Half a step, and for the largest weight of a group what rounding its scale to 16 bits adds.
    assert ((whole.float() * scale - values).abs() <= scale * (0.5 + (8 * 2**-8 if bits == 4 else 0.001))).all()


# --- folders ----------------------------------------------------------------------------------------------------------


def test_the_folder_holds_everything_and_quantizes_only_the_layers(source, tmp_path):
    folder = quantized.ensure("tiny-int8", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16 and "model.embed_tokens.weight_scale" not in tensors
    assert tensors["model.layers.0.input_layernorm.weight"].dtype == torch.bfloat16
    assert sum(name.endswith("weight_scale") for name in tensors) == 7
    config = json.loads((folder / "config.json").read_text())
    assert config["hidden_size"] == 8 and config["quantization_config"]["ignore"] == ["lm_head"]
    assert config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["dynamic"] is True
    assert all((folder / name).read_text() == name for name in quantized.COPIED)


def test_four_bit_weights_keep_their_activations(source, tmp_path):
    config = json.loads((quantized.ensure("tiny-int4", tmp_path) / "config.json").read_text())["quantization_config"]
    assert config["format"] == "pack-quantized" and config["config_groups"]["group_0"]["input_activations"] is None


def test_random_weights_have_the_shape_and_are_the_same_each_time(source, tmp_path):
    first = load_file(quantized.ensure("tiny-shape", tmp_path / "a") / "model.safetensors")
    second = load_file(quantized.ensure("tiny-shape", tmp_path / "b") / "model.safetensors")
    assert first["model.layers.0.self_attn.q_proj.weight"].shape == (16, 16) and first["model.embed_tokens.weight"].shape == (24, 16)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["model.norm.weight"].float().unique().tolist() == [1.0]


def test_the_second_call_makes_nothing(source, tmp_path, monkeypatch):
    folder = quantized.ensure("tiny-int8", tmp_path)
    monkeypatch.setattr(quantized, "_write", lambda *_: pytest.fail("made again"))
    assert quantized.ensure("tiny-int8", tmp_path) == folder == tmp_path / "models" / "tiny-int8"


def test_a_damaged_or_older_folder_is_made_anew(source, tmp_path, monkeypatch):
    folder = quantized.ensure("tiny-int8", tmp_path)
    (folder / "config.json").write_text("{}")
    assert json.loads((quantized.ensure("tiny-int8", tmp_path) / "config.json").read_text())["hidden_size"] == 8
    made = []
    monkeypatch.setattr(quantized, "RECIPE", quantized.RECIPE + 1)
    monkeypatch.setattr(quantized, "_write", lambda source, recipe, folder: made.append((folder / "x").write_text("x")))
    quantized.ensure("tiny-int8", tmp_path)
    assert made and [path.name for path in (tmp_path / "models").iterdir()] == ["tiny-int8"]


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(WallError) as caught:
        quantized.ensure("int3", tmp_path)
    assert "smollm2-360m-shape-int8" in caught.value.remedy


def test_weights_hands_quantized_names_on(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(quantized, "ensure", lambda name, cache=None: asked.append((name, cache)) or tmp_path)
    assert weights.ensure("smollm2-135m-instruct-int8", tmp_path) == tmp_path and asked == [("smollm2-135m-instruct-int8", tmp_path)]


# --- bytes ------------------------------------------------------------------------------------------------------------


def headers(folder, tensors, **config):
    """A safetensors file of headers alone: {name: (dtype, shape)}."""
    folder.mkdir(exist_ok=True)
    entries = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in tensors.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


TENSORS = {"model.embed_tokens.weight": ("BF16", [100, 10]), "lm_head.weight": ("BF16", [100, 10]),
           "model.layers.0.mlp.up_proj.weight": ("I8", [20, 10]),
           "model.layers.0.mlp.up_proj.weight_scale": ("F32", [20, 1]), "model.norm.weight": ("BF16", [10])}


def test_an_untied_table_is_loaded_and_not_streamed(tmp_path):
    facts = quantized.weight_facts(headers(tmp_path / "m", TENSORS, tie_word_embeddings=False), "float32")
    # 2 tables x 1,000 x 4, 200 x 1, 20 scales x 4, norm 10 x 4
    assert facts["loaded_bytes"] == 8_000 + 200 + 80 + 40 and facts["streamed_bytes"] == facts["loaded_bytes"] - 4_000
    assert facts["parameters"] == 2_000 + 200 + 10 and facts["reason"] is None
    assert facts["by_format"] == {"float32": {"parameters": 2_010, "bytes": 8_040}, "int8": {"parameters": 200, "bytes": 200},
                                  "scales": {"parameters": 0, "bytes": 80}}


def test_a_tied_table_counts_once_and_is_streamed_as_head(tmp_path):
    facts = quantized.weight_facts(headers(tmp_path / "m", TENSORS, tie_word_embeddings=True), "float16")
    assert facts["loaded_bytes"] == facts["streamed_bytes"] == 2_000 + 200 + 80 + 20 and facts["parameters"] == 1_210


def test_packed_weights_count_as_what_they_hold(tmp_path):
    tensors = {"a.weight_packed": ("I32", [16, 8]), "a.weight_scale": ("BF16", [16, 1]), "a.weight_shape": ("I64", [2])}
    compressed = {"quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}}
    facts = quantized.weight_facts(headers(tmp_path / "m", tensors, **compressed), "float32")
    assert facts["parameters"] == 16 * 64 and facts["by_format"]["int4"] == {"parameters": 1_024, "bytes": 512}
    assert facts["loaded_bytes"] == 512 + 32 + 16
    awq = {"a.qweight": ("I32", [64, 2]), "a.scales": ("F16", [1, 16]), "a.qzeros": ("I32", [1, 2])}
    facts = quantized.weight_facts(headers(tmp_path / "awq", awq, quantization_config={"bits": 4}), "float16")
    assert facts["parameters"] == 64 * 16 and facts["loaded_bytes"] == 512 + 32 + 8


def test_a_folder_that_cannot_be_counted_says_why(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    facts = quantized.weight_facts(tmp_path, "float16")
    assert facts["loaded_bytes"] is None and "no safetensors" in facts["reason"]
    facts = quantized.weight_facts(headers(tmp_path / "m", TENSORS), None)
    assert facts["streamed_bytes"] is None and "None" in facts["reason"]
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(WallError, match=r"broken\.safetensors"):
        quantized.weight_facts(tmp_path, "float16")


def test_the_shape_has_about_360_million_parameters():
    shapes = quantized.tensor_shapes({**CONFIG, **quantized.SHAPE_360M})
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    # 32 x (2 x 960 x 960 + 2 x 320 x 960 + 3 x 2560 x 960 + 2 x 960) + 49,152 x 960 + 960
    assert count == 32 * (2 * 921_600 + 2 * 307_200 + 3 * 2_457_600 + 1_920) + 47_185_920 + 960 == 361_821_120
