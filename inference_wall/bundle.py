"""Bundles: the engine, this harness and rigs in a few files, for a GPU box without network.

What:   `bundle` packs up to three archives, each in parts of a bounded size: `engine` (large, changes with the box's file alone), `harness`
        (small, changes with every edit here) and `warm` (compiled kernels brought back from the box, so that servers start faster there);
        beside them their sums and the script that unpacks.
Why:    the way to such a box is often narrow: an upload form, a relay, a disk. So what has not changed is not packed again, a part
        is as small as the way asks for, and a damaged one is noticed before it is used.
Use:    wall bundle --box hopper --rig h200-27b --out DIR; there: bash DIR/unpack.sh; ~/inference-wall/wall run all --records-only
Not:    what a box has and lacks (`box`), measuring there (`post`), the models' folders: a box makes them itself, the same bytes in 2 s.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import records, rigs, shapes
from .box import Box, fetch, install, load_box
from .errors import WallError
from .weights import cache_folder

FORMAT = 1  # raise it when an engine archive is packed differently: it is then packed anew
PART_BYTES = 63_600_000
SUMS, NOTE, UNPACK = "SHA256SUMS", "bundle.json", "unpack.sh"
PACKED = "PACKED"  # in the packages' folder: box and inputs; the last file of its archive, so without it the archive is not whole
MOMENT = 1_767_225_600  # the date of every packed file: the same content is the same archive
ROOM = {"cache": 2_000_000_000, "out": 400_000_000}  # bytes that a new engine archive needs
HARNESS = ("inference_wall", "experiments", "benchmarks/published", "pyproject.toml", "README.md", "LICENSE")
NOT_PACKED = ("__pycache__", "static")  # of the harness: pages are built elsewhere
TARGET = "~/inference-wall"

Show = Callable[[str, int, int], None]  # what is being done, how much of it, of how much


def bundle(box_name: str, rig_names: Iterable[str], out: Path, *, part_bytes: int = PART_BYTES, cache: Path | None = None, warm: Path | None = None,
           show: Show = lambda what, done, total: None) -> list[str]:
    """Pack into the folder `out`, and return what was packed, one line an archive. `part_bytes` bounds each part.

    `cache` keeps the wheels between calls (default: in `weights.cache_folder()`). `warm` is the folder `cache` of the box. An engine archive
    that is whole and was made from the same inputs stays. Every problem is one WallError; nothing half-written carries a final name.
    """
    box = load_box(box_name)
    for name in rig_names:
        check_rig(rigs.load_rig(name), box)
    if warm is not None and not any(path.is_file() for path in warm.rglob("*")):
        raise WallError(f"there are no compiled kernels in {warm}", "--warm takes the folder `cache` of the box, brought here")
    if part_bytes < 1:
        raise WallError(f"parts of {part_bytes} bytes hold nothing", "leave --part-bytes out, or name what one transfer can take")
    if not shutil.which("xz"):
        raise WallError("the program `xz` is not installed", "install xz-utils (xz)")
    lines = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        note = _Note(out)
        # What the box has decides whether it fits, not what is packed.
        inputs = rigs.digest([FORMAT, part_bytes, box.name, box.python, box.machine, box.glibc, box.pins, box.leave_out, box.strip])
        if note.is_whole("engine", inputs):
            lines.append("engine: unchanged")
        else:
            _pack_engine(box, inputs, note, part_bytes, cache or cache_folder() / "bundle", show)
            lines.append(note.line("engine"))
        note.replace("harness", None, _parts(out, "harness", list(_harness()), part_bytes, show))
        lines.append(note.line("harness"))
        if warm is not None:
            members = [(path, f"cache/{path.relative_to(warm)}") for path in _files(warm) if path.relative_to(warm).parts[0] != "models"]
            note.replace("warm", None, _parts(out, "warm", members, part_bytes, show))
            lines.append(note.line("warm"))
        shutil.copyfile(_script("unpack.sh"), out / UNPACK)
    except OSError as problem:
        raise WallError(f"cannot write {problem.filename or out}: {problem.strerror}", "free some space or mend the permissions") from problem
    return lines


def check_rig(rig: rigs.Rig, box: Box) -> None:
    """Raise unless the rig can be measured on the box: its engine, and models that need no network."""
    if rig.kind != "cuda":
        raise WallError(f"rig {rig.name} does not measure a GPU", "choose a rig with kind = \"cuda\"")
    if rig.engine.get("vllm") != box.engine:
        raise WallError(f"rig {rig.name} is written for vLLM {rig.engine.get('vllm')}, box {box.name} gets {box.engine}",
                        f"change `vllm` in experiments/rigs/{rig.name}.toml, or `engine` in experiments/boxes/{box.name}.toml")
    variants = rig.posts.get("part_5", {}).get("variants", [])
    for model in [rig.model, *(each for each in variants if not each.get("optional"))]:
        if "hub" in model or "embedded" in model:
            raise WallError(f"rig {rig.name} takes {model.get('hub') or model['embedded']} from where a box without network cannot get it",
                            "give the rig a `shape`, or a `path` of the box")
        if "shape" in model:
            shapes.shape(model["shape"])


# --- archives -----------------------------------------------------------------------------------------------------


def _pack_engine(box: Box, inputs: str, note: _Note, part_bytes: int, cache: Path, show: Show) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    for left in cache.glob("engine-*"):  # by a run that was killed
        shutil.rmtree(left)
    for folder, needed in ((cache, ROOM["cache"]), (note.out, ROOM["out"])):
        if shutil.disk_usage(folder).free < needed:
            raise WallError(f"{needed / 1e9:.1f} GB are not free at {folder}", "free some space, or choose another --cache or --out")
    total, done = len(box.pins), 0

    def arrived(count: int) -> None:
        nonlocal done
        done += count
        show("downloading packages", done, total)

    wheels = fetch(box, cache / "wheels", arrived)
    with tempfile.TemporaryDirectory(dir=cache, prefix="engine-") as scratch:
        site = Path(scratch) / "site"
        show("installing packages", 0, 1)
        install(box, wheels, site)
        show("installing packages", 1, 1)
        members = [(path, f"site/{path.relative_to(site)}") for path in _files(site)]
        last = Path(scratch) / PACKED
        last.write_text(f"{box.name}\n{inputs}\n")
        note.replace("engine", inputs, _parts(note.out, "engine", [*members, (last, f"site/{PACKED}")], part_bytes, show))


def _harness() -> Iterator[tuple[Path, str]]:
    top = rigs.root()
    for name in HARNESS:
        for path in [top / name] if (top / name).is_file() else _files(top / name):
            place = path.relative_to(top)
            if not set(NOT_PACKED) & set(place.parts):
                yield path, str(place)
    yield _script("wall.sh"), "wall"


def _script(name: str) -> Path:
    return rigs.root() / "experiments" / "boxes" / name


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def _parts(out: Path, name: str, members: list[tuple[Path, str]], part_bytes: int, show: Show) -> dict[str, str]:
    """Pack the members ((file, path in the archive)) and return sha256 by part, `<name>.000` and so on. Old parts go when the new are whole."""
    whole = out / f".{name}.tar.xz"
    try:
        _compress(whole, members, lambda done, total: show(f"packing {name}", done, total))
        sums, building = {}, []
        with whole.open("rb") as source:
            while block := source.read(part_bytes):
                part = f"{name}.{len(sums):03d}"
                building.append(out / f".{part}.writing")
                building[-1].write_bytes(block)
                sums[part] = hashlib.sha256(block).hexdigest()
    finally:
        whole.unlink(missing_ok=True)
    for old in out.glob(f"{name}.[0-9]*"):
        old.unlink()
    for path in building:
        path.rename(out / path.name.removeprefix(".").removesuffix(".writing"))
    return sums


def _compress(target: Path, members: list[tuple[Path, str]], on_done: Callable[[int, int], None]) -> None:
    """A tar of the members through xz, which every box can read. Who packed, and when, is not in it."""

    def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime, entry.mode = MOMENT, 0o755 if entry.mode & 0o100 else 0o644
        return entry

    total, done = sum(path.lstat().st_size for path, _ in members), 0
    with target.open("wb") as sink, subprocess.Popen(["xz", "-9", "-T0", "-c"], stdin=subprocess.PIPE, stdout=sink, stderr=subprocess.PIPE) as packer:
        try:
            with tarfile.open(fileobj=packer.stdin, mode="w|", format=tarfile.GNU_FORMAT) as archive:
                for path, place in members:
                    archive.add(path, place, recursive=False, filter=anonymous)
                    done += path.lstat().st_size
                    on_done(done, total)
            packer.stdin.close()
        except BrokenPipeError:
            pass  # xz has ended, and says why
        said = packer.stderr.read().decode(errors="replace").strip()
        if packer.wait():
            raise WallError(f"xz failed: {said}", "free some space or memory, then run the same command again")


class _Note:
    """What the folder holds: `bundle.json`, with inputs and sums by archive, and SHA256SUMS made from it."""

    def __init__(self, out: Path):
        self.out = out
        try:
            self.archives: dict[str, dict[str, Any]] = json.loads((out / NOTE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.archives = {}

    def is_whole(self, name: str, inputs: str) -> bool:
        """Whether the archive was made from these inputs and every part still is what it was."""
        known = self.archives.get(name)
        return known is not None and known["inputs"] == inputs and all(
            (self.out / part).is_file() and hashlib.sha256((self.out / part).read_bytes()).hexdigest() == digest
            for part, digest in known["parts"].items())

    def replace(self, name: str, inputs: str | None, parts: dict[str, str]) -> None:
        self.archives[name] = {"inputs": inputs, "parts": parts}
        records.write_json(self.out / NOTE, self.archives)
        (self.out / SUMS).write_text("".join(f"{digest}  {part}\n" for each in self.archives.values() for part, digest in each["parts"].items()))

    def line(self, name: str) -> str:
        parts = self.archives[name]["parts"]
        size = sum((self.out / part).stat().st_size for part in parts)
        return f"{name}: {size / 1e6:.1f} MB in {len(parts)} part{'s' if len(parts) > 1 else ''}"


def commands(out: Path, rig_names: Iterable[str]) -> list[str]:
    """What to type on the box, once the folder is there: unpack, then measure each rig."""
    return [f"bash {out.name}/{UNPACK}", *(f"{TARGET}/wall run all --rig {name} --records-only" for name in rig_names)]


@contextmanager
def on_terminal() -> Iterator[Show]:
    """What `bundle` shows: a bar for each stage on a screen, a line for each in a log."""
    import rich.console
    from rich.progress import Progress

    console = rich.console.Console(stderr=True)
    stages: dict[str, Any] = {}
    with Progress(console=console, disable=not console.is_terminal) as bars:

        def show(what: str, done: int, total: int) -> None:
            if what not in stages:
                stages[what] = bars.add_task(what, total=total)
                if not console.is_terminal:
                    console.print(what)
            bars.update(stages[what], completed=done)

        yield show
