"""What Part 2 says of its records: named numbers, the published ones, and the verdict on the published shape.

What:   `numbers(arms)` and `published()` give the entries of `build/numbers.json` (docs/decisions/0004); `verdict` judges the shape.
Why:    a page must not praise chunked prefill on a machine where it did nothing, nor stay silent about an arm that was refused.
Use:    numbers(arms)["headline"]; verdict(arms, cases)["shape"]
Not:    counting (`freeze`), what is expected (`freeze_bound`), sentences (`freeze_words`, `freeze_floor`), pictures (`freeze_figures`), tables
        (`freeze_tables`).

The verdict (`shape`) compares no chunking with the smallest budget, at the heavy load (the light one where the heavy was not
measured): which arms are compared was fixed before anything was measured. The worst stall counts as longer only where every injection without
chunking was worse than every one with it, or, with many injections, where the medians' intervals do not overlap (`freeze.apart`); else the shape was
not measured. The median is that from the
injection to the end of its answers, the population of the claim, and counts as worse beyond `SAME`.
"""

from __future__ import annotations

from typing import Any

from . import freeze, freeze_bound
from .chart import digits
from .freeze import Case, Cases
from .freeze_bound import Expectation
from .freeze_published import published, published_rows
from .headline import Book, setup

__all__ = ["numbers", "published", "published_rows", "verdict"]

PARTS = ("off", "smallest", "largest")
POPULATIONS = ("all", "calm", "window", "broad")
STATISTICS = ("p50", "p90", "p99", "max")
NOT_MEASURED = "not measured here"
SAME = 0.02  # two medians this close, as a share of the larger, are the same


# --- named numbers ----------------------------------------------------------------------------------------------------


def numbers(arms: Any, cases: Cases | None = None) -> dict[str, dict[str, Any]]:
    """All named numbers of one set of Part 2, keys without prefix. Times in ms unless the unit says s; rates in tokens a second.

    `<part>_<load>_<what>`: part is off, smallest or largest (`freeze.roles`), load is light or heavy.
    """
    cases = freeze.read(arms) if cases is None else cases
    first = next(iter(arms.testable.values()), None) or next(iter(arms.runs.values()))
    book = Book(first)
    setup(book)
    _setup(book, arms, cases)
    expected = _expected(book, cases)
    for load in freeze.LOADS:
        found = freeze.roles(cases, load)
        for part in PARTS:
            _part(book, f"{part}_{load}", found.get(part), why_absent(arms, cases, part, load), expected)
        _ratios(book, load)
    cost = freeze_bound.prefill_cost(cases)
    for name, unit in (("ms_per_token", "ms"), ("fixed_ms", "ms"), ("tok_s", "tok/s")):
        book.put(f"cost_{name}", cost[name], unit, n=cost["n"], reason=cost["reason"])
    _trap(book, cases, arms)
    found = verdict(arms, cases)
    for name, value in found.items():
        book.put(name, value, "", reason=found["shape_because"])
    return book.entries


def _setup(book: Book, arms: Any, cases: Cases) -> None:
    some = next(iter(cases.values()), None)
    point = some.points[0] if some else {}
    missing = "no arm was measured"
    for name, key, unit in (("victims", "victims", "streams"), ("victim_input_len", "input_len", "tokens"),
                            ("victim_output_len", "output_len", "tokens"), ("asked_prompt_tokens", "injected_len", "tokens"),
                            ("injected_output_len", "injected_output_len", "tokens")):
        book.put(name, point.get(key), unit, reason=missing)
    known = [case.populations["prompt_tokens"] for case in cases.values() if case.populations["prompt_tokens"]]
    book.put("prompt_tokens", known[0] if known else None, "tokens", reason="the server did not count them")
    for load in freeze.LOADS:
        mine = [case for case in cases.values() if case.load == load]
        book.put(f"{load}_copies", mine[0].injected if mine else None, "prompts", reason=f"no {load} load was measured")
        book.put(f"{load}_rounds", mine[0].populations["rounds"] if mine else None, "rounds", reason=f"no {load} load was measured")
    book.put("hurt_times", freeze.HURT, "x")
    book.put("arms", len(arms.names), "arms")
    book.put("arms_measured", len(arms.testable), "arms")
    sizes = sorted({case.budget for case in cases.values() if case.asked_chunked and case.budget}, reverse=True)
    book.put("budgets", ", ".join(f"{size:,}" for size in sizes) or None, "tokens", reason=missing)
    book.put("invalid_points", sum(not point["validity"]["valid"] for case in cases.values() for point in case.points), "points")
    book.put("points", sum(len(case.points) for case in cases.values()), "points")


def _expected(book: Book, cases: Cases) -> Expectation | None:
    expected, why = freeze_bound.expectation(cases)
    case = expected.source if expected else None
    rounds = len(case.populations["reading_by_round_ms"]) if case else None
    calm = expected.calm_ms if expected else None
    book.put("prefill_ms_per_token", expected.ms_per_token if expected else None, "ms", n=rounds, reason=why)
    book.put("prefill_tok_s", expected.tok_s if expected else None, "tok/s", n=rounds, reason=why)
    book.put("prefill_budget", case.budget if case else None, "tokens", reason=why or "the budget is not known")
    book.put("prefill_reading_ms", case.reading_ms if case else None, "ms", n=rounds, reason=why)
    book.put("prefill_round_tokens", expected.round_tokens if expected else None, "tokens", reason=why)
    book.put("prefill_steps", expected.steps if expected else None, "steps", reason=why)
    book.put("calm_ms", calm, "ms", n=case.populations["calm"]["n"] if case else None, reason=why)
    off = expected.step_ms(case.populations["prompt_tokens"]) if expected else None
    book.put("expected_off_ms", off, "ms", reason=why)
    book.ratio("expected_off_over_calm", off, calm)
    found = [ratio for _, ratio in freeze_bound.ratios(cases, expected)]
    missing = why or "no arm has a step of another size than the one that the cost was read from"
    book.put("tested_ratio_low", min(found, default=None), "x", n=len(found) or None, reason=missing)
    book.put("tested_ratio_high", max(found, default=None), "x", n=len(found) or None, reason=missing)
    return expected


def _part(book: Book, name: str, case: Case | None, why: str, expected: Expectation | None) -> None:
    result = case.populations if case else None

    def put(what: str, value: Any, unit: str, n: int | None = None, reason: str = "not recorded") -> None:
        shown = book.put(f"{name}_{what}", value, unit, n=n, reason=why if case is None else reason)
        if case is not None and shown is not None:
            book.entries[f"{name}_{what}"]["run"] = case.run.name

    for population in (*POPULATIONS, "victim_ttft", "victim_ttft_window", "victim_ttft_calm", "injected_ttft"):
        summary = result[population] if result else None
        put(f"{population}_n", summary and summary["n"], "samples")
        for statistic in STATISTICS:
            reason = (summary["withheld"].get(statistic) or summary.get("empty") or "not recorded") if summary else ""
            put(f"{population}_{statistic}_ms", summary and summary[f"{statistic}_ms"], "ms", n=summary and summary["n"], reason=reason)
    spread = result["worst_by_round_ms"] if result else []
    put("worst_ms", case and case.worst_ms, "ms", n=result and result["window"]["n"], reason="no gap in a window")
    put("worst_typical_ms", case and case.typical_worst_ms, "ms", n=len(spread) or None, reason="no gap in a window")
    put("worst_round_low_ms", min(spread, default=None), "ms", n=len(spread) or None, reason="no gap in a window")
    put("worst_round_high_ms", max(spread, default=None), "ms", n=len(spread) or None, reason="no gap in a window")
    put("reading_ms", case and case.reading_ms, "ms", n=result and len(result["reading_by_round_ms"]), reason="no long prompt got a first token")
    put("budget", case and case.budget, "tokens", reason="the server's log did not say")
    put("step_tokens", case and case.step_tokens, "tokens", reason="budget or prompt length is not known")
    stall = expected.stall_ms(case) if case and expected else None
    put("expected_ms", stall, "ms", reason="budget or cost of a prompt token is not known")
    tests = stall is not None and case.typical_worst_ms is not None and expected.tests(case)
    put("measured_over_expected", case.typical_worst_ms / stall if tests else None, "x",
        reason="its step is as large as the one that the cost was read from, or one of the two was not measured")
    windows = result["rounds"] - result["rounds_without_window"] if result else 0
    hurt = result["hurt"]["broad"] if result else None
    put("hurt", hurt / windows if hurt is not None and windows else None, "tokens", n=windows or None,
        reason=result["hurt"]["reason"] or "no window" if result else "")
    put("hurt_limit_ms", result and result["hurt"]["limit_ms"], "ms", reason="no calm median")
    for what in ("lost_ms", "lost_between_ms", "lost_waiting_ms"):
        put(what, result and result[what], "ms", n=windows or None, reason=result["lost_reason"] if result else "")
    put("lost_waits", result and result["lost_waits"], "waits")
    put("failed", result and sum(outcomes.get("failed", 0) for outcomes in result["outcomes"].values()), "requests")


def _ratios(book: Book, load: str) -> None:
    """No chunking against the smallest budget."""
    for name, over, under in (("stall", "off_{}_worst_ms", "smallest_{}_worst_ms"), ("median", "smallest_{}_broad_p50_ms", "off_{}_broad_p50_ms"),
                              ("window_median", "smallest_{}_window_p50_ms", "off_{}_window_p50_ms"),
                              ("hurt", "smallest_{}_hurt", "off_{}_hurt"), ("lost", "smallest_{}_lost_ms", "off_{}_lost_ms"),
                              ("reading", "smallest_{}_reading_ms", "off_{}_reading_ms"),
                              ("off_stall_over_calm", "off_{}_worst_ms", "off_{}_calm_p50_ms")):
        suffix = "" if name == "off_stall_over_calm" else "_ratio"
        book.ratio(f"{load}_{name}{suffix}", *(book.entries[key.format(load)]["value"] for key in (over, under)))


def trap_case(cases: Cases) -> Case | None:
    """The case on which the population lesson is shown: no chunking at the light load, else the usable case with the longest stall."""
    off = freeze.roles(cases, "light").get("off")
    if off and off.worst_ms is not None:
        return off
    usable = [case for case in cases.values() if case.usable and case.worst_ms is not None]
    return max(usable, key=lambda case: case.worst_ms, default=None)


def _trap(book: Book, cases: Cases, arms: Any) -> None:
    case = trap_case(cases)
    tokens, seconds, why = freeze.hides_after(case) if case else (None, None, why_absent(arms, cases, "off", "light"))
    book.put("trap_hides_after_tokens", tokens, "tokens", reason=why)
    book.put("trap_hides_after_s", seconds, "s", reason=why)


def why_absent(arms: Any, cases: Cases, part: str, load: str) -> str:
    """Why a part of the comparison has no case: refused, not measured, not valid, or the server did the opposite."""
    if part == "off":
        if "unchunked" in arms.refused:
            return f"not testable here: {arms.refused['unchunked']}"
        case = cases.get(("unchunked", load))
        if case is None:
            return f"the arm without chunking has no {load} load" if "unchunked" in arms.runs else "the arm without chunking was not measured"
        return "the server kept chunking on" if not case.as_asked else f"its points are not valid: {', '.join(case.reasons)}"
    mine = [case for case in cases.values() if case.load == load and case.asked_chunked]
    if not mine:
        return f"no arm with chunking has a {load} load"
    return "no arm with chunking is usable: " + "; ".join(f"{case.arm} {', '.join(case.reasons) or 'did not chunk'}" for case in mine)


# --- the verdict ------------------------------------------------------------------------------------------------------


def verdict(arms: Any, cases: Cases) -> dict[str, str | None]:
    """`headline`, `headline_published`, `shape` and `shape_because` of the set."""
    known = {name: entry["value"] for name, entry in published().items()}
    result: dict[str, str | None] = {
        "headline": None, "shape": NOT_MEASURED,
        "headline_published": f"{known['freeze_ratio']:.1f} times ({known['freeze_budget']:,} of a {known['freeze_prompt_tokens']:,}-token prompt)"}
    load, off, on = compared(cases)
    if off is None or on is None:
        return result | {"shape_because": why_absent(arms, cases, "off" if off is None else "smallest", load)}
    worst, medians = (off.worst_ms, on.worst_ms), [case.populations["broad"]["p50_ms"] for case in (off, on)]
    if None in (*worst, *medians):
        return result | {"shape_because": "too few gaps lie between the injection and the end of its answers"}
    stalls = f"at the {load} load the worst stall of an injection was {spread(off)} without chunking and {spread(on)} with {size(on)}"
    longer = stall_moved(off, on)
    if longer is None:
        return result | {"shape_because": f"{stalls}; one injection a side has no range, so nothing is shown"}
    if longer == 0:
        return result | {"shape_because": f"ranges overlap: {stalls}"}
    slower = moved(*medians)
    return result | {
        "headline": f"worst stall {worst[0] / worst[1]:.1f} times as long without chunking as with {size(on)}",
        "shape": "held" if longer > 0 and slower > 0 else "moved" if longer > 0 or slower > 0 else "did not hold",
        "shape_because": f"{stalls}; the median gap until the answers ended was {digits(medians[0])} and {digits(medians[1])} ms",
    }  # fmt: skip


def compared(cases: Cases) -> tuple[str, Case | None, Case | None]:
    """(load, no chunking, smallest budget): heavy where both are there and have a range, else light, else what there is of heavy."""
    pairs = []
    for load in reversed(freeze.LOADS):
        found = freeze.roles(cases, load)
        if {"off", "smallest"} <= found.keys() and None not in (found["off"].worst_ms, found["smallest"].worst_ms):
            pairs.append((load, found["off"], found["smallest"]))
    if pairs:
        return next((pair for pair in pairs if stall_moved(*pair[1:]) is not None), pairs[0])
    found = freeze.roles(cases, "heavy")
    return "heavy", found.get("off"), found.get("smallest")


def stall_moved(case: Case, other: Case) -> int | None:
    """`freeze.apart` of the worst stalls of each injection."""
    return freeze.apart(case.populations["worst_by_round_ms"], other.populations["worst_by_round_ms"])


def moved(before: float, after: float) -> int:
    """1 where `after` is larger, -1 where it is smaller, 0 where they differ by no more than `SAME`."""
    if abs(after - before) <= SAME * max(abs(after), abs(before)):
        return 0
    return 1 if after > before else -1


def spread(case: Case) -> str:
    """`380 to 396 ms`: the worst stalls of the injections."""
    stalls = case.populations["worst_by_round_ms"]
    low, high = digits(min(stalls)), digits(max(stalls))
    return f"{low} ms" if low == high else f"{low} to {high} ms"


def size(case: Case) -> str:
    return f"{case.budget:,} tokens a step" if case.budget else "chunking"
