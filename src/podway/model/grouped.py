"""Rows of tokens, sorted into the runs of their experts and back, and the product of each run with its expert's matrices.

Letters: M rows, D d_model, F d_ff of an expert, E experts.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from podway.model.remat import mark

Activate = Callable[[jax.Array], jax.Array]
Matrices = tuple[jax.Array, ...]  # (gate, up, down) or (up, down), stacked over E


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
        sums = sums + (rows if counts is None else jnp.where(counts[:, j, None], rows, 0))
    return sums, None, None, None


picked.defvjp(_picked_forward, _picked_backward)


def mlp_of_groups(rows_MD: jax.Array, sizes_E: jax.Array, matrices: Matrices, activate: Activate) -> jax.Array:
    """The MLP of each run of rows by the matrices of its expert; rows after the last run are not defined."""
    *into, down = matrices
    hidden = [mark(lax.ragged_dot(rows_MD, w, sizes_E), "mlp_in") for w in into]
    rows_MF = activate(hidden[0]) * hidden[1] if len(hidden) == 2 else activate(hidden[0])
    return lax.ragged_dot(rows_MF, down, sizes_E)
