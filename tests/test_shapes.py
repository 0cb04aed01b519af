"""Shapes: bytes against the published model, transformers and what servers said; a tokenizer whose prompts have the length asked for."""

import json
import random
import subprocess
import sys
from dataclasses import asdict

import pytest

from inference_wall import bytes_per_step, jobs, plans, rigs, run_document, shapes, weights
from inference_wall.errors import WallError
from inference_wall.part_5 import SHAPE_9B

GIB = 2**30
NAMES = list(shapes.SHAPES)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(cache):
    return shapes.ensure("qwen3.5-tiny", cache)


# --- bytes --------------------------------------------------------------------------------------------------------------


# Worked out from the layers beforehand, and what a server printed after loading (vLLM 0.25.1, H200): buffers of its own come on top.
@pytest.mark.parametrize(("name", "loaded_gib", "printed_gib", "streamed_gb"), [
    ("qwen3.5-4b", 7.83, 7.99, 8.41), ("qwen3.5-9b", 16.68, None, 15.87), ("qwen3.5-27b", 50.10, 50.22, 51.25),
    ("qwen3.5-9b-awq", 10.07, 10.2, 8.78)])
def test_weights_are_those_worked_out_and_those_a_server_loaded(name, loaded_gib, printed_gib, streamed_gb):
    found = shapes.facts(name)
    assert found["loaded_bytes"] / GIB == pytest.approx(loaded_gib, abs=0.005)
    assert found["streamed_bytes"] / 1e9 == pytest.approx(streamed_gb, abs=0.005)
    if printed_gib:
        assert 0 < printed_gib - found["loaded_bytes"] / GIB < 0.2


@pytest.mark.parametrize(("name", "state_mb", "kv_kb"), [
    ("qwen3.5-4b", 50.3, 32.8), ("qwen3.5-9b", 50.3, 32.8), ("qwen3.5-9b-awq", 50.3, 32.8), ("qwen3.5-27b", 151.0, 65.5)])
def test_what_a_sequence_keeps(name, state_mb, kv_kb):
    found = shapes.facts(name)
    assert found["state_bytes_per_sequence"] / 1e6 == pytest.approx(state_mb, abs=0.05)
    assert found["kv_bytes_per_token"] / 1e3 == pytest.approx(kv_kb, abs=0.05)


def test_the_4b_is_the_published_one_by_the_books_other_count():
    step = bytes_per_step.step_bytes("Qwen/Qwen3.5-4B", 1, 1)
    found = shapes.facts("qwen3.5-4b")
    assert found["streamed_bytes"] == pytest.approx(step.weights, rel=1e-4)  # that count leaves out the small vectors
    assert 2 * found["state_bytes_per_sequence"] == step.state and found["kv_bytes_per_token"] == step.cache
    assert 2 * found["conv_bytes_per_sequence"] == step.convolution
    nine = asdict(shapes.SHAPES["qwen3.5-9b"])
    assert SHAPE_9B == {"hidden": nine["hidden"], "intermediate": nine["intermediate"], "tied_embeddings": nine["tied"]}


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("awq")])
def test_transformers_builds_exactly_these_parameters(name):
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    from transformers.models.qwen3_5 import Qwen3_5Config

    content = shapes.config(shapes.SHAPES[name])
    text = Qwen3_5Config(**{key: value for key, value in content.items() if key != "architectures"}).text_config
    with torch.device("meta"):
        model = modeling.Qwen3_5ForCausalLM(text)
    expected = {key.removeprefix("model.").removesuffix(".weight"): tuple(value.shape) for key, value in model.named_parameters()}
    assert shapes.tensors(shapes.SHAPES[name]) == expected
    assert shapes.facts(name)["parameters"] == sum(value.numel() for value in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_formats_add_up_and_a_table_that_is_looked_up_is_not_streamed(name):
    of, found = shapes.SHAPES[name], shapes.facts(name)
    assert sum(entry["bytes"] for entry in found["by_format"].values()) == found["loaded_bytes"]
    assert sum(entry["parameters"] for entry in found["by_format"].values()) == found["parameters"]
    assert found["loaded_bytes"] - found["streamed_bytes"] == (0 if of.tied else 2 * shapes.VOCABULARY * of.hidden)
    plain = shapes.facts(name.removesuffix("-awq"))
    assert found["parameters"] == plain["parameters"] and ("int4" in found["by_format"]) == (plain != found) == name.endswith("awq")
    assert shapes.facts(name, 4)["state_bytes_per_sequence"] == found["state_bytes_per_sequence"]  # float32 whatever the weights are


def test_awq_quantizes_the_mlp_and_nothing_else():
    for name in (name for name in NAMES if name.endswith("awq")):
        of = shapes.SHAPES[name]
        skipped = shapes.config(of)["quantization_config"]["modules_to_not_convert"]
        matrices = {key for key, size in shapes.tensors(of).items() if len(size) == 2}
        assert {key for key in matrices if not any(part in key for part in skipped)} == {key for key in matrices if ".mlp." in key}
        assert of.hidden % shapes.AWQ_GROUP == of.intermediate % shapes.AWQ_GROUP == 0
        assert shapes.facts(name)["by_format"]["int4"]["parameters"] == of.layers * 3 * of.hidden * of.intermediate


# --- the folder ---------------------------------------------------------------------------------------------------------


def test_the_same_shape_gives_the_same_bytes_and_the_second_call_writes_nothing(folder, cache, tmp_path):
    other = shapes.ensure("qwen3.5-tiny", tmp_path)
    assert {path.name: path.read_bytes() for path in other.iterdir()} == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert not list(folder.glob("*.safetensors"))
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    assert shapes.ensure("qwen3.5-tiny", cache) == folder == cache / "models" / "qwen3.5-tiny"
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before


def test_a_damaged_folder_and_one_of_another_shape_are_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "tokenizer", lambda: {"tokenizer.json": {}})
    folder = shapes.ensure("qwen3.5-tiny", tmp_path)
    content = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(b"{}")
    assert (shapes.ensure("qwen3.5-tiny", tmp_path) / "config.json").read_bytes() == content
    monkeypatch.setitem(shapes.SHAPES, "qwen3.5-tiny", shapes.SHAPES["qwen3.5-4b"])
    assert json.loads((shapes.ensure("qwen3.5-tiny", tmp_path) / "config.json").read_text())["text_config"]["hidden_size"] == 2560


@pytest.mark.parametrize("name", ["qwen3.5-4", "Qwen3.5-4B", "", "llama"])
def test_an_unknown_name_is_one_error_with_the_known_names(name, tmp_path):
    for ask in (lambda: shapes.ensure(name, tmp_path), lambda: shapes.facts(name)):
        with pytest.raises(WallError) as error:
            ask()
        assert "qwen3.5-27b-awq" in error.value.remedy and ("did you mean qwen3.5-4b" in error.value.remedy) == ("3.5" in name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_the_configuration_and_the_room_formula_too(name):
    pytest.importorskip("transformers.models.qwen3_5")
    from transformers.models.qwen3_5 import Qwen3_5Config

    from inference_wall.cache_room import state_blocks

    content = shapes.config(shapes.SHAPES[name])
    read = Qwen3_5Config(**{key: value for key, value in content.items() if key != "architectures"})
    assert read.text_config.layer_types == content["text_config"]["layer_types"] and read.text_config.eos_token_id == shapes.END
    assert state_blocks(content) == (3, "")


def test_the_command_line(cache, monkeypatch, capsys):
    monkeypatch.setenv("WALL_CACHE", str(cache))
    assert shapes.main(["qwen3.5-tiny"]) == 0
    assert str(cache) in capsys.readouterr().out
    with pytest.raises(SystemExit) as leaves:
        shapes.main(["qwen3.5-4"])
    assert leaves.value.code == 1 and "did you mean" in capsys.readouterr().err
    shown = subprocess.run([sys.executable, "-m", "inference_wall.shapes", "--help"], capture_output=True, text=True, check=True).stdout
    assert all(name in " ".join(shown.split()) for name in ("NAME", "qwen3.5-tiny", "qwen3.5-4b"))


# --- the tokenizer ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["as vLLM loads it", "from the file", "as the family's older class"])
def tokenizer(request, folder):
    """transformers 5.19 rebuilds it as the model's class from vocabulary and merges; other versions take the file as it is."""
    transformers = pytest.importorskip("transformers")
    classes = {"as vLLM loads it": "AutoTokenizer", "from the file": "PreTrainedTokenizerFast", "as the family's older class": "Qwen2Tokenizer"}
    return getattr(transformers, classes[request.param]).from_pretrained(folder)


def test_ids_are_those_of_the_configuration(tokenizer, folder):
    content = json.loads((folder / "config.json").read_text())
    assert len(tokenizer) == content["text_config"]["vocab_size"] == 248_320
    names = {"<|vision_start|>": "vision_start_token_id", "<|vision_end|>": "vision_end_token_id", "<|image_pad|>": "image_token_id",
             "<|video_pad|>": "video_token_id"}
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in names} == {token: content[key] for token, key in names.items()}
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == content["text_config"]["eos_token_id"]


def test_random_words_and_every_run_of_ids_read_back_as_themselves(tokenizer):
    draw = random.Random(1)
    words = range(2_000, 248_315)  # ASCII and the halves lie before them
    for _ in range(20):
        ids = draw.choices(words, k=500)
        assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    # As the benchmark draws: consecutive ids, round and round. All of the first 3,000, and across the end.
    for ids in (list(range(3_000)), [*range(248_000, 248_315), *range(2_000)]):
        assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids


@pytest.mark.parametrize("text", ["The capital of France is", "12345 apples, 6.7e8", "def f(x): return {x}"])
def test_english_has_tokens(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_random_prompts_of_vllm_have_exactly_the_length_asked_for(tokenizer):
    datasets = pytest.importorskip("vllm.benchmarks.datasets")
    for length in (1, 256, 5_408):
        found = datasets.RandomDataset(random_seed=length).sample(tokenizer, 20, input_len=length, output_len=8)
        assert [each.prompt_len for each in found] == [length] * 20
        assert [len(tokenizer.encode(each.prompt)) for each in found] == [length] * 20
        assert len({each.prompt for each in found}) == 20


# --- in a rig -----------------------------------------------------------------------------------------------------------


def prepared(monkeypatch, post, model, variants=()):
    """Jobs of a post on the CPU rig with another model table. No folder is made."""
    if jobs.installed() is None:
        pytest.skip("vLLM is not installed")
    monkeypatch.setattr(jobs, "model_folder", lambda rig, model: f"models/{model.get('shape') or model.get('embedded')}")
    rig = rigs.load_rig("cpu")
    rig.model.clear()
    rig.model.update(model)
    if variants:
        rig.posts["part_5"]["variants"] = list(variants)
    monkeypatch.setattr(rigs, "pick_rig", lambda name: rig)
    return jobs.prepare(post, "cpu", {})


TINY = {"name": "tiny", "shape": "qwen3.5-tiny", "dtype": "bfloat16", "served_name": "tiny"}
REAL = {"name": "real", "embedded": "smollm2-135m-instruct", "weights": "checkpoint", "dtype": "float32", "served_name": "real"}


@pytest.mark.parametrize("said", [{}, {"weights": "random"}])
def test_a_shape_is_random_whether_the_rig_says_so_or_not(monkeypatch, said):
    other = {"name": "other", "shape": "qwen3.5-9b-awq"}
    for job in prepared(monkeypatch, "part_5", TINY | said, [{"name": "base"}, other]):
        assert job.flags["load-format"] == "dummy" and job.model["weights"] == "random"
        assert {point.kind for point in job.plan()} == {"bench", "streams"}  # the words mean nothing: no quality
    assert job.model["shape"] == job.model["name"] == "qwen3.5-9b-awq"


def test_a_shape_and_another_source_replace_one_another(monkeypatch):
    base, variant = prepared(monkeypatch, "part_5", REAL, [{"name": "base"}, {"name": "shape", "shape": "qwen3.5-4b"}])
    assert "load-format" not in base.flags and any(point.kind == "quality" for point in base.plan())
    assert variant.flags["load-format"] == "dummy" and "embedded" not in variant.model and variant.model["name"] == "qwen3.5-4b"
    assert not any(point.kind == "quality" for point in variant.plan())
    _, back = prepared(monkeypatch, "part_5", TINY, [{"name": "base"}, {"name": "real", "embedded": REAL["embedded"], "weights": "checkpoint"}])
    assert "shape" not in back.model and "load-format" not in back.flags and any(point.kind == "quality" for point in back.plan())


def test_a_rigs_model_folder_is_the_shapes(cache, monkeypatch):
    monkeypatch.setenv("WALL_CACHE", str(cache))
    found = jobs.model_folder(rigs.load_rig("cpu"), TINY)
    assert found == str(cache / "models" / "qwen3.5-tiny") and jobs.config_digest(found)
    with pytest.raises(WallError, match=r"qwen3\.5-tin'"):
        jobs.model_folder(rigs.load_rig("cpu"), TINY | {"shape": "qwen3.5-tin"})


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4), (None, 2)])
def test_a_record_gets_the_facts_of_the_shape_with_the_keys_of_a_checkpoints(dtype, width, folder):
    found = run_document._weights(str(folder), TINY | {"dtype": dtype})
    assert found["facts"] == shapes.facts("qwen3.5-tiny", width) and found["weight_bytes"] == found["facts"]["loaded_bytes"]
    assert set(run_document.weight_facts(folder, "float32")) <= set(found["facts"])
    assert run_document._weights("Qwen/Qwen3.5-4B", {"hub": "Qwen/Qwen3.5-4B", "dtype": "float16"}) == {"facts": None, "weight_bytes": None}


def test_every_shape_that_a_rig_names_is_known():
    for name in rigs.rig_names():
        rig = rigs.load_rig(name)
        for table in (rig.model, *rig.posts.get("part_5", {}).get("variants", [])):
            assert "shape" not in table or table["shape"] in shapes.SHAPES, name
    assert not set(shapes.SHAPES) & set(weights.MODELS) and plans.Arm("a", model=TINY).model["shape"] in shapes.SHAPES
