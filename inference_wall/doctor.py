"""Is this machine fit? A list of findings, each with its remedy.

What:   `examine()` looks at Python, the engine, the GPU and who else uses it, cores, memory, disk, ports, servers that an earlier
        run left behind, and the browser of the tests. `wall doctor` prints the result.
Why:    most spoilt measurements are spoilt before they start: a second user on the card, clocks held down, a full disk.
How:    `examine(rig="cpu", port=8000)`; levels are `ok`, `warn` (numbers may suffer) and `fail` (it will not run).
Not:    mending anything, and no judgement of finished points (that is `stats`). Takes about a second.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from inference_wall import engines, hardware, rigs, server, shapes, weights
from inference_wall.errors import WallError

OK, WARN, FAIL = "ok", "warn", "fail"
MARKS = {OK: "ok  ", WARN: "warn", FAIL: "FAIL"}
NEEDED_MEMORY_GIB = 4.0  # the embedded engine: three processes, the weights and 1 GiB of KV cache
NEEDED_DISK_GB = 2.0  # model folder, records, site
BUSY_PERCENT = 25.0  # of all cores, taken by others
HARMLESS_CLOCKS = {"idle", "application clocks", "power cap"}
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM_REMEDY = "make test installs it; or: apt-get install -y chromium"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `level` is ok, warn or fail; `remedy` is empty when there is nothing to do."""

    subject: str
    level: str
    what: str
    remedy: str = ""


def examine(rig: str | None = None, port: int | None = None) -> list[Finding]:
    """All findings for `rig` (None: the one that `auto` picks) and, where given, for `port`. Raises WallError on an unknown rig."""
    if port is not None and not 1024 <= port <= 65_535:
        raise WallError(f"port {port} cannot be used", "choose one from 1024 to 65535")
    chosen = rigs.load_rig(rig) if rig not in (None, "auto") else rigs.pick_rig("auto")
    cards = hardware.gpus()
    return [
        Finding("rig", OK, f"{chosen.name} ({chosen.title})"),
        *_python(),
        *_engine(chosen),
        *_model(chosen),
        *_gpus(chosen, cards),
        *_processor(chosen),
        *_memory(chosen),
        *_disk(),
        *_ports(port),
        *_leftovers(),
        *_browser(),
    ]


def as_text(findings: list[Finding]) -> str:
    """One line a finding, the remedy on a line below it, and a verdict."""
    lines = []
    for finding in findings:
        lines.append(f"{MARKS[finding.level]}  {finding.subject:<9}  {finding.what}")
        if finding.remedy:
            lines.append(f"{'':17}-> {finding.remedy}")
    failures = sum(finding.level == FAIL for finding in findings)
    warnings = sum(finding.level == WARN for finding in findings)
    verdict = "not fit" if failures else "fit, with reservations" if warnings else "fit"
    return "\n".join([*lines, "", f"{verdict}: {failures} failures, {warnings} warnings"])


def as_json(findings: list[Finding]) -> str:
    """The findings as one JSON document."""
    fit = not any(finding.level == FAIL for finding in findings)
    return json.dumps({"fit": fit, "findings": [asdict(finding) for finding in findings]}, indent=1, allow_nan=False)


def chromium() -> str | None:
    """Path of a Chromium for the browser tests: `$WALL_CHROMIUM`, one on the PATH, or the one that Playwright downloaded."""
    for name in filter(None, (os.environ.get("WALL_CHROMIUM"), *CHROMIUM_NAMES)):
        if path := shutil.which(name):
            return path
    downloads = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or "~/.cache/ms-playwright").expanduser()
    found = sorted(glob.glob(str(downloads / "chromium-*" / "chrome-linux*" / "chrome")))
    return found[-1] if found else None


def _python() -> Iterator[Finding]:
    """Always fine when this runs at all: the set-up and the package itself refuse a Python before 3.11."""
    yield Finding("python", OK, f"Python {platform.python_version()} in {sys.prefix}")


def _engine(rig: rigs.Rig) -> Iterator[Finding]:
    if rig.kind == "published":
        return
    engine = engines.installed()
    if engine is None:
        yield Finding("engine", FAIL, "no vLLM in this environment", "make engine sets it up")
        return
    name = f"{engine.distribution} {engine.version}"
    wanted = rig.engine.get("vllm")
    if engine.device != rig.device:
        yield Finding(
            "engine",
            FAIL,
            f"{name} computes on the {engine.device}, the rig {rig.name} needs {rig.device}",
            "install the requirements of the other kind, or choose another rig",
        )
    elif not engine.exact:
        yield Finding(
            "engine",
            WARN,
            f"{name} is not in the table of known versions ({', '.join(engines.KNOWN)}); taken for {engine.table}",
            "use a known version, or check flags and metric names by pytest tests/test_engines.py",
        )
    elif wanted and wanted != engine.version:
        yield Finding("engine", WARN, f"{name}, but the rig {rig.name} was written for vLLM {wanted}", "say so with the results")
    else:
        yield Finding("engine", OK, name)
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "engine", FAIL, "the engine cannot find its own package name, vllm", "pip install --no-deps ./packages/vllm-alias"
        )


def _model(rig: rigs.Rig) -> Iterator[Finding]:
    if name := rig.model.get("embedded"):
        folder = weights.cache_folder() / "models" / name
        if weights.is_verified(folder, weights.MODELS[name].sha256):
            yield Finding("model", OK, f"{name} is ready")
            return
        try:
            weights.gguf_path(name)
            yield Finding("model", OK, f"{name} will be unpacked at the first run (seconds)")
        except WallError as problem:
            yield Finding("model", FAIL, problem.message, problem.remedy)
    elif name := rig.model.get("shape"):
        try:
            shapes.shape(name)
            yield Finding("model", OK, f"the shape {name} is made at the first run (seconds); its weights are random")
        except WallError as problem:
            yield Finding("model", FAIL, problem.message, problem.remedy)
    elif path := rig.model.get("path"):
        if (rigs.root() / path / "config.json").is_file():
            yield Finding("model", OK, f"{path} is there")
        else:
            yield Finding("model", FAIL, f"there is no model folder {path}", "see the comment in the rig's file")


def _gpus(rig: rigs.Rig, cards: list[dict]) -> Iterator[Finding]:
    if not cards:
        if rig.kind == "cuda":
            yield Finding(
                "gpu", FAIL, f"no NVIDIA GPU, which the rig {rig.name} needs", "check nvidia-smi, or use the rig cpu"
            )
        else:
            yield Finding("gpu", OK, "no NVIDIA GPU; the embedded engine runs on the CPU")
        return
    for card in cards:
        subject = f"gpu {card['index']}"
        total, free = card["memory_total_gib"], card["memory_free_gib"]
        yield Finding(subject, OK, f"{card['name']}, driver {card['driver']}, CUDA up to {card['driver_cuda']}")
        needed = rig.match.get("min_gpu_memory_gib", 0) if rig.kind == "cuda" else 0
        if total is not None and total < needed:
            yield Finding(subject, FAIL, f"{total} GiB of memory, the rig needs {needed}", "use another rig")
        elif free is not None and free < 0.9 * total:
            yield Finding(
                subject, WARN, f"{free} of {total} GiB of memory are free", "end its other users, else the KV cache is smaller"
            )
        else:
            yield Finding(subject, OK, f"{free} of {total} GiB of memory are free")
        if others := card["processes"]:
            pids = ", ".join(str(process["pid"]) for process in others)
            yield Finding(subject, WARN, f"other processes compute on it: {pids}", "wait for them or end them; numbers would suffer")
        held = [reason for reason in card["clock_reasons"] or [] if reason not in HARMLESS_CLOCKS]
        clocks = f"clocks {card['sm_mhz']} of {card['sm_max_mhz']} MHz, memory {card['mem_mhz']} of {card['mem_max_mhz']} MHz"
        if held:
            yield Finding(subject, WARN, f"{clocks}; held down by: {', '.join(held)}", "look at cooling and power (nvidia-smi -q)")
        else:
            yield Finding(subject, OK, clocks)


def _processor(rig: rigs.Rig) -> Iterator[Finding]:
    cores, total = hardware.usable_cores(), os.cpu_count() or 1
    what = f"{cores:g} of {total} cores usable, {hardware.host_facts()['cpu']['model']}"
    if cores < 2:
        yield Finding("cores", WARN, what, "server and load generator share one core: expect late requests")
    else:
        yield Finding("cores", OK, what)
    busy = psutil.cpu_percent(interval=0.5)
    if busy > BUSY_PERCENT:
        yield Finding("load", WARN, f"other programs take {busy:.0f} % of all cores", "end them before measuring")
    else:
        yield Finding("load", OK, f"other programs take {busy:.0f} % of all cores")


def _memory(rig: rigs.Rig) -> Iterator[Finding]:
    available = psutil.virtual_memory().available / hardware.GIB
    what = f"{available:.1f} GiB of memory available"
    if rig.kind == "cpu" and available < NEEDED_MEMORY_GIB:
        yield Finding("memory", FAIL, what, f"the embedded engine needs {NEEDED_MEMORY_GIB:g} GiB: end other programs")
    else:
        yield Finding("memory", OK, what)


def _disk() -> Iterator[Finding]:
    places = {"records": rigs.root() / "benchmarks" / "local", "model cache": weights.cache_folder()}
    for name, folder in places.items():
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free / 1e9
        if not os.access(existing, os.W_OK):
            yield Finding("disk", FAIL, f"{existing} ({name}) is not writable", "change its owner, or work on a copy you own")
        elif free < NEEDED_DISK_GB:
            yield Finding("disk", FAIL, f"{free:.1f} GB free for the {name}", f"free at least {NEEDED_DISK_GB:g} GB")
        else:
            yield Finding("disk", OK, f"{free:.0f} GB free for the {name}")


def _ports(port: int | None) -> Iterator[Finding]:
    if port is None:
        yield Finding("port", OK, "a free one is chosen for each server")
        return
    try:
        server.require_free_port(port)
        yield Finding("port", OK, f"{port} is free")
    except WallError as problem:
        yield Finding("port", FAIL, problem.message, problem.remedy)


def _leftovers() -> Iterator[Finding]:
    for left in server.leftovers():
        what = f"an earlier run left a server behind: process group {left['pid']}, port {left['port']}"
        yield Finding("leftovers", WARN, what, f"kill -- -{left['pid']}")


def _browser() -> Iterator[Finding]:
    path = chromium()
    if path and importlib.util.find_spec("playwright"):
        yield Finding("browser", OK, f"{path} (for the tests)")
    elif path:
        yield Finding("browser", WARN, "Playwright is not installed (for the tests)", "make test installs it")
    else:
        yield Finding("browser", WARN, "no Chromium (for the tests)", CHROMIUM_REMEDY)
