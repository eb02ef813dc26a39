"""The matrix products of a layer in int8 or fp8, forward and backward.

Letters: T tokens (batch and length), K inputs, N outputs of a matrix.

Both operands of a product are numbers of one byte times a scale. Scales lie along what is not summed over, so that they come
out of the product:

    y_TN  = (qx_TK @ qw_KN) * sx_T * sw_N           qx: of x, a scale for each token; qw: of w, a scale for each output
    dx_TK = (q(dy * sw)_TN @ qw_KN') * its scales   a scale for each token
    dw_KN = (qx_TK' @ q(dy * sx)_TN) * its scales   a scale for each output

The scales of one operand go into `dy`, which the backward pass quantises anyway; so x and w are quantised once and only in one way.
A weight that fsdp splits is gathered as bytes: half of bfloat16's.

fp8 leaves the gradient of a weight to the compute dtype: Hopper multiplies fp8 only where the dimension that is summed over comes
last in memory, and turning both operands (bytes, on an H200: 81 of 421 ms a step) takes more than the faster product wins.

The scales of weights are made once a step, of the whole matrix (`weight_scales`): where a device's piece lies changes nothing.
Rounding is to the nearest, and the gradient passes it as if it were not there. Weights, sums, norms, attention, the embedding and
the output matrix stay as they are without this.
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from podway.model.adapter_files import matrices
from podway.model.decoder import Project, Tree, Weights
from podway.model.shape import ModelShape
from podway.train.sharding import Exchange

Kind = Literal["int8", "fp8"]
_SCALE = "_scale"


class Format(NamedTuple):
    """How numbers are kept in a byte, and in what their products are summed."""

    dtype: DTypeLike
    largest: float
    sums: DTypeLike | None  # None: as the operands were before
    weight_gradient: bool  # the gradient of a weight is such a product too


FORMATS: dict[Kind, Format] = {
    "int8": Format(jnp.int8, 127.0, jnp.int32, True),
    "fp8": Format(jnp.float8_e4m3fn, 448.0, None, False),
}


def weight_scales(tree: Tree, shape: ModelShape, kind: Kind) -> Tree:
    """{"layers": {"q_scale": (L, outputs...), ...}} of stored weights."""
    found = {}
    for name, param in matrices(shape).items():
        inputs = tuple(range(param.stacked, param.stacked + param.inputs))
        found[name + _SCALE] = _scale_of(tree["layers"][name], inputs, FORMATS[kind])
    return {"layers": found}


def projection(kind: Kind, exchanges: Mapping[str, Exchange], plain: Project) -> Project:
    """The decoder's `project`: matrices that have scales in bytes, all others by `plain`. Weights come as each device holds them."""

    def project(name: str, x: jax.Array, weights: Weights, inputs: int) -> jax.Array:
        if name + _SCALE not in weights:
            return plain(name, x, weights, inputs)
        return _product(kind, inputs, exchanges[name], x, weights[name], weights[name + _SCALE])

    return project


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(kind: Kind, inputs: int, exchange: Exchange, x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    return _forward(kind, inputs, exchange, x, w, scale)[0]


class Saved(NamedTuple):
    """What the backward pass needs: x in bytes with its scales, or as it was; w in bytes with its scales."""

    x: jax.Array
    by_token: jax.Array | None
    w: jax.Array
    scale: jax.Array


def _forward(
    kind: Kind, inputs: int, exchange: Exchange, x: jax.Array, w: jax.Array, scale: jax.Array
) -> tuple[jax.Array, Saved]:
    how = FORMATS[kind]
    over = tuple(range(x.ndim - inputs, x.ndim))
    by_token = _scale_of(x, over, how)
    qx = _quantized(x, jnp.expand_dims(by_token, over), how)
    qw = exchange.gather(_quantized(w, exchange.own_outputs(scale), how))
    y = _sums(qx, qw, over, tuple(range(inputs)), how.sums or x.dtype)
    y = y.astype(jnp.float32) * _spread(by_token, scale.ndim) * scale
    saved = Saved(qx, by_token, qw, scale) if how.weight_gradient else Saved(x, None, qw, scale)
    return y.astype(x.dtype), saved


def _backward(
    kind: Kind, inputs: int, exchange: Exchange, saved: Saved, dy: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    how = FORMATS[kind]
    tokens = tuple(range(dy.ndim - saved.scale.ndim))
    outputs = tuple(range(len(tokens), dy.ndim))
    wide = dy.astype(jnp.float32)

    towards_x = wide * saved.scale
    own = _scale_of(towards_x, outputs, how)
    qdy = _quantized(towards_x, _spread(own, len(outputs)), how)
    dx = _sums(qdy, saved.w, outputs, tuple(range(inputs, saved.w.ndim)), how.sums or dy.dtype)
    dx = dx.astype(jnp.float32) * _spread(own, inputs)

    if saved.by_token is None:
        dw = _sums(saved.x, dy, tokens, tokens, dy.dtype)
    else:
        towards_w = wide * _spread(saved.by_token, len(outputs))
        other = _scale_of(towards_w, tokens, how)
        dw = _sums(saved.x, _quantized(towards_w, other, how), tokens, tokens, how.sums or dy.dtype)
        dw = dw.astype(jnp.float32) * other
    return dx.astype(dy.dtype), exchange.scatter(dw.astype(dy.dtype)), None


_product.defvjp(_forward, _backward)


def _scale_of(x: jax.Array, over: tuple[int, ...], how: Format) -> jax.Array:
    """What one unit stands for, so that the largest number along `over` is the largest that a byte holds."""
    most = jnp.max(jnp.abs(x), axis=over).astype(jnp.float32)
    return jnp.maximum(most, 1e-30) / how.largest


def _quantized(x: jax.Array, scale: jax.Array, how: Format) -> jax.Array:
    units = x.astype(jnp.float32) / scale
    if how.dtype == jnp.int8:
        units = jnp.round(units)
    return jnp.clip(units, -how.largest, how.largest).astype(how.dtype)


def _spread(scale: jax.Array, dims: int) -> jax.Array:
    """With `dims` more dimensions at its end."""
    return scale.reshape(*scale.shape, *(1,) * dims)


def _sums(a: jax.Array, b: jax.Array, over_a: tuple[int, ...], over_b: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    return lax.dot_general(a, b, ((over_a, over_b), ((), ())), preferred_element_type=dtype)
