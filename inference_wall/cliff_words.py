"""Part 3 in words and tables that depend on the data.

What:   sentences and HTML tables from `part_3.look`.
Why:    prose that is typed must stay true however a measurement comes out: also when an arm is refused, a fit is not possible, or a
        larger batch gains nothing.
Use:    found = part_3.look(arms); display(Markdown(factor_sentence(found))); display(HTML(caps_table(found)))
Not:    named numbers and the verdict (`part_3`), figures (`cliff_figures`).
"""

from __future__ import annotations

import html
from typing import Any

import pandas as pd

from . import cliff, tables
from .chart import digits
from .cliff import AGREE_PERCENT, SERVICE_PERCENT, SERVICE_SHARE, listed
from .part_3 import NEEDS, PROPORTIONAL, Findings, signed, verdict

NOT_COUNTED = "arithmetic, memory read below test speed, launching, scheduling"  # what a step holds beside the bytes of the bound


def arms_sentence(found: Findings) -> str:
    """Which caps were measured, refused, or are missing."""
    parts = [f"Measured caps: {listed(found.caps['cap'])}." if len(found.caps) else "**No cap was measured.**"]
    parts += [f"The engine refused `{name}`: {reason}." for name, reason in found.arms.refused.items()]
    if found.arms.missing:
        parts.append(f"No record yet of {', '.join(f'`{name}`' for name in found.arms.missing)}; `{_measure(found)}` measures what is missing.")
    return " ".join(parts)


def _measure(found: Findings) -> str:
    return f"wall run part_3 --rig {found.rig}"


def weights_sentence(found: Findings) -> str:
    """That the weights are random, where they are: it changes what the words are, not what is moved and computed."""
    if found.run.document["model"].get("weights") != "random":
        return ""
    return ("**The weights are random numbers** in the exact shape of the model. Each step moves and computes what it would with real ones, so its "
            "times count; the words mean nothing, and nothing on this page looks at them.")


def own_sentence(found: Findings) -> str:
    """What one sequence moves for itself in a step, and the bound of a step that follows. Unknown bytes stay unknown: they are not nothing."""
    bound = found.bound
    stream = "unknown" if bound["stream_ms"] is None else f"{digits(bound['stream_ms'])} ms"
    own, text = "own", f"How much that is on this machine we cannot say: {bound['own_reason']}."
    if bound["own_ms"] is not None:
        own = f"**own** {digits(bound['own_ms'])} ms"
        text = (f"At {bound['context']:.0f} tokens of context that is {digits(bound['own_mb'])} MB a step, or {digits(bound['own_ms'])} ms at the "
                "same bandwidth.")
    return f"{text} So for a batch of B sequences\n\n> step time ≥ **shared** {stream} + B × {own}"


def gain_sentence(found: Findings) -> str:
    """What bytes alone say of a large batch."""
    bound = found.bound
    if bound["crossover"] is None:
        return "Where that is by bytes alone cannot be worked out here: " + (bound["own_reason"] or "weights or bandwidth were not measured") + "."
    text = f"By bytes alone the two parts are equal at a batch of {bound['crossover']:,.0f}"
    return text + (f", and a batch of {found.large['cap']} would give {bound['factor']:.1f} times the tokens of a batch of one."
                   if bound["factor"] is not None else ".")


def factor_sentence(found: Findings) -> str:
    factor = found.factor
    if factor is None:
        return _stand_in(found) or f"**The cliff cannot be measured here:** it {NEEDS}, both valid."
    small, large, stretch = found.rates
    ratio = found.large["cap"] / found.small["cap"]
    over = "" if stretch == "steady window" else ", both with ramp and drain"
    text = (f"**From cap {found.small['cap']} to cap {found.large['cap']} the output rate grew {factor:.1f} times**, from {digits(small)} to "
            f"{digits(large)} tokens a second{over}. The cap grew {ratio:.0f} times. ")
    if factor <= 1:
        return text + "On this machine sharing a step gained nothing."
    if factor >= PROPORTIONAL * ratio:
        return text + "That is in proportion: in this range each further seat was nearly free."
    caps = found.caps[found.caps["valid"].astype(bool) & found.caps["tok_s"].notna()]
    falls = caps.loc[caps["tok_s"].diff() < 0, "cap"].tolist()
    return text + f"So each seat brought {100 * factor / ratio:.0f} percent of what the first one did, on average." + (
        f" The rise is not steady: it fell at cap {listed(falls)}." if falls else "")


def _stand_in(found: Findings) -> str:
    """What a closed loop in the place of the smallest cap says of the gain; empty without one."""
    if not found.stand_in:
        return ""
    users, small, large, stretch = found.stand_in
    row = found.large
    spread = (f" ({digits(row['tok_s_low'])} to {digits(row['tok_s_high'])} in {row['repeats']} repeats)"
              if row["repeats"] > 1 and row["tok_s"] == large else "")
    over = "" if stretch == "steady window" else ", both with ramp and drain"
    yet, until = (" yet", "Until then a") if found.arms.missing else ("", "A")
    return (f"**Caps cannot be compared{yet}:** that {NEEDS}, and only cap {row['cap']} was measured. {until} closed loop stands in for the "
            f"small end. **From a closed loop of {users} to the flood at cap {row['cap']} the output rate grew {large / small:.1f} times**, from "
            f"{digits(small)} to {digits(large)} tokens a second{spread}{over}. There were {row['cap'] / users:.0f} times as many requests at once."
            + (" At the upper end the server's front end hands tokens out more slowly than the engine makes them (see *What a step costs*)."
               if _held_up(found, row["cap"]) else ""))


def _held_up(found: Findings, batch: float) -> bool:
    """Whether the server's front end held up steps of that batch, or of a smaller one."""
    return bool((found.batches.loc[found.batches["held_up"].notna(), "batch"] <= batch).any())


def batch_sentence(found: Findings) -> str:
    """How many requests shared a step at the largest cap: by the client, and by the server's gauge, which cannot see prompts being read."""
    large = found.large
    if not large or not large["valid"] or pd.isna(large["batch_mean"]):
        return "How many ran at the largest cap is not known: it needs a valid flood whose requests all have an end."
    text = f"At cap {large['cap']} **{large['batch_mean']:.1f}** requests ran on average, by the client (in flight, and with a seat)."
    if pd.isna(large["running_mean"]):
        return text + " The server's own gauge was not sampled."
    return text + (f" By the server's gauge, which misses requests whose prompt is being read, it was {large['running_mean']:.1f}, and "
                   f"{large['running_max']:.0f} at most.")


def served_sentence(found: Findings) -> str:
    """The flood at the largest cap against decode alone at the same batch."""
    decode, how = found.decode_at_large
    if decode is None or not found.large["valid"]:
        return f"How the flood compares with decode alone cannot be said here: {how if decode is None else 'its flood is not valid'}."
    share = 100 * found.large["tok_s"] / decode
    text = f"At cap {found.large['cap']} the flood reached {share:.0f} percent of what decode alone gives at its batch, {how}. "
    if share > 105:
        return text + "A flood has prompts to read as well, so the line misses that batch, or the machine was slower when steps were timed."
    if _held_up(found, found.large["cap"]):
        return text + ("Between the two lie the reading of prompts, the moments when seats change hands, and the server's front end: the dotted line "
                       "is the most that it handed out when steps were timed (see *What a step costs*).")
    return text + "Between the two lie the reading of prompts and the moments when seats change hands."


def agreement_sentence(found: Findings) -> str:
    judged = found.agreed[found.agreed["verdict"].isin(["agree", "differ"])]
    if judged.empty:
        return "**Not shown:** no cap and closed loop of the same size could be compared, so the line stands for itself, not for caps."
    differ = judged[judged["verdict"] == "differ"]
    if differ.empty:
        return (f"At {'both ends' if judged['cap'].nunique() > 1 else 'the one size that both have'}, cap and concurrency **agree** within "
                f"{AGREE_PERCENT:.0f} percent. Between the ends, the closed loop may stand in for caps that we did not start.")
    listed = "; ".join(f"{row['what']} at {row['cap']:.0f} by {_percent(row['difference_percent'], 0)} percent" for row in differ.to_dict("records"))
    return (f"Cap and concurrency **differ** by more than {AGREE_PERCENT:.0f} percent in {listed}. Read the line between the caps as a closed loop, "
            "not as caps that we did not start.")


def fit_sentence(found: Findings) -> str:
    fit = found.fit
    if fit.fixed_ms is None:
        return f"**No line could be drawn:** {fit.reason}."
    text = (f"**A step takes {signed(fit.fixed_ms)} ms{_interval(fit.fixed_interval)}, and {signed(fit.slope_ms)} ms"
            f"{_interval(fit.slope_interval)} more for each sequence**")
    repeats, rest = divmod(fit.n, len(fit.batches))
    points = f"{fit.n} points"
    if fit.n > len(fit.batches):
        points += f" at {len(fit.batches)} batches" + ("" if rest else f", {repeats} repeats each")
    text += f" (R² {fit.r2:.4f}, {points}" if fit.r2 is not None else f" ({points}"
    text += f"; the farthest point lies {digits(round(abs(fit.worst_ms), 3))} ms off, at a batch of {fit.worst_batch:g}; intervals at 95 percent). "
    if fit.falls:
        less = ", ".join(f"batch {batch:g} took less time than batch {smaller:g}" for batch, smaller in fit.falls)
        text += f"The step is not a straight line here: {less}.{_closed_falls(found)} "
    if fit.crossover is None:
        return text + f"There is no crossover: {fit.reason}."
    if fit.unbounded:
        return text + (f"By the line alone the two parts would be equal at a batch of about {digits(fit.crossover)}. But **the points do not bound "
                       "that**: by them the slope could as well be nothing. Where the crossover lies, and how much a large batch can gain, is beyond "
                       "what was measured.")
    text += f"The two parts are equal at a batch of **{digits(fit.crossover)}**{_interval(fit.crossover_interval)}"
    if fit.undetermined:
        return text + (f", beyond the largest batch {_ran(found)}, {fit.batches[-1]:g}: an extrapolation. How much a large batch can gain is "
                       "beyond what was measured.")
    if fit.crossover < fit.batches[0]:
        text += f", below the smallest batch {_ran(found)}, {fit.batches[0]:g}"
    gain = _interval(tuple(1 + end for end in fit.crossover_interval))
    return text + (f". So on this server, as far as its steps follow the line, no batch, however large, decodes more than {digits(fit.most_gain)} "
                   f"times{gain} as fast as a batch of one.")


def _ran(found: Findings) -> str:
    return "in the line" if found.batches["held_up"].notna().any() else "we ran"


def _closed_falls(found: Findings) -> str:
    """Whether the closed loops of the same sizes fell as well: then it is not the chance of one point."""
    itl = found.closed[found.closed["valid"].astype(bool)].set_index("max_concurrency")["itl_p50_ms"].dropna()
    known = [itl[batch] < itl[smaller] for batch, smaller in found.fit.falls if batch in itl and smaller in itl]
    if len(known) < len(found.fit.falls):
        return ""
    return " The median ITL of the closed loops fell there as well, so it is not the chance of one point." if all(known) else (
        " The median ITL of the closed loops did not fall everywhere there, so it may be chance.")


def _interval(interval: tuple[float | None, float | None]) -> str:
    low, high = interval
    return "" if low is None or high is None else f" ({signed(low)} to {signed(high)})"


def fixed_sentence(found: Findings) -> str:
    """The fixed part of a step against the weight stream of the bound."""
    fixed, stream = found.fit.fixed_ms, found.bound["stream_ms"]
    if fixed is None or not stream:
        return "The fixed part cannot be compared with the bound: " + (
            found.fit.reason if fixed is None else "weights or bandwidth were not measured") + "."
    if fixed <= 0:
        return "The fixed part cannot be compared with the bound: the line has none above nothing."
    low, high = (end / stream for end in found.fit.fixed_interval)
    name = "By that line, the fixed part" if found.fit.falls else "The fixed part"
    text = f"{name} is {digits(fixed / stream)} times the weight stream of the bound{_interval((low, high))}"
    if low > 1:
        return text + (f". The rest is not in the byte count: {NOT_COUNTED}. The fit cannot tell them apart. Whatever it is, a step pays it "
                       "once, and so it is shared as well.")
    if high >= 1:
        return text + f". By these points it could be the stream alone. What the byte count leaves out ({NOT_COUNTED}) cannot be told from it."
    return text + (", so less than what bytes seem to allow. Either the engine gets more out of the memory than our test of it, or the line is bent "
                   "and misses the step of a small batch.")


def slope_sentence(found: Findings) -> str:
    """What the own part of a step consists of, as far as bytes can say."""
    own, slope = found.bound["own_ms"], found.fit.slope_ms
    if own is None or slope is None or not found.fit.slope_interval[0] > 0:
        why = found.bound["own_reason"] or found.fit.reason or "by these points the slope could as well be nothing"
        return f"What the own part consists of cannot be said here: {why}."
    share = 100 * own / slope
    text = f"The bytes that a sequence moves for itself would take {digits(own)} ms. That is {digits(share)} percent of the measured slope. "
    if share > 120:
        return text + "That is more than all of it. Part of those bytes may come out of a cache that is faster than the memory."
    if share >= 50:
        return text + "So its own traffic can be most of what a further sequence costs."
    return text + (f"So traffic is the smaller part of what a further sequence costs here. The rest is not in the byte count: {NOT_COUNTED}. The fit "
                   "cannot tell them apart.")


def queue_sentence(found: Findings) -> str:
    fair = found.fair
    if fair["slope_s"] is None or fair["service_s"] is None:
        how = f" `{_measure(found)}` measures it." if "cap-1" in found.arms.missing else ""
        return f"**The queue at a cap of 1 was not judged:** {fair['reason']}.{how}"
    text = (f"Each place costs {digits(fair['slope_s'])} s. One answer alone takes {digits(fair['service_s'])} s (from {fair['service_from']}): "
            f"a difference of {_percent(fair['difference_percent'])} percent. Of the {fair['n']} waits, none lies farther than "
            f"{fair['worst_share']:.2f} of an answer from a straight line. ")
    if fair["explained"]:
        return text + "**The place in the queue explains the wait.**"
    return text + (f"**The place in the queue does not explain the wait** by our measure (each place one answer, within {SERVICE_PERCENT:.0f} "
                   f"percent; no wait farther than {SERVICE_SHARE:g} of an answer from the line).")


def order_sentence(found: Findings) -> str:
    """Whether the flood at a cap of 1 was served as it was sent, and whether the client can tell."""
    fair = found.fair
    if fair["in_order"] is None:
        return f"In which order the queue was served is not known: {fair['reason']}."
    if fair["in_order"] == 1:
        return "The server kept to the order of sending."
    text = f"Of two requests that were sent one after the other, the server served {100 * fair['in_order']:.0f} percent in that order. "
    if fair["service_s"] and fair["sent_within_s"] < fair["service_s"]:
        return text + (f"But all were sent within {digits(1e3 * fair['sent_within_s'])} ms. In which order they then reached the queue cannot be "
                       "seen from the client.")
    return text + "So the server did not keep to it."


def _percent(value: float, decimals: int = 1) -> str:
    """With its sign, and without a sign where it rounds to nothing."""
    text = f"{value:+.{decimals}f}"
    return text[1:] if not float(text) else text.replace("-", "−")


def place_sentence(found: Findings) -> str:
    """Seconds that a place in the queue costs at the smallest and at the largest cap: the one thing of two floods' TTFT that compares."""
    costs = {cap: cliff.fairness(rows, None, None)["slope_s"] for cap, rows in found.queues.items()}
    known = [f"{digits(cost)} s at cap {cap} ({len(found.queues[cap])} prompts)" for cap, cost in costs.items() if cost is not None]
    if not known:
        return "What a place in the queue costs is not known: no flood was long enough."
    return f"A place in the queue costs {' and '.join(known)}."


def price_sentence(found: Findings) -> str:
    """What a large batch costs an answer in progress: between two caps, else from the smallest closed loop to the one cap."""
    rows = [(f"at cap {row['cap']}", row) for row in (found.small, found.large) if row and row["valid"] and pd.notna(row["itl_p50_ms"])]
    if len(rows) == 1 and found.stand_in:
        loop = found.closed[found.closed["max_concurrency"] == found.stand_in[0]].iloc[0]
        rows = [(f"in a closed loop of {found.stand_in[0]}", loop), *rows] if pd.notna(loop["itl_p50_ms"]) else rows
    if len(rows) < 2:
        return "What it costs an answer in progress cannot be said: it needs the ITL of two valid floods."
    (at_small, small), (at_large, large) = rows
    ratio = large["itl_p50_ms"] / small["itl_p50_ms"]
    text = f"The median ITL went from {digits(small['itl_p50_ms'])} ms {at_small} to {digits(large['itl_p50_ms'])} ms {at_large}"
    if ratio > 1.05:
        text += f": {ratio:.1f} times. That is the price, and every answer in progress pays it at every token."
        return text + (" Part of it is the wait behind the server's front end (see *What a step costs*)." if _held_up(found, large["cap"]) else "")
    return text + ". In this range a larger batch cost an answer in progress almost nothing."


def curve_sentence(found: Findings) -> str:
    """Whether this machine can be placed beside the published one."""
    if found.fit.unbounded:
        return f"**`{found.rig}` is not in the figure:** it needs a crossover, and {_no_crossover(found)}."
    beyond = f", beyond the batches {_ran(found)}: an extrapolation" if found.fit.undetermined else ""
    return f"`{found.rig}` is in the figure with a crossover of {digits(found.fit.crossover)}{beyond}." + (
        " Hollow marks were held up on their way to the client." if found.batches["held_up"].notna().any() else "")


def _no_crossover(found: Findings) -> str:
    return "the points of its step times do not bound one" if found.fit.crossover is not None else found.fit.reason


def shape_sentence(found: Findings) -> str:
    shape, because = verdict(found)
    texts = {"held": "**The shape of the series held here**", "did not hold": "**The shape of the series did not hold here**",
             "not measured here": "**Whether the shape holds was not fully measured here**"}
    return f"{texts[shape]}: {because}."


# --- tables -----------------------------------------------------------------------------------------------------------

_COLUMNS = (("prompts", "num_prompts", 0), ("tokens/s", "tok_s", None), ("batch, mean", "batch_mean", None), ("gauge, mean", "running_mean", None),
            ("gauge, max", "running_max", 0), ("ITL p50, ms", "itl_p50_ms", None),
            ("ITL p99, ms", "itl_p99_ms", None), ("TTFT p50, ms", "ttft_p50_ms", None))


def caps_table(found: Findings) -> str:
    """Caps and closed loops, one row each, as an HTML table. A dash says in its title why."""
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("load", *(head for head, _, _ in _COLUMNS), "valid"))
    body, ranges = "", False
    for rows, key, name in ((found.caps, "cap", "cap"), (found.closed, "max_concurrency", "closed loop of")):
        for row in rows.to_dict("records"):
            ranges |= _range(row) != ""
            cells = "".join(_cell(row, column, decimals) for _, column, decimals in _COLUMNS)
            reasons = html.escape(", ".join(row["reasons"]), quote=True)
            mark = '<td data-value="yes">✓</td>' if row["valid"] else f'<td data-value="no: {reasons}" title="{reasons}">✗ {reasons}</td>'
            body += f'<tr><th scope="row">{name} {row[key]:g}</th>{cells}{mark}</tr>'
    return ('<table class="wall-table" data-csv="part_3_caps.csv"><caption>TTFT of a cap is that of a flood: it holds the queue of that many '
            "prompts, so it is not comparable from row to row. Batch: requests in flight at the client, as far as there are seats. Gauge: what the "
            f"server showed, without requests whose prompt is being read.{' In brackets: range over the repeats.' if ranges else ''}</caption>"
            f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>")


def _cell(row: dict[str, Any], column: str, decimals: int | None) -> str:
    value = row.get(column)
    if value is None or pd.isna(value):
        n = row.get(f"{column.split('_')[0]}_n")
        reason = f"n = {n:.0f} cannot bear it" if column.endswith("_ms") and n is not None and pd.notna(n) else "not known"
        return f'<td title="{reason}">–</td>'
    title = f' title="{row["tok_s_kind"]}"' if column == "tok_s" else ""
    spread = _range(row) if column == "tok_s" else ""
    return f'<td data-value="{value:.6g}"{title}>{digits(value) if decimals is None else f"{value:,.0f}"}{spread}</td>'


def _range(row: dict[str, Any]) -> str:
    """The tokens per second of the repeats, where there are several and they differ: ` (8,735 to 9,886)`."""
    ends = [digits(row[end]) for end in ("tok_s_low", "tok_s_high") if pd.notna(row[end])]
    return f" ({ends[0]} to {ends[1]})" if len(set(ends)) == 2 else ""


def agreement_table(found: Findings) -> str:
    """Cap against concurrency at both ends, as an HTML table; empty where no size has both."""
    if found.agreed.empty:
        return ""
    rows = [(f"{row['cap']}: {row['what']}", _number(row["by_cap"]), _number(row["by_concurrency"]),
             "–" if pd.isna(row["difference_percent"]) else f"{_percent(row['difference_percent'])} %",
             row["verdict"] + (f": {row['note']}" if row["note"] else "")) for row in found.agreed.to_dict("records")]
    return tables.plain_table(["size", "flood at that cap", "closed loop", "difference", "verdict"], rows, "part_3_agreement.csv")


def _number(value: Any) -> str:
    return "–" if value is None or pd.isna(value) else digits(float(value))
