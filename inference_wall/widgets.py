"""A dial: one of several prepared answers at a time, in a notebook and on the page.

What:   `dial(options, label)` shows a control and the option that it points at. In a notebook with a person it is an ipywidget.
        When a page is made, all options are ordinary outputs between HTML marks, and `site/static/knob.js` joins them.
Why:    a page has no kernel, so every answer must be on it; and the state of an ipywidget would put a script from another
        host on the page. Without JavaScript the options stand one after another, each below its name.
Use:    dial({"1 request": figure_1, "8 requests": figure_8}, "Requests in the step", value="8 requests", slider=True)
Not:    computing an answer when asked (the options are few and ready), figures and tables (`primer_figures`, `bytes_per_step`).
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from typing import Any

from IPython import get_ipython
from IPython.display import HTML, Markdown, display

from .post import PAGE_VARIABLE


def dial(options: Mapping[str, Any], label: str, value: str | None = None, slider: bool = False) -> None:
    """Display `options` (name to content) behind one control called `label`, with the option named `value` (or the first) chosen.

    A content is a plotly figure, a string (HTML when it begins with "<", else Markdown), anything else that a notebook can
    display, or a list of those. `slider`: the names are in an order, so the control is a slider instead of a list. ValueError for
    no option or an unknown `value`.
    """
    if not options:
        raise ValueError("a dial needs an option")
    names = [str(name) for name in options]
    chosen = names[0] if value is None else str(value)
    if chosen not in names:
        raise ValueError(f"the dial {label!r} has no option {chosen!r}; there are: {', '.join(names)}")
    contents = dict(zip(names, options.values(), strict=True))
    if len(names) == 1:
        show(contents[chosen])  # nothing to choose
    elif is_live():
        _live(contents, label, chosen, slider)
    else:
        _page(contents, label, chosen, slider)


def is_live() -> bool:
    """Whether a person sits at the kernel: a Jupyter kernel, and no page is being made."""
    return not os.environ.get(PAGE_VARIABLE) and hasattr(get_ipython(), "kernel")


def show(content: Any) -> None:
    """Display one content of a dial."""
    for each in content if isinstance(content, list | tuple) else [content]:
        if isinstance(each, str):
            display(HTML(each) if each.lstrip().startswith("<") else Markdown(each))
        else:
            display(each)


def _live(contents: dict[str, Any], label: str, chosen: str, slider: bool) -> None:
    import ipywidgets  # only here: importing it must not be able to leave widget state in a page

    names, out = list(contents), ipywidgets.Output()
    kind = ipywidgets.SelectionSlider if slider else ipywidgets.Dropdown
    control = kind(options=names, value=chosen, description=label, style={"description_width": "initial"},
                   layout={"width": "auto", "max_width": "40rem"})

    def redraw(_change: Any = None) -> None:
        with out:
            out.clear_output(wait=True)
            show(contents[control.value])

    control.observe(redraw, names="value")
    display(control, out)
    redraw()


def _page(contents: dict[str, Any], label: str, chosen: str, slider: bool) -> None:
    names = list(contents)
    display(HTML(_control(names, label, chosen, slider)))
    for name, content in contents.items():
        display(HTML(f'<p class="wall-dial-option">{html.escape(label)}: <strong>{html.escape(name)}</strong></p>'))
        show(content)
    display(HTML('<div class="wall-dial-end"></div>'))


def _control(names: list[str], label: str, chosen: str, slider: bool) -> str:
    """The control as HTML, hidden until the page's script has joined the options. The label holds it, so it needs no id."""
    at, shown = names.index(chosen), html.escape(label)
    if slider:
        marks = "".join(f"<span>{html.escape(name)}</span>" for name in names)
        inner = (f'<input type="range" min="0" max="{len(names) - 1}" step="1" value="{at}" aria-valuetext="{html.escape(chosen, quote=True)}">'
                 f'</label><span class="wall-dial-marks" aria-hidden="true">{marks}</span>')
    else:
        inner = "<select>" + "".join(f'<option value="{number}"{" selected" if number == at else ""}>{html.escape(name)}</option>'
                                     for number, name in enumerate(names)) + "</select></label>"
    return f'<div class="wall-dial-start" hidden><label><span>{shown}</span> {inner}</div>'
