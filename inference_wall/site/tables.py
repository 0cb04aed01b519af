"""Tables of a notebook as the page shows them.

What:   `decorate` takes the HTML that pandas (or a post) puts out and returns it with aligned numbers, header scopes,
        nulls as a dash that says why, and a frame that scrolls on a phone instead of pushing the page wide.
Why:    pandas writes for a notebook: columns touch on a page, `NaN` reads like a value, a wide table breaks a phone.
Use:    called by `mime.FigureRenderer` for every HTML output with a table of class `dataframe` or `wall-table`. A post
        sets the caption with `<caption>`; a cell says why it is empty with `title="..."`; the name of the CSV file
        comes from `data-csv="..."` on the table.
Not:    tables written in Markdown (the theme's, styled in wall.css), and sorting.
"""

from __future__ import annotations

import re

from bs4 import BeautifulSoup, Tag

NULL_WORDS = {"", "nan", "none", "null", "<na>", "nat", "–", "-"}
NULL_SIGN = "–"
NUMBER = re.compile(r"^[<>≤≥~±+\-−]?\s?\d[\d,.\s]*(e[+-]?\d+)?\s?(%|×|x)?$", re.IGNORECASE)


def holds_table(text: str) -> bool:
    """Whether this HTML output has a table that we dress."""
    return "<table" in text and re.search(r'class="[^"]*\b(dataframe|wall-table)\b', text) is not None


def decorate(text: str) -> str:
    """The HTML of a table output, dressed for the page. What stands around the tables stays as it is."""
    soup = BeautifulSoup(text, "html.parser")
    for style in soup.find_all("style", attrs={"scoped": True}):
        style.decompose()
    for table in soup.find_all("table"):
        if {"dataframe", "wall-table"} & set(table.get("class") or []):
            _dress(soup, table)
    return str(soup)


def _dress(soup: BeautifulSoup, table: Tag) -> None:
    del table["border"]
    # The theme dresses `dataframe` in its own way, with rules stronger than ours.
    table["class"] = ["wall-table", *sorted({*(table.get("class") or [])} - {"dataframe", "wall-table"})]
    for cell in table.find_all("th"):
        if not cell.has_attr("scope"):
            cell["scope"] = "col" if cell.find_parent("thead") else "row"
        if not cell.get_text(strip=True):
            # An empty header names nothing, and a screen reader would announce it for every cell of its column.
            cell.name = "td"
            del cell["scope"]
    for cell in table.find_all("td"):
        _dress_cell(cell)
    _align_headers(table)

    caption = table.find("caption")
    name = caption.get_text(" ", strip=True) if caption else "Table"
    frame = soup.new_tag(
        "div",
        # Focusable, so that the keyboard can scroll it too.
        attrs={"class": "wall-table-frame", "tabindex": "0", "role": "region", "aria-label": name},
    )
    table.wrap(frame)
    if caption:
        # Out of the table: inside, it would be as wide as the table, and on a phone run out of sight.
        caption.extract()
        caption.name = "p"
        caption["class"] = ["wall-table-title"]
        frame.insert_before(caption)
        table["aria-label"] = name
    below = soup.new_tag("div", attrs={"class": "wall-below"})
    button = soup.new_tag(
        "button",
        attrs={"type": "button", "class": "wall-csv", "data-csv": table.get("data-csv", "table.csv"), "hidden": ""},
    )
    button.string = "Download data (CSV)"
    below.append(button)
    frame.insert_after(below)


def _dress_cell(cell: Tag) -> None:
    text = cell.get_text(strip=True)
    if text.lower() in NULL_WORDS and not cell.find(True) and not cell.find_parent("thead"):
        reason = cell.get("title") or "not measured"
        cell["title"] = reason
        cell["class"] = [*(cell.get("class") or []), "wall-null"]
        cell.string = NULL_SIGN
    elif NUMBER.match(text):
        cell["class"] = [*(cell.get("class") or []), "wall-number-cell"]


def _align_headers(table: Tag) -> None:
    """A header stands over its numbers: right-aligned where every cell of the column is a number or empty."""
    head, body = table.find("thead"), table.find("tbody") or table
    rows = [row.find_all(["th", "td"], recursive=False) for row in body.find_all("tr")]
    if head is None or not rows:
        return
    for row in head.find_all("tr"):
        cells = row.find_all(["th", "td"], recursive=False)
        if any(cell.get("colspan") for cell in cells):
            continue
        for position, cell in enumerate(cells):
            column = [r[position] for r in rows if len(r) == len(cells)]
            classes = [set(c.get("class") or []) for c in column]
            aligned = [c & {"wall-number-cell", "wall-null"} for c in classes]
            if column and all(aligned) and any("wall-number-cell" in c for c in classes):
                cell["class"] = [*(cell.get("class") or []), "wall-number-cell"]
