"""A post's pages for several rigs: which there are, the switch at their top, and their place in the book.

What:   lets the pages of the other rigs into the site (`_toc.yml` names only the default page of a post), puts the rig into their title, a row
        of links to all rigs under the title of each, and leads from such a page to the same rig's page of the next post.
Why:    a reader should see the best evidence first and any other with one touch, without a sidebar that is five times as long. Links work without
        JavaScript; search finds every page; `rel=canonical` tells search engines which one is meant to be found.
Use:    `inference_wall.site` connects `setup`. The pages are listed in `build/rigs.json`, which `site.build` writes:
        {"part_1": [{"rig", "title", "page", "local"}, ...]}, the default page first.
Not:    executing the pages (`build`), the order of the rigs (`evidence`), the look (wall.css).
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

from inference_wall.evidence import parse_page
from inference_wall.site.numbers import PUBLISHED_ANCHOR

FOLDER = "build/executed/"
PUBLISHED_HEADING = "The published A10G"


def setup(app: Sphinx) -> None:
    """Register the events; called by the extension."""
    app.add_config_value("wall_rigs", "build/rigs.json", "env", str)
    # Just after sphinx-external-toc has excluded whatever the table of contents does not name.
    app.connect("config-inited", _admit, priority=950)
    app.connect("source-read", _name_rig)
    app.connect("doctree-read", _add_switch)
    app.connect("html-page-context", _lead_on)


def pages(srcdir: Any, listed: str) -> dict[str, list[dict[str, Any]]]:
    """The pages of each post, from `build/rigs.json`; without that file there are no pages but those of the table of contents."""
    path = Path(srcdir) / listed
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _admit(app: Sphinx, config: Config) -> None:
    wanted = {f"{FOLDER}{each['page']}.ipynb" for rows in pages(app.srcdir, config.wall_rigs).values() for each in rows}
    config.exclude_patterns = [pattern for pattern in config.exclude_patterns if pattern not in wanted]


def _name_rig(app: Sphinx, docname: str, source: list[str]) -> None:
    """The title of another rig's page says whose it is."""
    found = parse_page(docname)
    if not found:
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and text.startswith("# "):
            head, newline, rest = text.partition("\n")
            cell["source"] = f"{head} ({found[1]}){newline}{rest}"
            break
    source[0] = json.dumps(notebook)


def _add_switch(app: Sphinx, doctree: nodes.document) -> None:
    docname = app.env.docname
    page = docname.removeprefix(FOLDER)
    found = parse_page(docname)
    rows = pages(app.srcdir, app.config.wall_rigs).get(found[0] if found else page)
    if not rows or not docname.startswith(FOLDER):
        return
    app.env.note_dependency(str(Path(app.srcdir) / app.config.wall_rigs))
    if found:
        app.env.metadata[docname]["orphan"] = True  # no table of contents names it, and that is meant
    title = next(doctree.findall(nodes.title), None)
    if title is not None:
        beside = next((section["ids"][0] for section in doctree.findall(nodes.section)
                       if section.next_node(nodes.title).astext().startswith(PUBLISHED_HEADING)), None)
        switch = nodes.raw("", switch_html(rows, page, beside), format="html")
        title.parent.insert(title.parent.index(title) + 1, switch)


def switch_html(rows: list[dict[str, Any]], page: str, beside: str | None) -> str:
    """The row of links; `page` is the one that they stand on, `beside` the id of its section about the published figures."""
    links = []
    for row in rows:
        current = ' aria-current="page"' if row["page"] == page else ""
        local = ", on this machine, not committed" if row["local"] else ""
        links.append(f'<li><a href="{html.escape(row["page"], quote=True)}.html"{current}><strong>{html.escape(row["rig"])}</strong> '
                     f'<span>{html.escape(row["title"])}{local}</span></a></li>')
    address = f"#{beside}" if beside else f"../pages/provenance.html#{PUBLISHED_ANCHOR}"
    links.append(f'<li><a class="wall-switch-published" href="{address}"><strong>a10g</strong> <span>published: figures only</span></a></li>')
    return ('<nav class="wall-switch" aria-label="Whose records this page shows"><p>This page shows the records of one machine. '
            f"There are:</p><ul>{''.join(links)}</ul></nav>")


def _lead_on(app: Sphinx, pagename: str, templatename: str, context: dict, doctree: nodes.document | None) -> None:
    """Another rig's page: its canonical page is the default one, and before and after it come the same rig's pages where there are some."""
    found = parse_page(pagename)
    if not found or not pagename.startswith(FOLDER):
        return
    post, rig = found
    context["pageurl"] = f"{post}.html"
    listed = pages(app.srcdir, app.config.wall_rigs)
    neighbours = getattr(app.builder, "relations", {}).get(FOLDER + post) or [None, None, None]
    for name, target in (("prev", neighbours[1]), ("next", neighbours[2])):
        if target is None:
            continue
        own = [row["page"] for row in listed.get(target.removeprefix(FOLDER), []) if row["rig"] == rig]
        target = FOLDER + own[0] if own else target
        title = re.sub(r"<[^>]+>", "", app.builder.render_partial(app.env.titles[target])["title"])
        context[name] = {"link": app.builder.get_relative_uri(pagename, target), "title": title}
