"""Tables as the terminal shows them: aligned columns, two spaces between, no borders, nothing cut off.

Plain string work, so that drawing a table costs no import worth measuring.
"""

import unicodedata
from collections.abc import Collection, Sequence

from podway.terminal import visible

_PAD = "  "


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], right: Collection[str | int] = ()) -> str:
    """The text of a table, without a final newline. `right` names the columns, by header or index, that are numbers.

    None shows as `-`. A control character shows escaped, so that no cell can break the lines or steer the terminal.
    """
    lines = [[_cell(value) for value in line] for line in [headers, *rows]]
    columns = range(len(headers))
    widths = [max(_width(line[column]) for line in lines) for column in columns]
    to_right = [column in right or headers[column] in right for column in columns]
    return "\n".join(
        _PAD.join(_padded(line[column], widths[column], to_right[column]) for column in columns).rstrip()
        for line in lines
    )


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
