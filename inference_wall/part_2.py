"""What Part 2 says of its records: named numbers, the published ones, and sentences whose words depend on the data.

What:   `numbers(arms)` and `published()` give the entries of `build/numbers.json` (docs/decisions/0004); each other function gives one
        paragraph of Markdown that stays true however the measurement came out.
Why:    a page must not praise chunked prefill on a machine where it did nothing, nor stay silent about an arm that was refused.
Use:    numbers(arms)["headline"]; display(Markdown(stall_sentence(arms, cases)))
Not:    counting (`freeze`), pictures (`freeze_figures`), tables (`freeze_tables`), the published figures (`freeze_published`).

The verdict (`shape`) compares no chunking with the budget that has the smallest worst stall, at the heavy load (the light one where
the heavy was not measured). It reads the median from the injection to the end of its answers, the population of the claim.
"""

from __future__ import annotations

from typing import Any

from . import freeze
from .chart import digits
from .freeze import Case, Cases
from .freeze_published import published, published_rows
from .headline import Book, setup

__all__ = ["numbers", "published", "published_rows", "verdict"]

PARTS = ("off", "best", "smallest", "largest")
POPULATIONS = ("all", "calm", "window", "broad")
STATISTICS = ("p50", "p90", "p99", "max")
NOT_MEASURED = "not measured here"


# --- named numbers ----------------------------------------------------------------------------------------------------


def numbers(arms: Any, cases: Cases | None = None) -> dict[str, dict[str, Any]]:
    """All named numbers of one set of Part 2, keys without prefix. Times in ms unless the unit says s; rates in tokens a second.

    `<part>_<load>_<what>`: part is off, best, smallest or largest (`freeze.roles`), load is light or heavy.
    """
    cases = freeze.read(arms) if cases is None else cases
    first = next(iter(arms.testable.values()), None) or next(iter(arms.runs.values()))
    book = Book(first)
    setup(book)
    _setup(book, arms, cases)
    speed = _speed(book, cases)
    for load in freeze.LOADS:
        found = freeze.roles(cases, load)
        for part in PARTS:
            _part(book, f"{part}_{load}", found.get(part), why_absent(arms, cases, part, load), speed)
        _ratios(book, load, found)
    cost = freeze.prefill_cost(cases)
    for name, unit in (("ms_per_token", "ms"), ("fixed_ms", "ms"), ("tok_s", "tok/s")):
        book.put(f"cost_{name}", cost[name], unit, n=cost["n"], reason=cost["reason"])
    _trap(book, cases, arms)
    for name, value in verdict(arms, cases).items():
        book.put(name, value, "", reason="no arm without chunking and with it could be compared")
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


def _speed(book: Book, cases: Cases) -> float | None:
    case, speed, why = freeze.prefill_speed(cases)
    rounds = len(case.populations["reading_by_round_ms"]) if case else None
    book.put("prefill_tok_s", speed, "tok/s", n=rounds, reason=why)
    book.put("prefill_budget", case.budget if case else None, "tokens", reason=why or "the budget is not known")
    book.put("prefill_reading_ms", case.reading_ms if case else None, "ms", n=rounds, reason=why)
    prompt = case.populations["prompt_tokens"] if case else None
    book.put("prefill_round_tokens", case.injected * prompt if case else None, "tokens", reason=why)
    book.put("expected_off_ms", 1e3 * prompt / speed if speed else None, "ms", reason=why)
    calm = case.populations["calm"]["p50_ms"] if case else None
    book.put("calm_ms", calm, "ms", n=case.populations["calm"]["n"] if case else None, reason=why or "too few calm gaps")
    book.ratio("expected_off_over_calm", book.entries["expected_off_ms"]["value"], calm)
    return speed


def _part(book: Book, name: str, case: Case | None, why: str, speed: float | None) -> None:
    result = case.populations if case else None

    def put(what: str, value: Any, unit: str, n: int | None = None, reason: str = "not recorded") -> None:
        shown = book.put(f"{name}_{what}", value, unit, n=n, reason=why if case is None else reason)
        if case is not None and shown is not None:
            book.entries[f"{name}_{what}"]["run"] = case.run.name

    for population in (*POPULATIONS, "victim_ttft", "victim_ttft_window", "injected_ttft"):
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
    expected = 1e3 * case.step_tokens / speed if case and case.step_tokens and speed else None
    put("expected_ms", expected, "ms", reason="budget or speed of reading is not known")
    put("measured_over_expected", case.typical_worst_ms / expected if expected and case.typical_worst_ms is not None else None, "x",
        reason="one of its two numbers was not measured")
    windows = result["rounds"] - result["rounds_without_window"] if result else 0
    hurt = result["hurt"]["broad"] if result else None
    put("hurt", hurt / windows if hurt is not None and windows else None, "tokens", n=windows or None,
        reason=result["hurt"]["reason"] or "no window" if result else "")
    put("hurt_limit_ms", result and result["hurt"]["limit_ms"], "ms", reason="no calm median")
    put("lost_ms", result and result["lost_ms"], "ms", reason=result["lost_reason"] if result else "")
    put("failed", result and sum(outcomes.get("failed", 0) for outcomes in result["outcomes"].values()), "requests")


def _ratios(book: Book, load: str, found: dict[str, Case]) -> None:
    def value(name: str) -> Any:
        return book.entries[name]["value"]

    book.ratio(f"{load}_stall_ratio", value(f"off_{load}_worst_ms"), value(f"best_{load}_worst_ms"))
    book.ratio(f"{load}_median_ratio", value(f"best_{load}_broad_p50_ms"), value(f"off_{load}_broad_p50_ms"))
    book.ratio(f"{load}_window_median_ratio", value(f"best_{load}_window_p50_ms"), value(f"off_{load}_window_p50_ms"))
    book.ratio(f"{load}_hurt_ratio", value(f"best_{load}_hurt"), value(f"off_{load}_hurt"))
    book.ratio(f"{load}_lost_ratio", value(f"best_{load}_lost_ms"), value(f"off_{load}_lost_ms"))
    book.ratio(f"{load}_reading_ratio", value(f"best_{load}_reading_ms"), value(f"off_{load}_reading_ms"))
    book.ratio(f"{load}_off_stall_over_calm", value(f"off_{load}_worst_ms"), value(f"off_{load}_calm_p50_ms"))


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


def verdict(arms: Any, cases: Cases) -> dict[str, str | None]:
    """`headline`, `headline_published`, `shape` and `shape_because` of the set."""
    published_ratio = published()["freeze_ratio"]["value"]
    result: dict[str, str | None] = {"headline": None, "headline_published": f"{published_ratio:.1f} x longer worst stall without chunking",
                                     "shape": NOT_MEASURED}
    load, off, best = _compared(cases)
    if off is None or best is None:
        missing = "off" if off is None else "best"
        return result | {"shape_because": why_absent(arms, cases, missing, load)}
    worst_off, worst_on = off.worst_ms, best.worst_ms
    median_off, median_on = (case.populations["broad"]["p50_ms"] for case in (off, best))
    if None in (worst_off, worst_on, median_off, median_on):
        return result | {"shape_because": "too few gaps lie between the injection and the end of its answers"}
    longer, slower = worst_off > worst_on, median_on > median_off
    shape = "held" if longer and slower else "moved" if longer or slower else "did not hold"
    return result | {
        "headline": f"{worst_off / worst_on:.1f} x longer worst stall without chunking", "shape": shape,
        "shape_because": f"at the {load} load the worst stall was {digits(worst_off)} ms without chunking and {digits(worst_on)} ms with steps of "
                         f"{best.budget:,} tokens; the median gap until the answers ended was {digits(median_off)} and {digits(median_on)} ms",
    }  # fmt: skip


def _compared(cases: Cases) -> tuple[str, Case | None, Case | None]:
    """(load, off, best): heavy where both are there, else light, else what there is of heavy."""
    for load in reversed(freeze.LOADS):
        found = freeze.roles(cases, load)
        if {"off", "best"} <= found.keys() and found["off"].worst_ms is not None:
            return load, found["off"], found["best"]
    found = freeze.roles(cases, "heavy")
    return "heavy", found.get("off"), found.get("best")


# --- sentences whose words depend on the data ---------------------------------------------------------------------------


def arms_sentence(arms: Any, cases: Cases) -> str:
    """Which arms could be measured, and which the engine refused, did otherwise or still lack."""
    parts = [f"**`{arm}` is not testable here:** {reason}." for arm, reason in arms.refused.items()]
    parts += [f"**`{arm}` was not measured yet.**" for arm in arms.missing]
    stubborn = sorted({case.arm for case in cases.values() if not case.as_asked})
    parts += [f"**`{arm}` did the opposite of its name:** the server's log says so. It is drawn and never compared." for arm in stubborn]
    unsure = sorted({case.arm for case in cases.values() if case.chunked is None})
    parts += [f"The log of `{arm}` does not say whether prompts were cut; we rely on the flag." for arm in unsure]
    invalid = [f"{case.arm} ({case.load}: {', '.join(case.reasons)})" for case in cases.values() if not case.valid]
    parts += [f"Not valid, drawn hollow or dotted and never compared: {'; '.join(invalid)}."] if invalid else []
    return " ".join(parts) or f"All {len(arms.names)} arms were measured, and each server's log confirms its setting."


def stall_sentence(arms: Any, cases: Cases) -> str:
    """The worst stall without chunking against that of the best budget, at each load, with its n and its range."""
    lines = []
    for load in freeze.LOADS:
        found = freeze.roles(cases, load)
        off, best = found.get("off"), found.get("best")
        if off is None or best is None or None in (off.worst_ms, best.worst_ms):
            reason = why_absent(arms, cases, "off" if off is None else "best", load) if off is None or best is None else "no gap lies in a window"
            lines.append(f"**{load.capitalize()} load: no comparison.** {reason[:1].upper()}{reason[1:]}.")
            continue
        ratio, apart = off.worst_ms / best.worst_ms, _apart(off, best)
        word = (f"**{ratio:.1f} times as long without chunking**" if ratio > 1 else "**not longer without chunking**")
        lines.append(
            f"{load.capitalize()} load: the worst stall was {digits(off.worst_ms)} ms without chunking ({_from(off)}) and "
            f"{digits(best.worst_ms)} ms with {best.budget:,} tokens a step ({_from(best)}): {word}. " + (
                "In every round it was longer than in any round with chunking." if apart and ratio > 1 else
                "In every round it was shorter than in any round with chunking." if apart else
                "The two ranges over the rounds overlap, so no difference is shown."))
    return "\n\n".join(lines)


def _apart(off: Case, best: Case) -> bool:
    mine, other = off.populations["worst_by_round_ms"], best.populations["worst_by_round_ms"]
    return bool(mine and other) and (min(mine) > max(other) or max(mine) < min(other))


def _from(case: Case) -> str:
    spread = case.populations["worst_by_round_ms"]
    return f"n = {case.populations['window']['n']} gaps in {len(spread)} windows, from {digits(min(spread))} to {digits(max(spread))} a window"


def trade_sentence(arms: Any, cases: Cases) -> str:
    """What chunking costs: the median while the injection lasts, tokens hurt, time lost; and what the choice of window does to the median."""
    load, off, best = _compared(cases)
    if off is None or best is None:
        return f"**The trade cannot be shown here.** {why_absent(arms, cases, 'off' if off is None else 'best', load)}."
    wide = [case.populations["broad"]["p50_ms"] for case in (off, best)]
    narrow = [case.populations["window"]["p50_ms"] for case in (off, best)]
    hurt = [case.populations["hurt"]["broad"] for case in (off, best)]
    windows = [max(1, len(case.populations["worst_by_round_ms"])) for case in (off, best)]
    lost = [case.populations["lost_ms"] for case in (off, best)]
    lines = [f"At the {load} load, no chunking against {best.budget:,} tokens a step:" if best.budget else f"At the {load} load:"]
    lines.append("- median gap from the injection to the end of its answers: " + _pair(wide, "ms", "worse with chunking", "better with chunking"))
    lines.append("- median gap while prompts were read, the narrow window: " + _pair(narrow, "ms", "worse with chunking", "better with chunking"))
    share = [count / number if count is not None else None for count, number in zip(hurt, windows, strict=True)]
    lines.append("- tokens hurt by one injection: " + _pair(share, "", "more with chunking", "fewer with chunking"))
    lines.append("- time that one victim lost to one injection: " + _pair(lost, "ms", "more with chunking", "less with chunking"))
    if None not in (*wide, *narrow) and (wide[1] > wide[0]) != (narrow[1] > narrow[0]):
        lines.append("\nThe two medians point in opposite directions. Where the window ends decides which way: the longer the injected answers, "
                     "the more ordinary tokens dilute the stalls. The tokens hurt and the time lost do not depend on it.")
    return "\n".join([lines[0], "", *lines[1:]])


def _pair(values: list[float | None], unit: str, more: str, less: str) -> str:
    if None in values:
        return "not known (too few gaps)"
    off, on = values
    ratio = on / off if off else None
    word = "the same" if abs(on - off) <= 0.02 * max(abs(on), abs(off)) else more if on > off else less
    return f"{digits(off)} against {digits(on)}{' ' + unit if unit else ''}, {word}" + (f" ({ratio:.1f} x)" if ratio and word != "the same" else "")


def population_sentence(cases: Cases) -> str:
    """The same stall in two populations: the window and all tokens."""
    case = trap_case(cases)
    if case is None:
        return "**No stall to hide:** no usable arm has a gap in a window."
    window, every, hurt = (case.populations[name] for name in ("window", "all", "hurt"))
    name = "without chunking" if not case.asked_chunked else f"with {case.budget:,} tokens a step"
    text = (f"The {case.load} load {name}: the longest of the {window['n']} gaps in the windows is {digits(window['max_ms'])} ms. "
            f"Among all {every['n']} gaps that is still the maximum" if every["max_ms"] == window["max_ms"] else
            f"The {case.load} load {name}: the longest of the {window['n']} gaps in the windows is {digits(window['max_ms'])} ms. "
            f"Among all {every['n']} gaps the maximum is {digits(every['max_ms'])} ms")
    p99 = every["p99_ms"]
    if p99 is None:
        text += f", and a p99 is withheld ({every['withheld']['p99']})."
    elif hurt["limit_ms"] and p99 <= hurt["limit_ms"]:
        text += f", but their p99 is {digits(p99)} ms: **the stall is hidden.**"
    else:
        text += f", and their p99 is {digits(p99)} ms: the stall still shows, because this test was short."
    tokens, seconds, why = freeze.hides_after(case)
    if tokens:
        each = hurt["broad"] / max(1, len(case.populations["worst_by_round_ms"]))
        text += (f" One injection hurt {each:.0f} tokens. A p99 leaves out one gap in a hundred, so it forgets this injection after {tokens:,} "
                 f"tokens: {digits(seconds)} s of watching {case.victims} victims.")
    return text + (f" ({why}.)" if why else "")


def cost_sentence(cases: Cases) -> str:
    """The cost of a prompt token from the stalls, beside the one from the long prompts' own wait."""
    cost, (case, speed, why) = freeze.prefill_cost(cases), freeze.prefill_speed(cases)
    if cost["ms_per_token"] is None:
        return f"**No line through the stalls:** {cost['reason']}."
    text = (f"The best line through {cost['n']} worst stalls (each the median over its rounds): **{digits(cost['fixed_ms'])} ms + "
            f"{cost['ms_per_token']:.3f} ms for each prompt token** of the fullest step, that is {cost['tok_s']:,.0f} tokens a second.")
    if speed is None:
        return f"{text} There is no second measurement to hold it against: {why}."
    ratio = cost["tok_s"] / speed
    judged = "they agree within a tenth" if abs(ratio - 1) <= 0.1 else f"they differ by {abs(ratio - 1):.0%}"
    return f"{text} The long prompts' own wait says {speed:,.0f} ({case.budget or 0:,} tokens a step): {judged}."


def verdict_sentence(arms: Any, cases: Cases) -> str:
    """The verdict on the published shape, in words."""
    found = verdict(arms, cases)
    opening = {"held": "**The shape held:** a longer worst stall without chunking, a worse median with it.",
               "moved": "**Half of the shape held:** of a longer worst stall without chunking and a worse median with it, one is true here.",
               "did not hold": "**The shape did not hold here:** neither a longer worst stall without chunking nor a worse median with it.",
               NOT_MEASURED: "**The shape was not measured here.**"}[found["shape"]]
    reason = found["shape_because"]
    return f"{opening} {reason[:1].upper()}{reason[1:]}."


def traces(arms: Any) -> list[tuple[str, Any]]:
    """The profiler's traces of the set as (arm, path), in the order of the arms; empty where none was taken."""
    found = [(arm, run.trace(point["point"])) for arm, run in arms.testable.items() for point in run.points if point["pass"] == "trace"]
    return [(arm, path) for arm, path in found if path is not None]
