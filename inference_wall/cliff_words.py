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
from .cliff import AGREE_PERCENT, ORDER_R2, SERVICE_PERCENT, listed
from .part_3 import NEEDS, PROPORTIONAL, Findings, verdict


def arms_sentence(found: Findings) -> str:
    """Which caps were measured, refused, or are missing."""
    parts = [f"Measured caps: {listed(found.caps['cap'])}." if len(found.caps) else "**No cap was measured.**"]
    parts += [f"The engine refused `{name}`: {reason}." for name, reason in found.arms.refused.items()]
    if found.arms.missing:
        parts.append(f"No record yet of {', '.join(f'`{name}`' for name in found.arms.missing)}.")
    return " ".join(parts)


def factor_sentence(found: Findings) -> str:
    factor = found.factor
    if factor is None:
        return f"**The cliff cannot be measured here:** it {NEEDS}, both valid."
    small, large = found.small, found.large
    ratio = large["cap"] / small["cap"]
    text = (f"**From cap {small['cap']} to cap {large['cap']} the output rate grew {factor:.1f} times**, "
            f"from {digits(small['tok_s'])} to {digits(large['tok_s'])} tokens a second. The cap grew {ratio:.0f} times. ")
    if factor <= 1:
        return text + "On this machine sharing a step gained nothing."
    if factor >= PROPORTIONAL * ratio:
        return text + "That is in proportion: in this range each further seat was free."
    caps = found.caps[found.caps["valid"].astype(bool) & found.caps["tok_s"].notna()]
    falls = caps.loc[caps["tok_s"].diff() < 0, "cap"].tolist()
    return text + f"So each seat brought {100 * factor / ratio:.0f} percent of what the first one did, on average." + (
        f" The rise is not steady: it fell at cap {listed(falls)}." if falls else "")


def agreement_sentence(found: Findings) -> str:
    judged = found.agreed[found.agreed["verdict"].isin(["agree", "differ"])]
    if judged.empty:
        return "**Not shown:** no cap and closed loop of the same size could be compared, so the line stands for itself, not for caps."
    differ = judged[judged["verdict"] == "differ"]
    if differ.empty:
        return (f"At {'both ends' if judged['cap'].nunique() > 1 else 'the one size that both have'}, cap and concurrency **agree** within "
                f"{AGREE_PERCENT:.0f} percent. Between the ends, the closed loop may stand in for caps that we did not start.")
    listed = "; ".join(f"{row['what']} at {row['cap']:.0f} by {row['difference_percent']:+.0f} percent" for row in differ.to_dict("records"))
    return (f"Cap and concurrency **differ** by more than {AGREE_PERCENT:.0f} percent in {listed}. Read the line between the caps as a closed loop, "
            "not as caps that we did not start.")


def fit_sentence(found: Findings) -> str:
    fit = found.fit
    if fit.fixed_ms is None:
        return f"**No line could be drawn:** {fit.reason}."
    text = (f"**A step takes {digits(fit.fixed_ms)} ms{_interval(fit.fixed_interval)}, and {digits(fit.slope_ms)} ms"
            f"{_interval(fit.slope_interval)} more for each sequence**")
    text += f" (R² {fit.r2:.4f}, {fit.n} points" if fit.r2 is not None else f" ({fit.n} points"
    text += f"; the farthest point lies {digits(round(abs(fit.worst_ms), 3))} ms off, at a batch of {fit.worst_batch:g}; intervals at 95 percent). "
    if fit.crossover is None:
        return text + f"There is no crossover: {fit.reason}."
    text += f"The two parts are equal at a batch of **{digits(fit.crossover)}**"
    text += _interval(fit.crossover_interval) or " (the points do not bound it)"
    if fit.crossover > fit.batches[-1]:
        text += f", beyond the largest batch we ran, {fit.batches[-1]:g}: an extrapolation"
    elif fit.crossover < fit.batches[0]:
        text += f", below the smallest batch we ran, {fit.batches[0]:g}"
    return text + (f". So on this server no batch, however large, decodes more than {digits(fit.most_gain)} times as fast as a batch of one.")


def _interval(interval: tuple[float | None, float | None]) -> str:
    low, high = interval
    return "" if low is None or high is None else f" ({_signed(low)} to {_signed(high)})"


def _signed(value: float) -> str:
    return digits(value) if value >= 0 else f"−{digits(-value)}"


def fixed_sentence(found: Findings) -> str:
    """The fixed part of a step against the weight stream of the bound."""
    fixed, stream = found.fit.fixed_ms, found.bound["stream_ms"]
    if fixed is None or not stream:
        return "The fixed part cannot be compared with the bound: " + (
            found.fit.reason if fixed is None else "weights or bandwidth were not measured") + "."
    ratio = fixed / stream
    if ratio >= 1:
        return (f"The fixed part is {ratio:.1f} times the weight stream of the bound. What exceeds the stream is launching, scheduling, sampling: "
                "paid once a step, and so shared as well.")
    return (f"The fixed part is {ratio:.2f} times the weight stream of the bound, so less than what bytes seem to allow. Either the engine gets more "
            "out of the memory than our test of it, or the line is bent and misses the step of a small batch.")


def slope_sentence(found: Findings) -> str:
    """What the own part of a step consists of, as far as bytes can say."""
    own, slope = found.bound["own_ms"], found.fit.slope_ms
    if own is None or slope is None or slope <= 0:
        return f"What the own part consists of cannot be said here: {found.bound['own_reason'] or found.fit.reason}."
    share = 100 * own / slope
    text = f"The bytes that a sequence moves for itself would take {digits(own)} ms. That is {digits(share)} percent of the measured slope. "
    if share > 120:
        return text + "More than all of it: those bytes partly come out of a cache that is faster than the memory."
    if share >= 50:
        return text + "So most of what a further sequence costs is its own traffic."
    return text + ("So traffic is the smaller part of what a further sequence costs here. The rest is arithmetic, which each sequence needs for "
                   "itself, and software.")


def queue_sentence(found: Findings) -> str:
    fair = found.fair
    if fair["slope_s"] is None or fair["service_s"] is None:
        return f"**The queue at a cap of 1 was not judged:** {fair['reason']}."
    text = (f"Each place costs {digits(fair['slope_s'])} s. One answer alone takes {digits(fair['service_s'])} s (from {fair['service_from']}): "
            f"a difference of {fair['difference_percent']:+.1f} percent. ")
    if fair["r2"] is not None:
        text += f"A straight line through the {fair['n']} waits has R² {fair['r2']:.4f}. "
    if fair["explained"]:
        return text + "**The place in the queue explains the wait.**"
    return text + (f"**The place in the queue does not explain the wait** by our measure (R² of at least {ORDER_R2}, slope within "
                   f"{SERVICE_PERCENT:.0f} percent of theory).")


def place_sentence(found: Findings) -> str:
    """Seconds that a place in the queue costs at the smallest and at the largest cap: the one thing of two floods' TTFT that compares."""
    costs = {cap: cliff.fairness(rows, None, None)["slope_s"] for cap, rows in found.queues.items()}
    known = [f"{digits(cost)} s at cap {cap} ({len(found.queues[cap])} prompts)" for cap, cost in costs.items() if cost is not None]
    if not known:
        return "What a place in the queue costs is not known: no flood was long enough."
    return f"A place in the queue costs {' and '.join(known)}."


def price_sentence(found: Findings) -> str:
    rows = [row for row in (found.small, found.large) if row and row["valid"] and pd.notna(row["itl_p50_ms"])]
    if len(rows) < 2 or rows[0]["cap"] == rows[1]["cap"]:
        return "What it costs an answer in progress cannot be said: it needs the ITL of two valid floods."
    small, large = rows
    ratio = large["itl_p50_ms"] / small["itl_p50_ms"]
    text = (f"The median ITL went from {digits(small['itl_p50_ms'])} ms at cap {small['cap']} to {digits(large['itl_p50_ms'])} ms at cap "
            f"{large['cap']}")
    if ratio > 1.05:
        return text + f": {ratio:.1f} times. That is the price, and every answer in progress pays it at every token."
    return text + ". In this range a larger batch cost an answer in progress almost nothing."


def shape_sentence(found: Findings) -> str:
    shape, because = verdict(found)
    texts = {"held": "**The shape of the series held here**", "did not hold": "**The shape of the series did not hold here**",
             "not measured here": "**Whether the shape holds was not fully measured here**"}
    return f"{texts[shape]}: {because}."


# --- tables -----------------------------------------------------------------------------------------------------------

_COLUMNS = (("prompts", "num_prompts", 0), ("tokens/s", "tok_s", None), ("running, mean", "running_mean", None), ("running, max", "running_max", 0),
            ("ITL p50, ms", "itl_p50_ms", None), ("ITL p99, ms", "itl_p99_ms", None), ("TTFT p50, ms", "ttft_p50_ms", None))


def caps_table(found: Findings) -> str:
    """Caps and closed loops, one row each, as an HTML table. A dash says in its title why."""
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("load", *(head for head, _, _ in _COLUMNS), "valid"))
    body = ""
    for rows, key, name in ((found.caps, "cap", "cap"), (found.closed, "max_concurrency", "closed loop of")):
        for row in rows.to_dict("records"):
            cells = "".join(_cell(row, column, decimals) for _, column, decimals in _COLUMNS)
            reasons = html.escape(", ".join(row["reasons"]), quote=True)
            mark = '<td data-value="yes">✓</td>' if row["valid"] else f'<td data-value="no: {reasons}" title="{reasons}">✗ {reasons}</td>'
            body += f'<tr><th scope="row">{name} {row[key]:g}</th>{cells}{mark}</tr>'
    return ('<table class="wall-table" data-csv="part_3_caps.csv"><caption>TTFT of a cap is that of a flood: it holds the queue of that many '
            f"prompts, so it is not comparable from row to row.</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>")


def _cell(row: dict[str, Any], column: str, decimals: int | None) -> str:
    value = row.get(column)
    if value is None or pd.isna(value):
        n = row.get(f"{column.split('_')[0]}_n")
        reason = f"n = {n:.0f} cannot bear it" if column.endswith("_ms") and n is not None and pd.notna(n) else "not known"
        return f'<td title="{reason}">–</td>'
    title = f' title="{row["tok_s_kind"]}"' if column == "tok_s" else ""
    return f'<td data-value="{value:.6g}"{title}>{digits(value) if decimals is None else f"{value:,.0f}"}</td>'


def agreement_table(found: Findings) -> str:
    """Cap against concurrency at both ends, as an HTML table."""
    rows = [(f"{row['cap']}: {row['what']}", _number(row["by_cap"]), _number(row["by_concurrency"]),
             "–" if pd.isna(row["difference_percent"]) else f"{row['difference_percent']:+.1f} %",
             row["verdict"] + (f": {row['note']}" if row["note"] else "")) for row in found.agreed.to_dict("records")]
    return tables.plain_table(["size", "flood at that cap", "closed loop", "difference", "verdict"], rows, "part_3_agreement.csv")


def _number(value: Any) -> str:
    return "–" if value is None or pd.isna(value) else digits(float(value))
