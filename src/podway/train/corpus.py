"""Rows by number: what row n of a run is, without end and without state (no jax).

`Synthetic` makes random rows. A `Corpus` mixes sources by weight and reshuffles each every epoch; a `Source` is the
rows of one stream of tokens.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from podway.train.packing import ConcatRows, PackedRows, Row, Rows, Stream, assemble, best_fit, cut, with_answers
from podway.train.shuffle import Mixture, Permutation

Packing = Literal["concat", "best_fit", "none"]


class Feed(Protocol):
    """Rows without end, by number."""

    rows: int  # in one epoch; 0: there are no epochs

    def row(self, number: int) -> Row:
        """The n-th row of the run."""
        ...

    def epoch(self, rows: int) -> float:
        """How often the rows were seen after this many of them."""
        ...

    def describe(self) -> str:
        """A line or more about it."""
        ...


class Synthetic:
    """Random tokens, the same for the same seed and row."""

    rows = 0

    def __init__(self, seed: int, seq: int, vocab: int) -> None:
        self._seed, self._seq, self._vocab = seed, seq, vocab

    def row(self, number: int) -> Row:
        random = np.random.Generator(
            np.random.Philox(key=np.array([self._seed & 0xFFFFFFFFFFFFFFFF, number], np.uint64))
        )
        tokens = random.integers(0, self._vocab, self._seq + 1, dtype=np.int32)
        ones = np.ones(self._seq, np.int32)
        positions = np.arange(self._seq, dtype=np.int32)
        return Row(tokens[:-1], tokens[1:], ones, positions, np.ones(self._seq, np.float32))

    def epoch(self, rows: int) -> float:
        return 0.0

    def describe(self) -> str:
        return f"synthetic: random tokens below {self._vocab}, seed {self._seed}"


class Source:
    """The rows of one stream."""

    def __init__(self, stream: Stream, seq: int, packing: Packing) -> None:
        self.stream, self._seq = stream, seq
        self.truncated = 0
        self._rows: Rows = ConcatRows(stream, seq) if packing == "concat" else self._pack(packing)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Row:
        return assemble(self.stream, self._rows.pieces(number), self._seq)

    def _pack(self, packing: Packing) -> PackedRows:
        pieces, self.truncated = cut(self.stream, self._seq, truncate=self.stream.answers_only)
        if self.stream.answers_only:
            pieces = with_answers(self.stream, pieces)
        if packing == "none":
            return PackedRows(pieces, np.arange(len(pieces.starts)))
        return PackedRows(pieces, best_fit(pieces.lengths, self._seq))


class Corpus:
    """Sources mixed by weight, each reshuffled every epoch."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], seed: int | None) -> None:
        self._sources, self._seed = sources, seed
        self._mixture = Mixture(weights, seed or 0)
        self._order: dict[tuple[int, int], Permutation] = {}
        self.rows = sum(len(source) for source in sources)

    def row(self, number: int) -> Row:
        which, place = self._mixture.locate(number)
        source = self._sources[which]
        epoch, place = divmod(place, len(source))
        if self._seed is None:
            return source.row(place)
        order = self._order.get((which, epoch))
        if order is None:
            order = self._order[which, epoch] = Permutation(len(source), self._seed + which, epoch)
        return source.row(order(place))

    def epoch(self, rows: int) -> float:
        """Of the source that was seen most often."""
        return max(rows * s / len(source) for s, source in zip(self._mixture.shares, self._sources, strict=True))

    def describe(self) -> str:
        lines = []
        for share, source in zip(self._mixture.shares, self._sources, strict=True):
            part = f"{share:.1%} of rows: " if len(self._sources) > 1 else ""
            short = f", {source.truncated} conversations truncated" if source.truncated else ""
            lines.append(f"{part}{len(source.stream):,} tokens in {len(source):,} rows{short}")
        return "\n".join(lines)
