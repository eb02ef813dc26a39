"""The numbers people write."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.plan.quantities import parse_amount, parse_batch, parse_duration, parse_tile, readable, readable_seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [("15T", 15e12), ("1.5B", 1.5e9), ("$20k", 20e3), ("300,000", 3e5), ("1_000", 1e3), ("0.5m", 5e5), (".25G", 2.5e8)],
)
def test_amounts(text: str, value: float) -> None:
    assert parse_amount(text, "--tokens") == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("500ms", 0.5), ("2", 2), ("1.5s", 1.5), ("90us", 9e-5), ("2h", 7200)])
def test_durations(text: str, value: float) -> None:
    assert parse_duration(text, "--ttft") == pytest.approx(value)


@pytest.mark.parametrize(("text", "sequences"), [("512", 512), ("4M", 488), ("8192k", 1000), ("1", 1)])
def test_batches_are_sequences_or_tokens_with_a_suffix(text: str, sequences: int) -> None:
    assert parse_batch(text, 8192) == sequences


@pytest.mark.parametrize("text", ["0", "1k", "abc", "", "-3"])
def test_impossible_batches(text: str) -> None:
    with pytest.raises(UserError):
        parse_batch(text, 8192)


@pytest.mark.parametrize("text", ["4,2,2", "4x2x2", "(4, 2, 2)"])
def test_tiles(text: str) -> None:
    assert parse_tile(text) == (4, 2, 2)


@pytest.mark.parametrize("text", ["4,0", "a", "", "1,2,3,4,5", "4,,2"])
def test_impossible_tiles(text: str) -> None:
    with pytest.raises(UserError):
        parse_tile(text)


@given(st.text(max_size=60))
def test_no_text_breaks_a_parser(text: str) -> None:
    """Each either reads it or says in one line what is wrong."""
    for parse in (parse_amount, parse_duration):
        try:
            assert parse(text, "--x") > 0
        except UserError as error:
            assert "\n" not in error.what
    try:
        assert parse_batch(text, 2048) >= 1
    except UserError as error:
        assert "\n" not in error.what
    try:
        assert min(parse_tile(text)) >= 1
    except UserError as error:
        assert "\n" not in error.what


@given(st.floats(1, 1e15))
def test_readable_amounts_can_be_read_back(number: float) -> None:
    text = readable(number)
    if "e" not in text:
        assert parse_amount(text, "--tokens") == pytest.approx(number, rel=0.01)


def test_readable_seconds() -> None:
    assert [readable_seconds(s) for s in (12.345, 0.31, 85e-6)] == ["12.35 s", "310 ms", "85 us"]
