"""What Part 3, the batching cliff, says of its records.

What:   `look` reads a set once into tables and fits; `verdict` says whether the shape held; `numbers` and `published` name the numbers.
Why:    a page and its named numbers must come from the same look at the records, and must survive a refused arm or a missing point.
Use:    found = look(arms); numbers(arms)["headline"]; published()["cliff_factor"]
Not:    the analysis (`cliff`), the author's figures (`cliff_published`), our figures (`cliff_figures`), sentences and tables (`cliff_words`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from . import cliff, headline, held_up, starvation, step_families
from .arms import ArmSet
from .chart import digits
from .cliff import AGREE_PERCENT, StepFit
from .cliff_published import published
from .records import Run

LEAST_FACTOR = 2.0  # a gain below this is no cliff
PROPORTIONAL = 0.95  # of the growth of the cap: throughput that grows by more than this share of it grows in proportion
SAME_BATCH = 0.02  # two batches that differ by less than this share are one
NEEDS = "needs floods at two caps"


@dataclass(frozen=True)
class Findings:
    """One set of records, looked at once. `large` is the row of the largest cap, `small` that of the smallest where there are two; else null.

    `batches`: `held_up.by_batch` of the steps. `traces`: (batch, path) of the profiler's traces of steps, the smallest batch first. `families` and
    `state`: what the card does in them (`step_families`), empty on a processor.
    """

    arms: ArmSet
    caps: pd.DataFrame
    closed: pd.DataFrame
    steps: pd.DataFrame
    fit: StepFit
    agreed: pd.DataFrame
    small: dict[str, Any] | None
    large: dict[str, Any] | None
    queues: dict[int, pd.DataFrame]
    fair: dict[str, Any]
    bound: dict[str, Any]
    batches: pd.DataFrame
    traces: list[tuple[int, Any]]
    families: pd.DataFrame
    state: pd.DataFrame

    @property
    def rig(self) -> str:
        return self.arms.rig

    @property
    def run(self) -> Run:
        """The record that stands for the set: that of the largest cap, which has the closed loops and the steps."""
        return self.arms.testable[self.large["arm"]] if self.large else self.arms.first

    @property
    def rates(self) -> tuple[float, float, str] | None:
        """Output tokens per second at the smallest and the largest cap, and over what: both in the steady window, else both over the whole point."""
        return None if not self.small or self.small["cap"] == self.large["cap"] else _rates(self.small, self.large)

    @property
    def stand_in(self) -> tuple[int, float, float, str] | None:
        """What stands in for `rates` where only one cap was measured: the smallest closed loop, as long as it is smaller than that cap, its tokens
        per second, those of the flood at the cap, and over what. Null where there are two caps, or this cannot be compared either."""
        loops = self.closed[self.closed["valid"].astype(bool)]
        if self.small or not self.large or loops.empty or loops.iloc[0]["max_concurrency"] >= self.large["cap"]:
            return None
        rates = _rates(loops.iloc[0], self.large)
        return (int(loops.iloc[0]["max_concurrency"]), *rates) if rates else None

    @property
    def factor(self) -> float | None:
        """Tokens per second at the largest cap over those at the smallest, from `rates`."""
        return self.rates[1] / self.rates[0] if self.rates else None

    @property
    def decode_at_large(self) -> tuple[float | None, str]:
        """Tokens per second of decode alone at the batch that the flood at the largest cap ran: (value, how it is known) or (None, why it is not).

        The steps of that very batch where they were timed; where those were held up on their way to the client, the engine's own in the trace; else
        the line. It is not followed beyond the largest batch in it unless the points determine it there.
        """
        batch = self.large["batch_mean"] if self.large else None
        if batch is None or pd.isna(batch):
            return None, "the running batch of the flood is not known"
        same = self.steps[self.steps["valid"].astype(bool) & ((self.steps["batch"] - batch).abs() <= SAME_BATCH * batch)]
        timed = held_up.of_the_engine(same)
        if len(timed):
            return float(timed["tok_s"].astype(float).median()), "by the steps that were timed"
        traced = same[same["traced_ms"].notna()]
        if len(traced):
            return float(1e3 * traced["batch"].iloc[0] / traced["traced_ms"].iloc[0]), "by the engine's own steps in the trace"
        if self.fit.fixed_ms is None:
            return None, self.fit.reason
        if batch > self.fit.batches[-1] and self.fit.undetermined:
            return None, f"{batch:.0f} ran and the largest batch in the line is {self.fit.batches[-1]:g}; {self.fit.undetermined}"
        return self.fit.tok_s(batch), "by the line" if batch <= self.fit.batches[-1] else "by the line, drawn on beyond the batches that were timed"


def _rates(under: Any, over: Any) -> tuple[float, float, str] | None:
    """Output tokens per second of two rows of `cliff.fold`, both over the same stretch, and which; null unless both are valid and known."""
    if not (under["valid"] and over["valid"]):
        return None
    for column, stretch in (("steady_output_tok_s", "steady window"), ("output_tok_s", "whole point")):
        if pd.notna(under[column]) and pd.notna(over[column]) and under[column]:
            return under[column], over[column], stretch
    return None


def look(arms: ArmSet) -> Findings:
    """Tables, fit, agreement, queue and bound of a set. Never raises for a missing arm or point; what is not there is null."""
    caps, closed, steps = cliff.caps_frame(arms), cliff.closed_frame(arms), cliff.steps_frame(arms)
    ends = caps.to_dict("records")
    queues = {int(row["cap"]): cliff.queue_positions(_flood(arms, row["arm"])) for row in [*ends[:1], *ends[-1:]]}
    small, large = ends[0] if len(ends) > 1 else None, ends[-1] if ends else None
    fit = cliff.step_fit(steps[steps["valid"].astype(bool)])
    traces = _traces(arms)
    families = step_families.families(traces)
    return Findings(arms, caps, closed, steps, fit, cliff.agreement(caps, closed), small, large, queues, _fair(queues, closed),
                    _bound(arms, steps, large), held_up.by_batch(steps), traces, families,
                    step_families.state(families, next(iter(arms.testable.values()), None)))


def _traces(arms: ArmSet) -> list[tuple[int, Any]]:
    traces = [(point["num_prompts"], run.trace(point["point"])) for run in arms.testable.values() for point in run.points
              if point["pass"] == "trace" and point["load"] == "steps"]
    return sorted((batch, path) for batch, path in traces if path is not None)


def _flood(arms: ArmSet, arm: str) -> pd.DataFrame:
    """The requests of the first valid measured flood of an arm, else of the first one."""
    run = arms.testable[arm]
    points = [point for point in run.points if point["load"] == "flood" and point["pass"] == "measured"]
    return run.frame("requests", next((point for point in points if point["validity"]["valid"]), points[0])["point"])


def _fair(queues: dict[int, pd.DataFrame], closed: pd.DataFrame) -> dict[str, Any]:
    """`cliff.fairness` at a cap of 1. The time of one answer comes from the closed loop of one: another load, mostly another server."""
    if 1 not in queues:
        return {"n": 0, "explained": None, "reason": "no flood was measured at a cap of 1", "service_from": None} | dict.fromkeys(
            ("slope_s", "r2", "service_s", "alone_s", "difference_percent", "worst_share", "in_order", "sent_within_s"))
    alone = closed[(closed["max_concurrency"] == 1) & closed["valid"].astype(bool)]
    if len(alone) and pd.notna(alone.iloc[0]["e2e_p50_ms"]):
        service, first, source = alone.iloc[0]["e2e_p50_ms"] / 1e3, alone.iloc[0]["ttft_p50_ms"] / 1e3, "the closed loop of one"
    elif len(queues[1]):
        first = float(queues[1]["ttft_s"].min())
        service, source = float(queues[1]["streaming_s"].median()) + first, "the flood itself, since no closed loop of one was measured"
    else:
        service = first = source = None
    return cliff.fairness(queues[1], service, first) | {"service_from": source}


def _bound(arms: ArmSet, steps: pd.DataFrame, large: dict[str, Any] | None) -> dict[str, Any]:
    """What bytes over bandwidth allow: stream_ms (see `headline.bound`), own_mb and own_ms a sequence at `context` tokens, own_reason; crossover and
    factor (at the largest cap over a batch of one), both null unless own_ms is known."""
    run = arms.testable.get(large["arm"]) if large else next(iter(arms.testable.values()), None)
    result = dict.fromkeys(("stream_ms", "own_mb", "own_ms", "context", "own_reason", "crossover", "factor"))
    if run is None:
        return result | {"own_reason": "no arm was measured"}
    book = headline.Book(run)
    headline.setup(book)
    headline.bound(book)
    best = book.entries["best_bandwidth_gb_s"]["value"]
    streams = steps.iloc[0] if len(steps) else large
    context = streams["input_len"] + streams["output_len"] / 2 if streams is not None else None
    own, why_not = None, "no load was measured"
    if context:
        own, why_not = cliff.own_bytes(run.document["model"].get("config"), context, run.document["model"].get("dtype"))
    stream, own_ms = book.entries["stream_ms"]["value"], own / best / 1e6 if own and best else None
    if stream and own_ms:
        result |= {"crossover": stream / own_ms, "factor": large["cap"] * (stream + own_ms) / (stream + large["cap"] * own_ms) if large else None}
    return result | {"stream_ms": stream, "context": context, "own_mb": own / 1e6 if own else None, "own_ms": own_ms,
                     "own_reason": why_not or (None if best else "the bandwidth was not measured")}


def room(found: Findings) -> tuple[int | None, str]:
    """How many requests of the flood the cache of the largest cap seats until their end, in whole blocks: (requests, "") or (None, reason).

    The last token of an answer is made, but nothing is computed from it, so it needs no room (`block_rules`).
    """
    if not found.large:
        return None, "no flood was measured"
    cache, reason = starvation.cache_of(found.run)
    return (None, reason) if cache is None else (cache.room(int(found.large["input_len"] + found.large["output_len"] - 1)), "")


# --- named numbers ----------------------------------------------------------------------------------------------------


def numbers(arms: ArmSet) -> dict[str, dict[str, Any]]:
    """All named numbers of a set of Part 3. Times in ms unless the name says s, rates in tokens or requests per second."""
    found = look(arms)
    book = headline.Book(found.run)
    _setup(book, found)
    _bound_numbers(book, found)
    _ends(book, found)
    _fit(book, found)
    held_up.put(book, found.batches, found.fit)
    step_families.put(book, found.state)
    _agreement(book, found)
    _queue(book, found)
    _shape(book, found)
    return book.entries


def _setup(book: headline.Book, found: Findings) -> None:
    headline.setup(book)
    headline.bound(book)
    for name, value in (("caps", cliff.listed(found.caps["cap"])), ("concurrencies", cliff.listed(found.closed["max_concurrency"])),
                        ("batches", cliff.listed(sorted(set(found.steps["batch"]))))):
        book.put(name, value or None, reason="none was measured")
    first = found.large or {}
    for name in ("input_len", "output_len"):
        book.put(name, int(first[name]) if first else None, "tokens", reason="no flood was measured")
    requests, why = room(found)
    book.put("room_requests", requests, "requests", reason=why)
    points = found.arms.frame()  # of all arms: `headline.setup` counts those of one
    book.put("points", len(points), "points")
    book.put("invalid_points", int((~points["valid"].astype(bool)).sum()) if len(points) else 0, "points")
    book.put("agree_limit_percent", AGREE_PERCENT, "%")


def _bound_numbers(book: headline.Book, found: Findings) -> None:
    bound, unknown = found.bound, "weights or bandwidth were not measured"
    stream, why = bound["stream_ms"], bound["own_reason"] or unknown
    book.put("context_tokens", bound["context"], "tokens", reason="no load was measured")
    book.put("own_mb", bound["own_mb"], "MB", reason=why)
    own = book.put("own_ms", bound["own_ms"], "ms", reason=why)
    book.put("bound_crossover", bound["crossover"], "sequences", reason=why)
    cap = found.large["cap"] if found.large else None
    # Without the own bytes a step would seem to cost the same at any batch, and the bound would promise the cap itself.
    step = book.put("bound_large_step_ms", stream + cap * own if stream and own and cap else None, "ms", reason=why)
    book.put("bound_large_tok_s", cap / step * 1e3 if step else None, "tok/s", reason=why)
    book.put("bound_factor", bound["factor"], "x", reason=why)


def _ends(book: headline.Book, found: Findings) -> None:
    """The smallest and the largest cap, and what lies between."""
    for name, row in (("small", found.small), ("large", found.large)):
        good = row if row and row["valid"] else {}
        why = "only one cap was measured" if found.large else "no flood was measured"
        why = "its flood is not valid: " + ", ".join(row["reasons"]) if row else why
        book.run = found.arms.testable[row["arm"]] if row else found.run
        book.put(f"{name}_cap", row["cap"] if row else None, "requests", reason=why)
        if good and found.rates:
            good = good | {"tok_s": found.rates[name == "large"]}  # the ones that the factor divides
        for column, unit in (("tok_s", "tok/s"), ("completed_req_s", "req/s"), ("num_prompts", "prompts"), ("batch_mean", "requests"),
                             ("running_mean", "requests"), ("running_max", "requests"), ("waiting_max", "requests")):
            book.put(f"{name}_{column}", good.get(column), unit, reason=why if not good else "not recorded")
        for latency in ("ttft", "itl"):
            for statistic in ("p50_ms", "p90_ms", "p99_ms", "max_ms"):
                n = good.get(f"{latency}_n")
                book.put(f"{name}_{latency}_{statistic}", good.get(f"{latency}_{statistic}"), "ms", n=n,
                         reason=why if not good else f"n = {n:.0f} cannot bear it")
    book.run = found.run
    factor = book.put("factor", found.factor, "x", reason=NEEDS)
    book.put("factor_over", found.rates[2] if found.rates else None, reason=NEEDS)
    ratio = book.put("cap_ratio", found.large["cap"] / found.small["cap"] if found.small else None, "x", reason=NEEDS)
    book.put("factor_of_caps_percent", 100 * factor / ratio if factor else None, "%", reason=NEEDS)
    stand_in, why = found.stand_in, "two caps were measured" if found.small else "no valid closed loop is smaller than a valid flood's cap"
    book.put("stand_in_concurrency", stand_in and stand_in[0], "requests", reason=why)
    book.put("stand_in_tok_s", stand_in and stand_in[1], "tok/s", reason=why)
    book.put("stand_in_factor", stand_in and stand_in[2] / stand_in[1], "x", reason=why)
    book.put("missing_arms", ", ".join(found.arms.missing) or None, reason="none is missing")
    for end in ("low", "high"):
        book.put(f"large_tok_s_{end}", found.large[f"tok_s_{end}"] if found.large else None, "tok/s", reason="no flood was measured")
    book.ratio("itl_growth", book.entries["large_itl_p50_ms"]["value"], book.entries["small_itl_p50_ms"]["value"])
    decode, why = found.decode_at_large
    served = found.large["tok_s"] if found.large and found.large["valid"] else None  # over the same stretch as the batch
    book.put("decode_at_large_tok_s", decode, "tok/s", reason=why)
    book.put("served_of_decode_percent", 100 * served / decode if served and decode else None, "%", reason=why or "no valid flood was measured")


def _fit(book: headline.Book, found: Findings) -> None:
    fit, why = found.fit, found.fit.reason or "not determined"
    firm = fit if fit.unbounded is None else None
    book.put("fit_points", fit.n, "points")
    for name, value, unit in (("fit_fixed_ms", fit.fixed_ms, "ms"), ("fit_slope_ms", fit.slope_ms, "ms"), ("fit_r2", fit.r2, "")):
        book.put(name, value, unit, reason=why)
    book.put("fit_crossover", firm and firm.crossover, "sequences", reason=fit.unbounded or why)
    book.put("fit_ceiling_tok_s", firm and firm.ceiling_tok_s, "tok/s", reason=fit.unbounded or why)
    book.put("fit_most_gain", None if fit.undetermined else fit.most_gain, "x", reason=fit.undetermined or why)
    for name, interval, unit in (("fit_fixed", fit.fixed_interval, "ms"), ("fit_slope", fit.slope_interval, "ms"),
                                 ("fit_crossover", fit.crossover_interval, "sequences")):
        for end, value in zip(("low", "high"), interval, strict=True):
            book.put(f"{name}_{end}", value, unit, reason=fit.reason or "the points do not bound it")
    known = held_up.of_the_engine(found.steps)
    for name, row in (("single", known.iloc[0] if len(known) else None), ("widest", known.iloc[-1] if len(known) else None)):
        for column, unit in (("batch", "sequences"), ("step_ms", "ms"), ("tok_s", "tok/s")):
            value, n = (None, None) if row is None else (row[column], row["n"])
            book.put(f"{name}_{column}", value, unit, n=n, reason="no step was measured")
    book.ratio("fixed_over_stream", fit.fixed_ms, found.bound["stream_ms"])
    own, grows = found.bound["own_ms"], (fit.slope_interval[0] or 0) > 0
    book.put("own_of_slope_percent", 100 * own / fit.slope_ms if own and grows else None, "%",
             reason=found.bound["own_reason"] or fit.reason or ("not recorded" if grows else "the points do not determine the slope"))


def _agreement(book: headline.Book, found: Findings) -> None:
    for name, row in (("small", found.small), ("large", found.large)):
        for column, _ in cliff.COMPARED:
            rows = found.agreed[(found.agreed["column"] == column) & (found.agreed["cap"] == (row["cap"] if row else -1))]
            entry = rows.iloc[0] if len(rows) else None
            value, why = (None, "no closed loop of that size") if entry is None else (entry["difference_percent"], entry["note"] or "not known")
            book.put(f"agree_{name}_{column}_percent", value, "%", reason=why)


def _queue(book: headline.Book, found: Findings) -> None:
    fair, queue = found.fair, found.queues.get(1)
    why = fair["reason"] or "not determined"
    if 1 in found.queues:
        book.run = found.arms.testable["cap-1"]
    for name, key, unit in (("queue_slope_s", "slope_s", "s"), ("queue_service_s", "service_s", "s"), ("queue_r2", "r2", ""),
                            ("queue_difference_percent", "difference_percent", "%"), ("queue_worst_share", "worst_share", "answers"),
                            ("queue_sent_within_s", "sent_within_s", "s")):
        book.put(name, fair[key], unit, n=fair["n"], reason=why)
    book.put("queue_in_order_percent", 100 * fair["in_order"] if fair["in_order"] is not None else None, "%", n=fair["n"], reason=why)
    for name, place in (("first", 0), ("last", -1)):
        known = queue is not None and len(queue)
        book.put(f"queue_{name}_ttft_s", float(queue["ttft_s"].iloc[place]) if known else None, "s", reason=why)
    book.run = found.run


def _shape(book: headline.Book, found: Findings) -> None:
    text, stand_in = None, found.stand_in
    if found.rates:
        text = f"{found.factor:.1f} x (cap {found.small['cap']} to {found.large['cap']})"
    elif stand_in:
        text = f"{stand_in[2] / stand_in[1]:.1f} x (closed loop of {stand_in[0]} to cap {found.large['cap']}; smaller caps not measured)"
    book.put("headline", text, reason=NEEDS)
    printed = published()
    book.put("headline_published", f"{printed['cliff_factor']['value']:.1f} x (cap {printed['cliff_small_cap']['value']} to "
                                   f"{printed['cliff_large_cap']['value']}, where {printed['cliff_running']['value']:.0f} ran)")
    shape, because = verdict(found)
    book.put("shape", shape)
    book.put("shape_because", because)


def verdict(found: Findings) -> tuple[str, str]:
    """Whether the shape of the series held here: (`held`, `did not hold` or `not measured here`, why)."""
    factor, fit, fair = found.factor, found.fit, found.fair
    parts: list[tuple[bool | None, str]] = []
    if factor is None:
        other = found.stand_in
        parts.append((None, f"throughput against the cap is not known ({NEEDS})" + (
            f"; from a closed loop of {other[0]} to the flood at cap {found.large['cap']} it grew {other[2] / other[1]:.1f} times" if other else "")))
    else:
        ratio = found.large["cap"] / found.small["cap"]
        wide = PROPORTIONAL * ratio > LEAST_FACTOR  # caps closer than that cannot show both a gain and its end
        parts.append((LEAST_FACTOR <= factor < PROPORTIONAL * ratio if wide else None,
                      f"throughput grew {factor:.1f} times where the cap grew {ratio:.0f} times" + ("" if wide else ", too little to judge")))
    parts.append(_growth(fit, found.steps))
    if fair["explained"] is None:
        parts.append((None, f"the queue at a cap of 1 was not judged ({fair['reason']})"))
    else:
        parts.append((fair["explained"], f"the place in the queue {'explains' if fair['explained'] else 'does not explain'} TTFT at a cap of 1 "
                                         f"({digits(fair['slope_s'])} s a place, {digits(fair['service_s'])} s an answer)"))
    because = "; ".join(text for _, text in parts)
    if any(holds is False for holds, _ in parts):
        return "did not hold", because
    return ("not measured here" if any(holds is None for holds, _ in parts) else "held"), because


def _growth(fit: StepFit, steps: pd.DataFrame) -> tuple[bool | None, str]:
    """Whether a step grows with the batch: by the slope, or, where its interval holds 0, by the smallest batch against the largest.

    A step need not be a straight line in the batch to grow. The two ends differ when nine in ten steps of the one are shorter than nine
    in ten of the other (p90 below p10), in every repeat.
    """
    if fit.slope_ms is None:
        return None, f"no line through the steps ({fit.reason})"
    low, high = fit.slope_interval
    if low > 0:
        return True, f"a step grew by {digits(fit.slope_ms)} ms for each sequence"
    if high < 0:
        return False, f"a step shrank by {digits(-fit.slope_ms)} ms for each sequence"
    known = held_up.of_the_engine(steps)
    known = known[known["p10_ms"].notna() & known["p90_ms"].notna()]
    small, large = (known[known["batch"] == end(known["batch"])] if len(known) else known for end in (min, max))
    if len(small) and small["p90_ms"].max() < large["p10_ms"].min():
        return True, (f"a step of {large['batch'].iloc[0]} took {digits(large['step_ms'].min())} ms and one of {small['batch'].iloc[0]} "
                      f"{digits(small['step_ms'].max())} ms, though not along a straight line")
    return None, f"whether a step grows with the batch was not determined ({signed(low)} to {signed(high)} ms for each sequence)"


def signed(value: float) -> str:
    """Three significant digits, with a minus sign that is one."""
    return digits(value) if value >= 0 else f"−{digits(-value)}"
