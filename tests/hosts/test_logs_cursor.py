"""A cursor survives the trip as a string; nothing else is taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.hosts.logs.cursor import Cursor


def cursor_of(offsets: dict[str, list[int]], hosts: int) -> Cursor:
    cursor = Cursor(hosts)
    for phase, values in offsets.items():
        cursor.phase(phase)[:] = values
    return cursor


@given(
    st.integers(1, 70).flatmap(
        lambda hosts: st.dictionaries(
            st.sampled_from(["setup", "run", "init"]), st.lists(st.integers(0, 1 << 50), min_size=hosts, max_size=hosts)
        ).map(lambda offsets: (hosts, offsets))
    )
)
def test_round_trip(case: tuple[int, dict[str, list[int]]]) -> None:
    hosts, offsets = case
    token = cursor_of(offsets, hosts).encode()
    assert token.isascii() and all(char.isalnum() or char in "-_" for char in token)
    read = Cursor.decode(token, hosts)
    for phase in ("setup", "run", "init"):
        for rank in range(hosts):
            assert read.offset(rank, phase) == offsets.get(phase, [0] * hosts)[rank]


def test_it_is_short() -> None:
    alike = cursor_of({"setup": [4096] * 64, "run": [123_456_789] * 64}, 64)
    assert len(alike.encode()) < 80
    different = cursor_of({"setup": [4096] * 64, "run": [123_456_789 + 977 * rank for rank in range(64)]}, 64)
    assert len(different.encode()) < 600


@given(st.text())
def test_any_other_text_is_refused(token: str) -> None:
    with pytest.raises(UserError):
        Cursor.decode(token, 4)


@given(st.data())
def test_a_damaged_one_is_refused(data: st.DataObject) -> None:
    token = cursor_of({"setup": [5, 6], "run": [70_000, 80_000]}, 2).encode()
    at = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.sampled_from("abcXYZ019-_=é "))
    damaged = token[:at] + other + token[at + 1 :]
    try:
        read = Cursor.decode(damaged, 2)
    except UserError:
        return
    # The last character carries spare bits: such a change changes nothing.
    assert [read.offset(rank, "run") for rank in range(2)] == [70_000, 80_000]


def test_a_cursor_of_another_job_is_refused() -> None:
    token = cursor_of({"run": [1, 2]}, 2).encode()
    with pytest.raises(UserError, match="4 hosts"):
        Cursor.decode(token, 4)


def test_a_bomb_is_refused() -> None:
    import base64
    import zlib

    bomb = "a" + base64.urlsafe_b64encode(zlib.compress(b"\0" * (40 << 20), 9)).decode().rstrip("=")
    assert len(bomb) < 60_000
    with pytest.raises(UserError, match="damaged"):
        Cursor.decode(bomb, 1)
