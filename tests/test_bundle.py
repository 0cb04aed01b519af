"""Bundles for a box without network: exact pins, bounded parts, honest sums, and a harness that starts without the packages of pages."""

import ast
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from inference_wall import box, bundle, rigs
from inference_wall.errors import WallError

REPOSITORY = Path(__file__).resolve().parent.parent
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
PAGES = ("papermill", "jupytext", "nbformat", "nbclient", "jupyter_client", "ipywidgets", "IPython", "plotly", "sphinx", "bs4", "myst_nb")
TINY = f"""
title = "a box for tests"
python = "{HERE}"
machine = "x86_64"
glibc = "2.39"
engine = "0.25.1"
exact = ["click"]
packages = ["small-part==1.0"]
do_without = ["huge"]
leave_out = ["vllm/kernels/*_fa2.so", "bin"]
strip = []

[has]
click = "{importlib.metadata.version('click')}"
"""


def wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> None:
    facts = f"{name}-{version}.dist-info"
    told = "".join(f"Requires-Dist: {each}\n" for each in requires)
    every = {**files, f"{facts}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{told}",
             f"{facts}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as packed:
        for path, text in every.items():
            packed.writestr(path, text)
        packed.writestr(f"{facts}/RECORD", "".join(f"{path},,\n" for path in (*every, f"{facts}/RECORD")))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A small repository with a small box and wheels for it; `cache` and `out` lie beside."""
    top = tmp_path / "repository"
    shutil.copytree(REPOSITORY / "experiments", top / "experiments")
    pages = shutil.ignore_patterns("__pycache__", "site", "part_*", "*_figures.py", "*_words.py", "freeze*", "cliff*", "starvation*", "quantization*")
    shutil.copytree(REPOSITORY / "inference_wall", top / "inference_wall", ignore=pages)  # a small harness is packed fast
    (top / "inference_wall" / "site" / "static").mkdir(parents=True)
    (top / "inference_wall" / "site" / "static" / "large.js").write_text("x")
    (top / "benchmarks" / "published").mkdir(parents=True)
    for name in ("benchmarks/published/numbers.csv", "pyproject.toml", "README.md", "LICENSE"):
        (top / name).write_text("x\n")
    (top / "experiments" / "boxes" / "tiny.toml").write_text(TINY)
    wheels = tmp_path / "cache" / "wheels"
    wheels.mkdir(parents=True)
    wheel(wheels, "vllm", "0.25.1", {"vllm/__init__.py": "", "vllm/kernels/_fa2.so": "old", "vllm/kernels/_fa3.so": "new",
                                     "vllm/data.txt": "".join(hashlib.sha256(str(n).encode()).hexdigest() for n in range(400)),
                                     "vllm-0.25.1.dist-info/entry_points.txt": "[console_scripts]\nvllm = vllm:main\n"},
          requires=("small.part>=1", "click", "huge", 'colours; extra == "paint"', 'old; python_version < "3"'))
    wheel(wheels, "small_part", "1.0", {"small_part.py": "answer = 42\n"})
    monkeypatch.setenv("WALL_ROOT", str(top))
    monkeypatch.delenv("WALL_BENCHMARKS", raising=False)
    return tmp_path


def pack(place: Path, **options) -> list[str]:
    return bundle.bundle("tiny", ["h200-4b"], place / "out", cache=place / "cache", **options)


def unpack(place: Path) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", place / "out" / "unpack.sh", place / "there"], capture_output=True, text=True)


def wall(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WALL_")}
    return subprocess.run([place / "there" / "wall", *arguments], capture_output=True, text=True, cwd=place,
                          env={**inherited, "WALL_PYTHON": sys.executable, **environment})


def members(place: Path, archive: str) -> list[tarfile.TarInfo]:
    whole = b"".join(path.read_bytes() for path in sorted((place / "out").glob(f"{archive}.[0-9]*")))
    with tarfile.open(fileobj=io.BytesIO(whole), mode="r:xz") as packed:
        return packed.getmembers()


# --- packing ------------------------------------------------------------------------------------------------------


def test_parts_are_bounded_and_their_sums_are_true(place):
    lines = pack(place, part_bytes=5000)
    parts = sorted((place / "out").glob("*.[0-9]*"))
    assert len([part for part in parts if part.name.startswith("engine")]) > 1
    assert all(part.stat().st_size <= 5000 for part in parts)
    told = dict(reversed(line.split("  ")) for line in (place / "out" / "SHA256SUMS").read_text().splitlines())
    assert told == {part.name: hashlib.sha256(part.read_bytes()).hexdigest() for part in parts}
    assert [line.partition(":")[0] for line in lines] == ["engine", "harness"]


def test_the_engine_is_trimmed_and_names_nobody(place):
    pack(place)
    entries = members(place, "engine")
    names = [entry.name for entry in entries]
    assert {"site/vllm/kernels/_fa3.so", "site/vllm-0.25.1.dist-info/METADATA", "site/small_part.py"} <= set(names)
    assert names[-1] == "site/PACKED"
    assert not [name for name in names if "_fa2" in name or "__pycache__" in name or "/bin/" in name or "direct_url" in name]
    for entry in (*entries, *members(place, "harness")):
        assert (entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime) == (0, 0, "", "", bundle.MOMENT)


def test_the_harness_has_what_measuring_needs_and_no_records(place):
    (place / "repository" / "benchmarks" / "local" / "part_1").mkdir(parents=True)
    (place / "repository" / "benchmarks" / "local" / "part_1" / "secret").write_text("x")
    pack(place)
    names = {entry.name for entry in members(place, "harness")}
    assert {"wall", "inference_wall/measure.py", "experiments/rigs/h200-4b.toml", "experiments/boxes/tiny.toml", "benchmarks/published/numbers.csv",
            "experiments/part_5_quantization/text.txt", "pyproject.toml"} <= names
    assert not [name for name in names if "local" in name or "__pycache__" in name or "/static/" in name]


def test_what_has_not_changed_is_not_packed_again(place, monkeypatch):
    pack(place)
    before = {path.name: path.read_bytes() for path in (place / "out").iterdir()}

    def packed(*_):
        raise AssertionError("the engine was packed again")

    with monkeypatch.context() as patched:
        patched.setattr(bundle, "fetch", packed)
        box_file = place / "repository" / "experiments" / "boxes" / "tiny.toml"
        assert pack(place)[0] == "engine: unchanged"
        assert before == {path.name: path.read_bytes() for path in (place / "out").iterdir()}, "the same content must give the same bytes"
        box_file.write_text(TINY + 'rich = "1"\n')
        assert pack(place)[0] == "engine: unchanged"  # what the box has changes nothing in the archive
        (place / "repository" / "inference_wall" / "errors.py").write_text("# other\n")
        assert pack(place)[0] == "engine: unchanged"
        assert (place / "out" / "harness.000").read_bytes() != before["harness.000"]
    box_file.write_text(TINY.replace('"bin"]', '"bin", "vllm/data.txt"]'))
    assert pack(place)[0].startswith("engine: ")
    assert (place / "out" / "engine.000").read_bytes() != before["engine.000"]


@pytest.mark.parametrize("harm", [lambda part: part.write_bytes(b"other"), lambda part: part.unlink()])
def test_a_damaged_or_lost_engine_part_is_packed_again(place, harm):
    pack(place)
    part = place / "out" / "engine.000"
    good = part.read_bytes()
    harm(part)
    assert pack(place)[0] != "engine: unchanged" and part.read_bytes() == good


def test_parts_of_before_do_not_stay(place):
    pack(place, part_bytes=2000)
    pack(place)
    assert sorted(path.name for path in (place / "out").iterdir()) == ["SHA256SUMS", "bundle.json", "engine.000", "harness.000", "unpack.sh"]


def test_compiled_kernels_come_along_and_models_do_not(place):
    for name in ("triton/ab/kernel.cubin", "vllm/torch_compile_cache/x", "models/big/config.json"):
        (place / "back" / name).parent.mkdir(parents=True)
        (place / "back" / name).write_text(name)
    pack(place, warm=place / "back")
    assert [entry.name for entry in members(place, "warm")] == ["cache/triton/ab/kernel.cubin", "cache/vllm/torch_compile_cache/x"]
    assert unpack(place).returncode == 0 and (place / "there" / "cache" / "triton" / "ab" / "kernel.cubin").is_file()


@pytest.mark.parametrize(("change", "said"), [
    ({"box_name": "none"}, "unknown box"), ({"rig_names": ["none"]}, "unknown rig"), ({"rig_names": ["cpu"]}, "does not measure a GPU"),
    ({"rig_names": ["a10g"]}, "is written for vLLM 0.18.0"), ({"part_bytes": 0}, "hold nothing"),
    ({"warm": Path("experiments")}, "no compiled kernels")])
def test_bad_input_is_one_error_before_anything_is_packed(place, monkeypatch, change, said):
    (place / "experiments").mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setattr(bundle, "fetch", lambda *_: pytest.fail("something was fetched"))
    with pytest.raises(WallError, match=said):
        bundle.bundle(**{"box_name": "tiny", "rig_names": ["h200-4b"], "out": place / "out", "cache": place / "cache", **change})
    assert not (place / "out").exists()


@pytest.mark.parametrize(("model", "said"), [
    ({"hub": "Qwen/Qwen3.5-4B"}, "cannot get it"), ({"embedded": "smollm2-135m-instruct"}, "cannot get it"), ({"shape": "qwen3.5-4c"}, "no shape")])
def test_a_model_that_the_box_cannot_get_is_refused(model, said):
    whole = rigs.load_rig("h200-4b")
    for rig in (rigs.Rig("r", "R", "cuda", model=model, engine=whole.engine),
                rigs.Rig("r", "R", "cuda", model=whole.model, engine=whole.engine, posts={"part_5": {"variants": [{"name": "v", **model}]}})):
        with pytest.raises(WallError, match=said):
            bundle.check_rig(rig, box.load_box("hopper"))


def test_a_missing_or_failing_xz_is_one_error_and_leaves_nothing_half_done(place, monkeypatch):
    programs = place / "programs"
    programs.mkdir()
    (programs / "xz").write_text("#!/bin/sh\nhead -c 100 >/dev/null\necho 'xz: (stdout): No space left on device' >&2\nexit 1\n")
    (programs / "xz").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    with pytest.raises(WallError, match=r"xz failed.*No space left"):
        pack(place)
    assert list((place / "out").iterdir()) == []
    assert [path.name for path in (place / "cache").iterdir()] == ["wheels"]
    monkeypatch.setattr(bundle.shutil, "which", lambda name: None)
    with pytest.raises(WallError, match="`xz` is not installed"):
        pack(place)


def test_too_little_room_is_said_before_the_download(place, monkeypatch):
    monkeypatch.setattr(bundle, "fetch", lambda *_: pytest.fail("something was fetched"))
    monkeypatch.setattr(bundle.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(WallError, match="are not free"):
        pack(place)


# --- the box's packages -------------------------------------------------------------------------------------------


def test_only_what_is_lacking_is_downloaded_and_for_the_box(place, monkeypatch):
    asked = []
    monkeypatch.setattr(box, "_pip", asked.append)
    tiny = box.load_box("tiny")
    box.fetch(tiny, place / "cache" / "wheels")
    assert asked == []
    (place / "cache" / "wheels" / "small_part-1.0-py3-none-any.whl").rename(place / "cache" / "wheels" / "small_part-1.0.1-py3-none-any.whl")
    arrived = []
    box.fetch(tiny, place / "cache" / "wheels", arrived.append)
    assert arrived == [1, 1] and len(asked) == 1 and asked[0][-1] == "small-part==1.0"
    words = " ".join(asked[0])
    for option in ("--no-deps", "--only-binary=:all:", f"--python-version {HERE}", f"--abi cp{HERE.replace('.', '')}", "--abi abi3",
                   "--platform manylinux_2_39_x86_64", "--platform manylinux_2_17_x86_64", "--platform manylinux2014_x86_64", "--platform any"):
        assert option in words
    assert "manylinux_2_40" not in words


@pytest.mark.parametrize(("stderr", "said"), [
    ("WARNING: Retrying ... NewConnectionError('...')\nERROR: No matching distribution found for a==1", "package index cannot be reached"),
    ("ERROR: Could not find a version\nERROR: No matching distribution found for a==1", "no wheel of a==1 for the box"),
    ("python: No module named pip", "no pip"), ("ERROR: [Errno 28] No space left on device", "disk is full"),
    ("ERROR: odd", "pip failed: ERROR: odd")])
def test_what_pip_says_becomes_one_error(monkeypatch, stderr, said):
    monkeypatch.setattr(box.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", stderr))
    with pytest.raises(WallError, match=re.escape(said)):
        box._pip(["download"])


def test_a_requirement_that_is_nowhere_and_a_pattern_that_fits_nothing_are_errors(place):
    path = place / "repository" / "experiments" / "boxes" / "tiny.toml"
    path.write_text(TINY.replace('do_without = ["huge"]', "do_without = []"))
    with pytest.raises(WallError, match="vllm needs huge"):
        pack(place)
    path.write_text(TINY.replace("_fa2.so", "_fa9.so"))
    with pytest.raises(WallError, match="nothing in the packages is called vllm/kernels/"):
        pack(place)


@pytest.mark.parametrize(("old", "new", "said"), [
    ("small-part==1.0", "small-part>=1.0", "not an exact version"), ("small-part==1.0", "Click==8", "although the box has it"),
    ('engine = "0.25.1"', "", "engine"), ("strip = []", "stripp = []", "stripp"), ("strip = []", "strip = [", "does not describe")])
def test_a_box_file_that_makes_no_sense_is_one_error(place, old, new, said):
    path = place / "repository" / "experiments" / "boxes" / "tiny.toml"
    path.write_text(TINY.replace(old, new))
    with pytest.raises(WallError, match=said):
        box.load_box("tiny")


def _hopper(**has: str) -> box.Box:
    return box.Box("hopper", "", HERE, "x86_64", "2.39", "0.25.1", ["torch"], [], [], [], [], has)


def test_on_the_box_versions_are_looked_at(monkeypatch):
    monkeypatch.setattr(box, "_version", {"torch": "2.11.0", "numpy": "2.5.2"}.get)
    assert box.check(_hopper(torch="2.11.0+cu130", numpy="2.5.2")) == ""
    assert "numpy 2.5.2 instead of 2.4.0" in box.check(_hopper(torch="2.11.0", numpy="2.4.0"))
    assert box.check(_hopper(numpy="")) == ""
    with pytest.raises(WallError, match=r"torch 2\.11\.0 instead of 2\.12\.0"):
        box.check(_hopper(torch="2.12.0+cu130"))
    with pytest.raises(WallError, match="lacks pandas"):
        box.check(_hopper(pandas=""))
    with pytest.raises(WallError, match=r"packed for 2\.7"):
        box.check(box.Box("old", "", "2.7", "", "", "", [], [], [], [], [], {}))


# --- on the box ---------------------------------------------------------------------------------------------------


def test_unpacked_it_starts_and_compiles_once(place):
    pack(place)
    assert unpack(place).returncode == 0
    first, second = wall(place, "--version"), wall(place, "--version")
    assert first.returncode == second.returncode == 0 and "wall, version" in first.stdout
    assert "first use" in first.stderr and second.stderr == ""
    assert list((place / "there" / "site").rglob("*.pyc"))
    code = "import inference_wall.records as r, small_part, os; print(r.__file__, r.code_version(), small_part.answer, os.environ['HF_HUB_OFFLINE'])"
    (place / "python").write_text(f"#!/bin/sh\nexec {sys.executable} -c \"{code}\"\n")
    (place / "python").chmod(0o755)
    said = wall(place, "x", WALL_PYTHON=str(place / "python")).stdout.split()
    here = subprocess.run([sys.executable, "-c", "import inference_wall.records as r; print(r.code_version())"], cwd=REPOSITORY, capture_output=True,
                          text=True, env={name: value for name, value in os.environ.items() if name != "WALL_ROOT"})
    assert said == [str(place / "there" / "inference_wall" / "records.py"), here.stdout.strip(), "42", "1"]


def test_a_new_harness_replaces_the_old_one_and_no_record(place):
    pack(place)
    assert unpack(place).returncode == 0
    for name in ("benchmarks/local/part_1/record", "cache/triton/kernel", "inference_wall/gone.py"):
        (place / "there" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "there" / name).write_text("x")
    for part in (place / "out").glob("engine.*"):
        part.unlink()  # only the harness was sent again
    done = unpack(place)
    assert done.returncode == 0 and "engine" not in done.stdout, done.stderr
    assert (place / "there" / "benchmarks" / "local" / "part_1" / "record").is_file() and (place / "there" / "cache" / "triton" / "kernel").is_file()
    assert not (place / "there" / "inference_wall" / "gone.py").exists() and (place / "there" / "site" / "PACKED").is_file()


@pytest.mark.parametrize("harm", [lambda part: part.write_bytes(b"other"), lambda part: part.unlink()])
def test_a_part_that_was_damaged_or_lost_on_the_way_is_refused_and_replaces_nothing(place, harm):
    pack(place, part_bytes=5000)
    assert unpack(place).returncode == 0
    harm(place / "out" / "engine.001")
    done = unpack(place)
    assert done.returncode == 1 and "error: the engine archive is not whole" in done.stderr and "remedy: " in done.stderr
    assert (place / "there" / "site" / "PACKED").is_file()


def test_without_a_whole_engine_or_with_another_python_nothing_starts(place):
    pack(place)
    assert unpack(place).returncode == 0
    path = place / "there" / "experiments" / "boxes" / "tiny.toml"
    path.write_text(TINY.replace(f'python = "{HERE}"', 'python = "3.99"'))
    other = wall(place, "--help")
    assert other.returncode == 1 and "packed for 3.99" in other.stderr and not (place / "there" / "site" / "READY").exists()
    (place / "there" / "site" / "PACKED").unlink()
    broken = wall(place, "--help")
    assert broken.returncode == 1 and broken.stderr.splitlines()[0].startswith("error: the engine is not here") and "remedy: " in broken.stderr


# --- the harness without the packages of pages --------------------------------------------------------------------


def _measuring_modules() -> set[str]:
    """Modules of the package that measuring can import, followed from the process that measures and from `wall run`."""
    found, new = set(), {"measure", "post", "planned", "progress", "box"}
    while new:
        found |= new
        trees = [ast.walk(ast.parse((REPOSITORY / "inference_wall" / f"{name}.py").read_text())) for name in new]
        froms = [node for tree in trees for node in tree if isinstance(node, ast.ImportFrom) and (node.level or "inference_wall" in node.module)]
        named = {name for node in froms for name in ([alias.name for alias in node.names] if node.module in (None, "inference_wall")
                                                     else [node.module.removeprefix("inference_wall.")])}
        new = {name for name in named if (REPOSITORY / "inference_wall" / f"{name}.py").is_file()} - found
    return found


def test_every_package_that_measuring_imports_is_there_or_comes_along():
    hopper = box.load_box("hopper")
    known = {box._plain(name) for name in (*(pin.partition("==")[0] for pin in hopper.pins), *hopper.has)}
    own = importlib.metadata.packages_distributions()
    # The embedded model, progress inside a notebook, and a figure that `trace` draws for pages: each imported where it is used.
    not_needed = {"gguf", "IPython", "plotly", "inference_wall", *sys.stdlib_module_names}
    lacking = set()
    for module in _measuring_modules() | {"cli"}:
        for node in ast.walk(ast.parse((REPOSITORY / "inference_wall" / f"{module}.py").read_text())):
            plain = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else plain
            for name in {name.partition(".")[0] for name in names} - not_needed:
                if not {box._plain(each) for each in (name, *own.get(name, []))} & known:
                    lacking.add((module, name))
    assert lacking == set()
    assert {"records", "server", "load", "shapes"} <= _measuring_modules()


def test_measuring_needs_none_of_the_packages_that_make_pages(tmp_path):
    code = f"""
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {PAGES!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
from click.testing import CliRunner
from inference_wall import cli, engines, jobs, load, measure, post
jobs.installed = lambda: engines.engine("0.25.1")
jobs.model_folder = lambda rig, model: "nowhere"
asked = []
post.measure = lambda *arguments, **options: asked.append((arguments[:2], options))
common = ["run", "all", "--rig", "h200-4b", "--base-url", "http://127.0.0.1:9"]
results = [CliRunner().invoke(cli.main, [*common, option]) for option in ("--plan", "--records-only")]
results.append(CliRunner().invoke(cli.main, ["run", "part_1", *common[2:]]))
print(json.dumps([[result.exit_code, result.output] for result in results] + [asked]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY,
                          env={**os.environ, "WALL_BENCHMARKS": str(tmp_path / "benchmarks")})
    assert done.returncode == 0, done.stderr
    plan, measured, with_pages, asked = json.loads(done.stdout)
    assert plan[0] == 0 and "part_5" in plan[1], plan
    assert measured[0] == 0, measured
    posts = list(rigs.load_rig("h200-4b").posts)
    (wanted, rig), _ = asked[0]
    assert len(asked) == 1 and list(wanted) == posts and rig == "h200-4b"
    assert all(given == {"base_url": "http://127.0.0.1:9", "mode": "live"} for given in wanted.values())
    assert with_pages[0] == 1 and "this environment has no" in with_pages[1] and "--records-only" in with_pages[1]
