"""Percentiles that refuse: an observed value, its interval, and nothing where the sample is too small.

What:   `percentile`, `needed` and `summarise` over a one-dimensional sample.
Why:    the common load generators interpolate between samples, print a p99 of forty requests, and give 0.0 ms for a run
        in which every request failed. Here each is None, with the reason beside it.
Use:    summarise(latencies_s)  ->  {"n": 40, "p50_ms": 210.0, ..., "p99_ms": None, "withheld": {"p99": "n = 40, needs
        299"}}
Not:    intervals of dependent samples. Close to the knee a slow request slows its neighbours, so an interval that
        assumes independence is too narrow there; only repeats give an honest one, so show their minimum and maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

CONFIDENCE = 0.95
PERCENTILES = (50, 90, 99)

RULE = (
    "A percentile is an observed value: the smallest sample with at least that share of the samples at or below it "
    "(numpy.quantile, method inverted_cdf). It is left out where the sample is too small to reach it with 95 % "
    "confidence (p50 needs 5 samples, p90 29, p99 299). Its interval is that of the binomial order statistics at 95 %, "
    "which holds for independent samples."
)


def percentile(values: Iterable[float], p: float) -> float | None:
    """The p-th percentile (0 < p < 100) of 1-d `values`, in their unit; None of an empty sample. Missing values are
    dropped.

    Rule: `RULE`. It does not refuse small samples; `summarise` does.
    """
    sample = _sample(values)
    return float(np.quantile(sample, _share(p), method="inverted_cdf")) if sample.size else None


def needed(p: float, confidence: float = CONFIDENCE) -> int:
    """The smallest number of independent samples that bears the p-th percentile: 5, 29, 59, 299 for p50, p90, p95, p99.

    With n samples, the largest lies at or above the true percentile q with probability 1 - q**n; this must reach
    `confidence`, so n >= ln(1 - confidence) / ln(q). Below the median the mirror image holds for the smallest sample.
    """
    share = _share(p)
    return math.ceil(math.log(1 - confidence) / math.log(max(share, 1 - share)))


def summarise(values_s: Iterable[float], percentiles: Iterable[float] = PERCENTILES) -> dict[str, Any]:
    """Summary of 1-d latencies in seconds (missing ones dropped), in milliseconds: what the sample bears, and no more.

    Returns n, mean_ms, p50_ms ..., max_ms; intervals {"p50": [low, high]} in ms, None for an end that n cannot give;
    withheld {"p99": reason} for each percentile that is None. n = 0 gives None throughout, with the reason under
    `empty`.
    """
    sample = _sample(values_s)
    n = int(sample.size)
    summary: dict[str, Any] = {"n": n, "mean_ms": _ms(sample.mean()) if n else None}
    intervals: dict[str, list[float | None]] = {}
    withheld: dict[str, str] = {}
    for p in percentiles:
        name = f"p{p:g}"
        enough = n >= needed(p)
        summary[f"{name}_ms"] = _ms(percentile(sample, p)) if enough else None
        if enough:
            interval = stats.quantile_test(sample, p=_share(p)).confidence_interval(CONFIDENCE)
            intervals[name] = [_ms(interval.low), _ms(interval.high)]
        else:
            withheld[name] = f"n = {n}, needs {needed(p)}"
    summary |= {"max_ms": _ms(sample.max()) if n else None, "intervals": intervals, "withheld": withheld}
    if not n:
        summary["empty"] = "no sample"
    return summary


def _sample(values: Iterable[float]) -> np.ndarray:
    sample = np.asarray(pd.to_numeric(pd.Series(values, dtype="object")), dtype=float)
    return sample[np.isfinite(sample)]


def _share(p: float) -> float:
    if not 0 < p < 100:
        raise ValueError(f"a percentile lies between 0 and 100, not {p}")
    return p / 100


def _ms(seconds: float) -> float | None:
    """Milliseconds to the microsecond (the clock's unit is 10 us), None for a value that is not finite."""
    return round(float(seconds) * 1e3, 3) if math.isfinite(seconds) else None
