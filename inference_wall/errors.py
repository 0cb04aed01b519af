"""The one exception that a user sees.

What:   `WallError` carries what went wrong and what to do next; it prints as two lines, without a traceback.
Why:    a reader who mistypes a parameter or lacks a GPU needs the next step, not a stack of frames.
Use:    `raise WallError("port 8000 is in use by process 4711", "stop that process, or choose another port with --port")`
        The command line (`cli`) prints `str(error)` on standard error and leaves with `exit_code`.
Not:    programming mistakes. Those stay ordinary exceptions with their traceback.
"""

from __future__ import annotations


class WallError(Exception):
    """An error caused by the outside world or by the user's input, together with its remedy.

    `message` says what is wrong, in one sentence and without a final full stop.
    `remedy` says what to do next; it may be empty only where there is nothing to be done.
    `exit_code` is the status with which a command that fails this way leaves (1 unless told otherwise).
    """

    def __init__(self, message: str, remedy: str = "", exit_code: int = 1):
        super().__init__(message, remedy)
        self.message = _one_line(message)
        self.remedy = _one_line(remedy)
        self.exit_code = exit_code

    def __str__(self) -> str:
        """Two lines: `error: ...` and, where there is a remedy, `remedy: ...`."""
        lines = [f"error: {self.message}"]
        if self.remedy:
            lines.append(f"remedy: {self.remedy}")
        return "\n".join(lines)


class EngineRefused(WallError):
    """The engine cannot do what one arm asks of it, for a reason that lies in the flags or the model: a result, not a mishap.

    `reason` is the cause alone, fit for a page; `message` adds where to look.
    """

    def __init__(self, reason: str, message: str, remedy: str = ""):
        super().__init__(message, remedy)
        self.args = (reason, message, remedy)
        self.reason = _one_line(reason)


def _one_line(text: str) -> str:
    """Fold all white space, so that a message built from a log never spills over its line."""
    return " ".join(str(text).split())
