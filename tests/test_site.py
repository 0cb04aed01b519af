"""The site's own parts: figures and tables as HTML, numbers in prose, provenance, and a build that fails when it should."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import plotly.offline
import pytest
from bs4 import BeautifulSoup

from inference_wall.errors import WallError
from inference_wall.site import build as building
from inference_wall.site import mime, numbers, provenance, tables

ROOT = Path(__file__).parent.parent
FIXTURES = Path(__file__).parent / "fixtures" / "site"


def payload(html: str) -> dict:
    return json.loads(BeautifulSoup(html, "html.parser").find("script").string)


def scatter(**trace) -> dict:
    return {"data": [{"type": "scatter", "x": [1, 2], "y": [3.0, 4.0], **trace}], "layout": {}}


# --- figures ------------------------------------------------------------------------------------------------------


def test_a_figure_cannot_close_its_script_element():
    figure = scatter(name="</script><img src=x onerror=alert(1)><!-- <script>")
    html = mime.figure_html(figure)
    assert html.count("<script") == 1 and html.count("</script>") == 1 and "<!--" not in html and "<img" not in html
    assert payload(html)["data"][0]["name"] == figure["data"][0]["name"]


def test_title_and_words_of_a_figure_are_escaped():
    figure = scatter() | {"layout": {"title": {"text": "a < b & <b>c</b>"}, "meta": {"alt": "x < y", "csv": 'a".csv'}}}
    soup = BeautifulSoup(mime.figure_html(figure), "html.parser")
    assert soup.find("figcaption").get_text() == "a < b & c"
    assert soup.find("details").p.get_text() == "x < y"
    assert soup.find("button")["data-csv"] == 'a".csv'


def test_template_width_and_title_leave_the_json():
    figure = scatter() | {"layout": {"template": {"layout": {}}, "width": 700, "title": "T", "xaxis": {"type": "log"}}}
    layout = payload(mime.figure_html(figure))["layout"]
    assert layout == {"xaxis": {"type": "log"}, "margin": {"t": 28}}


def test_a_figure_keeps_room_for_its_height():
    figure = scatter() | {"layout": {"height": 510}}
    assert "min-height:510px" in mime.figure_html(figure)
    assert f"min-height:{mime.DEFAULT_HEIGHT}px" in mime.figure_html(scatter())


def test_typed_arrays_are_decoded_in_their_shape():
    values = np.arange(6, dtype="<f8").reshape(2, 3) / 3
    typed = {"dtype": "f8", "bdata": base64.b64encode(values.tobytes()).decode(), "shape": "2, 3"}
    trace = mime.compact_trace({"type": "heatmap", "z": typed})
    assert trace["z"] == [[0, 0.33333, 0.66667], [1, 1.33333, 1.66667]]


@pytest.mark.parametrize(
    ("value", "span", "expected"),
    [
        (29272.324159, 0, 29272),
        (0.000123456789, 0, 0.00012346),
        (-1234.5678, 0, -1234.6),
        (3.0, 0, 3),
        (0.0, 0, 0),
        (float("nan"), 0, None),
        (float("inf"), 0, None),
        (1764438200.1234, 100.0, 1764438200.12),
    ],
)
def test_rounding_keeps_what_a_screen_can_show(value, span, expected):
    assert mime.round_number(value, span) == expected


def test_time_stamps_stay_apart_after_rounding():
    stamps = [1764438200.10, 1764438200.11, 1764438260.0]
    assert mime.compact_trace({"x": stamps})["x"] == stamps


def test_null_and_nan_are_null_and_integers_stay():
    assert mime.compact_trace({"y": [None, float("nan"), 2, 123456789]})["y"] == [None, None, 2, 123456789]


def test_a_figure_is_strict_json():
    with pytest.raises(ValueError):
        mime.script_json({"y": float("nan")})


def test_words_are_made_where_the_author_gave_none():
    figure = scatter(name="p99") | {"layout": {"xaxis": {"title": {"text": "rate"}, "type": "log"}, "yaxis": {"title": "ms"}}}
    words = BeautifulSoup(mime.figure_html(figure), "html.parser").find("details").p.get_text()
    assert words == "Across: rate (logarithmic). Up: ms. Series: p99 (2 points from 3 to 4)."


def test_the_bundle_knows_what_its_package_says():
    assert {"scatter", "bar", "heatmap", "histogram", "box"} <= mime.bundled_trace_types()
    assert not {"scattergl", "scatter3d", "surface", "sankey"} & mime.bundled_trace_types()


def test_the_bundle_is_the_version_that_plotly_writes_for():
    wanted = plotly.offline.get_plotlyjs_version()
    assert f"v{wanted}" in mime.BUNDLE.read_text(encoding="utf-8")[:200]
    assert f"`plotly.js-cartesian-dist-min` {wanted}" in (mime.BUNDLE.parent / "NOTICE").read_text(encoding="utf-8")


def test_unknown_trace_types_are_named():
    assert mime.unknown_trace_types(scatter()) == set()
    assert mime.unknown_trace_types({"data": [{}]}) == set()
    assert mime.unknown_trace_types(scatter(type="scattergl")) == {"scattergl"}


def test_outputs_that_are_not_ours_are_left_to_myst_nb():
    def handle(kind, text, inline=False):
        data = SimpleNamespace(mime_type=kind, content=text, string=text, line=1)
        return mime.FigureRenderer.handle_mime(None, data, inline)

    assert handle("image/png", "") is None
    assert handle("text/html", "<p>a table of contents</p>") is None
    assert handle("text/html", "<table class='other'></table>") is None
    assert handle(mime.PLOTLY_MIME, scatter(), inline=True) is None
    assert len(handle(mime.PLOTLY_MIME, scatter())) == 1
    assert len(handle("text/html", '<table border="1" class="dataframe"></table>')) == 1


# --- tables -------------------------------------------------------------------------------------------------------

FRAME = """<div><style scoped>.dataframe {}</style><table border="1" class="dataframe"><thead><tr><th></th><th>rate</th>
<th>p99</th><th>word</th></tr></thead><tbody><tr><th>0</th><td>1.5</td><td>NaN</td><td>low</td></tr>
<tr><th>1</th><td>2,000</td><td>&lt; 10</td><td title="too few requests"></td></tr></tbody></table></div>"""


@pytest.fixture
def dressed():
    return BeautifulSoup(tables.decorate(FRAME), "html.parser")


def test_a_table_loses_what_is_for_a_notebook(dressed):
    assert dressed.find("style") is None
    assert dressed.table["class"] == ["wall-table"] and not dressed.table.has_attr("border")


def test_nulls_are_a_dash_with_a_reason(dressed):
    nulls = dressed.select("td.wall-null")
    assert [cell.get_text() for cell in nulls] == ["–", "–"]
    assert [cell["title"] for cell in nulls] == ["not measured", "too few requests"]


def test_numbers_and_their_headers_are_aligned(dressed):
    assert [cell.get_text() for cell in dressed.select("td.wall-number-cell")] == ["1.5", "2,000", "< 10"]
    assert [cell.get_text() for cell in dressed.select("th.wall-number-cell")] == ["rate", "p99"]


def test_headers_have_a_scope_and_none_is_empty(dressed):
    assert {cell["scope"] for cell in dressed.select("thead th")} == {"col"}
    assert {cell["scope"] for cell in dressed.select("tbody th")} == {"row"}
    assert all(cell.get_text(strip=True) for cell in dressed.find_all("th"))


def test_a_table_scrolls_in_its_own_frame_and_names_it():
    html = '<table class="wall-table" data-csv="m.csv"><caption>What fits</caption><tr><td>1</td></tr></table>'
    soup = BeautifulSoup(tables.decorate(html), "html.parser")
    frame = soup.find("div", class_="wall-table-frame")
    assert (frame["role"], frame["tabindex"], frame["aria-label"]) == ("region", "0", "What fits")
    assert soup.find("p", class_="wall-table-title").get_text() == "What fits"
    assert soup.find("button")["data-csv"] == "m.csv"


# --- numbers in prose ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "role", "text"),
    [
        ({"value": 6.234, "unit": "req/s"}, "a.b:.1f", "6.2"),
        ({"value": 6.234, "unit": "req/s"}, "a.b:.1f unit", "6.2\u00a0req/s"),
        ({"value": 29272.3, "unit": "ms"}, "a.b:,.0f", "29,272"),
        ({"value": "Marlin", "unit": None}, "a.b unit", "Marlin"),
        ({"value": None, "unit": "W", "reason": "no GPU"}, "a.b:.1f unit", "not measured"),
    ],
)
def test_a_number_is_written_as_asked(entry, role, text):
    key, spec, with_unit = numbers.parse(role)
    assert key == "a.b"
    assert numbers.show(entry, spec, with_unit) == text


def test_a_format_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError):
        numbers.show({"value": "Marlin"}, ".1f", False)


def test_the_title_says_where_a_number_comes_from():
    entry = {"value": 1, "n": 300, "run": "arm-1", "source": "measured"}
    assert numbers.title(entry) == "measured here; run arm-1; n = 300"
    assert "not re-measured here" in numbers.title({"value": 1, "source": "published", "where": "articles/part-1.md"})
    assert "no GPU" in numbers.title({"value": None, "reason": "no GPU"})


# --- the build ----------------------------------------------------------------------------------------------------

NUMBERS = json.loads((FIXTURES / "numbers.json").read_text(encoding="utf-8"))


def make_book(folder: Path, index: str = "# Start\n\nHello.\n") -> Path:
    """A book with the real configuration: a page of prose, the executed fixture, and the provenance page."""
    (folder / "book").mkdir(parents=True)
    (folder / "build" / "executed").mkdir(parents=True)
    (folder / "inference_wall").mkdir()
    shutil.copytree(ROOT / "inference_wall" / "site", folder / "inference_wall" / "site")
    shutil.copy(ROOT / "_config.yml", folder)
    shutil.copy(FIXTURES / "post.ipynb", folder / "build" / "executed" / "part_1.ipynb")
    (folder / "book" / "index.md").write_text(index, encoding="utf-8")
    write_toc(folder, "build/executed/part_1", "build/pages/provenance")
    return folder


def write_toc(folder: Path, *pages: str) -> None:
    lines = ["format: jb-book", "root: book/index", "chapters:", *(f"  - file: {page}" for page in pages)]
    (folder / "_toc.yml").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.setenv("WALL_BENCHMARKS", str(FIXTURES / "benchmarks"))
    return make_book(tmp_path / "site source")


def build(folder: Path, named: dict | None = None) -> Path:
    return building.build(root=folder, numbers=NUMBERS if named is None else named, say=lambda text: None)


def test_a_whole_build_and_what_it_leaves(book):
    write_toc(book, "build/executed/part_1", "build/pages/provenance", "book/old")
    (book / "book" / "old.md").write_text("# Old\n\nSoon gone.\n", encoding="utf-8")
    site = build(book)
    page = BeautifulSoup((site / "build" / "executed" / "part_1.html").read_text(encoding="utf-8"), "html.parser")
    assert len(page.select("figure.wall-figure")) == 3 and len(page.select("table.wall-table")) == 2
    assert 'rig = "cpu"' not in page.get_text() and 'rig = "auto"' not in page.get_text()  # parameter cells
    assert len(page.select("details.hide summary")) == 7 and not page.select("summary[aria-label]")
    peak, published, power = page.select(".wall-number")
    assert peak.get_text() == "6.2\u00a0req/s" and "n = 300" in peak["title"]
    assert published["href"].endswith(f"#{numbers.PUBLISHED_ANCHOR}")
    assert power.get_text() == "not measured" and "no GPU" in power["title"]

    records = BeautifulSoup((site / "build" / "pages" / "provenance.html").read_text(encoding="utf-8"), "html.parser")
    assert records.find(id=peak["href"].split("#")[1]) is not None
    assert records.find(id=numbers.PUBLISHED_ANCHOR) is not None
    assert "too few requests" in records.get_text()
    raw = [link["href"] for link in records.select('a[href*="records/"]')]
    assert raw and all((site / "build" / "pages" / address).resolve().is_file() for address in raw)

    # A changed number reaches the page that names it, and a page that left the table of contents leaves the site.
    assert (site / "book" / "old.html").is_file()
    changed = NUMBERS | {"demo.peak": NUMBERS["demo.peak"] | {"value": 7.77}}
    build(book, changed)
    assert "7.8\u00a0req/s" in (site / "build" / "executed" / "part_1.html").read_text(encoding="utf-8")
    write_toc(book, "build/executed/part_1", "build/pages/provenance")
    build(book, changed)
    assert not (site / "book" / "old.html").exists()


MISTAKES = {
    "It was {num}`demo.peek:.1f`.": "no number is called 'demo.peek' (did you mean demo.peak",
    "It was {num}`demo.peak:.1q`.": "'.1q' cannot write",
    "So {math}`x`.": "maths would be fetched",
    "See [there](nowhere.md).": "nowhere.md",
}


def test_a_page_with_mistakes_fails_every_time(book):
    (book / "book" / "index.md").write_text("# Start\n\n" + "\n\n".join(MISTAKES) + "\n", encoding="utf-8")
    for _ in range(2):  # the second build must not pass because Sphinx has seen the page
        with pytest.raises(WallError, match="the site has 4 warnings") as error:
            build(book)
        assert [complaint for complaint in MISTAKES.values() if complaint not in str(error.value)] == []
        assert str(book) not in str(error.value)


def test_a_missing_post_says_what_to_run(book):
    (book / "build" / "executed" / "part_1.ipynb").unlink()
    with pytest.raises(WallError, match="has not been executed") as error:
        build(book)
    assert "make site" in error.value.remedy


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (
            {"output_type": "display_data", "metadata": {}, "data": {mime.PLOTLY_MIME: scatter(type="scattergl")}},
            "trace type scattergl",
        ),
        ({"output_type": "error", "ename": "KeyError", "evalue": "'p99'", "traceback": []}, "failed: KeyError"),
    ],
)
def test_a_notebook_with_a_wrong_figure_or_a_failed_cell_is_refused(book, output, complaint):
    path = book / "build" / "executed" / "part_1.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    notebook["cells"][3]["outputs"] = [output]
    path.write_text(json.dumps(notebook), encoding="utf-8")
    with pytest.raises(WallError, match=complaint):
        build(book)


def test_a_number_of_a_lost_run_is_refused(book):
    lost = {"demo.peak": NUMBERS["demo.peak"] | {"run": "default-00000000-20200101T000000Z"}}
    with pytest.raises(WallError, match="without a record"):
        build(book, NUMBERS | lost)


def test_a_damaged_record_says_so_on_the_page(tmp_path):
    benchmarks = tmp_path / "benchmarks"
    shutil.copytree(FIXTURES / "benchmarks", benchmarks)
    points = next(benchmarks.rglob("points.jsonl"))
    points.write_text("{}\n", encoding="utf-8")
    (record,) = provenance.write_page(benchmarks, tmp_path / "provenance.md")
    assert record.problem and "points.jsonl" in record.problem
    assert re.search(r"not usable: .*points\.jsonl", (tmp_path / "provenance.md").read_text(encoding="utf-8"))


def test_drafts_are_not_on_the_page(tmp_path):
    benchmarks = tmp_path / "benchmarks"
    shutil.copytree(FIXTURES / "benchmarks", benchmarks)
    for record in [path.parent for path in benchmarks.rglob("run.json")]:
        record.rename(record.with_name(record.name + ".partial"))
    assert provenance.write_page(benchmarks, tmp_path / "provenance.md") == []
