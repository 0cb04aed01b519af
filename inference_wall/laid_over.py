"""All rigs of a post laid over one another: each divided by a quantity of its own, and the published figures among them.

What:   `beside` finds the records of every rig; `part_1`, `part_2`, `part_4` and `part_5` turn them into an `Overlay`, whose curves have no unit;
        `part_3` into the machines that `cliff_figures.on_one_curve` draws.
Why:    in seconds and requests unlike machines have nothing in common. What the series claims is a shape, and a shape can be compared once
        the machine's own scale is divided out. The divisor is always measured on the same rig, and named.
Use:    laid_over_figures.draw(laid_over.part_1(laid_over.beside(arms)))
Not:    drawing (`laid_over_figures`), whether a shape held (`part_1` ... `part_5`), tables of rigs (the site's page of rigs).

Divisors: Part 1, a rate by the knee (geometric middle of its bracket), a TTFT by that at the lowest rate. Part 2, tokens of a step by those
of one long prompt, a stall by the calm median gap. Part 3, see `on_one_curve`. Part 4, blocks needed by blocks there are, preemptions by
requests. Part 5, bytes and step times by those of the unquantized variant. A rig without its divisor is left out, with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from . import chart, cliff, evidence, freeze, post, published, quantization, records, starvation
from . import cliff_published as cliff_author
from . import freeze_published as freeze_author
from . import starvation_published as starvation_author
from .arms import ArmSet
from .part_5 import published_pairs
from .stats import knee

PUBLISHED_LABEL = "a10g (published)"
COLUMNS = ["x", "y", "low", "high", "symbol", "valid", "what", "from"]  # of a curve's rows; `what` and `from` are texts for the hover


@dataclass(frozen=True)
class Curve:
    """One rig in one panel. `rows` has the columns `COLUMNS`; low and high are null where there is one value. `joined`: draw a line."""

    rig: str
    name: str
    rows: pd.DataFrame
    panel: int = 0
    joined: bool = True

    @property
    def published(self) -> bool:
        return self.rig == published.RIG


@dataclass(frozen=True)
class Overlay:
    """What one figure shows. `y_titles`: one a panel, all over one logarithmic x; `log_y`, one a panel. `left_out`: label -> reason."""

    says: str
    x_title: str
    y_titles: tuple[str, ...]
    log_y: tuple[bool, ...]
    curves: list[Curve]
    left_out: dict[str, str]
    csv: str
    marks: dict[str, Any] = field(default_factory=dict)  # "x": (value, text), "diagonal": name, "y": value


def beside(shown: ArmSet) -> list[ArmSet]:
    """The records on the page, then those of every other rig that has some of this post, the best evidence first."""
    others = evidence.sets(shown.post, post.committed_only())
    return [shown, *(found for rig, found in others.items() if rig != shown.rig)]


def _rows(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=COLUMNS).sort_values("x", kind="stable", ignore_index=True)


# --- Part 1: rate over knee ---------------------------------------------------------------------------------------------


def part_1(found: list[ArmSet]) -> Overlay:
    """TTFT over that at the lowest rate, and completed over offered, against offered rate over the knee.

    The percentile is that of each rig's own service level, by which its knee was found; the name of the curve says which.
    """
    machines = [(each.rig, each.rig, records.points_frame(each.first), each.first.document["settings"]["slo"]) for each in found]
    # The author's completed rate includes the drain, so it is not judged.
    machines.append((published.RIG, PUBLISHED_LABEL, published.judged_frame(published.sweep_frame(passes="table")), {"completed_ratio": 0.0}))
    curves, left_out = [], {}
    for rig, label, frame, slo in machines:
        result = knee(frame, slo)
        low, high = result["bracket"]
        if low is None or high is None:
            left_out[label] = result["status"]
            continue
        middle, percentile = math.sqrt(low * high), f"p{result['slo']['ttft_percentile']:g}"
        frame = chart.measured(frame)
        frame = frame[frame["request_rate"].map(math.isfinite)]
        waits = chart.by_rate(frame, f"ttft_{percentile}_ms")
        if waits.empty:
            left_out[label] = f"no {percentile} of TTFT"
        else:
            curves.append(Curve(rig, f"{label}, {percentile} TTFT", _by_rate(waits, middle, waits["value"].iloc[0], f"{percentile} TTFT", " ms")))
        steady = frame["steady_req_s"] / frame["steady_offered_req_s"] if "steady_offered_req_s" in frame else frame["steady_req_s"]
        whole = frame["completed_req_s"] / frame["request_rate"]
        # As in `knee`: over the steady window where that is known.
        kept = chart.by_rate(frame.assign(kept=pd.to_numeric(steady).fillna(whole)), "kept")
        if len(kept):
            curves.append(Curve(rig, f"{label}, completed / offered", _by_rate(kept, middle, 1.0, "completed / offered", ""), panel=1))
    return Overlay("TTFT relative to the lowest rate's (above), and completed over offered requests (below), against offered rate over the knee",
                   "offered rate / knee", ("TTFT / lowest rate's", "completed / offered"), (True, False), curves, left_out, "part_1_laid_over.csv",
                   {"x": (1.0, "knee")})


def _by_rate(curve: pd.DataFrame, middle: float, base: float, what: str, unit: str) -> pd.DataFrame:
    return _rows([{"x": row.request_rate / middle, "y": row.value / base, "low": row.low / base, "high": row.high / base, "symbol": "circle",
                   "valid": row.valid, "what": f"{what} {chart.digits(row.value)}{unit} at {row.offered} (knee {middle:.3g}/s), n: {row.n}",
                   "from": row.status} for row in curve.itertuples()])


# --- Part 2: stall over calm step ---------------------------------------------------------------------------------------


def part_2_load(cases: freeze.Cases) -> str:
    """The load that is drawn: heavy, where it was measured."""
    return "heavy" if any(load == "heavy" for _, load in cases) else "light"


def part_2(found: list[ArmSet]) -> Overlay:
    """Worst stall of an injection over the calm median gap, against the prompt tokens that one step may hold over those of one long prompt.

    One mark an arm: the median over the injections, its range theirs.
    """
    curves, left_out = [], {}
    for each in found:
        cases = freeze.read(each)
        load, rows, missing = part_2_load(cases), [], []
        for case in (case for case in cases.values() if case.load == load):
            prompt, calm, stalls = case.populations["prompt_tokens"], case.populations["calm"]["p50_ms"], case.populations["worst_by_round_ms"]
            if not (case.as_asked and case.step_tokens and prompt and calm and stalls):
                missing.append(case.arm)
                continue
            rows.append({"x": case.step_tokens / prompt, "y": case.typical_worst_ms / calm, "low": min(stalls) / calm, "high": max(stalls) / calm,
                         "symbol": "circle" if case.asked_chunked else "diamond", "valid": case.valid,
                         "what": f"{case.arm}, {load} load: {chart.digits(case.typical_worst_ms)} ms over {chart.digits(calm)} ms, "
                                 f"n: {len(stalls)} injections; a step holds {case.step_tokens:,} of a prompt's {prompt:,} tokens",
                         "from": "valid" if case.valid else f"NOT VALID: {', '.join(case.reasons)}"})
        if rows:
            curves.append(Curve(each.rig, each.rig, _rows(rows)))
        if missing or not rows:
            left_out[each.rig] = f"{', '.join(missing) or 'every arm'}: stall, calm median or tokens of a step are not known"
    named = {name: entry["value"] for name, entry in freeze_author.published().items()}
    author = freeze_author.published_rows()
    rows = [{"x": 1 / named["freeze_token_ratio"] if row.chunked_prefill == "on" else 1.0, "y": row.window_max_ms / row.base_ms, "low": None,
             "high": None, "symbol": "circle" if row.chunked_prefill == "on" else "diamond", "valid": True,
             "what": f"chunking {row.chunked_prefill}, heavy load: {chart.digits(row.window_max_ms)} ms, worst of the run, over "
                     f"{chart.digits(row.base_ms)} ms, the median of all tokens", "from": "published, not re-measured"}
            for row in author[author["injection"] == "heavy"].itertuples()]
    curves.append(Curve(published.RIG, PUBLISHED_LABEL, _rows(rows)))
    return Overlay("Worst stall of an injection over the calm median gap, against the prompt tokens that one step may hold over those of one long "
                   "prompt. Diamonds are servers without chunked prefill", "prompt tokens in a step / of one long prompt",
                   ("worst stall / calm gap",), (True,), curves, left_out, "part_2_laid_over.csv", {"x": (1.0, "a whole prompt")})


# --- Part 3: on one curve -----------------------------------------------------------------------------------------------


def part_3(found: list[ArmSet]) -> list[dict[str, Any]]:
    """The machines of `cliff_figures.on_one_curve`: throughput over the ceiling of the step's fit against batch over its crossover."""
    machines = []
    for each in found:
        steps = cliff.steps_frame(each)
        steps, caps = steps[steps["valid"].astype(bool)], cliff.caps_frame(each)
        caps = caps.assign(batch=caps["batch_mean"])
        machines.append({"rig": each.rig, "label": each.rig, "fit": cliff.step_fit(steps), "steps": steps, "caps": caps})
    theirs = cliff_author.published_steps()
    return [*machines, {"rig": published.RIG, "label": PUBLISHED_LABEL, "fit": cliff.step_fit(theirs), "steps": theirs,
                        "caps": cliff_author.published_caps()}]


# --- Part 4: preemptions a request --------------------------------------------------------------------------------------

LOAD_MARKERS = {"positive": "circle", "balanced": "square", "long": "diamond"}


def part_4(found: list[ArmSet]) -> Overlay:
    """Preemptions over requests, against the blocks that the admitted requests need at their end over the blocks there are."""
    curves, left_out = [], {}
    for each in found:
        counts, bounds = starvation.counts(each), starvation.bounds(each)
        if counts.empty or "demand_over_room" not in bounds:
            left_out[each.rig] = "no flood with a known cache was measured"
            continue
        joined = counts.merge(bounds[["arm", "load", "demand_over_room"]], on=["arm", "load"])
        unknown = joined[joined["preemptions"].isna() | joined["demand_over_room"].isna()]
        if len(unknown):
            left_out[each.rig] = f"{', '.join(unknown['arm'] + ' ' + unknown['load'])}: count or room is not known"
        rows = [{"x": row.demand_over_room, "y": row.preemptions / row.num_prompts, "low": None, "high": None,
                 "symbol": LOAD_MARKERS.get(row.load, "triangle-up"), "valid": row.valid,
                 "what": f"{row.arm}, {row.load}: {row.preemptions} preemptions of {row.num_prompts:.0f} requests",
                 "from": "valid" if row.valid else f"NOT VALID: {', '.join(row.reasons)}"}
                for row in joined.drop(unknown.index).itertuples()]
        if rows:
            curves.append(Curve(each.rig, each.rig, _rows(rows), joined=False))
    theirs = starvation_author.runs()
    theirs = theirs[theirs["preemptions"].notna() & theirs["demand_over_room"].notna()]
    rows = [{"x": row.demand_over_room, "y": row.preemptions / row.num_prompts, "low": None, "high": None, "symbol": "cross", "valid": True,
             "what": f"{row.arm}, {row.model}, {row.load}: {row.preemptions:.0f} preemptions of {row.num_prompts} requests",
             "from": "published, not re-measured"} for row in theirs.itertuples()]
    curves.append(Curve(published.RIG, PUBLISHED_LABEL, _rows(rows), joined=False))
    return Overlay("Preemptions over requests, against the blocks that all admitted requests need at their end over the blocks there are. Circles "
                   "are the positive control, squares the balanced load, diamonds long prompts, crosses the published runs",
                   "blocks needed / blocks there are", ("preemptions / requests",), (False,), curves, left_out, "part_4_laid_over.csv",
                   {"x": (1.0, "just fits")})


# --- Part 5: step time over bytes ---------------------------------------------------------------------------------------


def part_5(found: list[ArmSet]) -> Overlay:
    """The part of a step that its sequences share, against streamed bytes, both over those of the unquantized variant. On the diagonal a step
    takes as long as its bytes."""
    curves, left_out = [], {}
    machines = [(each.rig, each.rig, quantization.comparisons(quantization.variants(each)), "valid") for each in found]
    machines.append((published.RIG, PUBLISHED_LABEL, published_pairs(), "published, not re-measured"))
    for rig, label, pairs, origin in machines:
        rows, missing = [], [] if len(pairs) else ["no variant beside the unquantized one"]
        for pair in pairs.to_dict("records"):
            if not (pair["streamed"] and pair["measured"]):
                missing.append(f"{pair['arm']}: {pair['reason'] or 'its streamed bytes are not known'}")
                continue
            parameters = f", {pair['parameters']:.3g} times the parameters" if pair["parameters"] else ""
            rows.append({"x": pair["streamed"], "y": pair["measured"], "low": pair["low"], "high": pair["high"],
                         "symbol": "circle" if pair["role"] == "same" else "square", "valid": True,
                         "what": f"{pair['arm']}{parameters}: {pair['measured_by']} {pair['measured']:.3g} of the unquantized one's, "
                                 f"bytes {pair['streamed']:.3g}", "from": origin})
        if rows:
            curves.append(Curve(rig, label, _rows(rows), joined=False))
        if missing:
            left_out[label] = "; ".join(missing)
    return Overlay("Step time against streamed bytes of each variant, both over the unquantized one's. Circles are the same model in fewer bits, "
                   "squares a bigger model", "streamed bytes / unquantized", ("shared step time / unquantized",), (True,), curves, left_out,
                   "part_5_laid_over.csv", {"diagonal": "as its bytes", "y": 1.0})
