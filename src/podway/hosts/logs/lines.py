"""From the bytes of one rank's output to its lines.

1. `feed` takes the next bytes and the times that cover them, splits once at newlines, and answers the complete lines, each
   with the time of its last byte and the offset behind it. The rest waits for more bytes.
2. A progress bar redraws one line with `\\r`. Of a bar only its state at the newline is a line; while it runs, its state is a
   line of its own every `BAR_NS` at most. `idle` gives out the state of a bar that has stopped moving.
3. A line longer than `LONGEST` is given out in pieces, so that memory stays bounded; the pieces are marked as one line.

Where lines begin and end depends on the bytes and their times alone, never on how they were cut into chunks (`idle` apart,
which is about waiting). So a reader that comes back with the offset of a line it has seen loses and repeats nothing.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, count, repeat
from operator import add, itemgetter
from typing import Final

from podway.hosts.logs.text import is_blank

# (time in ns, rank, phase, offset behind the line, text without its newline). A plain tuple: made in bulk by zip.
Line = tuple[int, int, str, int, bytes]
TIME: Final = 0
RANK: Final = 1
PHASE: Final = 2
END: Final = 3
TEXT: Final = 4

LONGEST = 64 * 1024
BAR_NS = 10 * 1_000_000_000
BAR_S = BAR_NS / 1e9
MORE = " …".encode()
CONTINUED = "… ".encode()


class LineSource:
    """The lines of one phase of one rank, from `offset` on."""

    def __init__(self, rank: int, phase: str, offset: int = 0) -> None:
        self.rank = rank
        self.phase = phase
        self.offset = offset  # of the next byte to feed
        self.time = 0  # the latest time reported; never goes back, even if the host's clock does
        self._open = b""  # bytes of the line that has not ended, since the last `\r` of a bar
        self._update = b""  # the latest state of that bar that showed anything
        self._bar_since = -1  # ns: when the bar began or was last given out; -1: there is no bar
        self._announced = False  # the open line's latest state has been given out already
        self._cut = False  # pieces of the open line have been given out already
        self._ends: list[int] = []
        self._times: list[int] = []

    def feed(self, data: bytes, times: Sequence[Sequence[int]]) -> list[Line]:
        """The lines that these bytes, which follow at `offset`, complete; `times` are [end offset, ns] in order."""
        if not data:
            return []
        self._take_times(times)
        start = self.offset - len(self._open)
        self.offset += len(data)
        held = self._open + data
        if b"\r" in held or self._bar_since >= 0 or self._cut:
            return self._walk(held, start)
        texts = held.split(b"\n")
        if len(held) > LONGEST and max(map(len, texts)) > LONGEST:
            return self._walk(held, start)
        self._open = texts.pop()
        ends = list(map(add, accumulate(map(len, texts)), count(start + 1)))
        return list(zip(self._times_of(ends), repeat(self.rank), repeat(self.phase), ends, texts, strict=False))

    def idle(self) -> list[Line]:
        """The state of a bar that has not moved for `BAR_S`, unless it was given out before."""
        return self._give_out_rest() if self._bar_since >= 0 else []

    def finish(self) -> list[Line]:
        """The last line, if the output ended without a newline."""
        return self._give_out_rest()

    def _give_out_rest(self) -> list[Line]:
        rest = self._open.removesuffix(b"\r")
        text = self._update if is_blank(rest) else rest
        if is_blank(text):
            return []
        line = self._line(self.offset, text)
        self._open = self._update = b""
        self._bar_since = self.time
        self._announced = True
        return [line]

    def _take_times(self, times: Sequence[Sequence[int]]) -> None:
        """Keep the times of these bytes, behind the time of the byte before them."""
        self._ends = [self.offset, *map(itemgetter(0), times)]
        self._times = [self.time, *map(itemgetter(1), times)]
        if self._times != sorted(self._times):  # the host's clock went back: stay until it has caught up
            self._times = list(accumulate(self._times, max))
        self.time = self._times[-1]

    def _time_at(self, end: int) -> int:
        """The time of the byte before `end`."""
        at = bisect_left(self._ends, end)
        return self._times[at] if at < len(self._times) else self.time

    def _times_of(self, ends: list[int]) -> list[int]:
        """`_time_at` for ascending offsets, in a step for each time where that is less."""
        if self._ends[1:] == ends:  # every line was written by itself
            return self._times[1:]
        if len(self._ends) > len(ends):
            return [self._time_at(end) for end in ends]
        found: list[int] = []
        for end, time in zip(self._ends, self._times, strict=True):
            found += repeat(time, bisect_right(ends, end, len(found)) - len(found))
        found += repeat(self.time, len(ends) - len(found))
        return found

    def _walk(self, held: bytes, start: int) -> list[Line]:
        """As `feed`, one line at a time, for bars and long lines."""
        lines: list[Line] = []
        parts = held.split(b"\n")
        self._open = parts.pop()
        for part in parts:
            end = start + len(part) + 1
            self._end_line(part.removesuffix(b"\r"), start, end, lines)
            start = end
        # A `\r` at the very end may be half of `\r\n`: it waits.
        waiting = self._open.endswith(b"\r")
        rest, start = self._redraw(self._open[:-1] if waiting else self._open, start, lines)
        rest, _ = self._pieces(rest, start, lines)
        self._open = rest + b"\r" if waiting else rest
        return lines

    def _end_line(self, part: bytes, start: int, end: int, lines: list[Line]) -> None:
        """A newline at `end`: the line's last state is its text."""
        rest, start = self._redraw(part, start, lines)
        rest, _ = self._pieces(rest, start, lines)
        text = self._update if self._update and is_blank(rest) else rest
        # The newline behind a state that has been given out, or behind a piece, ends that line and is none itself.
        if not ((self._announced or self._cut) and is_blank(text)):
            lines.append(self._line(end, text))
        self._update = b""
        self._bar_since = -1
        self._announced = self._cut = False

    def _redraw(self, part: bytes, start: int, lines: list[Line]) -> tuple[bytes, int]:
        """Follow the states of a bar; answer the last, which no `\\r` has ended yet, and where it begins."""
        if b"\r" not in part:
            return part, start
        *updates, rest = part.split(b"\r")
        for update in updates:
            end = start + len(update) + 1
            kept, _ = self._pieces(update, start, lines)
            if self._cut:
                kept, self._cut = CONTINUED + kept, False
            time = self._time_at(end)
            if self._bar_since < 0:
                self._bar_since = time
            if not is_blank(kept):
                self._update = kept
                self._announced = False
            if self._update and time - self._bar_since >= BAR_NS:
                lines.append(self._line(end, self._update))
                self._update = b""
                self._bar_since = time
                self._announced = True
            start = end
        return rest, start

    def _pieces(self, text: bytes, start: int, lines: list[Line]) -> tuple[bytes, int]:
        """Give out pieces of a text that is too long; answer what is left, and where it begins."""
        while len(text) > LONGEST:
            size = _cut_point(text)
            start += size
            lines.append(self._line(start, text[:size] + MORE))
            text = text[size:]
            self._cut = True
            self._update = b""
        return text, start

    def _line(self, end: int, text: bytes) -> Line:
        return (self._time_at(end), self.rank, self.phase, end, CONTINUED + text if self._cut else text)


def _cut_point(text: bytes) -> int:
    """Where to cut a long text: not within a character, and not within an escape sequence."""
    at = LONGEST
    while at > LONGEST - 4 and text[at] & 0xC0 == 0x80:
        at -= 1
    escape = text.rfind(b"\x1b", at - 32, at)
    if escape > 0 and b"m" not in text[escape:at]:
        at = escape
    return at
