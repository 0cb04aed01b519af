"""The watcher: absent is absent, never zero; samples lie on the run's clock."""

import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from inference_wall.engines import engine
from inference_wall.samples import UNIT_S
from inference_wall.server import free_port
from inference_wall.watch import Watcher, read_metrics

REAL = Path(__file__).parent / "fixtures" / "metrics_0.32.0_cpu.txt"
NAMES = engine("0.32.0").metric_names


def test_a_real_reply_gives_every_recorded_counter():
    row = read_metrics(REAL.read_text(), NAMES)
    assert set(row) == set(NAMES)
    assert all(isinstance(value, float) for value in row.values())


@pytest.mark.parametrize(("text", "expected"), [
    ("", {}),
    ("vllm:num_requests_running 3.0", {"running": 3.0}),
    ('vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0', {"running": 7.0}),
    ("vllm:gpu_cache_usage_perc 0.5", {"kv_cache_usage": 0.5}),
    ("vllm:kv_cache_usage_perc 0.4\nvllm:gpu_cache_usage_perc 0.5", {"kv_cache_usage": 0.4}),
    ("vllm:num_requests_running_by_something 9.0", {}),
    ("# vllm:num_requests_running 9.0", {}),
])
def test_names_labels_and_aliases(text, expected):
    assert read_metrics(text, NAMES) == expected


def test_samples_are_on_the_runs_clock_and_a_lost_server_is_counted():
    port = free_port()
    process = subprocess.Popen([sys.executable, str(Path(__file__).parent / "fake_server.py"), "--port", str(port)])
    try:
        for _ in range(100):
            try:
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.HTTPError:
                time.sleep(0.05)
        zero = time.perf_counter()
        with Watcher(f"http://127.0.0.1:{port}", engine("0.32.0"), zero, period_s=0.02) as watcher:
            time.sleep(0.3)
            watcher.settle()
            until = time.perf_counter() - zero
            process.kill()
            process.wait()
            time.sleep(0.1)
        frame = watcher.frame(0.1, until)
        assert len(frame) >= 5 and frame["time"].is_monotonic_increasing
        assert frame["time"].max() * UNIT_S <= until + 0.1 and watcher.failures > 0
        # This server has no preemption counter: the column is there, and null.
        assert frame["preemptions_total"].isna().all() and frame["running"].eq(0).all()
    finally:
        process.kill()
        process.wait()
