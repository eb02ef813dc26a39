"""What the demo shows: headings, commands, results, one line of progress and times (standard library only).

On a terminal, in colour, progress overwrites itself. Elsewhere (a CI log) every line is plain, and progress is left out
but for a quarter of a bar at a time.
"""

import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterable
from pathlib import Path

BOLD, DIM, GREEN, CYAN, RED, PLAIN = (f"\033[{code}m" for code in ("1", "2", "32", "36", "31", "0"))
WIDE = 100
NEXT = (
    ("podway plan train llama3.1-8b --tpu v6e-16", "before you pay"),
    ("podway launch -c mine examples/hello.yaml", "your first run"),
    ("podway check examples/train-llama3-8b.yaml", "a real job"),
)


class Screen:
    """Draws to standard output."""

    def __init__(self) -> None:
        self.terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.began = self.act_began = time.monotonic()
        self._acts = self._quarter = 0
        self._doing: str | None = None  # the text of the progress line, redrawn every half second
        self._lock = threading.Lock()
        if self.terminal:
            threading.Thread(target=self._tick, daemon=True).start()

    def act(self, name: str, about: str) -> None:
        """A heading; the time of the act before it is shown first."""
        self._close_act()
        self._acts += 1
        self._quarter = 0
        number = f"{self._acts} " if name != "Install" else ""
        self._acts -= name == "Install"
        print(f"{self._colour(BOLD + CYAN, number + name)}  {self._colour(DIM, about)}", flush=True)
        self.act_began = time.monotonic()

    def command(self, text: str) -> None:
        """A command as a person would type it."""
        self._erase()
        print("  " + self._colour(BOLD, self._fit(f"$ {text}")), flush=True)

    def line(self, text: str) -> None:
        """A result."""
        self._erase()
        print("  " + self._fit(text), flush=True)

    def progress(self, text: str) -> None:
        """What is going on now; on a terminal alone, where the next line replaces it."""
        if self.terminal:
            self._draw(self._colour(DIM, self._fit(f"{text} …", beside=6)))

    def bar(self, done: int, total: int, text: str) -> None:
        """How far a known amount of work is."""
        if self.terminal:
            filled = 30 * done // total
            drawn = self._colour(GREEN, "█" * filled) + self._colour(DIM, "░" * (30 - filled))
            self._draw(f"{drawn} {done}/{total}  {text}")
        elif 4 * done // total > self._quarter:
            self._quarter = 4 * done // total
            self.line(f"{done}/{total}  {text}")

    def prose(self, prompt: str, pieces: Iterable[str]) -> None:
        """A text that grows, wrapped to the screen: the prompt in bold, what follows in colour."""
        text = ""
        for piece in pieces:
            text += piece
            if self.terminal:
                self._draw_prose(prompt, text, last=False)
        self._draw_prose(prompt, text, last=True)

    def _draw_prose(self, prompt: str, text: str, *, last: bool) -> None:
        lines = textwrap.wrap(prompt + text, self._width() - 4) or [""]
        if not self.terminal:
            print(textwrap.indent("\n".join(lines), "    "), flush=True)
            return
        shown = "\n".join("    " + line for line in lines)
        shown = shown.replace(prompt, self._colour(BOLD, prompt) + (GREEN if self.terminal else ""), 1)
        up = f"\033[{len(lines) - 1}A" if len(lines) > 1 else ""
        sys.stdout.write(f"\r\033[J{shown}{PLAIN}" + ("\n" if last else f"\r{up}"))
        sys.stdout.flush()

    def end(self, home: Path) -> None:
        """How long it took, where to look at it, and what to try next."""
        self._close_act()
        took = time.monotonic() - self.began
        print(
            self._colour(
                BOLD, f"All of that took {took // 60:.0f} min {took % 60:.0f} s. Look at the run it made, in a browser:"
            )
        )
        print(
            f"  {self._colour(BOLD, f'PODWAY_HOME={home} .venv/bin/podway ui')}  {self._colour(DIM, '# its loss, log and cost')}"
        )
        print(self._colour(BOLD, "Try next:"))
        for command, about in NEXT:
            print(f"  {self._colour(BOLD, '.venv/bin/' + command)}  {self._colour(DIM, '# ' + about)}")

    def error(self, text: str) -> None:
        """What went wrong."""
        self._erase()
        print(self._colour(RED, text), flush=True)

    def _close_act(self) -> None:
        self._erase()
        if self._acts:
            print("  " + self._colour(GREEN, f"✓ {time.monotonic() - self.act_began:.1f} s") + "\n", flush=True)

    def _draw(self, text: str, only_if: str | None = None) -> None:
        with self._lock:
            if only_if is not None and self._doing != only_if:
                return  # another thread has drawn something since
            self._doing = text
            seconds = self._colour(DIM, f"{time.monotonic() - self.act_began:.0f} s")
            sys.stdout.write(f"\r\033[K  {text}  {seconds}")
            sys.stdout.flush()

    def _tick(self) -> None:
        while True:
            time.sleep(0.5)
            doing = self._doing
            if doing is not None:
                self._draw(doing, only_if=doing)

    def _erase(self) -> None:
        with self._lock:
            if self._doing is not None:
                sys.stdout.write("\r\033[K")
                self._doing = None

    def _width(self) -> int:
        return min(shutil.get_terminal_size((WIDE, 24)).columns, WIDE)

    def _fit(self, text: str, beside: int = 0) -> str:
        columns = self._width() - 2 - beside
        return text if not self.terminal or len(text) <= columns else text[: columns - 1] + "…"

    def _colour(self, code: str, text: str) -> str:
        return f"{code}{text}{PLAIN}" if self.terminal else text
