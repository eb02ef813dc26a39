"""Rotary position embedding.

Letters: B batch, S length, N heads, K d_head.

Channel i of the first half of a head and channel i of the second half are one pair, turned by position * frequency_i.
(Weights on Hugging Face are stored for this pairing.) Angles are made once in float32 outside the layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from podway.model.shape import LinearScaling, Llama3Scaling, Rope

Angles = tuple[jax.Array, jax.Array]  # cosines and sines, (B, S, K / 2) in float32


def frequencies(rope: Rope, d_head: int, *, local: bool) -> npt.NDArray[np.float64]:
    """Radians a position for each of the K / 2 pairs; `local` asks for those of windowed layers."""
    theta = rope.local_theta if local and rope.local_theta is not None else rope.theta
    plain: npt.NDArray[np.float64] = theta ** -(np.arange(0, d_head, 2, dtype=np.float64) / d_head)
    if rope.scaling is None or (local and rope.local_theta is not None):
        return plain
    if isinstance(rope.scaling, LinearScaling):
        return plain / rope.scaling.factor
    return _llama3(plain, rope.scaling)


def _llama3(plain: npt.NDArray[np.float64], scaling: Llama3Scaling) -> npt.NDArray[np.float64]:
    """Keep wavelengths that fit often into the original context, stretch those that do not, blend in between."""
    turns = scaling.original_max_position * plain / (2 * np.pi)  # full turns within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    blended: npt.NDArray[np.float64] = kept * plain + (1 - kept) * plain / scaling.factor
    return blended


def angles(positions: jax.Array, freqs: npt.NDArray[np.float64]) -> Angles:
    """Cosines and sines for each position (B, S)."""
    turned = positions[..., None].astype(jnp.float32) * jnp.asarray(freqs, jnp.float32)
    return jnp.cos(turned), jnp.sin(turned)


def rotate(x_BSNK: jax.Array, by: Angles) -> jax.Array:
    """Turn each pair of channels by the angle of its position."""
    cos, sin = (a[:, :, None, :] for a in by)
    first, second = jnp.split(x_BSNK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BSNK.dtype)
