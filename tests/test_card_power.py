"""Power and clock beside the loads: worked out by hand on a toy, and whole on every committed record."""

from types import SimpleNamespace

import pandas as pd
import pytest

from inference_wall import card_power, records

TOP = 2_000


def run_of(points, gpus=({"power_limit_w": 700.0, "sm_max_mhz": TOP},)):
    """`points`: (rate or null, pass, [(power, clock, reasons), ...] or null without samples of a card)."""
    frames = {}
    for number, (_, _, samples) in enumerate(points):
        frame = pd.DataFrame({"time": [0, 1], "running": [1.0, 1.0]})
        if samples is not None:
            frame = pd.DataFrame(samples, columns=["gpu_power_w", "gpu_sm_mhz", "gpu_throttle_reasons"])
        frames[number] = frame
    return SimpleNamespace(points=[{"point": number, "request_rate": rate, "pass": name, "load": "sweep", "num_prompts": 5}
                                   for number, (rate, name, _) in enumerate(points)],
                           frame=lambda name, point: frames[point], document={"starts": [{"gpus": list(gpus)}]})


LIGHT = [(300.0, 2_000.0, 0.0)] * 4
CAPPED = [(690.0, 1_500.0, 4.0)] * 3 + [(500.0, 1_900.0, 0.0)]


def test_loads_are_summed_up_over_their_measured_repeats_and_sorted_by_rate():
    run = run_of([(None, "measured", CAPPED), (4.0, "cold", CAPPED), (4.0, "measured", LIGHT), (None, "measured", CAPPED), (2.0, "measured", LIGHT)])
    found = card_power.by_load(run, card_power.offered)
    assert found["load"].tolist() == ["2 a second", "4 a second", "all at once"] and found["samples"].tolist() == [4, 4, 8]
    assert found["capped"].tolist() == [0, 0, 0.75] and found["sm_mhz"].tolist() == [2_000, 2_000, 1_500] and found["power_max_w"].max() == 690
    text = card_power.sentence(found, run)
    assert "`all at once` its median was 1,500 MHz, 75 percent" in text and "power limit of 700 W in 75 percent of the samples" in text
    assert card_power.table(found, "offered").count("<tr>") == 4


def test_a_card_that_keeps_its_clock_is_not_accused():
    kept = run_of([(4.0, "measured", LIGHT)])
    assert card_power.sentence(card_power.by_load(kept, card_power.offered), kept).endswith("the highest it has.")
    touched = run_of([(4.0, "measured", [(690.0, 1_980.0, 4.0), *LIGHT])])
    assert "`4 a second`: in 20 percent of the samples" in card_power.sentence(card_power.by_load(touched, card_power.offered), touched)
    # Another reason for a low clock is not put down to power.
    hot = run_of([(4.0, "measured", [(300.0, 1_000.0, 32.0)] * 3)])
    said = card_power.sentence(card_power.by_load(hot, card_power.offered), hot)
    assert "did not keep its clock" in said and "power limit of" not in said and "one more wall" not in said


@pytest.mark.parametrize("points", [[], [(4.0, "measured", None)], [(4.0, "cold", LIGHT)]])
def test_without_samples_nothing_is_said(points):
    run = run_of(points)
    found = card_power.by_load(run, card_power.offered)
    assert found.empty and card_power.table(found, "offered") == "" == card_power.sentence(found, run)


@pytest.mark.parametrize("folder", [folder for post in ("part_1", "part_3", "part_5")
                                    for folder in records.record_folders(post, committed_only=True)],
                         ids=lambda folder: "/".join(folder.parts[-3:-1]))
def test_every_committed_record_is_either_sampled_or_on_a_processor(folder):
    run = records.open_run(folder)
    found = card_power.by_load(run, card_power.steps_and_floods if run.document["post"] != "part_1" else card_power.offered)
    assert found.empty == (run.document["rig"].get("kind") == "cpu")
    assert found["capped"].between(0, 1).all() and bool(card_power.sentence(found, run)) == (not found.empty)
