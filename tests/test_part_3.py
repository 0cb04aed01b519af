"""What Part 3 says of its records: numbers, verdict, sentences, tables, and that the post asks for nothing that does not exist."""

import json
import re
from functools import cache

import pytest
import synthetic_cliff as toy
from bs4 import BeautifulSoup
from post_page import check_numbers, check_parameters

from inference_wall import cliff_figures, cliff_published, cliff_words, part_3, published, published_numbers, rigs
from inference_wall.chart import digits

NOTEBOOK = (rigs.root() / "notebooks" / "part_3.py").read_text(encoding="utf-8")
REQUIRED = ("headline", "headline_published", "shape", "shape_because")


def value(entries, name):
    return entries[name]["value"]


@pytest.fixture(scope="module")
def arms():
    return toy.arm_set(toy.cap_16(), toy.cap_1())


@pytest.fixture(scope="module")
def numbers(arms):
    return part_3.numbers(arms)


def without_configuration():
    """As on a rig whose model comes from a hub: the record does not hold its configuration."""
    arms = toy.arm_set(toy.cap_16(), toy.cap_1())
    for run in arms:
        run.document["model"]["config"] = None
    return arms


SETS = {
    "whole": lambda: toy.arm_set(toy.cap_16(), toy.cap_1()),
    "one cap refused": lambda: toy.arm_set(toy.refused(), toy.cap_1()),
    "one cap missing": lambda: toy.arm_set(toy.cap_16(), names=["cap-16", "cap-1"]),
    "two batches": lambda: toy.arm_set(toy.cap_16(batches=(1, 2)), toy.cap_1()),
    "no streams, no loops": lambda: toy.arm_set(toy.cap_16(batches=(), concurrency=()), toy.cap_1()),
    "no slope": lambda: toy.arm_set(toy.cap_16(slope=0), toy.cap_1()),
    "bent": lambda: toy.arm_set(toy.bent(), toy.cap_1()),
    "no configuration": lambda: without_configuration(),
    "held up": lambda: toy.arm_set(toy.held_up(), toy.cap_1()),
    "held up, one cap": lambda: toy.arm_set(toy.held_up(), names=["cap-16", "cap-4", "cap-1"]),
    "no bandwidth": lambda: toy.arm_set(toy.cap_16(bandwidth=False), toy.cap_1(bandwidth=False)),
}


@pytest.fixture(scope="module", params=SETS.values(), ids=SETS.keys())
def any_set(request):
    return request.param()


@pytest.fixture(scope="module")
def any_findings(any_set):
    return part_3.look(any_set)


@cache
def findings(name):
    return part_3.look(SETS[name]())


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_every_null_has_a_reason_and_every_value_is_strict_json(any_set):
    entries = part_3.numbers(any_set)
    json.dumps(entries, allow_nan=False)
    names = {run.name for run in any_set}
    for name, entry in entries.items():
        assert (entry["value"] is None) == bool(entry["reason"]), name
        assert entry["run"] in names and entry["source"] == "measured", name
    assert set(REQUIRED) <= set(entries) and value(entries, "shape") in ("held", "did not hold", "not measured here")


def test_the_names_do_not_depend_on_what_was_measured(any_set, numbers):
    assert set(part_3.numbers(any_set)) == set(numbers)


def test_numbers_of_the_toy(numbers):
    factor = 16 * toy.ONE / toy.WAVE_16
    assert value(numbers, "factor") == pytest.approx(factor, rel=1e-4)
    assert value(numbers, "headline") == "6.4 x (cap 1 to 16)"
    assert value(numbers, "factor_of_caps_percent") == pytest.approx(100 * factor / 16, rel=1e-4)
    assert (value(numbers, "small_cap"), value(numbers, "large_cap"), value(numbers, "caps")) == (1, 16, "1, 16")
    assert value(numbers, "fit_crossover") == pytest.approx(10) and value(numbers, "fit_most_gain") == pytest.approx(11)
    assert value(numbers, "stream_ms") == pytest.approx(16)  # 0.16 GB at 10 GB/s
    # 32 prompt tokens and half of 48 answer tokens, 46,080 bytes each
    assert value(numbers, "context_tokens") == 56 and value(numbers, "own_mb") == pytest.approx(56 * 0.04608)
    assert value(numbers, "own_of_slope_percent") == pytest.approx(100 * 56 * 0.04608 / 10 / 2, rel=1e-6)
    assert value(numbers, "bound_large_step_ms") == pytest.approx(16 + 16 * 0.258048)
    assert value(numbers, "bound_factor") == pytest.approx(16 * (16 + 0.258048) / (16 + 16 * 0.258048))
    assert value(numbers, "large_batch_mean") == 16 and value(numbers, "large_running_mean") < 15  # the gauge misses prompts being read
    # The flood's tokens over those of a batch of 16 in steps of 52 ms: both at the batch that ran, not at the gauge's.
    assert value(numbers, "served_of_decode_percent") == pytest.approx(100 * (16 * toy.ANSWER / (toy.WAVE_16 * 1e-5)) / (16 / 0.052), rel=1e-3)
    assert value(numbers, "queue_slope_s") == pytest.approx(0.712) and value(numbers, "queue_service_s") == pytest.approx(0.712, abs=1e-3)
    assert value(numbers, "agree_large_tok_s_percent") == pytest.approx(0, abs=0.5)
    assert numbers["small_tok_s"]["run"].startswith("cap-1-") and numbers["large_tok_s"]["run"].startswith("cap-16-")


def test_the_factor_compares_like_with_like_and_its_ends_are_those_that_are_printed():
    small = toy.cap_1()
    small.points[0]["summary"]["steady_output_tok_s"] = None
    arms = toy.arm_set(toy.cap_16(), small)
    arms["cap-16"].points[1]["summary"]["steady_output_tok_s"] *= 1.1
    found, entries = part_3.look(arms), part_3.numbers(arms)
    assert found.factor == pytest.approx(found.large["output_tok_s"] / found.small["output_tok_s"])
    assert value(entries, "large_tok_s") / value(entries, "small_tok_s") == pytest.approx(found.factor)
    assert value(entries, "factor_over") == "whole point"
    text = cliff_words.factor_sentence(found)
    assert f"to {digits(found.large['output_tok_s'])} tokens a second, both with ramp and drain" in text
    assert value(entries, "large_tok_s") != found.large["tok_s"]


def test_unknown_own_bytes_are_not_nothing():
    entries = part_3.numbers(SETS["no configuration"]())
    for name in ("own_ms", "bound_crossover", "bound_large_step_ms", "bound_large_tok_s", "bound_factor"):
        assert value(entries, name) is None and "configuration" in entries[name]["reason"], name
    found = findings("no configuration")
    assert "cannot say" in cliff_words.own_sentence(found) and "cannot be worked out" in cliff_words.gain_sentence(found)
    assert "16.0 times" not in cliff_words.gain_sentence(found)


def test_room_is_counted_in_whole_blocks(numbers):
    # 182 blocks less the engine's own; 32 + 32 - 1 tokens take one block of 128 each. By tokens it would be 23,296 / 64 = 364.
    assert value(numbers, "room_requests") == 181
    run = toy.cap_16()
    del run.said["kv_cache_blocks"]
    entry = part_3.numbers(toy.arm_set(run, toy.cap_1()))["room_requests"]
    assert entry["value"] is None and "kv_cache_blocks" in entry["reason"]


def test_what_the_points_do_not_bound_is_no_number():
    entries = part_3.numbers(SETS["bent"]())
    for name in ("fit_crossover", "fit_ceiling_tok_s", "fit_most_gain", "own_of_slope_percent"):
        assert value(entries, name) is None and entries[name]["reason"], name
    assert value(entries, "fit_slope_ms") > 0
    beyond = part_3.numbers(toy.arm_set(toy.cap_16(batches=(1, 2, 4)), toy.cap_1()))
    assert value(beyond, "fit_crossover") == pytest.approx(10) and value(beyond, "fit_most_gain") is None


def test_one_cap_alone_has_a_closed_loop_in_the_place_of_a_small_one():
    entries, whole = part_3.numbers(SETS["one cap missing"]()), part_3.numbers(SETS["whole"]())
    assert value(entries, "headline") == "6.4 x (closed loop of 1 to cap 16; smaller caps not measured)"
    assert value(entries, "stand_in_concurrency") == 1 and value(entries, "stand_in_factor") == pytest.approx(value(whole, "factor"), rel=0.01)
    assert value(entries, "factor") is None and value(entries, "small_cap") is None and value(entries, "missing_arms") == "cap-1"
    assert "only one cap" in entries["small_num_prompts"]["reason"], "the one cap is not its own small end"
    for name in ("stand_in_factor", "missing_arms"):
        assert value(whole, name) is None and whole[name]["reason"]
    lone = part_3.numbers(SETS["one cap refused"]())  # a cap of 1 and no loops
    assert value(lone, "headline") is None and value(lone, "stand_in_factor") is None


def test_growth_in_proportion_starts_at_the_smallest_size_that_was_measured():
    """A lone cap of 16 once drew the line through itself, as if 16 seats had been one."""
    for name in ("one cap missing", "whole"):
        found = findings(name)
        (line,) = [trace for trace in cliff_figures.throughput(found.caps, found.closed, found.fit, found.rig).data if trace.name == "in proportion"]
        assert (line.x[0], line.y[0]) == (1, pytest.approx(44.94, rel=0.01)) and line.y[1] == pytest.approx(16 * line.y[0], rel=1e-4)


def test_numbers_of_a_set_with_a_held_up_batch():
    entries = part_3.numbers(SETS["held up"]())
    assert value(entries, "held_up_batches") == "16" and value(entries, "held_up_batch") == 16
    assert value(entries, "held_up_traced_ms") == pytest.approx(31) and value(entries, "held_up_engine_tok_s") == pytest.approx(16 / 0.031)
    assert value(entries, "held_up_step_ms") == pytest.approx(52) and value(entries, "held_up_line_ms") == pytest.approx(52)
    assert (value(entries, "fit_points"), value(entries, "widest_batch")) == (4, 8), "what the client saw of 16 is not the engine's"
    assert value(entries, "served_of_decode_percent") == pytest.approx(100 * value(entries, "large_tok_s") / (16 / 0.031), rel=1e-3)
    assert value(entries, "state_64_ms") is None and "64" in entries["state_64_ms"]["reason"]


def test_random_weights_are_named_and_real_ones_are_not():
    assert "random numbers" in cliff_words.weights_sentence(findings("held up")) and cliff_words.weights_sentence(findings("whole")) == ""


def test_repeats_show_their_range():
    run = toy.cap_16()
    run.add(len(run.points), *toy.flood(48, 16, slope=190))
    found = part_3.look(toy.arm_set(run, toy.cap_1()))
    assert found.large["repeats"] == 2 and re.search(r"\d+ \(\d+ to \d+\)", cliff_words.caps_table(found))
    whole = cliff_words.caps_table(findings("whole"))
    assert "In brackets" in cliff_words.caps_table(found) and "In brackets" not in whole
    assert not re.search(r"\(\d+ to \d+\)", whole)


def test_an_invalid_flood_gives_no_headline():
    small = toy.cap_1()
    small.points[0]["validity"] = {"valid": False, "reasons": ["failures"]}
    entries = part_3.numbers(toy.arm_set(toy.cap_16(), small))
    assert value(entries, "headline") is None and value(entries, "small_tok_s") is None
    assert "failures" in entries["small_tok_s"]["reason"] and value(entries, "shape") == "not measured here"


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_the_shape_holds_in_the_toy(numbers):
    assert value(numbers, "shape") == "held" and "6.4 times" in value(numbers, "shape_because")


def test_proportional_growth_is_not_the_shape():
    arms = toy.arm_set(toy.cap_16(slope=0), toy.cap_1())
    arms["cap-16"].points[1]["summary"]["steady_output_tok_s"] = 16 * 44.9438
    shape, because = part_3.verdict(part_3.look(arms))
    assert shape == "did not hold" and "16.0 times" in because


def test_a_small_gain_is_no_cliff():
    arms = SETS["whole"]()
    arms["cap-16"].points[1]["summary"]["steady_output_tok_s"] = 1.7 * 44.9438
    shape, because = part_3.verdict(part_3.look(arms))
    assert shape == "did not hold" and "1.7 times" in because


def test_two_caps_that_lie_close_are_not_judged():
    arms = toy.arm_set(toy.Run("cap-2", 2, [toy.flood(12, 2)], config=toy.SMOL), toy.cap_1())
    assert "too little to judge" in part_3.verdict(part_3.look(arms))[1]


def test_a_step_that_shrinks_is_not_the_shape():
    assert part_3.verdict(part_3.look(toy.arm_set(toy.cap_16(slope=-50), toy.cap_1())))[0] == "did not hold"


def test_a_slope_that_could_be_nothing_is_no_verdict():
    shape, because = part_3.verdict(findings("no slope"))
    assert shape == "not measured here" and "was not determined" in because


def test_a_bent_step_grows_where_its_ends_are_clearly_apart():
    found = findings("bent")
    assert found.fit.slope_interval[0] < 0 < found.fit.slope_interval[1]
    assert part_3.verdict(found)[0] == "held" and "not along a straight line" in part_3.verdict(found)[1]


@pytest.mark.parametrize("name", ["one cap refused", "one cap missing", "two batches"])
def test_what_is_not_there_is_not_judged(name):
    assert part_3.verdict(findings(name))[0] == "not measured here"


def test_without_a_closed_loop_the_flood_itself_gives_the_service_time():
    found = findings("no streams, no loops")
    assert found.fair["explained"] is True and "flood itself" in found.fair["service_from"]
    assert found.fair["service_s"] == pytest.approx(0.712, abs=1e-3)


# --- sentences and tables ---------------------------------------------------------------------------------------------

SENTENCES = ("arms", "own", "gain", "factor", "batch", "served", "agreement", "fit", "fixed", "slope", "queue", "order", "place", "price", "curve",
             "shape")


@pytest.mark.parametrize("name", SENTENCES)
def test_every_sentence_is_whole_for_every_set(any_findings, name):
    text = getattr(cliff_words, f"{name}_sentence")(any_findings)
    assert (name == "own" or text.strip().endswith((".", "**", ".**"))) and not re.search(r"\b(nan|None|inf)\b", text), text
    assert text.count("**") % 2 == 0


@pytest.mark.parametrize(("name", "sentence", "said"), [
    ("whole", "factor", "grew 6.4 times"), ("whole", "agreement", "**agree**"), ("whole", "queue", "**The place in the queue explains"),
    ("whole", "fit", "equal at a batch of **10.0**"), ("whole", "slope", "smaller part"), ("whole", "fixed", "1.25 times"),
    ("whole", "place", "0.712 s at cap 1 (12 prompts) and "), ("whole", "price", "2.4 times"), ("whole", "shape", "held here"),
    ("one cap refused", "arms", "too many sequences"), ("one cap refused", "factor", "cannot be measured"),
    ("one cap missing", "arms", "`cap-1`"), ("one cap missing", "queue", "not judged"), ("two batches", "fit", "No line"),
    ("whole", "fit", "no batch, however large"), ("whole", "batch", "**16.0** requests ran"), ("whole", "batch", "it was 14."),
    ("whole", "served", "93 percent"), ("whole", "order", "kept to the order"), ("whole", "gain", "a batch of 16 would give 12.9 times"),
    ("whole", "own", "+ B × **own** 0.258 ms"), ("bent", "slope", "could as well be nothing"), ("bent", "curve", "not in the figure"),
    ("bent", "fit", "batch 4 took less time than batch 1, batch 8 took less time than batch 2"), ("bent", "fit", "beyond what was measured"),
    ("bent", "fixed", "cannot tell them apart"), ("no slope", "fit", "no crossover"),
    ("one cap missing", "factor", "**Caps cannot be compared yet:**"),
    ("one cap missing", "factor", "From a closed loop of 1 to the flood at cap 16"),
    ("one cap missing", "factor", "grew 6.4 times"), ("one cap missing", "arms", "`wall run part_3 --rig cpu` measures"),
    ("one cap missing", "queue", "`wall run part_3 --rig cpu` measures it"), ("one cap missing", "price", "22.0 ms in a closed loop of 1"),
    ("one cap missing", "shape", "it grew 6.4 times"), ("held up", "served", "server's front end"),
    ("held up", "served", "by the engine's own steps"),
    ("held up", "price", "wait behind the server's front end"), ("held up", "fit", "beyond the largest batch in the line, 8"),
    ("held up", "curve", "an extrapolation. Hollow marks"), ("held up, one cap", "factor", "hands tokens out more slowly than the engine"),
    ("no bandwidth", "fixed", "cannot be compared"), ("no streams, no loops", "agreement", "Not shown"),
])
def test_sentences_follow_the_data(name, sentence, said):
    assert said in getattr(cliff_words, f"{sentence}_sentence")(findings(name))


def test_an_extrapolated_crossover_says_so_and_promises_nothing():
    text = cliff_words.fit_sentence(part_3.look(toy.arm_set(toy.cap_16(batches=(1, 2, 4)), toy.cap_1())))
    assert "extrapolation" in text and "beyond what was measured" in text and "however large" not in text
    assert "however large" not in cliff_words.fit_sentence(findings("bent"))


def test_a_flood_beyond_the_timed_batches_is_compared_only_where_the_line_is_determined():
    known = part_3.look(toy.arm_set(toy.cap_16(batches=(1, 2, 4, 8, 12)), toy.cap_1()))  # crossover 10
    assert known.decode_at_large[0] == pytest.approx(16 / 0.052) and "drawn on" in known.decode_at_large[1]
    value, why = part_3.look(toy.arm_set(toy.cap_16(batches=(1, 2, 4)), toy.cap_1())).decode_at_large
    assert value is None and "16 ran" in why


def test_a_queue_that_was_not_served_as_sent_says_what_the_client_can_tell():
    arms = SETS["whole"]()
    requests = arms["cap-1"]._frames[0]["requests"]
    requests[["first_token", "end"]] = requests[["first_token", "end"]].to_numpy()[::-1]
    requests["sent"] += requests.index
    text = cliff_words.order_sentence(part_3.look(arms))
    assert "0 percent in that order" in text and "cannot be seen" in text
    requests["sent"] += 100_000 * requests.index
    assert "did not keep to it" in cliff_words.order_sentence(part_3.look(arms))


def test_a_difference_is_named():
    arms = SETS["whole"]()
    next(point for point in arms["cap-16"].points if point["max_concurrency"] == 1)["summary"]["steady_output_tok_s"] *= 1.3
    text = cliff_words.agreement_sentence(part_3.look(arms))
    assert "**differ**" in text and "output tokens/s at 1 by +30 percent" in text


def test_the_table_has_a_row_a_load_and_says_why_a_cell_is_empty(any_findings):
    found = any_findings
    rows = BeautifulSoup(cliff_words.caps_table(found), "html.parser").select("tbody tr")
    assert len(rows) == len(found.caps) + len(found.closed)
    for cell in (cell for row in rows for cell in row.find_all("td")):
        assert cell.text != "–" or cell["title"]
    assert len(BeautifulSoup(cliff_words.agreement_table(found), "html.parser").select("tbody tr")) == len(found.agreed)
    assert (cliff_words.agreement_table(found) == "") is found.agreed.empty, "no heads without a row"


# --- the author's figures ---------------------------------------------------------------------------------------------


def test_published_numbers_have_places_and_collide_with_none():
    entries = part_3.published()
    others = published_numbers.numbers()
    for name, entry in entries.items():
        assert entry["value"] is not None and entry["where"] and entry["source"] == "published", name
        assert f"published.a10g.{name}" not in others, name
    json.dumps(entries, allow_nan=False)
    assert value(entries, "cliff_factor") == 22.1 and value(entries, "cliff_running") == 146
    assert value(entries, "cliff_last_gain_percent") == pytest.approx(100 * (1091.12 / 1050.09 - 1))
    assert value(entries, "cliff_served_of_decode_percent") == pytest.approx(100 * 1091.12 / (146 / 0.0656))


def test_the_published_slope_is_mostly_traffic():
    own = part_3.published()["cliff_own_ms"]["value"]
    assert own == pytest.approx(published_numbers.numbers()["published.a10g.own_ms"]["value"], rel=1e-3)


def test_published_caps_ran_no_more_than_the_card_could_seat():
    assert cliff_published.published_caps()["batch"].tolist() == [1, 4, 16, 64, 146]


# --- the post ---------------------------------------------------------------------------------------------------------


def test_every_number_of_the_post_exists_and_fits_its_format(numbers):
    known = {f"part_3.here.{name}": entry for name, entry in numbers.items()}
    known |= {f"published.a10g.{name}": entry for name, entry in part_3.published().items()} | published.numbers()
    check_numbers(NOTEBOOK, known, more_than=30)


def test_the_parameters_of_the_post_are_those_of_the_protocol():
    check_parameters(NOTEBOOK, "part_3")


def test_no_number_is_typed_into_the_prose():
    """Whatever counts or measures comes from a record; what is left are names (A10G, Part 2) and a cap of 1."""
    for cell in re.split(r"^# %%", NOTEBOOK, flags=re.M):
        if cell.startswith(" [markdown]"):
            prose = re.sub(r"\{\w+\}`[^`]+`|`[^`]+`|\]\([^)]*\)", "", cell)
            found = [each for each in re.findall(r"(?<![\w.])\d[\d.,]*(?!\w)", prose) if each.strip(".,") not in ("1", "2", "3")]
            assert not found, found
