"""Lists of cases that are too long for every run: `make test` takes some of them, `make test-long` the others. CI runs both."""

from collections.abc import Iterable
from typing import Any

import pytest


def every(n: int, cases: Iterable[Any]) -> list[Any]:
    """The first of every n cases as it is, the others marked `long`."""
    return [case if at % n == 0 else _long(case) for at, case in enumerate(cases)]


def _long(case: Any) -> Any:
    return pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.long)
