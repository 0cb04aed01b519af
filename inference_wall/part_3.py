"""What Part 3, the batching cliff, says of its records.

What:   `look` reads a set once into tables and fits; `verdict` says whether the shape held; `numbers` and `published` name the numbers.
Why:    a page and its named numbers must come from the same look at the records, and must survive a refused arm or a missing point.
Use:    found = look(arms); numbers(arms)["headline"]; published()["cliff_factor"]
Not:    the analysis (`cliff`), the figures (`cliff_figures`), sentences and tables (`cliff_words`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from . import cliff, headline
from . import published as author
from .arms import ArmSet
from .chart import digits
from .cliff import AGREE_PERCENT, StepFit
from .records import Run

PROPORTIONAL = 0.95  # of the growth of the cap: throughput that grows by more than this share of it grows in proportion
NEEDS = "needs floods at two caps"


@dataclass(frozen=True)
class Findings:
    """One set of records, looked at once. `small` and `large` are the rows of the smallest and the largest cap, or null."""

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

    @property
    def rig(self) -> str:
        return self.arms.rig

    @property
    def run(self) -> Run:
        """The record that stands for the set: that of the largest cap, which has the closed loops and the steps."""
        return self.arms.testable[self.large["arm"]] if self.large else self.arms.first

    @property
    def factor(self) -> float | None:
        """Tokens per second at the largest cap over those at the smallest: both in the steady window, or both over the whole point."""
        if not self.small or not self.large or self.small["cap"] == self.large["cap"] or not (self.small["valid"] and self.large["valid"]):
            return None
        for column in ("steady_output_tok_s", "output_tok_s"):
            under, over = self.small[column], self.large[column]
            if pd.notna(under) and pd.notna(over) and under:
                return over / under
        return None


def look(arms: ArmSet) -> Findings:
    """Tables, fit, agreement, queue and bound of a set. Never raises for a missing arm or point; what is not there is null."""
    caps, closed, steps = cliff.caps_frame(arms), cliff.closed_frame(arms), cliff.steps_frame(arms)
    ends = caps.to_dict("records")
    queues = {int(row["cap"]): cliff.queue_positions(_flood(arms, row["arm"])) for row in [*ends[:1], *ends[-1:]]}
    small, large = (ends[0], ends[-1]) if ends else (None, None)
    fit = cliff.step_fit(steps[steps["valid"].astype(bool)])
    return Findings(arms, caps, closed, steps, fit, cliff.agreement(caps, closed), small, large, queues, _fair(queues, closed),
                    _bound(arms, steps, large))


def _flood(arms: ArmSet, arm: str) -> pd.DataFrame:
    """The requests of the first valid measured flood of an arm, else of the first one."""
    run = arms.testable[arm]
    points = [point for point in run.points if point["load"] == "flood" and point["pass"] == "measured"]
    return run.frame("requests", next((point for point in points if point["validity"]["valid"]), points[0])["point"])


def _fair(queues: dict[int, pd.DataFrame], closed: pd.DataFrame) -> dict[str, Any]:
    """`cliff.fairness` at a cap of 1. The time of one answer comes from the closed loop of one: another load, mostly another server."""
    if 1 not in queues:
        return {"n": 0, "explained": None, "reason": "no flood was measured at a cap of 1", "service_from": None} | dict.fromkeys(
            ("slope_s", "r2", "service_s", "alone_s", "difference_percent", "in_order"))
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
    """What bytes over bandwidth allow: stream_ms (see `headline.bound`), own_mb and own_ms a sequence at `context` tokens, own_reason."""
    run = arms.testable.get(large["arm"]) if large else next(iter(arms.testable.values()), None)
    result = dict.fromkeys(("stream_ms", "own_mb", "own_ms", "context", "own_reason"))
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
    return result | {"stream_ms": book.entries["stream_ms"]["value"], "context": context, "own_mb": own / 1e6 if own else None,
                     "own_ms": own / best / 1e6 if own and best else None,
                     "own_reason": why_not or (None if best else "the bandwidth was not measured")}


def trace_points(found: Findings) -> list[tuple[int, Any]]:
    """(batch, path) of the profiler's traces of steps, the smallest batch first; empty where none was kept."""
    traces = [(point["num_prompts"], run.trace(point["point"])) for run in found.arms.testable.values() for point in run.points
              if point["pass"] == "trace" and point["load"] == "steps"]
    return sorted((batch, path) for batch, path in traces if path is not None)


# --- named numbers ----------------------------------------------------------------------------------------------------


def numbers(arms: ArmSet) -> dict[str, dict[str, Any]]:
    """All named numbers of a set of Part 3. Times in ms unless the name says s, rates in tokens or requests per second."""
    found = look(arms)
    book = headline.Book(found.run)
    _setup(book, found)
    _bound_numbers(book, found)
    _ends(book, found)
    _fit(book, found)
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
    per_request = first["input_len"] + first["output_len"] if first else None
    tokens = found.run.said.get("kv_cache_tokens")
    book.put("room_requests", int(tokens // per_request) if tokens and per_request else None, "requests", reason="the server's log did not say")
    points = found.arms.frame()  # of all arms: `headline.setup` counts those of one
    book.put("points", len(points), "points")
    book.put("invalid_points", int((~points["valid"].astype(bool)).sum()) if len(points) else 0, "points")
    book.put("agree_limit_percent", AGREE_PERCENT, "%")


def _bound_numbers(book: headline.Book, found: Findings) -> None:
    bound, unknown = found.bound, "weights or bandwidth were not measured"
    stream = bound["stream_ms"]
    book.put("context_tokens", bound["context"], "tokens", reason="no load was measured")
    book.put("own_mb", bound["own_mb"], "MB", reason=bound["own_reason"] or unknown)
    own = book.put("own_ms", bound["own_ms"], "ms", reason=bound["own_reason"] or unknown)
    book.put("bound_crossover", stream / own if stream and own else None, "sequences", reason=bound["own_reason"] or unknown)
    cap = found.large["cap"] if found.large else None
    step = book.put("bound_large_step_ms", stream + cap * (own or 0) if stream and cap else None, "ms", reason=unknown)
    book.put("bound_large_tok_s", cap / step * 1e3 if step else None, "tok/s", reason=unknown)
    book.put("bound_factor", cap / step * (stream + (own or 0)) if step else None, "x", reason=unknown)


def _ends(book: headline.Book, found: Findings) -> None:
    """The smallest and the largest cap, and what lies between."""
    for name, row in (("small", found.small), ("large", found.large)):
        good = row if row and row["valid"] else {}
        why = "no flood was measured" if not row else "its flood is not valid: " + ", ".join(row["reasons"])
        book.run = found.arms.testable[row["arm"]] if row else found.run
        book.put(f"{name}_cap", row["cap"] if row else None, "requests", reason=why)
        for column, unit in (("tok_s", "tok/s"), ("completed_req_s", "req/s"), ("num_prompts", "prompts"), ("running_mean", "requests"),
                             ("running_max", "requests"), ("waiting_max", "requests")):
            book.put(f"{name}_{column}", good.get(column), unit, reason=why if not good else "not recorded")
        for latency in ("ttft", "itl"):
            for statistic in ("p50_ms", "p90_ms", "p99_ms", "max_ms"):
                n = good.get(f"{latency}_n")
                book.put(f"{name}_{latency}_{statistic}", good.get(f"{latency}_{statistic}"), "ms", n=n,
                         reason=why if not good else f"n = {n:.0f} cannot bear it")
    book.run = found.run
    factor = book.put("factor", found.factor, "x", reason=NEEDS)
    ratio = book.put("cap_ratio", found.large["cap"] / found.small["cap"] if found.large else None, "x", reason=NEEDS)
    book.put("factor_of_caps_percent", 100 * factor / ratio if factor else None, "%", reason=NEEDS)
    book.ratio("itl_growth", book.entries["large_itl_p50_ms"]["value"], book.entries["small_itl_p50_ms"]["value"])
    model = found.fit.tok_s(found.large["running_mean"]) if found.large and pd.notna(found.large["running_mean"]) else None
    served = book.entries["large_tok_s"]["value"]
    book.put("decode_at_large_tok_s", model, "tok/s", reason=found.fit.reason or "the running batch is not known")
    book.put("served_of_decode_percent", 100 * served / model if served and model else None, "%", reason="one of its two numbers was not measured")


def _fit(book: headline.Book, found: Findings) -> None:
    fit, why = found.fit, found.fit.reason or "not determined"
    book.put("fit_points", fit.n, "points")
    for name, value, unit in (("fit_fixed_ms", fit.fixed_ms, "ms"), ("fit_slope_ms", fit.slope_ms, "ms"),
                              ("fit_crossover", fit.crossover, "sequences"), ("fit_r2", fit.r2, ""),
                              ("fit_ceiling_tok_s", fit.ceiling_tok_s, "tok/s"), ("fit_most_gain", fit.most_gain, "x")):
        book.put(name, value, unit, reason=why)
    for name, interval, unit in (("fit_fixed", fit.fixed_interval, "ms"), ("fit_slope", fit.slope_interval, "ms"),
                                 ("fit_crossover", fit.crossover_interval, "sequences")):
        for end, value in zip(("low", "high"), interval, strict=True):
            book.put(f"{name}_{end}", value, unit, reason=fit.reason or "the points do not bound it")
    known = found.steps[found.steps["valid"].astype(bool) & found.steps["step_ms"].notna()]
    for name, row in (("single", known.iloc[0] if len(known) else None), ("widest", known.iloc[-1] if len(known) else None)):
        for column, unit in (("batch", "sequences"), ("step_ms", "ms"), ("tok_s", "tok/s")):
            value, n = (None, None) if row is None else (row[column], row["n"])
            book.put(f"{name}_{column}", value, unit, n=n, reason="no step was measured")
    book.ratio("fixed_over_stream", fit.fixed_ms, found.bound["stream_ms"])
    own = found.bound["own_ms"]
    book.put("own_of_slope_percent", 100 * own / fit.slope_ms if own and fit.slope_ms and fit.slope_ms > 0 else None, "%",
             reason=found.bound["own_reason"] or fit.reason or "one of its two numbers was not measured")


def _agreement(book: headline.Book, found: Findings) -> None:
    for name, row in (("small", found.small), ("large", found.large)):
        for column in ("tok_s", "itl_p50_ms", "running_mean"):
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
                            ("queue_difference_percent", "difference_percent", "%")):
        book.put(name, fair[key], unit, n=fair["n"], reason=why)
    book.put("queue_in_order_percent", 100 * fair["in_order"] if fair["in_order"] is not None else None, "%", n=fair["n"], reason=why)
    for name, place in (("first", 0), ("last", -1)):
        known = queue is not None and len(queue)
        book.put(f"queue_{name}_ttft_s", float(queue["ttft_s"].iloc[place]) if known else None, "s", reason=why)
    book.run = found.run


def _shape(book: headline.Book, found: Findings) -> None:
    factor = found.factor
    book.put("headline", None if factor is None else f"{factor:.1f} x (cap {found.small['cap']} to {found.large['cap']})", reason=NEEDS)
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
        parts.append((None, f"throughput against the cap is not known ({NEEDS})"))
    else:
        ratio = found.large["cap"] / found.small["cap"]
        parts.append((1 < factor < PROPORTIONAL * ratio, f"throughput grew {factor:.1f} times where the cap grew {ratio:.0f} times"))
    if fit.slope_ms is None:
        parts.append((None, f"no line through the steps ({fit.reason})"))
    else:
        parts.append((fit.slope_ms > 0, f"a step grew by {digits(fit.slope_ms)} ms for each sequence"))
    if fair["explained"] is None:
        parts.append((None, f"the queue at a cap of 1 was not judged ({fair['reason']})"))
    else:
        parts.append((fair["explained"], f"the place in the queue {'explains' if fair['explained'] else 'does not explain'} TTFT at a cap of 1 "
                                         f"(R² {fair['r2']:.3f})" if fair["r2"] is not None else "TTFT at a cap of 1 did not vary"))
    because = "; ".join(text for _, text in parts)
    if any(holds is False for holds, _ in parts):
        return "did not hold", because
    return ("not measured here" if any(holds is None for holds, _ in parts) else "held"), because


# --- the author's figures ---------------------------------------------------------------------------------------------

CAPS_CSV, STEPS_CSV = "a10g/part_3/batching.csv", "a10g/part_1/decode_step.csv"


def published_caps() -> pd.DataFrame:
    """The author's floods by cap: cap, tok_s, batch (what ran: the cap, but no more than the card could seat) and the printed columns."""
    rows = author.table(CAPS_CSV)
    rows = rows[rows["model"] == author.MODEL].assign(cap=lambda frame: frame["max_num_seqs"].astype(int), tok_s=lambda frame: frame["output_tok_s"])
    return rows.assign(batch=rows["cap"].clip(upper=int(_running()["value"]))).reset_index(drop=True)


def published_steps() -> pd.DataFrame:
    """The author's step times: batch, step_ms, n (null: not published), tok_s (computed here: batch / step)."""
    rows = author.table(STEPS_CSV)
    rows = rows[(rows["record_type"] == "step_point") & (rows["model"] == author.MODEL) & (rows["metric"] == "step_ms")]
    frame = pd.DataFrame({"batch": rows["batch"].astype(int), "step_ms": rows["value"].astype(float), "n": None})
    return frame.assign(tok_s=1e3 * frame["batch"] / frame["step_ms"]).reset_index(drop=True)


def _running() -> pd.Series:
    facts = author.table("a10g/later/speculation_facts.csv")
    return facts[(facts["metric"] == "running_at_flood") & (facts["arm"] == "off")].iloc[0]


def published() -> dict[str, dict[str, Any]]:
    """The author's numbers that this post names, keys without prefix; each says where it was printed or how it was computed here."""
    entries: dict[str, dict[str, Any]] = {}

    def put(name: str, value: Any, unit: str, where: str, n: int | None = None) -> None:
        value = value.item() if hasattr(value, "item") else value
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        entries[name] = {"value": None if missing else value, "unit": unit, "n": n, "run": None, "source": "published",
                         "reason": "not published" if missing else None, "where": where}

    caps, fit = published_caps(), cliff.step_fit(published_steps())
    for row in caps.to_dict("records"):
        for column, unit in (("output_tok_s", "tok/s"), ("num_prompts", "prompts"), ("ttft_p50_ms", "ms"), ("itl_p50_ms", "ms"),
                             ("itl_p99_ms", "ms")):
            put(f"cliff_cap_{row['cap']}_{column}", int(row[column]) if unit == "prompts" else row[column], unit, row["source"])
    small, large = caps.iloc[0], caps.iloc[-1]
    put("cliff_small_cap", int(small["cap"]), "requests", small["source"])
    put("cliff_large_cap", int(large["cap"]), "requests", large["source"])
    put("cliff_factor", float(large["speedup_vs_cap1_x"]), "x", large["source"])
    running = _running()
    put("cliff_running", float(running["value"]), "requests", running["source"])
    foil = author.table(CAPS_CSV)
    foil = foil[foil["model"] != author.MODEL].iloc[0]
    put("cliff_foil_factor", float(foil["speedup_vs_cap1_x"]), "x", foil["source"])
    before = caps.iloc[-2]
    last = f"cap {large['cap']} over cap {before['cap']}"
    put("cliff_before_cap", int(before["cap"]), "requests", before["source"])
    put("cliff_last_gain_percent", 100 * (large["tok_s"] / before["tok_s"] - 1), "%", f"computed here: {last}")
    put("cliff_last_itl_growth", large["itl_p50_ms"] / before["itl_p50_ms"], "x", f"computed here: median ITL, {last}")
    put("cliff_half_flood_s", small["num_prompts"] / 2 / small["completed_req_s"], "s",
        "computed here: half of the prompts at a cap of 1 over the completed rate")
    put("cliff_crossover", fit.crossover, "sequences", "computed here: least squares over the four published step times")
    for end, value in zip(("low", "high"), fit.crossover_interval, strict=True):
        put(f"cliff_crossover_{end}", value, "sequences", "computed here: 95 % interval of that crossover (Fieller)")
    put("cliff_most_gain", fit.most_gain, "x", "computed here: crossover + 1")
    put("cliff_ceiling_tok_s", fit.ceiling_tok_s, "tok/s", "computed here: one over the slope")
    decode = published_steps().iloc[-1]
    put("cliff_served_of_decode_percent", 100 * large["tok_s"] / decode["tok_s"], "%",
        "computed here: flood over batch / step at the largest traced batch")
    rows = author.table(STEPS_CSV)
    plateau = rows[rows["record_type"] == "plateau"].iloc[0]
    put("cliff_plateau_ms", float(plateau["value"]), "ms", plateau["source"])
    own_ms = _published_own_ms()
    put("cliff_own_ms", own_ms, "ms", "computed here: state read and written and the keys and values of a 256-token context, over copy bandwidth")
    put("cliff_own_of_slope_percent", 100 * own_ms / fit.slope_ms, "%", "computed here: that over the slope")
    return entries


def _published_own_ms() -> float:
    shape = author.model_shape()
    config = {"num_hidden_layers": shape["layers"], "num_key_value_heads": shape["kv_heads"], "head_dim": shape["head_dim"],
              "layer_types": ["linear_attention"] * shape["linear_attention_layers"] + ["full_attention"] * shape["full_attention_layers"],
              "linear_num_value_heads": shape["linear_value_heads"], "linear_key_head_dim": shape["linear_key_dim"],
              "linear_value_head_dim": shape["linear_value_dim"]}
    own, _ = cliff.own_bytes(config, 256, "float16")
    return own / author.rig_facts()["hardware"]["copy_bandwidth_measured"]["value"] / 1e6
