"""Named numbers: computed from a record; what was not measured is null with a reason, never a value."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest

from inference_wall import arms, headline, knee_words, part_1, reading_steps, records, stats


@pytest.fixture(scope="module")
def run():
    found = arms.newest("part_1", "cpu", committed_only=True)
    assert found is not None, "the repository ships a record of part_1 on the CPU rig"
    return found.first


def test_every_null_has_a_reason_and_every_value_is_strict_json(run):
    numbers = part_1.numbers(arms.of_runs([run]))
    json.dumps(numbers, allow_nan=False)
    for name, entry in numbers.items():
        assert (entry["value"] is None) == bool(entry["reason"]), name
        assert entry["run"] == run.name and entry["source"] == "measured"


def test_numbers_follow_the_record(run, monkeypatch):
    before = part_1.numbers(arms.of_runs([run]))
    frame = records.points_frame(run)
    quoted = frame[(frame["pass"] == "measured") & frame["valid"].astype(bool)]
    measured = quoted["request_rate"].idxmin()
    changed = frame.copy()
    changed.loc[measured, "ttft_p50_ms"] *= 2
    monkeypatch.setattr(records, "points_frame", lambda _run: changed)
    after = part_1.numbers(arms.of_runs([run]))
    assert after["lightest_ttft_p50_ms"]["value"] == pytest.approx(2 * before["lightest_ttft_p50_ms"]["value"])
    assert after["ttft_growth"]["value"] == pytest.approx(before["ttft_growth"]["value"] / 2)


def test_an_invalid_point_is_not_quoted(run, monkeypatch):
    frame = records.points_frame(run).assign(valid=False)
    monkeypatch.setattr(records, "points_frame", lambda _run: frame)
    numbers = part_1.numbers(arms.of_runs([run]))
    assert numbers["lightest_ttft_p50_ms"]["value"] is None and "no valid" in numbers["lightest_ttft_p50_ms"]["reason"]
    assert numbers["knee_low"]["value"] is None and numbers["invalid_points"]["value"] == len(frame)


def test_the_bound_is_bytes_over_bandwidth(run):
    numbers = part_1.numbers(arms.of_runs([run]))
    weights, bandwidth = numbers["weights_gb"]["value"], numbers["best_bandwidth_gb_s"]["value"]
    assert numbers["stream_ms"]["value"] == pytest.approx(weights / bandwidth * 1e3)
    assert weights == pytest.approx(0.538, abs=0.01)  # 134.5 million weights of 4 bytes


@pytest.mark.parametrize(("status", "bracket", "said"), [
    ("bracketed", [2.0, 3.0], "between 2 and 3"),
    ("no knee in range", [4.0, None], "up to 4"),
    ("fails at the lowest rate", [None, 1.0], "lightest load, 1"),
    ("not monotone", [1.0, 2.0], "not sharp"),
    ("cannot judge", [None, None], "No verdict"),
])
def test_the_knee_is_told_whichever_way_it_came_out(status, bracket, said):
    assert said in knee_words.sentence({"status": status, "bracket": bracket, "notes": []})


def test_a_bracket_says_how_firm_it_is_over_the_repeats(run):
    frame = records.points_frame(run)
    row = frame[(frame["pass"] == "measured") & (frame["request_rate"] != float("inf"))].iloc[[0]]
    slo = {"ttft_percentile": 99, "ttft_s": 1.0, "completed_ratio": 0.95}

    def point(rate, repeat, share, ttft=200.0):
        return row.assign(request_rate=float(rate), rate_label=str(rate), repeat=repeat, ttft_p50_ms=ttft, ttft_p90_ms=ttft, ttft_p99_ms=ttft,
                          ttft_n=500, num_prompts=500, running_mean=10.0, steady_req_s=share * rate, steady_offered_req_s=float(rate))

    sweep = pd.concat([point(10, 0, 1.0), point(20, 0, 0.8), point(20, 1, 1.0), point(40, 0, 0.8), point(40, 1, 0.8, ttft=2000.0)], ignore_index=True)
    said = knee_words.sentence(stats.knee(sweep, slo), sweep)
    assert "between 10 and 20" in said and "in 1 of 2 repeats" in said and "anywhere from 10 to 40" in said
    assert "10 to 20; 20 to 40" in said and "10 a second was measured once" in said
    assert "first token alone: 20 to 40" in said
    firm = pd.concat([point(10, 0, 1.0), point(10, 1, 1.0), point(20, 0, 0.9, ttft=2000.0), point(20, 1, 0.9, ttft=2000.0)], ignore_index=True)
    said = knee_words.sentence(stats.knee(firm, slo), firm)
    assert "2 repeats by itself says the same" in said and "alone" not in said and "anywhere" not in said
    assert "too short for a steady window" in knee_words.sentence(stats.knee(firm, slo), firm.assign(steady_req_s=None))
    assert part_1.repeats_sentence(sweep) == "Each load was measured twice, 10 a second once."


@pytest.mark.parametrize(("shares", "waits", "short"), [
    ([1.0, 1.0, 0.8], [200.0] * 3, "2 of its 3 repeats"),  # what chance does to one repeat is no wall
    ([1.0], [200.0], "its only repeat"), ([1.0, 0.8, 0.8], [200.0] * 3, ""), ([1.0] * 3, [200.0, 200.0, 2000.0], ""),
])
def test_a_sweep_that_ends_before_the_wall_says_so(run, shares, waits, short):
    frame = records.points_frame(run)
    row = frame[(frame["pass"] == "measured") & (frame["request_rate"] != float("inf"))].iloc[[0]]
    slo = {"ttft_percentile": 99, "ttft_s": 1.0, "completed_ratio": 0.95}
    points = [row.assign(request_rate=16.0, rate_label="16", repeat=repeat, ttft_p50_ms=wait, ttft_p90_ms=wait, ttft_p99_ms=wait, ttft_n=500,
                         num_prompts=500, running_mean=10.0, steady_req_s=16 * share, steady_offered_req_s=16.0)
              for repeat, (share, wait) in enumerate(zip(shares, waits, strict=True))]
    sweep = pd.concat(points, ignore_index=True)
    said = knee_words.stops_short(sweep, slo)
    assert (short in said and "16 a second" in said) if short else said == ""
    assert bool(short) == ("ends before the wall" in knee_words.sentence(stats.knee(sweep, slo), sweep))


def test_the_front_end_is_named_only_where_the_check_saw_it(run):
    numbers = part_1.numbers(arms.of_runs([run]))
    assert part_1.front_end_s(run) is None and "front end" not in part_1.flood_sentence(run, numbers)
    note = {"note": "server 1 in flight; from 1.22 s on, when the front end had passed the burst on"}
    points = [{"pass": "measured", "request_rate": None, "validity": {"checks": {"littles_law": note}}},
              {"pass": "measured", "request_rate": 2.0, "validity": {"checks": {"littles_law": note}}},
              {"pass": "measured", "request_rate": None, "validity": {"checks": {"littles_law": {"note": "nothing"}}}}]
    burst = SimpleNamespace(points=points)
    assert part_1.front_end_s(burst) == (1.22, 1.22)
    assert "after 1.22 s" in part_1.flood_sentence(burst, numbers)


def test_random_weights_are_said(run):
    assert part_1.weights_sentence(run) == ""
    assert "random" in part_1.weights_sentence(SimpleNamespace(document={"model": {"weights": "random"}}))


@pytest.mark.parametrize(("flood", "said"), [((60.0, 62.0), "no capacity to plan with"), ((20.0, 21.0), "fair sign")])
def test_the_flood_is_held_against_the_first_load_that_failed(flood, said):
    found = pd.DataFrame({"point": [1, 1, 2], "request_rate": [20.0, 20.0, float("inf")], "num_prompts": 4, "prompts": [2, 2, 4], "ms": 50.0,
                          "neighbours": 4})
    words = reading_steps.ceiling_sentence(found, flood, 20.0)
    assert said in words and "4 prompts were read in 2 steps" in words and "they were read in 1, 4" in words
    assert reading_steps.ceiling_sentence(found, None, 20.0) == reading_steps.ceiling_sentence(found, flood, None) == ""


def test_every_status_of_the_knee_has_a_sentence(run):
    found = stats.knee(records.points_frame(run), run.document["settings"]["slo"])
    assert knee_words.sentence(found)
    assert part_1.point_for_timeline(run, found)["point"] in [point["point"] for point in run.points]
    assert run.name in headline.reproduce(arms.of_runs([run]))
