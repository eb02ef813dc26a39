"""What adapters add to the products of a few rows, on NVIDIA GPUs: one Pallas (Triton) kernel for matrices side by side.

Letters: M rows, N outputs of the matrices, C columns of all adapters, r of one, P matrices side by side.

The product that comes before has N + P * C columns: the model's, then `a` of each matrix (`weight_layout.py`). A program adds to
a tile of the outputs what the row's adapter makes of its `a` columns, so that a step has one more kernel for each such product.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from podway.model.mesh import abstract_array

_MIN_TILE = 16  # rows of the smallest matrix product of the tensor cores
_MOST_ROWS = 64
_OUTPUTS = 64  # of a program; twice as many where there are more than _WIDE
_WIDE = 16384


def suits(rows: int, widths: tuple[int, ...], columns: int, rank: int) -> bool:
    """Whether the kernel takes these sizes: its tiles are powers of two, and none has outputs of two matrices."""
    whole = all(width % (2 * _OUTPUTS) == 0 for width in widths)
    return (
        rows <= _MOST_ROWS and whole and columns >= _MIN_TILE and not columns & (columns - 1) and not rank & (rank - 1)
    )


def add_adapters(
    made_MW: jax.Array,
    b_CN: jax.Array,
    adapter_M: jax.Array,
    widths: tuple[int, ...],
    rank: int,
    interpret: bool,
    tile: int | None = None,
    warps: int | None = None,
) -> jax.Array:
    """(M, N): the first N columns of `made` and what the adapters add; `widths` are the outputs of the P matrices."""
    M, (C, N) = made_MW.shape[0], b_CN.shape
    rows = max(_MIN_TILE, 1 << (M - 1).bit_length()) if M > 1 else 1
    tile = tile or (2 * _OUTPUTS if N > _WIDE and M > 1 else _OUTPUTS)
    warps = warps or (4 if M == 1 else 8)
    kernel = functools.partial(_one_row if M == 1 else _rows, widths=widths, rank=rank, outputs=tile, padded=rows)
    added: jax.Array = pl.pallas_call(
        kernel,
        grid=(N // tile,),
        in_specs=[
            pl.BlockSpec(made_MW.shape, lambda n: (0, 0)),
            pl.BlockSpec((C, N), lambda n: (0, 0)),
            pl.BlockSpec((M,), lambda n: (0,)),
        ],
        out_specs=pl.BlockSpec((M, N), lambda n: (0, 0)),
        out_shape=abstract_array((M, N), made_MW.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
        name="add_adapters",
    )(made_MW, b_CN, adapter_M)
    return added


def _begin(widths: tuple[int, ...], outputs: int, columns: int) -> jax.Array:
    """Where the `a` columns of this program's matrix begin."""
    at, before, end = pl.program_id(0) * outputs, pl.program_id(0) * 0, 0
    for width in widths[:-1]:
        end += width
        before += jax.lax.select(at >= end, jnp.int32(1), jnp.int32(0))
    return sum(widths) + before * columns


def _one_row(
    made_ref: Ref, b_ref: Ref, adapter_ref: Ref, out_ref: Ref,
    *, widths: tuple[int, ...], rank: int, outputs: int, padded: int,
) -> None:  # fmt: skip
    """Only the columns of its adapter are read."""
    columns = pl.ds(pl.program_id(0) * outputs, outputs)
    adapter = adapter_ref[0]
    begin = jnp.maximum(adapter - 1, 0) * rank
    inner = made_ref[0, pl.ds(_begin(widths, outputs, b_ref.shape[0]) + begin, rank)]
    inner = jnp.where(adapter > 0, inner.astype(jnp.float32), 0.0)
    added = (inner[:, None] * b_ref[pl.ds(begin, rank), columns].astype(jnp.float32)).sum(axis=0)
    out_ref[0, columns] = (made_ref[0, columns] + added).astype(out_ref.dtype)


def _rows(
    made_ref: Ref, b_ref: Ref, adapter_ref: Ref, out_ref: Ref,
    *, widths: tuple[int, ...], rank: int, outputs: int, padded: int,
) -> None:  # fmt: skip
    columns, C = pl.ds(pl.program_id(0) * outputs, outputs), b_ref.shape[0]
    b, rows, live = b_ref[:, columns], pl.ds(0, padded), jnp.arange(padded) < made_ref.shape[0]
    kept, inside = (jnp.broadcast_to(live[:, None], (padded, width)) for width in (outputs, C))
    inner = plgpu.load(made_ref.at[rows, pl.ds(_begin(widths, outputs, C), C)], mask=inside, other=0.0)
    made = plgpu.load(made_ref.at[rows, columns], mask=kept, other=0.0)
    adapter = plgpu.load(adapter_ref.at[rows], mask=live, other=0)
    owner = jax.lax.broadcasted_iota(jnp.int32, (padded, C), 1) // rank + 1
    inner = jnp.where(owner == adapter[:, None], inner, jnp.zeros_like(inner))
    plgpu.store(out_ref.at[rows, columns], (made + plgpu.dot(inner, b)).astype(out_ref.dtype), mask=kept)
