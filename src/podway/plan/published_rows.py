"""The files of published results (`published/*.csv`), as rows of text by column."""

import csv
from functools import cache
from pathlib import Path

Row = dict[str, str]


@cache
def rows_of(name: str) -> tuple[Row, ...]:
    """A file of published results."""
    with open(Path(__file__).parent / "published" / f"{name}.csv", encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def row_of(name: str, row: str) -> Row:
    """One row by its name."""
    return next(one for one in rows_of(name) if one["row"] == row)


def is_calibration(name: str, row: str) -> bool:
    """Whether a constant was fitted on this row."""
    return any(one["table"] == name and one["row"] == row for one in rows_of("calibration"))
