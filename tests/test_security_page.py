"""docs/security.md names a test for each promise: each of them is there."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]*test_\w+\.py(?:::\w+)?)`", PAGE)))


@pytest.mark.parametrize("named", NAMED)
def test_the_test_of_a_promise_is_there(named: str) -> None:
    file, _, test = named.partition("::")
    assert (TESTS / file).is_file()
    assert not test or f"def {test}(" in (TESTS / file).read_text()


def test_every_promise_names_one() -> None:
    """But in the tables whose file the text before them names."""
    held = False
    rows = 0
    for line in PAGE.splitlines():
        if line.startswith(("| promise", "| limit", "| who")):
            held = line.startswith("| promise") and "held by" in line
        elif held and line.startswith("| ") and not line.startswith("|---"):
            rows += 1
            assert "test_" in line, line
    assert rows > 40
