"""The switch between rigs as a reader meets it: by keyboard, without JavaScript, on a phone, light and dark."""

import http.server
import threading

import pytest
from test_browser import PHONE, Site, _Quiet, chromium, in_each_theme, open_page  # noqa: F401
from test_site import FIXTURES, NUMBERS, make_book
from test_site_rigs import CPU, GPU, add_rigs

from inference_wall.site.build import build

pytestmark = pytest.mark.browser
FIRST, OTHER = "build/executed/part_1.html", f"build/executed/{GPU['page']}.html"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WALL_BENCHMARKS", str(FIXTURES / "benchmarks"))
        folder = build(root=add_rigs(make_book(tmp_path_factory.mktemp("rigs")), CPU, GPU), numbers=NUMBERS, say=lambda text: None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: _Quiet(*args, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Site(folder, f"http://127.0.0.1:{server.server_port}/")
    server.shutdown()


@pytest.mark.parametrize("options", [{}, {"java_script_enabled": False}, {"viewport": PHONE, "is_mobile": True, "has_touch": True}],
                         ids=["desk", "without scripts", "phone"])
def test_one_touch_leads_to_the_other_rig_and_back(open_page, options):  # noqa: F811
    tab = open_page(FIRST, **options)
    for page, rig in ((OTHER, GPU["rig"]), (FIRST, CPU["rig"])):
        tab.get_by_role("navigation", name="Whose records").get_by_role("link", name=rig).click()
        tab.wait_for_url(f"**/{page}")
        assert tab.locator(".wall-switch [aria-current=page]").inner_text().startswith(rig)


def test_the_keyboard_reaches_every_link_and_shows_where_it_is(open_page):  # noqa: F811
    tab = open_page(FIRST)
    links = tab.locator(".wall-switch a")
    links.first.focus()
    for place in range(links.count()):
        focused = tab.evaluate("[...document.querySelectorAll('.wall-switch a')].indexOf(document.activeElement)")
        assert focused == place and tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        tab.keyboard.press("Tab")
    tab.keyboard.press("Shift+Tab")
    tab.keyboard.press("Shift+Tab")
    tab.keyboard.press("Enter")
    tab.wait_for_url(f"**/{OTHER}")


def test_on_a_phone_every_link_is_whole_and_large_enough(open_page):  # noqa: F811
    tab = open_page(OTHER, viewport=PHONE, is_mobile=True, has_touch=True)
    boxes = [link.bounding_box() for link in tab.locator(".wall-switch a").all()]
    assert len(boxes) == 3
    for box in boxes:
        assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"] and box["height"] >= 24


def test_axe_finds_nothing_serious_in_either_theme(open_page):  # noqa: F811
    tab = open_page(OTHER)
    for _ in in_each_theme(tab):
        result = tab.evaluate("axe.run('.wall-switch', {preload: false, resultTypes: ['violations']})")
        assert result["passes"] and result["violations"] == []


def test_the_page_of_another_rig_draws_its_figures(site, open_page):  # noqa: F811
    tab = open_page(OTHER)
    tab.locator(".wall-figure").first.scroll_into_view_if_needed()
    tab.wait_for_selector(".wall-figure[data-state=drawn] .main-svg")
