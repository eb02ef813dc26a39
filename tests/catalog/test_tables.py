"""Tables line up whatever is in their cells."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from podway.cli.tables import table


def test_columns_line_up() -> None:
    shown = table(("NAME", "COUNT", "NOTE"), [("a", 5, ""), ("longer", 12345, "x")], right=("COUNT",))
    assert shown.splitlines() == [
        "NAME    COUNT  NOTE",
        "a           5",
        "longer  12345  x",
    ]


def test_right_takes_an_index_too() -> None:
    rows = [("a", 5), ("b", 12345)]
    assert table(("NAME", "N"), rows, right=(1,)) == table(("NAME", "N"), rows, right=("N",))


def test_no_rows_leave_the_headers() -> None:
    assert table(("A", "B"), []) == "A  B"


def test_none_is_a_dash() -> None:
    assert table(("A", "B"), [(None, 0)]).splitlines()[1] == "-  0"


def test_wide_and_combining_characters_keep_the_columns() -> None:
    lines = table(("NAME", "X"), [("日本", "1"), ("e\u0301te", "2")]).splitlines()
    assert lines == ["NAME  X", "日本  1", "e\u0301te   2"]


def test_control_characters_cannot_steer_the_terminal() -> None:
    assert table(("A", "B"), [("\x1b[2J\n", "ok")]).splitlines()[1] == "\\x1b[2J\\n  ok"


def columns_of(text: str) -> int:
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), max_size=6), st.booleans())
def test_any_text_makes_one_line_a_row_and_loses_nothing(rows: list[tuple[str, str]], right: bool) -> None:
    lines = table(("A", "B", "C"), [(*row, "|") for row in rows], right=("A",) if right else ()).split("\n")
    assert len(lines) == len(rows) + 1
    assert len({columns_of(line) for line in lines[1:]}) <= 1
    for (first, second), line in zip(rows, lines[1:], strict=True):
        for cell in (first, second):
            if cell.isprintable():
                assert cell in line
