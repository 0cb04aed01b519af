"""Progress of a live run in a terminal: a bar on a screen, plain lines in a log.

What:   `Progress` takes the reports of the measure process and shows the point, elapsed time and time left.
Why:    a run takes minutes to an hour; whoever waits should see that it moves and when it ends.
Use:    with Progress() as show: regenerate.execute(post, parameters, show)
Not:    progress inside a notebook (`post`).
"""

from __future__ import annotations

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from .post import Event, describe


class Progress:
    """Call it with events. The bar advances in points, of all arms that this run still measures."""

    def __init__(self) -> None:
        self._console = rich.console.Console(stderr=True)
        self._bars = Bars(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("points"), TimeElapsedColumn(),
                          TextColumn("left"), TimeRemainingColumn(), console=self._console, disable=not self._console.is_terminal)
        self._task = None
        self._points = 0
        self._point: Event = {}

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, event: Event) -> None:
        text = describe(event)
        if text:
            self._bars.console.print(text, highlight=False, soft_wrap=True)
        match event["event"]:
            case "server" if event["state"] == "starting":
                self._task = self._bars.add_task("", total=None) if self._task is None else self._task
                self._bars.update(self._task, description="starting the server")
            case "plan" if self._task is not None:
                self._points = event["kept"]
                self._bars.update(self._task, total=event["points"], completed=self._points)
            case "point" if self._task is not None:
                self._point = event
                self._bars.update(self._task, description=f"{event['arm']}: {event['pass']} pass, {event['label']}")
            case "progress" if self._task is not None and self._point:
                self._bars.update(self._task, completed=self._points + event["done"] / self._point["prompts"])
            case "point_done" if self._task is not None and event["pass"] != "warm-up":
                self._points += 1
                self._bars.update(self._task, completed=self._points)
