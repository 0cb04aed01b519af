"""The freeze in tables: what each arm really ran with, what it did to the victims, and the bound beside the measurement.

What:   HTML tables (class wall-table) of the cases of `freeze.read`. A cell without a value is a dash whose title says why.
Why:    a flag that was asked for is not a flag that took effect, and a median without its n and its population proves nothing.
Use:    display(HTML(settings_table(arms, cases))); display(HTML(trade_table(cases))); display(HTML(bound_table(cases)))
Not:    figures (`freeze_figures`), counting (`freeze`).
"""

from __future__ import annotations

import html
from typing import Any

from . import freeze_bound
from .chart import digits
from .freeze import Case, Cases
from .freeze_figures import arm_label

Cell = tuple[float | int | str | None, str]  # a value and its title: the reason where the value is null

def settings_table(arms: Any) -> str:
    """One row an arm of the set: what was asked for, what the server's log said, and whether it could be tested."""
    rows = []
    for arm in arms.names:
        run = arms.runs.get(arm)
        if run is None:
            rows.append((arm, ["", "", "", "not measured: no record"]))
            continue
        flags, said = run.document["flags"], run.said or {}
        asked = "off" if flags.get("no-enable-chunked-prefill") else "on"
        effective = said.get("chunked_prefill")
        budget = said.get("max_num_batched_tokens")
        if run.not_testable:
            state = f"not testable here: {run.not_testable['reason']}"
        elif effective is not None and effective != (asked == "on"):
            state = "measured, but the server did the opposite of what was asked: not compared"
        else:
            state = "measured"
        # A server that does not chunk prints no budget; the flag that it was started with is the best there is.
        size = f"{budget:,}" if budget else f"asked for {flags['max-num-batched-tokens']:,}" if flags.get("max-num-batched-tokens") else "not said"
        rows.append((arm, [asked, "not said" if effective is None else "on" if effective else "off", size, state]))
    return _table(["arm", "chunked prefill asked for", "in effect", "tokens a step", "state"],
                  [(name, [(text, "") for text in cells]) for name, cells in rows], "part_2_settings.csv", text=True)


def trade_table(cases: Cases, caption: str = "") -> str:
    """One row an arm and load: all tokens, the window, the stretch to the end, tokens hurt, time lost, the long prompts' own wait."""
    heads = ["arm, load", "rounds", "n all", "p50", "p99", "max", "n window", "p50", "max", "n to the end", "p50", "p99", "hurt", "lost, ms",
             "long prompts read, ms", "n TTFT", "TTFT max, ms", "valid"]
    groups = [("", 2), ("gaps of all tokens, ms", 4), ("in the window, ms", 3), ("to the end, ms", 3), ("an injection", 2), ("long prompts", 3),
              ("", 1)]
    rows = []
    for case in sorted(cases.values(), key=lambda case: (case.load, case.asked_chunked, -(case.budget or 0))):
        result = case.populations
        windows = result["rounds"] - result["rounds_without_window"]
        hurt = result["hurt"]["broad"]
        cells = [
            (windows, f"{result['rounds_without_window']} more without a window" if result["rounds_without_window"] else ""),
            (result["all"]["n"], ""), *(_statistic(result["all"], name) for name in ("p50", "p99", "max")),
            (result["window"]["n"], ""), *(_statistic(result["window"], name) for name in ("p50", "max")),
            (result["broad"]["n"], ""), *(_statistic(result["broad"], name) for name in ("p50", "p99")),
            _or(hurt / windows if hurt is not None and windows else None, result["hurt"]["reason"] or "no window"),
            _lost(result), _or(case.reading_ms, "no long prompt got a first token"),
            (result["injected_ttft"]["n"], ""), _statistic(result["injected_ttft"], "max"), _validity(case),
        ]  # fmt: skip
        rows.append((f"{arm_label(case)}, {case.load}", cells))
    return _table(heads, rows, "part_2_trade.csv", groups=groups, caption=caption)


def bound_table(cases: Cases) -> str:
    """What was expected beside the measurement: prompt tokens of the fullest step, the stall that they must cause at the cost of a prompt token
    that one server showed, and the typical worst stall of a round with its range. A step of that server's own size is marked as no test."""
    expected, why = freeze_bound.expectation(cases)
    rows = []
    for case in sorted(cases.values(), key=lambda case: (case.load, case.asked_chunked, -(case.budget or 0))):
        tokens, stall, spread = case.step_tokens, case.typical_worst_ms, case.populations["worst_by_round_ms"]
        bound = expected.stall_ms(case) if expected else None
        reason = why or "the budget or the prompt length is not known"
        ratio = stall / bound if stall is not None and bound else None
        rows.append((f"{arm_label(case)}, {case.load}" + (" (cost read here)" if expected and case is expected.source else ""), [
            _or(tokens, "the budget or the prompt length is not known"), _or(bound, reason), _or(stall, "no gap in a window"),
            _or(f"{digits(min(spread))}–{digits(max(spread))} ({len(spread)})" if spread else None, "no gap in a window"),
            ("same step, no test", "as many prompt tokens as in the steps that the cost was read from") if ratio and not expected.tests(case)
            else _or(ratio, reason if bound is None else "no gap in a window")]))
    return _table(["arm, load", "prompt tokens of the fullest step", "expected stall, ms", "worst stall of a round, ms", "range (rounds)",
                   "measured / expected"], rows, "part_2_bound.csv")


def _or(value: float | int | str | None, reason: str) -> Cell:
    """The reason is for the dash."""
    return value, reason if value is None else ""


def _statistic(summary: dict[str, Any], name: str) -> Cell:
    return _or(summary[f"{name}_ms"], summary.get("empty") or summary["withheld"].get(name, "not known"))


def _lost(result: dict[str, Any]) -> Cell:
    if result["lost_ms"] is None:
        return None, result["lost_reason"]
    waits = result["lost_waits"]
    return result["lost_ms"], (f"{digits(result['lost_between_ms'])} ms between tokens, {digits(result['lost_waiting_ms'])} ms in {waits} "
                               f"wait{'' if waits == 1 else 's'} for a first token")


def _validity(case: Case) -> Cell:
    if case.usable:
        return "✓", "; ".join(case.reasons)
    return "✗", "; ".join(case.reasons) if not case.valid else "the server did the opposite of what was asked"


def _table(heads: list[str], rows: list[tuple[str, list[Cell]]], csv: str, *, groups: list[tuple[str, int]] | None = None, caption: str = "",
           text: bool = False) -> str:
    above = "".join(f'<th scope="colgroup" colspan="{span}">{html.escape(name)}</th>' if name else f'<td colspan="{span}"></td>'
                    for name, span in groups or [])
    above = f"<tr>{above}</tr>" if above else ""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in heads)
    body = "".join(f'<tr><th scope="row">{html.escape(name)}</th>{"".join(_cell(*cell, text) for cell in cells)}</tr>' for name, cells in rows)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return (f'<table class="wall-table" data-csv="{html.escape(csv, quote=True)}">{title}'
            f"<thead>{above}<tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _cell(value: float | int | str | None, title: str, text: bool) -> str:
    shown = f' title="{html.escape(title, quote=True)}"' if title else ""
    if value is None:
        return f"<td{shown}>–</td>"
    if isinstance(value, str):
        style = ' class="text"' if text else ""
        return f"<td{style}{shown}>{html.escape(value)}</td>"
    return f'<td data-value="{value:.6g}"{shown}>{f"{value:,}" if isinstance(value, int) else digits(value)}</td>'
