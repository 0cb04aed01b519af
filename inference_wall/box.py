"""A box: a machine with a GPU and without network, and what it lacks for the engine and this harness.

What:   reads `experiments/boxes/*.toml`; downloads the wheels that the box lacks, for the box's Python and not for this one; installs them
        into a folder and takes out what a server there never opens. `check` looks, on the box, whether it is the one that was packed for.
Why:    GPUs often stand in clusters and laboratories without network. Their Python mostly has torch, which is by far the largest part,
        and an engine built for another torch does not load; so what is there and what comes along must be written down exactly.
Use:    box = load_box("hopper"); install(box, fetch(box, wheels), site); on the box: python3 -m inference_wall.box hopper
Not:    archives and the launcher (`bundle`).
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import WallError
from .rigs import root

TOGETHER = 16  # wheels that one call of pip downloads: what is there after a break is not asked for again
OLDEST_GLIBC = 5
LEGACY_TAGS = ("manylinux2014", "manylinux2010", "manylinux1")
NO_NETWORK = re.compile(r"NewConnectionError|Failed to establish|name resolution|Name or service not known|ConnectTimeout|ReadTimeout|ProxyError"
                        r"|Network is unreachable|MaxRetryError")


@dataclass(frozen=True)
class Box:
    """One kind of box, as written in its TOML file. `has`: package -> version, empty where any will do. `packages`: exact pins."""

    name: str
    title: str
    python: str
    machine: str
    glibc: str
    engine: str
    exact: list[str]
    packages: list[str]
    do_without: list[str]
    leave_out: list[str]
    strip: list[str]
    has: dict[str, str]

    @property
    def pins(self) -> list[str]:
        """Everything that is brought along, the engine first."""
        return [f"vllm=={self.engine}", *self.packages]


def box_names() -> list[str]:
    return sorted(path.stem for path in (root() / "experiments" / "boxes").glob("*.toml"))


def load_box(name: str) -> Box:
    """Read one box; an unknown name, a missing key, and a package that is both there and brought along are errors."""
    if name not in box_names():
        raise WallError(f"unknown box {name!r}", f"known: {', '.join(box_names())}; another one is a file in experiments/boxes")
    path = root() / "experiments" / "boxes" / f"{name}.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        box = Box(name=name, **data)
    except (tomllib.TOMLDecodeError, TypeError) as problem:
        raise WallError(f"{path.name} does not describe a box: {problem}", f"mend {path}; experiments/boxes/README.md names the keys") from problem
    for pin in box.packages:
        if not re.fullmatch(r"[\w.-]+==[\w.!+-]+", pin):
            raise WallError(f"{path.name}: {pin!r} is not an exact version", "write it like name==1.2.3")
        if _plain(pin.partition("==")[0]) in {_plain(each) for each in box.has}:
            raise WallError(f"{path.name}: {pin} is brought along although the box has it", "take it out of `packages` or of `has`")
    return box


def _plain(name: str) -> str:
    """A package's name as wheels spell it: `Foo.Bar-baz` -> `foo_bar_baz`."""
    return re.sub(r"[-_.]+", "_", name).lower()


# --- here, with a network -----------------------------------------------------------------------------------------


def fetch(box: Box, wheels: Path, on_done: Callable[[int], None] = lambda count: None) -> Path:
    """Download what the folder lacks of the box's wheels, and return the folder. `on_done` gets how many have just arrived.

    Raises WallError without pip or network, for a package without a wheel for the box, and when the disk is full.
    """
    wheels.mkdir(parents=True, exist_ok=True)
    lacking = [pin for pin in box.pins if not _wheel(wheels, pin)]
    on_done(len(box.pins) - len(lacking))
    # The engine is by far the largest: it comes alone.
    groups = [[pin for pin in lacking if pin.startswith("vllm==")]]
    rest = [pin for pin in lacking if pin not in groups[0]]
    groups += [rest[start:start + TOGETHER] for start in range(0, len(rest), TOGETHER)]
    for group in filter(None, groups):
        _pip(["download", "--retries", "2", "--timeout", "20", *_target(box), "--dest", str(wheels), *group])
        on_done(len(group))
    return wheels


def _wheel(wheels: Path, pin: str) -> Path | None:
    name, _, version = pin.partition("==")
    return next((path for path in wheels.glob(f"*-{version}-*.whl") if _plain(path.name.split("-")[0]) == _plain(name)), None)


def _target(box: Box) -> list[str]:
    """pip's options for the box's Python instead of this one."""
    major, newest = box.glibc.split(".")
    tags = [f"manylinux_{major}_{minor}_{box.machine}" for minor in range(int(newest), OLDEST_GLIBC - 1, -1)]
    tags += [f"{tag}_{box.machine}" for tag in LEGACY_TAGS]
    abis = (f"cp{box.python.replace('.', '')}", "abi3", "none")
    return ["--no-deps", "--only-binary=:all:", "--python-version", box.python, "--implementation", "cp",
            *(word for abi in abis for word in ("--abi", abi)), *(word for tag in (*tags, "any") for word in ("--platform", tag))]


def _pip(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], capture_output=True, text=True)
    if done.returncode == 0:
        return
    said = done.stderr
    lacking = re.search(r"No matching distribution found for (\S+)", said)
    if "No module named pip" in said:
        raise WallError("this environment has no pip", f"install it: {sys.executable} -m ensurepip")
    if NO_NETWORK.search(said):
        raise WallError("the package index cannot be reached", "pack where there is a network; wheels that have arrived are kept")
    if "No space left" in said:
        raise WallError("the disk is full", "free some space or choose another --cache; wheels that have arrived are kept")
    if lacking:
        raise WallError(f"there is no wheel of {lacking[1]} for the box", "another version may have one: change it in experiments/boxes")
    raise WallError(f"pip failed: {' | '.join(said.strip().splitlines()[-3:])}", "mend what pip says, then run the same command again")


def install(box: Box, wheels: Path, site: Path) -> None:
    """Install the wheels into the folder `site`, without bytecode, and take out what is not needed there.

    Raises WallError when a requirement of a package is nowhere to be found on the box, and for a pattern that fits no file.
    """
    _pip(["install", "--no-index", "--find-links", str(wheels), "--no-compile", *_target(box), "--target", str(site), *box.pins])
    for name, requirement in missing_requirements(box, importlib.metadata.distributions(path=[str(site)])):
        raise WallError(f"{name} needs {requirement}, which the box lacks",
                        f"add it to `packages`, `has` or `do_without` in experiments/boxes/{box.name}.toml")
    for path in _matching(box, site, box.leave_out):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for folder in list(site.rglob("__pycache__")):
        shutil.rmtree(folder)
    for path in _matching(box, site, box.strip):
        _strip(path)


def missing_requirements(box: Box, distributions: Iterable[Any]) -> list[tuple[str, str]]:
    """(package, requirement) for each requirement that is neither brought along, nor there, nor given up on purpose."""
    from packaging.requirements import Requirement

    known = {_plain(name) for name in (*(pin.partition("==")[0] for pin in box.pins), *box.has, *box.do_without)}
    there = {"python_version": box.python, "python_full_version": f"{box.python}.0", "platform_machine": box.machine, "extra": ""}
    wanted = [(each.name, Requirement(text)) for each in distributions for text in each.requires or []]
    return [(name, str(each)) for name, each in wanted
            if _plain(each.name) not in known and (each.marker is None or each.marker.evaluate(there))]


def _matching(box: Box, site: Path, patterns: list[str]) -> list[Path]:
    found = []
    for pattern in patterns:
        paths = sorted(site.glob(pattern))
        if not paths:
            raise WallError(f"nothing in the packages is called {pattern}", f"the versions have changed: mend experiments/boxes/{box.name}.toml")
        found += paths
    return found


def _strip(path: Path) -> None:
    if not shutil.which("strip"):
        raise WallError("the program `strip` is not installed", "install binutils")
    done = subprocess.run(["strip", "--strip-unneeded", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise WallError(f"strip failed on {path.name}: {done.stderr}", "take it out of `strip` in the box's file")


# --- on the box ---------------------------------------------------------------------------------------------------


def check(box: Box) -> str:
    """One line on how this machine differs from the box; empty when it does not.

    Raises WallError for another Python, a package that should be there and is not, and another version where only one loads.
    """
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here != box.python:
        raise WallError(f"this is Python {here}, and the bundle was packed for {box.python}",
                        "name the right one: WALL_PYTHON=/path/to/python3, or pack for this one")
    found = {name: _version(name) for name in box.has}
    lacking = [name for name, version in found.items() if version is None]
    if lacking:
        raise WallError(f"this Python lacks {', '.join(lacking)}", "name another one with WALL_PYTHON, or move them from `has` to `packages` in "
                        f"experiments/boxes/{box.name}.toml and pack again")
    differing = [name for name, version in found.items() if box.has[name] and _public(version) != _public(box.has[name])]
    wrong = [f"{name} {found[name]} instead of {box.has[name]}" for name in differing]
    if set(differing) & set(box.exact):
        raise WallError(f"this Python has {', '.join(wrong)}; the engine's kernels load with {', '.join(box.exact)} as packed for only",
                        "name another Python with WALL_PYTHON, or pack with an engine built for this torch")
    return f"packed for slightly other versions than are here: {', '.join(wrong)}" if wrong else ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _public(version: str | None) -> str:
    return (version or "").partition("+")[0]


def main() -> None:
    try:
        if note := check(load_box(sys.argv[1])):
            print(f"note: {note}", file=sys.stderr)
    except WallError as problem:
        print(problem, file=sys.stderr)
        sys.exit(problem.exit_code)


if __name__ == "__main__":
    main()
