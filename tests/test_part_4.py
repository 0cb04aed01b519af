"""Part 4: its words follow the data whichever way they come out, and the page runs on a made set."""

import json
import math
import re

import jupytext
import pandas as pd
import pytest
from test_starvation import FakeRun, made_set

from inference_wall import part_4, post, published, rigs, starvation, starvation_figures, starvation_published, starvation_tables
from inference_wall.arms import ArmSet

NOTEBOOK = rigs.root() / "notebooks" / "part_4.py"
ROLE = re.compile(r"\{num\}`([^`]+)`")


@pytest.fixture(scope="module")
def arms():
    return made_set()


@pytest.fixture(scope="module")
def found(arms):
    return part_4.look(arms)


def refused_set():
    """The cut arm was refused by the engine."""
    arms = made_set()
    arms.runs["blocks-17"].not_testable = {"reason": "a request of full length does not fit", "remedy": "more blocks"}
    return arms


def empty_set():
    """Only the natural arm was measured, and the cut one is missing."""
    arms = made_set(names=["natural", "blocks-17"])
    return ArmSet(arms.post, arms.rig, arms.names, {"natural": arms.runs["natural"]})


def still_set():
    """The counter of the cut server never moves although the control needs more blocks than there are."""
    arms = made_set()
    run = arms.runs["blocks-17"]
    for index in range(3):
        run._frames[index]["metrics"]["preemptions_total"] = 0.0
        run.points[index]["summary"]["preemptions"] = 0
    return arms


def crowded_set():
    """The natural cache is no larger than the cut one: no room for the control either."""
    return made_set(natural_blocks=18)


# --- numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [made_set, refused_set, empty_set, still_set, crowded_set, lambda: made_set(counter=False)])
def test_numbers_are_strict_json_with_reasons_whatever_happened(make):
    numbers = part_4.numbers(make())
    json.dumps(numbers, allow_nan=False)
    assert {"headline", "headline_published", "shape", "shape_because"} <= set(numbers)
    for name, entry in numbers.items():
        assert (entry["value"] is None) == bool(entry["reason"]), name


def test_numbers_of_a_made_set(arms):
    value = {name: entry["value"] for name, entry in part_4.numbers(arms).items()}
    assert value["headline"] == "8 preemptions in the positive control" and value["shape"] == "held"
    assert value["headline_published"] == "17 to 205 preemptions, first published as 0"
    assert (value["cut_blocks"], value["cut_usable"], value["cut_block_size"], value["cut_state_blocks"]) == (17, 16, 128, 0)
    assert (value["cut_positive_admitted"], value["cut_positive_fits"], value["cut_positive_rules"]) == (16, 8, 8)
    assert (value["victims"], value["victims_last_in"]) == (8, 8)
    assert value["cut_long_preemptions"] == 0 and value["cut_long_ttft_p50_ms"] > value["natural_long_ttft_p50_ms"]


def test_every_number_of_the_page_exists_and_fits_its_format(arms):
    numbers = {f"part_4.here.{name}": entry for name, entry in part_4.numbers(arms).items()}
    numbers |= {f"published.a10g.{name}": entry for name, entry in part_4.published().items()} | published.numbers()
    named = ROLE.findall(NOTEBOOK.read_text(encoding="utf-8"))
    assert len(named) > 15
    for content in named:
        key, _, spec = content.removesuffix(" unit").partition(":")
        assert key in numbers, key
        if numbers[key]["value"] is not None:
            format(numbers[key]["value"], spec)


# --- verdicts and sentences -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "shape", "because"), [
    (made_set, "held", "8 preemptions on the cut cache, none on the natural one, and all 24 requests completed"),
    (still_set, "did not hold", "the counter stood still in the positive control although more blocks are needed"),
    (crowded_set, "moved", "the natural cache has no room for the control either"),
    (refused_set, "not measured here", "a request of full length does not fit"),
    (empty_set, "not measured here", "needs a natural and a cut cache"),
    (lambda: made_set(counter=False), "not measured here", "exposes no preemptions_total"),
])
def test_the_verdict_whichever_way_it_came_out(make, shape, because):
    found = part_4.look(make())
    assert part_4.verdict(found)[0] == shape and because in part_4.verdict(found)[1]
    assert because in part_4.result_sentence(found)


def test_a_request_that_fails_is_not_overlooked():
    arms = made_set()
    point = arms.runs["blocks-17"].points[0]
    point["summary"]["completed"] = 23
    assert part_4.verdict(part_4.look(arms)) == ("did not hold", "1 request of the control did not complete on the cut cache")


def test_sentences_of_a_made_set(found):
    assert "**somebody must be put out.**" in part_4.expectation_sentence(found) and "**8 preemptions**" in part_4.expectation_sentence(found)
    assert "by 8; in the" in part_4.onset_sentence(found) and "**onset**" in part_4.onset_sentence(found)
    assert "**last in, first out.**" in part_4.victims_sentence(found) and "numbers 9 to 16 of 24" in part_4.victims_sentence(found)
    assert "an excess of **0** tokens" in part_4.unseen_sentence(found) and "1,024 tokens" in part_4.unseen_sentence(found)
    assert part_4.rules_sentence(found) == "Of 6 floods, 6 moved the counter exactly as often as the rules say."
    assert "`blocks-17`/long is a zero of a counter that was seen to move" in part_4.zero_sentence(found)
    assert "positive took" in part_4.price_sentence(found)


def test_a_dead_counter_is_called_unknown_and_not_zero():
    found = part_4.look(still_set())
    assert "`blocks-17`/positive, `blocks-17`/balanced, `blocks-17`/long is **unknown**" in part_4.zero_sentence(found)
    assert "`blocks-17`/positive: counted 0, by the rules 8" in part_4.rules_sentence(found)
    assert "cannot be said here" in part_4.onset_sentence(found)
    assert part_4.numbers(still_set())["headline"]["value"] is None


@pytest.mark.parametrize(("before", "after", "said"), [(8, 0, "**onset**"), (0, 5, "It is **churn**"), (2, 60, "which is more dense")])
def test_onset_and_churn_are_told_apart(found, before, after, said):
    counts = found.counts.copy()
    chosen = (counts["arm"] == "blocks-17") & (counts["load"] == "positive")
    counts.loc[chosen, ["before", "after"]] = [before, after]
    changed = part_4.Findings(found.arms, found.natural, found.cut, found.bounds, counts, found.price, found.victims)
    assert said in part_4.onset_sentence(changed)


@pytest.mark.parametrize("make", [refused_set, empty_set, still_set, lambda: made_set(loads=("long",))])
def test_nothing_raises_where_something_is_missing(make):
    found = part_4.look(make())
    for name in ("arms", "expectation", "result", "zero", "rules", "onset", "victims", "unseen", "price"):
        text = getattr(part_4, f"{name}_sentence")(found)
        assert text and "nan" not in text.lower().split() and "None" not in text
    for name in ("cache", "load", "bound", "count"):
        assert "<table" in getattr(starvation_tables, f"{name}_table")(found)
    starvation_figures.demand(found.bounds, found.counts)
    part_4.timelines(found), part_4.prices(found)


def test_a_refused_arm_keeps_its_row_and_its_reason():
    found = part_4.look(refused_set())
    assert "a request of full length does not fit" in starvation_tables.cache_table(found)
    assert "The engine refused `blocks-17`" in part_4.arms_sentence(found)
    assert "Not measured: `blocks-17`" in part_4.arms_sentence(part_4.look(empty_set()))


# --- figures --------------------------------------------------------------------------------------------------------------


def test_the_timeline_draws_each_life_and_all_counters(arms):
    run = arms["blocks-17"]
    figure = starvation_figures.timeline(*(run.frame(name, 0) for name in ("requests", "chunks", "metrics")), "made")
    names = {trace.name for trace in figure.data}
    assert names == {"waiting for the first token", "streaming", "put out of the batch", "running (server)", "waiting (server)", "KV cache in use",
                     "preemptions so far"}
    put_out = next(trace for trace in figure.data if trace.name == "put out of the batch")
    assert sorted(put_out.y) == list(range(9, 17)) and max(put_out.x) == pytest.approx(2.88, abs=0.01)
    counter = next(trace for trace in figure.data if trace.name == "preemptions so far")
    assert max(counter.y) == 8
    assert "The server counted 8 preemptions" in figure.layout.meta["alt"] and len({trace.yaxis for trace in figure.data}) == 4
    assert {trace.type for trace in figure.data} <= {"bar", "scatter"}


def test_an_unknown_count_is_not_drawn_as_zero():
    found = part_4.look(still_set())
    figure = starvation_figures.demand(found.bounds, found.counts)
    assert not [trace for trace in figure.data if trace.name == "blocks-17, counted"]
    assert "blocks-17, positive: not drawn, the count is unknown" in figure.layout.meta["alt"]


def test_demand_shows_counts_rules_and_the_author(found):
    figure = starvation_figures.demand(found.bounds, found.counts, starvation_published.runs())
    by_name = {trace.name: trace for trace in figure.data}
    assert sorted(by_name["blocks-17, counted"].y) == [0, 8, 8] and max(by_name["A10G, published"].y) == 205
    assert "by the rules 203" in figure.layout.meta["alt"]


def test_the_price_names_the_percentiles_that_it_withholds(found):
    figure = part_4.prices(found)["positive"]
    assert "p90 withheld (n = 24, needs 29)" in figure.layout.meta["alt"]
    share = next(trace for trace in figure.data if trace.name == "natural")
    assert share.y[-1] == 100 and len(share.x) == 24


# --- the author -----------------------------------------------------------------------------------------------------------


def test_published_runs_and_what_the_rules_say_of_them():
    runs = starvation_published.runs().set_index("arm")
    assert runs.loc["R4B_NAT", ["blocks", "rules", "rules_before"]].tolist() == [586, 17, 11]
    assert runs.loc["E1_7B_NAT", "blocks"] == 5781 and runs.loc["POS", "blocks"] == 300
    assert pd.isna(runs.loc["E2_7B_300", "rules"])  # its lengths vary
    value = {name: entry["value"] for name, entry in part_4.published().items()}
    assert (value["starvation_low"], value["starvation_high"], value["starvation_seed"]) == (17, 205, 0)
    assert value["starvation_cut_x"] == pytest.approx(77_088 / 5_280) and value["starvation_roomy_4b_plateau"] == 11
    assert all(entry["source"] == "published" and entry["where"] for entry in part_4.published().values())
    assert not math.isnan(value["starvation_natural_usage_percent"])


# --- the page -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [made_set, refused_set, empty_set])
def test_the_page_runs_on_a_made_set(make, monkeypatch, capsys):
    monkeypatch.setattr(post, "open_runs", lambda *_args, **_parameters: make())
    namespace = {}
    for cell in jupytext.read(NOTEBOOK).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, str(NOTEBOOK), "exec"), namespace)
    capsys.readouterr()
    assert namespace["found"].natural == "natural"


def test_the_parameters_cell_is_the_protocol():
    cells = jupytext.read(NOTEBOOK).cells
    cell = next(cell for cell in cells if "parameters" in cell.metadata.get("tags", []))
    given = dict(line.split("#")[0].split(" = ", 1) for line in cell.source.splitlines())
    spec = rigs.load_protocol("part_4").parameters
    assert {name: eval(text) for name, text in given.items()} == {name: entry["default"] for name, entry in spec.items()}
    assert rigs.check_parameters(rigs.load_protocol("part_4"), {"blocks": "17,40"})["blocks"] == [17, 40]


def test_a_cache_without_facts_is_said_to_be_unknown():
    run = FakeRun("natural", 182)
    run.add("long")
    run.said.pop("kv_cache_blocks")
    arms = ArmSet("part_4", "cpu", ["natural"], {"natural": run})
    found = part_4.look(arms)
    assert starvation.bounds(arms)["reason"].tolist() == ["the server did not say its kv_cache_blocks"]
    assert "kv_cache_blocks" in starvation_tables.bound_table(found) and "kv_cache_blocks" in part_4.numbers(arms)["natural_blocks"]["reason"]
