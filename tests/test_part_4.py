"""Part 4: its words follow the data whichever way they come out, and the page runs on a made set."""

import dataclasses
import gzip
import json
import math
import re

import jupytext
import pandas as pd
import pytest
from test_starvation import FakeRun, made_set

from inference_wall import (
    part_4,
    post,
    published,
    rigs,
    starvation,
    starvation_figures,
    starvation_published,
    starvation_tables,
    starvation_words,
)
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


def roomy_cut_set():
    """The cut cache holds the control: nobody has to go."""
    return made_set(cut_blocks=40)


def ahead_set():
    """The first request of the control is one step ahead on the cut cache, as on a real server."""
    arms = made_set()
    arms.runs["blocks-17"] = FakeRun("blocks-17", 17).add("positive", head=1).add("balanced").add("long")
    return arms


def unknown_set():
    """Neither the model's configuration nor what the server printed says what fits."""
    arms = still_set()
    for run in arms.runs.values():
        run.document["model"]["config"] = None
        del run.said["max_concurrency"]
    return arms


def traced_set(tmp_path, steps, reason=None):
    """The control once more under the profiler on the cut cache; `steps`: (context requests, tokens, generation requests, tokens)."""
    arms = made_set()
    run = arms.runs["blocks-17"].add("positive")
    run.points[-1] |= {"pass": "trace", "kind": "streams", "num_prompts": 16, "profile_after": 215, "bench": {"trace": {"reason": reason}}}
    if steps:
        events, now = [], 0.0
        for c, p, g, t in steps:
            events += [{"ph": "X", "cat": "user_annotation", "name": f"execute_context_{c}({p})_generation_{g}({t})", "pid": 1, "tid": 1,
                        "ts": now, "dur": 50.0 * (p + t)},
                       {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": now, "dur": 40.0 * (p + t)}]
            now += 60.0 * (p + t)
        path = tmp_path / "trace-0003.json.gz"
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
        run.trace = lambda point: path if point == run.points[-1]["point"] else None
    return arms


def crowded_set():
    """The natural cache is no larger than the cut one: no room for the control either."""
    return made_set(natural_blocks=18)


# --- numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [made_set, refused_set, empty_set, still_set, crowded_set, roomy_cut_set, ahead_set, unknown_set,
                                  lambda: made_set(counter=False)])
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
    (still_set, "did not hold", "the counter stood still in the positive control although somebody had to be put out"),
    (roomy_cut_set, "not measured here", "the cut cache holds the control (it asks for 32 of 39 blocks), so nothing was tested"),
    (ahead_set, "held", "9 preemptions on the cut cache"),
    (unknown_set, "not measured here", "whether anybody had to be put out is not known"),
    (crowded_set, "moved", "the natural cache has no room for the control either"),
    (refused_set, "not measured here", "a request of full length does not fit"),
    (empty_set, "not measured here", "needs a natural and a cut cache"),
    (lambda: made_set(counter=False), "not measured here", "exposes no preemptions_total"),
])
def test_the_verdict_whichever_way_it_came_out(make, shape, because):
    found = part_4.look(make())
    assert part_4.verdict(found)[0] == shape and because in part_4.verdict(found)[1]
    assert because in starvation_words.result_sentence(found)


def test_a_request_that_fails_is_not_overlooked():
    arms = made_set()
    point = arms.runs["blocks-17"].points[0]
    point["summary"]["completed"] = 23
    assert part_4.verdict(part_4.look(arms)) == ("did not hold", "1 request of the control did not complete on the cut cache")


def test_sentences_of_a_made_set(found):
    said = {name: getattr(starvation_words, f"{name}_sentence")(found) for name in ("expectation", "onset", "victims")}
    assert "**somebody must be put out.**" in said["expectation"] and "**8 or 9 preemptions**, 8 of them before" in said["expectation"]
    assert "8 of the pauses began; in the" in said["onset"] and "**onset**" in said["onset"]
    assert "**last in, first out.**" in said["victims"] and "numbers 9 to 16 of 24" in said["victims"]
    assert "**Neither counter shows any of it.**" in starvation_words.unseen_sentence(found)
    assert "1,024 or 1,055 tokens" in starvation_words.unseen_sentence(found)
    assert starvation_words.rules_sentence(found) == "In 6 of 6 floods the counter moved exactly as often as the rules say."
    assert "In 6 of 6 floods exactly as many began" in starvation_words.began_sentence(found)
    assert "and for both caches the two **agree**" in starvation_words.room_sentence(found)
    assert "`blocks-17`/long is a zero of a counter that was seen to move" in starvation_words.zero_sentence(found)
    assert "positive took" in starvation_words.price_sentence(found)


def test_a_dead_counter_is_called_unknown_and_not_zero():
    found = part_4.look(still_set())
    assert "`blocks-17`/positive, `blocks-17`/balanced, `blocks-17`/long is **unknown**" in starvation_words.zero_sentence(found)
    assert "`blocks-17`/positive: counted 0, by the rules 8" in starvation_words.rules_sentence(found)
    assert part_4.numbers(still_set())["headline"]["value"] is None


@pytest.mark.parametrize(("before", "after", "said"), [(8, 0, "**onset**"), (0, 5, "It is **churn**"), (2, 60, "**denser afterwards**"),
                                                       (8, 1, "**denser at the onset**"), (0, 0, "no answer stopped"),
                                                       (None, None, "no request completed")])
def test_onset_and_churn_are_told_apart(found, before, after, said):
    counts = found.counts.copy()
    chosen = (counts["arm"] == "blocks-17") & (counts["load"] == "positive")
    counts.loc[chosen, ["before", "after"]] = [before, after]
    assert said in starvation_words.onset_sentence(dataclasses.replace(found, counts=counts))


def test_a_counter_is_called_late_only_where_it_was():
    assert "**The counter is late:**" in starvation_words.lateness_sentence(part_4.look(made_set()))
    assert "how many, not when" in starvation_words.lessons(part_4.look(made_set()))
    arms = made_set()
    arms.runs["blocks-17"] = FakeRun("blocks-17", 17).add("positive", late=False)
    found = part_4.look(arms)
    assert "moved when requests were put out" in starvation_words.lateness_sentence(found) and "not when" not in starvation_words.lessons(found)


def test_a_count_that_one_request_ahead_explains_says_so():
    found = part_4.look(ahead_set())
    assert found.point("blocks-17", "positive")["raw"] == 9
    said = starvation_words.rules_sentence(found)
    assert said.startswith("In 6 of 6 floods") and "`blocks-17`/positive that takes the first request one step ahead, and the streams show it" in said


def test_a_cut_cache_that_holds_the_control_has_no_headline():
    entry = part_4.numbers(roomy_cut_set())["headline"]
    assert entry["value"] is None and "nothing was tested" in entry["reason"]
    assert "nobody has to be put out" in starvation_words.expectation_sentence(part_4.look(roomy_cut_set()))


def test_without_a_configuration_the_page_does_not_call_it_a_check():
    arms = made_set()
    for run in arms.runs.values():
        run.document["model"]["config"] = None
    found = part_4.look(arms)
    assert "agree by construction" in starvation_words.room_sentence(found) and "from the printed number" in starvation_tables.cache_table(found)
    arms = made_set()
    arms.runs["natural"].said["max_concurrency"] = 10.3
    assert "**Formula and server differ** (`natural`: 11.38 by the formula, 10.30 printed)" in starvation_words.room_sentence(part_4.look(arms))


def test_who_pays_follows_the_streams(found):
    assert "**The latest paid.**" in starvation_words.lessons(found)
    mixed = dataclasses.replace(found, victims=found.victims.assign(behind=[1] + [0] * 7))
    assert "At 1 of 8 pauses somebody went on" in starvation_words.lessons(mixed)
    assert "At 7 of 8 nobody" in starvation_words.victims_sentence(mixed) and "first out" not in starvation_words.victims_sentence(mixed)
    assert "**Who pays was not seen here.**" in starvation_words.lessons(dataclasses.replace(found, victims=found.victims.iloc[:0]))


@pytest.mark.parametrize(("column", "value", "said"), [("excess", 5, "prompt tokens rose by 5 more than was sent"),
                                                       ("excess_out", None, "generated tokens could not be compared"),
                                                       ("raw", 0, "Nobody was counted")])
def test_what_the_token_counters_show_is_read_and_not_assumed(found, column, value, said):
    counts = found.counts.copy()
    counts.loc[(counts["arm"] == "blocks-17") & (counts["load"] == "positive"), column] = value
    changed = dataclasses.replace(found, counts=counts)
    assert said in starvation_words.unseen_sentence(changed) and "Neither" not in starvation_words.unseen_sentence(changed)
    assert "neither token counter" not in starvation_words.lessons(changed)


# --- a trace --------------------------------------------------------------------------------------------------------------

DECODE = (0, 0, 8, 8)


def test_a_trace_with_work_done_twice(tmp_path):
    [traced] = part_4.traces(part_4.look(traced_set(tmp_path, [DECODE, DECODE, (0, 0, 8, 1032), DECODE])))
    said = starvation_words.trace_sentence(traced)
    assert "16 streams of 32 tokens in and 224 out" in said and "had 215 tokens" in said
    assert "In 1 of the 4 steps of the excerpt, 1,024 tokens were worked out a second time" in said and "That step took 51.6 ms" in said
    assert "1,032 tokens for 8 running requests" in said and "No step read a prompt" not in said
    assert not starvation_words.kinds_apart(traced)


def test_a_trace_that_marks_who_comes_back_as_reading(tmp_path):
    [traced] = part_4.traces(part_4.look(traced_set(tmp_path, [DECODE, (8, 1032, 0, 0), DECODE])))
    said = starvation_words.trace_sentence(traced)
    assert "1,024 tokens were worked out a second time" in said and "among those that read a prompt" in said
    assert starvation_words.kinds_apart(traced)


def test_a_trace_without_it_and_no_trace_at_all(tmp_path):
    [traced] = part_4.traces(part_4.look(traced_set(tmp_path, [DECODE, (2, 64, 6, 6)])))
    assert "No step of the excerpt worked anything out a second time" in starvation_words.trace_sentence(traced)
    [traced] = part_4.traces(part_4.look(traced_set(tmp_path, [], "the server wrote no trace")))
    assert traced.path is None and "There is no trace of it: the server wrote no trace." in starvation_words.trace_sentence(traced)
    assert part_4.traces(part_4.look(made_set())) == []


def test_a_trace_changes_no_number_and_no_verdict(tmp_path, arms):
    traced = traced_set(tmp_path, [DECODE])
    numbers, before = ({name: entry["value"] for name, entry in part_4.numbers(each).items()} for each in (traced, arms))
    assert numbers == before and part_4.verdict(part_4.look(traced)) == part_4.verdict(part_4.look(arms))


@pytest.mark.parametrize("make", [refused_set, empty_set, still_set, roomy_cut_set, ahead_set, unknown_set,
                                  lambda: made_set(loads=("long",))])
def test_nothing_raises_where_something_is_missing(make):
    found = part_4.look(make())
    assert starvation_words.lessons(found).startswith("- **")
    for name in ("arms", "room", "expectation", "result", "began", "zero", "rules", "onset", "lateness", "victims", "unseen", "price"):
        text = getattr(starvation_words, f"{name}_sentence")(found)
        assert text and "nan" not in text.lower().split() and "None" not in text
    for name in ("cache", "load", "bound", "count"):
        assert "<table" in getattr(starvation_tables, f"{name}_table")(found)
    starvation_figures.demand(found.bounds, found.counts)
    part_4.timelines(found), part_4.prices(found)


def test_a_refused_arm_keeps_its_row_and_its_reason():
    found = part_4.look(refused_set())
    assert "a request of full length does not fit" in starvation_tables.cache_table(found)
    assert "The engine refused `blocks-17`" in starvation_words.arms_sentence(found)
    assert "Not measured: `blocks-17`" in starvation_words.arms_sentence(part_4.look(empty_set()))


# --- figures --------------------------------------------------------------------------------------------------------------


def test_the_timeline_draws_each_life_and_all_counters(arms):
    run = arms["blocks-17"]
    figure = starvation_figures.timeline(*(run.frame(name, 0) for name in ("requests", "chunks", "metrics")), "made")
    names = {trace.name for trace in figure.data}
    assert names == {"waiting for the first token", "streaming", "stopped while others went on", "running (server)", "waiting (server)",
                     "KV cache in use", "preemptions counted so far"}
    put_out = next(trace for trace in figure.data if trace.name == "stopped while others went on")
    assert sorted(put_out.y) == list(range(9, 17)) and max(put_out.x) == pytest.approx(2.88, abs=0.01)
    counter = next(trace for trace in figure.data if trace.name == "preemptions counted so far")
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
