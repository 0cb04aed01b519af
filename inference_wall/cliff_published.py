"""The author's figures of the batching cliff, as named numbers and tables.

What:   floods by cap and step times as they were printed (`published_caps`, `published_steps`), and `published`, the numbers that Part 3 names.
Why:    what was printed and what we work out from it must not be mixed up: each number says where it was printed or how it was computed here.
Use:    published()["cliff_factor"]["value"]; cliff.step_fit(published_steps())
Not:    numbers of our own records (`part_3`), the files themselves (`published`).
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from . import cliff
from . import published as author

CAPS_CSV, STEPS_CSV = "a10g/part_3/batching.csv", "a10g/part_1/decode_step.csv"


def published_caps() -> pd.DataFrame:
    """The author's floods by cap: cap, tok_s, batch (what ran: the cap, but no more than the card could seat) and the printed columns."""
    rows = author.table(CAPS_CSV)
    rows = rows[rows["model"] == author.MODEL].assign(cap=lambda frame: frame["max_num_seqs"].astype(int), tok_s=lambda frame: frame["output_tok_s"])
    return rows.assign(batch=rows["cap"].clip(upper=int(_running()["value"]))).reset_index(drop=True)


def published_steps() -> pd.DataFrame:
    """The author's step times: batch, step_ms, n (null: not published), tok_s (computed here: batch / step)."""
    rows = author.table(STEPS_CSV)
    rows = rows[(rows["record_type"] == "step_point") & (rows["model"] == author.MODEL) & (rows["metric"] == "step_ms")]
    frame = pd.DataFrame({"batch": rows["batch"].astype(int), "step_ms": rows["value"].astype(float), "n": None})
    return frame.assign(tok_s=1e3 * frame["batch"] / frame["step_ms"]).reset_index(drop=True)


def _running() -> pd.Series:
    facts = author.table("a10g/later/speculation_facts.csv")
    return facts[(facts["metric"] == "running_at_flood") & (facts["arm"] == "off")].iloc[0]


def published() -> dict[str, dict[str, Any]]:
    """The author's numbers that this post names, keys without prefix; each says where it was printed or how it was computed here."""
    entries: dict[str, dict[str, Any]] = {}

    def put(name: str, value: Any, unit: str, where: str, n: int | None = None) -> None:
        entries[name] = author.entry(value, unit, where, n)

    caps, fit = published_caps(), cliff.step_fit(published_steps())
    for row in caps.to_dict("records"):
        for column, unit in (("output_tok_s", "tok/s"), ("num_prompts", "prompts"), ("ttft_p50_ms", "ms"), ("itl_p50_ms", "ms"),
                             ("itl_p99_ms", "ms")):
            put(f"cliff_cap_{row['cap']}_{column}", int(row[column]) if unit == "prompts" else row[column], unit, row["source"])
    small, large = caps.iloc[0], caps.iloc[-1]
    put("cliff_small_cap", int(small["cap"]), "requests", small["source"])
    put("cliff_large_cap", int(large["cap"]), "requests", large["source"])
    put("cliff_factor", float(large["speedup_vs_cap1_x"]), "x", large["source"])
    running = _running()
    put("cliff_running", float(running["value"]), "requests", running["source"])
    foil = author.table(CAPS_CSV)
    foil = foil[foil["model"] != author.MODEL].iloc[0]
    put("cliff_foil_factor", float(foil["speedup_vs_cap1_x"]), "x", foil["source"])
    before = caps.iloc[-2]
    last = f"cap {large['cap']} over cap {before['cap']}"
    put("cliff_before_cap", int(before["cap"]), "requests", before["source"])
    put("cliff_last_gain_percent", 100 * (large["tok_s"] / before["tok_s"] - 1), "%", f"computed here: {last}")
    put("cliff_last_itl_growth", large["itl_p50_ms"] / before["itl_p50_ms"], "x", f"computed here: median ITL, {last}")
    put("cliff_half_flood_s", small["num_prompts"] / 2 / small["completed_req_s"], "s",
        "computed here: half of the prompts at a cap of 1 over the completed rate")
    put("cliff_crossover", fit.crossover, "sequences", "computed here: least squares over the four published step times")
    for end, value in zip(("low", "high"), fit.crossover_interval, strict=True):
        put(f"cliff_crossover_{end}", value, "sequences", "computed here: 95 % interval of that crossover (Fieller)")
    put("cliff_most_gain", fit.most_gain, "x", "computed here: crossover + 1")
    put("cliff_ceiling_tok_s", fit.ceiling_tok_s, "tok/s", "computed here: one over the slope")
    decode = published_steps().iloc[-1]
    put("cliff_served_of_decode_percent", 100 * large["tok_s"] / decode["tok_s"], "%",
        "computed here: flood over batch / step at the largest traced batch")
    rows = author.table(STEPS_CSV)
    plateau = rows[rows["record_type"] == "plateau"].iloc[0]
    put("cliff_plateau_ms", float(plateau["value"]), "ms", plateau["source"])
    own_ms = _published_own_ms()
    put("cliff_own_ms", own_ms, "ms", "computed here: state read and written and the keys and values of a 256-token context, over copy bandwidth")
    put("cliff_own_of_slope_percent", 100 * own_ms / fit.slope_ms, "%", "computed here: that over the slope")
    return entries


def _published_own_ms() -> float:
    shape = author.model_shape()
    config = {"num_hidden_layers": shape["layers"], "num_key_value_heads": shape["kv_heads"], "head_dim": shape["head_dim"],
              "layer_types": ["linear_attention"] * shape["linear_attention_layers"] + ["full_attention"] * shape["full_attention_layers"],
              "linear_num_value_heads": shape["linear_value_heads"], "linear_key_head_dim": shape["linear_key_dim"],
              "linear_value_head_dim": shape["linear_value_dim"]}
    own, _ = cliff.own_bytes(config, 256, "float16")
    return own / author.rig_facts()["hardware"]["copy_bandwidth_measured"]["value"] / 1e6
