"""The small grammars: every text gives a value or a clean error, and values mean what they say."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.task import values
from podway.task.fields import FlagField, did_you_mean, nearest

from .reading import steady


def at(text: str) -> FlagField:
    return FlagField("--x", text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("2 H", 7200), ("1d", 86_400), ("1w", 604_800)]
)
def test_durations(text: str, seconds: int) -> None:
    assert values.duration(at(text)) == seconds
    assert values.duration_or_off(at(text), 7) == seconds


def test_off_and_on() -> None:
    assert values.duration_or_off(at("off"), 7) is None


@pytest.mark.parametrize(
    ("text", "gb"), [("256", 256), ("256GB", 256), ("1Ti", 1024), ("1500MB", 1), ("2048 mb", 2), ("1p", 2**20)]
)
def test_sizes(text: str, gb: int) -> None:
    assert values.gigabytes(at(text)) == gb


@pytest.mark.parametrize(("text", "shown"), [("4", "4"), ("4..", "4.."), ("..8", "..8"), ("4 .. 8", "4..8")])
def test_ranges(text: str, shown: str) -> None:
    assert str(values.count_range(at(text))) == shown


READERS: list[Callable[[FlagField], object]] = [
    values.duration,
    values.idle_minutes,
    values.gigabytes,
    values.memory,
    values.memory_range,
    values.count_range,
    values.ports,
    values.port,
    values.port_mapping,
    values.at_least,
    values.sky_name,
    values.dstack_name,
    lambda field: values.duration_or_off(field, 1),
    lambda field: values.at_least(field, "g"),
    lambda field: field.integer(),
    lambda field: field.number(),
    lambda field: field.flag(),
]
NEAR_MISSES = st.text("0123456789.:+-xGBmbsdw* _", max_size=12)


@pytest.mark.parametrize("reader", READERS)
@steady
@given(text=NEAR_MISSES | st.text(max_size=20) | st.integers(0, 10**60).map(str))
def test_no_text_raises_anything_else(reader: Callable[[FlagField], object], text: str) -> None:
    try:
        reader(at(text))
    except UserError as error:
        assert error.hint and error.what.startswith("--x: ")


@steady
@given(st.integers(1, 10**5), st.sampled_from("smhdw"))
def test_durations_scale_by_their_unit(number: int, unit: str) -> None:
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}[unit]
    if number * seconds <= 10 * 366 * 86_400:
        assert values.duration(at(f"{number}{unit}")) == number * seconds
    else:
        with pytest.raises(UserError):
            values.duration(at(f"{number}{unit}"))


def test_nearest() -> None:
    assert nearest("acelerators", ["accelerators", "autostop"]) == "accelerators"
    assert nearest("NAME", ["name"]) == "name"
    assert nearest("zzz", ["name"]) is None
    assert did_you_mean("nam", ["name", "run"]) == "did you mean `name`?"
