"""An error as the screen shows it: what is wrong, and below it what to do. At a terminal a long line is folded between words."""

import os
import sys
import textwrap

import click

from podway.terminal import visible, visible_lines

LABEL = "Error:"
INDENT = "  "


def show_error(what: str, hint: str = "") -> None:
    """On stderr; nothing steers the terminal, whoever wrote the words."""
    width = stderr_width()
    colour = width and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
    first, *others = visible_lines(f"{LABEL} {what}").split("\n")
    lines = [*fold(first, width, " " * (len(LABEL) + 1)), *(part for line in others for part in fold(line, width))]
    lines += [part for line in hint.split("\n") if hint for part in fold(INDENT + visible(line), width)]
    if colour:
        lines[0] = click.style(LABEL, fg="red", bold=True) + lines[0].removeprefix(LABEL)
    print("\n".join(lines), file=sys.stderr, flush=True)


def fold(line: str, width: int, indent: str = INDENT) -> list[str]:
    """The line as several that fit, broken at spaces alone, so that a path or an option can be copied; width 0: as it is."""
    if not width or len(line) <= width:
        return [line]
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def stderr_width() -> int:
    """How wide a line of stderr may be; 0: no terminal shows it."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80 if sys.stderr.isatty() else 0
    except (OSError, ValueError):
        return 0
