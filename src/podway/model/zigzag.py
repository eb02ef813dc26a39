"""The order in which the chips of the context axis share a sequence: each takes an early piece and a late one.

Letters: B batch, S length, C chips that share a sequence, L = S / 2C tokens of a piece.

A query looks at the keys before it, so the last of C contiguous pieces is nearly twice the mean work, and the others wait for it.
Cut into 2C pieces, of which chip i takes pieces i and 2C - 1 - i, every chip has the same work. Only attention and rotations see
where a token stands; everything else in a model takes tokens one by one. So the trainer puts tokens, targets, masks, segments
and positions in this order before the first layer, and nothing is ever put back but keys and values, which attention gathers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt


def is_even(length: int, chips: int) -> bool:
    """Whether a sequence can be cut this way."""
    return chips > 1 and length % (2 * chips) == 0


def places(length: int, chips: int) -> npt.NDArray[np.int32]:
    """(S,): where in the sequence each token in this order stands; with one chip 0, 1, 2, ..."""
    index = np.arange(length, dtype=np.int32)
    if chips == 1:
        return index
    pieces = index.reshape(2 * chips, -1)
    return np.stack([pieces[:chips], pieces[: chips - 1 : -1]], axis=1).reshape(-1)


def spread(x: jax.Array, chips: int) -> jax.Array:
    """(B, S, ...) from the order of the sequence to this one."""
    if chips == 1:
        return x
    pieces = x.reshape(x.shape[0], 2 * chips, -1, *x.shape[2:])
    return jnp.stack([pieces[:, :chips], pieces[:, : chips - 1 : -1]], axis=2).reshape(x.shape)


def restored(x: jax.Array, chips: int) -> jax.Array:
    """(B, S, ...) from this order to that of the sequence."""
    if chips == 1:
        return x
    pairs = x.reshape(x.shape[0], chips, 2, -1, *x.shape[2:])
    return jnp.concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], axis=1).reshape(x.shape)
