"""A post's pages for several rigs: found from one another, out of the way elsewhere, and never stale."""

import json
import shutil

import pytest
from bs4 import BeautifulSoup
from test_site import FIXTURES, NUMBERS, build, make_book

from inference_wall import evidence, headline, post, rigs
from inference_wall.site import build as building
from inference_wall.site import numbers, rig_tables, switch

CPU = {"rig": "cpu", "title": "Any <CPU>", "page": "part_1", "local": False}
GPU = {"rig": "h200-4b", "title": "NVIDIA H200", "page": "part_1-h200-4b", "local": True}


def add_rigs(folder, *rows):
    for row in rows:
        shutil.copy(FIXTURES / "post.ipynb", folder / "build" / "executed" / f"{row['page']}.ipynb")
    (folder / "build" / "rigs.json").write_text(json.dumps({"part_1": rows}), encoding="utf-8")
    return folder


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.setenv("WALL_BENCHMARKS", str(FIXTURES / "benchmarks"))
    return make_book(tmp_path / "book source")


def read(site, page):
    return BeautifulSoup((site / "build" / "executed" / f"{page}.html").read_text(encoding="utf-8"), "html.parser")


def head(page):
    return page.select_one(".bd-article h1").get_text()


def test_each_rig_has_a_page_that_leads_to_the_others_and_stays_out_of_the_sidebar(book):
    site = build(add_rigs(book, CPU, GPU))
    for row in (CPU, GPU):
        page = read(site, row["page"])
        links = page.select("nav.wall-switch a")
        assert [link.strong.get_text() for link in links] == ["cpu", "h200-4b", "a10g"]
        assert [link["href"] for link in page.select("nav.wall-switch a[aria-current=page]")] == [f"{row['page']}.html"]
        assert "Any <CPU>" in links[0].get_text() and "not committed" in links[1].get_text() and "not committed" not in links[0].get_text()
        assert page.select_one(".bd-article h1").find_next_sibling()["class"] == ["wall-switch"]
        target = links[2]["href"].split("#")[1]
        home = page if links[2]["href"].startswith("#") else BeautifulSoup((site / "build" / "pages" / "provenance.html").read_text(), "html.parser")
        assert home.find(id=target) is not None
    other = read(site, GPU["page"])
    assert "(h200-4b)" in other.title.get_text() and "(h200-4b)" in head(other) and "(" not in head(read(site, "part_1"))
    assert other.select_one("link[rel=canonical]")["href"] == "part_1.html" and read(site, "part_1").select_one("link[rel=canonical]") is None
    assert GPU["page"] in (site / "searchindex.js").read_text(encoding="utf-8")
    for page in (site / "book" / "index.html", site / "build" / "executed" / "part_1.html"):
        assert not BeautifulSoup(page.read_text(), "html.parser").select(f'.bd-sidebar-primary a[href*="{GPU["page"]}"]')
    assert other.select_one(".prev-next-area a.right-next")["href"] == "../pages/provenance.html"

    # Another rig comes, and later both go: switches follow, and no page stays behind.
    new = GPU | {"rig": "gpu", "page": "part_1-gpu"}
    build(add_rigs(book, CPU, GPU, new))
    assert len(read(site, "part_1").select("nav.wall-switch a")) == 4
    for row in (GPU, new):
        (book / "build" / "executed" / f"{row['page']}.ipynb").unlink()
    build(add_rigs(book, CPU))
    assert len(read(site, "part_1").select("nav.wall-switch a")) == 2
    assert not (site / "build" / "executed" / "part_1-gpu.html").exists() and not (site / "build" / "executed" / f"{GPU['page']}.html").exists()


def test_a_page_that_is_listed_and_not_there_fails_the_build(book):
    add_rigs(book, CPU, GPU)
    (book / "build" / "executed" / f"{GPU['page']}.ipynb").unlink()
    with pytest.raises(building.WallError, match=f"{GPU['page']}.*has not been executed"):
        build(book)


def test_the_published_figures_are_linked_where_the_page_shows_them():
    assert 'href="#the-published-a10g"' in switch.switch_html([CPU], "part_1", "the-published-a10g")
    assert numbers.PUBLISHED_ANCHOR in switch.switch_html([CPU], "part_1", None)


@pytest.mark.parametrize(("docname", "key", "meant"), [
    ("build/executed/part_1", "part_1.here.knee_low", "part_1.here.knee_low"),
    ("build/executed/part_1-h200-4b", "part_1.here.knee_low", "part_1.h200-4b.knee_low"),
    ("build/executed/part_1-h200-4b", "part_2.here.knee_low", "part_2.here.knee_low"),
    ("build/executed/part_1-h200-4b", "published.a10g.knee", "published.a10g.knee"),
])
def test_a_number_of_this_page_is_that_of_its_rig(docname, key, meant):
    assert numbers.on_page(key, docname) == meant


def test_numbers_on_another_rigs_page_come_from_its_records(book):
    folder = add_rigs(book, CPU, GPU)
    for row in (CPU, GPU):
        path = folder / "build" / "executed" / f"{row['page']}.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        notebook["cells"].append({"cell_type": "markdown", "id": "last", "metadata": {}, "source": "It is {num}`part_1.here.knee`."})
        path.write_text(json.dumps(notebook), encoding="utf-8")
    entry = {"unit": "", "n": None, "run": None, "source": "measured", "reason": None}
    site = build(folder, NUMBERS | {"part_1.here.knee": entry | {"value": "low"}, "part_1.h200-4b.knee": entry | {"value": "high"}})
    assert "It is low." in read(site, "part_1").get_text() and "It is high." in read(site, GPU["page"]).get_text()


def test_pages_of_rigs_that_lost_their_records_are_removed(tmp_path):
    for name in ("part_1.ipynb", "part_1-cpu.ipynb", "part_1-cpu.json", "part_1-gpu.ipynb", "part_1-gpu.json", "primer.ipynb"):
        (tmp_path / name).touch()
    building._drop_pages({"part_1", "part_1-cpu", "primer"}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part_1-cpu.ipynb", "part_1-cpu.json", "part_1.ipynb", "primer.ipynb"]


def test_every_number_of_the_tables_of_rigs_exists():
    shown = {name: post.recorded(name, committed_only=True) for name in rigs.protocol_names()}
    known = headline.collect(shown, committed_only=True)
    pages = {name: [{"rig": rig, "page": evidence.page_of(name, rig, shown[name].rig)} for rig in evidence.sets(name, committed_only=True)]
             for name in shown}
    for text in (rig_tables.headlines({name: rigs.load_protocol(name).title for name in shown}, pages), rig_tables.minutes(pages),
                 rig_tables.own_units(pages)):
        widths = {line.count("|") for line in text.splitlines() if "|" in line}
        assert len(widths) == 1 and len(text.splitlines()) > 6
        for content in text.split("{num}`")[1:]:
            key, spec, with_unit = numbers.parse(content.split("`")[0])
            assert key in known, key
            assert numbers.show(known[key], spec, with_unit)
    here = {key.replace(".here.", f".{shown['part_2'].rig}."): entry for key, entry in known.items() if key.startswith("part_2.here.")}
    assert here and all(known[key] == entry for key, entry in here.items())


def test_tables_of_a_committed_build_leave_local_records_out(tmp_path, monkeypatch):
    """The switch and the pages already do; what a start took and what records weigh must not show a machine's own records either."""
    (record,) = (rigs.root() / "benchmarks" / "part_1" / "h200-4b").glob("default-*")
    monkeypatch.setenv("WALL_BENCHMARKS", str(tmp_path))
    for place in ("", "local/"):
        shutil.copytree(record, tmp_path / f"{place}part_1" / "h200-4b" / record.name)
    pages = {"part_1": [GPU]}
    assert "| h200-4b | 2 |" in rig_tables.sizes(pages) and "| h200-4b | 1 |" in rig_tables.sizes(pages, committed_only=True)
    shutil.rmtree(tmp_path / "part_1")
    assert "part_1 default" in rig_tables.server_starts(pages)
    assert "part_1 default" not in rig_tables.server_starts(pages, committed_only=True)
