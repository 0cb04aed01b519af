"""From the raw rows of one point to samples: token gaps, stalls, the steady window, gauges and counters over time.

What:   pure functions over the `requests`, `chunks` and `metrics` frames of docs/decisions/0001: times are int64 in
        units of `UNIT_S` on the run's clock, a lost value is null.
Why:    what counts as a gap, and over which stretch of time an average runs, decides the result more than the averaging
        does. These choices stand here, each with its reason.
Use:    token_gaps(chunks); request_stalls(chunks); steady_window(requests); gauge(metrics, "running", 3.0, 20.0)
Not:    percentiles (`percentiles`), the summary of a point and its validity (`stats`), trends of a queue over time.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

UNIT_S = 1e-5  # one unit of a time column of the record, in seconds


def token_gaps(chunks: pd.DataFrame) -> np.ndarray:
    """Pooled inter-token gaps in seconds, 1-d: one value for each token of each request after its first token.

    `chunks`: columns request, time (units of `UNIT_S`), tokens. A chunk with k tokens that arrives d after the one
    before counts as one gap of d and k - 1 gaps of 0, because the reader saw its tokens at once. Sharing d out as k
    gaps of d/k would invent arrival times that nobody saw, and would shrink a stall by k exactly when the server
    bundles tokens after one. Both ways add up to the same time, so the mean is the same. Here the median falls to 0
    once half of the tokens arrive bundled, and the tail keeps its worst gap; `tokens_per_chunk` of `point_summary` says
    when this matters. The first chunk's arrival is TTFT and never a gap.
    """
    ordered = _ordered(chunks)
    tokens = ordered["tokens"].to_numpy(int)
    within = ~_first_of_request(ordered)
    between = np.diff(ticks(ordered["time"]), prepend=0)[within] * UNIT_S
    return np.concatenate([between, np.zeros(int((tokens - 1).sum()))])


def request_stalls(chunks: pd.DataFrame) -> pd.Series:
    """The worst stall of each request: its longest gap between two chunks, in seconds, indexed by request.

    TTFT is never included, so a request whose tokens came in a single chunk has no stall and is absent.
    """
    ordered = _ordered(chunks)
    gaps = pd.Series(np.diff(ticks(ordered["time"]), prepend=0) * UNIT_S, name="stall")
    within = ~_first_of_request(ordered)
    return gaps[within].groupby(ordered["request"][within]).max()


def _ordered(chunks: pd.DataFrame) -> pd.DataFrame:
    with_tokens = chunks[chunks["tokens"] > 0]  # a role-only or empty event is not a token
    return with_tokens.sort_values(["request", "time"], kind="stable", ignore_index=True)


def _first_of_request(ordered: pd.DataFrame) -> np.ndarray:
    request = ordered["request"].to_numpy()
    return np.concatenate([[True], request[1:] != request[:-1]])[: request.size]


def ticks(column: pd.Series) -> np.ndarray:
    """A time column as float64 in record units, NaN where lost: exact up to 2**53 units, that is 2,800 years."""
    return pd.to_numeric(column).to_numpy(dtype=float, na_value=math.nan)


def steady_window(requests: pd.DataFrame) -> tuple[tuple[float, float] | None, str]:
    """The stretch of a point without ramp and drain, in seconds on the run's clock: ((start, end), "") or (None,
    reason).

    It starts with the first completion (before, seats fill and nothing leaves) and ends with the last completion while
    requests still arrive or start (after, seats empty and nothing enters): both ends are completions, so that a flood,
    whose requests run in step, is cut into whole waves, and no prefill is counted without its decode. It must be at
    least as long as the mean request streams, so that every seat changes hands about once in it. (Not the mean time in
    the server: in a flood that contains the wait in the queue and grows with the number of prompts.)
    """
    done = requests[(requests["outcome"] == "completed") & requests["end"].notna() & requests["first_token"].notna()]
    if done.empty:
        return None, "no request completed"
    ends = ticks(done["end"]) * UNIT_S
    busy_until = max(last_s(requests["intended"]), last_s(done["first_token"]))
    start, end = ends.min(), ends[ends <= busy_until].max(initial=-math.inf)
    streaming = float((ticks(done["end"]) - ticks(done["first_token"])).mean()) * UNIT_S
    if end <= start:
        return None, "no steady window: no two requests completed one after the other before the last arrival or start"
    if end - start < streaming:
        return None, (f"the steady window, between the first and the last completion before the load ends, lasts "
                      f"{end - start:.2f} s, less than the {streaming:.2f} s for which a mean request streams")
    return (float(start), float(end)), ""


def gauge(
    metrics: pd.DataFrame | None, name: str, start_s: float, end_s: float
) -> tuple[float | None, float | None, str]:
    """Time-weighted mean and maximum of a sampled gauge in [start_s, end_s]: (mean, max, "") or (None, None, reason).

    Between two samples the gauge is taken to change evenly (trapezoid rule), so that uneven sampling does not weigh
    busy moments more. The samples must cover the interval: a stretch without a sample, at an end or in the middle,
    longer than five sampling intervals and a tenth of the interval is a hole, and makes the result unknown.
    """
    time, value, why_not = series(metrics, name)
    if why_not:
        return None, None, why_not
    if not end_s > start_s:
        return None, None, "the interval is empty"
    inside = (time > start_s) & (time < end_s)
    if inside.sum() < 2:
        return None, None, f"{inside.sum()} samples of {name} in {end_s - start_s:.2f} s, needs 2"
    # Where no sample lies beyond an end, np.interp holds the nearest one inside.
    x = np.concatenate([[start_s], time[inside], [end_s]])
    y = np.interp(x, time, value)
    hole = float(np.diff(x).max())
    if hole > max(5 * sampling_s(time), 0.1 * (end_s - start_s)):
        return None, None, f"no sample of {name} for {hole:.1f} s of the interval's {end_s - start_s:.1f} s"
    return float(np.trapezoid(y, x) / (end_s - start_s)), float(y.max()), ""


def counter_delta(metrics: pd.DataFrame | None, name: str, start_s: float, end_s: float) -> tuple[int | None, str]:
    """What a counter gained over [start_s, end_s]: (gain, "") or (None, reason). Needs a sample at or before and one at
    or after."""
    time, value, why_not = series(metrics, name)
    if why_not:
        return None, why_not
    if math.isnan(start_s) or math.isnan(end_s):
        return None, "no request was sent and ended"
    before, after = np.flatnonzero(time <= start_s), np.flatnonzero(time >= end_s)
    if not before.size or not after.size:
        return None, f"no sample of {name} {'before the first request' if not before.size else 'after the last end'}"
    window = value[before[-1] : after[0] + 1]
    if (np.diff(window) < 0).any():
        return None, f"{name} went down: the server was restarted within the point"
    return round(window[-1] - window[0]), ""


def series(metrics: pd.DataFrame | None, name: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Times in seconds and values of one metric, without its missing samples; or a reason."""
    nothing = np.empty(0)
    if metrics is None or metrics.empty:
        return nothing, nothing, "no samples of /metrics"
    if name not in metrics or metrics[name].isna().all():
        return nothing, nothing, f"this server exposes no {name}"
    known = metrics[metrics[name].notna()].sort_values("time")
    return ticks(known["time"]) * UNIT_S, known[name].to_numpy(float), ""


def sampling_s(time: np.ndarray) -> float:
    """Median distance of sample times, inf for fewer than two."""
    return float(np.median(np.diff(time))) if time.size > 1 else math.inf


def first_s(column: pd.Series) -> float:
    """Earliest time of a column in seconds, NaN where none is known."""
    return float(ticks(column.dropna()).min()) * UNIT_S if column.notna().any() else math.nan


def last_s(column: pd.Series) -> float:
    """Latest time of a column in seconds, NaN where none is known."""
    return float(ticks(column.dropna()).max()) * UNIT_S if column.notna().any() else math.nan
