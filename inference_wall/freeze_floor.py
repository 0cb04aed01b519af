"""The floor of a stall in words: what a step that reads costs however little it reads, and what the traces say it is made of.

What:   `floor_sentence` and `takeaway` say it where the stalls of Part 2 show a floor, and are empty where they do not; `inside_sentence` puts the
        card's busy time beside the stalls; `traces` finds the profiler's files of a set.
Why:    where a step has a price of its own, cutting a prompt finer buys less and less calm, and a price per token expects too much of large steps.
Use:    display(Markdown(floor_sentence(cases))); display(Markdown(inside_sentence(cases, traces(arms))))
Not:    the line through the stalls (`freeze_bound`), one trace by itself (`launch_bound`), the other sentences (`freeze_words`).
"""

from __future__ import annotations

from typing import Any

from . import freeze_bound, launch_bound, trace
from .chart import digits
from .freeze import Cases


def floor_sentence(cases: Cases) -> str:
    """That a step which reads has a price however little it reads, where the stalls show one; else empty."""
    found = freeze_bound.floor(cases)
    if found is None:
        return ""
    fixed, (expected, _) = digits(found["fixed_ms"]), freeze_bound.expectation(cases)
    text = (f"**There is a floor.** The line through all stalls says {fixed} ms for any step that reads, and only {found['ms_per_token']:.3f} ms for "
            f"each prompt token in it. In the smallest steps, {found['tokens']:,} tokens, the floor is {found['share']:.0%} of the stall.")
    if expected is None:
        return text
    return (f"{text} What we read there as a price of tokens was mostly a price of steps: {expected.steps} × {fixed} ms = "
            f"{digits(expected.steps * found['fixed_ms'])} ms, and all the reading took {digits(expected.source.reading_ms)} ms. (The line goes "
            "through the worst steps of the injections, so it lies a little high.) So cutting a prompt finer does not shrink the stall in "
            "proportion, and each further piece pays the floor again.")


def takeaway(cases: Cases) -> str:
    """The same as something to remember; empty without a floor."""
    found = freeze_bound.floor(cases)
    if found is None:
        return ""
    return (f"**A piece has a price of its own.** Here any step that reads takes about {digits(found['fixed_ms'])} ms, however little it reads. "
            f"Tokens cost as much as that only from {found['fixed_ms'] / found['ms_per_token']:,.0f} in a step on: a budget far below buys little "
            "calm for much waiting.")


def inside_sentence(cases: Cases, found: list[tuple[str, Any]]) -> str:
    """The card's busy time in the fullest step of each arm's trace, beside the stall that victims measured without a profiler, as a list; empty
    without a device."""
    rows = []
    for arm, path in found:
        kinds, case = launch_bound.busy(path), cases.get((arm, "light"))
        reads = kinds[kinds["kind"] != trace.DECODE]
        if reads.empty or case is None or case.typical_worst_ms is None:
            continue
        steps = trace.steps(path)
        fullest = steps.loc[steps["context_tokens"].idxmax()]
        rows.append((arm, int(fullest["context_tokens"]), fullest["busy_ms"], case.typical_worst_ms, reads["share"].iloc[0]))
    if not rows:
        return ""
    lines = ["The card's own time in the fullest step of each trace, beside the worst stall of a typical injection (light load, no profiler; a "
             "stall may hold pieces of two prompts):", ""]
    lines += [f"- `{arm}`: busy {digits(busy)} ms for {tokens:,} prompt tokens; stall {digits(stall)} ms" for arm, tokens, busy, stall, _ in rows]
    waits = [f"`{arm}`" for arm, *_, share in rows if share < launch_bound.WAITS]
    end = (f"Under the profiler the card mostly waits for the host in {len(waits)} of {len(rows)} traces: {', '.join(waits)}."
           if waits else "In none of these traces does the card mostly wait for the host.")
    if waits and freeze_bound.floor(cases):
        end += " **Its own time shrinks with the piece, the host's time for a step does not: that is the floor.**"
    return "\n".join([*lines, "", end])


def traces(arms: Any) -> list[tuple[str, Any]]:
    """The profiler's traces of the set as (arm, path), in the order of the arms; empty where none was taken."""
    found = [(arm, run.trace(point["point"])) for arm, run in arms.testable.items() for point in run.points if point["pass"] == "trace"]
    return [(arm, path) for arm, path in found if path is not None]
