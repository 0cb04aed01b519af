"""Write the three requirement files: one lock, and each engine on top of it.

What:   requirements-site.txt is the lock: book, instrument and tests, every version pinned for Linux and macOS, Python 3.11 and
        later. requirements.txt (NVIDIA GPU) and requirements-cpu.txt (embedded engine) start with `-r requirements-site.txt`
        and add their engine, resolved under the lock's versions; no package stands in two files.
Why:    the page must be rendered by the same tools wherever the engine ran, and an engine pins much of its own.
How:    `make lock` (needs the network; uses uv) rewrites the files from pyproject.toml. `python tools/lock.py --check` needs no
        network and fails when pyproject.toml or this file changed since.
Not:    hashes of wheels, and other machines than x86-64 Linux for the engines.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = "requirements-site.txt"
ANY = "implementation_name == 'cpython' and (sys_platform == 'linux' or sys_platform == 'darwin')"
LINUX = "implementation_name == 'cpython' and sys_platform == 'linux' and platform_machine == 'x86_64'"
PYTHONS = ("3.11.0", "3.11.9", "3.12.0", "3.12.9", "3.13.0", "3.14.0")
HEADER = """\
# {what}
# Made by tools/lock.py from pyproject.toml; do not edit. Install with: pip install --no-deps -r {file}
# inputs: {digest}
"""
WHAT = {
    LOCK: "The lock: book, instrument and tests, without an engine.",
    "requirements.txt": "GPU box: the lock and vLLM 0.18.0, the series' version. Python 3.11 to 3.13, x86-64 Linux.",
    "requirements-cpu.txt": "Embedded engine: the lock and vLLM on the CPU, with the weights of a small model. x86-64 Linux.",
}


def settings() -> dict:
    """pyproject.toml, parsed."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def digest(project: dict) -> str:
    """Hash of everything the files are made from: the requirement lists and this file."""
    inputs = {
        "dependencies": project["project"]["dependencies"],
        "test": project["project"]["optional-dependencies"]["test"],
        "engines": project["tool"]["inference-wall"]["engines"],
        "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def check() -> list[str]:
    """The names of files that were made from other inputs than the present ones (or are missing)."""
    expected = f"# inputs: {digest(settings())}"
    return [name for name in WHAT if not (ROOT / name).is_file() or expected not in (ROOT / name).read_text().splitlines()]


def write() -> None:
    """Resolve and rewrite all three files."""
    project = settings()
    mark = digest(project)
    direct = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["test"]
    lock = pinned(direct, ANY, ">=3.11")
    put(LOCK, [], lock, mark)
    held = {canonicalize_name(Requirement(line).name) for line in lock}
    for engine in project["tool"]["inference-wall"]["engines"].values():
        lines = pinned(engine["packages"], LINUX, engine["python"], constraints=lock, leave_out=engine.get("leave_out", []))
        own = [line for line in lines if canonicalize_name(Requirement(line).name) not in held]
        put(engine["file"], [f"-r {LOCK}"], sorted(own + engine.get("append", []), key=str.lower), mark)


def pinned(
    packages: list[str], environment: str, python: str, constraints: Iterable[str] = (), leave_out: Iterable[str] = ()
) -> list[str]:
    """`name==version` lines for `packages` and all they need, with a marker only where the Pythons differ."""
    bounds = " and ".join(f"python_version {part[:-len(part.lstrip('<>='))]} '{part.lstrip('<>=')}'" for part in python.split(","))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "pyproject.toml").write_text(
            f"[project]\nname = 'lock'\nversion = '0'\nrequires-python = '{python}'\ndependencies = {json.dumps(packages)}\n"
            f"[tool.uv]\nenvironments = [\"{environment} and {bounds}\"]\n"
        )
        (work / "constraints.txt").write_text("\n".join(constraints))
        (work / "overrides.txt").write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in leave_out))
        command = [uv(), "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--no-annotate", "--no-header"]
        command += ["--constraint", "constraints.txt", "--override", "overrides.txt", "pyproject.toml"]
        done = subprocess.run(command, cwd=work, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"uv found no set of versions:\n{done.stderr}")
    supported = [version for version in PYTHONS if Marker(bounds).evaluate({"python_version": version.rpartition(".")[0]})]
    lines = (simplify(line, environment, supported) for line in done.stdout.splitlines())
    return [line for line in lines if line]


def simplify(line: str, environment: str, pythons: list[str]) -> str | None:
    """Drop the marker when it holds in every supported environment, and the line when it holds in none."""
    requirement = Requirement(line)
    if requirement.marker is None:
        return line
    systems = [("linux", "x86_64")] if environment == LINUX else [("linux", "x86_64"), ("darwin", "arm64")]
    holds = {
        (python, system): requirement.marker.evaluate(
            {
                "python_full_version": python,
                "python_version": python.rpartition(".")[0],
                "sys_platform": system,
                "platform_machine": machine,
                "platform_system": {"linux": "Linux", "darwin": "Darwin"}[system],
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
            }
        )
        for python in pythons
        for system, machine in systems
    }
    name = f"{requirement.name}{requirement.specifier}"
    if all(holds.values()):
        return name
    if not any(holds.values()):
        return None
    texts = [*(f"python_full_version {sign} '{python}'" for sign in ("<", ">=") for python in ("3.11.5", "3.12", "3.13", "3.14"))]
    texts += [f"sys_platform == '{system}'" for system, _ in systems]
    for text in texts:  # the shortest marker that says the same
        one = Marker(text)
        if all(
            one.evaluate({"python_full_version": python, "sys_platform": system}) == value for (python, system), value in holds.items()
        ):
            return f"{name} ; {text}"
    return f"{name} ; {requirement.marker}"


def put(file: str, first: list[str], lines: list[str], mark: str) -> None:
    """Write one requirement file."""
    text = HEADER.format(what=WHAT[file], file=file, digest=mark) + "\n".join([*first, *lines]) + "\n"
    (ROOT / file).write_text(text)
    print(f"{file}: {len(lines)} packages")


def uv() -> str:
    """The resolver: beside this Python, or on the PATH."""
    path = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    return path or sys.exit("uv is not installed; pip install uv")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if stale := check():
            sys.exit(f"stale: {', '.join(stale)}; run make lock")
    else:
        write()
