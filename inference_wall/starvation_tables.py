"""The tables of cache starvation: caches, bounds, counts, and the author's runs.

What:   one function a table, from `part_4.Findings` or the published runs to HTML for the page.
Why:    a figure shows the shape, a table the numbers; a count stands beside how we know it, and a missing arm keeps its row.
Use:    display(HTML(count_table(part_4.look(arms))))
Not:    the look of a table on the page (`site.tables` and wall.css).
"""

from __future__ import annotations

import html
from typing import Any

import pandas as pd

from . import cache_room
from .part_4 import Findings, either, none_of


def cache_table(found: Findings) -> str:
    """Each cache as the server described it, the room formula for the longest request, and the server's own number beside it. HTML."""
    rows = []
    for arm, run in found.arms.testable.items():
        room = cache_room.room(run)
        if room.cache is None:
            rows.append([arm, *["–"] * 6, room.reason])
            continue
        state = f"{room.cache.state_blocks} ({'by its layers' if room.from_layers else 'from the printed number'})"
        rows.append([arm, f"{room.cache.blocks + 1:,}", f"{room.cache.blocks:,}", f"{room.cache.block_size:,}", state, _cell(room.fits),
                     _two_digits(room.formula), _two_digits(room.printed)])
    rows += [[arm, *["–"] * 6, f"refused: {why}"] for arm, why in found.arms.refused.items()]
    rows += [[arm, *["–"] * 6, "not measured"] for arm in found.arms.missing]
    return _table(["cache", "blocks", "usable", "tokens in a block", "blocks of state a request", "longest requests that fit",
                   "all blocks ÷ its blocks", "printed by the server"], rows, "part_4_caches.csv")


def _two_digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def load_table(found: Findings) -> str:
    """The floods that every cache gets. HTML."""
    why = {"positive": "easy to let in, needs far more later", "balanced": "as much out as in",
           "long": "needs at the start nearly all that it will ever need"}
    rows = [[row["load"], f"{row['input_len']}", f"{row['output_len']}", f"{row['num_prompts']}", why.get(row["load"], "a load of this rig")]
            for row in (found.bounds.drop_duplicates("load").to_dict("records") if len(found.bounds) else [])]
    return _table(["load", "tokens in", "tokens out", "requests", "what it is for"], rows, "part_4_loads.csv")


def bound_table(found: Findings) -> str:
    """What must happen, from lengths and blocks alone. HTML."""
    rows = []
    for row in found.bounds.to_dict("records"):
        known = none_of(row.get("admitted")) is not None
        shape = f"{row['input_len']} / {row['output_len']}"
        rest = [f"{int(row['admitted'])}", f"{int(row['fits'])}", f"{int(row['demand']):,} of {int(row['usable']):,}", "yes" if row["must"] else "no",
                either(row, "rules") or "–"] if known else ["–", "–", row["reason"], "–", "–"]
        rows.append([f"{row['arm']}, {row['load']}", shape, f"{row['num_prompts']}", *rest])
    return _table(["cache, load", "tokens in / out", "requests", "let in at once", "fit at their end", "blocks needed at the end",
                   "somebody must go", "preemptions by the rules"], rows, "part_4_bounds.csv")


def count_table(found: Findings) -> str:
    """What was counted. HTML."""
    rows = []
    proofs = {"counted": "counted", "control": "zero: this counter was seen to move", "room": "zero by arithmetic", "": "unknown"}
    for row in found.counts.to_dict("records") if len(found.counts) else []:
        name = f"{row['arm']}, {row['load']}" + (f", repeat {row['repeat'] + 1}" if found.counts["repeat"].max() else "")
        expected = either(found.bound(row["arm"], row["load"]), "first_batch") or "–"
        rows.append([name, _cell(row["preemptions"]), proofs[row["proof"]] + (f" ({row['why']})" if not row["proof"] else ""),
                     str(row["pauses"]), _cell(row["before"]), f"{_cell(row['first_batch'])} ({expected})",
                     "–" if none_of(row["usage_max"]) is None else f"{100 * row['usage_max']:.0f} %",
                     f"{int(row['completed'])} of {int(row['num_prompts'])}", "✓" if row["valid"] else f"✗ {', '.join(row['reasons'])}"])
    return _table(["cache, load", "preemptions", "how we know", "pauses seen in the streams", "of these until the first end",
                   "began before it (by the rules)", "cache in use, most", "completed", "valid"], rows, "part_4_counts.csv")


def _cell(value: Any) -> str:
    return "–" if none_of(value) is None else f"{int(value):,}"


def _table(heads: list[str], rows: list[list[str]], csv: str) -> str:
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads)
    body = "".join(f'<tr><th scope="row">{html.escape(first)}</th>' + "".join(f"<td>{html.escape(cell)}</td>" for cell in rest) + "</tr>"
                   for first, *rest in rows)
    return f'<table class="wall-table" data-csv="{csv}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def published_table(runs: pd.DataFrame) -> str:
    """The author's runs, from `starvation_published.runs`, each with what the rules give for it. HTML."""
    rows = []
    for row in runs.to_dict("records"):
        shape = f"{row['input_len']} / {row['output_len']}" + (" (varied)" if row["varied"] else "")
        counter = _cell(row["preemptions"]) if row["era"] == "current" else "not read"
        clause = "–" if none_of(row["log_clause"]) is None else f"{int(row['log_clause'])}"
        rows.append([row["arm"], row["model"], f"{int(row['blocks']):,}", shape, f"{int(row['num_prompts'])}", clause, counter,
                     "–" if none_of(row["rules"]) is None else f"{int(row['rules'])}"])
    return _table(["run of the author", "model", "blocks", "tokens in / out", "requests", "preemptions by the log", "by the counter",
                   "by the rules (computed here)"], rows, "part_4_published.csv")
