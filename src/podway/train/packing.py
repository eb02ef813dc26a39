"""Documents into rows of `seq` tokens (no jax).

A `Stream` is all tokens of a source laid end to end, read from memory-mapped shards. A row is a list of pieces of it:
(start, length, closed), where closed says that the piece ends where its document ends. Three ways to choose pieces:

- concat: the stream is cut every `seq` tokens. Nothing is stored: row k is computed when it is asked for.
- best_fit: documents (those longer than a row are cut) go each into the row with the least room that still holds it.
- none: one piece to a row.

`assemble` turns a row into arrays. Each token is an input exactly once. The target of a token is the next one of its
document; where there is none (the document's end, or padding) the loss mask is 0.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Shard(Protocol):
    """Tokenized documents: tokens, where documents end (exclusive, rising), and 1 for each token that is an answer."""

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    ends: Ints
    answers: NDArray[np.uint8] | None


class Pieces(NamedTuple):
    """What stands in one row, in order."""

    starts: Ints
    lengths: Ints
    closed: NDArray[np.bool_]

    def only(self, which: slice | Ints | NDArray[np.bool_]) -> "Pieces":
        """Some of them, in the order of `which`."""
        return Pieces(self.starts[which], self.lengths[which], self.closed[which])


class Row(NamedTuple):
    """One sequence, ready for the step; all of length seq."""

    inputs: NDArray[np.int32]
    targets: NDArray[np.int32]
    segment_ids: NDArray[np.int32]  # from 1; 0 is padding
    positions: NDArray[np.int32]  # from 0 in each segment
    loss_mask: NDArray[np.float32]


class Stream:
    """Parts of shards, (shard, first token, last token exclusive), seen as one run of tokens."""

    def __init__(self, parts: Sequence[tuple[Shard, int, int]]) -> None:
        self._parts = [part for part in parts if part[2] > part[1]]
        lengths = [stop - start for _, start, stop in self._parts]
        self._offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        self.answers_only = any(shard.answers is not None for shard, _, _ in self._parts)

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def take(self, places: Ints) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The tokens at these places, and 1 for those the loss may be on."""
        tokens = np.empty(len(places), np.int32)
        weight = np.ones(len(places), np.float32)
        part_of = np.searchsorted(self._offsets, places, side="right") - 1
        one = not len(part_of) or part_of.min() == part_of.max()
        parts = part_of[:1] if one else np.unique(part_of)
        for number in parts:
            mine = part_of == number if len(parts) > 1 else slice(None)
            shard, start, _ = self._parts[number]
            local = places[mine] - self._offsets[number] + start
            tokens[mine] = shard.tokens[local]
            if shard.answers is not None:
                weight[mine] = shard.answers[local]
        return tokens, weight

    def answers(self, starts: Ints, lengths: Ints) -> Ints:
        """How many answer tokens each stretch holds; a stretch lies in one part."""
        counts = np.zeros(len(starts), np.int64)
        part_of = np.searchsorted(self._offsets, starts, side="right") - 1
        for number, (shard, begin, end) in enumerate(self._parts):
            mine = part_of == number
            marks = np.ones(end - begin, np.uint8) if shard.answers is None else shard.answers[begin:end]
            before = np.concatenate([[0], np.cumsum(marks, dtype=np.int32)])
            local = starts[mine] - self._offsets[number]
            counts[mine] = before[local + lengths[mine]] - before[local]
        return counts

    def ends(self, start: int, stop: int) -> Ints:
        """Where documents end within (start, stop]: the places after their last tokens. A part's end is one too."""
        first = int(np.searchsorted(self._offsets, start, side="right")) - 1
        found: list[Ints] = []
        for number in range(first, len(self._parts)):
            base = int(self._offsets[number])
            if base >= stop:
                break
            shard, begin, end = self._parts[number]
            shift = base - begin
            low = int(np.searchsorted(shard.ends, max(start, base) - shift, side="right"))
            high = int(np.searchsorted(shard.ends, min(stop - shift, end), side="right"))
            here = shard.ends[low:high] + shift
            found.append(here)
            if end + shift <= stop and (not len(here) or here[-1] != end + shift):
                found.append(np.array([end + shift], np.int64))
        return np.concatenate(found) if found else np.empty(0, np.int64)


class Rows(Protocol):
    """All rows of a stream."""

    def __len__(self) -> int: ...

    def pieces(self, row: int) -> Pieces:
        """What stands in a row."""
        ...


class ConcatRows:
    """The stream cut every `seq` tokens; the last row may be short."""

    def __init__(self, stream: Stream, seq: int) -> None:
        self._stream, self._seq = stream, seq

    def __len__(self) -> int:
        return -(-len(self._stream) // self._seq)

    def pieces(self, row: int) -> Pieces:
        start = row * self._seq
        stop = min(start + self._seq, len(self._stream))
        ends = self._stream.ends(start, stop)
        open_end = not len(ends) or ends[-1] != stop
        bounds = np.concatenate([[start], ends, [stop] if open_end else []]).astype(np.int64)
        closed = np.ones(len(bounds) - 1, bool)
        closed[-1] = not open_end
        return Pieces(bounds[:-1], np.diff(bounds), closed)


class PackedRows:
    """Pieces sorted by the row they are in."""

    def __init__(self, pieces: Pieces, row_of: Ints) -> None:
        order = np.argsort(row_of, kind="stable")
        self._pieces = pieces.only(order)
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(row_of))]) if len(row_of) else np.zeros(1, np.int64)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def pieces(self, row: int) -> Pieces:
        return self._pieces.only(slice(int(self._bounds[row]), int(self._bounds[row + 1])))


def cut(stream: Stream, seq: int, *, truncate: bool) -> tuple[Pieces, int]:
    """Documents as pieces of at most `seq` tokens, and how many of them were truncated.

    Long text goes on in the next piece. A long conversation is truncated instead: an answer without its question
    teaches nothing true.
    """
    ends = stream.ends(0, len(stream))
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    lengths = ends - starts
    long = int((lengths > seq).sum())
    if truncate:
        return Pieces(starts, np.minimum(lengths, seq), lengths <= seq), long
    counts = -(-lengths // seq)
    which = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    piece_starts = starts[which] + nth * seq
    piece_lengths = np.minimum(lengths[which] - nth * seq, seq)
    return Pieces(piece_starts, piece_lengths, piece_starts + piece_lengths == ends[which]), 0


def with_answers(stream: Stream, pieces: Pieces) -> Pieces:
    """The pieces that have something to learn: an answer among their targets, which begin at their second token."""
    targets = pieces.lengths + np.where(pieces.closed, 0, 1)
    return pieces.only(stream.answers(pieces.starts, targets) > stream.answers(pieces.starts, np.ones_like(targets)))


def best_fit(lengths: Ints, capacity: int) -> Ints:
    """The row of each piece, by best-fit decreasing: longest first, each into the fullest row that still holds it.

    Pieces of one length are placed together, and rows with the same room left are one group, so that the work grows
    with the number of lengths and not of pieces. Rows are then numbered by their first piece.
    """
    row_of = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    room: dict[int, list[Ints]] = {}  # tokens left -> rows that have them
    rooms: list[int] = []  # the keys, rising
    made = 0

    def give(left: int, rows: Ints) -> None:
        if len(rows):
            if left not in room:
                bisect.insort(rooms, left)
                room[left] = []
            room[left].append(rows)

    cuts = np.flatnonzero(np.diff(lengths[by_length])) + 1
    for pieces in np.split(by_length, cuts) if len(lengths) else []:
        size = int(lengths[pieces[0]])
        while len(pieces):
            at = bisect.bisect_left(rooms, size)
            left = rooms[at] if at < len(rooms) else capacity
            each = left // size  # a row that took one is still the best fit for the next of the same length
            wanted = -(-len(pieces) // each)
            if at < len(rooms):
                rows = np.concatenate(room.pop(rooms.pop(at)))
                give(left, rows[wanted:])
                rows = rows[:wanted]
            else:
                rows = np.arange(made, made + wanted)
                made += wanted
            now, pieces = pieces[: len(rows) * each], pieces[len(rows) * each :]
            row_of[now] = rows[np.arange(len(now)) // each]
            last = len(now) - (len(rows) - 1) * each
            give(left - each * size, rows[:-1])
            give(left - last * size, rows[-1:])
    return _by_first_piece(row_of, made)


def _by_first_piece(row_of: Ints, rows: int) -> Ints:
    first = np.full(rows, len(row_of), np.int64)
    np.minimum.at(first, row_of, np.arange(len(row_of)))
    rank = np.empty(rows, np.int64)
    rank[np.argsort(first)] = np.arange(rows)
    return rank[row_of]


def assemble(stream: Stream, pieces: Pieces, seq: int) -> Row:
    """The arrays of one row, padded at its end."""
    starts, lengths, closed = pieces
    total = int(lengths.sum())
    offsets = np.cumsum(lengths) - lengths
    positions = np.arange(total) - np.repeat(offsets, lengths)
    places = np.repeat(starts, lengths) + positions
    inputs, _ = stream.take(places)
    last = np.zeros(total, bool)
    last[(offsets + lengths - 1)[closed]] = True
    targets, weight = stream.take(np.where(last, places, places + 1))
    targets[last], weight[last] = 0, 0
    return Row(
        _pad(inputs, seq),
        _pad(targets, seq),
        _pad(np.repeat(np.arange(1, len(lengths) + 1), lengths).astype(np.int32), seq),
        _pad(positions.astype(np.int32), seq),
        np.pad(weight, (0, seq - total)),
    )


def _pad(values: NDArray[np.int32], seq: int) -> NDArray[np.int32]:
    return np.pad(values, (0, seq - len(values)))


def padding(seq: int) -> Row:
    """A row of nothing, to fill the last batch of an evaluation."""
    zeros = np.zeros(seq, np.int32)
    return Row(zeros, zeros, zeros, zeros, np.zeros(seq, np.float32))
