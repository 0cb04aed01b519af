"""The published figures of the prefill freeze: named numbers, and the rows that a figure draws beside ours.

What:   `published()` gives the author's numbers of Part 2 and what follows from them, each with the place where it was published or how it
        was computed here; `published_rows()` gives the windows of run 1.
Why:    some claims of the published page moved once its own log and trace were read step by step. The numbers that show it stand here.
Use:    published()["freeze_ratio"]["value"]; published_rows()
Not:    our own runs (`part_2`).
"""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

from .published import entry, table


def published() -> dict[str, dict[str, Any]]:
    """Published numbers of Part 2, keys without prefix. `<on|off>_<light|heavy>_<all|window>_<statistic>_ms` is run 1, `..._run_2_...` run 2.

    Their window holds every token that came between the injection and the end of the last injected answer, nearly what we call broad, and
    counts waits for a first token as gaps.
    """
    entries: dict[str, dict[str, Any]] = {}

    def put(name: str, value: Any, unit: str, where: str, n: int | None = None) -> Any:
        entries[name] = entry(value, unit, where, n)
        return value.item() if hasattr(value, "item") else value

    def derive(name: str, value: Any, unit: str, how: str) -> Any:
        return put(name, value, unit, f"computed here: {how}")

    rows = table("a10g/part_2/prefill_freeze.csv")
    for row in rows.to_dict("records"):
        population = "all" if row["population"] == "all_tokens" else "window"
        run = "" if row["run"] == 1 else f"_run_{row['run']}"
        name = f"{row['chunked_prefill']}_{row['injection']}{run}_{population}"
        put(f"{name}_n", row["n_tokens"], "samples", row["source"])
        for statistic in ("p50", "p99", "max"):
            put(f"{name}_{statistic}_ms", row[f"itl_{statistic}_ms"], "ms", row["source"], n=row["n_tokens"])
        put(f"freeze_{row['injection']}_copies", row["n_injected_prompts"], "prompts", row["source"])
        put("freeze_victims", row["victims"], "streams", row["source"])

    def worst(side: str) -> float:
        return rows[(rows["chunked_prefill"] == side) & (rows["injection"] == "heavy")]["itl_max_ms"].max()

    value = {name: entry["value"] for name, entry in entries.items()}
    derive("freeze_ratio", worst("off") / worst("on"), "x", "longest gap of both heavy runs, chunking off over on")
    derive("freeze_p99_ratio", value["off_heavy_all_p99_ms"] / value["on_heavy_all_p99_ms"], "x", "p99 of all tokens, heavy run 1, off over on")
    derive("median_in_window_ratio", value["on_heavy_window_p50_ms"] / value["off_heavy_window_p50_ms"], "x",
           "median in the injection window, heavy run 1, on over off")
    derive("freeze_run_difference_ms", rows[rows["population"] == "all_tokens"].query("injection == 'heavy'").groupby("chunked_prefill")[
        "itl_p99_ms"].agg(lambda values: values.max() - values.min()).max(), "ms", "p99 of all tokens, larger difference of the two heavy runs")
    derive("freeze_window_share", value["off_light_window_n"] / value["off_light_all_n"], "fraction", "gaps in the window over all gaps, off, light")
    _published_trace(put, derive)
    return entries


def _published_trace(put: Any, derive: Any) -> None:
    """The trace of one injected prompt, read step by step, and what it says about the claims."""
    operations = table("a10g/part_2/prefill_trace_ops.csv")
    steps = operations[operations["row_kind"] == "engine_step_annotation"]
    source = steps["source"].iloc[0]
    slices = [(int(re.search(r"1 request \((\d+) tokens\)", row["name"])[1]), int(row["calls"]), float(row["device_avg_us"]) / 1e3)
              for row in steps.to_dict("records") if "1 request (" in row["name"]]
    prompt = sum(size * calls for size, calls, _ in slices)
    put("freeze_prompt_tokens", prompt, "tokens", source)
    put("freeze_slices", sum(calls for _, calls, _ in slices), "slices", source)
    largest = put("freeze_slice_tokens", max(size for size, _, _ in slices), "tokens", source)
    fullest = next(name for name in steps["name"] if f"({largest} tokens)" in name)
    derive("freeze_budget", largest + int(re.search(r"generation (\d+)", fullest)[1]), "tokens", "a full slice and the tokens of the running victims")
    derive("freeze_token_ratio", prompt / largest, "x", "tokens of the whole prompt over those of a full slice")
    # The last slice: the earlier ones hold first-use tuning of the kernels.
    size, _, last_ms = min(slices)
    decode = float(steps[steps["name"].str.contains("context 0")].sort_values("calls")["device_avg_us"].iloc[-1]) / 1e3
    put("freeze_last_slice_tokens", size, "tokens", source)
    put("freeze_last_slice_ms", last_ms, "ms", source)
    put("freeze_decode_step_ms", decode, "ms", source)
    cost = derive("freeze_ms_per_token", (last_ms - decode) / size, "ms", "last slice less a decode step, over its tokens")
    derive("freeze_expected_on_ms", decode + cost * largest, "ms", "a decode step and the tokens of a full slice")
    derive("freeze_expected_off_ms", decode + cost * prompt, "ms", "a decode step and the tokens of the whole prompt")
    launches = operations[operations["name"] == "chunk_fwd_kernel_o"].iloc[0]
    sibling = operations[operations["name"] == "chunk_gated_delta_rule_fwd_kernel_h"].iloc[0]
    put("freeze_tuned_launches", int(launches["calls"]), "calls", launches["source"])
    put("freeze_needed_launches", int(sibling["calls"]), "calls", sibling["source"])
    claims = table("claims.csv").set_index("id")
    put("freeze_claimed_slices", int(claims.loc["P2-06", "value"]), "slices", claims.loc["P2-06", "where_stated"])
    put("freeze_claimed_prompt_tokens", int(re.search(r"([\d,]+)-token", claims.loc["P2-06", "claim"])[1].replace(",", "")), "tokens",
        claims.loc["P2-06", "where_stated"])
    put("freeze_claimed_beat_ms", float(claims.loc["P2-13", "value"]), "ms", claims.loc["P2-13", "where_stated"])
    put("freeze_claimed_launch_ratio", float(re.search(r"(\d+)x the launches", claims.loc["P2-11", "claim"])[1]), "x",
        claims.loc["P2-11", "where_stated"])
    check = table("derived_checks.csv").set_index("id").loc["D-22"]
    first, gaps = map(int, re.search(r"(\d+) of (\d+)", " ".join(map(str, check))).groups())
    derive("freeze_first_gaps", first, "samples", "one for each victim request: waits for a first token that are counted as gaps")
    derive("freeze_first_gaps_percent", 100 * first / gaps, "%", "of all gaps of a run")


def published_rows() -> pd.DataFrame:
    """What `freeze_figures.beside_published` draws: one row an injection and side, run 1. The base is the median of all tokens, most of which
    are calm; a calm population was not published."""
    rows = table("a10g/part_2/prefill_freeze.csv").query("run == 1")
    keys = ["injection", "chunked_prefill"]
    every = rows[rows["population"] == "all_tokens"].set_index(keys)
    window = rows[rows["population"] == "injection_window"].set_index(keys)
    return pd.DataFrame({"base_ms": every["itl_p50_ms"], "window_p50_ms": window["itl_p50_ms"], "window_max_ms": window["itl_max_ms"],
                         "n_tokens": window["n_tokens"]}).reset_index()
