"""Named numbers out of the published figures: what the primer, Part 1 and the honesty page put into sentences.

What:   `numbers()` gives each as value, unit, n, source and the place where it was published, or how it was computed
        here from published figures.
Why:    nobody types a number into a sentence, also not one that somebody else measured.
Use:    `published.numbers()["published.a10g.flood_req_s"]["value"]`; in a page {num}`published.a10g.flood_req_s:.2f`
Not:    our own runs (`headline`), reading the files (`published`), the later posts.
"""

from __future__ import annotations

import math
from typing import Any

from .knee import knee
from .published import MODEL, RIG, entry, judged_frame, model_shape, rig_facts, sweep_frame, table
from .rigs import load_rig

GIB = 2**30


def numbers() -> dict[str, dict[str, Any]]:
    """The published numbers that the primer and Part 1 name; every key starts with `published.a10g.`.

    Each entry holds value, unit, n (samples behind a percentile, else null), run (null), source, reason (null, or why
    the value is null) and where (a file of the author's repository, or how it was computed here from those).
    """
    book = _Book()
    _hardware_and_load(book)
    _memory(book)
    _decode_step(book)
    _bounds(book)
    _sweep(book)
    _knees(book)
    _past_the_knee(book)
    _corrections(book)
    return book.entries


class _Book:
    """Collects entries. A missing value becomes null with a reason."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> Any:
        return self.entries[f"published.a10g.{name}"]["value"]

    def put(self, name: str, value: Any, unit: str, where: str, n: int | None = None) -> None:
        """A value as published."""
        self.entries[f"published.a10g.{name}"] = entry(value, unit, where, n)

    def derive(self, name: str, value: Any, unit: str, how: str) -> None:
        """A value computed here from published ones."""
        self.put(name, value, unit, f"computed here: {how}")

    def alias(self, name: str, other: str) -> None:
        self.entries[f"published.a10g.{name}"] = dict(self.entries[f"published.a10g.{other}"])


def _hardware_and_load(book: _Book) -> None:
    facts = rig_facts()
    for name, scope, key, unit in (
        ("gpu_memory_gb", "hardware", "gpu_memory", "GB"),
        ("copy_bandwidth_gb_s", "hardware", "copy_bandwidth_measured", "GB/s"),
        ("nominal_bandwidth_gb_s", "hardware", "bandwidth_nominal", "GB/s"),
        ("fp16_tflop_s", "hardware", "fp16_compute_quoted", "TFLOP/s"),
        ("compile_cold_s", "software", "compile_time_cold", "s"),
        ("weights_gib", "model", "weights_4b", "GiB"),
        ("kv_pool_gib", "model", "kv_pool_4b", "GiB"),
        ("kv_tokens", "model", "kv_tokens_4b", "tokens"),
        ("room_requests", "model", "max_concurrency_4b_2048", "requests"),
        ("block_tokens", "model", "attention_block_size", "tokens"),
        ("max_model_len", "server", "max_model_len", "tokens"),
        ("max_num_seqs", "server", "max_num_seqs", "requests"),
        ("gpu_memory_utilization", "server", "gpu_memory_utilization", "fraction"),
        ("step_budget_tokens", "server", "max_num_batched_tokens_online", "tokens"),
        ("input_tokens", "load", "input_len", "tokens"),
        ("output_tokens", "load", "output_len", "tokens"),
        ("sweep_prompts", "load", "num_prompts", "requests"),
    ):
        fact = facts[scope][key]
        book.put(name, fact["value"], unit, fact["source"])
    book.derive("request_tokens", book["input_tokens"] + book["output_tokens"], "tokens", "prompt and answer")
    prompts = book["step_budget_tokens"] // book["input_tokens"]
    book.derive("prompts_per_step", prompts, "prompts", "step budget over prompt length")


def _memory(book: _Book) -> None:
    """What the card holds. Bytes per token and per request follow from the shape of the model."""
    shape = model_shape()
    for name in ("layers", "full_attention_layers", "linear_attention_layers"):
        book.put(name, shape[name], "layers", shape["source"])
    for name in ("kv_heads", "head_dim", "linear_value_heads", "linear_key_dim", "linear_value_dim"):
        book.put(name, shape[name], "", shape["source"])
    for name in ("cache_bytes_per_value", "state_bytes_per_value"):
        book.put(name, shape[name], "bytes", shape["source"])
    book.derive("weights_gb", book["weights_gib"] * GIB / 1e9, "GB", "weights in units of 10^9 bytes")
    share = book["weights_gib"] / book["gpu_memory_gb"]
    book.derive("weights_share_of_card", share, "fraction", "loaded GiB over the 23 that are printed for the card")

    layer = 2 * shape["kv_heads"] * shape["head_dim"] * shape["cache_bytes_per_value"]
    growth = shape["full_attention_layers"] * layer
    cells = shape["linear_value_heads"] * shape["linear_key_dim"] * shape["linear_value_dim"]
    state = shape["linear_attention_layers"] * cells * shape["state_bytes_per_value"]
    book.derive("kv_growth_layer_bytes", layer, "bytes", "key and value, for each KV head, head size x bytes per value")
    book.derive("kv_growth_kb", growth / 1e3, "kB", "growth per token over the full-attention layers")
    book.derive("kv_growth_all_layers_kb", shape["layers"] * layer / 1e3, "kB", "growth if every layer kept a cache")
    book.derive("request_cache_mb", book["request_tokens"] * growth / 1e6, "MB", "growing cache of a whole request")
    book.derive("state_mb", state / 1e6, "MB", "fixed state of a request over the linear-attention layers")
    book.derive("state_in_tokens", state / growth, "tokens", "fixed state over growth per token")

    pool = book["kv_pool_gib"] * GIB
    book.derive("pool_kb_per_token", pool / book["kv_tokens"] / 1e3, "kB", "pool bytes over reported tokens")
    book.derive("pool_over_growth", book["pool_kb_per_token"] / book["kv_growth_kb"], "x", "the two cache figures")
    naive = book["kv_tokens"] / book["max_model_len"]
    book.derive("naive_room_requests", naive, "requests", "reported tokens over context length")

    # All layer groups draw equal blocks from one pool: the group with the growing cache as many as its tokens need,
    # each group with a fixed state one for each request.
    groups = shape["layers"] // shape["full_attention_layers"]
    blocks = int(pool // (growth * book["block_tokens"]))
    need = math.ceil(book["request_tokens"] / book["block_tokens"]) + groups - 1
    book.derive("layer_groups", groups, "groups", "layers over full-attention layers")
    book.derive("kv_blocks", blocks, "blocks", "pool over the bytes of a block")
    book.derive("blocks_per_request", need, "blocks", "blocks for prompt and answer, and one for each group of states")
    book.derive("room_flood_requests", blocks // need, "requests", "all blocks over those of one request")


def _decode_step(book: _Book) -> None:
    rows = table("a10g/part_1/decode_step.csv")
    names = {"step_ms": "step_ms", "pure_decode_tok_s": "decode_tok_s", "gpu_busy": "gpu_busy_pct"}
    points = rows[(rows["record_type"] == "step_point") & rows["metric"].isin(names)]
    for row in points.to_dict("records"):
        book.put(f"batch_{row['batch']}_{names[row['metric']]}", float(row["value"]), row["unit"], row["source"])
    largest = max(points["batch"].astype(int))
    book.put("decode_batch_max", largest, "requests", points["source"].iloc[0])
    for name, unit in (("step_ms", "ms"), ("decode_tok_s", "tok/s")):
        book.put(f"decode_max_{name}", book[f"batch_{largest}_{name}"], unit, points["source"].iloc[0])

    for name, kind, metric in (
        ("step_fixed_ms", "fit", "fixed_ms"),
        ("step_per_request_ms", "fit", "per_seq_ms"),
        ("step_crossover_requests", "fit", "crossover_batch"),
        ("token_ms", "floor", "single_stream_ms_per_token"),
    ):
        row = rows[(rows["record_type"] == kind) & (rows["model"] == MODEL) & (rows["metric"] == metric)].iloc[0]
        unit = "requests" if metric == "crossover_batch" else row["unit"]
        book.put(name, float(row["value"]), unit, row["source"])
    one = table("a10g/part_3/batching.csv").iloc[0]
    book.put("cap_1_output_tok_s", one["output_tok_s"], "tok/s", one["source"])


def weight_counts(shape: dict[str, Any]) -> dict[str, int]:
    """Weights of the text part: `body` (all layers) and `head` (the output layer, which a tied table shares)."""
    hidden, wide = shape["hidden"], shape["heads"] * shape["head_dim"]
    keys = shape["linear_key_heads"] * shape["linear_key_dim"]
    values = shape["linear_value_heads"] * shape["linear_value_dim"]
    queries = wide * (2 if shape["attention_output_gate"] else 1)
    full = hidden * (queries + 2 * shape["kv_heads"] * shape["head_dim"] + wide)
    # queries, keys, values and output gate; two small gates for each value head; output; convolution
    linear = hidden * (2 * keys + 2 * values + 2 * shape["linear_value_heads"] + values)
    linear += shape["conv_kernel"] * (2 * keys + values)
    body = shape["layers"] * 3 * hidden * shape["intermediate"]
    body += shape["full_attention_layers"] * full + shape["linear_attention_layers"] * linear
    return {"body": body, "head": shape["vocabulary"] * hidden}


def _bounds(book: _Book) -> None:
    """What bytes over bandwidth, and operations over arithmetic, allow at best. No measurement of serving goes in."""
    shape = model_shape()
    counts, width = weight_counts(shape), shape["bytes_per_weight"]
    weights = counts["body"] + counts["head"]
    bandwidth, arithmetic = book["copy_bandwidth_gb_s"] * 1e9, book["fp16_tflop_s"] * 1e12
    stream = weights * width / bandwidth * 1e3
    book.derive("streamed_gb", weights * width / 1e9, "GB", "weights of all layers and output layer, from the shape")
    book.derive("not_streamed_gb", book["weights_gb"] - book["streamed_gb"], "GB", "loaded less streamed")
    book.derive("stream_ms", stream, "ms", "streamed weights over measured copy bandwidth")
    book.derive("stream_tok_s", 1e3 / stream, "tok/s", "one token for each weight stream")
    book.derive("loaded_stream_ms", book["weights_gb"] * 1e9 / bandwidth * 1e3, "ms", "loaded weights over bandwidth")
    book.derive("arithmetic_ms", 2 * weights / arithmetic * 1e3, "ms", "two operations for each weight, over the peak")
    book.derive("stream_over_arithmetic", stream / book["arithmetic_ms"], "x", "weight stream over arithmetic")
    book.derive("operations_per_byte", arithmetic / bandwidth, "operations", "peak arithmetic over copy bandwidth")
    book.derive("stream_share_of_token", stream / book["token_ms"], "fraction", "weight stream over time per token")
    book.derive("stream_share_of_fixed", stream / book["step_fixed_ms"], "fraction", "weight stream over fixed part")

    # A request's own traffic in a step: its state is read and written, its growing cache is read.
    own = 2 * book["state_mb"] + book["input_tokens"] * book["kv_growth_kb"] / 1e3
    book.derive("own_traffic_mb", own, "MB", "state read and written, cache of the prompt read")
    book.derive("own_ms", own * 1e6 / bandwidth * 1e3, "ms", "own traffic over bandwidth")
    for batch in (8, 64, book["max_num_seqs"]):
        step = stream + batch * book["own_ms"]
        book.derive(f"bound_batch_{batch}_step_ms", step, "ms", f"one weight stream and the own traffic of {batch}")
        book.derive(f"bound_batch_{batch}_tok_s", batch / step * 1e3, "tok/s", f"{batch} tokens a step")
    prompt = 2 * counts["body"] * book["input_tokens"] / arithmetic * 1e3
    book.derive("bound_prompt_ms", prompt, "ms", "two operations for each weight and prompt token, over the peak")
    full = book["max_num_seqs"]
    answer = book["output_tokens"] * book[f"bound_batch_{full}_step_ms"] / full
    book.derive("bound_answer_ms", answer, "ms", f"answer tokens x step, shared by {full}")
    book.derive("bound_wall_req_s", 1e3 / (answer + prompt), "req/s", "one over the two")


_ROW_METRICS = {
    "completed_req_s": "req/s",
    "output_tok_s": "tok/s",
    "ttft_p50_ms": "ms",
    "ttft_p99_ms": "ms",
    "tpot_mean_ms": "ms",
    "itl_p99_ms": "ms",
    "e2e_p50_ms": "ms",
    "e2e_p99_ms": "ms",
}


def _sweep(book: _Book) -> None:
    """Every row of the printed table as `rate_<rate>_<metric>`, of the 400-prompt pass as `fill400_rate_...`."""
    rows = table("a10g/part_1/rate_sweep.csv")
    rows = rows[rows["model"] == MODEL]
    printed = rows[rows["in_part_1_table"] == "yes"]
    cold = rows[rows["first_point_cold"] == "yes"].iloc[0].to_dict()
    for row in printed.to_dict("records"):
        _row(book, f"rate_{row['offered_req_s']:g}", row)
    for row in rows[rows["pass"] == "fill400"].to_dict("records"):
        _row(book, f"fill400_rate_{row['offered_req_s']:g}", row)
    _row(book, "cold", cold)
    for name, other in (
        ("flood_req_s", "rate_inf_completed_req_s"),
        ("flood_output_tok_s", "rate_inf_output_tok_s"),
        ("warm_ttft_p50_ms", "rate_1_ttft_p50_ms"),
        ("warm_ttft_p99_ms", "rate_1_ttft_p99_ms"),
        ("warm_e2e_p99_ms", "rate_1_e2e_p99_ms"),
    ):
        book.alias(name, other)
    for name in ("ttft_p99", "e2e_p99"):
        ratio = book[f"cold_{name}_ms"] / book[f"warm_{name}_ms"]
        book.derive(f"cold_over_warm_{name}", ratio, "x", f"{name} at rate 1, cold over warm")
    ratio = book["cold_ttft_p99_ms"] / book["cold_ttft_p50_ms"]
    book.derive("cold_ttft_p99_over_p50", ratio, "x", "cold point, p99 over median")

    for name, chosen in (("", printed), ("_main", printed[printed["pass"] == "main"]),
                         ("_warm", printed[printed["pass"] == "warm"])):  # fmt: skip
        book.derive(f"table_rows{name}", len(chosen), "rows", "rows of the printed table, by the log they match")
    one = printed[printed["offered_req_s"] == 1].iloc[0]
    in_flight = one["completed_req_s"] * one["e2e_mean_ms"] / 1e3
    book.derive("in_flight_rate_1", in_flight, "requests", "Little's law at rate 1, warm: rate x mean time")


def _row(book: _Book, label: str, row: dict[str, Any]) -> None:
    for metric, unit in _ROW_METRICS.items():
        # The latencies of a request have one sample each; how many token gaps the published itl pools is not known.
        counted = unit == "ms" and not metric.startswith("itl")
        n = int(row["successful_requests"]) if counted else None
        book.put(f"{label}_{metric}", row[metric], unit, row["source"], n=n)
    if math.isfinite(row["offered_req_s"]):
        ratio = row["completed_req_s"] / row["offered_req_s"]
        book.derive(f"{label}_completed_ratio", ratio, "fraction", "completed over offered, drain included")


def _knees(book: _Book) -> None:
    """Brackets under the rig's service level, which is this book's and not the author's.

    The published completed rate counts the drain after the last arrival, so on a short point the ratio falls below 1
    without any overload. The plain brackets therefore look at the tail alone.
    """
    slo = load_rig(RIG).post("part_1")["slo"]
    for name, passes, ratio, how in (
        ("knee", ("main", "warm", "fill400"), 0.0, "p99 TTFT alone, all passes with complete rows"),
        ("knee_200", ("main", "warm"), 0.0, "p99 TTFT alone, passes with 200 prompts"),
        ("knee_400", ("fill400",), 0.0, "p99 TTFT alone, pass with 400 prompts"),
        ("knee_200_with_ratio", ("main", "warm"), slo["completed_ratio"], "p99 TTFT and completed ratio, 200 prompts"),
        ("knee_400_with_ratio", ("fill400",), slo["completed_ratio"], "p99 TTFT and completed ratio, 400 prompts"),
    ):
        low, high = knee(judged_frame(sweep_frame(passes=passes)), slo | {"completed_ratio": ratio})["bracket"]
        book.derive(f"{name}_low_req_s", low, "req/s", how)
        book.derive(f"{name}_high_req_s", high, "req/s", how)
    for name, unit in (("ttft_s", "s"), ("completed_ratio", "fraction")):
        book.put(f"slo_{name}", slo[name], unit, f"experiments/rigs/{RIG}.toml")


def _past_the_knee(book: _Book) -> None:
    """The ceiling, how the tail grows with the number of prompts, and where a saturated server's time goes."""
    rows = table("a10g/part_1/rate_sweep.csv")
    past = rows[(rows["model"] == MODEL) & (rows["offered_req_s"] >= book["knee_high_req_s"])]
    for name, index in (("low", past["completed_req_s"].idxmin()), ("high", past["completed_req_s"].idxmax())):
        book.put(f"ceiling_{name}_req_s", past.loc[index, "completed_req_s"], "req/s", past.loc[index, "source"])
    growth = book["fill400_rate_8_ttft_p99_ms"] / book["rate_8_ttft_p99_ms"]
    book.derive("tail_growth_rate_8", growth, "x", "p99 TTFT at rate 8, 400 prompts over 200")
    facts = table("a10g/later/speculation_facts.csv")
    running = facts[(facts["metric"] == "running_at_flood") & (facts["arm"] == "off")].iloc[0]
    book.put("running_flood", float(running["value"]), "requests", running["source"])

    each = 1e3 / book["flood_req_s"]
    decode = book["output_tokens"] * book["decode_max_step_ms"] / book["decode_batch_max"]
    book.derive("flood_ms_per_request", each, "ms", "one over the flood rate")
    book.derive("flood_decode_ms_per_request", decode, "ms", "answer tokens x step time, shared by the running batch")
    book.derive("flood_other_ms_per_request", each - decode, "ms", "the rest")
    book.derive("flood_decode_share", decode / each, "fraction", "decode over all time of a request at flood")
    pure = book["decode_max_decode_tok_s"] / book["flood_output_tok_s"]
    book.derive("pure_decode_over_flood", pure, "x", "decode without arrivals over serving at flood")
    rise = book["flood_output_tok_s"] / book["cap_1_output_tok_s"]
    book.derive("flood_over_cap_1", rise, "x", "tokens per second at flood over one request at a time")


def _corrections(book: _Book) -> None:
    """Figures of the series that its author, or the published logs, put right later. For the honesty page."""
    book.derive("claims", len(table("claims.csv")), "claims", "rows of benchmarks/published/claims.csv")
    runs = table("a10g/part_4/cache_starvation.csv")
    counted = runs[runs["era"] == "current"]["preemptions_prometheus"].astype(float)
    seed = runs[runs["era"] == "seed"].iloc[0]
    book.put("preemptions_seed", float(seed["preemptions_log_clause"]), "preemptions", seed["source"])
    for name, value in (("low", counted.min()), ("high", counted.max())):
        book.put(f"preemptions_{name}", float(value), "preemptions", "benchmarks/05-cache-starvation")
    ratios = table("a10g/part_5/quantization_ratios.csv").set_index("metric")
    for name, metric in (("nine_b_share_seed", "seed_stated_ratio"), ("nine_b_share", "ceiling_req_s_ratio")):
        book.put(name, float(ratios.loc[metric, "value"]), "fraction", ratios.loc[metric, "source"])
    freeze = table("a10g/part_2/prefill_freeze.csv")
    heavy = freeze[(freeze["injection"] == "heavy") & (freeze["run"] == 1)].set_index(["chunked_prefill", "population"])
    tail = heavy.loc[("off", "all_tokens"), "itl_p99_ms"] / heavy.loc[("on", "all_tokens"), "itl_p99_ms"]
    median = heavy.loc[("on", "injection_window"), "itl_p50_ms"] / heavy.loc[("off", "injection_window"), "itl_p50_ms"]
    book.derive("chunking_tail_gain", tail, "x", "p99 gap of all tokens, chunking off over on, heavy injection")
    book.derive("chunking_median_loss", median, "x", "median gap in the injection window, chunking on over off")
