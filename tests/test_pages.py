"""The prose pages: numbers exist, tables agree with the files that they describe, words are explained."""

import functools
import re

import jupytext
import pytest

from inference_wall import headline, post, rigs

PAGES = sorted([*(rigs.root() / "book").glob("*.md"), *(rigs.root() / "notebooks").glob("*.py")])
ROLE = re.compile(r"\{(\w+)\}`([^`]+)`")


@functools.cache
def known_numbers():
    """Everything that a page may name, from the committed records."""
    shown = {name: post.recorded(name, committed_only=True) for name in rigs.protocol_names()}
    return headline.collect(shown)


def roles(name, text):
    return [content for role, content in ROLE.findall(text) if role == name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_published_number_exists_and_fits_its_format(page):
    numbers = known_numbers()
    for content in roles("num", page.read_text(encoding="utf-8")):
        key, _, spec = content.removesuffix(" unit").partition(":")
        assert key in numbers, key
        if numbers[key]["value"] is None:
            assert numbers[key]["reason"] and numbers[key]["source"] == "measured", key  # what this machine did not measure, it says so
            continue
        format(numbers[key]["value"], spec)
        assert numbers[key]["unit"] or not content.endswith(" unit"), key


def test_every_term_has_an_entry_in_the_glossary():
    glossary = (rigs.root() / "book" / "glossary.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\{glossary\}\n(.*?)```", glossary, flags=re.S)
    entries = [line for block in blocks for line in block.splitlines() if line and not line.startswith(" ")]
    assert len(entries) == len(set(entries))
    for page in PAGES:
        for content in roles("term", page.read_text(encoding="utf-8")):
            shown = re.search(r"<(.+)>$", content)
            assert (shown.group(1) if shown else content) in entries, f"{content} in {page.name}"


SKELETON = ("## Setup", "## The published A10G", "## What to take away", "## What this page does not show", "## Reproduce")


@pytest.mark.parametrize("post", rigs.protocol_names())
def test_every_post_has_the_whole_skeleton_in_order(post):
    text = (rigs.root() / "notebooks" / f"{post}.py").read_text(encoding="utf-8")
    places = [text.find(f"# {heading}") for heading in SKELETON]
    assert -1 not in places and places == sorted(places), dict(zip(SKELETON, places, strict=True))
    assert re.search(r"^# ## (The bound|What we expect), before we", text, flags=re.M), "the bound comes before the measurement"
    assert "trace_figures.step_strip" in text and "headline.reproduce(arms)" in text


@pytest.mark.parametrize("path", sorted((rigs.root() / "notebooks").glob("*.py")), ids=lambda path: path.stem)
def test_no_heading_hides_in_a_code_cell(path):
    cells = jupytext.read(path).cells
    assert not [cell.source for cell in cells if cell.cell_type == "code" and re.search(r"^# ?#", cell.source, flags=re.M)]


@pytest.mark.parametrize("post", rigs.protocol_names())
def test_the_tables_of_parameters_are_the_protocols(post):
    text = (rigs.root() / "book" / "reproduce.md").read_text(encoding="utf-8")
    text = text[text.index("## Parameters") : text.index("## Where records go")]
    common, *parts = re.split(r"^### Part (?=\d)", text, flags=re.M)
    own = next(part for part in parts if part.startswith(post.removeprefix("part_")))
    rows = [row for section in (common, own) for row in re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", section, flags=re.M)]
    parameters = rigs.load_protocol(post).parameters
    assert sorted(row[0] for row in rows) == sorted(parameters)
    for name, default, allowed, meaning in rows:
        spec = parameters[name]
        assert default == ("empty" if spec["default"] == "" else f"`{spec['default']}`")
        assert (allowed, meaning) == (spec["allowed"], spec["help"])


def test_the_list_of_rigs_is_the_folder():
    text = (rigs.root() / "experiments" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `([\w-]+)\.toml` \|", text, flags=re.M)) == rigs.rig_names()


def test_every_key_of_a_rig_is_explained():
    text = (rigs.root() / "experiments" / "README.md").read_text(encoding="utf-8")
    table = text[text.index("### The keys of a rig") : text.index("### Choosing rates")]
    explained = set(re.findall(r"`(?:\[[\w.]+\] )?(\w+)`", table))
    for name in rigs.rig_names():
        rig = rigs.load_rig(name)
        used = {"name", "title", "kind", "note"} | set(rig.match) | set(rig.model) | set(rig.engine) - {"flags"}
        for settings in rig.posts.values():
            used |= set(settings) - {"slo"} | set(settings.get("slo", {}))
        assert used <= explained, f"{name}: {used - explained}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_load_nothing_from_elsewhere(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"!\[|<img|<script|<link|url\(|src=", text)
