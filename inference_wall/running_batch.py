"""The running batch of a flood or a closed loop, from the client's rows.

What:   `batch_mean` is the time average of min(seats, requests in flight); `of_point` takes it in the steady window and over a whole point.
Why:    vLLM refreshes its gauge of running requests when a step ends, so requests whose prompt is being read are missing in it. A flood reads
        many prompts in one long step: a batch of 16 then shows a mean well below 16, though no seat was ever empty.
Use:    of_point(run, row)["batch_steady"]; batch_mean(run.frame("requests", 3), seats=16, window=(3.0, 20.0))
Not:    the server's gauge (`samples.gauge`), which pages show beside it under its own name.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from .records import Run
from .samples import UNIT_S, first_s, last_s, steady_window, ticks


def batch_mean(requests: pd.DataFrame, seats: float, window: tuple[float, float] | None) -> float | None:
    """Time average of min(`seats`, requests in flight) in `window` (start, end in seconds of the run's clock); null without one.

    `requests`: rows of one point with sent and end. A request is in flight between the two. With first come, first served, whoever is
    in flight and has a seat is in the batch, also while its prompt is read. Null when a request that was sent has no end.
    """
    sent = requests[requests["sent"].notna()]
    if window is None or sent.empty or sent["end"].isna().any() or not window[1] > window[0]:
        return None
    times = np.concatenate([ticks(sent["sent"]), ticks(sent["end"])]) * UNIT_S
    order = np.argsort(times, kind="stable")
    in_flight = np.cumsum(np.repeat([1, -1], len(sent))[order])[:-1]
    spans = np.diff(np.clip(times[order], *window))
    return round(float((np.minimum(in_flight, seats) * spans).sum() / (window[1] - window[0])), 2)


def of_point(run: Run, row: dict[str, Any]) -> dict[str, float | None]:
    """`batch_mean` of a point (point, max_concurrency, running_max): batch_steady, in its steady window, and batch_whole, first send to last end.

    Seats: the cap, the concurrency of a closed loop, and the most that the server ever showed to run, whichever is least. The last because
    the cache may seat fewer than the cap allows: that gauge misses moments, but its maximum is seen while no prompt is read.
    """
    requests = run.frame("requests", int(row["point"]))
    limits = (run.document["flags"].get("max-num-seqs"), row["max_concurrency"], row["running_max"])
    seats = min((limit for limit in limits if limit and pd.notna(limit)), default=math.inf)
    whole = (first_s(requests["sent"]), last_s(requests["end"]))
    return {"batch_steady": batch_mean(requests, seats, steady_window(requests)[0]), "batch_whole": batch_mean(requests, seats, whole)}
