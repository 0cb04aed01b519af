"""Part 4 in words that depend on the data.

What:   sentences and list items from `part_4.look`: what fits, what was counted, who was put out, what it costs, what a trace shows.
Why:    prose that is typed must stay true however a measurement comes out, also when an arm is refused or nobody was put out.
Use:    found = part_4.look(arms); display(Markdown(result_sentence(found)))
Not:    named numbers and the verdict (`part_4`), tables and figures (`starvation_tables`, `starvation_figures`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from . import cache_room, starvation, trace
from .chart import digits
from .part_4 import NO_PAIR, Findings, Traced, amount, either, none_of, verdict
from .starvation import CONTROL


def arms_sentence(found: Findings) -> str:
    """Which caches stand beside one another, and which do not and why. Markdown."""
    parts = [f"The caches that were measured: {', '.join(f'`{arm}`' for arm in found.arms.testable) or 'none'}."]
    parts += [f"The engine refused `{arm}`: {why}." for arm, why in found.arms.refused.items()]
    if found.arms.missing:
        parts.append(f"Not measured: {', '.join(f'`{arm}`' for arm in found.arms.missing)}. What the text says of them is left open.")
    return " ".join(parts)


# --- the bound --------------------------------------------------------------------------------------------------------


def flags_sentence(found: Findings) -> str:
    """What else differs between the natural cache and the cut ones, beside the number of blocks."""
    natural = found.arms.runs.get("natural")
    if natural is None:
        return ""
    others = {}
    for run in found.arms.testable.values():
        for name, value in run.document["flags"].items():
            if name not in ("num-gpu-blocks-override",) and natural.document["flags"].get(name) != value:
                others[name] = f"`{name}` is {value} there, and {natural.document['flags'].get(name)} for the natural one"
    if not others:
        return "Nothing else about them differs."
    return (f"Nothing else about them differs but this: {'; '.join(others.values())}. The engine refuses more seats than a cut cache has blocks. It "
            "matters only where that many requests could run.")


def room_sentence(found: Findings) -> str:
    """Whether the room formula, with blocks of state from the model's layers, agrees with what the servers printed. Markdown."""
    rooms = {arm: cache_room.room(run) for arm, run in found.arms.testable.items()}
    known = {arm: room for arm, room in rooms.items() if room.cache is not None}
    if not known:
        return "What fits cannot be worked out here: " + "; ".join(f"`{arm}`: {room.reason}" for arm, room in rooms.items()) + "."
    fitted = [room for room in known.values() if not room.from_layers]
    if fitted:
        return (f"Here the blocks of state cannot be worked out from the model: {fitted[0].layers_reason}. They are taken from what the server "
                "printed, so the last two columns agree by construction and prove nothing. The formula is tested below, by the requests that ran.")
    state = next(iter(known.values())).cache.state_blocks
    text = ("The model has attention layers only, so a request takes no blocks of state." if state == 0 else
            f"By the model's layers a request takes {amount(state, 'block')} of state.")
    judged = {arm: room for arm, room in known.items() if room.agrees is not None}
    if not judged:
        return text + " What the server makes of that it did not print. The formula is tested below, by the requests that ran."
    off = [f"`{arm}`: {room.formula:.2f} by the formula, {room.printed:.2f} printed" for arm, room in judged.items() if not room.agrees]
    if off:
        return text + f" **Formula and server differ** ({'; '.join(off)}). So read what follows from the formula with care."
    same = "the cache" if len(judged) == 1 else "both caches" if len(judged) == 2 else f"all {len(judged)} caches"
    return text + f" Nothing in that comes from the server's own number, and for {same} the two **agree**."


def expectation_sentence(found: Findings) -> str:
    """What room formula and rules say of the control on the smallest cache, before the measurement. Markdown."""
    bound = found.bound(found.cut, CONTROL)
    if not bound or none_of(bound.get("admitted")) is None:
        return f"What must happen cannot be worked out here: {bound.get('reason') or NO_PAIR}."
    text = (f"On `{found.cut}` the control lets {amount(int(bound['admitted']), 'request')} in, and {int(bound['fits'])} of them fit at their end. "
            f"Together they will ask for {amount(int(bound['demand']), 'block')} of {int(bound['usable'])}")
    over = bound["demand"] > bound["usable"]
    if bound["must"]:
        text += ": **somebody must be put out.**" if over else (". That would fit, but more are let in than fit, each by the first piece of its "
                                                                "prompt: **somebody must be put out.**")
    else:
        text += ". But some end before the others have grown, so nobody has to be put out." if over else ": nobody has to be put out."
    if none_of(bound.get("rules")) is not None:
        text += (f" Played to the end, the rules give **{_both(bound, 'rules', 'preemption')}**, {either(bound, 'rules_before')} of them before "
                 f"the first request ends, and {_both(bound, 'read_again', 'token')} to be worked out again.")
        if bound["rules"] != bound["ahead_rules"]:
            text += " (Two numbers: all at once, and with the first request one step ahead.)"
    return text


# --- what was counted -------------------------------------------------------------------------------------------------


def result_sentence(found: Findings) -> str:
    """The result, whichever way it came out. Markdown."""
    shape, because = verdict(found)
    opening = {"held": "The shape of the series' correction held", "moved": "The shape held, in another place",
               "did not hold": "The shape did not hold", "not measured here": "No verdict here"}[shape]
    return f"**{opening}:** {because}."


def began_sentence(found: Findings) -> str:
    """The test of the room formula by the requests that ran: how many began before the first one ended, against the rules. Markdown."""
    known, off, limited = 0, [], 0
    for row in found.counts.to_dict("records") if len(found.counts) else []:
        bound, began = found.bound(row["arm"], row["load"]), none_of(row["first_batch"])
        allowed = {none_of(bound.get(name)) for name in ("first_batch", "ahead_first_batch")}
        if began is None or None in allowed:
            continue
        known += 1
        limited += int(began < bound["cap"])
        if began not in allowed:
            off.append(f"`{row['arm']}`/{row['load']}: {int(began)} began, by formula and rules {either(bound, 'first_batch')}")
    if not known:
        return "How many requests were let in at first cannot be compared with the formula here."
    text = (f"First the room formula, by the requests that ran. In {known - len(off)} of {amount(known, 'flood')} exactly as many began before the "
            "first end as formula and rules let in. ")
    text += f"The others: {'; '.join(off)}. " if off else ""
    if not limited:
        return text + "In none of them the blocks ended the batch before the seats did, so this says little about room."
    return text + f"In {limited} of them the blocks ended the batch before the seats did, so there it is the formula that is tested."


def zero_sentence(found: Findings) -> str:
    """Which zeros may be believed. Markdown."""
    if found.counts.empty:
        return "No flood was measured."
    names = {"control": "is a zero of a counter that was seen to move on the same server", "room": "is zero by arithmetic: the load fits at its end"}
    parts = []
    for proof, text in names.items():
        rows = found.counts[found.counts["proof"] == proof]
        if len(rows):
            parts.append(f"{_listed(rows)} {text}.")
    unknown = found.counts[found.counts["preemptions"].isna()]
    if len(unknown):
        parts.append(f"{_listed(unknown)} is **unknown**: {'; '.join(dict.fromkeys(unknown['why']))}.")
    return " ".join(parts) or "Every load moved the counter, so there is no zero to defend."


def _listed(rows: pd.DataFrame) -> str:
    return ", ".join(dict.fromkeys(f"`{arm}`/{load}" for arm, load in zip(rows["arm"], rows["load"], strict=True)))


def rules_sentence(found: Findings) -> str:
    """How the counts compare with the rules alone. Markdown."""
    known, off, ahead = 0, [], []
    for row in found.counts.to_dict("records") if len(found.counts) else []:
        bound, raw = found.bound(row["arm"], row["load"]), none_of(row["raw"])
        once, first_ahead = (none_of(bound.get(name)) for name in ("rules", "ahead_rules"))
        if raw is None or once is None:
            continue
        known += 1
        name = f"`{row['arm']}`/{row['load']}"
        if raw not in (once, first_ahead):
            off.append(f"{name}: counted {int(raw)}, by the rules {either(bound, 'rules')}")
        elif raw != once:
            ahead.append((name, none_of(row["head"]) == 1))
    if not known:
        return "The counts cannot be compared with the rules here."
    text = f"In {known - len(off)} of {amount(known, 'flood')} the counter moved exactly as often as the rules say."
    for name, seen in ahead:
        text += f" For {name} that takes the first request one step ahead, and the streams {'show' if seen else 'do not show'} it there."
    return text + (f" The others: {'; '.join(off)}." if off else "")


def onset_sentence(found: Findings) -> str:
    """Whether requests are put out at the start of the flood only or go on to be. From the streams, not from the counter. Markdown."""
    point = found.point(found.cut, CONTROL)
    if point is None:
        return "How preemptions spread over the control cannot be said: it was not measured on a cut cache."
    if none_of(point["before"]) is None:
        return "How preemptions spread over the control cannot be said: no request completed."
    before, after, first, end = int(point["before"]), int(point["after"]), point["first_end_s"], point["end_s"]
    if not before + after:
        return "There is nothing to divide: no answer stopped while others went on."
    text = (f"In the control on `{found.cut}`: until the first request ended, at {first:.1f} s, {before} of the pauses began; in the "
            f"{end - first:.1f} s after that {after}. ")
    if not after:
        return text + "It is an **onset**: the batch over-fills once, and nobody is put out after the first end."
    if not before:
        return text + "It is **churn**: nobody was put out while the batch first filled."
    rates = before / first, after / (end - first)
    return text + f"That is {rates[0]:.2f} a second, then {rates[1]:.2f}: **denser {'at the onset' if rates[0] > rates[1] else 'afterwards'}**."


def lateness_sentence(found: Findings) -> str:
    """Whether the counter moved when requests were put out, or only when they came back. Markdown."""
    late = found.late
    if late is None:
        return "Whether the counter moves at once cannot be seen in this record."
    begun, counted = late["begun"], late["counted"]
    text = (f"In the last sample before the first of them came back, at {late['at_s']:.1f} s, {amount(begun, 'answer')} had stopped, and the "
            f"counter had risen by {counted}. ")
    if counted < begun:
        return text + ("**The counter is late:** it shows a preemption when the request comes back, because the engine reports it with that "
                       "request's next token. So read from it how many, and never when.")
    return text + "So here the counter moved when requests were put out."


# --- who, and what it costs -------------------------------------------------------------------------------------------


def victims_sentence(found: Findings) -> str:
    """Who was put out in the control on the smallest cache. Markdown."""
    point, victims = found.point(found.cut, CONTROL), found.victims
    if point is None:
        return "Who was put out cannot be said: the control was not measured on a cut cache."
    counted = none_of(point["raw"])
    said = "how many the counter saw is not known" if counted is None else f"the server counted {amount(int(counted), 'preemption')}"
    if victims.empty:
        return f"No answer stopped while others went on; {said}."
    last, who = int((victims["behind"] == 0).sum()), sorted(set(victims["request"]))
    shortest, longest = victims["pause_s"].min(), victims["pause_s"].max()
    spans = f"of {shortest:.2f} s" if len(victims) == 1 else f"each of {shortest:.2f} to {longest:.2f} s"
    text = f"In the streams of the control {amount(len(victims), 'pause')} began while others went on, {spans}; {said}. "
    if counted is not None and counted > len(victims):
        text += "The streams show fewer: who is put out before the first token, or only for a moment, does not stand out in them. "
    elif counted is not None and counted < len(victims):
        text += "The streams show more, so not every pause is a preemption. "
    text += f"At {last} of {len(victims)} nobody who went on stood behind it in the running list"
    text += ": **last in, first out.**" if last == len(victims) else "."
    return text + f" In the order of sending they were numbers {_ranges([int(each) + 1 for each in who])} of {int(point['num_prompts'])}."


def _ranges(numbers_of: list[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers_of:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join(f"{span[0]} to {span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


def unseen_sentence(found: Findings) -> str:
    """Whether the token counters show what was worked out twice. Markdown."""
    point, bound = found.point(found.cut, CONTROL), found.bound(found.cut, CONTROL)
    if point is None or (none_of(point["excess"]) is None and none_of(point["excess_out"]) is None):
        return "Whether the server's token counters show the work done twice cannot be said here."
    if none_of(point["raw"]) == 0:
        return "Nobody was counted as put out in the control, so there is no work done twice to look for."
    again = _both(bound, "read_again", "token")
    parts = []
    for name, kind, own in (("excess", "prompt", "sent"), ("excess_out", "generated", "received")):
        value = none_of(point[name])
        parts.append(f"the one of {kind} tokens could not be compared" if value is None else
                     f"the one of {kind} tokens rose by exactly what was {own}" if value == 0 else
                     f"the one of {kind} tokens rose by {abs(int(value)):,} {'more' if value > 0 else 'less'} than was {own}")
    text = f"Two counters of the server were read: {parts[0]}, {parts[1]}."
    text += "" if again is None else f" By the rules {again} had to be worked out twice."
    return text + (" **Neither counter shows any of it.**" if _unseen(found) else "")


def _unseen(found: Findings) -> bool:
    """Whether somebody was put out and both token counters rose by exactly what was sent and received."""
    point = found.point(found.cut, CONTROL)
    return point is not None and bool(none_of(point["raw"])) and none_of(point["excess"]) == 0 and none_of(point["excess_out"]) == 0


def _both(bound: dict[str, Any], name: str, what: str) -> str | None:
    number = either(bound, name)
    return None if number is None else f"{number} {what}{'' if number == '1' else 's'}"


def price_sentence(found: Findings) -> str:
    """What the cut cache costs each load. Markdown."""
    rows = found.price[found.price["repeat"] == found.price["repeat"].min()] if len(found.price) else found.price
    if rows.empty:
        return f"The price cannot be given: it {NO_PAIR}."
    parts, sooner = [], []
    for row in rows.itertuples():
        median = none_of(row.e2e_p50_x)
        parts.append(f"{row.load} took {row.duration_x:.2f} times as long to the last end"
                     + (f", its median E2E {median:.2f} times" if median else "")
                     + f" ({int(row.cut_completed)} of {int(row.cut_num_prompts)} completed)")
        if median and median < 1:
            at_once = [none_of((found.point(arm, row.load) or {}).get("first_batch")) for arm in (found.cut, found.natural)]
            sooner.append(row.load if None in at_once else f"{row.load} ({at_once[0]} instead of {at_once[1]} began before the first end)")
    text = f"With `{found.cut}` instead of `{found.natural}`: {'; '.join(parts)}."
    if sooner:
        text += f" The median request was done **sooner** on the small cache in {', '.join(sooner)}: to wait outside can be the cheaper way."
    return text


def lessons(found: Findings) -> str:
    """The list items of what to take away that the data decide. Markdown."""
    victims = found.victims
    last = int((victims["behind"] == 0).sum()) if len(victims) else 0
    if not len(victims):
        pay = "**Who pays was not seen here.** By the rules it is whoever was let in last."
    elif last == len(victims):
        pay = "**The latest paid.** Whenever an answer stopped, everybody who went on had been let in before it."
    else:
        pay = (f"**Not only the latest paid.** At {len(victims) - last} of {amount(len(victims), 'pause')} somebody went on who had been let in "
               "later. The rules do not know that.")
    unseen = ("**Work done twice was in neither token counter.** Compare times." if _unseen(found) else
              "**Check that a token counter counts work done twice** before you read it there. Times do show it.")
    late = found.late is not None and found.late["counted"] < found.late["begun"]
    when = "\n- **The counter says how many, not when.** Look at the streams for who and when." if late else ""
    return f"- {pay}\n- {unseen}{when}"


# --- a trace ----------------------------------------------------------------------------------------------------------


def trace_sentence(traced: Traced) -> str:
    """What was watched, and whether a step of the excerpt read again what had been lost. Markdown. Ranges, no percentiles."""
    point = traced.point
    text = (f"`{traced.name}`: {amount(point['num_prompts'], 'stream')} of {point['input_len']} tokens in and {point['output_len']} out, all at once "
            "and nobody after them. ")
    if point.get("profile_after"):
        text += f"The profiler was started when the first of them had {amount(point['profile_after'], 'token')}. "
    if traced.path is None:
        return text + f"There is no trace of it: {traced.reason}."
    frame = trace.steps(traced.path)
    again = starvation.read_again(frame, traced.longest)
    if not again.any():
        return text + f"No step of the excerpt worked anything out a second time. {trace.words(traced.path)}"
    back, rest = frame[again > 0], frame[again == 0]
    one = len(back) == 1
    text += (f"In {len(back)} of the {amount(len(frame), 'step')} of the excerpt, {amount(int(again.sum()), 'token')} "
             f"{'was' if again.sum() == 1 else 'were'} worked out a second time: **requests that had been put out came back.** "
             f"{'That step' if one else 'Such a step'} took {_span(back['duration_ms'])}")
    text += f"; the other {amount(len(rest), 'step')} took {_span(rest['duration_ms'])}. " if len(rest) else ". "
    hidden = back[back["generation_tokens"] > back["generation_requests"]]
    if len(hidden):
        row = hidden.loc[hidden["generation_tokens"].idxmax()]
        text += (f"The engine counts who comes back among the running: its mark says {amount(int(row['generation_tokens']), 'token')} for "
                 f"{amount(int(row['generation_requests']), 'running request')}. So the strip draws such a step in the row of decode. ")
    else:
        text += "The engine counts who comes back among those that read a prompt, and so does the strip. "
    text += f"Where the time of a step went that read again: {_families(traced.path, back)}"
    return text + (f"; of another: {_families(traced.path, rest)}." if len(rest) else ".")


def kinds_apart(traced: Traced) -> bool:
    """Whether the kinds of steps in the trace keep apart what was read again; else a figure by kind would mix it with decode."""
    if traced.path is None:
        return False
    frame = trace.steps(traced.path)
    return not (frame["generation_tokens"] > frame["generation_requests"]).any()


def _families(path: Path, steps: pd.DataFrame) -> str:
    shares = trace.operators(path, steps["step"].tolist()).groupby("family")["share"].sum().nlargest(3)
    return ", ".join(f"{name} {100 * share:.0f} percent" for name, share in shares.items())


def _span(values_ms: pd.Series) -> str:
    low, high = digits(values_ms.min()), digits(values_ms.max())
    return f"{low} ms" if low == high else f"{low} to {high} ms"
