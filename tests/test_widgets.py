"""Dials: a control for a person, plain outputs for a page, and never the one in place of the other."""

import json
import re

import nbformat
import plotly.graph_objects as go
import pytest
from bs4 import BeautifulSoup
from nbclient import NotebookClient

from inference_wall import widgets
from inference_wall.post import PAGE_VARIABLE

CELL = """
import plotly.graph_objects as go
from inference_wall.widgets import dial
dial({"one": go.Figure(go.Bar(x=["a"], y=[1])), "two": "Some **words**.", "three": ["<p>raw</p>", "more words"]}, "Which", value="two", slider=SLIDER)
"""


@pytest.fixture
def displayed(monkeypatch):
    found = []
    monkeypatch.setattr(widgets, "display", lambda *things: found.extend(things))
    return found


def texts(things):
    return [thing.data if hasattr(thing, "data") and isinstance(thing.data, str) else thing for thing in things]


@pytest.mark.parametrize("slider", [False, True])
def test_a_page_gets_a_labelled_control_and_every_option(displayed, monkeypatch, slider):
    monkeypatch.setattr(widgets, "is_live", lambda: False)
    figure = go.Figure()
    widgets.dial({"1 & 2": figure, "8": "words", "64": ["<p>x</p>", figure]}, 'A "label" <b>', value="8", slider=slider)
    start = BeautifulSoup(texts(displayed)[0], "html.parser").find("div", class_="wall-dial-start")
    assert start.has_attr("hidden")
    control = start.label.find("input" if slider else "select")
    assert start.label.span.get_text() == 'A "label" <b>' and start.find("b") is None
    if slider:
        assert (control["type"], control["min"], control["max"], control["value"], control["aria-valuetext"]) == ("range", "0", "2", "1", "8")
        assert [mark.get_text() for mark in start.select(".wall-dial-marks span")] == ["1 & 2", "8", "64"]
    else:
        assert [option.get_text() for option in control.find_all("option")] == ["1 & 2", "8", "64"]
        assert [option["value"] for option in control.find_all("option") if option.has_attr("selected")] == ["1"]
    rest = texts(displayed)[1:]
    heads = [BeautifulSoup(text, "html.parser").find("p", class_="wall-dial-option") for text in rest if isinstance(text, str)]
    assert [head.get_text() for head in heads if head] == [f'A "label" <b>: {name}' for name in ("1 & 2", "8", "64")]
    assert [rest[1], rest[3], rest[5], rest[6]] == [figure, "words", "<p>x</p>", figure]
    assert rest[-1] == '<div class="wall-dial-end"></div>'
    assert not any("<script" in text or re.search(r"\son\w+=", text) or "//" in text for text in rest if isinstance(text, str))


def test_one_option_needs_no_control(displayed):
    widgets.dial({"only": "words"}, "Which")
    assert texts(displayed) == ["words"]


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="needs an option"):
        widgets.dial({}, "Which")
    with pytest.raises(ValueError, match="no option 'four'; there are: one, two"):
        widgets.dial({"one": "", "two": ""}, "Which", value="four")


@pytest.mark.parametrize("slider", [False, True])
def test_a_person_gets_a_control_that_turns(displayed, monkeypatch, slider):
    monkeypatch.setattr(widgets, "is_live", lambda: True)
    widgets.dial({"one": "first words", "two": "second words"}, "Which", value="two", slider=slider)
    control = displayed[0]
    assert type(control).__name__ == ("SelectionSlider" if slider else "Dropdown")
    assert (control.value, control.description, list(control.options)) == ("two", "Which", ["one", "two"])
    assert texts(displayed)[-1] == "second words"
    control.value = "one"
    assert texts(displayed)[-1] == "first words"


def test_no_kernel_means_no_person():
    assert not widgets.is_live()


def outputs(slider):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL.replace("SLIDER", str(slider)))])
    NotebookClient(notebook, kernel_name="python3", timeout=60).execute()
    return notebook


def kinds(notebook):
    return [sorted(output.get("data", {})) for output in notebook.cells[0].outputs]


def test_a_page_never_stores_a_widget_and_a_notebook_does(monkeypatch):
    monkeypatch.setenv(PAGE_VARIABLE, "somewhere")
    page = outputs(slider=True)
    assert "widget" not in json.dumps(page.cells[0].outputs) and "widgets" not in page.metadata
    found = [kind for bundle in kinds(page) for kind in bundle]
    assert found.count("application/vnd.plotly.v1+json") == 1 and found.count("text/markdown") == 2
    monkeypatch.delenv(PAGE_VARIABLE)
    assert any("application/vnd.jupyter.widget-view+json" in bundle for bundle in kinds(outputs(slider=True)))
