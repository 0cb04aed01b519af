"""What Part 3 says of its records: numbers, verdict, sentences, tables, and that the post asks for nothing that does not exist."""

import json
import re
from functools import cache

import pytest
import synthetic_cliff as toy
from bs4 import BeautifulSoup

from inference_wall import cliff_words, part_3, published, published_numbers, rigs

NOTEBOOK = (rigs.root() / "notebooks" / "part_3.py").read_text(encoding="utf-8")
ROLE = re.compile(r"\{(\w+)\}`([^`]+)`")
REQUIRED = ("headline", "headline_published", "shape", "shape_because")


def value(entries, name):
    return entries[name]["value"]


@pytest.fixture(scope="module")
def arms():
    return toy.arm_set(toy.cap_16(), toy.cap_1())


@pytest.fixture(scope="module")
def numbers(arms):
    return part_3.numbers(arms)


SETS = {
    "whole": lambda: toy.arm_set(toy.cap_16(), toy.cap_1()),
    "one cap refused": lambda: toy.arm_set(toy.refused(), toy.cap_1()),
    "one cap missing": lambda: toy.arm_set(toy.cap_16(), names=["cap-16", "cap-1"]),
    "two batches": lambda: toy.arm_set(toy.cap_16(batches=(1, 2)), toy.cap_1()),
    "no streams, no loops": lambda: toy.arm_set(toy.cap_16(batches=(), concurrency=()), toy.cap_1()),
    "no slope": lambda: toy.arm_set(toy.cap_16(slope=0), toy.cap_1()),
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
    assert value(numbers, "queue_slope_s") == pytest.approx(0.712) and value(numbers, "queue_service_s") == pytest.approx(0.712, abs=1e-3)
    assert value(numbers, "agree_large_tok_s_percent") == pytest.approx(0, abs=0.5)
    assert numbers["small_tok_s"]["run"].startswith("cap-1-") and numbers["large_tok_s"]["run"].startswith("cap-16-")


def test_the_factor_compares_like_with_like():
    small = toy.cap_1()
    small.points[0]["summary"]["steady_output_tok_s"] = None
    found = part_3.look(toy.arm_set(toy.cap_16(), small))
    assert found.factor == pytest.approx(found.large["output_tok_s"] / found.small["output_tok_s"])


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


def test_a_step_that_does_not_grow_is_not_the_shape():
    assert part_3.verdict(findings("no slope"))[0] == "did not hold"


@pytest.mark.parametrize("name", ["one cap refused", "one cap missing", "two batches"])
def test_what_is_not_there_is_not_judged(name):
    assert part_3.verdict(findings(name))[0] == "not measured here"


def test_without_a_closed_loop_the_flood_itself_gives_the_service_time():
    found = findings("no streams, no loops")
    assert found.fair["explained"] is True and "flood itself" in found.fair["service_from"]
    assert found.fair["service_s"] == pytest.approx(0.712, abs=1e-3)


# --- sentences and tables ---------------------------------------------------------------------------------------------

SENTENCES = ("arms", "factor", "agreement", "fit", "fixed", "slope", "queue", "place", "price", "shape")


@pytest.mark.parametrize("name", SENTENCES)
def test_every_sentence_is_whole_for_every_set(any_findings, name):
    text = getattr(cliff_words, f"{name}_sentence")(any_findings)
    assert text.strip().endswith((".", "**", ".**")) and not re.search(r"\b(nan|None|inf)\b", text), text
    assert text.count("**") % 2 == 0


@pytest.mark.parametrize(("name", "sentence", "said"), [
    ("whole", "factor", "grew 6.4 times"), ("whole", "agreement", "**agree**"), ("whole", "queue", "**The place in the queue explains"),
    ("whole", "fit", "equal at a batch of **10.0**"), ("whole", "slope", "smaller part"), ("whole", "fixed", "1.2 times"),
    ("whole", "place", "0.712 s at cap 1 (12 prompts) and "), ("whole", "price", "2.4 times"), ("whole", "shape", "held here"),
    ("one cap refused", "arms", "too many sequences"), ("one cap refused", "factor", "cannot be measured"),
    ("one cap missing", "arms", "`cap-1`"), ("one cap missing", "queue", "not judged"), ("two batches", "fit", "No line"),
    ("no slope", "fit", "no crossover"), ("no bandwidth", "fixed", "cannot be compared"), ("no streams, no loops", "agreement", "Not shown"),
])
def test_sentences_follow_the_data(name, sentence, said):
    assert said in getattr(cliff_words, f"{sentence}_sentence")(findings(name))


def test_an_extrapolated_crossover_says_so():
    assert "extrapolation" in cliff_words.fit_sentence(part_3.look(toy.arm_set(toy.cap_16(batches=(1, 2, 4)), toy.cap_1())))


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
    assert part_3.published_caps()["batch"].tolist() == [1, 4, 16, 64, 146]


# --- the post ---------------------------------------------------------------------------------------------------------


def test_every_number_of_the_post_exists_and_fits_its_format(numbers):
    known = {f"part_3.here.{name}": entry for name, entry in numbers.items()}
    known |= {f"published.a10g.{name}": entry for name, entry in part_3.published().items()} | published.numbers()
    used = [content for role, content in ROLE.findall(NOTEBOOK) if role == "num"]
    assert len(used) > 30
    for content in used:
        key, _, spec = content.removesuffix(" unit").partition(":")
        assert key in known, key
        assert known[key]["value"] is not None, key
        format(known[key]["value"], spec)
        assert known[key]["unit"] or not content.endswith(" unit"), key


def test_the_parameters_of_the_post_are_those_of_the_protocol():
    cell = NOTEBOOK.split('tags=["parameters"]')[1].split("# %%")[0]
    names = re.findall(r"^(\w+) = ", cell, flags=re.M)
    assert names == list(rigs.load_protocol("part_3").parameters)
    call = NOTEBOOK.split('post.open_runs("part_3"')[1].split(")\n")[0]
    assert sorted(re.findall(r"(\w+)=\1", call)) == sorted(names)


def test_no_number_is_typed_into_the_prose():
    """Whatever counts or measures comes from a record; what is left are names (A10G, Part 2) and a cap of 1."""
    for cell in re.split(r"^# %%", NOTEBOOK, flags=re.M):
        if cell.startswith(" [markdown]"):
            prose = re.sub(r"\{\w+\}`[^`]+`|`[^`]+`|\]\([^)]*\)", "", cell)
            found = [each for each in re.findall(r"(?<![\w.])\d[\d.,]*(?!\w)", prose) if each.strip(".,") not in ("1", "2", "3")]
            assert not found, found
