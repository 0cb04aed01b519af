"""Part 2's numbers, words and figures: the verdict on each outcome, refused and missing arms, and the page executed on made-up records."""

import dataclasses
import json
import re
from functools import cache

import jupytext
import plotly.graph_objects as go
import pytest
from synthetic_freeze import Run, arm_set, load, refused, run, whole_set

from inference_wall import freeze, freeze_figures, freeze_tables, freeze_words, part_2, published, rigs
from inference_wall.site import numbers as roles

NOTEBOOK = rigs.root() / "notebooks" / "part_2.py"
NUM = re.compile(r"\{num\}`([^`]+)`")
SETS = {
    "whole": whole_set,
    "refused": lambda: arm_set(run("chunked-500", 500), run("chunked-100", 100), refused()),
    "missing": lambda: arm_set(run("chunked-500", 500), missing=["unchunked"]),
    "only off": lambda: arm_set(run("unchunked", 2000, whole=True)),
    "one budget refused": lambda: arm_set(refused("chunked-100", "too small"), run("unchunked", 2000, whole=True)),
    "null result": lambda: arm_set(run("chunked-3002", 3002), run("unchunked", 3002, whole=True)),
    "stubborn": lambda: arm_set(run("chunked-500", 500), run("unchunked", 2000)),
    "invalid": lambda: _invalid(whole_set()),
    "silent log": lambda: arm_set(run("chunked-500", 500, said=False), run("unchunked", 2000, whole=True, said=False)),
    "no injection": lambda: arm_set(*(Run(arm, [("light", {"injected": 1}, load(100, rounds=0))], said={}, flags={})
                                      for arm in ("chunked-100", "unchunked"))),
}


def _invalid(found):
    for each in found.runs.values():
        for point in each.points:
            point["validity"] = {"valid": False, "reasons": ["drift"]}
    return found


@cache
def looked(name):
    arms = SETS[name]()
    return arms, freeze.read(arms)


@pytest.fixture(params=SETS, ids=lambda name: name.replace(" ", "_"))
def arms_and_cases(request):
    return looked(request.param)


def test_every_null_has_a_reason_and_every_value_is_strict_json(arms_and_cases):
    entries = part_2.numbers(*arms_and_cases)
    json.dumps(entries, allow_nan=False)
    for name, entry in entries.items():
        assert (entry["value"] is None) == bool(entry["reason"]), name
    assert {"headline", "headline_published", "shape", "shape_because"} <= entries.keys()
    assert entries["shape"]["value"] in ("held", "moved", "did not hold", "not measured here")
    assert entries["shape_because"]["value"]


def test_the_page_finds_all_its_numbers_whatever_was_measured(arms_and_cases):
    entries = {f"part_2.here.{name}": entry for name, entry in part_2.numbers(*arms_and_cases).items()}
    entries |= {f"published.a10g.{name}": entry for name, entry in part_2.published().items()}
    for content in NUM.findall(NOTEBOOK.read_text(encoding="utf-8")):
        key, spec, with_unit = roles.parse(content)
        assert key in entries, key
        roles.show(entries[key], spec, with_unit)
        assert entries[key]["unit"] or not with_unit, key


def test_every_figure_table_and_sentence_stands_on_every_outcome(arms_and_cases):
    arms, cases = arms_and_cases
    said = [write(arms, cases) for write in (freeze_words.arms_sentence, freeze_words.stall_sentence, freeze_words.trade_sentence,
                                             freeze_words.verdict_sentence, freeze_words.takeaways)]
    said += [write(cases) for write in (freeze_words.expectation_sentence, freeze_words.division_sentence, freeze_words.wait_sentence,
                                        freeze_words.population_sentence, freeze_words.dial_sentence, freeze_words.cost_sentence,
                                        freeze_words.payer_sentence)]
    for words in said:
        assert words and "nan" not in words and "None" not in words and "\n%" not in words
    drawn = [draw(cases, name) for name in freeze.LOADS
             for draw in (freeze_figures.token_beats, freeze_figures.gap_percentiles, freeze_figures.budget_dial)]
    drawn += [freeze_figures.beside_published(cases, part_2.published_rows(), name) for name in freeze.LOADS]
    drawn += [freeze_figures.population_trap(case) for case in cases.values()]
    for figure in drawn:
        assert figure.layout.template == go.layout.Template() and {trace.type for trace in figure.data} <= {"scatter"}
        assert figure.layout.meta["alt"] and figure.layout.meta["csv"].endswith(".csv")
        assert "nan" not in figure.layout.meta["alt"] and "None" not in figure.layout.meta["alt"]
        json.loads(figure.to_json())
    for text in (freeze_tables.settings_table(arms), freeze_tables.trade_table(cases), freeze_tables.bound_table(cases)):
        assert 'class="wall-table"' in text and "nan" not in text and "None" not in text


# --- the verdict --------------------------------------------------------------------------------------------------------


def verdict(name):
    return part_2.verdict(*looked(name))


def test_held():
    found = verdict("whole")
    # 1,000 tokens at 0.5 ms and a step of 20 ms against 98 tokens.
    assert found["headline"] == f"worst stall {520 / 69:.1f} times as long without chunking as with 100 tokens a step" and found["shape"] == "held"
    assert "520 ms" in found["shape_because"] and "69.0 ms" in found["shape_because"] and "20.0" in found["shape_because"]


def test_published_headline_names_what_its_ratio_depends_on():
    assert verdict("refused")["headline_published"] == "2.4 times (2,048 of a 5,408-token prompt)"


def judged(off_stalls, on_stalls, medians=(40.0, 40.0)):
    """The verdict on the whole set after its heavy stalls (one a round) and medians were replaced."""
    cases = dict(looked("whole")[1])
    for arm, stalls, median in (("unchunked", off_stalls, medians[0]), ("chunked-100", on_stalls, medians[1])):
        case = cases[arm, "heavy"]
        changed = case.populations | {"worst_by_round_ms": stalls, "window": case.populations["window"] | {"max_ms": max(stalls)},
                                      "broad": case.populations["broad"] | {"p50_ms": median}}
        cases[arm, "heavy"] = dataclasses.replace(case, populations=changed)
    arms = looked("whole")[0]
    return part_2.verdict(arms, cases), freeze_words.stall_sentence(arms, cases)


def test_overlapping_ranges_are_not_a_longer_stall_however_far_the_maxima_lie_apart():
    found, words = judged([100.0, 900.0], [90.0, 110.0], medians=(40.0, 80.0))
    assert found["shape"] == "not measured here" and found["headline"] is None and found["shape_because"].startswith("ranges overlap")
    assert "no difference is shown" in words.split("Heavy load")[1] and "times as long" not in words.split("Heavy load")[1]


def test_a_stall_that_is_shorter_without_chunking_did_not_hold():
    found, words = judged([50.0, 60.0], [90.0, 110.0], medians=(80.0, 40.0))
    assert found["shape"] == "did not hold" and found["headline"].startswith("worst stall 0.5 times as long")
    assert "shorter without chunking" in words


def test_one_injection_a_side_shows_nothing():
    # The light load has two rounds a side, so it is judged in place of the heavy one.
    assert "at the light load" in judged([900.0], [90.0])[0]["shape_because"]
    lonely = arm_set(run("chunked-100", 100, rounds=1), run("unchunked", 2000, whole=True, rounds=1))
    found = part_2.verdict(lonely, freeze.read(lonely))
    assert found["shape"] == "not measured here" and "one injection a side has no range" in found["shape_because"]


@pytest.mark.parametrize(("medians", "shape"), [((100.0, 101.9), "moved"), ((100.0, 103.0), "held"), ((103.0, 100.0), "moved")])
def test_a_median_within_two_percent_is_the_same(medians, shape):
    assert judged([900.0, 910.0], [90.0, 110.0], medians)[0]["shape"] == shape


def test_not_measured_where_the_budget_swallows_the_prompts_whole():
    found = verdict("null result")
    assert found["shape"] == "not measured here" and found["headline"] is None and "ranges overlap" in found["shape_because"]
    arms, cases = looked("null result")
    words = freeze_words.stall_sentence(arms, cases)
    assert "no difference is shown" in words and "the flag changes nothing" in words and "as they should" in words
    assert part_2.numbers(arms, cases)["headline"]["reason"].startswith("ranges overlap")


def test_moved_when_only_the_stall_is_longer():
    # Twelve ordinary steps end each injection: the median is calm with few, large pieces as well.
    gentle = arm_set(run("chunked-500", 500, tail=12), run("unchunked", 2000, whole=True, tail=12))
    assert part_2.verdict(gentle, freeze.read(gentle))["shape"] == "moved"


@pytest.mark.parametrize(("name", "because"), [
    ("refused", "not testable here: the engine does not run this model"), ("missing", "was not measured"), ("stubborn", "kept chunking on"),
    ("invalid", "not valid: drift"), ("only off", "no arm with chunking"), ("one budget refused", "no arm with chunking"),
])
def test_not_measured_says_why(name, because):
    found = verdict(name)
    assert found["shape"] == "not measured here" and found["headline"] is None and because in found["shape_because"]


# --- words --------------------------------------------------------------------------------------------------------------


def test_refused_and_missing_arms_are_named():
    arms = arm_set(run("chunked-500", 500), refused(), missing=["chunked-100"])
    words = freeze_words.arms_sentence(arms, freeze.read(arms))
    assert "`unchunked` is not testable here" in words and "`chunked-100` was not measured yet" in words
    table = freeze_tables.settings_table(arms)
    assert "not testable here: the engine does not run" in table and "no record" in table
    assert "All 4 arms were measured" in freeze_words.arms_sentence(*looked("whole"))


def test_the_setting_that_took_effect_is_shown_and_not_the_wish():
    arms, cases = looked("stubborn")
    assert "did the opposite" in freeze_tables.settings_table(arms) and "did the opposite" in freeze_words.arms_sentence(arms, cases)
    assert "not said" in freeze_tables.settings_table(looked("silent log")[0])


def test_the_trade_names_the_window_where_the_medians_disagree():
    words = freeze_words.trade_sentence(*looked("whole"))
    # Narrow: 3 stalls of 520 ms outnumber the calm tokens; to the end: they do not.
    assert "20.0 against 69.0 ms, worse with chunking (3.5 x)" in words
    assert "520 against 69.0 ms, better with chunking" in words and "opposite directions" in words
    assert "1,500 against 1,500 ms, the same" in words and "**Chunking moved the lost time, it did not remove it:**" in words


def test_the_population_sentence_follows_the_p99():
    long = arm_set(run("unchunked", 2000, whole=True, calm=300))
    words = freeze_words.population_sentence(freeze.read(long))
    assert "is 520 ms" in words and "p99 is 20.0 ms: **the stall is hidden.**" in words
    short = arm_set(run("unchunked", 2000, whole=True, calm=50, rounds=4))
    assert "p99 is 520 ms: the stall still shows" in freeze_words.population_sentence(freeze.read(short))
    assert "a p99 is withheld" in freeze_words.population_sentence(looked("whole")[1])


def test_the_line_says_what_it_shares_with_the_expectation():
    words = freeze_words.cost_sentence(looked("whole")[1])
    assert "20.0 ms + 0.500 ms" in words and "2,000 tokens a second" in words and "says 0.510 ms" in words
    assert "2 of the 8 stalls" in words  # both loads of the smallest budget


def test_a_stall_is_called_a_division_only_where_other_steps_agree():
    cases = dict(looked("whole")[1])
    assert "**A stall is close to a division.** In the 6 combinations" in freeze_words.division_sentence(cases)
    slow = cases["unchunked", "heavy"]
    cases["unchunked", "heavy"] = dataclasses.replace(slow, populations=slow.populations | {"worst_by_round_ms": [900.0, 900.0]})
    words = freeze_words.division_sentence(cases)
    assert "more than this division" in words and f"{900 / 530:.2f} times (no chunking, heavy)" in words
    alone = {key: case for key, case in cases.items() if case.arm == "chunked-100"}
    assert "not tested here" in freeze_words.division_sentence(alone) and "close to" not in freeze_words.takeaways(looked("whole")[0], alone)


def test_a_source_that_reads_whole_prompts_expects_nothing_for_the_arm_without_chunking():
    _, cases = looked("null result")
    assert "its own wait once more" in freeze_words.expectation_sentence(cases)
    assert freeze_tables.bound_table(cases).count("same step, no test") == 2  # the light load; the heavy one fills a step with three prompts
    assert "expected stall" in freeze_figures.budget_dial(cases, "light").layout.meta["alt"]


def test_the_words_about_the_trade_and_the_dial_go_where_the_measurement_goes():
    refused_arms, refused_cases = looked("refused")
    assert "cannot be shown here" in freeze_words.trade_sentence(refused_arms, refused_cases)
    assert "was not measured here" in freeze_words.takeaways(refused_arms, refused_cases)
    assert "Each smaller budget made it shorter" in freeze_words.dial_sentence(refused_cases)  # two budgets are there
    assert "cannot be read" in freeze_words.dial_sentence(looked("only off")[1])
    cases = dict(looked("whole")[1])
    noisy = cases["chunked-100", "light"]
    cases["chunked-100", "light"] = dataclasses.replace(noisy, populations=noisy.populations | {"worst_by_round_ms": [69.0, 400.0]})
    assert "Not shown to be shorter: 100 than 250." in freeze_words.dial_sentence(cases)


def test_who_pays_follows_the_ranges_of_the_reading():
    cases = dict(looked("whole")[1])
    assert "**Whoever sent the long prompt pays" in freeze_words.payer_sentence(cases)
    assert "two people" in freeze_words.takeaways(looked("whole")[0], cases)
    small = cases["chunked-100", "light"]
    cases["chunked-100", "light"] = dataclasses.replace(small, populations=small.populations | {"reading_by_round_ms": [500.0, 900.0]})
    assert "ranges overlap" in freeze_words.payer_sentence(cases) and "two people" not in freeze_words.takeaways(looked("whole")[0], cases)


def test_equal_budgets_differ_in_the_flag_alone_and_may_fill_their_steps_differently():
    arms = arm_set(run("chunked-2048", 2048), run("chunked-100", 100), run("unchunked", 2048, whole=True))
    words = freeze_words.stall_sentence(arms, freeze.read(arms))
    assert "`chunked-2048` and `unchunked` have the same budget, 2,048 tokens" in words
    assert "At the light load either reads up to 1,000 prompt tokens" in words
    assert "holds 2,046 prompt tokens with chunking and 2,000 without" in words and "fuller steps" in words
    assert "same budget" not in freeze_words.stall_sentence(*looked("whole"))


# --- published ----------------------------------------------------------------------------------------------------------


def test_published_numbers_have_a_source_and_new_names():
    entries = part_2.published()
    json.dumps(entries, allow_nan=False)
    assert all(entry["source"] == "published" and entry["where"] and entry["value"] is not None for entry in entries.values())
    assert not {f"published.a10g.{name}" for name in entries} & published.numbers().keys()


@pytest.mark.parametrize(("name", "value"), [
    ("off_heavy_window_p99_ms", 837.8), ("on_light_all_p99_ms", 324.6), ("off_light_all_p99_ms", 102.8), ("on_heavy_run_2_window_p50_ms", 187.3),
    ("freeze_ratio", 838.3 / 349.4), ("median_in_window_ratio", 188.6 / 28.5), ("freeze_prompt_tokens", 5408), ("freeze_slices", 3),
    ("freeze_budget", 2048), ("freeze_token_ratio", 5408 / 2044),
    ("freeze_claimed_slices", 12), ("freeze_claimed_prompt_tokens", 6000), ("freeze_first_gaps", 30), ("freeze_first_gaps_percent", 1.5625),
    ("freeze_expected_off_ms", 21.886 + 5408 * (222.326 - 21.886) / 1320), ("freeze_run_difference_ms", 3.4), ("freeze_claimed_beat_ms", 39),
])
def test_published_values(name, value):
    assert part_2.published()[name]["value"] == pytest.approx(value)


def test_published_rows_are_run_1_with_the_median_of_all_tokens_as_base():
    rows = part_2.published_rows().set_index(["injection", "chunked_prefill"])
    assert len(rows) == 4 and rows.loc[("heavy", "on"), "window_p50_ms"] == 188.6 and rows.loc[("light", "off"), "base_ms"] == 21.2


# --- figures ------------------------------------------------------------------------------------------------------------


def test_the_beat_shows_the_stall_as_a_flat_piece():
    figure = freeze_figures.token_beats(looked("whole")[1], "light")
    thick = [trace for trace in figure.data if trace.name == "its longest gap in the window"]
    assert [round(trace.x[1] - trace.x[0], 3) for trace in thick] == [0.52, 0.269, 0.144, 0.069]
    assert all(trace.y[0] == trace.y[1] for trace in thick)


def test_the_dial_has_the_budgets_and_the_arm_without_at_its_end():
    figure = freeze_figures.budget_dial(looked("whole")[1], "light")
    worst = [trace for trace in figure.data if trace.name == "worst stall"]
    assert list(worst[0].x) == [100, 250, 500] and list(worst[0].y) == [69, 144, 269]
    assert list(worst[1].x) == ["no<br>chunks"] and list(worst[1].y) == [520]


def test_a_percentile_that_n_cannot_bear_is_not_drawn():
    cases = looked("whole")[1]
    figure = freeze_figures.gap_percentiles(cases, "light", "window")
    curve = next(trace for trace in figure.data if trace.visible and trace.name == "no chunking" and trace.mode == "lines")
    assert curve.customdata[0][2] == 8 and {row[0] for row in curve.customdata} == {"p50", "p40", "p60"}  # 8 gaps bear no p90


def test_an_invalid_arm_is_marked():
    cases = looked("invalid")[1]
    figure = freeze_figures.budget_dial(cases, "light")
    assert all("open" in symbol for trace in figure.data if trace.name == "worst stall" for symbol in trace.marker.symbol)
    assert "not valid" in freeze_figures.gap_percentiles(cases, "light").layout.meta["alt"] and "drift" in freeze_tables.trade_table(cases)


# --- the page -----------------------------------------------------------------------------------------------------------


def test_the_protocol_and_the_parameters_cell_agree():
    cells = jupytext.read(NOTEBOOK).cells
    parameters = next(cell for cell in cells if "parameters" in cell.metadata.get("tags", []))
    assert re.findall(r"^(\w+) = ", parameters.source, flags=re.M) == list(rigs.load_protocol("part_2").parameters)


@pytest.mark.parametrize("name", ["whole", "refused", "no injection", "invalid"])
def test_the_page_runs(name, monkeypatch):
    from inference_wall import headline, post

    monkeypatch.setattr(post, "open_runs", lambda *_, **__: looked(name)[0])
    monkeypatch.setattr(headline, "reproduce", lambda _: "")
    shown, names = [], {}
    monkeypatch.setattr("IPython.display.display", lambda thing, **_: shown.append(thing))
    monkeypatch.setattr("inference_wall.widgets.display", lambda thing, **_: shown.append(thing))
    for cell in jupytext.read(NOTEBOOK).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "part_2", "exec"), names)
    assert sum(isinstance(thing, go.Figure) for thing in shown) >= 4
