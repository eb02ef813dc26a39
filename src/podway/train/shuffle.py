"""Order without memory: which row comes when, as a pure function of numbers (no jax).

- `Permutation` shuffles range(size) by a keyed Feistel network: any index is answered at once and nothing is stored, so
  that a run resumed at step 900,000 starts as fast as at step 0.
- `Mixture` says for the n-th row of a run which source gives it, and the how-many-eth row of that source it is.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_ROUNDS = 6  # four already make a Feistel network hard to tell from a random permutation (Luby and Rackoff, 1988)
_PERIOD = 1 << 14  # rows after which a mixture repeats its pattern: weights are exact to 1/16384


def mix(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the input moves every bit of the result."""
    z = values + np.uint64(key * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Permutation:
    """A bijection of range(size) onto itself, chosen by `seed` and `epoch`."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = size
        half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half = np.uint64(half)
        self._low = np.uint64((1 << half) - 1)
        start = mix(np.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], np.uint64), 1)
        self._keys = [
            int(k) for k in mix(np.arange(_ROUNDS, dtype=np.uint64) ^ start[0], int(start[1] >> np.uint64(1)))
        ]

    def __call__(self, index: int) -> int:
        return int(self.many(np.array([index]))[0])

    def many(self, indices: Ints) -> Ints:
        """Where each index goes. The network works on a power of four; what falls outside walks on until it is inside."""
        values = self._network(indices.astype(np.uint64))
        outside = values >= self._size
        while outside.any():
            values[outside] = self._network(values[outside])
            outside = values >= self._size
        return values.astype(np.int64)

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half, values & self._low
        with np.errstate(over="ignore"):
            for key in self._keys:
                left, right = right, left ^ (mix(right, key) & self._low)
        return (left << self._half) | right


class Mixture:
    """Rows drawn from several sources in the proportions of their weights, evenly spread."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        counts = _apportion(weights, _PERIOD if len(weights) > 1 else 1)
        pattern = np.repeat(np.arange(len(counts)), counts)
        if len(counts) > 1:
            pattern = pattern[Permutation(len(pattern), seed, -1 & 0xFFFF).many(np.arange(len(pattern)))]
        self._pattern = pattern
        self._counts = counts
        self._rank = np.zeros(len(pattern), np.int64)
        for source in range(len(counts)):
            mine = pattern == source
            self._rank[mine] = np.arange(mine.sum())

    @property
    def shares(self) -> list[float]:
        """The part of all rows that each source gives."""
        return [float(count) / len(self._pattern) for count in self._counts]

    def locate(self, row: int) -> tuple[int, int]:
        """The source of the n-th row, and how many rows that source gave before it."""
        period, place = divmod(row, len(self._pattern))
        source = int(self._pattern[place])
        return source, period * int(self._counts[source]) + int(self._rank[place])


def _apportion(weights: Sequence[float], total: int) -> Ints:
    """Whole numbers in proportion to weights, by largest remainder; a source with any weight has one at least."""
    shares = np.asarray(weights, float) / sum(weights) * total
    counts = np.maximum(np.floor(shares).astype(np.int64), 1)
    order = np.argsort(counts - shares, kind="stable")
    counts[order[: max(0, total - int(counts.sum()))]] += 1
    return counts
