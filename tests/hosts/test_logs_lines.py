"""Lines out of bytes: the same whatever the chunks, bounded whatever the bytes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.hosts.logs import lines as logs_lines
from podway.hosts.logs.lines import BAR_NS, CONTINUED, LONGEST, MORE, Line, LineSource

SECOND = 1_000_000_000


def texts(lines: list[Line]) -> list[bytes]:
    return [line[4] for line in lines]


def fed(data: bytes, times: list[tuple[int, int]] | None = None) -> list[Line]:
    source = LineSource(0, "run")
    return source.feed(data, times or [(len(data), 1)]) + source.finish()


def test_a_line_has_the_time_of_its_last_byte_and_the_offset_behind_it() -> None:
    source = LineSource(3, "run")
    assert source.feed(b"one\ntw", [(2, 10), (4, 20), (6, 30)]) == [(20, 3, "run", 4, b"one")]
    assert source.feed(b"o\nthree", [(8, 40), (13, 50)]) == [(40, 3, "run", 8, b"two")]
    assert source.finish() == [(50, 3, "run", 13, b"three")]
    assert (source.offset, source.time) == (13, 50)


def test_times_never_go_back_with_the_hosts_clock() -> None:
    source = LineSource(0, "run")
    lines = source.feed(b"a\nb\nc\n", [(2, 50), (4, 20), (6, 60)])
    assert [line[0] for line in lines] == [50, 50, 60]
    assert [line[0] for line in source.feed(b"d\n", [(8, 10)])] == [60]


def test_reading_may_begin_anywhere() -> None:
    assert LineSource(0, "run", 100).feed(b"a\n", [(102, 7)]) == [(7, 0, "run", 102, b"a")]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"10%\r50%\r100%\n", [b"100%"]),
        (b"\r10%\r50%\r100%\n", [b"100%"]),
        (b"10%\r100%\r\n", [b"100%"]),
        (b"10%\r100%\r\r\n", [b"100%"]),
        (b"bar\r     \r\n", [b"bar"]),
        (b"bar\r\x1b[2K\r\n", [b"bar"]),
        (b"bar\r      \rdone\n", [b"done"]),
        (b"   \n\n", [b"   ", b""]),
        (b"\r\n\r\n", [b"", b""]),
        (b"no end", [b"no end"]),
        (b"bar 1\rbar 2", [b"bar 2"]),
        (b"bar 1\r", [b"bar 1"]),
        (b"bar 1\rbar 2\r\x1b[K", [b"bar 2"]),
        (b"end\n\x1b[0m", [b"end"]),
        (b"", []),
    ],
)
def test_carriage_returns(data: bytes, expected: list[bytes]) -> None:
    assert texts(fed(data)) == expected


def test_a_running_bar_is_shown_every_ten_seconds_and_once_at_its_end() -> None:
    source = LineSource(0, "run")
    lines = source.feed(b"load ", [(5, 0)])
    for second in range(1, 36):
        lines += source.feed(b"\r%d%%" % second, [(source.offset + 9, second * SECOND)])
    # A bar's state is known to be whole when the next one begins: at 11 s the state of 10 s.
    assert [(line[0] // SECOND, line[4]) for line in lines] == [(11, b"10%"), (21, b"20%"), (31, b"30%")]
    assert texts(source.feed(b"\rdone\nnext\n", [(source.offset + 11, 36 * SECOND)])) == [b"done", b"next"]


def test_a_newline_behind_a_state_that_was_shown_is_no_line() -> None:
    source = LineSource(0, "run")
    source.feed(b"1%\r", [(3, SECOND)])
    assert texts(source.feed(b"2%\r", [(6, 20 * SECOND)])) == []
    assert texts(source.feed(b" ", [(7, 21 * SECOND)])) == [b"2%"]
    assert texts(source.feed(b"\nnext\n", [(13, 22 * SECOND)])) == [b"next"]


def test_a_bar_that_stands_still_is_shown_once() -> None:
    source = LineSource(0, "run")
    assert source.feed(b"text", [(4, 1)]) == []
    assert source.idle() == []  # no bar
    assert source.feed(b"\r 40%", [(9, 2)]) == []
    assert source.idle() == [(2, 0, "run", 9, b" 40%")]
    assert source.idle() == []
    assert texts(source.feed(b"\r 50%", [(14, 3)])) == []
    assert texts(source.idle()) == [b" 50%"]
    assert texts(source.feed(b"\nnext\n", [(20, 4)])) == [b"next"]
    assert source.idle() == source.finish() == []


def test_a_long_line_comes_in_marked_pieces_and_memory_is_bounded() -> None:
    source = LineSource(0, "run")
    lines: list[Line] = []
    for _ in range(50):
        lines += source.feed(b"x" * 10_000, [(source.offset + 10_000, 1)])
        assert len(source._open) <= LONGEST
    lines += source.feed(b"\nnext\n", [(source.offset + 6, 1)])
    *pieces, end = texts(lines)
    assert end == b"next"
    assert all(len(piece) <= LONGEST + len(MORE) + len(CONTINUED) for piece in pieces)
    assert joined(pieces) == [b"x" * 500_000]
    assert texts(fed(b"x" * 500_000 + b"\nnext\n")) == [*pieces, end]


def test_a_long_line_is_not_cut_within_a_character_or_an_escape_sequence() -> None:
    first = texts(fed(b"x" * (LONGEST - 1) + "é".encode() * 10))[0]
    assert first.decode().count("x") == LONGEST - 1
    first, second = texts(fed(b"x" * (LONGEST - 3) + b"\x1b[31mred\n"))
    assert first == b"x" * (LONGEST - 3) + MORE
    assert second == CONTINUED + b"\x1b[31mred"


def test_a_bar_without_end_takes_no_memory() -> None:
    source = LineSource(0, "run")
    for number in range(2000):
        source.feed(b"\r%d%%" % number + b"#" * 1000, [(source.offset + 2000, 1)])
    assert len(source._open) + len(source._update) < 3000


def joined(pieces: list[bytes]) -> list[bytes]:
    """Whole lines out of pieces."""
    whole: list[bytes] = []
    for piece in pieces:
        text = piece.removesuffix(MORE)
        if piece.startswith(CONTINUED):
            whole[-1] += text.removeprefix(CONTINUED)
        else:
            whole.append(text)
    return whole


writes = st.lists(
    st.tuples(
        st.lists(st.sampled_from([b"a", b"b", b" ", b"\n", b"\n", b"\r", b"\r\n", b"\x1b[K", b"\xff"]), max_size=8),
        st.integers(0, BAR_NS),
    ),
    max_size=12,
)


@given(writes, st.lists(st.integers(0, 60), max_size=8), st.booleans())
def test_the_lines_do_not_depend_on_the_chunks(
    written: list[tuple[list[bytes], int]], cuts: list[int], clipped: bool
) -> None:
    data, times, moment = b"", [], 1
    for parts, pause in written:
        data += b"".join(parts)
        moment += pause
        times.append((len(data), moment))
    source = LineSource(0, "run")
    lines = []
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for start, end in pairwise(edges):
        covering = [(at, when) for at, when in times if at > start]
        last = next((number for number, (at, _) in enumerate(covering) if at >= end), len(covering))
        chunk_times = [(min(at, end) if clipped else at, when) for at, when in covering[: last + 1]]
        lines += source.feed(data[start:end], chunk_times)
    assert lines + source.finish() == fed(data, times)


@given(st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b""))), st.data())
def test_plain_lines_come_out_as_they_went_in_and_reading_goes_on_behind_any(
    lines: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(line + b"\n" for line in lines)
    all_lines = fed(whole)
    assert texts(all_lines) == lines
    for line in all_lines:
        assert whole[: line[3]].endswith(line[4] + b"\n")
    if lines:
        seen = data.draw(st.integers(0, len(lines) - 1))
        again = LineSource(0, "run", all_lines[seen][3])
        assert again.feed(whole[again.offset :], [(len(whole), 1)]) == all_lines[seen + 1 :]


@given(st.lists(st.binary(max_size=90), max_size=6), st.integers(1, 40))
def test_pieces_make_the_line(parts: list[bytes], step: int) -> None:
    data = b"\n".join(part.replace(b"\r", b"") for part in parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs_lines, "LONGEST", 40)
        source = LineSource(0, "run")
        lines: list[Line] = []
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            lines += source.feed(piece, [(start + len(piece), 1)])
        lines += source.finish()
        assert lines == fed(data)
        assert all(len(text) <= 40 + len(MORE) + len(CONTINUED) for text in texts(lines))
    if MORE not in data and CONTINUED not in data and not data.rpartition(b"\n")[2].isspace():
        expected = data.split(b"\n")
        visible = [line for line in expected if line.strip()]
        assert [line for line in joined(texts(lines)) if line.strip()] == visible or b"\x1b" in data
