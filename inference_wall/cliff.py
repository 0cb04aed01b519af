"""The batching cliff: what a cap on the running batch costs, and what one step costs as the batch grows.

What:   step time of a known batch (`step_time`), its straight line over batches (`step_fit`), floods by cap and closed loops
        by concurrency as tables (`caps_frame`, `closed_frame`, `steps_frame`) with the batch that ran (`running_batch`), whether the
        two agree (`agreement`), how the place in the queue decides the wait (`queue_positions`, `fairness`), and the bytes that a
        sequence moves (`own_bytes`).
Why:    a cap and a closed loop are two ways to say "so many together". They are only exchangeable where they were shown to
        agree, and never for TTFT: a flood queues its prompts, a closed loop has no queue.
Use:    fit = step_fit(steps_frame(arms)); fit.fixed_ms, fit.slope_ms, fit.crossover
Not:    drawing (`cliff_figures`), sentences and named numbers (`part_3`).

Formulas: ordinary least squares with intervals of Student's t; the interval of a ratio of two coefficients after E. C. Fieller
("Some problems in interval estimation", J. R. Stat. Soc. B 16, 1954, pages 175-185).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from . import held_up, running_batch
from .arms import ArmSet
from .percentiles import CONFIDENCE, needed, percentile
from .records import COUNTS, POINT_COLUMNS, STATISTICS
from .samples import UNIT_S, ticks
from .stats import LATENCIES

LEAST_BATCHES = 3  # two points always lie on a line: that would prove nothing
FALL_PERCENT = 2.0  # a step that is shorter than that of a smaller batch by less than this is taken to be as long
AGREE_PERCENT = 10.0  # a cap and a concurrency that differ by more than this are said to differ
Interval = tuple[float | None, float | None]


# --- one batch --------------------------------------------------------------------------------------------------------


def step_time(requests: pd.DataFrame, chunks: pd.DataFrame) -> dict[str, Any]:
    """The time of one step while all streams of a `streams` point decode together.

    `requests`, `chunks`: the raw rows of one point (docs/decisions/0001). The window runs from the last first token to the
    first end, so that every step in it holds exactly the whole batch and no prompt; nothing else is thrown away.

    Returns batch (streams), step_ms (median gap between two tokens of a stream), p10_ms, p90_ms, mean_ms (all time over all
    tokens: the check on the median when tokens arrive bundled), n (gaps), steps (n / batch: all streams take part in each
    step, so this and not n is the number of independent samples, and it decides which percentile is given), reason (null, or
    why a value is null).
    """
    batch = len(requests)
    result: dict[str, Any] = {"batch": batch, "step_ms": None, "n": 0, "steps": 0, "p10_ms": None, "p90_ms": None, "mean_ms": None, "reason": None}
    whole = (requests["outcome"] == "completed") & requests["first_token"].notna() & requests["end"].notna()
    if not batch or not whole.all():
        return result | {"reason": f"{batch - int(whole.sum())} of {batch} streams did not finish" if batch else "no stream was sent"}
    start, end = ticks(requests["first_token"]).max(), ticks(requests["end"]).min()
    inside = chunks[(chunks["tokens"] > 0) & chunks["time"].between(start, end)].sort_values(["request", "time"], kind="stable")
    gap = inside.groupby("request")["time"].diff()
    gaps_s, tokens = gap.dropna().to_numpy(float) * UNIT_S, inside.loc[gap.notna(), "tokens"].to_numpy(int)
    if not gaps_s.size:
        return result | {"reason": "the streams never all decoded at the same time"}
    # A chunk of k tokens is one gap and k - 1 gaps of nothing, as in `samples.token_gaps`.
    samples = np.concatenate([gaps_s, np.zeros(int((tokens - 1).sum()))])
    steps = samples.size // batch
    result |= {"n": int(samples.size), "steps": steps, "mean_ms": round(float(gaps_s.sum() / tokens.sum()) * 1e3, 4)}
    for name, p in (("step_ms", 50), ("p10_ms", 10), ("p90_ms", 90)):
        if steps >= needed(p):
            result[name] = round(percentile(samples, p) * 1e3, 4)
    short = f"{steps} steps with the whole batch; a median needs {needed(50)}, its 10th and 90th percentile {needed(90)}"
    return result | {"reason": None if steps >= needed(90) else short}


# --- the line over batches --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepFit:
    """step time = fixed + slope x batch, in ms. Whatever could not be had is null, and `reason` says why.

    Intervals are at 95 %. `crossover` is the batch at which the shared and the own part of a step are equal, fixed / slope.
    """

    n: int  # points in the fit
    fixed_ms: float | None = None
    slope_ms: float | None = None
    crossover: float | None = None
    r2: float | None = None
    fixed_interval: Interval = (None, None)
    slope_interval: Interval = (None, None)
    crossover_interval: Interval = (None, None)
    worst_ms: float | None = None  # the largest distance of a point from the line, with its sign
    worst_batch: float | None = None
    batches: tuple[float, ...] = ()
    residuals_ms: tuple[float, ...] = ()
    falls: tuple[tuple[float, float], ...] = ()  # (batch, a smaller batch whose step took longer): a straight line has none
    reason: str | None = None
    _spread: tuple[float, float, float] | None = field(default=None, repr=False)  # residual deviation, mean batch, sum of squares

    @property
    def unbounded(self) -> str | None:
        """Why the crossover, and the ceiling with it, must not be quoted; null where the points bound them."""
        return "the points do not bound it" if self.crossover is not None and self.crossover_interval[1] is None else self.reason

    @property
    def undetermined(self) -> str | None:
        """Why nothing may be said of a batch without end; null where the crossover is bounded and lies within what was timed."""
        if self.unbounded is None and self.crossover is not None and self.crossover > self.batches[-1]:
            return f"the crossover lies beyond the largest batch in the line, {self.batches[-1]:g}"
        return self.unbounded

    @property
    def ceiling_tok_s(self) -> float | None:
        """Tokens per second of an endless batch: 1 / slope. Null without a positive slope."""
        return 1e3 / self.slope_ms if self.slope_ms is not None and self.slope_ms > 0 else None

    @property
    def most_gain(self) -> float | None:
        """Tokens per second of an endless batch over those of a batch of one: (fixed + slope) / slope = crossover + 1."""
        return None if self.crossover is None else self.crossover + 1

    def step_ms(self, batch: Any) -> Any:
        """The line at a batch (number or array); null without a fit."""
        return None if self.fixed_ms is None else self.fixed_ms + self.slope_ms * batch

    def tok_s(self, batch: Any) -> Any:
        """Tokens per second of a batch: 1 / (fixed / batch + slope). Null without a fit."""
        return None if self.fixed_ms is None else 1e3 * batch / self.step_ms(batch)

    def band_ms(self, batch: Any) -> tuple[Any, Any] | None:
        """The 95 % interval of the line (not of single steps) at a batch; null without a fit."""
        if self._spread is None:
            return None
        deviation, mean, squares = self._spread
        half = _t(self.n - 2) * deviation * np.sqrt(1 / self.n + (np.asarray(batch, float) - mean) ** 2 / squares)
        return self.step_ms(batch) - half, self.step_ms(batch) + half


def step_fit(points: pd.DataFrame) -> StepFit:
    """Least squares of step time over batch, every point with the same weight.

    `points`: columns batch, step_ms and (not used as a weight) n; rows without a step time, or `held_up` on their way to the client, are dropped.
    Needs three different batches. A slope or a fixed part that is not above 0 leaves `crossover` null, with the reason.
    """
    points = points[points["held_up"].isna()] if "held_up" in points else points
    known = points[["batch", "step_ms"]].apply(pd.to_numeric).dropna().sort_values("batch")
    x, y = known["batch"].to_numpy(float), known["step_ms"].to_numpy(float)
    n, batches = len(x), tuple(sorted(set(x.tolist())))
    if len(batches) < LEAST_BATCHES:
        return StepFit(n=n, batches=batches, reason=f"step times of {len(batches)} different batches; a line needs {LEAST_BATCHES}")
    squares = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / squares)
    fixed = float(y.mean() - slope * x.mean())
    residuals = y - fixed - slope * x
    total = float(((y - y.mean()) ** 2).sum())
    deviation = math.sqrt(float((residuals**2).sum()) / (n - 2))
    half_slope = _t(n - 2) * deviation / math.sqrt(squares)
    half_fixed = _t(n - 2) * deviation * math.sqrt(1 / n + x.mean() ** 2 / squares)
    crossover, reason = None, None
    if slope <= 0:
        reason = "the step does not grow with the batch, so nothing crosses"
    elif fixed <= 0:
        reason = "the line has no fixed part above 0, so nothing crosses"
    else:
        crossover = fixed / slope
    worst = int(np.abs(residuals).argmax())
    return StepFit(
        n=n, fixed_ms=fixed, slope_ms=slope, crossover=crossover, r2=1 - float((residuals**2).sum()) / total if total > 0 else None,
        fixed_interval=(fixed - half_fixed, fixed + half_fixed), slope_interval=(slope - half_slope, slope + half_slope),
        crossover_interval=(None, None) if crossover is None else _fieller(fixed, slope, deviation, x, squares),
        worst_ms=float(residuals[worst]), worst_batch=float(x[worst]), batches=batches, residuals_ms=tuple(residuals.tolist()),
        falls=_falls(known), reason=reason, _spread=(deviation, float(x.mean()), squares))


def _falls(known: pd.DataFrame) -> tuple[tuple[float, float], ...]:
    """Batches whose step was shorter than that of a smaller batch, each with the smallest such batch. Repeats count by their median."""
    typical = known.groupby("batch")["step_ms"].median()
    pairs = ((batch, [less for less in typical.index if less < batch and step < typical[less] * (1 - FALL_PERCENT / 100)])
             for batch, step in typical.items())
    return tuple((float(batch), float(longer[0])) for batch, longer in pairs if longer)


def _t(freedom: int) -> float:
    return float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom))


def _fieller(fixed: float, slope: float, deviation: float, x: np.ndarray, squares: float) -> Interval:
    """The interval of fixed / slope, or nulls where the points do not bound it (the slope could as well be 0)."""
    variance = deviation**2
    v_fixed = variance * (1 / len(x) + x.mean() ** 2 / squares)
    v_slope, both = variance / squares, -variance * x.mean() / squares
    # All ratios r with (fixed - r slope)^2 <= t^2 var(fixed - r slope): a quadratic in r.
    t2 = _t(len(x) - 2) ** 2
    a, b, c = slope**2 - t2 * v_slope, fixed * slope - t2 * both, fixed**2 - t2 * v_fixed
    root = b**2 - a * c
    if root < -1e-9 * b**2 or a <= 0:  # the slope could as well be 0
        return None, None
    root = max(root, 0.0)  # points that lie on their line leave nothing but rounding
    return float(max((b - math.sqrt(root)) / a, 0.0)), float((b + math.sqrt(root)) / a)


# --- a set of records -------------------------------------------------------------------------------------------------


def cap_of(arm: str) -> int | None:
    """`cap-16` -> 16; null for an arm that is not a cap."""
    number = arm.removeprefix("cap-")
    return int(number) if number != arm and number.isdigit() else None


def listed(values: Any) -> str:
    """Numbers as a list for reading: `1, 4, 16`."""
    return ", ".join(f"{value:g}" for value in values)


def caps_frame(arms: ArmSet) -> pd.DataFrame:
    """One row a cap, ascending: the floods of the measured pass. Columns as `fold`, and `cap`."""
    rows = _rows(arms, "flood")
    return fold(rows.assign(cap=rows["arm"].map(cap_of)).dropna(subset="cap"), "cap")


def closed_frame(arms: ArmSet) -> pd.DataFrame:
    """One row a concurrency, ascending: the closed loops. Columns as `fold`, and `max_concurrency`."""
    rows = _rows(arms, "closed")
    return fold(rows.dropna(subset="max_concurrency"), "max_concurrency")


def _rows(arms: ArmSet, load: str) -> pd.DataFrame:
    frame = arms.frame()
    if frame.empty:  # every arm was refused: the columns of a frame without rows
        latencies = (f"{latency}_{statistic}" for latency in LATENCIES for statistic in STATISTICS)
        frame = pd.DataFrame(columns=["rig", "source", "pass", "rate_label", "request_rate", "valid", "reasons", "point", *POINT_COLUMNS, *COUNTS,
                                      *latencies])
    rows = frame[(frame["pass"] == "measured") & (frame["load"] == load)]
    batches = [running_batch.of_point(arms[row["arm"]], row) for row in rows.to_dict("records")]
    return rows.assign(**{name: [each[name] for each in batches] for name in ("batch_steady", "batch_whole")})


def fold(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """One row a value of `by`: the median of its repeats (the lower of two middle ones, an observed value) in every number.

    Invalid points take part only where no repeat is valid. Beside the columns of the frame: `tok_s`, output tokens per second in
    the steady window where one is known, else over the whole point (`tok_s_kind` says which), with `tok_s_low` and `tok_s_high` over the
    repeats; `batch_mean` over the same stretch; `repeats`, `valid`, `reasons` (all breaches).
    """
    folded = []
    for value, points in rows.groupby(by, sort=True):
        valid = points["valid"].astype(bool)
        used = points[valid] if valid.any() else points
        numbers = used.apply(pd.to_numeric, errors="coerce")
        row = {column: _lower_median(numbers[column]) for column in numbers} | {by: int(value), "arm": used["arm"].iloc[0]}
        steady = numbers["steady_output_tok_s"].notna().all()
        chosen = numbers["steady_output_tok_s" if steady else "output_tok_s"]
        row |= {"tok_s": _lower_median(chosen), "tok_s_low": chosen.min(), "tok_s_high": chosen.max(),
                "tok_s_kind": "steady window" if steady else "whole point", "batch_mean": row.get("batch_steady" if steady else "batch_whole"),
                "repeats": len(used), "valid": bool(valid.any()),
                "reasons": sorted({reason for reasons in points["reasons"] for reason in reasons})}
        folded.append(row)
    columns = dict.fromkeys([by, *rows.columns, "tok_s", "tok_s_low", "tok_s_high", "tok_s_kind", "batch_mean", "repeats"])
    return pd.DataFrame(folded, columns=list(columns))


def _lower_median(values: pd.Series) -> float | None:
    known = values.dropna().sort_values()
    return float(known.iloc[(len(known) - 1) // 2]) if len(known) else None


def steps_frame(arms: ArmSet) -> pd.DataFrame:
    """One row a measured `streams` point: `step_time`, arm, point, repeat, tok_s (batch / step), running_max, valid, reasons, and the columns of
    `held_up.mark`.

    A batch that the server did not run as a whole (its own count of running requests stayed below) keeps its row, without a step time.
    """
    found = []
    for name, run in arms.testable.items():
        for point in run.points:
            if point.get("load") != "steps" or point["pass"] != "measured":
                continue
            row = step_time(run.frame("requests", point["point"]), run.frame("chunks", point["point"]))
            running = point["summary"].get("running_max")
            if row["step_ms"] is not None and running is not None and running < row["batch"]:
                row |= {"step_ms": None, "reason": f"the server ran at most {running:.0f} of {row['batch']} streams at once"}
            row["tok_s"] = row["batch"] / row["step_ms"] * 1e3 if row["step_ms"] else None
            found.append(row | {"arm": name, "point": point["point"], "repeat": point["repeat"], "running_max": running,
                                "output_len": point["output_len"], "input_len": point["input_len"],
                                "valid": point["validity"]["valid"], "reasons": point["validity"]["reasons"]})
    columns = ["batch", "step_ms", "n", "steps", "p10_ms", "p90_ms", "mean_ms", "reason", "tok_s", "arm", "point", "repeat", "running_max",
               "output_len", "input_len", "valid", "reasons"]
    return held_up.mark(pd.DataFrame(found, columns=columns).sort_values(["batch", "repeat"], ignore_index=True), arms)


# --- a cap and a concurrency ------------------------------------------------------------------------------------------

COMPARED = (("tok_s", "output tokens/s"), ("itl_p50_ms", "ITL p50, ms"), ("batch_mean", "running batch, mean"))
NOT_JUDGED = (("running_mean", "the server's gauge of it, mean"), ("ttft_p50_ms", "TTFT p50, ms"))


def agreement(caps: pd.DataFrame, closed: pd.DataFrame) -> pd.DataFrame:
    """The flood at a cap beside the closed loop of the same concurrency, at the smallest and the largest cap that have both.

    One row a cap and quantity: cap, what, by_cap, by_concurrency, difference_percent (of the cap's value), verdict (`agree`, `differ`
    beyond `AGREE_PERCENT`, or `not comparable` with the reason in `note`). TTFT and the server's gauge are in the table, and are never
    judged: only the flood has a queue, and the gauge is blind while a prompt is read, which a flood does in one go for many.
    """
    rows = []
    both = sorted(set(caps["cap"]) & set(closed["max_concurrency"]))
    for cap in dict.fromkeys([*both[:1], *both[-1:]]):
        left, right = caps[caps["cap"] == cap].iloc[0], closed[closed["max_concurrency"] == cap].iloc[0]
        for column, what in (*COMPARED, *NOT_JUDGED):
            a, b = left[column], right[column]
            row = {"cap": int(cap), "column": column, "what": what, "by_cap": a, "by_concurrency": b, "difference_percent": None,
                   "verdict": "not comparable", "note": ""}
            if pd.isna(a) or pd.isna(b) or not a:
                row["note"] = "one of the two is not known"
            elif not (left["valid"] and right["valid"]):
                row["note"] = "one of the two points is not valid"
            elif column == "tok_s" and left["tok_s_kind"] != right["tok_s_kind"]:
                row["note"] = "only one of the two has a steady window"
            else:
                row["difference_percent"] = 100 * (b / a - 1)
                row["verdict"] = "agree" if abs(row["difference_percent"]) <= AGREE_PERCENT else "differ"
            if (column, what) in NOT_JUDGED and not row["note"]:
                queued = f"a flood of {left['num_prompts']:.0f} prompts queues; a closed loop does not"
                row |= {"verdict": "not comparable", "note": queued if column == "ttft_p50_ms" else "it misses requests whose prompt is being read"}
            rows.append(row)
    return pd.DataFrame(rows, columns=["cap", "column", "what", "by_cap", "by_concurrency", "difference_percent", "verdict", "note"])


# --- the queue --------------------------------------------------------------------------------------------------------

SERVICE_PERCENT = 20.0  # "the place explains the wait" asks for a slope that is the time of one answer within this ...
SERVICE_SHARE = 0.5  # ... and for no wait farther from the line than this share of an answer: one answer a place, not two and then none


def queue_positions(requests: pd.DataFrame) -> pd.DataFrame:
    """The completed requests of a flood by their place in the queue: position (0 = served first), sent_place, ttft_s, streaming_s, e2e_s, sent_s.

    The place is the order of first tokens: only the server knows in which order a flood queued. That a later place waits longer is so by
    construction; by how much is not, and that is what `fairness` judges.
    """
    done = requests[(requests["outcome"] == "completed") & requests["first_token"].notna() & requests["end"].notna()]
    ordered = requests[requests["sent"].notna()].sort_values(["sent", "request"], kind="stable", ignore_index=True)
    place = pd.Series(ordered.index, index=ordered["request"]).reindex(done["request"]).to_numpy()
    due, first, end = (ticks(done[name]) * UNIT_S for name in ("intended", "first_token", "end"))
    frame = pd.DataFrame({"request": done["request"].to_numpy(), "sent_place": place, "ttft_s": first - due, "streaming_s": end - first,
                          "e2e_s": end - due, "first": first, "sent_s": ticks(done["sent"]) * UNIT_S})
    frame = frame.sort_values(["first", "sent_place"], kind="stable", ignore_index=True).drop(columns="first")
    frame.insert(1, "position", np.arange(len(frame)))
    return frame


def fairness(positions: pd.DataFrame, service_s: float | None, alone_s: float | None) -> dict[str, Any]:
    """Does the place in the queue explain the wait at a cap of 1?

    Theory: request k (from 0) waits for k others, `service_s` each (a whole answer alone on the server), and then `alone_s` for its own
    first token. Returns slope_s and r2 of a straight line through the waits, service_s, difference_percent of the two slopes, worst_share (the
    largest distance from that line, in answers), in_order (share of neighbours in sending that were served in that order), sent_within_s
    (from the first sending to the last), explained (true, false, or null) and reason.
    """
    result: dict[str, Any] = {"n": len(positions), "slope_s": None, "r2": None, "service_s": service_s, "alone_s": alone_s,
                              "explained": None, "reason": None} | dict.fromkeys(("difference_percent", "worst_share", "in_order", "sent_within_s"))
    if len(positions) < 5:
        return result | {"reason": f"{len(positions)} requests in the flood; a line through them would say little"}
    x, y = positions["position"].to_numpy(float), positions["ttft_s"].to_numpy(float)
    slope, offset = np.polyfit(x, y, 1)
    off = y - offset - slope * x
    total = float(((y - y.mean()) ** 2).sum())
    as_sent = positions.sort_values("sent_place")["position"].to_numpy()
    result |= {"slope_s": float(slope), "r2": 1 - float((off**2).sum()) / total if total else None,
               "in_order": float((np.diff(as_sent) > 0).mean()), "sent_within_s": float(np.ptp(positions["sent_s"]))}
    if not service_s:
        return result | {"reason": "the time of one whole answer alone is not known"}
    differs, worst = 100 * (float(slope) / service_s - 1), float(np.abs(off).max()) / service_s
    explained = bool(worst <= SERVICE_SHARE and abs(differs) <= SERVICE_PERCENT)
    return result | {"difference_percent": differs, "worst_share": worst, "explained": explained}


# --- what bytes allow -------------------------------------------------------------------------------------------------


def own_bytes(config: dict[str, Any] | None, context: float, dtype: str | None) -> tuple[float | None, str]:
    """Bytes that one sequence moves in a step for itself alone: (bytes, "") or (None, reason).

    Keys and values of `context` tokens are read: full-attention layers x 2 x KV heads x head size x bytes x context; a linear-attention layer's
    state is read and written: 2 x value heads x key size x value size x 4 bytes (kept in float32). `config`: a Hugging Face configuration.
    """
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(str(dtype or "").removeprefix("torch."))
    if not config:
        return None, "the record does not hold the model's configuration"
    config = config.get("text_config", config)
    heads = config.get("num_attention_heads")
    size = config.get("head_dim") or (config["hidden_size"] / heads if heads and "hidden_size" in config else None)
    layers, kv_heads = config.get("num_hidden_layers"), config.get("num_key_value_heads", heads)
    if not (layers and kv_heads and size and width):
        return None, "the model's configuration lacks a size"
    kinds = config.get("layer_types") or ["full_attention"] * layers
    linear = sum(kind == "linear_attention" for kind in kinds)
    cache = (len(kinds) - linear) * 2 * kv_heads * size * width * context
    state = linear * 2 * 4 * math.prod(config.get(name, 0) for name in ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"))
    return cache + state, ""
