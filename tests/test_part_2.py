"""Part 2's numbers, words and figures: the verdict on each outcome, refused and missing arms, and the page executed on made-up records."""

import json
import re
from functools import cache

import jupytext
import plotly.graph_objects as go
import pytest
from synthetic_freeze import Run, arm_set, load, refused, run, whole_set

from inference_wall import freeze, freeze_figures, freeze_tables, part_2, published, rigs
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
    for words in (part_2.arms_sentence(arms, cases), part_2.stall_sentence(arms, cases), part_2.trade_sentence(arms, cases),
                  part_2.population_sentence(cases), part_2.cost_sentence(cases), part_2.verdict_sentence(arms, cases)):
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
    assert found["headline"] == f"{520 / 69:.1f} x longer worst stall without chunking" and found["shape"] == "held"
    assert "520 ms" in found["shape_because"] and "69.0 ms" in found["shape_because"] and "20.0" in found["shape_because"]


def test_did_not_hold_where_the_budget_swallows_the_prompts_whole():
    found = verdict("null result")
    assert found["shape"] == "did not hold" and found["headline"].startswith("1.0 x")
    words = part_2.stall_sentence(*looked("null result"))
    assert "not longer without chunking" in words and "no difference is shown" in words


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
    words = part_2.arms_sentence(arms, freeze.read(arms))
    assert "`unchunked` is not testable here" in words and "`chunked-100` was not measured yet" in words
    table = freeze_tables.settings_table(arms)
    assert "not testable here: the engine does not run" in table and "no record" in table
    assert "All 4 arms were measured" in part_2.arms_sentence(*looked("whole"))


def test_the_setting_that_took_effect_is_shown_and_not_the_wish():
    arms, cases = looked("stubborn")
    assert "did the opposite" in freeze_tables.settings_table(arms) and "did the opposite" in part_2.arms_sentence(arms, cases)
    assert "not said" in freeze_tables.settings_table(looked("silent log")[0])


def test_the_trade_names_the_window_where_the_medians_disagree():
    words = part_2.trade_sentence(*looked("whole"))
    # Narrow: 3 stalls of 520 ms outnumber the calm tokens; to the end: they do not.
    assert "20.0 against 69.0 ms, worse with chunking (3.5 x)" in words
    assert "520 against 69.0 ms, better with chunking" in words and "opposite directions" in words
    assert "1,500 against 1,500 ms, the same" in words


def test_the_population_sentence_follows_the_p99():
    long = arm_set(run("unchunked", 2000, whole=True, calm=300))
    words = part_2.population_sentence(freeze.read(long))
    assert "is 520 ms" in words and "p99 is 20.0 ms: **the stall is hidden.**" in words
    short = arm_set(run("unchunked", 2000, whole=True, calm=50, rounds=4))
    assert "p99 is 520 ms: the stall still shows" in part_2.population_sentence(freeze.read(short))
    assert "a p99 is withheld" in part_2.population_sentence(looked("whole")[1])


def test_one_cost_from_two_measurements():
    words = part_2.cost_sentence(looked("whole")[1])
    assert "20.0 ms + 0.500 ms" in words and "2,000 tokens a second" in words and "differ by 14%" in words  # 1,754 from the wait


# --- published ----------------------------------------------------------------------------------------------------------


def test_published_numbers_have_a_source_and_new_names():
    entries = part_2.published()
    json.dumps(entries, allow_nan=False)
    assert all(entry["source"] == "published" and entry["where"] and entry["value"] is not None for entry in entries.values())
    assert not {f"published.a10g.{name}" for name in entries} & published.numbers().keys()


@pytest.mark.parametrize(("name", "value"), [
    ("off_heavy_window_p99_ms", 837.8), ("on_light_all_p99_ms", 324.6), ("off_light_all_p99_ms", 102.8), ("on_heavy_run_2_window_p50_ms", 187.3),
    ("freeze_ratio", 838.3 / 349.4), ("median_in_window_ratio", 188.6 / 28.5), ("freeze_prompt_tokens", 5408), ("freeze_slices", 3),
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
