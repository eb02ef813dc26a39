"""Progress output: steps with their glyphs, and on a terminal a spinner for what is in progress.

A `Screen` writes to stdout, or to stderr when stdout must stay clean (`-o json`). On anything but a terminal there is no
spinner, no colour and no cursor movement: only the lines.
"""

import os
import sys
import threading
from types import TracebackType
from typing import Literal, Self, TextIO

import click

from podway.cli.safe_terminal import unfiltered
from podway.terminal import safe_lines, visible

STEP, DONE, MORE, LAST = "⚙︎", "✓", "├──", "└──"
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PERIOD_S = 0.1
_CLEAR = "\r\x1b[2K"

Tone = Literal["green", "red", "yellow", "cyan", "bright_black"]


class Screen:
    """Use with `with`: the spinner never outlives the command."""

    def __init__(self, *, err: bool = False) -> None:
        self.stream: TextIO = unfiltered(sys.stderr if err else sys.stdout)
        self.live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.colour = self.live and not os.environ.get("NO_COLOR")
        self._waiting = ""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait("")
        if self._thread is not None:
            self._stop.set()
            self._thread.join()

    def line(self, text: str = "") -> None:
        """One or more whole lines; whoever wrote them, they steer no terminal."""
        shown = safe_lines(text, colour=self.colour)
        with self._lock:
            clear = _CLEAR if self._waiting else ""
            self.stream.write(f"{clear}{shown}\n")
            self.stream.flush()

    def step(self, text: str) -> None:
        """A step begins."""
        self.line(f"{self.paint(STEP, 'yellow')} {text}")

    def done(self, text: str) -> None:
        """A step succeeded."""
        self.line(f"{self.paint(DONE, 'green')} {text}")

    def paint(self, text: str, tone: Tone, *, bold: bool = False) -> str:
        """Coloured, where colours are shown."""
        return click.style(text, fg=tone, bold=bold or None) if self.colour else text

    def wait(self, text: str) -> None:
        """What is in progress, until the next call; an empty text ends it. Shown on a terminal only."""
        if not self.live:
            return
        with self._lock:
            if self._waiting and not text:
                self.stream.write(_CLEAR)
                self.stream.flush()
            self._waiting = visible(text)
        if text and self._thread is None:
            self._thread = threading.Thread(target=self._spin, daemon=True)
            self._thread.start()

    def _spin(self) -> None:
        turn = 0
        while not self._stop.wait(_PERIOD_S):
            with self._lock:
                if self._waiting:
                    turn += 1
                    frame = _FRAMES[turn % len(_FRAMES)]
                    self.stream.write(f"{_CLEAR}{frame} {self._waiting[: self._room()]}")
                    self.stream.flush()

    def _room(self) -> int:
        """A line that wraps could not be cleared."""
        try:
            columns = os.get_terminal_size(self.stream.fileno()).columns
        except OSError:
            columns = 0
        return (columns or 80) - 3  # some terminals do not tell
