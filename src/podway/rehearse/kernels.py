"""The Pallas kernels of a program: the compiler gives no cycles for a custom call.

Attention kernels (jax's splash and flash, forward, dq and dkv) are read as the blocks of scores that their mask leaves; the cycles
of a block are in `plan.kernels`, with their source. Grouped products of a mixture of experts are read as the tiles that they visit:
their FLOPs, and the cycles of such a kernel. Every other kernel is priced by what it moves through HBM, and named in the notes of a
rehearsal, because that is a floor and not an estimate.
"""

import re
from math import ceil
from typing import Literal

from podway.model.expert_tiles import CORES, Pass, cycles
from podway.plan.kernels import blocks_of
from podway.rehearse.hlo import BITS, Computation, Instruction, Shape
from podway.rehearse.program import Attention, Grouped

Part = Literal["forward", "dq", "dkv"]
_DEFAULT_BLOCK = 512  # of kernels that do not say theirs
_PARTS: tuple[tuple[str, Part], ...] = (
    (r"splash_m[hq]a_fwd", "forward"),
    (r"splash_m[hq]a_dq", "dq"),
    (r"splash_m[hq]a_dkv", "dkv"),
    (r"flash_mha_bwd_dq", "dq"),
    (r"flash_mha_bwd_dkv", "dkv"),
    (r"flash_attention", "forward"),
)


def is_kernel(one: Instruction) -> bool:
    """Whether an instruction runs a program of its own on the chip."""
    return one.opcode == "custom-call" and one.target == "tpu_custom_call"


def attention_part(one: Instruction) -> Part | None:
    """Which part of attention a kernel is; None: something else."""
    return next((part for pattern, part in _PARTS if re.search(pattern, one.name)), None)


def attention_of(here: Computation, one: Instruction) -> Attention | None:
    """The attention that a kernel computes; None for any other kernel."""
    part = attention_part(one)
    operands = [here[name].shapes[0] for name in one.operands if here.get(name) and here[name].shapes]
    wide = [shape for shape in operands if shape.dtype in ("bf16", "f32", "f16") and len(shape.dims) >= 3]
    if part is None or len(wide) < 2:
        return None
    queries, keys = wide[0], wide[1]
    d_head, length, seen = queries.dims[-1], queries.dims[-2], keys.dims[-2]
    walks = queries.elements // (d_head * length)  # heads and sequences of this device
    across, down = _blocks(one, part)
    size = (across * down) ** 0.5
    window = _band(operands, one, length // across, seen // down)
    causal = one.name.startswith("splash")
    walk = blocks_of(round(size), length, seen, window=None if window is None else round(window * size), causal=causal)
    return Attention(
        part=part, d_head=d_head, size=walk.size, grid=walks * walk.grid, computed=walks * walk.computed,
        rows=walks * walk.rows, fused=part == "dkv" and not _has_dq(here),
    )  # fmt: skip


def _has_dq(here: Computation) -> bool:
    return any(attention_part(other) == "dq" for other in here if is_kernel(other))


def _blocks(one: Instruction, part: Part) -> tuple[int, int]:
    """Queries and keys of a block, as the kernel's own settings say in the text."""
    end = {"forward": "", "dq": "_dq", "dkv": "_dkv"}[part]
    sizes = [re.search(rf'block_{side}{end}\\*": *(\d+)', one.text) for side in ("q", "kv")]
    across, down = (int(found[1]) if found else _DEFAULT_BLOCK for found in sizes)
    return across, down


def _band(operands: list[Shape], one: Instruction, rows: int, columns: int) -> float | None:
    """Blocks of a row that a window leaves; None where there is no window.

    Splash is given a table of its blocks, (heads, rows, columns), which a window makes smaller than the grid of all blocks. A
    causal mask leaves it whole, also where the queries are one piece of a sequence that is split over chips.
    """
    table = next((shape for shape in operands if shape.dtype in ("s8", "s32") and len(shape.dims) == 3), None)
    if table is None or not one.name.startswith("splash"):
        return None
    held, whole = table.dims[-2] * table.dims[-1], rows * columns
    return held / max(rows, 1) if held < whole else None


def grouped_of(here: Computation, one: Instruction, generation: str, share: float = 1.0) -> Grouped | None:
    """A grouped product (`ragged_dot`): rows that are cut into groups, each multiplied by a matrix of its own.

    The kernel visits the rows in tiles, one that two groups share twice, and computes the last tile of columns whole. `share` is
    the part of the rows that belongs to a group at all: the others are passed over.
    """
    tiling = re.search(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"', one.text)
    operands = [here[name].shapes[0] for name in one.operands if here.get(name) and here[name].shapes]
    wide = [shape for shape in operands if shape.dtype in BITS and shape.dtype[0] in "bf" and len(shape.dims) >= 2]
    if tiling is None or len(wide) < 2 or not one.shapes:
        return None
    down, inside, across = (int(side) for side in tiling.groups())
    rows, made = wide[0].dims[0], one.shapes[0].dims
    which: Pass = "forward"
    if len(made) == 3:  # the gradient of the matrices
        (groups, inner, columns), which = made, "weight gradient"
    else:
        groups, inner, columns = wide[1].dims[0], wide[0].dims[1], made[-1]
    tile, filled = (down, inside, across), ceil(rows * share)
    return Grouped(
        rows=float((ceil(rows * share / down) + groups - 1) * down),
        inner=float(ceil(inner / inside) * inside),
        columns=float(ceil(columns / across) * across),
        groups=groups,
        cycles=cycles(generation, which, tile, filled, inner, columns, groups) if generation in CORES else 0.0,
    )
