"""The numbers of one point, and whether they may be believed.

What:   `point_summary` turns the raw rows of one point into its numbers; `validity` checks the measurement itself.
        This module is also the one door to the statistics: it passes on `percentiles`, `samples` and `knee`.
Why:    a load generator rarely asks whether it kept up, whether the server agrees with it, and whether the point was
        steady. A number without these answers proves nothing.
Use:    point_summary(requests, chunks, metrics, request_rate=2.0, input_len=64, output_len=32)
        validity(requests, chunks, metrics, request_rate=2.0, input_len=64, output_len=32, prefix_caching=False)
Not:    reading records (`records`), drawing (`figures`), comparing runs. A check that passes does not prove a number
        right: Little's law, say, cannot see a client and a server that are slow together.

Frames: one point's rows (docs/decisions/0001). Times are int64 in units of `UNIT_S` seconds on one clock, a lost value
is null. Latencies are those of completed requests; a failed one does not make a point faster, it makes it invalid.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from .knee import DEFAULT_SLO, knee, next_rate
from .percentiles import RULE, needed, percentile, summarise
from .samples import (
    UNIT_S,
    counter_delta,
    first_s,
    gauge,
    last_s,
    request_stalls,
    sampling_s,
    series,
    steady_window,
    ticks,
    token_gaps,
)

__all__ = [
    "DEFAULT_SLO", "LATENCIES", "LIMITS", "RULE", "UNIT_S", "counter_delta", "gauge", "knee", "needed", "next_rate",
    "percentile", "point_summary", "request_stalls", "steady_window", "summarise", "token_gaps", "validity",
]

BURST_SHARE = 0.9  # of the requests, sent within the rest of the point's time, are a burst
FRONT_END_SHARE = 1 / 3  # of a burst's time may pass until the gauges know of it
LATENCIES = ("ttft", "tpot", "itl", "stall", "e2e", "client_delay")

# Limits of the validity checks, in one place so that a page can print them.
LIMITS = {
    "littles_law": 0.05,  # relative; the sampling allowance of `_littles_law` comes on top
    "arrival_rate": 0.05,  # relative; 5 / n comes on top, see `_arrival_rate`
    "prompt_length": 0.05,  # relative, mean prompt tokens against those asked for
    "client_delay_ms": 10.0,  # or `client_delay_of_ttft` of the median TTFT, whichever is larger
    "client_delay_of_ttft": 0.05,
    "drift_p": 0.01,  # the Mann-Whitney p below which two halves differ by more than chance ...
    "drift_effect": 0.15,  # ... and the distance of P(second half > first half) from 1/2 above which it matters
}
# NVML clock event reasons that slow a GPU against its will: hardware slowdown, software and hardware thermal slowdown,
# power brake. Idle, application clocks and the ordinary power cap (0x4) are how a healthy card behaves under load.
THROTTLE_BITS = 0x8 | 0x20 | 0x40 | 0x80


# --- one point --------------------------------------------------------------------------------------------------------


def point_summary(
    requests: pd.DataFrame, chunks: pd.DataFrame, metrics: pd.DataFrame | None,
    request_rate: float | None, input_len: int, output_len: int,
) -> dict[str, Any]:
    """All numbers of one point: counts, six latency summaries (`LATENCIES`), rates, the server's gauges and counters.

    Frames: rows of this point; `metrics` may reach beyond it, and should do so by one sample on either side.
    `request_rate` in requests/s, None or inf for a flood. Unknown values are None with a reason under `unknown`.

    ttft        first token - intended send time        client_delay  sent - intended
    e2e         end - intended                           tpot          (end - first token) / (output tokens - 1)
    itl         `token_gaps`                             stall         `request_stalls`

    completed_req_s and output_tok_s run from the first intended time to the last end, drain included. The steady rates
    count the tokens of all streams inside the steady window only, see `steady_window`; steady_offered_req_s the requests
    that were due in it.
    """
    done = requests[requests["outcome"] == "completed"]
    done_chunks = chunks[chunks["request"].isin(done["request"])]
    unknown: dict[str, str] = {}
    summary: dict[str, Any] = {
        "request_rate": None if _is_flood(request_rate) else float(request_rate),
        "input_len": int(input_len),
        "output_len": int(output_len),
        "num_requests": len(requests),
        "sent": int(requests["sent"].notna().sum()),
        **{outcome: int((requests["outcome"] == outcome).sum()) for outcome in ("completed", "failed", "cancelled")},
        "client_prompt_tokens": int(requests.loc[requests["sent"].notna(), "prompt_tokens"].sum()),
        "client_output_tokens": int(chunks["tokens"].sum()),
        "tokens_per_chunk": round(float(done_chunks["tokens"].mean()), 4) if len(done_chunks) else None,
    }

    intended, first, end = (ticks(done[name]) for name in ("intended", "first_token", "end"))
    after_first = done["output_tokens"].to_numpy(dtype=float, na_value=math.nan) - 1
    samples = {
        "ttft": (first - intended) * UNIT_S,
        "tpot": ((end - first) * UNIT_S)[after_first > 0] / after_first[after_first > 0],
        "itl": token_gaps(done_chunks),
        "stall": request_stalls(done_chunks),
        "e2e": (end - intended) * UNIT_S,
        "client_delay": (ticks(requests["sent"]) - ticks(requests["intended"])) * UNIT_S,
    }
    summary |= {name: summarise(sample) for name, sample in samples.items()}

    span_s = last_s(requests["end"]) - first_s(requests["intended"])
    summary["span_s"] = _rounded(span_s)
    if len(done) and span_s > 0:
        summary["completed_req_s"] = _rounded(len(done) / span_s)
        summary["output_tok_s"] = _rounded(float(done["output_tokens"].sum()) / span_s)
    else:
        summary |= {"completed_req_s": None, "output_tok_s": None}
        unknown["completed_req_s"] = unknown["output_tok_s"] = "no request completed"

    window, why_not = steady_window(requests)
    steady = ("steady_window_s", "steady_output_tok_s", "steady_req_s", "steady_offered_req_s")
    summary |= dict.fromkeys(steady)
    if window is None:
        unknown |= dict.fromkeys(steady, why_not)
    else:
        time = ticks(chunks["time"]) * UNIT_S
        # Half open: the window starts with the end of a request, whose last chunk belongs to the time before.
        streamed = float(chunks["tokens"].to_numpy()[(time > window[0]) & (time <= window[1])].sum())
        rate = streamed / (window[1] - window[0])
        summary["steady_window_s"] = [_rounded(window[0]), _rounded(window[1])]
        summary["steady_output_tok_s"] = _rounded(rate)
        summary["steady_req_s"] = _rounded(rate / float(done["output_tokens"].mean()))
        due = ticks(requests["intended"]) * UNIT_S
        summary["steady_offered_req_s"] = _rounded(float(((due > window[0]) & (due <= window[1])).sum()) / (window[1] - window[0]))

    summary["gauge_window"] = "whole point" if window is None else "steady window"
    bounds = window or (first_s(requests["sent"]), last_s(requests["end"]))
    for name in ("running", "waiting", "kv_cache_usage"):
        mean, top, why_not = gauge(metrics, name, *bounds)
        summary |= {f"{name}_mean": _rounded(mean), f"{name}_max": _rounded(top)}
        if why_not:
            unknown[f"{name}_mean"] = unknown[f"{name}_max"] = why_not
    for key, name in (("preemptions", "preemptions_total"), ("server_prompt_tokens", "prompt_tokens_total"),
                      ("server_output_tokens", "generation_tokens_total")):
        summary[key], why_not = counter_delta(metrics, name, first_s(requests["sent"]), last_s(requests["end"]))
        if why_not:
            unknown[key] = why_not
    return summary | {"percentile_rule": RULE, "unknown": unknown}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), 6)


def _is_flood(request_rate: float | None) -> bool:
    return request_rate is None or math.isinf(request_rate)


# --- validity ---------------------------------------------------------------------------------------------------------


def validity(
    requests: pd.DataFrame, chunks: pd.DataFrame, metrics: pd.DataFrame | None,
    request_rate: float | None, input_len: int, output_len: int,
    *, num_prompts: int | None = None, prefix_caching: bool | None = None,
) -> dict[str, Any]:
    """Whether the measurement of one point may be believed: {"valid", "reasons", "not_made", "checks"}.

    Arguments as for `point_summary`; `num_prompts` is the number asked for, `prefix_caching` what the server runs with
    (None: unknown). Each check is {"ok", "value", "limit", "note"}: ok is None with the reason in `note` where it
    cannot be made, which is never a pass and never a breach; `not_made` lists these. `reasons` holds the names of the
    breached checks and decides `valid`. `drift` is informative: above the knee a queue that grows is the result, not an
    error of measurement.
    """
    point = (requests, chunks, metrics)
    checks = {
        "conservation": _conservation(requests, num_prompts),
        "failures": _counted(requests["outcome"].isin(["failed", "cancelled"]).sum(), "requests failed or cancelled"),
        "time_order": _time_order(requests, chunks),
        "output_length": _output_length(requests, output_len),
        "stream_tokens": _stream_tokens(requests, chunks),
        "prompt_length": _prompt_length(requests, input_len),
        "prompt_tokens": _server_tokens(*point, "prompt_tokens_total"),
        "output_tokens": _server_tokens(*point, "generation_tokens_total"),
        "littles_law": _littles_law(*point),
        "arrival_rate": _arrival_rate(requests, request_rate),
        "client_delay": _client_delay(requests),
        "throttle": _throttle(requests, metrics),
        "prefix_cache": _check(None if prefix_caching is None else not prefix_caching, prefix_caching, False,
                               "the server did not say whether it caches prefixes" if prefix_caching is None else
                               "a repeated prompt would cost less than a new one" if prefix_caching else "off"),
        "drift": _drift(requests) | {"informative": True},
    }
    reasons = [name for name, check in checks.items() if check["ok"] is False and not check.get("informative")]
    return {"valid": not reasons, "reasons": reasons,
            "not_made": [name for name, check in checks.items() if check["ok"] is None], "checks": checks}


def verdict(requests: pd.DataFrame, chunks: pd.DataFrame, metrics: pd.DataFrame | None, shape: tuple[float | None, int, int], *,
            num_prompts: int | None, prefix_caching: bool | None) -> dict[str, Any]:
    """{"summary", "validity"} of one point, as its document holds them. The summary is over the public's requests: not over injected prompts.

    `shape`: request_rate, input_len, output_len; the rest as for `validity`.
    """
    public = requests[requests["role"] != "injected"] if "role" in requests else requests  # records of before have no roles
    return {"summary": point_summary(public, chunks[chunks["request"].isin(public["request"])], metrics, *shape),
            "validity": validity(requests, chunks, metrics, *shape, num_prompts=num_prompts, prefix_caching=prefix_caching)}


def _check(ok: bool | None, value: Any, limit: Any, note: str) -> dict[str, Any]:
    return {"ok": None if ok is None else bool(ok), "value": value, "limit": limit, "note": note}


def _counted(count: int, what: str) -> dict[str, Any]:
    """A check that counts offenders, none of which is allowed."""
    return _check(count == 0, int(count), 0, f"{count} {what}")


def _conservation(requests: pd.DataFrame, num_prompts: int | None) -> dict[str, Any]:
    """Every request that was asked for is in the record and has an outcome, and only cancelled ones were never sent."""
    known = requests["outcome"].isin(["completed", "failed", "cancelled"])
    lost = int((~known).sum() + (requests["sent"].isna() & (requests["outcome"] != "cancelled") & known).sum())
    missing = 0 if num_prompts is None else abs(num_prompts - len(requests))
    counts = ", ".join(f"{(requests['outcome'] == name).sum()} {name}" for name in ("completed", "failed", "cancelled"))
    asked = len(requests) if num_prompts is None else num_prompts
    return _check(lost + missing == 0, lost + missing, 0,
                  f"{asked} asked for, {requests['sent'].notna().sum()} sent: {counts}")


def _time_order(requests: pd.DataFrame, chunks: pd.DataFrame) -> dict[str, Any]:
    """Intended <= sent <= first token <= end for each completed request, and its chunks between the last two: one
    clock."""
    done = requests[requests["outcome"] == "completed"].set_index("request")
    intended, sent, first, end = (ticks(done[name]) for name in ("intended", "sent", "first_token", "end"))
    early = 1e-3 / UNIT_S  # a timer may fire up to a millisecond early
    # A lost time is NaN, compares false, and so counts as out of order.
    in_order = (intended <= sent + early) & (sent <= first) & (first <= end)
    time = pd.Series(ticks(chunks["time"])).groupby(chunks["request"].to_numpy())
    inside = (time.min().reindex(done.index) >= first) & (time.max().reindex(done.index) <= end)
    out_of_order = ~(in_order & inside.to_numpy())
    return _counted(out_of_order.sum(), "completed requests whose times are lost or out of order")


def _output_length(requests: pd.DataFrame, output_len: int) -> dict[str, Any]:
    """A point of mixed requests says in `asked_output_tokens` what each was to write; otherwise all write `output_len`."""
    asked = requests.get("asked_output_tokens", output_len)
    other = (requests["outcome"] == "completed") & (requests["output_tokens"] != asked)
    return _counted(other.sum(), "completed requests without exactly the output tokens asked for")


def _stream_tokens(requests: pd.DataFrame, chunks: pd.DataFrame) -> dict[str, Any]:
    """Tokens in the chunks of each completed request against the count that came with its end."""
    done = requests[requests["outcome"] == "completed"].set_index("request")["output_tokens"]
    streamed = chunks.groupby("request")["tokens"].sum().reindex(done.index, fill_value=0)
    return _counted((streamed != done).sum(), "completed requests whose chunks do not add up to their output tokens")


def _prompt_length(requests: pd.DataFrame, input_len: int) -> dict[str, Any]:
    counted = requests[requests["prompt_tokens"].notna()]
    mean, asked = counted["prompt_tokens"].mean(), counted["asked_prompt_tokens"].mean() if "asked_prompt_tokens" in counted else input_len
    if pd.isna(mean) or pd.isna(asked) or not asked:
        return _check(None, None, LIMITS["prompt_length"], "no prompt token counts")
    off = float(mean) / float(asked) - 1
    return _check(abs(off) <= LIMITS["prompt_length"], _rounded(off), LIMITS["prompt_length"],
                  f"prompts have {mean:.1f} tokens on average, {asked:.1f} asked for")


def _server_tokens(
    requests: pd.DataFrame, chunks: pd.DataFrame, metrics: pd.DataFrame | None, counter: str
) -> dict[str, Any]:
    """The tokens the client counted against the gain of the server's counter; they must be equal."""
    gain, why_not = counter_delta(metrics, counter, first_s(requests["sent"]), last_s(requests["end"]))
    if why_not:
        return _check(None, None, 0, why_not)
    if (requests["outcome"] != "completed").any():
        return _check(None, None, 0, "the server may have worked for requests that did not complete")
    client = int(requests["prompt_tokens"].sum() if counter.startswith("prompt") else chunks["tokens"].sum())
    return _check(client == gain, client - gain, 0, f"client {client}, server {gain}")


def _littles_law(requests: pd.DataFrame, chunks: pd.DataFrame, metrics: pd.DataFrame | None) -> dict[str, Any]:
    """Little's law: requests in flight, averaged by the server's gauges, against the client's sum of latencies / span.

    Both run from the first send to the last end and count from `sent`, since the server cannot see a request earlier.
    The value is the relative distance from the band the server's average may lie in, 0 inside it.
    * Upper end: sum of (end - sent) / span, which is exact for the client.
    * Lower end: vLLM refreshes its gauges when an engine step ends, and takes new requests in between two steps, so
      that a request is invisible until the end of the step after the one in which it came: its own prefill, unless it
      has to queue. The client sees steps end, because each brings chunks; that time is taken off each latency.
    A burst, all requests at once, has to pass the server's front end first, which reads and tokenizes one prompt after
    another and answers for the gauges too. Where the law fails over the whole point, it is tested from the sample on at
    which the gauges have caught up with the client, to within the limit; that must happen in the first third.
    Limit: 5 % and three standard errors of sampling. A request is counted at samples dt apart, its start at a random
    phase: a variance of dt^2/6 each. Requests that come or go together (a flood, a batch that ends) are not
    independent: a change of k between two samples adds (k dt)^2/12, the variance of a change at a uniformly random
    moment.
    """
    sent_requests = requests[requests["sent"].notna()]
    if sent_requests.empty or sent_requests["end"].isna().any():
        why_not = "a request without a known end has no latency" if len(sent_requests) else "no request was sent"
        return _check(None, None, LIMITS["littles_law"], why_not)
    sent, ended = ticks(sent_requests["sent"]) * UNIT_S, ticks(sent_requests["end"]) * UNIT_S
    visible = np.minimum(_second_step_end(requests, chunks) * UNIT_S, ended)
    start, end = sent.min(), ended.max()
    law = _law(metrics, sent, visible, ended, start, end, LIMITS["littles_law"])
    is_burst = np.quantile(sent, BURST_SHARE) < start + (1 - BURST_SHARE) * (end - start)
    if law["ok"] is not False or not is_burst:
        return law
    begin = _caught_up(metrics, sent, ended)
    if begin is None or begin - start > FRONT_END_SHARE * (end - start):
        return law
    # What the gauges may still lag behind at that moment comes on top.
    later = _law(metrics, sent, visible, ended, begin, end, 2 * LIMITS["littles_law"])
    return later | {"note": f"{later['note']}; from {begin - start:.2f} s on, when the front end had passed the burst on"}


def _law(metrics: pd.DataFrame | None, sent: np.ndarray, visible: np.ndarray, ended: np.ndarray, start: float, end: float,
         limit: float) -> dict[str, Any]:
    """The law over [start, end]; times in seconds, one entry a request."""
    averages = [gauge(metrics, name, start, end) for name in ("running", "waiting")]
    if why_not := next((reason for _, _, reason in averages if reason), ""):
        return _check(None, None, limit, why_not)
    server = sum(mean for mean, _, _ in averages)
    latency = np.maximum(ended - np.maximum(sent, start), 0.0)
    invisible = np.clip(visible - np.maximum(sent, start), 0.0, latency)
    upper, lower = latency.sum() / (end - start), (latency - invisible).sum() / (end - start)

    time, in_flight = _in_flight(metrics)
    within = (time >= start) & (time <= end)
    steps = np.diff(time[within])
    variance = sampling_s(time) ** 2 * len(latency) / 6 + ((steps * np.diff(in_flight[within])) ** 2).sum() / 12
    limit += 3 * math.sqrt(variance) / latency.sum()
    off = max(server - upper, 0.0) - max(lower - server, 0.0)
    return _check(abs(off) / upper <= limit, _rounded(off / upper), _rounded(limit),
                  f"server {server:.2f} in flight on average, client {upper:.2f} ({lower:.2f} visible to the gauges)")


def _in_flight(metrics: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Times of the samples in seconds, and running and waiting requests together."""
    time, running, _ = series(metrics, "running")
    waiting_time, waiting, _ = series(metrics, "waiting")
    return time, running + np.interp(time, waiting_time, waiting)


def _caught_up(metrics: pd.DataFrame, sent: np.ndarray, ended: np.ndarray) -> float | None:
    """The time of the first sample that shows the client's number of requests under way, but for the limit; None for none."""
    time, in_flight = _in_flight(metrics)
    under_way = np.searchsorted(np.sort(sent), time, side="right") - np.searchsorted(np.sort(ended), time, side="right")
    near = (under_way > 0) & (in_flight >= (1 - LIMITS["littles_law"]) * under_way)
    return float(time[near][0]) if near.any() else None


def _second_step_end(requests: pd.DataFrame, chunks: pd.DataFrame) -> np.ndarray:
    """For each sent request, in record units: when the second engine step to end after its sending ended, or its first
    token.

    Chunks of one step reach the client within a moment of each other, so a step counts as over once half a median token
    gap has passed since its first chunk. A request that is sent while a step ends (the next one of a closed loop, as a
    rule) reaches the engine when the following step has begun, so that the step that was ending does not count.
    """
    sent_requests = requests[requests["sent"].notna()]
    sent, first = ticks(sent_requests["sent"]), ticks(sent_requests["first_token"])
    gaps = token_gaps(chunks)
    half_step = np.median(gaps[gaps > 0]) / 2 / UNIT_S if (gaps > 0).any() else 0.0
    step_ends = np.append(np.sort(ticks(chunks["time"])), np.inf)
    next_end = step_ends[np.searchsorted(step_ends, sent + half_step, side="right")]
    after_next = step_ends[np.minimum(np.searchsorted(step_ends, next_end + half_step), step_ends.size - 1)]
    return np.fmin(after_next, first)


def _arrival_rate(requests: pd.DataFrame, request_rate: float | None) -> dict[str, Any]:
    """Rate of the send times against the rate asked for, as a ratio.

    vLLM's generator stretches its Poisson arrivals so that the last of n falls at n / rate. The n - 1 gaps after the
    first arrival therefore differ from the asked rate only by the first gap, 1/n in the mean and above 5/n once in 150:
    this, and 5 %.
    """
    if _is_flood(request_rate):
        return _check(None, None, None, "all requests are sent at once: there is no rate to keep")
    sent = requests["sent"].notna().sum()
    span = last_s(requests["sent"]) - first_s(requests["sent"])
    if sent < 2 or not span > 0:
        return _check(None, None, None, f"{sent} requests sent: no gap to measure")
    achieved, limit = (sent - 1) / span, LIMITS["arrival_rate"] + 5 / sent
    return _check(abs(achieved / request_rate - 1) <= limit, _rounded(achieved / request_rate), _rounded(limit),
                  f"{achieved:.3f} requests/s sent, {request_rate:g} asked for")


def _client_delay(requests: pd.DataFrame) -> dict[str, Any]:
    """The client's own delay, sent - intended: its p99 (the largest below 100 requests), in milliseconds.

    Limit: 10 ms, or 5 % of the median TTFT where that is more. TTFT counts from the intended time, so the delay is
    inside it.
    """
    delay = percentile((ticks(requests["sent"]) - ticks(requests["intended"])) * UNIT_S, 99)
    ttft = percentile((ticks(requests["first_token"]) - ticks(requests["intended"])) * UNIT_S, 50)
    limit = max(LIMITS["client_delay_ms"], LIMITS["client_delay_of_ttft"] * (ttft or 0.0) * 1e3)
    if delay is None:
        return _check(None, None, limit, "no request was sent")
    return _check(delay * 1e3 <= limit, _rounded(delay * 1e3), _rounded(limit),
                  f"p99 of sent - intended: {delay * 1e3:.2f} ms")


def _throttle(requests: pd.DataFrame, metrics: pd.DataFrame | None) -> dict[str, Any]:
    """Share of the point's samples in which the GPU was slowed by heat, by hardware protection or by a power brake."""
    time, value, why_not = series(metrics, "gpu_throttle_reasons")
    within = (time >= first_s(requests["sent"])) & (time <= last_s(requests["end"]))
    if why_not or not within.any():
        return _check(None, None, 0, "the record has no clock event reasons" if why_not else "no sample in the point")
    bits = value[within].astype(np.int64)
    slowed = float(((bits & THROTTLE_BITS) != 0).mean())
    return _check(slowed == 0, _rounded(slowed), 0, f"slowed in {slowed:.0%} of {bits.size} samples; "
                  f"at the ordinary power cap in {((bits & 0x4) != 0).mean():.0%}")


def _drift(requests: pd.DataFrame) -> dict[str, Any]:
    """First against second half of the arrivals, TTFT and E2E: ok means steady, not ok means drifting.

    Drifting: the halves differ by more than chance (Mann-Whitney p < 0.01) and by enough to matter: P(a request of the
    second half is slower than one of the first) is more than 0.15 from 1/2. Both, because p alone calls any difference
    drift once n is large, and because neighbours depend on one another, which makes p too small.
    """
    done = requests[requests["outcome"] == "completed"].sort_values("intended", kind="stable")
    if len(done) < 20:
        return _check(None, None, LIMITS["drift_effect"], f"{len(done)} completed requests, two halves need 20")
    drifting, notes, worst = False, [], 0.5
    for name, until in (("TTFT", "first_token"), ("E2E", "end")):
        latency = (ticks(done[until]) - ticks(done["intended"])) * UNIT_S
        first, second = latency[: len(done) // 2], latency[len(done) // 2 :]
        test = scipy_stats.mannwhitneyu(second, first, nan_policy="omit")
        slower = float(test.statistic) / (first.size * second.size)
        drifting |= bool(test.pvalue < LIMITS["drift_p"] and abs(slower - 0.5) > LIMITS["drift_effect"])
        worst = max(worst, slower, key=lambda share: abs(share - 0.5))
        notes.append(f"median {name} {np.nanmedian(first):.3g} s, then {np.nanmedian(second):.3g} s")
    verdict = "drifting" if drifting else "steady"
    return _check(not drifting, _rounded(worst - 0.5), LIMITS["drift_effect"], f"{verdict}: " + "; ".join(notes))
