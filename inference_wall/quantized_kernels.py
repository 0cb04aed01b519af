"""Which kernels multiplied by the weights of each variant, and on a card how fast they moved them, by the trace of a step of one sequence.

What:   `kernels_table` and `kernel_sentence` say what ran, by the log and by the trace. `speeds(rows, traces)` sets the bytes of each format
        beside the time of the kernels that multiply by them; `table` and `sentence` say what comes of it.
Why:    fewer bytes make a step shorter only if the kernel of the format moves them as fast as the usual one does. A step's time alone cannot tell
        a slow kernel from a step that waits for something else. The profiler stretches the launching of kernels, not the kernels, so on a card
        their times may be read beside a bandwidth.
Use:    found = speeds(findings.rows, quantization.traced(arms)); display(HTML(table(found))); display(Markdown(sentence(found, findings.rows)))
Not:    speeds on processors (there the profiler slows the operators themselves) and of larger batches, in which the arithmetic counts as well.

    GB/s of a format = bytes of the weights that are kept in it (with their scales) / time of its kernels in a step
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd

from . import quantization, tables, trace
from .chart import digits
from .errors import WallError
from .part_5 import Findings
from .trace_families import NO_OPERATOR, short
from .trace_file import opened

QUANTIZED = re.compile(r"machete|marlin|awq|gptq|wna16|scaled_mm|int8|fp8|w8a8|w4a", re.IGNORECASE)
WIDE = ("32-bit", "16-bit")  # formats of unquantized weights, as `shapes` and `weights` name them
COLUMNS = ["arm", "role", "format", "kernel", "calls", "ms", "gb", "gb_s", "percent"]


def kernels_table(found: Findings) -> str:
    """What proves which kernel ran: the engine's log, and the matrix operator that took most time in the trace."""
    rows = []
    for row in found.rows.to_dict("records"):
        name, share = top_operator(quantization.traced(found.arms).get(row["arm"]))
        rows.append((row["arm"], row["method"] or "none", row["kernel"] or ("none: not quantized" if row["role"] == "base" else "not said"),
                     name or "no trace", f"{100 * share:.0f} %" if share is not None else "–"))
    return tables.plain_table(["variant", "method, by the log", "kernel, by the log", "longest matrix operator, by the trace", "of the step"], rows,
                               "part_5_kernels.csv")


def top_operator(path: Path | None) -> tuple[str | None, float | None]:
    """The matrix multiplication (`trace_families.short` name) with the most self time in a trace and its share of the steps; nulls
    without a trace or such an operator."""
    try:
        frame = trace.operators(path) if path is not None else None
    except WallError:
        frame = None
    if frame is None or frame.empty:
        return None, None
    found = frame[(frame["family"] == "matrix multiplication") & (frame["name"] != NO_OPERATOR)]
    return (None, None) if found.empty else (short(found.iloc[0]["name"]), float(found.iloc[0]["share"]))


def kernel_sentence(found: Findings) -> str:
    """Whether the quantized variants are proven to have run in fewer bits: the log names a kernel, and the trace another operator."""
    others = [row for row in found.rows.to_dict("records") if row["role"] != "base"]
    if not others:
        return "No quantized variant was measured, so there is no kernel to prove."
    paths = quantization.traced(found.arms)
    start = found.role("base")
    usual = top_operator(paths.get(start["arm"]))[0] if start else None
    parts = []
    for row in others:
        own = top_operator(paths.get(row["arm"]))[0]
        said = f"the log names `{row['kernel']}`" if row["kernel"] else "the log names no kernel"
        if own is None or usual is None:
            seen = "there is no pair of traces to check it against"
        elif own == usual:
            seen = f"but the trace spends its time in `{own}`, as the unquantized variant does"
        else:
            seen = f"and the trace spends its time in `{own}`, where the unquantized variant is in `{usual}`"
        sure = "" if row["kernel"] and own and usual and own != usual else " **That is no proof.**"
        parts.append(f"`{row['arm']}`: {said}, {seen}.{sure}")
    return " ".join(parts)


# --- how fast ---------------------------------------------------------------------------------------------------------


def speeds(rows: pd.DataFrame, traces: dict[str, Path | None]) -> pd.DataFrame:
    """One row a variant and kind of weights: `COLUMNS`. Times are means over the decode steps of one sequence, in ms a step; gb in 10^9 bytes.

    format: "16-bit", or "4-bit with scales" for what is quantized. kernel: the short name of the longest kernel of the kind. percent: of the better
    of copying and reading before the run. `rows`: `quantization.variants`. Left out are variants without a trace of a card, without known bytes,
    and those that keep weights of a format for which no kernel was seen.
    """
    found = []
    for row in rows.to_dict("records"):
        path = traces.get(row["arm"])
        if path is None or not row["formats"] or not row["streamed_gb"] or not opened(path).on_device:
            continue
        steps = trace.steps(path)
        steps = steps[(steps["context_tokens"] == 0) & (steps["generation_requests"] == 1)]
        if steps.empty:
            continue
        kernels = trace.operators(path, steps["step"])
        kernels = kernels[kernels["family"] == "matrix multiplication"]
        special = kernels["name"].str.contains(QUANTIZED)
        packed = sum(entry["bytes"] for name, entry in row["formats"].items() if name not in WIDE) / 1e9
        wide = next((name for name in WIDE if row["formats"].get(name, {}).get("bytes")), "16-bit")
        kinds = [(wide, kernels[~special], row["streamed_gb"] - packed)]
        kinds += [("fewer bits, with scales", kernels[special], packed)] if packed else []
        if any(part.empty for _, part, _ in kinds):
            continue
        for name, part, gb in kinds:
            ms = part["self_ms"].sum() / len(steps)
            speed = gb / ms * 1e3
            found.append((row["arm"], row["role"], name, short(part.iloc[0]["name"]), part["calls"].sum() / len(steps), ms, gb, speed,
                          100 * speed / row["bandwidth_gb_s"] if row["bandwidth_gb_s"] else None))
    return pd.DataFrame(found, columns=COLUMNS)


def table(found: pd.DataFrame) -> str:
    """The speeds as an HTML table; empty without a row."""
    if found.empty:
        return ""
    rows = [(row.arm, row.format, row.kernel, f"{row.calls:.0f}", digits(row.ms), digits(row.gb), f"{row.gb_s:,.0f}",
             "–" if pd.isna(row.percent) else f"{row.percent:.0f} %") for row in found.itertuples()]
    heads = ["variant", "weights in", "the longest of their kernels", "calls of all, a step", "ms of all, a step", "GB a step", "GB/s",
             "of the measured bandwidth"]
    return tables.plain_table(heads, rows, "part_5_kernel_speeds.csv")


def sentence(found: pd.DataFrame, rows: pd.DataFrame) -> str:
    """What the kernels' speeds say about each quantized variant, against those of the unquantized one; empty where they were not seen."""
    usual = found[found["role"] == "base"]
    if usual.empty:
        return ""
    base, text = usual.iloc[0], []
    ones = rows.set_index("arm")["one_ms"]
    for arm, part in found[found["role"] != "base"].groupby("arm", sort=False):
        own = part[part["format"] != base["format"]]
        if own.empty:
            continue
        own, slower = own.iloc[0], base["gb_s"] / own.iloc[0]["gb_s"]
        said = (f"In `{base['arm']}` the kernels moved their weights at {_speed(base)}. In `{arm}` those of the quantized weights reached "
                f"{_speed(own)}: ")
        one, whole = ones.get(arm), ones.get(base["arm"])
        if slower < ALIKE:
            said += "about the same. So these bytes go as fast as any others."
        else:
            said += f"**they move their bytes at {1 / slower:.2f} times that speed.**"
            if one and whole:
                saved = own["ms"] - own["gb"] / base["gb_s"] * 1e3
                said += (f" Had they kept the usual speed, a step of one sequence would have been {digits(saved)} ms shorter, and would take "
                         f"{(one - saved) / whole:.2f} times as long as the unquantized one instead of {one / whole:.2f}. What then is missing "
                         "to the bytes' prediction is the part of a step that no weight has a hold on.")
        text.append(said)
    return " ".join(text)


ALIKE = 1.15  # speeds within this factor count as the same


def _speed(row: Any) -> str:
    share = "" if pd.isna(row["percent"]) else f", {row['percent']:.0f} percent of the measured bandwidth"
    return f"{row['gb_s']:,.0f} GB/s{share}"
