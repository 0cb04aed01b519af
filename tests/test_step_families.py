"""What a card does in a step by batch, and the recurrent state against its bytes: from traces made by hand and from the record of a card."""

import pandas as pd
import pytest
import synthetic_cliff as toy
from bs4 import BeautifulSoup
from test_held_up import h200  # noqa: F401 - a fixture
from test_trace import DECODE

from inference_wall import held_up, part_3, step_families


@pytest.fixture
def traces(tmp_path):
    """Steps of 30 and 60 ms, half of them multiplication, and 0.1 ms of state for each of 4 and 16 sequences."""
    return [(4, toy.card_trace(tmp_path, 4, 30_000.0, state_us=400.0)), (16, toy.card_trace(tmp_path, 16, 60_000.0, state_us=1_600.0))]


def run(copy=10.0, **facts):
    made = toy.cap_16(batches=(), concurrency=())
    made.document["model"]["facts"] = facts
    made.document["starts"][0]["bandwidth"] = {"copy_gb_s": copy, "read_gb_s": 99.0}
    return made


KNOWN = {"state_bytes_per_sequence": 400_000, "conv_bytes_per_sequence": 50_000}  # read and written at 10 GB/s: 90 us


def test_families_by_hand(traces):
    found = step_families.families(traces).set_index(["batch", "family"])
    row = found.loc[(16, "matrix multiplication")]
    assert row["self_ms"] == pytest.approx(30) and row["step_ms"] == pytest.approx(60 * 6 / 5)  # five steps, one of them twice as long
    assert row["share"] == pytest.approx(30 / 72) and row["gap_ms"] == pytest.approx(1) and row["steps"] == 5
    assert found.loc[(16, "recurrent state"), "self_ms"] == pytest.approx(1.6) and row["busy_ms"] == pytest.approx(31.6)
    assert found.loc[16, "self_ms"].sum() == pytest.approx(row["step_ms"])
    assert row["file_kb"] == pytest.approx(traces[1][1].stat().st_size / 1e3)


def test_a_processor_and_another_batch_have_no_kernels(traces):
    assert step_families.families([(4, DECODE), (99, traces[0][1])]).empty
    nothing = step_families.families([])
    assert step_families.families_table(nothing, pd.DataFrame()) == "" and step_families.families_sentence(nothing) == ""


def test_the_state_against_its_bytes_by_hand(traces):
    found = step_families.state(step_families.families(traces), run(**KNOWN))
    assert found["batch"].tolist() == [4, 16] and found["sequence_us"].tolist() == pytest.approx([100, 100])
    assert found["bytes_us"].tolist() == pytest.approx([90, 90]) and found["ratio"].tolist() == pytest.approx([100 / 90] * 2)
    assert found["share"].iloc[1] == pytest.approx(1.6 / 72)


@pytest.mark.parametrize("made", [lambda: run(), lambda: run(copy=None, **KNOWN), lambda: None, lambda: toy.cap_16(bandwidth=False)])
def test_what_is_not_known_is_no_row(traces, made):
    assert step_families.state(step_families.families(traces), made()).empty


def test_a_model_without_state_has_no_row(tmp_path):
    found = step_families.families([(4, toy.card_trace(tmp_path, 4, 30_000.0))])
    state = step_families.state(found, run(**KNOWN))
    assert state.empty and step_families.state_table(state) == "" and step_families.state_sentence(state) == ""


@pytest.mark.parametrize(("ratio", "said", "not_said"), [(1.1, "bound by memory", "do not explain"), (1.9, "do not explain", "bound by memory")])
def test_the_sentence_follows_the_ratio(ratio, said, not_said):
    rows = [(1, 5.0, 0.1, 0.02, 100.0, 25.0, 4.0), (64, 6.0, 1.8, 0.3, 25.0 * ratio, 25.0, ratio)]
    text = step_families.state_sentence(pd.DataFrame(rows, columns=step_families.STATE_COLUMNS))
    assert said in text and not_said not in text and f"{ratio:.2f} times" in text and "1.80 of 6.00 ms, 30 percent" in text
    assert ("4.0 times" in text) is (ratio < 2 and 4 > 2 * ratio)


def test_tables_have_a_column_a_batch_and_say_what_is_missing():
    found = part_3.look(toy.arm_set(toy.held_up(), toy.cap_1()))
    table = BeautifulSoup(step_families.families_table(found.families, found.batches), "html.parser")
    assert [head.text for head in table.select("thead th")] == ["ms", "batch 1", "batch 16"]
    rows = {row.th.text: row.find_all("td") for row in table.select("tbody tr")}
    client = rows["step, by the client without profiler"]
    assert client[0].text == "22.0" and client[1].text == "–" and "held up" in client[1]["title"]
    assert "attention" not in rows and rows["recurrent state"][1].text == "5.00" and rows["steps in the trace"][0].text == "5"
    state = BeautifulSoup(step_families.state_table(found.state), "html.parser")
    assert [cell.text for cell in state.select("tbody tr")[1].find_all("td")] == ["36.0", "5.00", "14 %", "312", "250", "1.25"]


def test_the_shared_and_the_own_part_seen_from_inside(traces):
    text = step_families.families_sentence(step_families.families(traces))
    assert "from 15.0 to 30.0 ms" in text and "from the start" in text
    found = part_3.look(toy.arm_set(toy.held_up(), toy.cap_1()))
    assert "recurrent state grows most: from 0.400 to 5.00 ms" in step_families.families_sentence(found.families)


def test_the_state_of_the_card_moves_like_a_plain_copy(h200):  # noqa: F811
    row = h200.state.set_index("batch").loc[64]
    assert 1 < row["ratio"] < step_families.NEAR_COPY and 0.2 < row["share"] < 0.4
    assert held_up.surely(h200.batches) and h200.state["share"].is_monotonic_increasing
