"""How long the attention kernel takes: cycles of its compiled loops, for the block sizes that a trainer uses.

jax's splash kernel walks a grid of blocks of scores. Its cost has three parts, each a number of VLIW bundles that libtpu
0.0.51 schedules for jax 0.10.2's kernels (`published/attention_kernels.csv`; one bundle is one cycle):

1. `body`: the work of one block that the mask leaves, softmax and products together;
2. `step`: what every step of the grid costs, also one that the mask skips: addresses, transfers, and STEP_CYCLES;
3. `ends`: beginning and ending a row (a column in the backward kernel) of blocks.

Larger blocks have fewer steps but compute more of the triangle that the mask cuts. A fused backward kernel makes the scores
once where two kernels (dq, dkv) make them twice.
"""

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

# A grid step's wait for its transfers, which the bundles do not show: with it the cycles of the six kernels of v6e in
# blocks of 512, 1024 and 2048 agree to 1% with those counted from their traces (facts of the TPU step, seq 8192).
STEP_CYCLES = 133


class Loop(NamedTuple):
    """One kernel: bundles of a block, of a grid step, of the ends of a row."""

    body: float
    step: float
    ends: float


class Kernel(NamedTuple):
    """Forward and backward kernels in square blocks of one size, for one generation and head size."""

    block: int
    fused: bool
    forward: Loop
    backward: tuple[Loop, ...]


@cache
def _table() -> dict[tuple[str, int, bool, int], Kernel]:
    found: dict[tuple[str, int, bool, int], list[tuple[str, Loop]]] = {}
    with open(Path(__file__).parent / "published" / "attention_kernels.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = (row["generation"], int(row["block"]), row["fused"] == "1", int(row["d_head"]))
            loop = Loop(float(row["body"]), float(row["step"]), float(row["ends"]))
            found.setdefault(key, []).append((row["kernel"], loop))
    return {
        key: Kernel(
            key[1], key[2], next(loop for name, loop in rows if name == "forward"),
            tuple(loop for name, loop in sorted(rows) if name != "forward"),
        )
        for key, rows in found.items()
    }  # fmt: skip


@cache
def kernel_of(generation: str, block: int, fused: bool, d_head: int) -> Kernel:
    """The kernel of a generation that is nearest to what is asked for: the same head size or the next larger one known, the
    same kind of backward pass, and of those the nearest block."""
    known = [key for key in _table() if key[0] == generation]
    if not known:
        known = [key for key in _table() if key[0] == "v4"]  # v2 and v3 have none: their nearest relative
    heads = {key[3] for key in known}
    width = min((d for d in heads if d >= d_head), default=max(heads))
    near = min(
        (key for key in known if key[3] == width), key=lambda key: (key[2] != fused, abs(key[1] - block), -key[1])
    )
    return _table()[near]


class Blocks(NamedTuple):
    """The walk of a kernel over blocks of scores, `size` on a side: steps of its grid, those computed, rows begun."""

    size: int
    grid: float
    computed: float
    rows: float


def blocks_of(size: int, queries: int, keys: int, *, window: int | None = None, causal: bool = True) -> Blocks:
    """The walk of one head over `queries` of `keys` tokens.

    Where a sequence is split over chips, each has early and late queries, so that all have the same work (podway.model.zigzag).
    """
    rows, columns = max(1.0, queries / size), max(1.0, keys / size)
    if not causal:
        return Blocks(size, rows * columns, rows * columns, rows)
    width = min(keys, window or keys)
    banded = width < keys
    # Keys that a row sees in the mean: of the band, whose first rows see fewer; of the triangle. Blocks that the mask cuts are
    # computed whole.
    reach = width - width**2 / (2 * keys) if banded else keys / 2
    computed = rows * min(columns, (max(reach, 0.0) + size / 2) / size)
    grid = rows * min(columns, width / size + 1)  # the grid shrinks to a band; a triangle leaves it square
    return Blocks(size, grid, max(computed, rows), rows)


def kernel_cycles(generation: str, loop_of: str, blocks: Blocks, *, fused: bool, d_head: int) -> float:
    """Cycles on one core of a kernel: `forward`, `dq`, `dkv`, or `backward` for all of the backward pass."""
    kernel = kernel_of(generation, blocks.size, fused, d_head)
    loops = {"forward": (kernel.forward,), "backward": kernel.backward}.get(loop_of) or (
        kernel.backward[:1] if len(kernel.backward) == 1 or loop_of == "dkv" else kernel.backward[1:]
    )
    side = blocks.size / kernel.block
    wider = max(1.0, d_head / _width(generation, d_head))
    return sum(
        wider * (blocks.computed * loop.body * side**2 + blocks.rows * loop.ends * side)
        + blocks.grid * (loop.step + STEP_CYCLES)
        for loop in loops
    )


@cache
def _width(generation: str, d_head: int) -> int:
    heads = {key[3] for key in _table() if key[0] == generation} or {key[3] for key in _table() if key[0] == "v4"}
    return min((d for d in heads if d >= d_head), default=max(heads))
