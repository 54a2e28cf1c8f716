"""The lines at the bottom of a terminal, and what other output becomes of it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from echelon.observe.pane import Pane, can_have_pane
from screen import Screen


class _Terminal(io.StringIO):
    """A file that shows what is written to it on a screen."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self.screen = screen
        self.writes = 0

    def write(self, text: str) -> int:
        self.writes += bool(text)
        self.screen.write(text)
        return len(text)


@pytest.fixture
def terminal() -> _Terminal:
    return _Terminal(Screen(20, 8))


def _pane(terminal: _Terminal) -> Pane:
    screen = terminal.screen
    environment = {"TERM": "xterm", "COLUMNS": str(screen.width), "LINES": str(screen.height)}
    return Pane(Console(file=terminal, force_terminal=True, color_system=None, _environ=environment))


@pytest.mark.parametrize("printed", [0, 3, 5, 6, 12])
def test_pane_is_at_the_bottom_and_hides_nothing_wherever_the_cursor_was(terminal, printed):
    text = [f"line {number}" for number in range(printed)]
    for line in text:
        terminal.write(line + "\n")
    _pane(terminal).show(Text("one\ntwo"))
    screen = terminal.screen
    assert screen.lines[-2:] == ["one", "two"]
    assert [line for line in [*screen.scrolled, *screen.lines[:-2]] if line] == text
    assert screen.cursor == (min(printed, 5), 0)


def test_output_scrolls_above_the_pane_and_none_of_it_is_lost(terminal):
    pane = _pane(terminal)
    pane.show(Text("one\ntwo"))
    for number in range(20):
        terminal.write(f"line {number}\n")
        pane.show(Text(f"one\ntwo {number}"))
    screen = terminal.screen
    assert screen.lines[-2:] == ["one", "two 19"]
    assert [*screen.scrolled, *screen.lines[:-2]] == [f"line {number}" for number in range(20)] + [""]


def test_unfinished_lines_and_carriage_returns_go_on_where_they_were(terminal):
    pane = _pane(terminal)
    for number in range(30):
        terminal.write(f"\r{number} of 30")
        pane.show(Text(f"pane {number}"))
    terminal.write(", done")
    assert terminal.screen.lines == ["29 of 30, done", *[""] * 6, "pane 29"]


def test_pane_that_grows_and_shrinks_leaves_no_lines_behind(terminal):
    pane = _pane(terminal)
    for number in range(7):
        terminal.write(f"line {number}\n")
    terminal.write("unfinished")
    for what in ("one", "one\ntwo\nthree", "one\ntwo", "one\ntwo\nthree\nfour"):
        pane.show(Text(what))
        screen = terminal.screen
        above = [*screen.scrolled, *screen.lines[: -len(what.split())]]
        assert [line for line in above if line] == [*(f"line {n}" for n in range(7)), "unfinished"]
        assert screen.lines[-len(what.split()) :] == what.split()
    terminal.write(" line\n")
    assert screen.lines[screen.cursor[0] - 1] == "unfinished line"


def test_hidden_pane_gives_the_whole_terminal_back(terminal):
    pane = _pane(terminal)
    terminal.write("before")
    pane.show(Text("one\ntwo"))
    pane.hide()
    pane.hide()
    terminal.write(" and after\n" + "\n".join("abcdefgh"))
    assert terminal.screen.lines == list("abcdefgh")
    assert terminal.screen.scrolled == ["before and after"]


def test_pane_that_has_not_changed_is_drawn_again_only_on_request(terminal):
    pane = _pane(terminal)
    pane.show(Text("one"))
    writes = terminal.writes
    pane.show(Text("one"))
    assert terminal.writes == writes
    terminal.write("\x1b[1;1H\x1b[J")  # a script clears the screen
    pane.show(Text("one"), again=True)
    assert terminal.screen.lines[-1] == "one"


def test_terminal_that_is_too_low_has_no_pane(terminal):
    pane = _pane(terminal)
    pane.show(Text("one"))
    pane.show(Text("\n".join("abcdef")))
    assert terminal.screen.lines == [""] * 8


def test_pane_as_wide_as_the_terminal_does_not_push_the_cursor_on(terminal):
    pane = _pane(terminal)
    pane.show(Text("x" * 20 + "y"))
    assert terminal.screen.lines == [*[""] * 6, "x" * 20, "y"]
    assert terminal.screen.cursor == (0, 0)


@pytest.mark.parametrize(("kind", "can"), [("xterm", True), ("dumb", False)])
def test_terminal_that_cannot_be_drawn_on_has_no_pane(kind, can):
    console = Console(
        file=io.StringIO(), force_terminal=True, legacy_windows=False, _environ={"TERM": kind}
    )
    assert can_have_pane(console) == can
    assert not can_have_pane(Console(file=io.StringIO()))
