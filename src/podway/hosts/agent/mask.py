"""Hiding secret values in a stream of bytes that arrives in pieces.

Every byte that is part of an occurrence of a secret is hidden; each run of overlapping occurrences is shown as `***`.
A tail that may be the beginning of a secret is held back until the bytes after it decide, or until the stream ends.
It is never let go merely because the stream is idle: a program with a block-buffered stdout writes half a secret now and
the other half a minute later. What is held is shorter than the longest secret, and only what looks like one's beginning.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MASK = b"***"
# One byte would hide a letter everywhere and so betray itself.
SHORTEST = 2
# A line of a many-line secret (a key file) is hidden on its own too, if it is long enough to be telling.
SHORTEST_LINE = 8


def patterns(values: Iterable[bytes]) -> list[bytes]:
    """What to look for: each value without white space around it, and the longer lines of a value of several lines."""
    found = set()
    for value in values:
        whole = value.strip()
        if len(whole) >= SHORTEST:
            found.add(whole)
        lines = whole.split(b"\n")
        if len(lines) > 1:
            found.update(line.strip() for line in lines if len(line.strip()) >= SHORTEST_LINE)
    return sorted(found)


class Masker:
    """`feed` pieces, then `finish`: together they answer the whole stream with the secrets hidden."""

    def __init__(self, values: Iterable[bytes]) -> None:
        self._patterns = patterns(values)
        self._held = b""
        self._covered = 0  # so many of the held bytes belong to a run whose `***` is already out

    def feed(self, piece: bytes) -> bytes:
        """What may be shown now."""
        if not self._patterns:
            return piece
        data = self._held + piece
        return self._emit(data, self._undecided(data))

    def finish(self) -> bytes:
        """What was held back, now that nothing follows it."""
        return self._emit(self._held, len(self._held))

    def _undecided(self, data: bytes) -> int:
        """Where the longest tail begins that is a proper beginning of some secret."""
        cut = len(data)
        for pattern in self._patterns:
            at = data.find(pattern[:1], max(0, len(data) - len(pattern) + 1))
            while 0 <= at < cut:
                if pattern.startswith(data[at:]):
                    cut = at
                    break
                at = data.find(pattern[:1], at + 1)
        return cut

    def _runs(self, data: bytes) -> list[tuple[int, int]]:
        """The spans to hide, overlapping occurrences joined; the first may be the run that is already out."""
        spans: list[tuple[int, int]] = []
        for pattern in self._patterns:
            own: list[tuple[int, int]] = []
            at = data.find(pattern)
            while at >= 0:
                _join(own, at, at + len(pattern))
                at = data.find(pattern, at + 1)
            spans += own
        runs = [(0, self._covered)] if self._covered else []
        for start, end in sorted(spans):
            _join(runs, start, end)
        return runs

    def _emit(self, data: bytes, cut: int) -> bytes:
        shown = []
        at = 0
        covered = 0
        for start, end in self._runs(data):
            if start >= cut and not (start == 0 and self._covered):
                break
            shown.append(data[at:start])
            if not (start == 0 and self._covered):
                shown.append(MASK)
            at = min(end, cut)
            covered = max(0, end - cut)
        shown.append(data[at:cut])
        self._held = data[cut:]
        self._covered = covered
        return b"".join(shown)


def _join(runs: list[tuple[int, int]], start: int, end: int) -> None:
    """Add a span, which begins no earlier than those before it, to `runs`."""
    if runs and start < runs[-1][1]:
        runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
    else:
        runs.append((start, end))
