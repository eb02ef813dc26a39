"""What a layer adds to the residual stream and the norm that follows, on NVIDIA GPUs: one Pallas (Triton) kernel.

Letters: M rows, D d_model.

A step of a few rows is bound by the number of its kernels as well as by memory (docs/perf-notes.md), and the compiler makes two or
three of this: the sum, its mean square, and the rest of the norm. A program has one row, padded to a power of two.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from podway.model.mesh import abstract_array
from podway.model.shape import Norm


def add_norm(
    x: jax.Array, added: jax.Array, weight_D: jax.Array, norm: Norm, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(x + added, the norm of that), both of the shape of x: (..., D)."""
    D = x.shape[-1]
    rows_MD = x.reshape(-1, D)
    row = pl.BlockSpec((None, D), lambda m: (m, 0))
    like = abstract_array(rows_MD.shape, x.dtype)
    total, normed = pl.pallas_call(
        functools.partial(_kernel, eps=norm.eps, more=1.0 if norm.plus_one else 0.0),
        grid=(rows_MD.shape[0],),
        in_specs=[row, row, pl.BlockSpec((D,), lambda m: (0,))],
        out_specs=[row, row],
        out_shape=[like, like],
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(rows_MD, added.reshape(-1, D), weight_D)
    return total.reshape(x.shape), normed.reshape(x.shape)


def _kernel(
    x_ref: Ref, added_ref: Ref, weight_ref: Ref, total_ref: Ref, normed_ref: Ref, *, eps: float, more: float
) -> None:
    size = x_ref.shape[0]
    padded = 1 << (size - 1).bit_length()
    inside, all_of_it = jnp.arange(padded) < size, pl.ds(0, padded)
    x, added, weight = (plgpu.load(ref.at[all_of_it], mask=inside, other=0.0) for ref in (x_ref, added_ref, weight_ref))
    total = x + added  # rounded as the compiler's sum is
    wide = total.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt((wide * wide).sum() / size + eps)
    normed = wide * (weight.astype(jnp.float32) + more)
    plgpu.store(total_ref.at[all_of_it], total, mask=inside)
    plgpu.store(normed_ref.at[all_of_it], normed.astype(normed_ref.dtype), mask=inside)
