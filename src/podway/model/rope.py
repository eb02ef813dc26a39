"""Rotary position embedding.

Letters: B batch, S length, N heads, K d_head, R channels that are turned (K, or fewer where a model turns a part of each head).

Channel i of the first half of the R channels and channel i of their second half are one pair, turned by position * frequency_i.
(Weights on Hugging Face are stored for this pairing.) Angles are made once in float32 outside the layers.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from podway.model.shape import LinearScaling, Llama3Scaling, LongScaling, Rope, YarnScaling

Angles = tuple[jax.Array, jax.Array]  # cosines and sines, (B, S, R / 2) in float32
Floats = npt.NDArray[np.float64]


def frequencies(rope: Rope, d_head: int, *, local: bool, longest: int) -> Floats:
    """Radians a position for each of the R / 2 pairs; `local` asks for those of windowed layers.

    No position is `longest` or more: some models turn differently where nothing is longer than what they were first trained on.
    """
    theta = rope.local_theta if local and rope.local_theta is not None else rope.theta
    turned = rope.channels(d_head)
    plain: Floats = theta ** -(np.arange(0, turned, 2, dtype=np.float64) / turned)
    if rope.scaling is None or (local and rope.local_theta is not None):
        return plain
    if isinstance(rope.scaling, LinearScaling):
        return plain / rope.scaling.factor
    if isinstance(rope.scaling, Llama3Scaling):
        return _llama3(plain, rope.scaling)
    if isinstance(rope.scaling, LongScaling):
        factors = rope.scaling.short if longest <= rope.scaling.original_max_position else rope.scaling.long
        stretched: Floats = plain / np.asarray(factors)
        return stretched
    return _yarn(plain, rope.scaling, theta)


def magnitude(rope: Rope, *, local: bool) -> float:
    """What turned queries and keys are multiplied by."""
    plain = rope.scaling is None or (local and rope.local_theta is not None)
    return rope.scaling.magnitude if not plain and isinstance(rope.scaling, YarnScaling | LongScaling) else 1.0


def _llama3(plain: Floats, scaling: Llama3Scaling) -> Floats:
    """Keep wavelengths that fit often into the original context, stretch those that do not, blend in between."""
    turns = scaling.original_max_position * plain / (2 * np.pi)  # full turns within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return _blended(plain, np.clip(kept, 0.0, 1.0), scaling.factor)


def _yarn(plain: Floats, scaling: YarnScaling, theta: float) -> Floats:
    """As Llama 3's rule, with a ramp over channels in place of turns."""
    channels = 2 * len(plain)

    def channel(turns: float) -> float:
        """The pair of channels that makes so many turns within the original context."""
        return channels * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    last += 0.001 if first == last else 0.0  # a ramp has a length
    stretched = np.clip((np.arange(len(plain)) - first) / (last - first), 0.0, 1.0)
    return _blended(plain, 1 - stretched, scaling.factor)


def _blended(plain: Floats, kept: Floats, factor: float) -> Floats:
    blended: Floats = kept * plain + (1 - kept) * plain / factor
    return blended


def angles(positions: jax.Array, freqs: Floats, magnitude: float = 1.0) -> Angles:
    """Cosines and sines for each position (B, S)."""
    turned = positions[..., None].astype(jnp.float32) * jnp.asarray(freqs, jnp.float32)
    cos, sin = jnp.cos(turned), jnp.sin(turned)
    return (cos, sin) if magnitude == 1.0 else (cos * magnitude, sin * magnitude)


def rotate(x_BSNK: jax.Array, by: Angles) -> jax.Array:
    """Turn each pair of channels by the angle of its position."""
    cos, sin = (a[:, :, None, :] for a in by)
    half = cos.shape[-1]
    wide = x_BSNK.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if rest.shape[-1]:
        turned.append(rest)
    return jnp.concatenate(turned, axis=-1).astype(x_BSNK.dtype)
