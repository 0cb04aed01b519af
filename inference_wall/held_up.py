"""Step times that are not the engine's: batches whose tokens the server hands out more slowly than its engine makes them.

What:   `mark(steps, arms)` names the batches whose step, as the client saw it, is longer than the engine's own step in a trace; `by_batch` gives
        one row a batch, with the range over the repeats and the engine's step beside it; `sentence` and `table` say it on a page.
Why:    between the engine and the client lies the server's front end. By default it is one process, which turns every token of every stream
        into text and writes an event for it. A fast card can make more tokens than it hands out. What the client then times is the front end.
Use:    steps = mark(steps, arms); by_batch(steps); client_capacity()["events_s"]
Not:    which steps there are (`cliff.steps_frame`), the line through those that are left (`cliff.step_fit`).

A profiler only ever slows an engine. So a step of the client that is longer than the engine's under the profiler was not set by the engine. The
converse does not hold: a batch without a trace, or with a slow one, may be held up too. It is suspect where its tokens per second come near those
of a batch that is.
"""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from . import trace
from .arms import ArmSet
from .chart import digits
from .errors import WallError
from .records import Run
from .rigs import root

LONGER = 0.10  # a client's step that exceeds the traced one by more than this share of it was held up
NEAR = 0.90  # of the tokens per second of a batch that was held up: from there on another batch is suspect
CAPACITY = "benchmarks/probe_capacity.json"  # written by the script of the same name
TRACED = "longer at the client than in the engine's own trace"
SUSPECT = "its tokens per second are those of a batch that was held up"
COLUMNS = ["arm", "batch", "repeats", "step_ms", "step_low", "step_high", "tok_s", "tok_low", "tok_high", "traced_ms", "engine_tok_s", "held_up"]


def traced_steps(run: Run) -> dict[int, float]:
    """Batch -> milliseconds from one step of the engine to the next, by the profiler: median length plus median gap of the steps that hold the whole
    batch and read no prompt. Batches without a readable trace of such steps are absent."""
    found = {}
    for point in run.points:
        path = run.trace(point["point"]) if point["pass"] == "trace" and point.get("load") == "steps" else None
        if path is None:
            continue
        try:
            steps = trace.steps(path)
        except WallError:  # a trace that cannot be read clears nobody and convicts nobody
            continue
        whole = steps[(steps["context_tokens"] == 0) & (steps["generation_requests"] == point["num_prompts"])]
        if whole["gap_before_ms"].notna().any():
            found[int(point["num_prompts"])] = float(whole["duration_ms"].median() + whole["gap_before_ms"].median())
    return found


def mark(steps: pd.DataFrame, arms: ArmSet) -> pd.DataFrame:
    """`cliff.steps_frame` with two columns more: traced_ms (`traced_steps` of the same arm and batch, else null) and held_up, null or the reason why
    the row says nothing of the engine. Repeats count by their median; each arm is judged by itself."""
    traced = {arm: traced_steps(run) for arm, run in arms.testable.items()}
    steps = steps.assign(traced_ms=[traced[row.arm].get(row.batch) for row in steps.itertuples()], held_up=None)
    steps["traced_ms"] = steps["traced_ms"].astype(float)
    for arm, rows in steps[steps["valid"].astype(bool) & steps["step_ms"].notna()].groupby("arm"):
        usual = rows.astype({"step_ms": float, "tok_s": float}).groupby("batch")[["step_ms", "tok_s", "traced_ms"]].median()
        held = usual[usual["step_ms"] > (1 + LONGER) * usual["traced_ms"]]
        if held.empty:
            continue
        near = usual.drop(held.index)
        near = near[near["tok_s"] >= NEAR * held["tok_s"].min()]
        for batches, reason in ((held.index, TRACED), (near.index, SUSPECT)):
            steps.loc[(steps["arm"] == arm) & steps["batch"].isin(batches), "held_up"] = reason
    return steps


def by_batch(steps: pd.DataFrame) -> pd.DataFrame:
    """One row an arm and batch of `mark`'s valid rows, ascending: `COLUMNS`. step_ms and tok_s are medians over the repeats, low and high their ends;
    engine_tok_s is batch / traced_ms, what the engine makes at least."""
    known = steps[steps["valid"].astype(bool) & steps["step_ms"].notna()].astype({"step_ms": float, "tok_s": float})
    rows = [{"arm": arm, "batch": int(batch), "repeats": len(part), "step_ms": part["step_ms"].median(), "step_low": part["step_ms"].min(),
             "step_high": part["step_ms"].max(), "tok_s": part["tok_s"].median(), "tok_low": part["tok_s"].min(), "tok_high": part["tok_s"].max(),
             "traced_ms": part["traced_ms"].iloc[0], "engine_tok_s": 1e3 * batch / part["traced_ms"].iloc[0], "held_up": part["held_up"].iloc[0]}
            for (arm, batch), part in known.groupby(["arm", "batch"])]
    return pd.DataFrame(rows, columns=COLUMNS).sort_values(["batch", "arm"], ignore_index=True)


def of_the_engine(steps: pd.DataFrame) -> pd.DataFrame:
    """The rows that are valid, have a step time and were not held up: those that may be taken for the engine's."""
    return steps[steps["valid"].astype(bool) & steps["step_ms"].notna() & steps["held_up"].isna()]


def surely(batches: pd.DataFrame) -> dict[str, Any] | None:
    """The row of `by_batch` with the largest batch whose own trace shows that it was held up, or null."""
    rows = batches[batches["held_up"] == TRACED].to_dict("records")
    return rows[-1] if rows else None


def put(book: Any, batches: pd.DataFrame, fit: Any) -> None:
    """Named numbers into a `headline.Book`: which batches were held up, and of `surely` what the client saw, the engine did, and the line says."""
    why, sure, held = "no batch was held up on its way to the client", surely(batches), batches[batches["held_up"].notna()]
    book.put("held_up_batches", ", ".join(f"{batch}" for batch in held["batch"]) or None, reason=why)
    for name, column, unit in (("batch", "batch", "sequences"), ("step_ms", "step_ms", "ms"), ("step_low_ms", "step_low", "ms"),
                               ("step_high_ms", "step_high", "ms"), ("tok_s", "tok_s", "tok/s"), ("tok_s_low", "tok_low", "tok/s"),
                               ("tok_s_high", "tok_high", "tok/s"), ("traced_ms", "traced_ms", "ms"), ("engine_tok_s", "engine_tok_s", "tok/s")):
        book.put(f"held_up_{name}", sure and sure[column], unit, n=sure["repeats"] if sure and name[:4] in ("step", "tok_") else None, reason=why)
    book.put("held_up_line_ms", fit.step_ms(sure["batch"]) if sure else None, "ms", reason=fit.reason or why)
    capacity = client_capacity()
    book.put("client_events_s", capacity and capacity["events_s"], "events/s", reason="the client's own speed was not measured")


def client_capacity() -> dict[str, Any] | None:
    """What `benchmarks/probe_capacity.py` last printed: events_s, events_s_low, events_s_high, streams, cpu, cores; null without it."""
    path = root() / CAPACITY
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


# --- a sentence and a table -------------------------------------------------------------------------------------------


def sentence(batches: pd.DataFrame, fit: Any) -> str:
    """Which batches were held up, how that is known and what follows (Markdown); empty where none was. `fit`: the line through the others."""
    held, sure = batches[batches["held_up"].notna()], surely(batches)
    if sure is None:
        return ""
    near, names = held[held["held_up"] == SUSPECT], " and ".join(f"{batch}" for batch in held["batch"])
    text = (f"**At {'a batch' if len(held) == 1 else 'batches'} of {names} the client does not see the engine's steps.** At {sure['batch']} it had a "
            f"token every {_span(sure['step_low'], sure['step_high'])} ms. In the trace the engine's own steps follow one another every "
            f"{digits(sure['traced_ms'])} ms, and a profiler only ever slows them. So the engine makes at least {sure['engine_tok_s']:,.0f} tokens a "
            f"second, and the client gets {_span(sure['tok_low'], sure['tok_high'])}. Between the two lies the server's front end: one process, "
            "unless told otherwise, which turns the tokens of all streams into text and writes an event for each.")
    if len(near):
        each = " and ".join(f"At {row.batch} the client gets {_span(row.tok_low, row.tok_high)}" for row in near.itertuples())
        text += f" {each}, which is as near to that limit, and no trace says that the engine set it."
    if capacity := client_capacity():
        text += (f" Our client is not what is slow: a plain server on {capacity['cores']} cores ({capacity['cpu']}) fed it "
                 f"{capacity['events_s']:,.0f} events a second (`benchmarks/probe_capacity.py`).")
    text += (" These points stay in the figure, marked, and are not in the line. Whatever else was measured at such batches went through the same "
             "front end.")
    if fit.fixed_ms is not None and not fit.falls:
        text += f" Drawn on to {sure['batch']}, the line gives {digits(fit.step_ms(sure['batch']))} ms; the trace, {digits(sure['traced_ms'])}."
    return text


def table(batches: pd.DataFrame) -> str:
    """Every timed batch, what the client saw and what the engine did, as an HTML table; empty where none was held up."""
    if surely(batches) is None:
        return ""
    body = ""
    for row in batches.itertuples():
        cells = [(row.step_ms, _with_span(row.step_ms, row.step_low, row.step_high)), (row.traced_ms, ""),
                 (row.tok_s, _with_span(row.tok_s, row.tok_low, row.tok_high)), (row.engine_tok_s, ""), (row.repeats, f"{row.repeats}")]
        numbers = "".join('<td title="no trace at this batch">–</td>' if pd.isna(value) else
                          f'<td data-value="{value:.6g}">{text or digits(value)}</td>' for value, text in cells)
        used = '<td data-value="yes">✓</td>' if pd.isna(row.held_up) else f'<td data-value="no: {row.held_up}" title="{row.held_up}">✗ held up</td>'
        body += f'<tr><th scope="row">{row.batch}</th>{numbers}{used}</tr>'
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("batch", "step at the client, ms", "in the trace, ms", "tokens/s at the client",
                                                                "in the trace", "repeats", "in the line"))
    caption = ("Median over the repeats, and their range. In the trace: a step and the gap to the next, which the profiler makes longer where "
               "streams are few.")
    return (f'<table class="wall-table" data-csv="part_3_steps.csv"><caption>{caption}</caption><thead><tr>{heads}</tr></thead>'
            f"<tbody>{body}</tbody></table>")


def _span(low: float, high: float) -> str:
    return digits(low) if digits(low) == digits(high) else f"{digits(low)} to {digits(high)}"


def _with_span(value: float, low: float, high: float) -> str:
    return digits(value) if digits(low) == digits(high) else f"{digits(value)} ({_span(low, high)})"
