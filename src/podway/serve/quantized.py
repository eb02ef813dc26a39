"""int8 weights: each matrix of a layer with one scale for every output channel.

`quantize` replaces the stacked matrices of the layers that the decoder multiplies through `Compute.project` (attention and
dense MLP) by int8, and puts their scales beside them as `<name>_scale`. A product is then (x @ int8) * scale: the matrix is
read at half the bytes of bfloat16. Embedding, norms, biases, routers and experts stay as they are. Where layers are written out,
the matrices are stored with their outputs first (`weight_layout.turn`), and so is a head of its own (`quantize_head`); elsewhere
the head stays as it is.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from podway.model.decoder import Compute, Tree, Weights, default_gather
from podway.model.params import Param, params
from podway.model.shape import ModelShape
from podway.serve.weight_layout import contract_turned


def quantizable(shape: ModelShape) -> list[Param]:
    """The parameters that `quantize` changes."""
    return [p for p in params(shape) if p.name.startswith("layers/") and p.inputs and _projected(p.name)]


def _projected(name: str) -> bool:
    return "router" not in name and "experts_" not in name


def quantize(tree: Tree, shape: ModelShape) -> Tree:
    """The tree with int8 matrices and their scales; each old matrix is let go when its new one is made."""
    layers = dict(tree["layers"])

    for param in quantizable(shape):
        name = param.name.removeprefix("layers/")
        inputs = tuple(range(1, 1 + param.inputs))

        layers[name], layers[f"{name}_scale"] = jax.jit(_shrink, static_argnums=1)(layers.pop(name), inputs)
    return {**tree, "layers": layers}


def quantize_head(tree: Tree) -> Tree:
    """The tree with an int8 head (V, D) and its scales, unless the embedding is the head."""
    if "head" not in tree:
        return tree

    def shrink(head_DV: jax.Array) -> tuple[jax.Array, jax.Array]:
        small, scale = _shrink(head_DV, (0,))
        return small.T, scale

    head, scale = jax.jit(shrink)(tree["head"])
    return {**tree, "head": head, "head_scale": scale}


def _shrink(w: jax.Array, inputs: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    wide = w.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(wide).max(axis=inputs, keepdims=True), 1e-8) / 127
    return jnp.round(wide / scale).astype(jnp.int8), jnp.squeeze(scale, inputs)


def quantized_compute(compute: Compute, turned: bool = False) -> Compute:
    """The same, for a tree that went through `quantize`, and perhaps through `turn`."""
    inner = default_gather(compute)

    def gather(param: Param, array: jax.Array) -> jax.Array:
        return array if array.dtype == jnp.int8 else inner(param, array)

    def project(name: str, x: jax.Array, weights: Weights, inputs: int) -> jax.Array:
        matrix = weights[name]
        if matrix.dtype != jnp.int8:
            return jnp.tensordot(x, matrix, axes=inputs)
        if turned:
            out = contract_turned(x, matrix, inputs)
        else:
            out = jnp.tensordot(x, matrix.astype(x.dtype), axes=inputs)
        return (out * weights[f"{name}_scale"]).astype(x.dtype)

    def head(hidden: jax.Array, tree: Tree) -> jax.Array:
        scale_V: jax.Array = tree["head_scale"]
        return contract_turned(hidden, tree["head"], 1, jnp.float32) * scale_V

    return replace(compute, gather=gather, project=project, head=head if turned else None)
