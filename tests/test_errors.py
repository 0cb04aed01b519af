"""The one exception that a user sees."""

from inference_wall.errors import WallError


def test_two_lines_however_long_the_cause():
    error = WallError("the log says:\n   out of\tmemory", "end\nsomething")
    assert str(error) == "error: the log says: out of memory\nremedy: end something"
    assert (error.message, error.remedy, error.exit_code) == ("the log says: out of memory", "end something", 1)


def test_without_a_remedy_there_is_no_empty_line():
    assert str(WallError("stopped", exit_code=130)) == "error: stopped"
