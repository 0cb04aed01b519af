"""Facts about the machine: NVML by a fake, the host for real, bandwidth by arithmetic."""

import json
import os

import pynvml
import pytest

from inference_wall import hardware
from inference_wall.errors import WallError


class Struct:
    def __init__(self, **values):
        self.__dict__.update(values)


def refuse(*_):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def card(monkeypatch):
    """One A10G-like card behind NVML. Returns a function that replaces single answers."""
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: f"card {index}",
        "nvmlDeviceGetName": lambda card: b"NVIDIA A10G",
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlSystemGetCudaDriverVersion": lambda: 13000,
        "nvmlDeviceGetCudaComputeCapability": lambda card: (8, 6),
        "nvmlDeviceGetMemoryInfo": lambda card: Struct(total=24 * 2**30, free=23 * 2**30, used=2**30),
        "nvmlDeviceGetClockInfo": lambda card, which: {pynvml.NVML_CLOCK_SM: 1710, pynvml.NVML_CLOCK_MEM: 6250}[which],
        "nvmlDeviceGetMaxClockInfo": lambda card, which: {pynvml.NVML_CLOCK_SM: 1710, pynvml.NVML_CLOCK_MEM: 6251}[which],
        "nvmlDeviceGetPowerUsage": lambda card: 150250,
        "nvmlDeviceGetEnforcedPowerLimit": lambda card: 300000,
        "nvmlDeviceGetTemperature": lambda card, which: 55,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda card: 0x4 | 0x20,
        "nvmlDeviceGetComputeRunningProcesses": lambda card: [Struct(pid=4711, usedGpuMemory=2**30)],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return lambda name, answer: monkeypatch.setattr(pynvml, name, answer)


def test_a_card_in_words(card):
    assert hardware.gpus() == [
        {
            "index": 0,
            "name": "NVIDIA A10G",
            "driver": "580.65.06",
            "driver_cuda": "13.0",
            "compute_capability": "8.6",
            "memory_total_gib": 24.0,
            "memory_free_gib": 23.0,
            "sm_mhz": 1710,
            "sm_max_mhz": 1710,
            "mem_mhz": 6250,
            "mem_max_mhz": 6251,
            "power_w": 150.2,
            "power_limit_w": 300.0,
            "temperature_c": 55,
            "clock_reasons_mask": 0x24,
            "clock_reasons": ["power cap", "thermal (software)"],
            "processes": [{"pid": 4711, "memory_gib": 1.0}],
        }
    ]


def test_what_a_card_does_not_offer_is_null(card):
    for name in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        card(name, refuse)
    card("nvmlDeviceGetComputeRunningProcesses", refuse)
    (facts,) = hardware.gpus()
    assert [facts[name] for name in ("power_w", "memory_total_gib", "memory_free_gib", "clock_reasons", "processes")] == [None] * 4 + [[]]


def test_no_driver_means_no_cards_and_no_error(card):
    card("nvmlInit", lambda: (_ for _ in ()).throw(pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)))
    assert hardware.gpus() == []


def test_host_facts_are_plain_json_and_name_nobody():
    facts = hardware.host_facts()
    text = json.dumps(facts, allow_nan=False)
    assert os.uname().nodename not in text or len(os.uname().nodename) < 4
    assert facts["cores_usable"] >= 1 and facts["memory_gib"] > 0.5 and facts["python"].startswith("3.")


@pytest.mark.parametrize(("content", "cores"), [("150000 100000", 1.5), ("max 100000", 2), ("", 2)])
def test_a_container_quota_limits_the_cores(monkeypatch, content, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(hardware, "_read", lambda path: content)
    assert hardware.usable_cores() == cores


def test_rates_count_each_byte_in_units_of_1e9():
    assert hardware._rate(2 * 500_000_000, 0.5) == 2.0


def test_cache_sizes():
    assert [hardware._cache_bytes(text) for text in ("32768K\n", "2M", "512", "")] == [33554432, 2097152, 512, 0]


def test_bandwidth_of_this_cpu():
    pytest.importorskip("torch")
    found = hardware.copy_bandwidth_apart("cpu", seconds=0.2)
    assert found["copy_repeats"] >= 5 and found["read_repeats"] >= 5
    assert 0.2 < found["copy_median_gb_s"] <= found["copy_gb_s"] < 2000
    assert 0.2 < found["read_median_gb_s"] <= found["read_gb_s"] < 2000


def test_bandwidth_without_a_gpu_is_one_clear_error():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(WallError, match="torch finds no NVIDIA GPU"):
        hardware.copy_bandwidth("cuda")
    with pytest.raises(WallError, match="no device 'tpu'"):
        hardware.copy_bandwidth("tpu")
