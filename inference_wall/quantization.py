"""Fewer bits: does a step take as long as its bytes, or as its parameters?

What:   one row a variant (`variants`: bytes, room, kernel, step-time fit, flood), each against the first, unquantized one
        (`comparisons`: predicted and measured ratios, and which prediction is nearest), and what the words cost (`quality`).
Why:    "bytes, not parameters, set the speed" is a sentence that can be wrong. It makes a prediction for each pair of variants,
        and so do its rivals. Here they are put side by side before anybody says which was right.
Use:    rows = variants(arms); pairs = comparisons(rows); verdict(pairs)
Not:    the fit itself (`cliff`), figures (`quantization_figures`), sentences and named numbers (`part_5`).

    step time of a batch B:  t(B) = fixed + slope x B
    predicted fixed(variant) / fixed(unquantized) = ratio of streamed bytes, of loaded bytes, or of parameters

Steps need not lie on a line. Where the points cannot tell its slope (or its fixed term) from 0, the measured step of one sequence, which
streams the same bytes, is compared instead. And a ratio near that of the bytes proves nothing where the unquantized step does not wait for
bytes: a format with fewer bits may speed up the arithmetic by about the same factor. So the share of the bandwidth is looked at first.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from . import cliff, held_up
from .arms import ArmSet
from .cliff import StepFit
from .records import Run
from .running_batch import of_point

GIB = 2**30
PREDICTORS = {"streamed": "streamed bytes", "loaded": "loaded bytes", "parameters": "parameters"}
SAME = 0.01  # two predictions closer than this cannot be told apart
CLOSE_PERCENT = 15.0  # the shape held where the bytes' prediction is off by no more than this
PART = 1 / 3  # of the promised saving: from there on bytes had their effect in part
SHORTER = 0.95  # without an interval, a step of at most this ratio is called shorter
NEITHER = 1.5  # a factor: where even the nearest prediction is off by more, no rule says what was measured
WAITS_PERCENT = 60.0  # of the measured bandwidth: a step that uses less does not wait for bytes alone
BIGGER = 1.05  # times the parameters: another model, not another format


def base(arms: ArmSet) -> str | None:
    """The arm that the others are compared with: the first of the plan, where it was measured."""
    return arms.names[0] if arms.names and arms.names[0] in arms.testable else None


def variants(arms: ArmSet) -> pd.DataFrame:
    """One row a testable arm, in the order of the plan. What is not known is null.

    Columns: arm, role (`base`, `same` model with fewer bits, `bigger` model, or `other`), model, dtype, real (weights of a checkpoint),
    method and kernel (from the server's log), loaded_gb, streamed_gb (10^9 bytes), bytes_reason (why those are null), parameters, bits (streamed
    bits a parameter), formats, kv_cache_tokens, full_requests (requests of the greatest length that fit), fixed_ms, fixed_low, fixed_high,
    slope_ms, slope_low, slope_high, r2, crossover (null where the line is in doubt), fit_reason, line_doubt (why the line is not to be relied on,
    or null), batches, by_batch ({batch: measured step time, the median of the valid repeats}), one_ms (of a batch of one), largest_batch,
    largest_ms, shared_ms and shared_by (the fixed term; for all variants the step of one sequence where the line of any is in doubt),
    bandwidth_gb_s (the better of copy and read, measured before), bandwidth_threads, engine_threads (where the engine was told a number),
    stream_ms (streamed bytes over bandwidth), effective_gb_s (streamed bytes over `shared_ms`), of_bandwidth_percent, percent_reason (why that is
    null), flood_tok_s, flood_req_s, flood_running, flood_n, flood_repeats, flood_low, flood_high (tok/s over the repeats), flood_kind, flood_valid.
    """
    known, first = fits(arms), base(arms)
    steps = cliff.steps_frame(arms)
    steps = held_up.of_the_engine(steps)
    rows = []
    for arm, run in arms.testable.items():
        row = {"arm": arm, "role": "other", **_model(run), **_fitted(known[arm]), **_flood(run), **_bandwidth(run)}
        measured = {int(batch): _lower_median(part["step_ms"]) for batch, part in steps[steps["arm"] == arm].groupby("batch")}
        row |= {"by_batch": measured, "one_ms": measured.get(1), "largest_batch": max(measured, default=None), "line_doubt": line_doubt(known[arm])}
        row["largest_ms"] = measured.get(row["largest_batch"])
        if row["line_doubt"]:
            row["crossover"] = None
        rows.append(row)
    by = ONE if any(row["line_doubt"] and row["by_batch"] for row in rows) else FIXED  # one for all, so that they can be compared
    rows = [row | _share(row, by) for row in rows]
    frame = pd.DataFrame(rows, columns=COLUMNS).astype(object)
    frame = frame.where(frame.notna(), None)
    if first is not None:
        frame["role"] = _roles(frame, first)
    return frame


COLUMNS = ["arm", "role", "model", "dtype", "real", "method", "kernel", "loaded_gb", "streamed_gb", "bytes_reason", "parameters", "bits", "formats",
           "kv_cache_tokens", "full_requests", "fixed_ms", "fixed_low", "fixed_high", "slope_ms", "slope_low", "slope_high", "r2", "crossover",
           "fit_reason", "line_doubt", "batches", "by_batch", "one_ms", "largest_batch", "largest_ms", "shared_ms", "shared_by", "bandwidth_gb_s",
           "bandwidth_threads", "engine_threads", "stream_ms", "effective_gb_s", "of_bandwidth_percent", "percent_reason", "flood_tok_s",
           "flood_req_s", "flood_running", "flood_n", "flood_repeats", "flood_low", "flood_high", "flood_kind", "flood_valid"]
FIXED, ONE = "fixed term", "step of one sequence"


def fits(arms: ArmSet) -> dict[str, StepFit]:
    """The line through the step times of each testable arm; points that failed a check or were held up on their way to the client are left
    out."""
    steps = held_up.of_the_engine(cliff.steps_frame(arms))
    return {arm: cliff.step_fit(steps[steps["arm"] == arm]) for arm in arms.testable}


def line_doubt(fit: StepFit) -> str | None:
    """Why a line must not be relied on, or null: there is none, or its points cannot tell one of its two terms from 0."""
    if fit.fixed_ms is None or fit.slope_ms is None:
        return fit.reason or "no fit"
    for term, value, (low, high) in (("slope", fit.slope_ms, fit.slope_interval), ("fixed term", fit.fixed_ms, fit.fixed_interval)):
        if low is not None and high is not None and low <= 0 <= high:
            return f"the interval of its {term} includes 0"
        if value <= 0:
            return f"its {term} is not above 0"
    return None


def _lower_median(values: pd.Series) -> float:
    return float(values.sort_values().iloc[(len(values) - 1) // 2])


def _bandwidth(run: Run) -> dict[str, Any]:
    """The better of copying and reading before the run, with how many threads, and how many the engine computes with, where it was told."""
    start = run.document["starts"][-1] if run.document["starts"] else {}
    measured = start.get("bandwidth") or {}
    told = ((start.get("server") or {}).get("environment") or {}).get("OMP_NUM_THREADS")
    return {"bandwidth_gb_s": max((value for value in (measured.get("copy_gb_s"), measured.get("read_gb_s")) if value), default=None),
            "bandwidth_threads": measured.get("threads"), "engine_threads": int(told) if str(told or "").isdigit() else None}


def _share(row: dict[str, Any], by: str) -> dict[str, Any]:
    """How much of the bandwidth the shared part of a step uses: `by` its fixed term, or by a step of one sequence."""
    shared = row["one_ms"] if by == ONE else None if row["line_doubt"] else row["fixed_ms"]
    best, streamed = row["bandwidth_gb_s"], row["streamed_gb"]
    effective = streamed / shared * 1e3 if streamed and shared else None
    ours, its = row["bandwidth_threads"], row["engine_threads"]
    reason = ("the streamed bytes are not known" if not streamed else f"the {by} is not known" if not shared else
              "the bandwidth was not measured" if not best else
              f"the bandwidth was measured with {ours} thread{'s' * (ours != 1)}, and the engine computes with {its}"
              if ours and its and ours != its else None)
    return {"shared_ms": shared, "shared_by": by, "stream_ms": streamed / best * 1e3 if streamed and best else None,
            "effective_gb_s": effective, "of_bandwidth_percent": None if reason else 100 * effective / best, "percent_reason": reason}


def _model(run: Run) -> dict[str, Any]:
    model, said = run.document["model"], run.said
    facts = model.get("facts") or {}
    unseen = None if facts.get("streamed_bytes") else facts.get("reason") or "the record did not see the model's files"
    loaded = facts.get("loaded_bytes") or (said["weights_gib"] * GIB if said.get("weights_gib") else None)
    streamed, parameters = facts.get("streamed_bytes"), facts.get("parameters")
    return {"model": model.get("name"), "dtype": model.get("dtype"), "real": model.get("weights") == "checkpoint",
            "method": said.get("quantization"), "kernel": said.get("quantization_kernel"),
            "loaded_gb": loaded / 1e9 if loaded else None, "streamed_gb": streamed / 1e9 if streamed else None, "bytes_reason": unseen,
            "parameters": parameters, "bits": 8 * streamed / parameters if streamed and parameters else None, "formats": facts.get("by_format") or {},
            "kv_cache_tokens": said.get("kv_cache_tokens"), "full_requests": said.get("max_concurrency")}


def _fitted(fit: StepFit) -> dict[str, Any]:
    return {"fixed_ms": fit.fixed_ms, "fixed_low": fit.fixed_interval[0], "fixed_high": fit.fixed_interval[1], "slope_ms": fit.slope_ms,
            "slope_low": fit.slope_interval[0], "slope_high": fit.slope_interval[1], "r2": fit.r2, "crossover": fit.crossover,
            "fit_reason": fit.reason, "batches": list(fit.batches)}


def _flood(run: Run) -> dict[str, Any]:
    """The measured floods of an arm: the median of the repeats (the lower of two middle ones), invalid ones only where there is no other."""
    points = [point for point in run.points if point.get("load") == "flood" and point["pass"] == "measured"]
    used = [point for point in points if point["validity"]["valid"]] or points
    if not used:
        return {"flood_repeats": 0, "flood_valid": False}
    summaries = [point["summary"] | {"place": point} for point in used]
    steady = all(summary.get("steady_output_tok_s") is not None for summary in summaries)
    tok, req = ("steady_output_tok_s", "steady_req_s") if steady else ("output_tok_s", "completed_req_s")
    rates = sorted(summary[tok] for summary in summaries if summary.get(tok) is not None)
    if not rates:
        return {"flood_repeats": len(used), "flood_valid": False}
    middle = next(summary for summary in summaries if summary.get(tok) == rates[(len(rates) - 1) // 2])
    place = {"point": middle["place"]["point"], "max_concurrency": None, "running_max": middle.get("running_max")}
    batch = of_point(run, place)["batch_steady" if steady else "batch_whole"]
    return {"flood_tok_s": middle[tok], "flood_req_s": middle.get(req), "flood_running": batch,
            "flood_n": middle.get("completed"), "flood_repeats": len(rates), "flood_low": rates[0], "flood_high": rates[-1],
            "flood_kind": "steady window" if steady else "whole point", "flood_valid": any(point["validity"]["valid"] for point in used)}


def _roles(rows: pd.DataFrame, first: str) -> list[str]:
    """`base`, then by parameters: `same` (within 5 percent), `bigger`, else `other`. The first of a role has it, further ones are `other`.

    Where parameters are not known (a hub model whose files the record did not see), a variant that loads more is the bigger model.
    """
    roles, start = [], rows[rows["arm"] == first].iloc[0]
    for row in rows.to_dict("records"):
        ratio = _over(row["parameters"], start["parameters"]) or _over(row["loaded_gb"], start["loaded_gb"])
        counted = row["parameters"] is not None and start["parameters"] is not None
        role = ("base" if row["arm"] == first else "other" if ratio is None else "bigger" if ratio > BIGGER else
                "same" if counted and ratio > 1 / BIGGER else "other")
        roles.append(role if role not in roles else "other")
    return roles


def by_role(rows: pd.DataFrame, role: str) -> dict[str, Any] | None:
    """The row of a role as a dict, or null."""
    found = rows[rows["role"] == role]
    return found.iloc[0].to_dict() if len(found) else None


# --- predictions and what came out ------------------------------------------------------------------------------------


def comparisons(rows: pd.DataFrame) -> pd.DataFrame:
    """Each variant against the base one (`rows`: from `variants`); empty where the base was not measured.

    Columns: arm, role, real, `streamed`, `loaded`, `parameters` (predicted ratios of what a step's sequences share), measured (ratio of the fixed
    terms, or of the steps of one sequence, as `shared_by` of `variants`), measured_by (`FIXED` or `ONE`), low, high (its approximate 95 %
    interval, or null), slope, slope_low, slope_high (ratios of the slopes; null where a line is in doubt), line_doubt (whose, why), one (of step
    times at a batch of one), largest (at the largest batch that both ran, `largest_batch`), flood (ratio of tokens/s), off_percent (measured
    over the streamed bytes' prediction, less 1), waits_percent (share of the bandwidth that the base's step uses), waits_reason (why that is
    null), nearest (texts of the nearest prediction and of those that cannot be told from it), says (`bytes`, `part`, `parameters`, `neither`
    or `cannot tell`), reason.
    """
    start, found = by_role(rows, "base"), []
    if start is None:
        return pd.DataFrame(columns=PAIR_COLUMNS)
    for row in rows[rows["role"] != "base"].to_dict("records"):
        doubt = "; ".join(f"{each['arm']}: {each['line_doubt']}" for each in (start, row) if each["line_doubt"]) or None
        one = _over(row["one_ms"], start["one_ms"])
        by = start["shared_by"]
        measured, low, high = (one, None, None) if by == ONE else ratio_interval(row, start, "fixed")
        slope, slope_low, slope_high = (None, None, None) if doubt else ratio_interval(row, start, "slope")
        both = sorted(set(row["by_batch"] or {}) & set(start["by_batch"] or {}))
        predicted = {"streamed": _over(row["streamed_gb"], start["streamed_gb"]), "loaded": _over(row["loaded_gb"], start["loaded_gb"]),
                     "parameters": _over(row["parameters"], start["parameters"])}
        floods = row["flood_valid"] and start["flood_valid"] and row["flood_kind"] == start["flood_kind"]
        bytes_ = predicted["streamed"] or predicted["loaded"]
        found.append({"arm": row["arm"], "role": row["role"], "real": row["real"], **predicted, "measured": measured,
                      "measured_by": None if measured is None else by, "low": low, "high": high,
                      "slope": slope, "slope_low": slope_low, "slope_high": slope_high, "line_doubt": doubt, "one": one,
                      "largest": _over(row["by_batch"][both[-1]], start["by_batch"][both[-1]]) if both else None,
                      "largest_batch": both[-1] if both else None, "flood": _over(row["flood_tok_s"], start["flood_tok_s"]) if floods else None,
                      "off_percent": 100 * (measured / bytes_ - 1) if measured and bytes_ else None,
                      "waits_percent": start["of_bandwidth_percent"], "waits_reason": start["percent_reason"],
                      **judge(predicted, measured, low, high)})
        if measured is None:
            found[-1]["reason"] = f"the {by} is not known for both" + (f" ({doubt})" if doubt else "")
    frame = pd.DataFrame(found, columns=PAIR_COLUMNS).astype(object)
    return frame.where(frame.notna(), None)


PAIR_COLUMNS = ["arm", "role", "real", "streamed", "loaded", "parameters", "measured", "measured_by", "low", "high", "slope", "slope_low",
                "slope_high", "line_doubt", "one", "largest", "largest_batch", "flood", "off_percent", "waits_percent", "waits_reason", "nearest",
                "says", "reason"]


def ratio_interval(over: dict[str, Any], under: dict[str, Any], term: str) -> tuple[float | None, float | None, float | None]:
    """Ratio of one term (`fixed` or `slope`) of two fits with an approximate 95 % interval; nulls where a term is not above 0.

    The fits are independent, so their relative half-widths add as squares, on the logarithm (first-order propagation of error).
    """
    a, b = over[f"{term}_ms"], under[f"{term}_ms"]
    if not (a and b and a > 0 and b > 0):
        return None, None, None
    if over[f"{term}_high"] is None or under[f"{term}_high"] is None:
        return a / b, None, None
    half = math.hypot((over[f"{term}_high"] - a) / a, (under[f"{term}_high"] - b) / b)
    return a / b, a / b * math.exp(-half), a / b * math.exp(half)


def judge(predicted: dict[str, float | None], measured: float | None, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """Which prediction is nearest to the measured ratio: {"nearest": [texts], "says", "reason"}.

    Distance is the factor between them, whichever way. Predictions within 1 percent of the nearest count with it. `says` is `neither` where even
    the nearest is off by more than the factor `NEITHER` and lies outside the interval; `cannot tell` where parameters and bytes predict the same,
    are not both known, or are both within the interval. `part`: one model in two formats whose step got shorter by at least `PART` of what its
    bytes promise, though bytes are not nearest.
    """
    known = {name: value for name, value in predicted.items() if value}
    nothing: dict[str, Any] = {"nearest": [], "says": "cannot tell", "reason": None}
    if measured is None or not known:
        return nothing | {"reason": "the ratio was not measured" if measured is None else "neither bytes nor parameters are known"}
    best = min(known, key=lambda name: abs(math.log(known[name] / measured)))
    names = [name for name, value in known.items() if abs(math.log(value / known[best])) <= SAME]
    nearest = [PREDICTORS[name] for name in names]
    kinds = {"parameters" if name == "parameters" else "bytes" for name in names}
    if "parameters" not in known or len(known) == 1:
        return nothing | {"nearest": nearest, "reason": "bytes and parameters are not both known"}

    def holds(value: float) -> bool:
        return low is not None and high is not None and low <= value <= high

    promised = known.get("streamed") or known.get("loaded")
    shorter = measured <= SHORTER if high is None else high < 1
    if (abs(math.log(known["parameters"])) <= SAME and promised and promised < measured and shorter and kinds == {"parameters"}
            and (1 - measured) / (1 - promised) >= PART):
        return {"nearest": nearest, "says": "part", "reason": None}
    factor = math.exp(abs(math.log(known[best] / measured)))
    if factor > NEITHER and not holds(known[best]):
        return {"nearest": nearest, "says": "neither", "reason": f"the nearest prediction is off by a factor of {factor:.2f}"}
    if len(kinds) > 1:
        return nothing | {"nearest": nearest, "reason": "bytes and parameters do not predict different things here"}
    if holds(known["parameters"]) and any(holds(value) for name, value in known.items() if name != "parameters"):
        return nothing | {"nearest": nearest, "reason": f"the interval of the measured ratio, {low:.2f} to {high:.2f}, holds both predictions"}
    return {"nearest": nearest, "says": kinds.pop(), "reason": None}


def waits(pairs: pd.DataFrame) -> tuple[bool | None, str]:
    """Does the unquantized step wait for its bytes? (true, false or null where it is not known, and a clause that says why).

    It does where it uses at least `WAITS_PERCENT` of the measured bandwidth. If not, even a ratio just as predicted by bytes may have another cause.
    """
    if pairs.empty:
        return None, "there is no pair of variants"
    percent = pairs.iloc[0]["waits_percent"]
    if percent is None:
        return None, f"whether the unquantized step waits for its bytes is not known, because {pairs.iloc[0]['waits_reason']}"
    if percent < WAITS_PERCENT:
        return False, (f"the unquantized step uses {percent:.0f} percent of the bandwidth, so it does not wait for bytes alone; fewer bits also "
                       "change the arithmetic")
    return True, f"the unquantized step uses {percent:.0f} percent of the bandwidth"


def verdict(pairs: pd.DataFrame) -> tuple[str, str]:
    """Did "bytes, not parameters, set the speed" hold? (`held`, `moved`, `did not hold` or `not measured here`, and because of what).

    Held: in every pair that can tell, bytes are nearest, the streamed bytes' prediction is off by at most `CLOSE_PERCENT`, and the unquantized step
    waits for its bytes (`waits`). Moved: bytes are nearest everywhere, but further off, or had their effect in part, or the step does not wait for
    them, or it is not known whether it does. Did not hold: parameters are nearest, or neither is near, in at least one pair.
    """
    telling = [row for row in pairs.to_dict("records") if row["says"] != "cannot tell"]
    if not telling:
        reasons = [f"{row['arm']}: {row['reason']}" for row in pairs.to_dict("records") if row["reason"]]
        return "not measured here", "; ".join(reasons) or "there is no second variant on this rig"
    words = [f"{row['arm']}: measured {row['measured']:.2f}, " + ", ".join(f"{PREDICTORS[name]} {row[name]:.2f}" for name in PREDICTORS if row[name])
             + (f" ({row['reason']})" if row["reason"] else "") for row in telling]
    waiting, because = waits(pairs)
    if any(row["says"] not in ("bytes", "part") for row in telling):
        return "did not hold", "; ".join([*words, because] if waiting is False else words)
    if not waiting or any(row["says"] == "part" for row in telling):
        return "moved", "; ".join([*words, because])
    close = all(abs(row["off_percent"]) <= CLOSE_PERCENT or (row["low"] is not None and row["low"] <= row["streamed"] <= row["high"])
                for row in telling if row["streamed"]) and any(row["streamed"] for row in telling)
    return "held" if close else "moved", "; ".join([*words, because])


def _over(value: Any, under: Any) -> float | None:
    return float(value) / float(under) if value and under else None


# --- words ------------------------------------------------------------------------------------------------------------


def quality(arms: ArmSet) -> pd.DataFrame:
    """What the words cost: one row a testable arm.

    Columns: arm, real, perplexity, text_tokens, perplexity_ratio (over the base's), continuations, identical (those equal to the base's in every
    token), agreed_tokens (before each first difference), continuation_tokens, agreed_percent, reason (why a value is null).
    Arms with random weights have no words to compare. Another number of scored tokens is another text: then there is no ratio.
    """
    found = {arm: _said_of(run) for arm, run in arms.testable.items()}
    first = base(arms)
    start = found.get(first) if first else None
    rows = []
    for arm, run in arms.testable.items():
        said, real = found[arm], run.document["model"].get("weights") == "checkpoint"
        row: dict[str, Any] = {"arm": arm, "real": real, "reason": None}
        if said is None:
            row["reason"] = "it was not asked" if real else "random weights: right bytes, meaningless words"
        else:
            row |= {"perplexity": said.get("perplexity"), "text_tokens": said.get("text_tokens"), "reason": said.get("reason"),
                    "continuations": len(said.get("continuations") or []), "continuation_tokens": said.get("continuation_tokens")}
            if start and arm != first:
                same_text = said.get("text_tokens") == start.get("text_tokens")
                row["perplexity_ratio"] = _over(said.get("perplexity"), start.get("perplexity")) if same_text else None
                row["reason"] = row["reason"] or (None if same_text else "not comparable: another number of scored tokens")
                row |= agreement(start.get("continuations") or [], said.get("continuations") or [])
        rows.append(row)
    columns = ["arm", "real", "perplexity", "text_tokens", "perplexity_ratio", "continuations", "identical", "agreed_tokens", "continuation_tokens",
               "agreed_percent", "reason"]
    frame = pd.DataFrame(rows, columns=columns).astype(object)
    return frame.where(frame.notna(), None)


def _said_of(run: Run) -> dict[str, Any] | None:
    """What the last measured quality point of a run brought, or null."""
    points = [point for point in run.points if point.get("kind") == "quality" and point["pass"] == "measured" and point.get("bench")]
    return points[-1]["bench"] if points else None


def agreement(base_: list[list[int]], other: list[list[int]]) -> dict[str, Any]:
    """How far greedy continuations go together: identical (count), agreed_tokens, agreed_percent of the base's tokens.

    Only tokens before the first difference count: after it the two write on from different texts. Continuations that one side lacks count
    as not agreed.
    """
    if not base_ or not other:
        return {"identical": None, "agreed_tokens": None, "agreed_percent": None}
    agreed = identical = 0
    for left, right in zip(base_, other, strict=False):
        together = next((place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
        agreed += together
        identical += bool(left) and left == right
    total = sum(map(len, base_))
    return {"identical": identical, "agreed_tokens": agreed, "agreed_percent": 100 * agreed / total if total else None}


# --- under the profiler -----------------------------------------------------------------------------------------------


def traced(arms: ArmSet) -> dict[str, Any]:
    """The trace of each testable arm: {arm: path or null}; the first point of the pass `trace` that left one."""
    paths = {}
    for arm, run in arms.testable.items():
        found = [run.trace(point["point"]) for point in run.points if point["pass"] == "trace"]
        paths[arm] = next((path for path in found if path is not None), None)
    return paths
