"""What the card does in a step that only writes, by batch: families of kernels, and the recurrent state against its bytes.

What:   `families` adds up kernel time by family for each traced batch, `state` sets the kernels of the recurrent state beside the time that their
        bytes need; tables and a sentence of both.
Why:    the profiler stretches the launching of kernels, not the kernels. So on a card their times may be read, also beside a bandwidth. The state of
        a sequence has a fixed size, must be read and written in every step, and cannot be shared: it is what makes a large batch slow.
Use:    found = families(traces); state(found, run); display(HTML(families_table(found, steps)))
Not:    one step after the other (`trace_figures`), processors (their operators are slowed as a whole: nothing is returned for such traces).

    a sequence's least time = 2 x (state + inputs kept for the convolution) / copy bandwidth        read once and written once
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pandas as pd

from . import trace
from .chart import digits
from .records import Run
from .trace_families import FAMILIES, NO_OPERATOR
from .trace_file import opened

STATE = "recurrent state"
NAMED = (64, 256)  # batches at which the state has named numbers
NEAR_COPY = 1.25  # kernels that take no more than this times the time of a plain copy of their bytes are bound by memory
FAMILY_COLUMNS = ["batch", "family", "self_ms", "share", "step_ms", "gap_ms", "busy_ms", "steps", "file_kb"]
STATE_COLUMNS = ["batch", "step_ms", "state_ms", "share", "sequence_us", "bytes_us", "ratio"]


def families(traces: list[tuple[int, Path]]) -> pd.DataFrame:
    """One row a batch and family: `FAMILY_COLUMNS`, means over the steps that hold the whole batch and read no prompt, in ms; share from 0 to 1.

    self_ms: kernels and copies of that family in a step; `NO_OPERATOR` is the rest. gap_ms: to the next step (median). Traces without a device or
    without such steps are left out.
    """
    rows = []
    for batch, path in traces:
        steps = trace.steps(path)
        whole = steps[(steps["context_tokens"] == 0) & (steps["generation_requests"] == batch)]
        if whole.empty or not opened(path).on_device:
            continue
        length, spent = whole["duration_ms"].sum(), trace.operators(path, whole["step"]).groupby("family")["self_ms"].sum()
        rows += [(batch, family, spent.get(family, 0.0) / len(whole), spent.get(family, 0.0) / length, length / len(whole),
                  whole["gap_before_ms"].median(), whole["busy_ms"].mean(), len(whole), path.stat().st_size / 1e3)
                 for family in (*FAMILIES, NO_OPERATOR)]
    return pd.DataFrame(rows, columns=FAMILY_COLUMNS)


def state(found: pd.DataFrame, run: Run | None) -> pd.DataFrame:
    """One row a batch of `families` in which the state took time: `STATE_COLUMNS`, step_ms and state_ms in ms, sequence_us and bytes_us in
    microseconds a sequence. Empty unless the record of `run` knows the bytes of the model's state and a copy bandwidth."""
    facts = (run.document["model"].get("facts") or {}) if run else {}
    starts = run.document["starts"] if run else []
    speed = starts[-1].get("bandwidth", {}).get("copy_gb_s") if starts else None
    moved = 2 * (facts.get("state_bytes_per_sequence", 0) + facts.get("conv_bytes_per_sequence", 0))
    if not (speed and moved):
        return pd.DataFrame(columns=STATE_COLUMNS)
    rows = found[(found["family"] == STATE) & (found["self_ms"] > 0)]
    least = moved / speed / 1e3  # bytes over 10^9 bytes a second, in microseconds
    return pd.DataFrame([(row.batch, row.step_ms, row.self_ms, row.share, each := 1e3 * row.self_ms / row.batch, least, each / least)
                         for row in rows.itertuples()], columns=STATE_COLUMNS)


def put(book: Any, found: pd.DataFrame) -> None:
    """Named numbers of `state` into a `headline.Book`, at the batches `NAMED`: state_<batch>_ms and so on."""
    rows = {int(row["batch"]): row for row in found.to_dict("records")}
    for batch in NAMED:
        row = rows.get(batch)
        for name, column, factor, unit in (("step_ms", "step_ms", 1, "ms"), ("ms", "state_ms", 1, "ms"), ("share_percent", "share", 100, "%"),
                                           ("sequence_us", "sequence_us", 1, "us"), ("bytes_us", "bytes_us", 1, "us"), ("ratio", "ratio", 1, "x")):
            book.put(f"state_{batch}_{name}", factor * row[column] if row else None, unit,
                     reason=f"no trace of a card at a batch of {batch} with a state whose bytes are known")


# --- tables and a sentence --------------------------------------------------------------------------------------------


def families_table(found: pd.DataFrame, steps: pd.DataFrame) -> str:
    """One column a batch, one row a family (mean ms a step), as an HTML table; `steps`: `held_up.by_batch`, for the client's step without a profiler.
    Empty without a trace."""
    if found.empty:
        return ""
    batches = found.drop_duplicates("batch").set_index("batch")
    client = steps[steps["held_up"].isna()].groupby("batch")["step_ms"].median()
    held = set(steps.loc[steps["held_up"].notna(), "batch"])
    without = {batch: client.get(batch) for batch in batches.index}
    why = {batch: "held up on its way to the client" if batch in held else "not measured" for batch in batches.index}
    cell = found.set_index(["family", "batch"])["self_ms"]
    rows = [("step, in the trace", batches["step_ms"]), ("the card was busy for", batches["busy_ms"])]
    rows += [(family, cell[family]) for family in (*FAMILIES, NO_OPERATOR) if cell[family].max() > 0]
    rows += [("to the next step", batches["gap_ms"]), ("step, by the client without profiler", pd.Series(without))]
    body = "".join(_row(name, values, batches.index, why) for name, values in rows)
    body += _row("steps in the trace", batches["steps"], batches.index, why, "{:.0f}")
    body += _row("size of the trace, kB", batches["file_kb"], batches.index, why, "{:.0f}")
    heads = "".join(f'<th scope="col">batch {batch}</th>' for batch in batches.index)
    return _table("A step that only writes, by batch: mean milliseconds", "ms", heads, body, "part_3_families.csv")


def families_sentence(found: pd.DataFrame) -> str:
    """Which kernels fill the step of the smallest batch, and which grow most up to the largest, in words; empty below two batches."""
    if found["batch"].nunique() < 2:
        return ""
    low, high = found["batch"].min(), found["batch"].max()
    kernels = found[found["family"] != NO_OPERATOR].pivot(index="family", columns="batch", values="self_ms")
    shared, own = kernels[low].idxmax(), (kernels[high] - kernels[low]).idxmax()

    def grew(family: str) -> str:
        return f"from {digits(kernels.loc[family, low])} to {digits(kernels.loc[family, high])} ms"

    text = f"From a batch of {low} to one of {high}, {own} grows most: {grew(own)}. "
    if shared == own:
        return text + "It fills the step from the start."
    return text + f"What fills the step of {low}, {shared}, grows {grew(shared)}. So the own part of a step and the shared one are seen from inside."


def state_table(found: pd.DataFrame) -> str:
    """The kernels of the recurrent state against their bytes, one row a batch, as an HTML table; empty without a row."""
    if found.empty:
        return ""
    body = "".join(
        f'<tr><th scope="row">{row.batch}</th>' + "".join(f'<td data-value="{value:.6g}">{text}</td>' for value, text in (
            (row.step_ms, digits(row.step_ms)), (row.state_ms, digits(row.state_ms)), (100 * row.share, f"{100 * row.share:.0f} %"),
            (row.sequence_us, digits(row.sequence_us)), (row.bytes_us, digits(row.bytes_us)), (row.ratio, f"{row.ratio:.2f}"))) + "</tr>"
        for row in found.itertuples())
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("step, ms", "recurrent state, ms", "share", "a sequence, µs", "by its bytes, µs",
                                                                "ratio"))
    return _table("By its bytes: the state and the inputs kept for the convolution, read once and written once, at the measured copy bandwidth",
                  "batch", heads, body, "part_3_state.csv")


def state_sentence(found: pd.DataFrame) -> str:
    """What the state takes at the largest traced batch, against its bytes, in words; empty without a row."""
    if found.empty:
        return ""
    small, large = found.iloc[0], found.iloc[-1]
    text = (f"**At a batch of {large['batch']:.0f} the recurrent state takes {digits(large['state_ms'])} of {digits(large['step_ms'])} ms, "
            f"{100 * large['share']:.0f} percent of the step.** For each sequence that is {digits(large['sequence_us'])} µs, "
            f"{large['ratio']:.2f} times what its bytes need. ")
    text += ("So these kernels are about as fast as a plain copy: they are bound by memory, and only fewer bytes would make them faster."
             if large["ratio"] <= NEAR_COPY else "So bytes alone do not explain their time.")
    if small["ratio"] > 2 * large["ratio"]:
        text += (f" At a batch of {small['batch']:.0f} it is {small['ratio']:.1f} times: there the kernels are too small to use the memory fully"
                 + (", but they are a small part of the step." if small["share"] < large["share"] / 2 else "."))
    return text


def _row(name: str, values: Any, batches: Any, why: dict[int, str], form: str = "") -> str:
    cells = "".join(f'<td title="{why[batch]}">–</td>' if pd.isna(values[batch]) else
                    f'<td data-value="{values[batch]:.6g}">{form.format(values[batch]) if form else digits(values[batch])}</td>' for batch in batches)
    return f'<tr><th scope="row">{html.escape(name)}</th>{cells}</tr>'


def _table(caption: str, corner: str, heads: str, body: str, csv: str) -> str:
    return (f'<table class="wall-table" data-csv="{csv}"><caption>{caption}.</caption><thead><tr><th scope="col">{corner}</th>{heads}</tr></thead>'
            f"<tbody>{body}</tbody></table>")
