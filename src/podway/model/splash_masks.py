"""The mask that jax's splash kernel is given: which blocks of scores it computes, and which scores of a block count.

jax asks for every block of the square of scores several times, 65,536 blocks of 512 at 131,072 tokens. Its own masks compare every
token of a block with every other (four minutes at that length); nearly all blocks are all seen or all unseen, which their corners tell.
"""

from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

Bools = npt.NDArray[np.bool_]


def sees(query: Any, key: Any, *, window: int | None) -> Any:
    """Whether a token at one place sees one at another: numpy arrays while blocks are sorted out, traced ones in the kernel."""
    behind = query >= key
    return behind if window is None else behind & (query < key + window)


@cache
def _all(value: bool, rows: int, columns: int) -> Bools:
    return np.full((rows, columns), value)


class PlacedMask(splash_mask.Mask):
    """Causal, over keys in the order of the sequence and queries in any order."""

    def __init__(self, places: npt.NDArray[np.int32], window: int | None) -> None:
        self.q_sequence = places  # jax reads both by these names
        self.mask_function = partial(sees, window=window)
        self._key = (places.tobytes(), window)
        self._window = window

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.q_sequence), len(self.q_sequence))

    def __getitem__(self, index: tuple[slice, slice]) -> Bools:
        rows, columns = index
        queries, keys = self.q_sequence[rows], np.arange(len(self.q_sequence))[columns]
        first, last = int(queries.min()), int(queries.max())
        size = (len(queries), len(keys))
        window = self._window or len(self.q_sequence)
        if last < keys[0] or first >= keys[-1] + window:
            return _all(False, *size)
        if first >= keys[-1] and last < keys[0] + window:
            return _all(True, *size)
        seen: Bools = self.mask_function(queries[:, None], keys[None, :])
        return seen

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlacedMask) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)
