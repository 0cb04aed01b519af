"""What Part 5 says of its records: numbers, sentences, tables, the author's figures, and that the post asks for nothing that does not exist."""

import json
import re

import pytest
import synthetic_quantization as toy
from bs4 import BeautifulSoup
from post_page import check_numbers, check_parameters
from test_quantization import SETS

from inference_wall import part_5, published, published_numbers, quantization_words, quantized_kernels, rigs, trace

NOTEBOOK = (rigs.root() / "notebooks" / "part_5.py").read_text(encoding="utf-8")
SENTENCES = ("variants", "width", "floor", "bound", "kernel", "line", "thesis", "bandwidth", "same", "bigger", "room", "quality", "relative",
             "formats", "limits")
TABLES = ("bytes", "kernels", "steps", "quality")


def words(name):
    """A sentence or table by its name, from whichever module writes it."""
    return getattr(quantization_words, name, None) or getattr(quantized_kernels, name)



@pytest.fixture(scope="module", params=SETS.values(), ids=SETS.keys())
def any_set(request):
    return request.param()


@pytest.fixture(scope="module")
def any_found(any_set):
    return part_5.look(any_set)


@pytest.fixture(scope="module")
def founds():
    return {name: part_5.look(make()) for name, make in SETS.items()}


@pytest.fixture(scope="module")
def numbers():
    return part_5.numbers(SETS["whole"]())


def value(entries, name):
    return entries[name]["value"]


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_every_null_has_a_reason_and_every_value_is_strict_json(any_set):
    entries = part_5.numbers(any_set)
    json.dumps(entries, allow_nan=False)
    for name, entry in entries.items():
        assert (entry["value"] is None) == bool(entry["reason"]), name
    assert {"headline", "headline_published", "shape", "shape_because"} <= set(entries)
    assert value(entries, "shape") in ("held", "moved", "did not hold", "not measured here") and value(entries, "shape_because")


def test_names_without_an_arm_do_not_depend_on_what_was_measured(any_set, numbers):
    def common(entries):
        return {name for name in entries if not name.startswith("arm_")}

    assert common(part_5.numbers(any_set)) == common(numbers)


def test_numbers_of_the_toy(numbers):
    assert value(numbers, "headline") == "60 % of the small model's tokens/s at 2.67 x the parameters"
    assert value(numbers, "headline_published") == "75 % of the 4B's tokens/s at 2.25 x the parameters"
    assert value(numbers, "shape") == "held"
    assert value(numbers, "base_fixed_ms") == pytest.approx(20) and value(numbers, "same_ratio_measured") == pytest.approx(0.5)
    assert value(numbers, "bigger_ratio_flood_percent") == pytest.approx(60) and value(numbers, "arm_int8_streamed_gb") == 0.25
    assert value(numbers, "same_perplexity_change_percent") == pytest.approx(5) and value(numbers, "base_perplexity") == 20
    assert value(numbers, "bigger_perplexity") is None and "random" in numbers["bigger_perplexity"]["reason"]
    assert value(numbers, "batches") == "1, 2, 4, 8" and value(numbers, "flood_num_prompts") == 48
    assert (value(numbers, "variants"), value(numbers, "variants_measured"), value(numbers, "variants_refused")) == (4, 3, 1)
    assert numbers["same_fixed_ms"]["run"].startswith("int8-") and numbers["base_fixed_ms"]["run"].startswith("float32-")


def test_without_a_bigger_model_the_headline_is_the_step_of_the_same_model():
    entries = part_5.numbers(toy.arm_set(toy.base(), toy.same()))
    assert value(entries, "headline") == "a step takes 0.52 x as long at 0.50 x the bytes (same model)"


def test_a_step_that_is_shorter_by_less_than_its_bytes_says_how_much_came():
    slow = toy.Run("int8", toy.SAME | {"fixed": 1_500}, flood=210.0)
    text = quantization_words.thesis_sentence(part_5.look(toy.arm_set(toy.base(), slow)))
    assert "50 percent shorter, and 25 percent came: 50 percent of the promise" in text
    assert "promise" not in quantization_words.thesis_sentence(part_5.look(toy.arm_set(toy.base(), toy.same(), toy.bigger())))


def test_the_words_of_random_weights_are_not_asked_about(founds):
    asked = founds["whole"]
    random = part_5.look(toy.arm_set(toy.Run("float32", toy.BASE, weights="random"), toy.Run("int8", toy.SAME, weights="random")))
    assert "plain text of" in quantization_words.quality_intro(asked) and quantization_words.quality_limits(asked)
    assert "random weights have no words to lose" in quantization_words.quality_intro(random) and not quantization_words.quality_limits(random)


def test_an_invalid_flood_gives_no_headline():
    bigger = toy.bigger()
    next(point for point in bigger.points if point["load"] == "flood")["validity"] = {"valid": False, "reasons": ["failures"]}
    entries = part_5.numbers(toy.arm_set(toy.base(), bigger))
    assert value(entries, "headline") is None and "not valid" in entries["headline"]["reason"]


# --- sentences and tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SENTENCES)
def test_every_sentence_is_whole_for_every_set(any_found, name):
    text = words(f"{name}_sentence")(any_found)
    assert not re.search(r"\b(nan|None|inf)\b", text), text
    assert text == "" or text.strip().endswith((".", "**", ")")), text
    assert text.count("**") % 2 == 0 and text.count("`") % 2 == 0


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_a_row_a_variant(any_found, name):
    found = any_found
    text = words(f"{name}_table")(found)
    rows = BeautifulSoup(text, "html.parser").select("tbody tr")
    assert len(rows) == len(found.rows) + (len(found.arms.refused) if name == "bytes" else 0)
    assert not re.search(r"\b(nan|None)\b", text)


@pytest.mark.parametrize(("name", "sentence", "said"), [
    ("whole", "variants", "`int4`: its kernel computes in 16 bits"), ("whole", "variants", "random weights of a real model's shape: `bigger-int8`"),
    ("whole", "width", "**4 bytes each**"), ("whole", "bound", "streamed bytes say **0.50**"), ("whole", "thesis", "**The thesis held here:**"),
    ("whole", "bandwidth", "`float32` 100 percent"), ("whole", "bandwidth", "stays about the same"), ("whole", "same", "0.52 times as long"),
    ("whole", "bigger", "**60 percent**"), ("whole", "bigger", "let one expect 95 percent, parameters 38"), ("whole", "room", "caches are equal"),
    ("whole", "quality", "+5.0 percent"), ("whole", "quality", "**No quality check for `bigger-int8`:**"), ("whole", "kernel", "That is no proof"),
    ("one variant", "thesis", "Not decided here"), ("one variant", "variants", "nothing to compare"), ("one variant", "bigger", "not measured"),
    ("base missing", "variants", "No record yet of `float32`"), ("no flood", "bigger", "cannot be compared"),
    ("no facts", "bandwidth", "cannot be said: the streamed bytes are not known"), ("all refused", "kernel", "no kernel to prove"),
    ("whole", "line", "Each line is firm"), ("whole", "floor", "at least **20.0 ms**"), ("whole", "thesis", "**0.50** by fixed terms"),
    ("uneven", "line", "no line to rely on for `float32` (the interval of its slope includes 0)"), ("uneven", "same", "a step of 16 sequences takes"),
    ("uneven", "thesis", "by steps of one sequence (no interval)"), ("uneven", "relative", "no line in the figure"),
    ("uneven", "line", "in `int8` 39.9 ms for 4, 55.9 ms for 2"), ("uneven", "thesis", "At a batch of 16: 1.00."),
    ("other threads", "floor", "told to compute with 1"), ("uneven", "bandwidth", "over the step of one sequence"),
    ("whole", "relative", "from the fits above"),
    ("hub", "floor", "is not known: the record did not see the model's files"), ("hub", "thesis", "Not decided here"),
    ("hub", "bound", "loaded bytes say **1.30**"), ("hub", "bigger", "has 1.30 times the loaded bytes of `float32`"),
    ("hub", "bandwidth", "cannot be said"), ("other threads", "floor", "25.0 GB/s with 2 threads"),
    ("other threads", "bandwidth", "with 2 threads, and the engine computes with 1"),
    ("other threads", "thesis", "Bytes came nearest, and that is no proof here"),
    ("no bandwidth", "floor", "bandwidth of this machine was not measured"),
])
def test_sentences_follow_the_data(founds, name, sentence, said):
    assert said in words(f"{sentence}_sentence")(founds[name])


def test_a_thesis_that_fails_is_said_to_fail():
    slow = toy.Run("int8", toy.SAME | {"fixed": 1_800}, flood=210.0)
    found = part_5.look(toy.arm_set(toy.base(), slow))
    assert "did not hold on this rig" in quantization_words.thesis_sentence(found)
    assert "waits for something else than bytes" in quantization_words.bandwidth_sentence(found)


def test_a_line_in_doubt_gives_no_cost_of_a_sequence():
    text = quantization_words.same_sentence(part_5.look(SETS["uneven"]()))
    assert "each further sequence" not in text
    entries = part_5.numbers(SETS["uneven"]())
    assert value(entries, "base_crossover") is None and "includes 0" in entries["base_crossover"]["reason"]
    assert value(entries, "same_ratio_slope") is None and "includes 0" in entries["same_ratio_slope"]["reason"]


@pytest.mark.parametrize(("bandwidth", "said", "not_said"), [
    (25.0, "what one expects of a step that waits for its bytes", "do not wait"),
    (125.0, "far below the bandwidth: these steps do not wait", "expects"),
    (38.0, "short of the bandwidth", "far below"),
])
def test_equal_shares_mean_waiting_only_where_they_are_near_the_bandwidth(bandwidth, said, not_said):
    found = part_5.look(toy.arm_set(toy.base(bandwidth=bandwidth), toy.same(bandwidth=bandwidth)))
    text = quantization_words.bandwidth_sentence(found)
    assert said in text and not_said not in text


def test_the_thesis_is_not_called_held_where_no_step_waits_for_bytes():
    found = part_5.look(toy.arm_set(toy.base(bandwidth=125.0), toy.same(bandwidth=125.0)))
    text = quantization_words.thesis_sentence(found)
    assert "uses 20 percent of the bandwidth, so it does not wait for bytes alone" in text and "held" not in text


def test_a_ratio_that_no_rule_predicts_is_not_given_to_parameters():
    found = part_5.look(toy.arm_set(toy.base(), toy.Run("int8", toy.SAME | {"fixed": 6_000})))
    text = quantization_words.thesis_sentence(found)
    assert "no rule comes within a factor of 1.5" in text and "parameters came nearer" not in text
    slow = {"bandwidth": 125.0}
    text = quantization_words.thesis_sentence(part_5.look(toy.arm_set(toy.base(**slow), toy.Run("int8", toy.SAME | {"fixed": 6_000}, **slow))))
    assert "did not hold" in text and "uses 20 percent of the bandwidth" in text


def test_bytes_that_are_not_known_are_said_and_never_a_number():
    entries = part_5.numbers(SETS["hub"]())
    for name in ("base_streamed_gb", "base_parameters_m", "bigger_ratio_streamed", "bigger_ratio_parameters", "base_of_bandwidth_percent"):
        assert value(entries, name) is None and entries[name]["reason"], name
    assert value(entries, "shape") == "not measured here" and "not both known" in value(entries, "shape_because")
    assert value(entries, "headline") == "60 % of the small model's tokens/s at 1.3 x the loaded bytes"
    texts = [words(f"{name}_sentence")(part_5.look(SETS["hub"]())) for name in SENTENCES]
    assert not [text for text in texts if re.search(r"(?<![\d.,])0(\.0+)? (GB|ms|percent|times)", text)]


def test_points_of_all_variants_are_counted_and_the_invalid_ones():
    arms = toy.arm_set(toy.base(), toy.same())
    total = sum(len(run.points) for run in arms.runs.values())
    arms.runs["int8"].points[1]["validity"] = {"valid": False, "reasons": ["failures"]}
    entries = part_5.numbers(arms)
    assert (value(entries, "points"), value(entries, "invalid_points")) == (total, 1)
    assert "{num}`part_5.here.invalid_points`" in NOTEBOOK


def test_sixteen_bits_need_no_warning():
    found = part_5.look(toy.arm_set(toy.base(dtype="float16")))
    assert quantization_words.width_sentence(found) == "The unquantized weights are `float16` here: **2 bytes each**."


def test_a_kernel_is_proven_by_log_and_trace(monkeypatch, tmp_path):
    import pandas as pd

    paths = {name: tmp_path / name for name in ("a", "b")}
    names = {paths["a"]: "aten::linear", paths["b"]: "_C::onednn_scaled_mm"}
    monkeypatch.setattr(trace, "operators", lambda path: pd.DataFrame([
        {"name": "attention", "family": "attention", "share": 0.5}, {"name": names[path], "family": "matrix multiplication", "share": 0.4}]))
    runs = []
    for run, path in ((toy.base(), paths["a"]), (toy.same(), paths["b"])):
        run.add({"load": "steps", "kind": "streams", "num_prompts": 1, "output_len": 40, "pass": "trace"}, toy.streams(1, 2_000, 100, 40))
        run._traces[run.points[-1]["point"]] = path
        runs.append(run)
    found = part_5.look(toy.arm_set(*runs))
    text = quantized_kernels.kernel_sentence(found)
    assert "the log names `CPUInt8`, and the trace spends its time in `_C::onednn_scaled_mm`, where the unquantized variant is in " in text
    assert "no proof" not in text and "40 %" in quantized_kernels.kernels_table(found)
    names[paths["b"]] = "aten::linear"
    assert "no proof" in quantized_kernels.kernel_sentence(found)


# --- the author's figures ---------------------------------------------------------------------------------------------


def test_published_numbers_have_places_and_collide_with_none():
    entries, others = part_5.published(), published_numbers.numbers()
    for name, entry in entries.items():
        assert entry["value"] is not None and entry["where"] and entry["source"] == "published", name
        assert f"published.a10g.{name}" not in others, name
    json.dumps(entries, allow_nan=False)


def test_published_ratios_by_hand():
    entries = part_5.published()
    expected = {"awq_loaded_ratio": 11.21 / 8.61, "awq_fixed_ratio": 19.32 / 19.08, "awq_flood_percent": 100 * 821.37 / 1092.09,
                "awq_slope_ratio": 395 / 313}
    assert {name: value(entries, name) for name in expected} == pytest.approx(expected)
    # 9B: 32 layers x 3 x 4096 x 12288 weights in 4 bits and 20 bits for each 128; the 2,084,327,424 others of the layers and the output head in 16
    mlp = 32 * 3 * 4096 * 12288
    streamed = mlp * (4 + 20 / 128) / 8 + 2 * (6_919_290_880 - mlp) + 2 * 248_320 * 4096
    assert value(entries, "awq_streamed_gb") == pytest.approx(streamed / 1e9) and value(entries, "fp16_streamed_gb") == pytest.approx(8.411152384)
    assert value(entries, "awq_text_gib") == pytest.approx((streamed + 2 * 248_320 * 4096) / 2**30)
    assert value(entries, "awq_text_gib") < value(entries, "awq_loaded_gib"), "the assumed text part must fit into what was loaded"
    assert value(entries, "awq_nearest") == "streamed bytes"


def test_the_published_pair_is_judged_like_ours():
    (pair,) = part_5.published_pairs().to_dict("records")
    assert pair["says"] == "bytes" and pair["parameters"] == 2.25 and pair["low"] is None


# --- the post ---------------------------------------------------------------------------------------------------------


def test_every_number_of_the_post_exists_and_fits_its_format(numbers):
    known = {f"part_5.here.{name}": entry for name, entry in numbers.items()}
    known |= {f"published.a10g.{name}": entry for name, entry in part_5.published().items()} | published.numbers()
    check_numbers(NOTEBOOK, known, more_than=25)


def test_the_parameters_of_the_post_are_those_of_the_protocol():
    check_parameters(NOTEBOOK, "part_5")


def test_no_measured_number_is_typed_into_the_prose():
    """Digits left in the prose are names (A10G, 4B, 9B, 16-bit, 8 bits) and the range of a whole number of 8 bits."""
    for part in NOTEBOOK.split("# %% [markdown]")[1:]:
        prose = re.sub(r"\{[\w-]+\}`[^`]+`|`[^`]+`", "", part.split("# %%")[0])
        prose = re.sub(r"A10G|\b[49]B\b|\b(16|4)-bit\b|\b[48]\s+#?\s*bits\b|-128 to 127|Part 5", "", prose)
        assert not re.search(r"\d", prose), prose


@pytest.mark.parametrize("name", ["whole", "one variant", "no steps", "uneven", "hub"])
def test_the_post_runs_from_top_to_bottom(name, monkeypatch):
    """Every code cell against a toy set; a trace is there for one variant only."""
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    monkeypatch.setattr("inference_wall.post.open_runs", lambda post, **parameters: SETS[name]())
    cells = re.split(r"^# %%.*$", NOTEBOOK, flags=re.M)
    heads = re.findall(r"^# %%.*$", NOTEBOOK, flags=re.M)
    code = "\n".join(cell for head, cell in zip(heads, cells[1:], strict=True) if "[markdown]" not in head)
    exec(compile(code, "part_5.py", "exec"), {})
    assert len(shown) > 15
