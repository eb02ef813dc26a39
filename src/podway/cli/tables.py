"""Tables as the terminal shows them: aligned columns, two spaces between, no borders, no line longer than the terminal.

A table that is too wide for the terminal loses its least important columns first; what is still too wide is cut, the widest cells
first. Into a pipe or a file everything is written. Plain string work, so that drawing a table costs no import worth measuring.
"""

import os
import sys
import unicodedata
from collections.abc import Collection, Sequence

from podway.terminal import visible

_PAD, _CUT = "  ", "…"
NARROWEST = 6  # of a column that is cut
LEAST_TERMINAL = 20  # columns: less is a terminal that does not tell


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Collection[str | int] = (),
    drop: Sequence[str] = (),
    room: int | None = None,
) -> str:
    """The text of a table, without a final newline. `right` names the columns, by header or index, that are numbers.

    `drop` names the columns that go where there is too little room, the least important first; `room` is the terminal's width.
    None shows as `-`. A control character shows escaped, so that no cell can break the lines or steer the terminal.
    """
    lines = [[_cell(value) for value in line] for line in [headers, *rows]]
    widths = [max(_width(line[column]) for line in lines) for column in range(len(headers))]
    room = terminal_width() if room is None else room
    columns = _fitting(headers, widths, drop, room)
    widths = _narrowed(widths, columns, room)
    to_right = [column in right or headers[column] in right for column in range(len(headers))]
    return "\n".join(
        _PAD.join(
            _padded(_cut(line[column], widths[column]), widths[column], to_right[column]) for column in columns
        ).rstrip()
        for line in lines
    )


def terminal_width() -> int:
    """How wide a line may be; 0: as wide as it is, since no terminal shows it."""
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0
    except (OSError, ValueError):
        return 0
    return columns if columns >= LEAST_TERMINAL else 0


def _total(widths: Sequence[int], columns: Sequence[int]) -> int:
    return sum(widths[column] for column in columns) + len(_PAD) * (len(columns) - 1)


def _fitting(headers: Sequence[str], widths: Sequence[int], drop: Sequence[str], room: int) -> list[int]:
    """The columns that are shown."""
    columns = list(range(len(headers)))
    for name in drop:
        if not room or _total(widths, columns) <= room:
            break
        columns = [column for column in columns if headers[column] != name]
    return columns


def _narrowed(widths: Sequence[int], columns: Sequence[int], room: int) -> list[int]:
    """Widths with which all columns fit, as far as they can."""
    found = list(widths)
    while room and (over := _total(found, columns) - room) > 0:
        widest = max(columns, key=lambda column: found[column])
        if found[widest] <= NARROWEST:
            break
        second = max((found[column] for column in columns if column != widest), default=0)
        found[widest] = max(NARROWEST, found[widest] - over, min(second, found[widest] - 1))
    return found


def _cut(text: str, width: int) -> str:
    """The beginning of a text that is too wide."""
    if _width(text) <= width:
        return text
    kept = ""
    for char in text:
        if _width(kept + char) > width - 1:
            break
        kept += char
    return kept + _CUT


def _cell(value: object) -> str:
    return "-" if value is None else visible(str(value))


def _width(text: str) -> int:
    """Terminal columns: East Asian wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _padded(text: str, width: int, to_right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if to_right else text + space
