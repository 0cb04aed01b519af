"""Statistics: percentiles, token gaps, summaries, validity and the knee, against results worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from inference_wall import stats
from inference_wall.percentiles import PERCENTILES

REQUEST_COLUMNS = [
    "request", "intended", "sent", "first_token", "end", "prompt_tokens", "output_tokens", "outcome",
]


def ticks(seconds):
    """Seconds to the record's unit, None kept."""
    return None if seconds is None else round(seconds / stats.UNIT_S)


def make_requests(rows):
    """Requests from (intended, sent, first token, end) in seconds, prompt tokens, output tokens, outcome."""
    frame = pd.DataFrame(
        [(i, *map(ticks, times), prompt, output, outcome) for i, (times, prompt, output, outcome) in enumerate(rows)],
        columns=REQUEST_COLUMNS,
    )
    for name in ("intended", "sent", "first_token", "end"):
        frame[name] = frame[name].astype("Int64")
    return frame


def make_chunks(streams):
    """Chunks from {request: [(seconds, tokens), ...]}."""
    rows = [(request, ticks(time), tokens) for request, stream in streams.items() for time, tokens in stream]
    return pd.DataFrame(rows, columns=["request", "time", "tokens"])


def make_metrics(times, **columns):
    return pd.DataFrame({"time": [ticks(time) for time in times], **columns})


# --- percentiles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "n"), [(50, 5), (90, 29), (95, 59), (99, 299), (99.9, 2995), (10, 29), (1, 299)])
def test_needed(p, n):
    assert stats.needed(p) == n
    share = max(p, 100 - p) / 100
    assert 1 - share**n >= 0.95 > 1 - share ** (n - 1)


def test_needed_at_another_confidence():
    assert stats.needed(99, confidence=0.99) == 459  # the floor of mlcommons/endpoints


def test_the_rule_states_the_true_sample_sizes():
    for p in PERCENTILES:
        assert f"p{p} " in stats.RULE and str(stats.needed(p)) in stats.RULE


@pytest.mark.parametrize(
    ("values", "p", "expected"),
    [
        ([1, 2, 3, 4], 50, 2),  # half of the samples are at or below 2; numpy's default would say 2.5
        ([1, 2, 3, 4], 51, 3),
        ([4, 1, 3, 2], 75, 3),
        (range(1, 101), 99, 99),
        (range(1, 101), 99.5, 100),
        ([7], 99, 7),
        ([3, math.nan, None, 1], 50, 1),
        ([], 50, None),
        ([math.nan], 50, None),
    ],
)
def test_percentile(values, p, expected):
    assert stats.percentile(values, p) == expected


@pytest.mark.parametrize("p", [0, 100, -1, 101, math.nan])
def test_a_percentile_outside_its_range_is_an_error(p):
    with pytest.raises(ValueError, match="between 0 and 100"):
        stats.percentile([1.0, 2.0], p)


@pytest.mark.parametrize("seed", range(20))
def test_a_percentile_is_an_observed_value_and_monotone(seed):
    random = np.random.default_rng(seed)
    sample = random.lognormal(size=random.integers(1, 400))
    found = [stats.percentile(sample, p) for p in (1, 10, 50, 90, 99)]
    assert found == sorted(found)
    assert set(found) <= set(sample)
    for p, value in zip((1, 10, 50, 90, 99), found, strict=True):
        assert (sample <= value).mean() >= p / 100 > (sample < value).mean()


def test_summary_of_forty_refuses_p99():
    summary = stats.summarise(np.arange(1, 41) / 1000)  # 1 to 40 ms
    assert (summary["n"], summary["mean_ms"], summary["max_ms"]) == (40, 20.5, 40.0)
    assert (summary["p50_ms"], summary["p90_ms"], summary["p99_ms"]) == (20.0, 36.0, None)
    assert summary["withheld"] == {"p99": "n = 40, needs 299"}
    assert "p99" not in summary["intervals"]


def test_the_interval_by_hand():
    """n = 10, median: P(Bin(10, 1/2) <= 1) = 11/1024 <= 2.5 % < P(<= 2), so the 2nd and the 9th sample."""
    summary = stats.summarise([v / 1000 for v in range(1, 11)])
    assert summary["intervals"]["p50"] == [2.0, 9.0]


@pytest.mark.parametrize("n", [29, 35, 36, 299, 367, 368, 1000])
def test_intervals_follow_the_binomial(n):
    summary = stats.summarise(np.arange(1, n + 1) / 1000)
    for name, (low, high) in summary["intervals"].items():
        q = float(name[1:]) / 100
        ranks = np.arange(0, n + 1)
        below = ranks[scipy_stats.binom.cdf(ranks - 1, n, q) < 0.025].max()  # lower end: the rank-th smallest
        above = ranks[scipy_stats.binom.cdf(ranks - 1, n, q) >= 0.975]
        assert low == (below if below >= 1 else None)
        assert high == (above.min() if above.size else None)


@pytest.mark.parametrize(("n", "finite"), [(299, False), (367, False), (368, True)])
def test_an_upper_end_that_n_cannot_give_is_null(n, finite):
    low, high = stats.summarise(np.arange(n) / 1000)["intervals"]["p99"]
    assert low is not None
    assert (high is not None) is finite


def test_coverage_of_the_interval():
    """The true p90 lies inside the interval in about 95 % of independent samples (error of 400 trials: 1 %)."""
    random = np.random.default_rng(7)
    truth = 1e3 * math.exp(0.5 * scipy_stats.norm.ppf(0.9))
    hits = 0
    for _ in range(400):
        low, high = stats.summarise(random.lognormal(sigma=0.5, size=200))["intervals"]["p90"]
        hits += low <= truth <= high
    assert 0.93 <= hits / 400 <= 0.99


@pytest.mark.parametrize(("values", "n"), [([], 0), ([math.nan, None], 0), ([0.25], 1)])
def test_tiny_samples(values, n):
    summary = stats.summarise(values)
    assert summary["n"] == n
    assert summary["p50_ms"] is summary["p90_ms"] is summary["p99_ms"] is None
    assert summary["withheld"]["p50"] == f"n = {n}, needs 5"
    assert summary["mean_ms"] == summary["max_ms"] == (250.0 if n else None)
    assert ("empty" in summary) is (n == 0)
    json.dumps(summary, allow_nan=False)


# --- token gaps -------------------------------------------------------------------------------------------------------

BUNDLED = {
    0: [(1.0, 1), (1.1, 1), (1.3, 1)],  # gaps 0.1 and 0.2
    1: [(2.0, 2), (2.4, 3)],  # first chunk brings two tokens: gaps 0, 0.4, 0, 0
    2: [(5.0, 1)],  # one token: no gap
}


def test_token_gaps_by_hand():
    assert sorted(np.round(stats.token_gaps(make_chunks(BUNDLED)), 9)) == [0, 0, 0, 0.1, 0.2, 0.4]


def test_gaps_add_up_to_the_streaming_time_and_count_to_the_tokens():
    random = np.random.default_rng(3)
    streams = {
        request: [(float(t), int(k)) for t, k in zip(np.cumsum(random.exponential(0.1, 20)) + request,
                                                      random.integers(1, 4, 20), strict=True)]
        for request in range(30)
    }
    gaps = stats.token_gaps(make_chunks(streams))
    assert gaps.size == sum(sum(k for _, k in s) - 1 for s in streams.values())
    assert gaps.sum() == pytest.approx(sum(s[-1][0] - s[0][0] for s in streams.values()), abs=1e-3)
    assert (gaps >= 0).all()


def test_gaps_do_not_depend_on_the_order_of_rows_and_ignore_empty_events():
    chunks = make_chunks(BUNDLED)
    empty = pd.DataFrame({"request": [0], "time": [ticks(0.2)], "tokens": [0]})
    shuffled = pd.concat([chunks.sample(frac=1, random_state=1), empty])
    assert sorted(stats.token_gaps(shuffled)) == sorted(stats.token_gaps(chunks))


def test_no_chunks_no_gaps():
    assert stats.token_gaps(make_chunks({})).size == 0
    assert stats.request_stalls(make_chunks({})).empty


def test_the_worst_stall_of_each_request():
    stalls = stats.request_stalls(make_chunks(BUNDLED))
    assert stalls.round(9).to_dict() == {0: 0.2, 1: 0.4}  # request 2 has a single chunk; TTFT never counts


# --- one point --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_point():
    """Four requests: two complete, one fails after two tokens, one ends early (3 of 4 tokens)."""
    requests = make_requests([
        ((0.0, 0.010, 1.0, 4.0), 10, 4, "completed"),
        ((1.0, 1.020, 2.0, 8.0), 10, 4, "completed"),
        ((2.0, 2.000, 3.0, None), 10, 2, "failed"),
        ((8.0, 8.000, 9.0, 11.0), 10, 3, "completed"),
    ])
    chunks = make_chunks({
        0: [(1.0, 1), (2.0, 1), (4.0, 2)],
        1: [(2.0, 1), (3.0, 1), (4.5, 1), (8.0, 1)],
        2: [(3.0, 1), (3.5, 1)],
        3: [(9.0, 1), (10.0, 1), (11.0, 1)],
    })
    metrics = make_metrics(
        [-1, 1, 3, 5, 7, 9, 11, 12],
        running=[0, 1, 3, 1, 0, 1, 1, 0], waiting=[0.0] * 8, kv_cache_usage=[0, 0.1, 0.3, 0.1, 0, 0.1, 0.1, 0],
        preemptions_total=[5, 5, 5, 6, 6, 7, 7, 7], prompt_tokens_total=[100, 110, 130, 130, 130, 140, 140, 140],
        generation_tokens_total=[0, 1, 5, 10, 10, 11, 13, 13],
    )
    return requests, chunks, metrics


def test_point_summary_by_hand(small_point):
    summary = stats.point_summary(*small_point, request_rate=0.5, input_len=10, output_len=4)
    assert {name: summary[name] for name in ("num_requests", "sent", "completed", "failed", "cancelled")} == {
        "num_requests": 4, "sent": 4, "completed": 3, "failed": 1, "cancelled": 0}
    # From the intended time: 1.0, 1.0, 1.0; from the sent time it would be 0.99, 0.98, 1.0.
    assert (summary["ttft"]["n"], summary["ttft"]["mean_ms"]) == (3, 1000.0)
    assert summary["e2e"]["mean_ms"] == pytest.approx((4 + 7 + 3) / 3 * 1e3, abs=1e-3)
    assert summary["tpot"]["mean_ms"] == pytest.approx((3 / 3 + 6 / 3 + 2 / 2) / 3 * 1e3, abs=1e-3)
    # Completed requests only: {1, 2, 0}, {1, 1.5, 3.5}, {1, 1}; without the failed request's 0.5.
    assert (summary["itl"]["n"], summary["itl"]["mean_ms"]) == (8, 1375.0)
    assert (summary["stall"]["n"], summary["stall"]["max_ms"]) == (3, 3500.0)
    assert summary["stall"]["mean_ms"] == pytest.approx((2 + 3.5 + 1) / 3 * 1e3, abs=1e-3)
    assert (summary["client_delay"]["n"], summary["client_delay"]["max_ms"]) == (4, 20.0)
    # 3 requests and 11 tokens between 0 s and 11 s.
    assert summary["completed_req_s"] == pytest.approx(3 / 11, abs=1e-6)
    assert summary["output_tok_s"] == pytest.approx(1.0)
    # The last first token comes at 9 s, the last completion before it at 8 s.
    # Window (4, 8]: tokens at 4.5 and 8; the two at 4.0 belong to the time before it.
    assert summary["steady_window_s"] == [4.0, 8.0]
    assert summary["steady_output_tok_s"] == pytest.approx(2 / 4)
    assert summary["steady_req_s"] == pytest.approx(2 / 4 / (11 / 3), abs=1e-6)
    # running is 2 at 4 s, 1 at 5 s, 0 at 7 s, 0.5 at 8 s: areas 1.5 + 1 + 0.25 over 4 s.
    assert summary["gauge_window"] == "steady window"
    assert (summary["running_mean"], summary["running_max"]) == (0.6875, 2.0)
    assert (summary["waiting_mean"], summary["waiting_max"]) == (0.0, 0.0)
    assert (summary["preemptions"], summary["server_prompt_tokens"], summary["server_output_tokens"]) == (2, 40, 13)
    assert summary["client_output_tokens"] == 13
    assert summary["unknown"] == {}
    json.dumps(summary, allow_nan=False)


def test_a_server_without_metrics_gives_nulls_with_reasons(small_point):
    requests, chunks, metrics = small_point
    for frame in (None, metrics.iloc[:0], metrics[["time"]], metrics.assign(preemptions_total=math.nan)[
            ["time", "preemptions_total"]]):
        summary = stats.point_summary(requests, chunks, frame, 0.5, 10, 4)
        for name in ("preemptions", "running_mean", "running_max", "kv_cache_usage_max", "server_output_tokens"):
            assert summary[name] is None
            assert summary["unknown"][name]
        json.dumps(summary, allow_nan=False)


def test_all_failed_is_null_never_zero():
    requests = make_requests([((0.0, 0.0, None, None), 10, 0, "failed"), ((1.0, 1.0, None, 1.5), 10, 0, "failed")])
    summary = stats.point_summary(requests, make_chunks({}), None, 1.0, 10, 4)
    assert summary["completed"] == 0
    for name in ("ttft", "tpot", "itl", "stall", "e2e"):
        assert summary[name]["n"] == 0 and summary[name]["mean_ms"] is None
    for name in ("completed_req_s", "output_tok_s", "steady_req_s", "steady_output_tok_s"):
        assert summary[name] is None
        assert summary["unknown"][name] == "no request completed"
    check = stats.validity(requests, make_chunks({}), None, 1.0, 10, 4)
    assert not check["valid"] and check["reasons"] == ["failures"]


def test_no_requests_at_all():
    requests = make_requests([])
    summary = stats.point_summary(requests, make_chunks({}), None, 1.0, 10, 4)
    assert summary["num_requests"] == 0 and summary["ttft"]["n"] == 0
    assert stats.validity(requests, make_chunks({}), None, 1.0, 10, 4, num_prompts=5)["reasons"] == ["conservation"]
    json.dumps(summary, allow_nan=False)


def test_a_single_request():
    requests = make_requests([((0.0, 0.0, 1.0, 2.0), 10, 3, "completed")])
    chunks = make_chunks({0: [(1.0, 1), (1.5, 1), (2.0, 1)]})
    summary = stats.point_summary(requests, chunks, None, None, 10, 3)
    assert summary["request_rate"] is None
    assert (summary["ttft"]["n"], summary["ttft"]["p50_ms"], summary["ttft"]["max_ms"]) == (1, None, 1000.0)
    assert "no two requests completed" in summary["unknown"]["steady_req_s"]
    check = stats.validity(requests, chunks, None, None, 10, 3, num_prompts=1, prefix_caching=False)
    assert check["valid"]
    assert set(check["not_made"]) >= {"littles_law", "arrival_rate", "drift", "throttle", "output_tokens"}


def test_a_window_shorter_than_a_mean_stream_is_refused():
    """Two waves of a flood on two seats: the first wave ends within 0.1 s, and a request streams 3 s."""
    rows = [((0.0, 0.0, 1.0, 4.0 + i / 10), 10, 4, "completed") for i in range(2)]
    rows += [((0.0, 0.0, 5.0, 8.0), 10, 4, "completed")] * 2
    window, reason = stats.steady_window(make_requests(rows))
    assert window is None and "0.10 s" in reason


@pytest.mark.parametrize("waves", [3, 4, 8])
def test_a_flood_in_waves_is_cut_into_whole_waves(waves):
    """Two seats, a wave each 4 s: 3 s of prefill, then 5 tokens within 1 s. Capacity: 2 requests / 4 s, at any
    count."""
    rows, streams = [], {}
    for request in range(2 * waves):
        start = 4.0 * (request // 2)
        rows.append(((0.0, 0.0, start + 3, start + 4), 10, 5, "completed"))
        streams[request] = [(start + 3 + i / 4, 1) for i in range(5)]
    summary = stats.point_summary(make_requests(rows), make_chunks(streams), None, None, 10, 5)
    assert summary["steady_window_s"] == [4.0, 4.0 * (waves - 1)]
    assert summary["steady_req_s"] == pytest.approx(0.5)


def test_the_gauge_weighs_time_not_samples():
    """Ten samples in the busy second and one in each of nine idle ones: the mean is that of time."""
    times = [0, *np.linspace(1.0, 2.0, 11), *range(3, 12)]
    running = [0, *[10.0] * 11, *[0] * 9]
    mean, top, reason = stats.gauge(make_metrics(times, running=running), "running", 0.0, 11.0)
    # 0..1 ramps up (5), 1..2 is at 10, 2..3 ramps down (5).
    assert (mean, top, reason) == (pytest.approx(20 / 11), 10.0, "")


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ([0, 1, 2, 3, 9, 10], "no sample of running for 6.0 s"),  # hole in the middle
        ([6, 7, 8, 9, 10], "no sample of running for 6.0 s"),  # starts too late
        ([0, 10], "0 samples of running"),
    ],
)
def test_a_gauge_with_a_hole_is_unknown(times, reason):
    mean, top, why_not = stats.gauge(make_metrics(times, running=[1.0] * len(times)), "running", 0.0, 10.0)
    assert mean is None and top is None
    assert reason in why_not


@pytest.mark.parametrize(
    ("values", "gain", "reason"),
    [
        ([3, 3, 4, 9], 6, ""),
        ([3, 4, 0, 1], None, "went down"),
    ],
)
def test_counters(values, gain, reason):
    found, why_not = stats.counter_delta(make_metrics([0, 1, 2, 3], c=values), "c", 0.5, 2.5)
    assert found == gain and reason in why_not


@pytest.mark.parametrize(("start", "end", "reason"), [(-1, 2, "before the first"), (1, 9, "after the last"),
                                                      (math.nan, 2, "no request")])
def test_a_counter_needs_samples_around_the_point(start, end, reason):
    found, why_not = stats.counter_delta(make_metrics([0, 3], c=[1, 2]), "c", start, end)
    assert found is None and reason in why_not


# --- validity: a simulated queue --------------------------------------------------------------------------------------

OUT = 8  # output tokens of a simulated request
STEP = 0.05  # seconds between its tokens


def simulate(rate, n=300, seats=4, seed=1, sampling=0.1, stretch=1.0):
    """A first-come first-served queue with `seats` places, each held for a random time, as one point's frames.

    Poisson arrivals stretched to end at n / rate, as vLLM's generator does; rate inf sends everything at once. Capacity
    is seats / 0.5 s = 8 requests/s. The gauges are read every `sampling` seconds. `stretch` breaks the client's clock.
    """
    random = np.random.default_rng(seed)
    if math.isinf(rate):
        intended = np.zeros(n)
    else:
        intended = np.cumsum(random.exponential(1 / rate, n))
        intended *= n / rate / intended[-1]
    prefill = 0.02 + random.exponential(0.48 - (OUT - 1) * STEP, n)
    free, start = np.zeros(seats), np.empty(n)
    for i, arrival in enumerate(intended):
        seat = free.argmin()
        start[i] = max(arrival, free[seat])
        free[seat] = start[i] + prefill[i] + (OUT - 1) * STEP
    first = start + prefill
    end = first + (OUT - 1) * STEP
    times = np.arange(-0.3, end.max() + 0.5, sampling) + 0.0123
    in_system = (intended[None, :] <= times[:, None]) & (end[None, :] > times[:, None])
    running = in_system & (start[None, :] <= times[:, None])
    token_times = first[:, None] + STEP * np.arange(OUT)
    metrics = make_metrics(
        times + 1, running=running.sum(1).astype(float), waiting=(in_system & ~running).sum(1).astype(float),
        kv_cache_usage=running.sum(1) / seats, preemptions_total=np.zeros(times.size),
        prompt_tokens_total=10.0 * (first[None, :] <= times[:, None]).sum(1),
        generation_tokens_total=(token_times[None] <= times[:, None, None]).sum((1, 2)).astype(float),
        gpu_throttle_reasons=np.full(times.size, 4.0),
    )
    requests = make_requests([
        ((1 + a, 1 + a + 0.001, 1 + a + (f - a) * stretch, 1 + a + (e - a) * stretch), 10, OUT, "completed")
        for a, f, e in zip(intended, first, end, strict=True)
    ])
    chunks = make_chunks({
        i: [(1 + a + (float(t) - a) * stretch, 1) for t in row]
        for i, (a, row) in enumerate(zip(intended, token_times, strict=True))
    })
    return requests, chunks, metrics


def check(frames, rate, **extra):
    return stats.validity(*frames, rate, 10, OUT, **{"num_prompts": len(frames[0]), "prefix_caching": False} | extra)


@pytest.mark.parametrize("rate", [1.0, 4.0, 7.0, 16.0, math.inf])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_honest_queue_is_valid(rate, seed):
    found = check(simulate(rate, seed=seed), rate)
    assert found["reasons"] == []
    assert found["valid"]
    law = found["checks"]["littles_law"]
    assert law["ok"] is True and law["limit"] < 0.10
    assert found["not_made"] == (["arrival_rate"] if math.isinf(rate) else [])


def test_requests_sent_as_a_step_ends_are_invisible_through_the_long_step_after_the_next():
    """Three looping victims end together, ask anew at once, and a long prompt comes: for seconds the gauges show one request, and are right."""
    step = [0.1 + 0.05 * number for number in range(19)]  # every 50 ms until 1.0 s
    ending = {request: [(time + request / 1e3, 1) for time in step] for request in range(4)}
    ending[3] += [(1.05, 1), (5.05, 1), (5.1, 1)]  # the fourth goes on: one short step, then the long one
    sent = [1.0005, 1.0015, 1.0025]
    anew = {4 + number: [(5.05, 1), (5.1, 1)] for number in range(3)}
    rows = [((0.05, 0.05, 0.1 + request / 1e3, ending[request][-1][0]), 8, len(ending[request]), "completed") for request in range(4)]
    requests = make_requests(rows + [((time, time, 5.05, 5.1), 8, 2, "completed") for time in sent])
    chunks = make_chunks({**ending, **anew})
    seen = stats._second_step_end(requests, chunks) * stats.UNIT_S
    assert seen[4:] == pytest.approx([5.05] * 3)



def test_a_burst_is_judged_once_the_front_end_has_passed_it_on():
    """A fast engine on a slow front end: for a while the gauges do not know of most of the prompts that were sent."""
    requests, chunks, metrics = simulate(math.inf, n=900, seats=64)
    in_flight = metrics["running"] + metrics["waiting"]
    passed_on = np.clip((metrics["time"].to_numpy(float) * stats.UNIT_S - 1) / 1.0, 0, 1)  # one second for the whole burst
    hidden = metrics.assign(waiting=np.maximum(in_flight * passed_on - metrics["running"], 0), running=metrics["running"] * (passed_on > 0.2))
    law = check((requests, chunks, hidden), math.inf)["checks"]["littles_law"]
    assert law["ok"] is True and "front end" in law["note"], law
    lost = check((requests, chunks, metrics.assign(waiting=metrics["waiting"] / 2)), math.inf)["checks"]["littles_law"]
    assert lost["ok"] is False, lost
    never = check((requests, chunks, metrics.assign(waiting=0.0, running=1.0)), math.inf)["checks"]["littles_law"]
    assert never["ok"] is False, never


@pytest.mark.parametrize("stretch", [0.7, 1.3])
@pytest.mark.parametrize("rate", [4.0, 16.0])
def test_a_client_clock_that_runs_wrong_breaks_littles_law(rate, stretch):
    law = check(simulate(rate, stretch=stretch), rate)["checks"]["littles_law"]
    if rate > 8 and stretch > 1:  # the queue outlasts the samples: the check cannot be made, which is no pass either
        assert law["ok"] is None and "no sample of running" in law["note"]
    else:
        assert law["ok"] is False
        assert math.copysign(1, law["value"]) == (1 if stretch < 1 else -1)


def test_gauges_that_lag_by_an_engine_step_pass():
    """vLLM refreshes its gauges when a step ends (a chunk arrives), so that an idle engine hides a request's
    prefill."""
    requests, chunks, metrics = simulate(1.0)
    sent, end = (requests[name].to_numpy(float) for name in ("sent", "end"))
    step_ends = np.concatenate([[-math.inf], np.sort(chunks["time"].to_numpy(float))])
    refreshed = step_ends[np.searchsorted(step_ends, metrics["time"].to_numpy(float), side="right") - 1]
    visible = ((sent[None, :] <= refreshed[:, None]) & (end[None, :] > refreshed[:, None])).sum(1)
    assert visible.mean() < 0.95 * (metrics["running"] + metrics["waiting"]).mean()  # a plain comparison would fail
    lagging = metrics.assign(running=visible.astype(float), waiting=0.0)
    law = check((requests, chunks, lagging), 1.0)["checks"]["littles_law"]
    assert law["ok"] is True, law
    half = check((requests, chunks, metrics.assign(running=visible / 2, waiting=0.0)), 1.0)["checks"]["littles_law"]
    assert half["ok"] is False, half


def break_point(what):
    """An honest point with one thing broken: (frames, extra arguments)."""
    requests, chunks, metrics = simulate(4.0, n=100)
    extra = {}
    if what == "a request vanished":
        requests = requests.iloc[:-1]
        chunks = chunks[chunks["request"] < 99]
        extra["num_prompts"] = 100
    elif what == "an outcome is unknown":
        requests.loc[3, "outcome"] = None
    elif what == "a request failed":
        requests.loc[3, ["outcome", "first_token"]] = ["failed", None]
    elif what == "first token before sent":
        requests.loc[3, "first_token"] = requests.loc[3, "sent"] - 5
    elif what == "a stream ended early":
        last = chunks[chunks["request"] == 3].index[-1]
        chunks = chunks.drop(last)
        requests.loc[3, "output_tokens"] = OUT - 1
        metrics["generation_tokens_total"] = metrics["generation_tokens_total"].clip(upper=100 * OUT - 1)
    elif what == "a chunk was lost":
        chunks = chunks.drop(chunks.index[17])
    elif what == "prompts are shorter than asked":
        requests["prompt_tokens"] = 9
        metrics["prompt_tokens_total"] *= 0.9
    elif what == "the server counted more":
        metrics.loc[metrics.index[50:], "generation_tokens_total"] += 1
    elif what == "the client sends too slowly":
        slow = ((requests["sent"] - requests["sent"].min()) // 4).astype("int64")
        for name in ("intended", "sent", "first_token", "end"):
            requests[name] += slow
        chunks["time"] += chunks["request"].map(slow)
        metrics = None
    elif what == "the client is late":
        requests["sent"] += 3000  # 30 ms
        requests["first_token"] += 3000
        requests["end"] += 3000
        chunks["time"] += 3000
        metrics["time"] += 3000
    elif what == "the GPU was hot":
        metrics.loc[metrics.index[20], "gpu_throttle_reasons"] = 0x40
    elif what == "prefixes were cached":
        extra["prefix_caching"] = True
    return (requests, chunks, metrics), extra


@pytest.mark.parametrize(
    ("what", "reasons"),
    [
        ("nothing", []),
        ("a request vanished", ["conservation", "prompt_tokens", "output_tokens"]),
        ("an outcome is unknown", ["conservation"]),
        ("a request failed", ["failures"]),
        ("first token before sent", ["time_order"]),
        ("a stream ended early", ["output_length"]),
        ("a chunk was lost", ["stream_tokens", "output_tokens"]),
        ("prompts are shorter than asked", ["prompt_length"]),
        ("the server counted more", ["output_tokens"]),
        ("the client sends too slowly", ["arrival_rate"]),
        ("the client is late", ["client_delay"]),
        ("the GPU was hot", ["throttle"]),
        ("prefixes were cached", ["prefix_cache"]),
    ],
)
def test_each_breach_is_named(what, reasons):
    frames, extra = break_point(what)
    found = check(frames, 4.0, **extra)
    assert found["reasons"] == reasons, {name: found["checks"][name] for name in found["reasons"]}
    assert found["valid"] is (not reasons)
    json.dumps(found, allow_nan=False)


def test_a_check_that_cannot_be_made_is_null_and_listed():
    requests, chunks, _ = simulate(4.0, n=30)
    found = stats.validity(requests, chunks, None, 4.0, 10, OUT)
    assert found["valid"]
    assert found["not_made"] == ["prompt_tokens", "output_tokens", "littles_law", "throttle", "prefix_cache"]
    for name in found["not_made"]:
        assert found["checks"][name]["ok"] is None and found["checks"][name]["note"]


def test_a_saturated_point_drifts_and_stays_valid():
    drifting = check(simulate(16.0), 16.0)
    assert drifting["checks"]["drift"]["ok"] is False
    assert drifting["checks"]["drift"]["note"].startswith("drifting")
    assert drifting["checks"]["drift"]["value"] > 0.15
    assert drifting["valid"]


@pytest.mark.parametrize("seed", range(5))
def test_a_point_below_the_knee_is_steady(seed):
    drift = check(simulate(2.0, seed=seed), 2.0)["checks"]["drift"]
    assert drift["ok"] is True and drift["note"].startswith("steady")


@pytest.mark.parametrize(("rate", "steady"), [(2.0, 2.0), (4.0, 4.0), (16.0, 8.0), (math.inf, 8.0)])
def test_the_steady_rate_is_the_offered_one_or_the_capacity(rate, steady):
    """The whole-point rate is below both, because it contains ramp and drain."""
    summary = stats.point_summary(*simulate(rate, n=600), rate, 10, OUT)
    assert summary["steady_req_s"] == pytest.approx(steady, rel=0.06)
    assert summary["completed_req_s"] < summary["steady_req_s"] * 1.01


# --- the knee ---------------------------------------------------------------------------------------------------------


def sweep(*points, rig="here"):
    """Points from (rate, p99 TTFT in ms, steady requests/s[, overrides])."""
    rows = []
    for rate, ttft, steady, *overrides in points:
        rows.append({
            "rig": rig, "pass": "measured", "request_rate": rate, "repeat": 0, "completed_req_s": 0.9 * rate,
            "steady_req_s": steady, "valid": True, "ttft_n": 400, "ttft_p50_ms": 50.0, "ttft_p90_ms": 60.0,
            "ttft_p99_ms": ttft, **(overrides[0] if overrides else {}),
        })
    return pd.DataFrame(rows)


GOOD = [(1.0, 100, 1.0), (2.0, 200, 2.0), (4.0, 400, 3.9)]


@pytest.mark.parametrize(
    ("points", "status", "bracket"),
    [
        ([*GOOD, (8.0, 5000, 6.0), (16.0, 9000, 6.0)], "bracketed", [4.0, 8.0]),
        (GOOD, "no knee in range", [4.0, None]),
        ([(8.0, 5000, 6.0), (16.0, 9000, 6.0)], "fails at the lowest rate", [None, 8.0]),
        ([*GOOD, (8.0, 5000, 7.9), (16.0, 900, 15.9)], "not monotone", [4.0, 8.0]),
        ([(1.0, None, 1.0), (2.0, None, 2.0)], "cannot judge", [None, None]),
        ([], "cannot judge", [None, None]),
        # TTFT is fine, the completion ratio is not.
        ([*GOOD, (8.0, 900, 7.5)], "bracketed", [4.0, 8.0]),
        # One repeat of two fails.
        ([*GOOD, (8.0, 900, 7.9), (8.0, 1100, 7.9, {"repeat": 1})], "bracketed", [4.0, 8.0]),
        # An invalid point proves nothing, the cold pass is not the sweep, a flood has no offered rate.
        ([*GOOD, (8.0, 5000, 6.0, {"valid": False}), (16.0, 9000, 6.0)], "bracketed", [4.0, 16.0]),
        ([*GOOD, (8.0, 5000, 6.0, {"pass": "cold"})], "no knee in range", [4.0, None]),
        ([*GOOD, (math.inf, 9000, 6.0)], "no knee in range", [4.0, None]),
        # The p99 is withheld: a lower percentile above the limit is enough to fail, a good one not enough to meet.
        ([*GOOD, (8.0, None, 7.9, {"ttft_p90_ms": 1500.0})], "bracketed", [4.0, 8.0]),
        ([*GOOD, (8.0, None, 7.9), (16.0, 9000, 6.0)], "bracketed", [4.0, 16.0]),
        # Exactly at both limits.
        ([(1.0, 1000, 0.95), (2.0, 1000.1, 2.0)], "bracketed", [1.0, 2.0]),
    ],
)
def test_knee(points, status, bracket):
    frame = sweep(*points) if points else sweep(*GOOD).iloc[:0]
    found = stats.knee(frame)
    assert (found["status"], found["bracket"]) == (status, bracket), found
    json.dumps(found, allow_nan=False)


def test_knee_gives_a_reason_for_each_rate():
    frame = sweep(*GOOD, (8.0, 5000, 6.0), (8.0, 300, 7.9, {"repeat": 1}), (16.0, None, 15.9),
                  (32.0, 1, 32.0, {"valid": False}))
    rates = {rate["request_rate"]: rate for rate in stats.knee(frame)["rates"]}
    assert list(rates) == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert rates[4.0]["verdict"] == "meets" and rates[4.0]["reason"] == "p99 TTFT 400 ms, completed 98%"
    assert rates[8.0]["verdict"] == "fails"
    assert rates[8.0]["reason"] == (
        "p99 TTFT 5,000 ms, above 1,000 ms; completed 75% of the offered load, below 95% (in 1 of 2 repeats)")
    assert (rates[8.0]["ttft_ms"], rates[8.0]["completed_ratio"]) == (5000.0, 0.75)
    assert rates[16.0]["reason"] == "no p99 TTFT: n = 400 cannot bear it"
    assert rates[32.0]["reason"] == "none of 1 points is valid"


def test_knee_of_published_figures_says_what_it_had_to_assume():
    """Completed 1.95 of 2 passes, 3.77 of 4 does not: the drain is inside, and the note says so."""
    frame = sweep((2.0, 173, None, {"completed_req_s": 1.95, "valid": None}),
                  (4.0, 215, None, {"completed_req_s": 3.77, "valid": None}))
    found = stats.knee(frame)
    assert found["bracket"] == [2.0, 4.0]
    assert any("drain" in note for note in found["notes"]) and any("published" in note for note in found["notes"])
    assert stats.knee(frame, {"completed_ratio": 0.9})["status"] == "no knee in range"


def test_the_slo_can_be_replaced_in_part():
    frame = sweep(*GOOD)
    assert stats.knee(frame, {"ttft_s": 0.3})["bracket"] == [2.0, 4.0]
    assert stats.knee(frame, {"ttft_percentile": 90, "ttft_s": 0.06})["status"] == "no knee in range"


@pytest.mark.parametrize(
    ("slo", "message"),
    [({"tpot_s": 1}, "unknown SLO key tpot_s"), ({"ttft_percentile": 95}, "no p95"),],
)
def test_a_wrong_slo_is_an_error(slo, message):
    with pytest.raises(ValueError, match=message):
        stats.knee(sweep(*GOOD), slo)


def test_one_knee_a_rig():
    with pytest.raises(ValueError, match="one rig"):
        stats.knee(pd.concat([sweep(*GOOD), sweep(*GOOD, rig="there")]))


def test_bisection_closes_in_on_the_true_knee():
    """A system that breaks at 5.3 requests/s: refine [4, 8] until the ends are within 5 %."""
    points = [*GOOD, (8.0, 5000, 6.0)]
    for _ in range(10):
        rate = stats.next_rate(sweep(*points), resolution=1.05)
        if rate is None:
            break
        points.append((rate, 5000, 5.3) if rate > 5.3 else (rate, 500, rate))
    low, high = stats.knee(sweep(*points))["bracket"]
    assert low <= 5.3 < high and high / low <= 1.05
    assert len(points) <= 4 + 4  # log2(ln 2 / ln 1.05) = 3.8 halvings


@pytest.mark.parametrize("points", [GOOD, [(8.0, 5000, 6.0)], [*GOOD, (8.0, 5000, 7.9), (16.0, 900, 15.9)]])
def test_no_next_rate_without_a_closed_bracket(points):
    assert stats.next_rate(sweep(*points)) is None


def test_next_rate_does_not_ask_twice_for_a_point_without_verdict():
    points = [*GOOD, (8.0, 5000, 6.0)]
    assert stats.next_rate(sweep(*points)) == 5.66
    assert stats.next_rate(sweep(*points, (5.66, 1, 5.6, {"valid": False}))) is None


def test_next_rate_refuses_a_resolution_that_never_ends():
    with pytest.raises(ValueError, match="above 1"):
        stats.next_rate(sweep(*GOOD), resolution=1.0)
