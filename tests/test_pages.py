"""The prose pages: numbers exist, tables agree with the files that they describe, words are explained."""

import re

import pytest

from inference_wall import published, rigs

PAGES = sorted((rigs.root() / "book").glob("*.md"))
ROLE = re.compile(r"\{(\w+)\}`([^`]+)`")


def roles(name, text):
    return [content for role, content in ROLE.findall(text) if role == name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_published_number_exists_and_fits_its_format(page):
    numbers = published.numbers()
    for content in roles("num", page.read_text(encoding="utf-8")):
        key, _, spec = content.removesuffix(" unit").partition(":")
        # The prose pages describe the machine of the series; only a post names numbers of a run.
        assert key in numbers, key
        assert numbers[key]["value"] is not None, key
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


def test_the_table_of_parameters_is_the_protocol():
    text = (rigs.root() / "book" / "reproduce.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", text, flags=re.M)
    parameters = rigs.load_protocol("part_1").parameters
    assert [row[0] for row in rows] == list(parameters)
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
        for post in rig.posts.values():
            used |= set(post) - {"slo"} | set(post["slo"])
        assert used <= explained, f"{name}: {used - explained}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_load_nothing_from_elsewhere(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"!\[|<img|<script|<link|url\(|src=", text)
