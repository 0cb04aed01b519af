"""The published figures: nothing lost in transcription, the frame as the contract has it, numbers that can be checked.

The inventory below was taken from the transcription before it was brought into this shape, by other code than the
package's reader. It counts data rows, filled cells, numeric cells, and adds up every number of a file.
"""

import csv
import json
import math

import pytest

from inference_wall import published, published_numbers

INVENTORY = [
    # file, rows, filled cells, numeric cells, sum of the numeric cells
    ("a10g/part_1/rate_sweep.csv", 37, 650, 439, 1556728.92),
    ("a10g/part_1/decode_step.csv", 46, 341, 82, 99741.4009),
    ("a10g/part_2/prefill_freeze.csv", 12, 134, 84, 27517.4),
    ("a10g/part_2/prefill_trace_ops.csv", 21, 139, 62, 20469746.472),
    ("a10g/part_3/batching.csv", 6, 91, 71, 964929.96),
    ("a10g/part_4/cache_starvation.csv", 13, 320, 206, 9243536.7),
    ("a10g/part_4/scheduler_lines.csv", 38, 342, 190, 37544.6),
    ("a10g/part_4/timeline.csv", 302, 2416, 1812, 36006150.0),
    ("a10g/part_5/quantization.csv", 7, 75, 40, 450177.8688),
    ("a10g/part_5/quantization_ratios.csv", 11, 54, 11, 49.543),
    ("a10g/later/speculation.csv", 27, 425, 332, 1570879.62),
    ("a10g/later/speculation_acceptance.csv", 16, 160, 96, 10001.63),
    ("a10g/later/speculation_facts.csv", 24, 141, 20, 451.0),
    ("a10g/later/speculation_probes.csv", 24, 228, 114, 34047.204),
    ("a10g/later/attention.csv", 24, 192, 120, 524902.136),
    ("a10g/later/attention_fit.csv", 3, 29, 20, 18508.7467),
    ("a10g/later/attention_trace.csv", 8, 62, 31, 163653.6),
    ("other_machines/llama_cpp.csv", 55, 378, 53, 8665622984.934),
    ("claims.csv", 166, 1460, 198, 66813.579),
    ("derived_checks.csv", 24, 166, 21, 1038.25),
]
OURS = {"in_part_1_table"}  # columns that the transcription did not have
RIG_FACTS, RIG_FILLED = 74, 371


def rows_of(name: str) -> list[dict[str, str]]:
    with open(published.folder() / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@pytest.mark.parametrize("name, rows, filled, numeric, total", INVENTORY, ids=[entry[0] for entry in INVENTORY])
def test_nothing_was_lost(name, rows, filled, numeric, total):
    table = rows_of(name)
    cells = [value for row in table for column, value in row.items() if value and column not in OURS]
    numbers = [number for value in cells if (number := finite(value)) is not None]
    assert len(table) == rows
    assert len(cells) == filled
    assert len(numbers) == numeric
    assert sum(numbers) == pytest.approx(total, rel=1e-12, abs=1e-4)


def test_every_published_csv_is_in_the_inventory():
    files = {path.relative_to(published.folder()).as_posix() for path in published.folder().rglob("*.csv")}
    assert files == {entry[0] for entry in INVENTORY}


def test_every_row_says_where_it_comes_from():
    columns = {"claims.csv": "where_stated", "derived_checks.csv": "observed_source"}
    for name, *_ in INVENTORY:
        column = columns.get(name, "source")
        missing = [row for row in rows_of(name) if not row[column]]
        # D-11 compares with a figure that nobody published.
        assert len(missing) <= (1 if name == "derived_checks.csv" else 0), name


def test_the_readme_counts_the_rows():
    text = (published.folder() / "README.md").read_text(encoding="utf-8")
    counts = {name: rows for name, rows, *_ in INVENTORY}
    for name in ("a10g/part_1/rate_sweep.csv", "a10g/part_4/timeline.csv", "claims.csv", "derived_checks.csv"):
        assert f"| `{name}` | {counts[name]} |" in text
    later = sum(rows for name, rows in counts.items() if name.startswith("a10g/later/"))
    assert f"| `a10g/later/*.csv` | {later} |" in text


def test_rig_facts_are_complete_and_strict_json():
    def refuse(token):
        raise AssertionError(f"not strict JSON: {token}")

    path = published.folder() / "a10g" / "rig.json"
    rig = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    scopes = ("hardware", "software", "env", "model", "server", "load")
    facts = [(scope, key, fact) for scope in scopes for key, fact in rig[scope].items()]
    assert len(facts) == RIG_FACTS
    assert set(rig) == {"schema", "rig", "title", "origin", *scopes}
    assert all(set(fact) == {"value", "unit", "source", "note"} and fact["source"] for _, _, fact in facts)
    # scope, key, value and source are always filled; unit and note where there is one
    assert sum(4 + (fact["unit"] is not None) + (fact["note"] is not None) for _, _, fact in facts) == RIG_FILLED
    assert rig["software"]["vllm_version_parts_1_to_7"]["value"] == "0.18.0"


# --- the frame --------------------------------------------------------------------------------------------------


def test_the_frame_has_the_columns_of_the_contract():
    frame = published.sweep_frame()
    latencies = [f"{name}_{s}" for name in ("ttft", "tpot", "itl", "stall", "e2e", "client_delay")
                 for s in ("n", "mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms")]  # fmt: skip
    assert list(frame.columns)[:20] == [
        "rig", "source", "pass", "request_rate", "rate_label", "repeat", "num_prompts", "completed", "failed",
        "completed_req_s", "output_tok_s", "steady_req_s", "steady_output_tok_s", "running_mean", "running_max",
        "waiting_max", "kv_cache_usage_max", "preemptions", "valid", "reasons",
    ]  # fmt: skip
    assert list(frame.columns)[20:] == latencies
    assert set(frame["rig"]) == {"a10g-published"} and set(frame["source"]) == {"published"}
    assert frame["request_rate"].is_monotonic_increasing


def test_what_was_not_published_is_null():
    frame = published.sweep_frame()
    for column in ("steady_req_s", "running_max", "preemptions", "valid", "ttft_p90_ms", "stall_p99_ms", "stall_n",
                   "client_delay_p99_ms", "ttft_max_ms", "itl_n", "itl_p50_ms"):  # fmt: skip
        assert frame[column].isna().all(), column
    rerun = frame[frame["pass"] == "rerun"]
    assert len(rerun) == 9 and rerun["completed"].isna().all() and rerun["ttft_n"].isna().all()


def test_passes_are_chosen_by_name():
    assert len(published.sweep_frame()) == 28
    assert set(published.sweep_frame(passes="fill400")["num_prompts"]) == {400}
    assert set(published.sweep_frame(passes=["main", "warm"])["pass"]) == {"main", "warm"}
    nine_b = published.sweep_frame("QuantTrio/Qwen3.5-9B-AWQ")
    assert len(nine_b) == 9 and nine_b["ttft_mean_ms"].isna().all()
    with pytest.raises(ValueError, match="no published pass hot"):
        published.sweep_frame(passes="hot")
    with pytest.raises(ValueError, match="no published sweep"):
        published.sweep_frame("gpt-2")


def test_the_printed_table_mixes_two_passes_and_the_cold_row_is_marked():
    printed = published.sweep_frame(passes="table")
    assert list(printed["rate_label"]) == ["1", "2", "4", "6", "8", "10", "16", "32", "inf"]
    assert list(printed["pass"]) == ["warm", "main", "main", "warm", "main", "warm", "main", "main", "main"]
    frame = published.sweep_frame()
    cold = frame[frame["reasons"].map(lambda reasons: published.COLD in reasons)]
    assert list(zip(cold["pass"], cold["rate_label"], cold["ttft_p99_ms"], strict=True)) == [("main", "1", 29272.32)]
    assert math.isinf(frame["request_rate"].iloc[-1])


def test_a_p99_from_too_few_requests_is_marked_and_kept():
    frame = published.sweep_frame(passes=["main", "fill400"])
    marked = frame["reasons"].map(lambda reasons: any("our rule asks for 299" in reason for reason in reasons))
    assert (marked == (frame["num_prompts"] < 299)).all()
    assert frame["ttft_p99_ms"].notna().all()


def test_the_frame_for_the_knee_leaves_the_cold_point_out():
    frame = published.judged_frame(published.sweep_frame())
    assert set(frame["pass"]) == {"measured"}
    assert frame["ttft_p99_ms"].notna().all() and 29272.32 not in set(frame["ttft_p99_ms"])
    assert len(frame) == 28 - 1 - 7  # all but the cold point and the seven rows of the re-run without a tail


# --- numbers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbers():
    return published.numbers()


def value(numbers, name):
    return numbers[f"published.a10g.{name}"]["value"]


def test_every_number_is_whole(numbers):
    json.dumps(numbers, allow_nan=False)
    for key, entry in numbers.items():
        assert key.startswith("published.a10g.")
        assert set(entry) == {"value", "unit", "n", "run", "source", "reason", "where"}, key
        assert entry["run"] is None and entry["source"] == "published" and entry["where"], key
        assert (entry["value"] is None) == (entry["reason"] is not None), key
        assert entry["value"] is None or isinstance(entry["value"], int | float), key


@pytest.mark.parametrize(
    "name, expected",
    [
        ("flood_req_s", 8.53), ("flood_output_tok_s", 1092.09), ("weights_gib", 8.61), ("kv_pool_gib", 9.45),
        ("kv_tokens", 77088), ("room_requests", 83.71), ("copy_bandwidth_gb_s", 483), ("token_ms", 20.05),
        ("cold_ttft_p99_ms", 29272.32), ("warm_ttft_p99_ms", 137.76), ("running_flood", 146), ("table_rows", 9),
        ("table_rows_main", 6), ("table_rows_warm", 3), ("step_fixed_ms", 19.1), ("step_per_request_ms", 0.313),
        ("batch_146_step_ms", 65.6), ("ceiling_low_req_s", 6.09), ("ceiling_high_req_s", 8.57),
        ("prompts_per_step", 8), ("rate_6_completed_req_s", 5.41), ("fill400_rate_8_ttft_p99_ms", 9792.79),
    ],
)  # fmt: skip
def test_numbers_as_published(numbers, name, expected):
    assert value(numbers, name) == expected


def test_numbers_computed_here(numbers):
    assert value(numbers, "cold_over_warm_ttft_p99") == pytest.approx(29272.32 / 137.76)
    assert value(numbers, "loaded_stream_ms") == pytest.approx(8.61 * 2**30 / 483e9 * 1e3)
    assert value(numbers, "in_flight_rate_1") == pytest.approx(0.99 * 2.84374)
    assert value(numbers, "tail_growth_rate_8") == pytest.approx(9792.79 / 789.47)
    together = value(numbers, "flood_decode_ms_per_request") + value(numbers, "flood_other_ms_per_request")
    assert together == pytest.approx(1000 / 8.53)


def test_the_knee_depends_on_the_prompts_and_on_the_drain(numbers):
    def bracket(name):
        return value(numbers, f"{name}_low_req_s"), value(numbers, f"{name}_high_req_s")

    assert bracket("knee_400") == bracket("knee") == (6, 8)
    assert bracket("knee_200") == (8, 10)
    assert bracket("knee_200_with_ratio") == (2, 4)
    assert bracket("knee_400_with_ratio") == (6, 8)


def test_the_cache_figures_agree_with_the_engine_log(numbers):
    """The shape predicts three things that the author's server printed: padding, tokens and the running batch."""
    shape = published.model_shape()
    state = shape["linear_value_heads"] * shape["linear_key_dim"] * shape["linear_value_dim"]
    state *= shape["state_bytes_per_value"]
    channels = (2 * shape["linear_key_heads"] + shape["linear_value_heads"]) * shape["linear_key_dim"]
    state += (shape["conv_kernel"] - 1) * channels * shape["conv_bytes_per_value"]
    page = value(numbers, "block_tokens") * value(numbers, "kv_growth_layer_bytes")
    note = published.rig_facts()["model"]["attention_block_size"]["note"]
    assert f"{100 * (page / state - 1):.2f}%" in note  # the page is padded by 0.76 %
    groups, blocks = value(numbers, "layer_groups"), value(numbers, "kv_blocks")
    assert blocks // groups * value(numbers, "block_tokens") == value(numbers, "kv_tokens")
    assert blocks / (math.ceil(2048 / 528) + groups - 1) == pytest.approx(value(numbers, "room_requests"), abs=0.005)
    assert value(numbers, "room_flood_requests") == value(numbers, "running_flood")
    assert value(numbers, "pool_kb_per_token") == pytest.approx(131.6, abs=0.05)
    assert value(numbers, "kv_growth_kb") == pytest.approx(32.8, abs=0.05)


def test_the_bounds_come_from_the_shape(numbers):
    counts = published_numbers.weight_counts(published.model_shape())
    assert counts["head"] == 248320 * 2560
    assert counts["body"] == pytest.approx(3.57e9, rel=1e-3)
    # Loaded weights hold the streamed ones and the picture part, never less.
    assert value(numbers, "streamed_gb") == pytest.approx(8.41, abs=0.005)
    assert 0 < value(numbers, "not_streamed_gb") < 1
    # With two bytes a weight and two operations a weight the two ratios are one and the same.
    assert value(numbers, "stream_over_arithmetic") == pytest.approx(value(numbers, "operations_per_byte"))
    # A bound that a measurement beats is no bound.
    assert value(numbers, "stream_ms") < value(numbers, "token_ms")
    assert value(numbers, "bound_batch_8_step_ms") < value(numbers, "batch_8_step_ms")
    assert value(numbers, "bound_batch_64_step_ms") < value(numbers, "batch_64_step_ms")
    assert value(numbers, "bound_wall_req_s") > value(numbers, "ceiling_high_req_s")


@pytest.mark.parametrize(
    "name, expected",
    [("preemptions_seed", 0), ("preemptions_low", 17), ("preemptions_high", 205), ("nine_b_share_seed", 0.80),
     ("nine_b_share", 0.75)],
)  # fmt: skip
def test_corrections_as_published(numbers, name, expected):
    assert value(numbers, name) == expected


def test_the_two_sides_of_chunked_prefill(numbers):
    assert value(numbers, "chunking_tail_gain") == pytest.approx(831.0 / 344.6)
    assert value(numbers, "chunking_median_loss") == pytest.approx(188.6 / 28.5)
