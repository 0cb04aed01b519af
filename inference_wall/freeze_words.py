"""Part 2 in words that depend on the data.

What:   each function gives one paragraph or list of Markdown, from the cases of `freeze.read`, that stays true however the measurement came out.
Why:    prose that is typed claims its result before anybody measured it: also where an arm is refused, or where two ranges overlap.
Use:    display(Markdown(stall_sentence(arms, cases))); display(Markdown(takeaways(arms, cases)))
Not:    named numbers and the verdict (`part_2`), the line and the expectation themselves (`freeze_bound`), what a step costs however little
        it reads, and the traces (`freeze_floor`), tables (`freeze_tables`).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from . import freeze, freeze_bound, freeze_floor
from .chart import digits
from .freeze import Case, Cases
from .freeze_bound import CLOSE
from .part_2 import NOT_MEASURED, compared, moved, size, spread, stall_moved, trap_case, verdict, why_absent

TWINS = 2  # a difference must be more than so many times that of two servers that did the same: one pair says little about the spread
MOVED = 0.1  # time lost with and without chunking that differs by no more than this share counts as moved, not removed


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


# --- what we expect, and whether it came ----------------------------------------------------------------------------------


def expectation_sentence(cases: Cases) -> str:
    """The cost of a prompt token from one server, and the stall that it lets us expect where a prompt is read whole."""
    expected, why = freeze_bound.expectation(cases)
    if expected is None:
        return f"**Nothing can be expected here:** {why}."
    case, prompt = expected.source, expected.source.populations["prompt_tokens"]
    steps = "1 step" if expected.steps == 1 else f"{expected.steps} steps"
    where = f"with {size(case)}" if case.asked_chunked else "without chunking"
    whole = expected.step_ms(prompt)
    text = (f"At the {case.load} load {where}, {expected.round_tokens:,} prompt tokens were read in {digits(case.reading_ms)} ms (the median of "
            f"{len(case.populations['reading_by_round_ms'])} injections). Its budget makes {steps} of that, and an ordinary step took "
            f"{digits(expected.calm_ms)} ms (the calm median). What is left is **{expected.ms_per_token:.3f} ms for each prompt token**, "
            f"{expected.tok_s:,.0f} tokens a second.")
    if case.step_tokens == prompt:
        return f"{text} That step already holds a whole prompt. So this is no expectation for the arm without chunking, but its own wait once more."
    return (f"{text} A step that must swallow a whole prompt of {prompt:,} tokens should then take\n\n> {digits(expected.calm_ms)} ms + {prompt:,} × "
            f"{expected.ms_per_token:.3f} ms = **{digits(whole)} ms**,\n\nas long as {whole / expected.calm_ms:.0f} ordinary steps in a row.")


def division_sentence(cases: Cases) -> str:
    """Whether the stalls came out as expected, from those arms alone that are a test of it."""
    return " ".join(_division(cases))


def _division(cases: Cases) -> tuple[str, str]:
    expected, why = freeze_bound.expectation(cases)
    found = freeze_bound.ratios(cases, expected)
    if not found:
        why = why or "no usable arm has a fullest step of another size than the one that the cost was read from"
        return "**Whether a stall is a division was not tested here:**", f"{why}."
    low, high = (pick(found, key=lambda pair: pair[1]) for pick in (min, max))
    between = (f"{low[1]:.2f} times what we expected" if len(found) == 1 else
               f"between {low[1]:.2f} ({_label(low[0])}) and {high[1]:.2f} times ({_label(high[0])}) what we expected")
    places = f"In the {len(found)} combinations of arm and load that are a test" if len(found) > 1 else "In the one arm and load that is a test"
    if all(abs(ratio - 1) <= CLOSE for _, ratio in found):
        return "**A stall is close to a division.**", (
            f"{places}, the typical worst stall was {between} from the cost of a prompt token on one server.")
    way = {(True, False): "less", (False, True): "more"}.get((low[1] < 1 - CLOSE, high[1] > 1 + CLOSE), "something else")
    return f"**A stall is {way} than this division here.**", (
        f"{places}, the typical worst stall was {between}. A step is not an ordinary step plus a fixed price for each prompt token on this machine.")


def _label(case: Case) -> str:
    return f"{size(case) if case.asked_chunked else 'no chunking'}, {case.load}"


def cost_sentence(cases: Cases) -> str:
    """The cost of a prompt token from all stalls, beside the one that was read from one server's long prompts."""
    cost, (expected, why) = freeze_bound.prefill_cost(cases), freeze_bound.expectation(cases)
    if cost["ms_per_token"] is None:
        return f"**No line through the stalls:** {cost['reason']}."
    text = (f"The best line through {cost['n']} worst stalls (each the median over its injections): **{digits(cost['fixed_ms'])} ms + "
            f"{cost['ms_per_token']:.3f} ms for each prompt token** of the fullest step, that is {cost['tok_s']:,.0f} tokens a second.")
    if expected is None:
        return f"{text} There is nothing to hold it against: {why}."
    ratio = cost["ms_per_token"] / expected.ms_per_token
    judged = "within a tenth of each other" if abs(ratio - 1) <= 0.1 else f"{abs(ratio - 1):.0%} apart"
    same = sum(case.usable and case.typical_worst_ms is not None and case.step_tokens == expected.source.step_tokens for case in cases.values())
    return (f"{text} The long prompts' wait from which we expected it says {expected.ms_per_token:.3f} ms: the two are {judged}. They are not wholly "
            f"independent, because {same} of the {cost['n']} stalls come from steps of the size that the wait was read from.")


# --- the worst stall -----------------------------------------------------------------------------------------------------


def stall_sentence(arms: Any, cases: Cases) -> str:
    """The worst stall without chunking against that of the smallest budget, at each load, with its n and its range."""
    lines = []
    for load in freeze.LOADS:
        found = freeze.roles(cases, load)
        off, on = found.get("off"), found.get("smallest")
        if off is None or on is None or None in (off.worst_ms, on.worst_ms):
            reason = why_absent(arms, cases, "off" if off is None else "smallest", load) if off is None or on is None else "no gap lies in a window"
            lines.append(f"**{load.capitalize()} load: no comparison.** {reason[:1].upper()}{reason[1:]}.")
            continue
        way, ratio = stall_moved(off, on), off.worst_ms / on.worst_ms
        lines.append(
            f"{load.capitalize()} load: the worst stall was {digits(off.worst_ms)} ms without chunking ({_from(off)}) and "
            f"{digits(on.worst_ms)} ms with the smallest budget, {size(on)} ({_from(on)}): " + {
                1: f"**{ratio:.1f} times as long without chunking**. {_how(off, on, 'longer')}",
                -1: f"**shorter without chunking** ({ratio:.2f} times). {_how(off, on, 'shorter')}",
                0: "**no difference is shown**, because the two ranges over the injections overlap.",
                None: "**no difference is shown**, because one injection a side has no range."}[way])
    return "\n\n".join([*lines, *_twins(cases)])


def _how(off: Case, on: Case, which: str) -> str:
    """Whether each injection says so, or the medians over them."""
    stalls = [case.populations["worst_by_round_ms"] for case in (off, on)]
    if freeze.disjoint(*stalls):
        return f"In every valid injection it was {which} than in any with {size(on)}."
    return (f"In a typical injection it was {digits(off.typical_worst_ms)} against {digits(on.typical_worst_ms)} ms: single injections overlap, "
            "the 95 percent intervals of the two medians do not.")


def _from(case: Case) -> str:
    stalls = case.populations["worst_by_round_ms"]
    return f"n = {case.populations['window']['n']} gaps in {len(stalls)} window{'' if len(stalls) == 1 else 's'}, each window's worst {spread(case)}"


def _twins(cases: Cases) -> list[str]:
    """Where an arm with chunking has the budget of the one without, the two differ in the flag alone: a control, or a fuller step."""
    lines, names = [], None
    for load in freeze.LOADS:
        off = freeze.roles(cases, load).get("off")
        on = next((case for case in freeze.chunked(cases, load) if off and case.budget and case.budget == off.budget), None)
        if on is None or None in (off.step_tokens, on.step_tokens, off.worst_ms, on.worst_ms):
            continue
        names = names or f"`{on.arm}` and `{off.arm}` have the same budget, {on.budget:,} tokens, and differ in the flag alone."
        stalls = f"{spread(on)} with the flag on, {spread(off)} with it off"
        if off.step_tokens == on.step_tokens:
            way = stall_moved(off, on)
            lines.append(f"At the {load} load either reads up to {on.step_tokens:,} prompt tokens in a step. So the flag changes nothing, and we "
                         f"measured one thing twice, on two servers: worst stalls of {stalls}. " +
                         ("The ranges overlap, as they should." if way == 0 else "With one injection a side nobody can say whether they differ."
                          if way is None else "That they are apart shows how far two equal servers can differ: trust no smaller difference."))
        else:
            fuller = "fuller steps, not smaller ones" if on.step_tokens > off.step_tokens else "smaller steps"
            lines.append(f"At the {load} load the fullest step holds {on.step_tokens:,} prompt tokens with chunking and {off.step_tokens:,} without, "
                         f"where a prompt goes in whole or not at all. There chunking makes {fuller}: worst stalls of {stalls}.")
    return [" ".join([names, *lines])] if names else []


# --- the price -----------------------------------------------------------------------------------------------------------


def trade_sentence(arms: Any, cases: Cases) -> str:
    """What chunking costs: the median while the injection lasts, tokens hurt, time lost; and what the choice of window does to the median."""
    load, off, on = compared(cases)
    if off is None or on is None:
        return f"**The trade cannot be shown here:** {why_absent(arms, cases, 'off' if off is None else 'smallest', load)}."
    wide = [case.populations["broad"]["p50_ms"] for case in (off, on)]
    narrow = [case.populations["window"]["p50_ms"] for case in (off, on)]
    hurt = [case.populations["hurt"]["broad"] for case in (off, on)]
    windows = [max(1, len(case.populations["worst_by_round_ms"])) for case in (off, on)]
    share = [count / number if count is not None else None for count, number in zip(hurt, windows, strict=True)]
    lost = [case.populations["lost_ms"] for case in (off, on)]
    lines = [
        f"At the {load} load, no chunking against {size(on)}:", "",
        "- median gap from the injection to the end of its answers: " + _pair(wide, "ms", "worse with chunking", "better with chunking"),
        "- median gap while prompts were read, the narrow window: " + _pair(narrow, "ms", "worse with chunking", "better with chunking"),
        "- tokens hurt by one injection: " + _pair(share, "", "more with chunking", "fewer with chunking"),
        "- time that one victim lost to one injection: " + _pair(lost, "ms", "more with chunking", "less with chunking")
        + ("" if None in lost else f"; of it waiting for a first token {_parts(off)} against {_parts(on)}"),
    ]
    if None not in (*wide, *narrow) and moved(*wide) * moved(*narrow) < 0:
        lines.append("\nThe two medians point in opposite directions. Where the window ends decides which way: the longer the injected answers, "
                     "the more ordinary tokens dilute the stalls. A count and a sum are not diluted.")
    return "\n".join([*lines, "", " ".join(_work(arms, cases))])


def _twin_noise(cases: Cases, value: Any) -> float:
    """How far two arms that did the same (equal budget, equal fullest step, light load) lie apart, as a share; 0 without such a pair."""
    off = freeze.roles(cases, "light").get("off")
    twin = next((case for case in freeze.chunked(cases, "light") if off and case.budget == off.budget and case.step_tokens == off.step_tokens), None)
    if twin is None or None in (found := [value(off), value(twin)]) or not max(map(abs, found)):
        return 0.0
    return abs(found[0] - found[1]) / max(map(abs, found))


def _parts(case: Case) -> str:
    waits = case.populations["lost_waits"]
    return f"{digits(case.populations['lost_waiting_ms'])} ms ({waits} wait{'' if waits == 1 else 's'})"


def _work(arms: Any, cases: Cases) -> tuple[str, str]:
    """Whether chunking moved the victims' lost time or removed some: (claim, figures)."""
    load, off, on = compared(cases)
    if off is None or on is None or None in (lost := [case.populations["lost_ms"] for case in (off, on)]):
        why = (why_absent(arms, cases, "off" if off is None else "smallest", load) if off is None or on is None
               else next(case.populations["lost_reason"] for case in (off, on) if case.populations["lost_ms"] is None))
        return "**Whether chunking moves work or removes it was not measured here:**", f"{why}."
    figures = f"a victim lost {digits(lost[0])} ms to one injection without chunking and {digits(lost[1])} ms with {size(on)}, at the {load} load"
    way = freeze.apart(*(case.populations["lost_by_round_ms"] for case in (on, off)))
    noise = _twin_noise(cases, lambda case: case.populations["lost_ms"])
    if way and abs(lost[1] - lost[0]) <= TWINS * noise * max(map(abs, lost)):
        return "**Whether chunking cost or saved the victims time in all is not shown:**", (
            f"{figures}, but two servers that did the same differ by {noise:.0%}.")
    if abs(lost[1] - lost[0]) <= MOVED * max(map(abs, lost)):
        return "**Chunking moved the lost time, it did not remove it:**", f"{figures}, within a tenth."
    if not way:
        return "**Whether chunking cost the victims time in all is not shown:**", f"{figures}, but " + (
            "the ranges over the injections overlap." if way == 0 else "one injection a side has no range.")
    if way > 0:
        return "**Chunking cost the victims time in all:**", f"{figures}."
    return "**Chunking saved the victims time in all:**", (
        f"{figures}. One reason: each piece of a prompt carries a token of each victim along, and there are more pieces.")


def _pair(values: list[float | None], unit: str, more: str, less: str) -> str:
    if None in values:
        return "not known (too few samples)"
    off, on = values
    way = moved(off, on)
    return f"{digits(off)} against {digits(on)}{' ' + unit if unit else ''}, {('the same', more, less)[way]}" + (
        f" ({on / off:.{1 if on > 1.1 * off else 2}f} x)" if off and way else "")


def wait_sentence(cases: Cases) -> str:
    """The waits for a first token that fell into a freeze, without chunking and with the smallest budget."""
    lines = []
    for load in freeze.LOADS:
        found = freeze.roles(cases, load)
        said = []
        for part in ("off", "smallest"):
            if part in found:
                case = found[part]
                waits, calm = case.populations["victim_ttft_window"], case.populations["calm_wait_ms"]
                usual = f", the calm median being {digits(calm)} ms" if calm is not None else ""
                many = f"{waits['n']} wait{'' if waits['n'] == 1 else 's'} in a window"
                many = f"{many}, the longest {digits(waits['max_ms'])} ms{usual}" if waits["n"] else "nobody asked anew in a window"
                said.append(f"{'without chunking' if part == 'off' else f'with {size(case)}'} {many}")
        if said:
            lines.append(f"- {load.capitalize()} load: {'; '.join(said)}.")
    return "\n".join(lines) or "No usable arm has such a wait to show."


# --- populations and the dial --------------------------------------------------------------------------------------------


def population_sentence(cases: Cases) -> str:
    """The same stall in two populations: the window and all tokens."""
    case = trap_case(cases)
    if case is None:
        return "**No stall to hide:** no usable arm has a gap in a window."
    window, every, hurt = (case.populations[name] for name in ("window", "all", "hurt"))
    name = "without chunking" if not case.asked_chunked else f"with {size(case)}"
    text = f"The {case.load} load {name}: the longest of the {window['n']} gaps in the windows is {digits(window['max_ms'])} ms. " + (
        f"Among all {every['n']} gaps that is still the maximum" if every["max_ms"] == window["max_ms"] else
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
        text += (f" One injection hurt {each:,.3g} tokens. A p99 leaves out one gap in a hundred, so it forgets this injection after {tokens:,} "
                 f"tokens: {digits(seconds)} s of watching {case.victims} victims.")
    return text + (f" ({why[:1].upper()}{why[1:]}.)" if why else "")


def dial_sentence(cases: Cases) -> str:
    """What a smaller budget did to the stall at each load, which budgets were none, and what is left to gain below the smallest."""
    lines = [line for load in freeze.LOADS if (line := _dial(cases, load))]
    if not lines:
        return "**The dial cannot be read here:** fewer than two usable budgets have a stall."
    found, (expected, _) = freeze.roles(cases, "light").get("smallest"), freeze_bound.expectation(cases)
    base = freeze_bound.floor(cases)
    if found and found.typical_worst_ms and base:
        lines.append(f"\nNo budget gets a stall much below the floor of {digits(base['fixed_ms'])} ms. With {size(found)} the light load's is "
                     f"{digits(found.typical_worst_ms)} ms: there is next to nothing left to gain, and every further cut makes more steps.")
    elif found and found.typical_worst_ms and found.populations["calm"]["p50_ms"]:
        calm = found.populations["calm"]["p50_ms"]
        end = (f"\nNo budget gets a stall below an ordinary step, {digits(calm)} ms. With {size(found)} that is "
               f"{100 * calm / found.typical_worst_ms:.0f} percent of the light load's stall.")
        room = found.budget // 2 - found.victims if found.budget else 0
        if expected and room > 0 and found.step_tokens:
            steps = [math.ceil(expected.round_tokens / tokens) for tokens in (found.step_tokens, room)]
            end += (f" Half that budget was not measured; by our division it would make steps of {digits(expected.step_ms(room))} instead of "
                    f"{digits(expected.step_ms(found.step_tokens))} ms, and {steps[1]} of them instead of {steps[0]}.")
        lines.append(end)
    return "\n".join(lines)


def _dial(cases: Cases, load: str) -> str:
    sizes = [case for case in reversed(freeze.chunked(cases, load)) if case.budget and case.typical_worst_ms is not None]
    if len(sizes) < 2:
        return ""
    pairs = [(more, less) for more, less in pairwise(sizes) if stall_moved(more, less) != 1]
    text = (f"- {load.capitalize()} load: with {_listed(f'{case.budget:,}' for case in sizes)} tokens a step, the worst stall of a typical "
            f"injection was {_listed(digits(case.typical_worst_ms) for case in sizes)} ms. ")
    text += "Each smaller budget made it shorter." if not pairs else "Not shown to be shorter: " + "; ".join(
        f"{less.budget:,} than {more.budget:,}" for more, less in pairs) + "."
    whole = [case for case in sizes if case.step_tokens and case.step_tokens >= case.injected * case.populations["prompt_tokens"]]
    if whole:
        text += (f" All that is injected at once, {whole[0].injected * whole[0].populations['prompt_tokens']:,} tokens, fits one step of "
                 f"{_listed(f'{case.budget:,}' for case in whole)}: there chunking cuts nothing.")
    return text


def payer_sentence(cases: Cases) -> str:
    """Whether whoever sent the long prompts waits longer at a small budget."""
    return " ".join(_payer(cases)[1:])


def _payer(cases: Cases) -> tuple[int | None, str, str]:
    """(1 where the smallest budget reads later than the largest in every round, else as `freeze.apart`; claim; figures)."""
    found = freeze.roles(cases, "light")
    small, large, off = (found.get(part) for part in ("smallest", "largest", "off"))
    if small is None or small is large or None in (small.reading_ms, large.reading_ms):
        return None, "**Who pays for a small budget is not shown here:**", "two usable budgets at the light load are needed."
    way = freeze.apart(*(case.populations["reading_by_round_ms"] for case in (small, large)))
    noise = _twin_noise(cases, lambda case: case.reading_ms)
    if way and abs(small.reading_ms - large.reading_ms) <= TWINS * noise * max(small.reading_ms, large.reading_ms):
        way = 0
    ranges = [f"{_range(case.populations['reading_by_round_ms'])} ms with {size(case)}" for case in (small, large)]
    ranges += [f"{_range(off.populations['reading_by_round_ms'])} ms without chunking"] if off and off.reading_ms else []
    claim = {1: "**Whoever sent the long prompt pays for the small budget.**", -1: "**Whoever sent the long prompt does not pay here: a small budget "
             "even read it sooner.**", 0: "**That whoever sent the long prompt pays for a small budget is not shown here:** the ranges overlap, "
             "or two servers that did the same differ as much.",
             None: "**Who pays for a small budget is not shown:** one injection a side has no range."}[way]
    return way, claim, f"From sending to the first token of the last long prompt, light load: {_listed(ranges)}."


def _range(values: list[float]) -> str:
    low, high = digits(min(values)), digits(max(values))
    return low if low == high else f"{low} to {high}"


def _listed(parts: Any) -> str:
    parts = list(parts)
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


# --- the end of the page -------------------------------------------------------------------------------------------------


def verdict_sentence(arms: Any, cases: Cases) -> str:
    """The verdict on the published shape, in words."""
    found = verdict(arms, cases)
    opening = {"held": "**The shape held:** a longer worst stall without chunking, a worse median with it.",
               "moved": "**Half of the shape held:** of a longer worst stall without chunking and a worse median with it, one is true here.",
               "did not hold": "**The shape did not hold here:** neither a longer worst stall without chunking nor a worse median with it.",
               NOT_MEASURED: "**The shape was not measured here.**"}[found["shape"]]
    reason = found["shape_because"]
    return f"{opening} {reason[:1].upper()}{reason[1:]}."


def takeaways(arms: Any, cases: Cases) -> str:
    """What to remember, as a list; the points that depend on the measurement say what it showed."""
    _, off, on = compared(cases)
    light = freeze.roles(cases, "light")
    pairs = [(off, on), (light.get("largest"), light.get("smallest"))]
    shorter = any(None not in pair and stall_moved(*pair) == 1 for pair in pairs)
    pays = _payer(cases)[0]
    dial = ("**The budget is a dial between two people.** Low: the readers' worst pause is short, and whoever sent the document waits longer. "
            "High: the other way round." if shorter and pays == 1 else
            "**A low budget shortens the readers' worst pause.** That whoever sent the document waits longer was not shown here." if shorter else
            "**What the budget does to the readers' worst pause was not shown here.**")
    division, work, floor = _division(cases), _work(arms, cases), freeze_floor.takeaway(cases)
    return "\n".join(f"- {line}" for line in (
        " ".join(division), *([floor] if floor else []), dial,
        f"{' '.join(work)} Look at the worst case, the median while it lasts, tokens hurt and time lost. One alone can be made to say anything.",
        "**Name the population of a percentile.** A p99 over all tokens forgets a stall if you watch for long enough.",
        "**Read what the server says it does.** A flag is a wish."))
