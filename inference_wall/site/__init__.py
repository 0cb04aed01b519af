"""The Sphinx extension of the book.

What:   adds the ``{num}`` role, the book's style and scripts, and four small rules for pages: code cells fold away,
        parameter cells vanish, maths is refused (nothing here draws it offline), and pages that left the book leave the
        site too. `switch` adds the pages of a post for other rigs.
Why:    the book must read like a book, draw without a network, and fail to build rather than show something stale.
Use:    `_config.yml` lists `inference_wall.site` under `sphinx: extra_extensions`; `inference_wall.site.build` runs it.
Not:    the notebook outputs, which myst-nb asks `mime.FigureRenderer` to draw through its entry point.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util import logging

from inference_wall.site import switch
from inference_wall.site.numbers import NumberRole

HERE = Path(__file__).parent
# Pages that Sphinx makes without a source of ours.
BUILT_IN_PAGES = {"genindex", "search", "index", "py-modindex", "webpack-macros"}
# Folders of the built site whose HTML files are not pages.
NOT_PAGES = ("_static", "_sources", "_images", "_downloads", "records")
HIDDEN_CELLS = {"parameters", "injected-parameters"}

logger = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict:
    """Register the extension."""
    app.add_config_value("wall_numbers", "build/numbers.json", "env", str)
    app.add_config_value("wall_provenance", "build/pages/provenance", "env", str)
    # Pages are cached as Sphinx understood them; other rendering code means other pages.
    app.add_config_value("wall_code", _code_hash(), "env", str)
    app.add_role("num", NumberRole())
    app.add_css_file("wall.css")
    # Before wall.js, which then meets the figures of a dial where they will stay.
    app.add_js_file("knob.js", loading_method="defer", priority=490)
    app.add_js_file("wall.js", loading_method="defer")
    app.connect("config-inited", _add_folders)
    app.connect("source-read", _fold_code)
    app.connect("doctree-read", _refuse_maths)
    app.connect("html-page-context", _name_folds)
    switch.setup(app)
    app.connect("build-finished", _drop_old_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _code_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(HERE.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _add_folders(app: Sphinx, config: Config) -> None:
    config.html_static_path.append(str(HERE / "static"))
    config.templates_path.append(str(HERE / "templates"))


def _fold_code(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give each code cell of a notebook the tag that folds it, unless the post says `show-input`."""
    if not str(app.env.doc2path(docname)).endswith(".ipynb"):
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        tags = set(cell["metadata"].get("tags", []))
        if tags & HIDDEN_CELLS:
            tags.add("remove-cell")
        elif not tags & {"show-input", "remove-input", "remove-cell", "hide-cell"}:
            tags.add("hide-input")
        cell["metadata"]["tags"] = sorted(tags)
    source[0] = json.dumps(notebook)


def _refuse_maths(app: Sphinx, doctree: nodes.document) -> None:
    for node in doctree.findall(lambda n: isinstance(n, nodes.math | nodes.math_block)):
        logger.warning(
            "maths would be fetched from another host to be drawn: write it in words or as code",
            type="wall",
            subtype="maths",
            location=node,
        )


def _name_folds(app: Sphinx, pagename: str, templatename: str, context: dict, doctree: nodes.document | None) -> None:
    """The theme names every fold "Toggle hidden content" and so hides its visible text from a screen reader."""
    if context.get("body"):
        context["body"] = context["body"].replace(' aria-label="Toggle hidden content"', "")


def _drop_old_pages(app: Sphinx, error: Exception | None) -> None:
    """Remove pages whose source left the book: Sphinx leaves them, and search engines and readers would find them."""
    if error is not None or app.builder.format != "html":
        return
    out = Path(app.outdir)
    for page in out.rglob("*.html"):
        name = page.relative_to(out).with_suffix("").as_posix()
        if name.split("/")[0] in NOT_PAGES or name in BUILT_IN_PAGES or name in app.env.found_docs:
            continue
        page.unlink()
