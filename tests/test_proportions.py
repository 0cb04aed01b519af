"""Quantities in units of their own machine: worked out by hand, null where a number is missing, and there for every committed rig."""

import pytest

from inference_wall import headline, post, proportions, rigs

PUBLISHED = {"stream_ms": 20.0, "flood_req_s": 8.0, "step_fixed_ms": 22.0, "step_crossover_requests": 60.0, "off_heavy_all_max_ms": 840.0,
             "off_heavy_all_p50_ms": 20.0, "freeze_prompt_tokens": 4_100, "knee_low_req_s": 4.0, "knee_high_req_s": 6.0}


def named(**rigs_numbers):
    found = {f"published.a10g.{name}": {"value": value} for name, value in PUBLISHED.items()}
    for rig, values in rigs_numbers.items():
        found |= {f"{part}.{rig}.{name}": {"value": value} for (part, name), value in values.items()}
    return found


BIG = {("part_1", "stream_ms"): 10.0, ("part_1", "flood_completed_req_s"): 20.0, ("part_1", "flood_of_bound_percent"): 10.0,
       ("part_1", "knee_low"): 8.0, ("part_1", "knee_high"): 12.0, ("part_2", "prefill_ms_per_token"): 0.1, ("part_2", "calm_ms"): 10.0,
       ("part_5", "base_fixed_ms"): 12.0, ("part_5", "base_crossover"): 120.0}
SMALL = {("part_1", "stream_ms"): 2.0, ("part_3", "stream_ms"): 99.0, ("part_3", "fit_fixed_ms"): 4.0, ("part_3", "fit_crossover"): 70.0,
         ("part_5", "base_fixed_ms"): 50.0, ("part_2", "prefill_ms_per_token"): 0.1, ("part_2", "calm_ms"): None}


def values(found, rig):
    return {name: found[f"rigs.{rig}.unit_{name}"]["value"] for name in proportions.QUANTITIES}


def test_each_quantity_is_in_units_of_its_own_machine():
    found = proportions.entries(named(big=BIG, small=SMALL), ["big", "small"])
    assert values(found, "big") == pytest.approx({"bound_ms": 10, "step_over_bound": 1.2, "crossover": 120, "prompt_steps": 10, "flood_percent": 10,
                                                  "knee": "0.40 to 0.60"})
    theirs = values(found, proportions.PUBLISHED)
    assert theirs["step_over_bound"] == pytest.approx(1.1) and theirs["prompt_steps"] == pytest.approx(10) and theirs["knee"] == "0.50 to 0.75"
    assert theirs["flood_percent"] == pytest.approx(100 * 8 / (256 / (128 * 0.020)))
    small = values(found, "small")
    assert small["step_over_bound"] == 2 and small["prompt_steps"] is None and small["knee"] is None  # part 3 before part 5, a null is no number
    assert found["rigs.small.unit_knee"]["reason"]


def test_the_nearest_rig_is_told_for_what_two_rigs_have():
    found = proportions.entries(named(big=BIG, small=SMALL), ["big", "small"])
    assert proportions.nearest(found, ["big", "small"]) == {"step_over_bound": "big", "crossover": "small"}
    assert "over the 2 shapes" in found["rigs.all.nearest"]["value"] and "big in 1 (a step over its bytes)" in found["rigs.all.nearest"]["value"]
    alone = proportions.entries(named(big=BIG), ["big"])
    assert alone["rigs.all.nearest"]["value"] is None and alone["rigs.all.nearest"]["reason"]


def test_a_line_that_cannot_be_relied_on_gives_no_fixed_term_but_the_other_part_may():
    doubtful = {**BIG, ("part_3", "fit_fixed_ms"): 3.0, ("part_3", "fit_crossover"): None}
    assert values(proportions.entries(named(big=doubtful), ["big"]), "big")["step_over_bound"] == pytest.approx(1.2)


def test_every_committed_rig_has_its_quantities():
    shown = {name: post.recorded(name, committed_only=True) for name in rigs.protocol_names()}
    known = headline.collect(shown, committed_only=True)
    assert values(known, "h200-27b")["step_over_bound"] > 1 and values(known, "h200-4b")["prompt_steps"] > 1
