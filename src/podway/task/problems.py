"""The mistakes of one file, gathered so that a person sees all of them at once and not one for each attempt.

Readers raise a `UserError` at the first thing they cannot understand. `Problems.read` runs one of them, keeps what it raises,
and goes on with a stand-in; `raise_any` ends the reading when something was kept. What a stand-in stands for is never used.
"""

from collections.abc import Callable
from typing import TypeVar, cast

from podway.errors import UserError

MOST_SHOWN = 20  # a file of another tool altogether would fill the screen

T = TypeVar("T")


class Problems:
    """What was wrong so far, in the order of reading."""

    def __init__(self) -> None:
        self.found: list[UserError] = []

    def read(self, reader: Callable[[], T], otherwise: object) -> T:
        """What the reader returns; `otherwise` where it raised a `UserError`, which is kept.

        The stand-in need not be a T: `raise_any` comes before anybody looks at it.
        """
        try:
            return reader()
        except UserError as error:
            self.found.append(error)
            return cast(T, otherwise)

    def raise_any(self) -> None:
        """Raise what was kept as one error, each mistake once."""
        if not self.found:
            return
        every = [one for error in self.found for one in (error, *error.others)]
        first, *others = {(one.what, one.hint): one for one in every}.values()
        if len(others) >= MOST_SHOWN:
            left = len(others) - MOST_SHOWN + 2
            others = [*others[: MOST_SHOWN - 2], UserError(f"and {left} more mistakes in this file", "")]
        raise UserError(first.what, first.hint, status=first.status, others=tuple(others)) from None
