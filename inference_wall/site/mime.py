"""Plotly figures and tables of an executed notebook, as HTML for the page.

What:   `FigureRenderer` is a myst-nb mime renderer. A plotly output becomes a <figure> with a title, an empty box of
        the right height, the figure's JSON, and the same in words; `static/wall.js` draws it when the reader comes near.
        An HTML output that holds a table goes through `tables.decorate`.
Why:    under papermill plotly 7 emits only `application/vnd.plotly.v1+json`, which myst-nb alone does not show; and a
        page that embeds plotly with each figure weighs megabytes.
Use:    registered in pyproject.toml under the entry point group `myst_nb.mime_renderers`. A figure may carry
        `layout.meta = {"alt": "the point in words", "csv": "name.csv", "columns": ["n", "rule"]}`; `columns` names the
        columns of `customdata` in the downloaded CSV.
Not:    drawing (wall.js), ipywidgets, and FigureWidget, which would store megabytes of JavaScript in the notebook.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from docutils import nodes
from sphinx.util import logging

from inference_wall.site import tables

PLOTLY_MIME = "application/vnd.plotly.v1+json"
BUNDLE = Path(__file__).parent / "static" / "plotly" / "plotly-cartesian.min.js"
DEFAULT_HEIGHT = 420
# A screen shows three digits at best; five leave room to zoom, and the page stays light.
SIGNIFICANT_DIGITS = 5

PLOTLY_TAG = re.compile(r"</?(b|i|u|s|em|sub|sup|span|a)\b[^>]*>", re.IGNORECASE)

logger = logging.getLogger(__name__)


class FigureRenderer:
    """The myst-nb plug-in: plotly figures and notebook tables. See the module's header."""

    mime_priority_overrides = (("*", PLOTLY_MIME, 1),)

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[nodes.Element] | None:
        """Return the nodes for one output, or None where the output is not ours."""
        if inline:
            return None
        if data.mime_type == PLOTLY_MIME:
            unknown = unknown_trace_types(data.content)
            if unknown:
                # A warning, because every warning fails the build, and names the page that caused it.
                logger.warning(
                    "the figure has trace types %s, which the vendored plotly bundle lacks and would draw as a scatter; it knows %s",
                    ", ".join(sorted(unknown)),
                    ", ".join(sorted(bundled_trace_types())),
                    type="wall",
                    subtype="figure",
                    location=(renderer.renderer.document["source"], data.line),
                )
            return [nodes.raw(text=figure_html(data.content), format="html")]
        if data.mime_type == "text/html" and tables.holds_table(data.string):
            return [nodes.raw(text=tables.decorate(data.string), format="html")]
        return None


@cache
def bundled_trace_types() -> frozenset[str]:
    """The trace types that the vendored bundle registers, read from the bundle itself."""
    text = BUNDLE.read_text(encoding="utf-8")
    return frozenset(re.findall(r'moduleType:"trace",name:"([a-z0-9]+)"', text))


def unknown_trace_types(figure: dict) -> set[str]:
    """The trace types of `figure` that the bundle lacks; plotly would silently draw them as scatter."""
    return {trace.get("type", "scatter") for trace in figure.get("data", [])} - bundled_trace_types()


def figure_html(figure: dict) -> str:
    """The <figure> element for one plotly figure, given as the dictionary of its mime output."""
    layout = {key: value for key, value in figure.get("layout", {}).items() if key not in ("template", "width")}
    traces = [compact_trace(trace) for trace in figure.get("data", [])]
    title, subtitle = _take_title(layout)
    meta = layout.get("meta") if isinstance(layout.get("meta"), dict) else {}
    alt = meta.get("alt") or describe(traces, layout)
    csv_name = meta.get("csv") or f"{_slug(title or 'figure')}.csv"
    # What the page says in HTML need not be in the JSON too.
    layout.pop("meta", None)
    payload = {"data": traces, "layout": layout, "columns": meta.get("columns", [])}
    if figure.get("frames"):
        payload["frames"] = figure["frames"]

    caption = f"<strong>{html.escape(title)}</strong>" if title else ""
    if subtitle:
        caption += f' <span class="wall-subtitle">{html.escape(subtitle)}</span>'
    label = html.escape(title or alt.partition(". ")[0][:160], quote=True)
    height = int(layout.get("height") or DEFAULT_HEIGHT)
    return (
        '<figure class="wall-figure">'
        + (f"<figcaption>{caption}</figcaption>" if caption else "")
        + f'<div class="wall-plot" role="group" aria-roledescription="chart" aria-label="{label}"'
        f' style="min-height:{height}px">'
        "<noscript><p>This chart is drawn by JavaScript, which is off. The words below say what it shows.</p>"
        "</noscript>"
        "</div>"
        '<div class="wall-below">'
        f"<details><summary>In words</summary><p>{html.escape(alt)}</p></details>"
        f'<button type="button" class="wall-csv" data-csv="{html.escape(csv_name, quote=True)}" hidden>'
        "Download data (CSV)</button>"
        "</div>"
        f'<script type="application/json">{script_json(payload)}</script>'
        "</figure>"
    )


def script_json(value: Any) -> str:
    """Strict JSON that may stand inside a <script> element: no `<` at all, so neither `</script>` nor `<!--`."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def compact_trace(trace: dict) -> dict:
    """The trace with typed arrays as lists, floats rounded, and values that JSON cannot hold as null."""
    return {key: _compact(value) for key, value in trace.items()}


def _compact(value: Any) -> Any:
    if isinstance(value, dict):
        if "bdata" in value and "dtype" in value:
            return _compact(_typed_array(value))
        return {key: _compact(inner) for key, inner in value.items()}
    if isinstance(value, list):
        numbers = [item for item in value if isinstance(item, float) and math.isfinite(item)]
        # Values far from zero but close together (time stamps) need more digits than their size suggests.
        span = max(numbers) - min(numbers) if len(numbers) > 1 else 0.0
        return [round_number(item, span) if isinstance(item, float) else _compact(item) for item in value]
    if isinstance(value, float):
        return round_number(value)
    return value


def round_number(value: float, span: float = 0.0) -> float | int | None:
    """`value` to five significant digits, counted on the smaller of its size and the `span` of its array."""
    if not math.isfinite(value):
        return None
    if value == 0:
        return 0
    scale = min(abs(value), span) if span > 0 else abs(value)
    rounded = round(value, SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(scale)))
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 2**53 else rounded


def _typed_array(value: dict) -> list:
    """Decode plotly's base64 arrays: half of their bytes are digits that nobody sees."""
    array = np.frombuffer(base64.b64decode(value["bdata"]), dtype=np.dtype(value["dtype"]).newbyteorder("<"))
    if "shape" in value:
        array = array.reshape([int(size) for size in str(value["shape"]).split(",")])
    return array.tolist()


def _take_title(layout: dict) -> tuple[str, str]:
    """Take the title out of the layout: as HTML it wraps on a phone, and a screen reader finds it."""
    title = layout.pop("title", None) or {}
    if isinstance(title, str):
        title = {"text": title}
    subtitle = (title.get("subtitle") or {}).get("text")
    text, _, rest = (title.get("text") or "").partition("<br>")
    text, subtitle = plain(text), plain(subtitle or rest)
    if text:
        layout["margin"] = {**layout.get("margin", {}), "t": 28}
    return text, subtitle


def plain(text: str) -> str:
    """Plotly's little HTML as plain text. Only its own tags go: in "n < 30" the sign is a sign."""
    return " ".join(html.unescape(re.sub(PLOTLY_TAG, "", re.sub(r"<br\s*/?>", " ", text))).split())


def describe(traces: list[dict], layout: dict) -> str:
    """Say what a chart shows, for a figure whose author gave no `meta.alt`."""
    parts = []
    for axis, word in (("xaxis", "Across"), ("yaxis", "Up")):
        settings = layout.get(axis) or {}
        title = settings.get("title") or ""
        text = plain(title if isinstance(title, str) else title.get("text") or "")
        if text:
            parts.append(f"{word}: {text}{' (logarithmic)' if settings.get('type') == 'log' else ''}.")
    series = []
    for number, trace in enumerate(traces, start=1):
        values = [v for v in trace.get("y") or [] if isinstance(v, int | float) and not isinstance(v, bool)]
        reach = f" from {min(values):g} to {max(values):g}" if values else ""
        points = len(trace.get("y") or trace.get("x") or [])
        series.append(f"{plain(trace.get('name') or f'series {number}')} ({points} points{reach})")
    # Forty bars of one timeline are not forty facts: say the first few and how many there are.
    if series:
        more = f" and {len(series) - 8} more" if len(series) > 8 else ""
        parts.append(f"Series: {'; '.join(series[:8])}{more}.")
    return " ".join(parts) or "A chart."


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "figure"
