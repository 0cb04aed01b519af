"""Executing posts: a page is replaced only by a whole one."""

import json
import shutil
from pathlib import Path

import nbformat
import pytest

from inference_wall import records, regenerate
from inference_wall.errors import WallError

REPOSITORY = Path(__file__).resolve().parent.parent
HEADER = "# ---\n# jupyter:\n#   kernelspec:\n#     display_name: Python 3\n#     language: python\n#     name: python3\n# ---\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A repository whose only post is a notebook that the test writes."""
    for name in ("experiments", "benchmarks/published"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setenv("WALL_ROOT", str(tmp_path))
    monkeypatch.delenv("WALL_BENCHMARKS", raising=False)
    return tmp_path


def write(home, body):
    (home / "notebooks" / "part_1.py").write_text(f'{HEADER}\n# %% tags=["parameters"]\nrig = "auto"\nscale = 1.0\nrates = ""\n\n# %%\n{body}\n')


def test_parameters_reach_the_notebook_and_are_hidden_on_the_page(home):
    write(home, "print(rig, scale)")
    path = regenerate.execute("part_1", {"rig": "cpu", "scale": 0.5})
    notebook = nbformat.read(path, as_version=4)
    assert notebook.cells[-1].outputs[0].text == "cpu 0.5\n"
    hidden = [cell for cell in notebook.cells if "remove-cell" in cell.metadata.get("tags", [])]
    assert len(hidden) == 2 and "papermill" not in notebook.metadata
    assert regenerate.is_current("part_1", [])
    write(home, "print(rig)")
    assert not regenerate.is_current("part_1", [])


def test_the_same_input_gives_the_same_bytes(home):
    write(home, "print(rig)")
    first = regenerate.execute("part_1", {"rig": "cpu"}).read_bytes()
    assert regenerate.execute("part_1", {"rig": "cpu"}).read_bytes() == first


def test_an_empty_sentence_leaves_nothing_on_the_page(home):
    write(home, "from IPython.display import HTML, Markdown, display\n\ndisplay(Markdown(''), HTML(''), Markdown('word'))\nMarkdown('last')")
    outputs = nbformat.read(regenerate.execute("part_1", {}), as_version=4).cells[-1].outputs
    assert [output.data["text/markdown"] for output in outputs] == ["word", "last"]


@pytest.mark.parametrize(("body", "said"), [
    ("1 / 0", "ZeroDivisionError"),
    ("from inference_wall.errors import WallError\nraise WallError('the disk is full', 'free some space')", "the disk is full"),
    ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "kernel of part_1 died"),
])
def test_a_failed_notebook_never_replaces_the_page(home, body, said):
    write(home, "print(1)")
    good = regenerate.execute("part_1", {}).read_bytes()
    write(home, body)
    with pytest.raises(WallError) as caught:
        regenerate.execute("part_1", {})
    assert said in caught.value.message and caught.value.remedy
    assert regenerate.executed("part_1").read_bytes() == good
    assert not regenerate.is_current("part_1", [])


def test_a_bad_parameter_starts_no_kernel(home, monkeypatch):
    monkeypatch.setattr(regenerate, "_run", lambda *_args: pytest.fail("a kernel was started"))
    with pytest.raises(WallError, match="did you mean 'rates'"):
        regenerate.execute("part_1", {"rate": 1})


def test_without_a_record_the_error_says_how_to_make_one(home):
    write(home, "from inference_wall import post\npost.open_runs('part_1', rig='cpu')")
    with pytest.raises(WallError, match="no record of part_1") as caught:
        regenerate.execute("part_1", {"rig": "cpu"})
    assert "wall run part_1" in caught.value.remedy


def test_the_page_note_says_which_record_is_shown(home):
    note = regenerate.executed("part_1").with_suffix(".json")
    assert regenerate.page_note("part_1") is None
    write(home, "import os, json\nopen(os.environ['WALL_PAGE'], 'w').write(json.dumps({'runs': ['x'], 'rig': 'cpu'}))")
    regenerate.execute("part_1", {"mode": "recorded"})
    assert json.loads(note.read_text())["runs"] == ["x"] == regenerate.page_note("part_1")["runs"]
    assert records.benchmarks() == home / "benchmarks"


def test_pages_for_two_rigs_stand_beside_one_another(home):
    write(home, "print(rig)")
    first = regenerate.execute("part_1", {"rig": "cpu"})
    other = regenerate.execute("part_1", {"rig": "h200-4b"}, page="part_1-h200-4b")
    assert [nbformat.read(path, as_version=4).cells[-1].outputs[0].text for path in (first, other)] == ["cpu\n", "h200-4b\n"]
    assert other.name == "part_1-h200-4b.ipynb" and regenerate.is_current("part_1", [], page="part_1-h200-4b", rig="h200-4b")
    assert not regenerate.is_current("part_1", [], page="part_1-h200-4b", rig="cpu")
    assert not regenerate.is_current("part_1", [], page="part_1-gpu")


def test_a_record_of_another_rig_makes_every_page_of_the_post_stale(home):
    """They are laid over one another: a page that lacks one shows less than there is."""
    write(home, "print(rig)")
    regenerate.execute("part_1", {"rig": "cpu"})
    local = home / "benchmarks" / "local"
    records.Draft.open("part_1", "gpu", "default", {"rig": "gpu"}, where=local).finish({"post": "part_1", "rig": {"name": "gpu"}}, {})
    assert not regenerate.is_current("part_1", [])
    assert regenerate.is_current("part_1", [], committed_only=True)
    regenerate.execute("part_1", {"rig": "cpu"})
    assert regenerate.is_current("part_1", []) and not regenerate.is_current("part_1", [], committed_only=True)
    records.Draft.open("part_2", "gpu", "default", {"rig": "gpu"}, where=local).finish({"post": "part_2", "rig": {"name": "gpu"}}, {})
    assert regenerate.is_current("part_1", [])


def test_a_live_run_whose_own_record_is_new_is_current(home):
    record = ("from inference_wall import records; records.Draft.open('part_1', 'gpu', 'default', {'rig': 'gpu'})"
              ".finish({'post': 'part_1', 'rig': {'name': 'gpu'}}, {})")
    write(home, record)
    regenerate.execute("part_1", {"rig": "cpu"})
    assert records.record_folders("part_1") and regenerate.is_current("part_1", [])


def test_two_kernels_at_once_do_not_meet():
    assert len({regenerate._LocalKernel().ip for _ in range(8)}) == 8
