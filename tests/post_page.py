"""What the tests of several posts ask of their notebooks."""

import re

from inference_wall import rigs

ROLE = re.compile(r"\{([\w-]+)\}`([^`]+)`")


def check_numbers(notebook, known, more_than):
    """Every {num} of the notebook's text is a measured or published number that its format can write."""
    used = [content for role, content in ROLE.findall(notebook) if role == "num"]
    assert len(used) > more_than
    for content in used:
        key, _, spec = content.removesuffix(" unit").partition(":")
        assert key in known, key
        assert known[key]["value"] is not None, key
        format(known[key]["value"], spec)
        assert known[key]["unit"] or not content.endswith(" unit"), key


def check_parameters(notebook, post):
    """The parameters cell, the protocol and the call of `post.open_runs` name the same parameters."""
    cell = notebook.split('tags=["parameters"]')[1].split("# %%")[0]
    names = re.findall(r"^(\w+) = ", cell, flags=re.M)
    assert names == list(rigs.load_protocol(post).parameters)
    call = notebook.split(f'post.open_runs("{post}"')[1].split(")\n")[0]
    assert sorted(re.findall(r"(\w+)=\1", call)) == sorted(names)
