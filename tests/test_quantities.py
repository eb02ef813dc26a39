"""Numbers as people write and read them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.quantities import (
    format_ago,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_seconds,
    parse_amount,
    parse_batch,
    parse_duration,
    parse_tile,
)


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
    text = format_number(number)
    if "e" not in text:
        assert parse_amount(text, "--tokens") == pytest.approx(number, rel=0.01)


def test_readable_seconds() -> None:
    assert [format_seconds(s) for s in (12.345, 0.31, 85e-6)] == ["12.35 s", "310 ms", "85 us"]


UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def test_formatted_durations() -> None:
    shown = [format_duration(seconds) for seconds in (0, 45.9, 60, 125, 3600, 7500, 86399, 90000, -3)]
    assert shown == ["0s", "45s", "1m", "2m 5s", "1h", "2h 5m", "23h 59m", "1d 1h", "0s"]
    assert format_duration(None) is None


@given(st.floats(0, 1e9))
def test_a_duration_is_true_to_its_second_unit(seconds: float) -> None:
    text = format_duration(seconds) or ""
    parts = re.findall(r"(\d+)([dhms])", text)
    assert " ".join(a + b for a, b in parts) == text
    told = sum(int(number) * UNITS[unit] for number, unit in parts)
    resolution = {"d": 3600, "h": 60, "m": 1, "s": 1}[parts[0][1]]
    assert told <= seconds < told + resolution


def test_ages() -> None:
    now = 1e9
    shown = [format_ago(now - s, now) for s in (-100, 0, 4, 12, 60, 185, 3600, 7300, 86400, 300000)]
    assert shown[:3] == ["just now"] * 3
    assert shown[3:] == [
        "12 secs ago",
        "1 min ago",
        "3 mins ago",
        "1 hr ago",
        "2 hrs ago",
        "1 day ago",
        "3 days ago",
    ]
    assert format_ago(None, now) is None


@given(st.floats(-1e9, 1e12), st.floats(0, 1e12))
def test_every_age_can_be_told(then: float, now: float) -> None:
    assert re.fullmatch(r"just now|[\d,]+ (sec|min|hr|day)s? ago", format_ago(then, now) or "")


def test_sizes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536, 5 << 20, 3 << 30, 7 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
        "7.0 TiB",
    ]


def test_counts() -> None:
    assert [format_count(n, "host") for n in (0, 1, 2, 1000)] == ["0 hosts", "1 host", "2 hosts", "1,000 hosts"]
