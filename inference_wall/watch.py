"""The watcher: the server's counters and the GPU's state, sampled on the run's clock.

What:   a thread that reads `/metrics` a few times a second and, on a GPU rig, clocks, power and throttle reasons from NVML.
Why:    running, waiting, KV cache usage and preemptions are the server's to know. Sampled on the clock of the client they lie
        on one axis with each request. A name that this server does not export is null, never zero.
Use:    with Watcher(server.base_url, engine, clock_zero, gpu=0) as watcher: ...; frame = watcher.frame(start_s, end_s)
Not:    what the counters mean for a point (`stats`).
"""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pandas as pd
from prometheus_client.parser import text_string_to_metric_families

from .engines import Engine
from .samples import UNIT_S

PERIOD_S = 0.25
GPU_EVERY = 4  # NVML once a second: clocks move slowly, and each query costs the driver's lock


class Watcher:
    """Samples until it is left. Rows are kept in memory: a ten-minute run is 2,400 rows."""

    def __init__(self, base_url: str, engine: Engine, clock_zero: float, gpu: int | None = None, period_s: float = PERIOD_S):
        self.url, self.names, self.clock_zero, self.period_s = base_url + "/metrics", engine.metric_names, clock_zero, period_s
        self.gpu = gpu
        self.failures = 0
        self._rows: list[dict[str, float]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._http = httpx.Client(timeout=5.0, trust_env=False)
        self._thread = threading.Thread(target=self._loop, name="watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        self._http.close()

    def _loop(self) -> None:
        turn = 0
        while not self._stop.wait(self.period_s):
            self.sample(with_gpu=turn % GPU_EVERY == 0)
            turn += 1

    def sample(self, with_gpu: bool = True) -> dict[str, float]:
        """Take one sample now; returns the row. A server that does not answer is counted in `failures`, not recorded."""
        try:
            with self._lock:
                asked = time.perf_counter()
                text = self._http.get(self.url).text
                row = read_metrics(text, self.names)
                # The reply was made somewhere between question and answer: its middle is the best guess.
                row["time"] = round(((asked + time.perf_counter()) / 2 - self.clock_zero) / UNIT_S)
                if with_gpu and self.gpu is not None:
                    row |= gpu_sample(self.gpu)
                self._rows.append(row)
                return row
        except (httpx.HTTPError, ValueError):
            self.failures += 1
            return {}

    def settle(self, timeout_s: float = 3.0) -> dict[str, float]:
        """Wait until the server reports no running and no waiting request, then return that sample.

        The counters trail the last streamed token by an engine step; a difference of counters taken too early is short by it.
        """
        deadline = time.perf_counter() + timeout_s
        row = self.sample()
        while (row.get("running") or row.get("waiting")) and time.perf_counter() < deadline:
            time.sleep(0.02)
            row = self.sample()
        return row

    def frame(self, start_s: float, end_s: float) -> pd.DataFrame:
        """Samples between two moments of the run's clock, plus the nearest one on either side; `time` in 10 us."""
        names = ["time", *self.names, *(GPU_COLUMNS if self.gpu is not None else [])]
        with self._lock:
            everything = pd.DataFrame(self._rows)
        everything = everything.reindex(columns=names).sort_values("time", ignore_index=True)
        if everything.empty:
            return everything
        seconds = everything["time"] * UNIT_S
        first = max(int(seconds.searchsorted(start_s)) - 1, 0)
        last = int(seconds.searchsorted(end_s, side="right")) + 1
        return everything.iloc[first:last].reset_index(drop=True)


def read_metrics(text: str, names: dict[str, Any]) -> dict[str, float]:
    """Prometheus text -> {canonical name: value}, summed over label sets; a name that is absent stays absent.

    `names` maps a canonical name to one Prometheus name or to several, of which the first present one counts.
    """
    wanted = {alias: name for name, aliases in names.items() for alias in ([aliases] if isinstance(aliases, str) else aliases)}
    # Only the lines that matter reach the parser: the full text holds hundreds of histogram buckets.
    lines = [line for line in text.splitlines() if not line.startswith("#") and line.split("{", 1)[0].split(" ", 1)[0] in wanted]
    found: dict[str, float] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name in wanted:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    row: dict[str, float] = {}
    for alias, name in wanted.items():
        if alias in found and name not in row:
            row[name] = found[alias]
    return row


GPU_COLUMNS = ["gpu_power_w", "gpu_sm_mhz", "gpu_mem_mhz", "gpu_temperature_c", "gpu_memory_mib", "gpu_throttle_reasons"]


def gpu_sample(index: int) -> dict[str, float]:
    """Power, clocks, temperature, memory and the throttle bit mask of one GPU; empty where NVML does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(index)
        return {
            "gpu_power_w": pynvml.nvmlDeviceGetPowerUsage(card) / 1000,
            "gpu_sm_mhz": pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM),
            "gpu_mem_mhz": pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_MEM),
            "gpu_temperature_c": pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU),
            "gpu_memory_mib": pynvml.nvmlDeviceGetMemoryInfo(card).used / 2**20,
            "gpu_throttle_reasons": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(card),
        }
    except pynvml.NVMLError:
        return {}
