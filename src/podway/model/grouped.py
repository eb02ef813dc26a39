"""Rows of tokens, sorted into the runs of their experts and back, and the product of each run with its expert's matrices.

Letters: M rows, D d_model, F d_ff of an expert, E experts, K inputs and N outputs of a matrix, R rank of an adapter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from podway.model.expert_tiles import AUTO_TILES, COMPILER_TILES, Pass, Tiles
from podway.model.remat import mark

Activate = Callable[[jax.Array], jax.Array]


class Adapted(NamedTuple):
    """A stack of experts' matrices, and a product of two narrow stacks that is added to it (LoRA)."""

    w_EKN: jax.Array
    a_EKR: jax.Array
    b_ERN: jax.Array


Matrix = jax.Array | Adapted
Matrices = tuple[Matrix, ...]  # (gate, up, down) or (up, down), stacked over E


def stack_of(matrix: Matrix) -> jax.Array:
    """Without adapters."""
    return matrix.w_EKN if isinstance(matrix, Adapted) else matrix


class ExpertMlp(NamedTuple):
    """How an expert computes."""

    activate: Activate
    tiles: Tiles = AUTO_TILES


@jax.custom_vjp
def picked(x: jax.Array, index: jax.Array, taken: jax.Array, counts: jax.Array | None = None) -> jax.Array:
    """`x[index]`, with a gradient that gathers too.

    Row i of x went to the rows `taken[i]` (any number of them), of which those count where `counts[i]` is true (none: all). Without
    being told, the gradient of a gather is a scatter that adds row after row.
    """
    return x[index]


def _picked_forward(
    x: jax.Array, index: jax.Array, taken: jax.Array, counts: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    return x[index], (taken, counts)


def _picked_backward(kept: tuple[jax.Array, jax.Array | None], g: jax.Array) -> tuple[jax.Array, None, None, None]:
    taken, counts = kept
    sums = jnp.zeros((), g.dtype)
    for j in range(taken.shape[1]):
        rows = g[taken[:, j]]
        if counts is not None:
            rows = jnp.where(counts[:, j].reshape(-1, *(1,) * (rows.ndim - 1)), rows, 0)
        sums = sums + rows
    return sums, None, None, None


picked.defvjp(_picked_forward, _picked_backward)


def mlp_of_groups(
    rows_MD: jax.Array, weight_M: jax.Array, sizes_E: jax.Array, matrices: Matrices, mlp: ExpertMlp
) -> jax.Array:
    """The MLP of each run of rows by the matrices of its expert, times the weight of each row; rows after the last run are not defined.

    The weight is multiplied in before the last product: its gradient is then a sum over F of what the backward pass has anyway.
    After it, that gradient would be a sum over the answers, and the product would be computed again for it.
    """
    *into, down = matrices
    hidden = [mark(_product(rows_MD, matrix, sizes_E, mlp.tiles), "mlp_in") for matrix in into]
    rows_MF = mlp.activate(hidden[0]) * hidden[1] if len(hidden) == 2 else mlp.activate(hidden[0])
    weighted_MF = rows_MF * weight_M.astype(rows_MF.dtype)[:, None]
    return _product(weighted_MF, down, sizes_E, mlp.tiles)


def _product(x_MK: jax.Array, matrix: Matrix, sizes_E: jax.Array, tiles: Tiles) -> jax.Array:
    out_MN = grouped_product(tiles, x_MK, stack_of(matrix), sizes_E)
    if not isinstance(matrix, Adapted):
        return out_MN
    low_MR = grouped_product(COMPILER_TILES, x_MK, matrix.a_EKR, sizes_E)
    return out_MN + grouped_product(COMPILER_TILES, low_MR, matrix.b_ERN, sizes_E)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_product(tiles: Tiles, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Each run of rows times the matrix of its group; a `ragged_dot` whose three passes each have tiles of their own."""
    with _in_tiles(tiles, "forward", x_MK, w_EKN):
        return lax.ragged_dot(x_MK, w_EKN, sizes_E)


def _product_forward(
    tiles: Tiles, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return grouped_product(tiles, x_MK, w_EKN, sizes_E), (x_MK, w_EKN, sizes_E)


def _product_backward(
    tiles: Tiles, kept: tuple[jax.Array, jax.Array, jax.Array], g_MN: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x_MK, w_EKN, sizes_E = kept
    with _in_tiles(tiles, "input gradient", x_MK, w_EKN):
        d_x = lax.ragged_dot_general(g_MN, w_EKN, sizes_E, _BY_COLUMNS)
    with _in_tiles(tiles, "weight gradient", x_MK, w_EKN):
        d_w = lax.ragged_dot_general(x_MK, g_MN, sizes_E, _OVER_ROWS)
    return d_x.astype(x_MK.dtype), d_w.astype(w_EKN.dtype), None


grouped_product.defvjp(_product_forward, _product_backward)

_BY_COLUMNS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])  # type: ignore[no-untyped-call]
_OVER_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])  # type: ignore[no-untyped-call]


@contextmanager
def _in_tiles(tiles: Tiles, which: Pass, x_MK: jax.Array, w_EKN: jax.Array) -> Iterator[None]:
    """libtpu takes the tiles of a ragged product from an attribute of this name."""
    groups, inner, columns = w_EKN.shape
    if which == "input gradient":
        inner, columns = columns, inner
    tile = tiles.choose(which, rows=x_MK.shape[0], inner=inner, columns=columns, groups=groups)
    if tile is None:
        yield
        return
    with set_xla_metadata(ragged_dot_tiling=",".join(map(str, tile))):  # type: ignore[no-untyped-call]
        yield
