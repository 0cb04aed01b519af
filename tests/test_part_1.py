"""Named numbers: computed from a record; what was not measured is null with a reason, never a value."""

import json

import pytest

from inference_wall import arms, headline, part_1, records, stats


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
    assert said in part_1.knee_sentence({"status": status, "bracket": bracket, "notes": []})


def test_every_status_of_the_knee_has_a_sentence(run):
    found = stats.knee(records.points_frame(run), run.document["settings"]["slo"])
    assert part_1.knee_sentence(found)
    assert part_1.point_for_timeline(run, found)["point"] in [point["point"] for point in run.points]
    assert run.name in headline.reproduce(arms.of_runs([run]))
