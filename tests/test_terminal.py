"""Nothing that others wrote steers a terminal, whichever way it gets there."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.cli.screen import Screen
from podway.cli.watching import show_end
from podway.server.api import Frame
from podway.terminal import safe_line, safe_lines, visible

HOSTILE = "\x1b]52;c;cm0gLXJm\x07copied \x1b]0;title\x07\x1b[2J\x1b[H\x9b31m\x07\x08 \x1b[31mred"
STEERS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("colour", [False, True])
def test_the_last_lines_of_a_failed_job_steer_nothing(monkeypatch: pytest.MonkeyPatch, colour: bool) -> None:
    terminal = Terminal() if colour else io.StringIO()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    end = Frame(kind="end", state="FAILED", reason=f"rank 0 {HOSTILE}", tail=f"one\n{HOSTILE}\nlast")
    with Screen() as screen:
        assert screen.colour is colour
        show_end(screen, 3, end)
    written = terminal.getvalue()
    assert "copied" in written and "last" in written
    assert not STEERS.search(COLOUR.sub("", written)), written


@given(st.text())
def test_any_text(text: str) -> None:
    assert not STEERS.search(safe_line(text).replace("\t", ""))
    assert not STEERS.search(COLOUR.sub("", safe_lines(text, colour=True)).replace("\t", ""))
    assert visible(text).isprintable()


def test_a_spinner_shows_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Screen() as screen:
        screen.wait(f"Launching {HOSTILE}")
        assert screen._waiting.isprintable()
