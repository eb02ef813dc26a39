"""Which blocks the attention kernel of a TPU works in, and whether its backward pass is one kernel or two (no jax).

What is not asked for is chosen by generation and shape, from cycles of compiled kernels (`plan/published/attention_kernels.csv`; a
test holds the choice to them). The trainer, the planner and a rehearsal all ask here.

1. Large blocks have fewer steps and longer loops, but compute more of what the mask hides.
2. One backward kernel makes the scores once where two (dq, dkv) make them twice. It writes dq once for each block of keys, to be
   summed afterwards: HBM traffic and memory that grow with the number of blocks, so it is chosen up to MOST_PARTS of them.
3. A window leaves a band of blocks, to which the grid of two kernels shrinks and that of one does not.
"""

from typing import NamedTuple

SIZES = (2048, 1024, 512, 256, 128)
# Blocks of keys up to which dq is written in parts. With 8 the parts are as large as eight of the queries: 1.6 GB on a chip that has
# 24,576 tokens of Llama 3.1 8B.
MOST_PARTS = 8
_SMALL = 512  # of generations without compiled cycles, and of narrow bands
_WIDE_WINDOW = 2048  # from here on a band is cheaper in blocks of 1024 than of 512


class Blocks(NamedTuple):
    """What is asked for; None: by generation and shape."""

    size: int | None = None  # side of a block
    fused: bool | None = None  # one backward kernel in place of two
    generation: str | None = None  # whose cycles decide; None: blocks of 512 and two kernels


class BlockChoice(NamedTuple):
    """Square blocks, and the kind of backward pass."""

    size: int
    fused: bool


AUTO = Blocks()

# The largest block that is worth its waste: by generation, the shortest sequence of keys for each size. Backward kernels in blocks of
# 2048 need more VMEM than v5p's and tpu7x's compiler gives a kernel (libtpu 0.0.51).
_LARGEST: dict[str, tuple[tuple[int, int], ...]] = {
    "v4": ((0, 1024),),
    "v5e": ((0, 1024),),
    "v5p": ((0, 1024),),
    "v6e": ((8192, 2048), (0, 1024)),
    "tpu7x": ((0, 1024),),
}
# (generation, head size) whose fused backward kernel does not compile: it needs more VMEM than a core has.
_NOT_FUSED = {("v4", 256)}


def choose_blocks(
    asked: Blocks, *, queries: int, keys: int, d_head: int, window: int | None = None
) -> BlockChoice | None:
    """The blocks of a device that has these queries of a sequence; None where no block divides them."""
    sizes = (asked.size,) if asked.size is not None else SIZES[SIZES.index(_largest(asked, keys, d_head, window)) :]
    size = next((side for side in sizes if queries % side == 0 and keys % side == 0), None)
    if size is None:
        return None
    if asked.fused is not None:
        return BlockChoice(size, asked.fused)
    known = asked.generation in _LARGEST and (asked.generation, _width(d_head)) not in _NOT_FUSED
    banded = window is not None and window < keys
    return BlockChoice(size, known and not banded and keys // size <= MOST_PARTS)


def _largest(asked: Blocks, keys: int, d_head: int, window: int | None) -> int:
    if asked.generation not in _LARGEST:
        return _SMALL
    if window is not None and window < keys:
        return 1024 if window >= _WIDE_WINDOW else _SMALL
    largest = next(size for shortest, size in _LARGEST[asked.generation] if keys >= shortest)
    return min(largest, 1024) if _width(d_head) > 128 else largest


def _width(d_head: int) -> int:
    """A head in whole rows of 128 lanes."""
    return -(-d_head // 128) * 128
