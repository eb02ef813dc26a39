"""Hiding secrets in a stream: the same whatever the pieces, nothing hidden that is not a secret, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from podway.hosts.agent.mask import MASK, Masker, patterns

# Few letters, so that secrets occur, overlap and are each other's beginnings all the time.
texts = st.text("abc \n", max_size=40).map(str.encode)
secrets = st.lists(st.text("abc", min_size=1, max_size=6).map(str.encode), max_size=4)


def whole(data: bytes, values: list[bytes]) -> bytes:
    """What the masker should answer, by counting for each byte whether a secret covers it."""
    covered = [0] * len(data)
    joined = [False] * (len(data) + 1)
    for value in patterns(values):
        for at in range(len(data) - len(value) + 1):
            if data[at : at + len(value)] == value:
                for inside in range(at, at + len(value)):
                    covered[inside] = 1
                for inside in range(at + 1, at + len(value)):
                    joined[inside] = True
    shown = b""
    for at, byte in enumerate(data):
        if not covered[at]:
            shown += bytes([byte])
        elif not joined[at]:
            shown += MASK
    return shown


def stream(data: bytes, values: list[bytes], cuts: list[int]) -> bytes:
    masker = Masker(values)
    ends = [*sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    shown, at = b"", 0
    for end in ends:
        shown += masker.feed(data[at:end])
        at = end
    return shown + masker.finish()


@given(texts, secrets, st.lists(st.integers(0, 40)))
@example(b"abcab", [b"abc", b"cab"], [3])
@example(b"aaaaaa", [b"aa"], [1, 2, 3, 4, 5])
def test_the_pieces_do_not_matter(data, values, cuts):
    assert stream(data, values, cuts) == whole(data, values)


@given(texts, secrets, st.lists(st.integers(0, 40)))
def test_no_secret_is_ever_shown_and_what_is_held_is_short(data, values, cuts):
    masker = Masker(values)
    longest = max([len(value) for value in patterns(values)], default=1)
    shown = b""
    for at in range(len(data)):
        shown += masker.feed(data[at : at + 1])
        assert len(masker._held) < max(longest, 1)
    shown += masker.finish()
    assert not [value for value in patterns(values) if value in shown]


@given(st.binary(max_size=200), st.lists(st.integers(0, 200)))
def test_without_secrets_every_byte_passes_at_once(data, cuts):
    assert stream(data, [], cuts) == stream(data, [b"", b"x", b" \n"], cuts) == data


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (b"  padded\n", [b"padded"]),
        (b"x", []),
        (b"ab", [b"ab"]),
        (b"{\n  'key': 1234,\n}", [b"'key': 1234,", b"{\n  'key': 1234,\n}"]),
    ],
)
def test_what_is_looked_for(value, found):
    assert patterns([value]) == found


def test_a_run_without_end_takes_no_memory():
    masker = Masker([b"aa"])
    assert b"".join(masker.feed(b"a" * 1000) for _ in range(100)) + masker.finish() == MASK
    assert len(masker._held) <= 1
