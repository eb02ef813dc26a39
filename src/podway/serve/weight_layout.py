"""Weights laid out for one device that is bound by launching and reading: layers as a list, matrices side by side.

`unstack` takes the stack of the layers apart: a scan would copy each layer's weights out of it at every turn (measured on an
H200: twice the time of a step). `fuse` then puts matrices that multiply the same vector side by side, so that one product
reads them all: queries, keys and values become `qkv`, gate and up become `gate_up`. Their biases and the scales of int8
follow. The decoder takes a layer either way.

`turn_heads` is for layers that are scanned on TPUs: the matrices of queries, keys and values become (heads, channels, inputs), as that
compiler reads them. Stored otherwise, it copies the whole stack in every dispatch.

`turn` stores matrices of int8 with the outputs first, for `contract_turned`: the compiler's product of a few rows then reads them up to
1.5 times as fast (docs/perf-notes.md).
"""

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from podway.model.decoder import Compute, Tree, Weights, default_gather
from podway.model.layout import SERVE_RULES
from podway.model.mesh import named_sharding
from podway.model.params import Param, params
from podway.model.shape import ModelShape

GROUPS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "shared_gate_up": ("shared_gate", "shared_up")}
HEADS = ("q", "k", "v")
_PARTS = {"": 1, "_bias": 0, "_scale": 0}  # what belongs to a matrix, and the axis of its outputs in one layer


def unstack(tree: Tree, layers: int) -> Tree:
    """The layers as a list, one array at a time: a second copy of all weights would not fit."""
    stacked = dict(tree["layers"])
    single: list[dict[str, jax.Array]] = [{} for _ in range(layers)]
    for name in list(stacked):
        array = stacked.pop(name)
        for number in range(layers):
            single[number][name] = array[number]
        array.delete()
    return {**tree, "layers": single}


def fuse(tree: Tree) -> Tree:
    """The tree of `unstack` with matrices side by side; each old one is let go when its new one is made."""
    return {**tree, "layers": [_fuse_layer(dict(layer)) for layer in tree["layers"]]}


def _fuse_layer(layer: Weights) -> Weights:
    for whole, names in GROUPS.items():
        for part, axis in _PARTS.items():
            if all(name + part in layer for name in names):
                old = [layer.pop(name + part) for name in names]
                layer[whole + part] = jnp.concatenate(old, axis).block_until_ready()
                for array in old:
                    array.delete()
    return layer


_OUTPUTS_FIRST = (0, 2, 3, 1)  # (L, D, H, K) as (L, H, K, D)


def turned_place(param: Param) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Dimensions and axes of one of `HEADS` after `turn_heads`."""
    return tuple(param.dims[i] for i in _OUTPUTS_FIRST), tuple(param.axes[i] for i in _OUTPUTS_FIRST)


def turn_heads(tree: Tree, shape: ModelShape, mesh: jax.sharding.Mesh | None) -> Tree:
    """The stacked tree with the matrices of heads turned, one array at a time."""
    layers, table = dict(tree["layers"]), {param.name: param for param in params(shape)}
    for name in HEADS:
        dims, axes = turned_place(table[f"layers/{name}"])
        place = None if mesh is None else named_sharding(mesh, axes, dims, SERVE_RULES)
        turned = jax.jit(lambda array: array.transpose(_OUTPUTS_FIRST), out_shardings=place)
        layers[name] = turned(layers.pop(name)).block_until_ready()
    return {**tree, "layers": layers}


def over_turned_heads(compute: Compute) -> Compute:
    """The same, for a tree that went through `turn_heads`."""
    inner = compute.gather or default_gather(compute)

    def gather(param: Param, array: jax.Array) -> jax.Array:
        if param.name.removeprefix("layers/") not in HEADS:
            return inner(param, array)
        return array if array.dtype == jnp.int8 else array.astype(compute.dtype)

    def project(name: str, x: jax.Array, weights: Weights, inputs: int) -> jax.Array:
        if name not in HEADS:
            return compute.project(name, x, weights, inputs)
        matrix_HKD, scale = weights[name], weights.get(f"{name}_scale")
        out = jnp.tensordot(x, matrix_HKD.astype(x.dtype), axes=((x.ndim - 1,), (2,)))
        return out if scale is None else (out * scale).astype(x.dtype)

    return replace(compute, gather=gather, project=project)


def turn(tree: Tree, shape: ModelShape) -> Tree:
    """The tree of `fuse` with the int8 matrices of its layers as (outputs..., inputs...), one at a time."""
    table = {param.name.removeprefix("layers/"): param.inputs for param in params(shape)}
    inputs = table | {whole: table[names[0]] for whole, names in GROUPS.items() if names[0] in table}
    layers = []
    for layer in tree["layers"]:
        turned = dict(layer)
        for name, array in layer.items():
            if array.dtype == jnp.int8:
                count = inputs[name]
                last = range(array.ndim - count, array.ndim)
                turned[name] = jnp.moveaxis(array, range(count), last).block_until_ready()
                array.delete()
        layers.append(turned)
    return {**tree, "layers": layers}


def contract_turned(x: jax.Array, matrix: jax.Array, inputs: int, dtype: DTypeLike | None = None) -> jax.Array:
    """x (..., inputs...) times matrix (outputs..., inputs...), over the last `inputs` dimensions of both."""
    outputs = matrix.shape[: matrix.ndim - inputs]
    rows_RK, matrix_NK = x.reshape(-1, prod(x.shape[x.ndim - inputs :])), matrix.reshape(prod(outputs), -1)
    across = (((1,), (1,)), ((), ()))
    made = jax.lax.dot_general(rows_RK, matrix_NK.astype(x.dtype), across, preferred_element_type=dtype)
    return made.reshape(*x.shape[: x.ndim - inputs], *outputs)
