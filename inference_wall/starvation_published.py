"""What the author published on cache starvation, with what room formula and rules say of each run.

What:   `runs` gives every published run with its cache, its count and, computed here, the count of the rules alone; `samples` the
        counters as they were sampled; `published` names the numbers that Part 4 uses.
Why:    the same arithmetic must explain the author's counts before it explains ours.
Use:    runs()[["arm", "preemptions", "rules"]];  published()["starvation_high"]["value"]
Not:    our own runs (`starvation`), the author's other figures (`published_numbers`).
"""

from __future__ import annotations

import math
from functools import cache as once
from typing import Any

import pandas as pd

from . import published as author
from . import starvation
from .block_rules import Cache

RUNS_CSV, TIMELINE_CSV = "a10g/part_4/cache_starvation.csv", "a10g/part_4/timeline.csv"


@once
def _runs() -> pd.DataFrame:
    facts, table = author.rig_facts(), author.table(RUNS_CSV)
    seats, budget = (facts["server"][name]["value"] for name in ("max_num_seqs", "max_num_batched_tokens_online"))
    hybrid_size = facts["model"]["attention_block_size"]["value"]
    tight = table[(table["attention"] == "dense") & (table["kv_blocks_override"] == "300")].iloc[0]
    dense_size = int(tight["kv_tokens"]) // int(tight["kv_blocks_override"])
    rows = []
    for row in table.to_dict("records"):
        dense, length, named = row["attention"] == "dense", int(row["concurrency_basis_tokens"]), str(row["kv_blocks_override"])
        size = dense_size if dense else hybrid_size
        # The hybrid model's blocks of state follow from its smallest cache, whose blocks and concurrency are both printed.
        state = 0 if dense else _state_blocks(table, size)
        each = math.ceil(length / size) + state
        blocks = int(named) if named.isdigit() else round(row["max_concurrency_x"] * each)
        if dense and not named.isdigit():
            blocks = int(row["kv_tokens"]) // size
        varied = bool(row["range_ratio"] and row["range_ratio"] > 0)
        entry = {"era": row["era"], "study": row["study"], "arm": row["arm"], "load": f"{row['input_len']}/{row['output_len']}",
                 "model": str(row["model"]).rpartition("/")[2], "blocks": blocks, "block_size": size, "input_len": int(row["input_len"]),
                 "output_len": int(row["output_len"]), "num_prompts": int(row["num_prompts"]), "varied": varied,
                 "preemptions": row["preemptions_prometheus"], "log_clause": row["preemptions_log_clause"], "source": row["source"],
                 "completed": row["successful_requests"], "rules": None, "rules_before": None, "demand_over_room": None}
        if not varied:  # rules and room are those of equal requests
            entry |= {name: value for name, value in starvation.bound(Cache(blocks - 1, size, state), entry["num_prompts"], entry["input_len"],
                                                                      entry["output_len"], seats, budget, whole_prompt=False).items()
                      if name in ("rules", "rules_before", "demand_over_room", "read_again", "must")}
        rows.append(entry)
    return pd.DataFrame(rows)


def _state_blocks(table: pd.DataFrame, size: int) -> int:
    cut = table[(table["attention"] == "hybrid") & (table["kv_blocks_override"] == "40")].iloc[0]
    each = round(int(cut["kv_blocks_override"]) / cut["max_concurrency_x"])
    return each - math.ceil(int(cut["concurrency_basis_tokens"]) / size)


def runs() -> pd.DataFrame:
    """One row a published run: era (`seed`: the first version), arm, model, blocks, input_len, output_len, num_prompts, varied (lengths),
    preemptions (the counter), log_clause, source; computed here: rules, rules_before, demand_over_room (null for varied lengths)."""
    return _runs().copy()


def samples() -> pd.DataFrame:
    """The author's sampled counters: arm, t_s, preemptions_total, prompt_tokens_total, generation_tokens_total, running, waiting."""
    return author.table(TIMELINE_CSV)


def published() -> dict[str, dict[str, Any]]:
    """The author's numbers that this post names, keys without prefix; each says where it was printed or how it was computed here."""
    entries: dict[str, dict[str, Any]] = {}

    def put(name: str, value: Any, unit: str, where: str) -> None:
        entries[f"starvation_{name}"] = author.entry(value, unit, where)

    every = runs()
    current, seed = every[every["era"] == "current"], every[every["era"] == "seed"]
    put("seed", int(seed["log_clause"].max()), "preemptions", seed.iloc[0]["source"])
    put("seed_runs", len(seed), "runs", seed.iloc[0]["source"])
    put("low", int(current["preemptions"].min()), "preemptions", RUNS_CSV)
    put("high", int(current["preemptions"].max()), "preemptions", RUNS_CSV)
    put("runs", len(current), "runs", RUNS_CSV)
    for row in current.to_dict("records"):
        stem = row["arm"].lower()
        put(f"{stem}_preemptions", int(row["preemptions"]), "preemptions", row["source"])
        if row["rules"] is not None and not pd.isna(row["rules"]):
            put(f"{stem}_rules", int(row["rules"]), "preemptions", "computed here: the rules, played with the published lengths and blocks")
            put(f"{stem}_rules_before", int(row["rules_before"]), "preemptions", "computed here: of these, before the first request ends")
    long = every[every["arm"] == "NEG"].iloc[0]
    facts = author.rig_facts()["server"]
    whole = starvation.bound(Cache(int(long["blocks"]) - 1, int(long["block_size"]), 0), int(long["num_prompts"]), int(long["input_len"]),
                             int(long["output_len"]), facts["max_num_seqs"]["value"], facts["max_num_batched_tokens_online"]["value"])
    put("neg_rules_whole", whole["rules"], "preemptions", "computed here: the rules, with prompts let in only when all of them fits")
    played = current[current["rules"].notna()]
    put("played", len(played), "runs", "computed here: runs with equal lengths")
    put("played_off_most", int((played["rules"].astype(int) - played["preemptions"].astype(int)).abs().max()), "preemptions",
        "computed here: the largest distance between counter and rules")
    table = author.table(RUNS_CSV)
    checked = table[(table["arm"] == "TIGHT_7B") & (table["study"] == "recompute_crosscheck")].iloc[0]
    put("excess", int(checked["excess_prefill_tok"]), "tokens", checked["source"])
    put("excess_preemptions", int(checked["preemptions_prometheus"]), "preemptions", checked["source"])
    natural = table[table["arm"] == "R4B_NAT"].iloc[0]
    put("natural_blocks", int(every[every["arm"] == "R4B_NAT"]["blocks"].iloc[0]), "blocks", "computed here: concurrency times blocks of a request")
    put("natural_demand_over_room", float(every[every["arm"] == "R4B_NAT"]["demand_over_room"].iloc[0]), "x", "computed here: room formula")
    put("natural_completed", int(natural["successful_requests"]), "requests", natural["source"])
    put("cut_x", float(table[table["arm"] == "ROOMY"]["kv_tokens"].iloc[0] / table[table["arm"] == "SEVERE"]["kv_tokens"].iloc[0]), "x",
        "computed here: tokens of the natural cache over those of the smallest one of the first version")
    lines = author.table("a10g/part_4/scheduler_lines.csv")
    used = lines[(lines["arm"] == "R4B_NAT") & (lines["study"] == "counter_remeasure")]["kv_usage_pct"]
    put("natural_usage_percent", float(used.max()), "%", "a10g/part_4/scheduler_lines.csv")
    for arm in ("ROOMY_4B", "TIGHT_7B"):
        rows = samples()[lambda frame, arm=arm: frame["arm"] == arm]
        put(f"{arm.lower()}_peak_running", int(rows["running"].max()), "requests", rows.iloc[0]["source"])
        first = rows[rows["generation_tokens_total"] > 0].iloc[0]
        put(f"{arm.lower()}_span_s", int(rows["t_s"].max() - first["t_s"]), "s", rows.iloc[0]["source"])
    roomy = samples()[lambda frame: frame["arm"] == "ROOMY_4B"]
    levels = sorted(set(roomy["preemptions_total"]))
    after = roomy[roomy["preemptions_total"] > 0]["preemptions_total"]
    put("roomy_4b_plateau", int(after.mode().min()), "preemptions", "computed here: the level above zero at which the counter stood longest")
    put("roomy_4b_levels", len(levels), "levels", roomy.iloc[0]["source"])
    return entries
