"""Numbers in prose that come out of run records.

What:   the role ``{num}`key:format` ``. The key is looked up in `build/numbers.json`; the format is Python's
        (``{num}`part_1.h200.peak:.1f` ``); a trailing `unit` adds the unit (``{num}`part_1.h200.ttft:.0f unit` ``).
        The number links to its run on the provenance page; its title says run, sample size and source.
Why:    nobody types a measured number into a sentence. Pages that use the file are read again when it changes, and an
        unknown key or a format that does not fit is a warning, which fails the build.
Use:    `inference_wall.site` registers it. The file: {"<key>": {"value", "unit", "n", "run", "source", "reason"}}.
Not:    computing numbers (`inference_wall.headline`). A null value is legal: it reads "not measured", with its reason.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

from inference_wall.evidence import parse_page

NOT_MEASURED = "not measured"
PUBLISHED_ANCHOR = "published-figures-files"
SOURCES = {
    "measured": "measured here",
    "published": "published by the author, not re-measured here",
}

LONGEST_LINK = 60  # letters

logger = logging.getLogger(__name__)


class NumberRole(SphinxRole):
    """``{num}`key:format unit` ``. See the module's header."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the node for one number."""
        path = Path(self.env.srcdir) / self.config.wall_numbers
        self.env.note_dependency(str(path))
        key, spec, with_unit = parse(self.text)
        numbers = load(path, path.stat().st_mtime_ns if path.exists() else 0)
        key = on_page(key, self.env.docname)
        entry = numbers.get(key)
        if entry is None:
            return [self._problem(f"no number is called '{key}'{_nearest(key, numbers)}")], []
        try:
            text = show(entry, spec, with_unit)
        except (ValueError, TypeError) as error:
            value = entry.get("value")
            return [self._problem(f"the number '{key}' is {value!r}, which '{spec}' cannot write: {error}")], []
        return [self._node(entry, text)], []

    def _node(self, entry: dict, text: str) -> nodes.Node:
        classes = ["wall-number", "wall-null" if entry.get("value") is None else entry.get("source") or "measured"]
        if isinstance(entry.get("value"), str) and len(text) > LONGEST_LINK:
            return nodes.inline("", text, classes=classes)  # a sentence is read, not followed
        page = self.config.wall_provenance
        target = PUBLISHED_ANCHOR if entry.get("source") == "published" else None
        if entry.get("run"):
            target = anchor(entry["run"])
        if target and page in self.env.found_docs:
            address = self.env.app.builder.get_relative_uri(self.env.docname, page)
            return nodes.reference("", text, internal=True, refuri=f"{address}#{target}", reftitle=title(entry), classes=classes)
        return nodes.abbreviation("", text, explanation=title(entry), classes=classes)

    def _problem(self, message: str) -> nodes.Node:
        logger.warning("%s", message, type="wall", subtype="number", location=self.get_location())
        return nodes.strong("", f"[{self.text}?]")


def parse(text: str) -> tuple[str, str, bool]:
    """Split the role's text into key, format and whether the unit is wanted."""
    text = text.strip()
    with_unit = text.endswith(" unit")
    key, _, spec = text.removesuffix(" unit").partition(":")
    return key.strip(), spec.strip(), with_unit


def on_page(key: str, docname: str) -> str:
    """The key as that page means it: on the page of a post for another rig, the post's numbers "here" are those of that rig."""
    found = parse_page(docname)
    return key.replace(f"{found[0]}.here.", f"{found[0]}.{found[1]}.", 1) if found and key.startswith(f"{found[0]}.here.") else key


def show(entry: dict, spec: str, with_unit: bool) -> str:
    """The text of a number; raises ValueError where the format does not fit the value."""
    value = entry.get("value")
    if value is None:
        return NOT_MEASURED
    text = format(value, spec)
    unit = entry.get("unit")
    # A no-break space keeps a number and its unit on one line.
    return f"{text}\u00a0{unit}" if with_unit and unit else text


def title(entry: dict) -> str:
    """The tooltip of a number: where it comes from, and why it is missing if it is."""
    parts = []
    if entry.get("value") is None:
        parts.append(f"{NOT_MEASURED}: {entry.get('reason') or 'no record has it'}")
    source = entry.get("source")
    if source:
        parts.append(SOURCES.get(source, source))
    if entry.get("run"):
        parts.append(f"run {entry['run']}")
    if entry.get("n") is not None:
        parts.append(f"n = {entry['n']}")
    if entry.get("where"):
        parts.append(entry["where"])
    return "; ".join(parts)


def anchor(run: str) -> str:
    """The id of a run's section on the provenance page."""
    return "run-" + re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")


@cache
def load(path: Path, modified: int) -> dict[str, dict[str, Any]]:
    """The numbers file as of `modified`; an absent file has no numbers, so that each use of one is reported."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _nearest(key: str, numbers: dict) -> str:
    """The keys that the author may have meant."""
    close = difflib.get_close_matches(key, numbers, n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
