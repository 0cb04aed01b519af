"""Dials as a reader meets them: in Chromium, with the keyboard, on a phone, in the dark, on paper, and without scripts."""

import http.server
import threading
from importlib import resources

import nbformat
import pytest
from nbclient import NotebookClient
from test_browser import DESK, PHONE, Site, _Quiet, chromium, open_page, read_through  # noqa: F401
from test_site import FIXTURES, NUMBERS, make_book, write_toc

from inference_wall.post import PAGE_VARIABLE
from inference_wall.site.build import build

pytestmark = pytest.mark.browser

PAGE = "build/executed/dials.html"
CELLS = ["""
import pandas as pd, plotly.graph_objects as go
from inference_wall.widgets import dial
from inference_wall import bytes_per_step as b, primer_figures as p
def option(length):
    rows = b.frame("Qwen/Qwen3.5-4B", [1, 8], length)
    return [p.bytes_bars(rows), b.table(rows)]
dial({f"{length:,}": option(length) for length in (256, 1024, 4096)}, "Length of the text", value="1,024", slider=True)
""", """
dial({"figure": go.Figure(go.Bar(x=["a"], y=[1])), "words": "Some **bold** words and a [link](https://example.org)."}, "What")
dial({"left": "Left.", "right": "<p>Right.</p>"}, "Side")
"""]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Dials"), *map(nbformat.v4.new_code_cell, CELLS)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PAGE_VARIABLE, "somewhere")
        NotebookClient(notebook, kernel_name="python3", timeout=60).execute()
        patch.setenv("WALL_BENCHMARKS", str(FIXTURES / "benchmarks"))
        book = make_book(tmp_path_factory.mktemp("dials"))
        nbformat.write(notebook, book / "build" / "executed" / "dials.ipynb")
        write_toc(book, "build/executed/part_1", "build/executed/dials", "build/pages/provenance")
        folder = build(root=book, numbers=NUMBERS, say=lambda text: None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: _Quiet(*args, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Site(folder, f"http://127.0.0.1:{server.server_port}/")
    server.shutdown()


def seen(tab, number=0):
    """Names of the options of a dial that are in sight."""
    panels = tab.locator(".wall-dial").nth(number).locator(".wall-dial-panel")
    shown = [panel for panel in panels.all() if panel.is_visible() and panel.evaluate("box => getComputedStyle(box).opacity") == "1"]
    return [panel.get_attribute("aria-label").split(": ")[1] for panel in shown]


def test_each_dial_shows_the_chosen_option_alone(open_page):  # noqa: F811
    tab = open_page(PAGE)
    assert tab.locator(".wall-dial").count() == 3 and tab.locator(".wall-dial-control:visible").count() == 3
    assert [seen(tab, number) for number in range(3)] == [["1,024"], ["figure"], ["left"]]
    assert tab.locator(".wall-dial-panel").count() == 7
    assert tab.locator(".wall-dial-option:visible").count() == 0


def test_a_slider_is_named_and_turned_by_the_keyboard(open_page):  # noqa: F811
    tab = open_page(PAGE)
    slider = tab.get_by_role("slider", name="Length of the text")
    slider.focus()
    for key, name in (("ArrowRight", "4,096"), ("ArrowRight", "4,096"), ("Home", "256"), ("ArrowUp", "1,024"), ("End", "4,096")):
        slider.press(key)
        assert seen(tab) == [name] == [slider.get_attribute("aria-valuetext")]
        assert tab.locator(".wall-dial-value").first.inner_text() == name
    # From the control the next stop is in the option that is in sight, and none is in one that is not.
    for _ in range(4):
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.closest('.wall-dial-panel:not(.is-shown)')") is None


def test_a_list_is_named_and_chosen_from(open_page):  # noqa: F811
    tab = open_page(PAGE)
    choice = tab.get_by_role("combobox", name="What")
    choice.select_option("words")
    assert seen(tab, 1) == ["words"] and seen(tab, 0) == ["1,024"]
    assert tab.get_by_text("bold", exact=True).is_visible()
    choice.focus()
    choice.press("ArrowUp")
    assert seen(tab, 1) == ["figure"]


def test_figures_of_every_option_are_drawn_at_their_width(open_page):  # noqa: F811
    tab = open_page(PAGE)
    read_through(tab)
    widths = tab.evaluate("[...document.querySelectorAll('.wall-dial .main-svg:first-child')].map(svg => svg.clientWidth)")
    assert len(widths) == 4 and min(widths) == max(widths) > 500
    height = tab.evaluate("document.documentElement.scrollHeight")
    tab.get_by_role("slider").press("End")
    assert tab.evaluate("document.documentElement.scrollHeight") == height  # the page does not jump


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_and_the_width_of_a_phone(open_page, scheme):  # noqa: F811
    axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    tab = open_page(PAGE, viewport={**PHONE, "width": 360}, is_mobile=True, has_touch=True, color_scheme=scheme)
    read_through(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    tab.evaluate(axe)
    result = tab.evaluate("axe.run({exclude: ['.main-svg']}, {preload: false, resultTypes: ['violations']})")
    assert [finding["id"] for finding in result["violations"] if finding["impact"] in ("serious", "critical")] == []
    # No white box of the theme in the dark.
    boxes = tab.evaluate("[...document.querySelectorAll('.wall-dial .text_html')].map(box => getComputedStyle(box).backgroundColor)")
    assert set(boxes) <= {"rgba(0, 0, 0, 0)"} and boxes


def test_without_scripts_all_options_stand_below_their_names(open_page):  # noqa: F811
    tab = open_page(PAGE, java_script_enabled=False)
    assert tab.locator(".wall-dial-start:visible").count() == 0
    heads = tab.locator(".wall-dial-option:visible")
    assert heads.all_inner_texts()[:3] == [f"Length of the text: {name}" for name in ("256", "1,024", "4,096")] and heads.count() == 7
    assert tab.get_by_text("Right.", exact=True).is_visible() and tab.locator(".wall-table:visible").count() == 3


def test_a_printed_page_shows_what_was_chosen(open_page):  # noqa: F811
    tab = open_page(PAGE)
    read_through(tab)
    tab.get_by_role("slider").press("End")
    tab.emulate_media(media="print")
    assert seen(tab) == ["4,096"]


def test_a_broken_mark_hides_nothing(open_page):  # noqa: F811
    tab = open_page(PAGE, viewport=DESK, java_script_enabled=True)
    tab.route("**/dials.html*", lambda route: route.fulfill(
        body=route.fetch().text().replace("wall-dial-end", "gone"), content_type="text/html"))
    tab.reload()
    assert tab.locator(".wall-dial").count() == 0
    assert tab.locator(".wall-dial-option:visible").count() == 7
