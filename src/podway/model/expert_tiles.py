"""Which tiles the grouped products of experts work in on a TPU (no jax).

Letters: M rows, K inner side (summed over), N columns, E experts. Of a weight gradient, which sums over rows, K and N are the sides of
the result.

Left alone, libtpu 0.0.51 fills VMEM with tiles that need not divide the matrix, and computes the last one whole: for Mixtral 1.2 times
the work on v6e, twice the work of weight gradients on v5p. So a tile is given that divides K and N, where one was compiled to the end
for this generation (`KERNELS`): of those the one with the fewest cycles. Where none was, the compiler chooses.

1. Forward and for the input's gradient the whole of K is summed at once: a kernel that adds up parts takes twice as long.
2. A tile of rows that two experts share is visited twice, so large ones cost more where experts are many; none has more rows than an
   expert has on average.
3. A step of the grid takes the bundles of its kernel, or its multiplications if these are more, and waits for its transfers. The
   compiler's own tiles, which a rehearsal meets, are priced by what the kernels here have in common: `Core.step` beside the
   multiplications, and `Core.sum` for each element of a weight gradient, which is added to a sum in VMEM.

The trainer, the planner and a rehearsal all ask here.
"""

from functools import cache
from math import ceil
from typing import Literal, NamedTuple

Pass = Literal["forward", "input gradient", "weight gradient"]
Tile = tuple[int, int, int]  # rows, inner side, columns


class Core(NamedTuple):
    """What one core of a generation does."""

    multiplies: int  # pairs of bfloat16 in a cycle
    vmem: int  # bytes that a kernel was given when those below were compiled
    sum: float  # cycles for each element of a sum that is added to
    step: int  # cycles of a step beside its multiplications: filling the matrix unit, storing, waiting for transfers


_MIB = 2**20
CORES = {
    "v5e": Core(65536, 16 * _MIB, 2.7e-3, 150),
    "v5p": Core(65536, 16 * _MIB, 2.7e-3, 150),
    "v6e": Core(262144, 96 * _MIB, 1.1e-3, 600),
    "tpu7x": Core(262144, 32 * _MIB, 1.2e-3, 150),
}
_UNASKED_VMEM = {"v6e": 32 * _MIB}  # what the compiler gives a kernel, where that is less
_LONGEST = 8192  # cycles of multiplications in a step that is given: longer ones win 3% and take minutes to compile
_WAIT = 133  # cycles that a step waits for its transfers, which the bundles of a kernel do not show (plan/kernels.py)
# Bundles of one step of the grid, of kernels that libtpu 0.0.51 compiled to the end. Those of input gradients, whose matrices lie the
# other way round, have as many as those of the forward pass (v6e, 256 x 1408 x 2048 and 256 x 2048 x 1408: 3,428 and 3,486).
KERNELS: dict[tuple[str, Pass], dict[Tile, int]] = {
    ("v5e", "forward"): {(128, 14336, 128): 2642},
    ("v5e", "weight gradient"): {(128, 3968, 128): 2322, (512, 1024, 512): 5117},
    ("v5p", "forward"): {(128, 4096, 256): 1999, (128, 14336, 128): 2707, (256, 4096, 512): 7463},
    ("v5p", "weight gradient"): {
        (128, 3968, 128): 2355,
        (512, 1024, 512): 5162,
        (512, 2048, 256): 5195,
        (1024, 512, 512): 4925,
    },
    ("v6e", "forward"): {
        (256, 1408, 2048): 3596,
        (256, 2048, 1408): 3483,
        (256, 4096, 2048): 9006,
        (256, 4096, 4352): 17846,
        (256, 14336, 512): 7602,
        (256, 14336, 1280): 18357,
        (512, 4096, 1024): 8685,
        (512, 14336, 512): 14753,
    },
    ("v6e", "weight gradient"): {
        (256, 4096, 1536): 12255,
        (512, 1408, 2048): 8813,
        (512, 2048, 1024): 6766,
        (512, 2048, 1408): 9477,
        (1024, 2048, 1024): 11168,
    },
    ("tpu7x", "forward"): {(256, 14336, 256): 3161, (512, 4096, 512): 2215},
    ("tpu7x", "weight gradient"): {(256, 4096, 256): 2679, (512, 1024, 1024): 3037},
}


class Tiles(NamedTuple):
    """What is asked for."""

    asked: tuple[int, ...] | None = None  # for all passes; empty: the compiler's; None: by generation and shape
    generation: str | None = None
    vmem: int | None = None  # bytes that a flag gives a kernel; None: what the compiler does

    def choose(self, which: Pass, *, rows: int, inner: int, columns: int, groups: int) -> Tile | None:
        """The tile of a product; None: the compiler chooses."""
        if self.asked is not None:
            if not self.asked:
                return None
            down, inside, across = self.asked
            return down, min(inside, inner), min(across, columns)
        core = CORES.get(self.generation or "")
        if core is None or self.generation is None:
            return None
        given = _UNASKED_VMEM.get(self.generation, core.vmem) if self.vmem is None else self.vmem
        return _best(self.generation, which, rows, inner, columns, groups) if given >= core.vmem else None


AUTO_TILES = Tiles()
COMPILER_TILES = Tiles(())


@cache
def _best(generation: str, which: Pass, rows: int, inner: int, columns: int, groups: int) -> Tile | None:
    tiles = [
        tile
        for tile in _kernels(generation, which)
        if columns % tile[2] == 0
        and (inner % tile[1] == 0 if which == "weight gradient" else inner == tile[1])
        and tile[0] * groups <= rows
        and tile[0] * tile[1] * tile[2] <= _LONGEST * CORES[generation].multiplies
    ]
    return min(tiles, default=None, key=lambda tile: cycles(generation, which, tile, rows, inner, columns, groups))


def _kernels(generation: str, which: Pass) -> dict[Tile, int]:
    return KERNELS.get((generation, "forward" if which == "input gradient" else which), {})


def cycles(generation: str, which: Pass, tile: Tile, rows: int, inner: int, columns: int, groups: int) -> float:
    """Cycles of a product in these tiles."""
    down, inside, across = tile
    visits = (ceil(rows / down) + groups - 1) * ceil(inner / inside) * ceil(columns / across)
    return visits * step_cycles(generation, which, tile)


def step_cycles(generation: str, which: Pass, tile: Tile) -> float:
    """Cycles of one step of the grid."""
    core = CORES[generation]
    multiplying = tile[0] * tile[1] * tile[2] / core.multiplies
    bundles = _kernels(generation, which).get(tile)
    return alike_cycles(generation, which, tile) if bundles is None else max(bundles, multiplying) + _WAIT


def alike_cycles(generation: str, which: Pass, tile: Tile) -> float:
    """Cycles of one step of the grid in a tile that was not compiled, by what those that were have in common."""
    down, inside, across = tile
    core = CORES[generation]
    added = core.sum * inside * across if which == "weight gradient" else 0.0
    return down * inside * across / core.multiplies + added + core.step
