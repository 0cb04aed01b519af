"""What a card drew under each load, and whether its driver slowed it down for that: power and clock beside the loads of a run.

What:   `by_load(run, name)` sums up the samples of power and clock by load; `table` and `sentence` put them into a page.
Why:    a card has a limit of power. At it the driver lowers the clock, and arithmetic takes longer, although nothing in the server has changed.
        Heavy loads and light ones may then not have run on the same machine, so to speak; and nobody notices unless the clock is written down.
Use:    found = by_load(run, offered); display(HTML(table(found, "offered, requests/s")), Markdown(sentence(found, run)))
Not:    anything on processors or on somebody else's server (no samples: no rows); what a token costs in energy; setting clocks, which is nobody's
        business here.

The samples are those of the measure process, a few a second, within each point from its first request to its last answer.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from typing import Any

import pandas as pd

from .chart import digits
from .hardware import CLOCK_REASONS
from .records import Run

POWER_CAP = next(bit for bit, name in CLOCK_REASONS.items() if name == "power cap")
COLUMNS = ["load", "samples", "power_w", "power_max_w", "sm_mhz", "sm_min_mhz", "capped"]
SLOWER = 0.95  # of the highest clock: a median below it is worth a word


def by_load(run: Run, name: Callable[[dict[str, Any]], str | None]) -> pd.DataFrame:
    """One row a load, over all its measured repeats, by offered rate, else in the order of the record: `COLUMNS`.

    Power in watts (median, largest), clock of the multiprocessors in MHz (median, smallest), capped: share of the samples in which the driver named
    the power limit as its reason.

    `name` gives the load of a point, or null for points to leave out. Empty where the card was not sampled.
    """
    parts: dict[str, list[pd.DataFrame]] = {}
    for point in sorted(run.points, key=lambda point: math.inf if point["request_rate"] is None else point["request_rate"]):
        load = name(point) if point["pass"] == "measured" else None
        frame = run.frame("metrics", point["point"]) if load is not None else None
        if frame is not None and "gpu_sm_mhz" in frame and frame["gpu_sm_mhz"].notna().any():
            parts.setdefault(load, []).append(frame)
    rows = []
    for load, frames in parts.items():
        whole = pd.concat(frames).dropna(subset=["gpu_sm_mhz", "gpu_power_w"])
        reasons = whole["gpu_throttle_reasons"].fillna(0).astype("int64")
        rows.append((load, len(whole), whole["gpu_power_w"].median(), whole["gpu_power_w"].max(), whole["gpu_sm_mhz"].median(),
                     whole["gpu_sm_mhz"].min(), float(((reasons & POWER_CAP) > 0).mean())))
    return pd.DataFrame(rows, columns=COLUMNS)


def offered(point: dict[str, Any]) -> str:
    """The load of a point of Part 1: its offered rate."""
    return "all at once" if point["request_rate"] is None else f"{point['request_rate']:g} a second"


def steps_and_floods(point: dict[str, Any]) -> str | None:
    """The load of a point of Parts 3 and 5: a batch of equal streams, or a flood; null for closed loops and for a check of the words."""
    return f"batch {point['num_prompts']}" if point["load"] == "steps" else "flood" if point["load"] == "flood" else None


def limits(run: Run) -> dict[str, Any]:
    """power_limit_w and sm_max_mhz of the run's first card, as its driver said at the start; null where it did not."""
    cards = next((start["gpus"] for start in run.document["starts"] if start.get("gpus")), [{}])
    return {name: cards[0].get(name) for name in ("power_limit_w", "sm_max_mhz")}


def table(found: pd.DataFrame, head: str) -> str:
    """The rows as an HTML table; empty without a row."""
    if found.empty:
        return ""
    heads = "".join(f'<th scope="col">{text}</th>' for text in (html.escape(head), "power, W", "largest, W", "clock, MHz", "lowest, MHz",
                                                                "held by the power limit", "samples"))
    body = "".join(
        f'<tr><th scope="row">{html.escape(str(row.load))}</th>' + "".join(f'<td data-value="{value:.6g}">{text}</td>' for value, text in (
            (row.power_w, f"{row.power_w:.0f}"), (row.power_max_w, f"{row.power_max_w:.0f}"), (row.sm_mhz, f"{row.sm_mhz:,.0f}"),
            (row.sm_min_mhz, f"{row.sm_min_mhz:,.0f}"), (100 * row.capped, f"{100 * row.capped:.0f} %"), (row.samples, f"{row.samples}"))) + "</tr>"
        for row in found.itertuples())
    return ('<table class="wall-table" data-csv="card_power.csv"><caption>Medians over the samples of all measured repeats.</caption>'
            f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>")


def sentence(found: pd.DataFrame, run: Run) -> str:
    """Whether the card kept its clock, and where it did not; empty without samples."""
    known = limits(run)
    top = known["sm_max_mhz"]
    if found.empty or not top:
        return ""
    slow = found[found["sm_mhz"] < SLOWER * top]
    if slow.empty:
        touched = found[found["capped"] > 0]
        text = f"The card kept its clock: under every load the median is within {100 * (1 - SLOWER):.0f} percent of {top:,} MHz, the highest it has."
        if touched.empty:
            return text
        most = touched.loc[touched["capped"].idxmax()]
        return f"{text} Its power limit held it back by less than that, most often under the load `{most['load']}`: in {100 * most['capped']:.0f} " \
               "percent of the samples."
    worst = slow.loc[slow["sm_mhz"].idxmin()]
    limit = f" of {known['power_limit_w']:.0f} W" if known["power_limit_w"] else ""
    others = f"; the median is also lower under {_listed([f'`{load}`' for load in slow['load'] if load != worst['load']])}" if len(slow) > 1 else ""
    text = (f"**The card did not keep its clock.** Under the load `{worst['load']}` its median was {worst['sm_mhz']:,.0f} MHz, "
            f"{100 * worst['sm_mhz'] / top:.0f} percent of the {top:,} MHz that it has, while it drew {digits(worst['power_w'])} W{others}. ")
    text += "So arithmetic took longer there than under light loads, and nothing in the server's settings says so"
    if worst["capped"] <= MOSTLY:
        return text + "."
    return text + f": the driver's reason was the power limit{limit} in {100 * worst['capped']:.0f} percent of the samples. It is one more wall."


MOSTLY = 0.5  # from this share of the samples on, the power limit is called the reason


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
