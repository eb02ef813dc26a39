"""LoRA: small matrices trained beside frozen ones, and frozen ones kept in int8.

Letters: L layers, E experts, r rank.

For a matrix `q` of a layer the adapters are `layers/q_lora_a` (L, inputs..., r) and `layers/q_lora_b` (L, r, outputs...):

    y = x @ q + (alpha / rank) * (x @ a) @ b

The matrices of experts have a pair for each: `layers/experts_up_lora_a` (L, E, inputs, r). `b` starts at zero, so training starts at
the base model. An int8 matrix has `layers/q_int8_scale` (L, outputs...) beside it: each output column is stored as whole numbers
from -127 to 127 times its scale. Adapters are small, and whole on every device.
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from podway.errors import UserError
from podway.model.adapter_files import matrices
from podway.model.decoder import Project, Tree, Weights, Widen, contract
from podway.model.grouped import Adapted, Matrix
from podway.model.params import Param, params
from podway.model.shape import ModelShape
from podway.task.fields import did_you_mean
from podway.train.config import LoraConfig

A, B, _SCALE = "_lora_a", "_lora_b", "_int8_scale"


def is_scale(name: str) -> bool:
    """Whether a leaf holds the scales of int8 weights, which stay in float32."""
    return name.endswith(_SCALE)


def adaptable(shape: ModelShape) -> dict[str, Param]:
    """The matrices that adapters can stand beside and that an int8 base keeps in int8: those of `matrices`, and the experts'."""
    names = ("experts_gate", "experts_up", "experts_down")
    table = {param.name.removeprefix("layers/"): param for param in params(shape)}
    return matrices(shape) | {name: table[name] for name in names if name in table}


def targets_of(config: LoraConfig, shape: ModelShape) -> dict[str, Param]:
    """The matrices that are to be adapted."""
    known = adaptable(shape)
    for name in config.targets:
        if name not in known:
            raise UserError(f"lora.targets: this model has no matrix {name!r}", did_you_mean(name, known))
    if not config.targets:
        raise UserError("lora.targets is empty", "name matrices, such as q, k, v, o: " + ", ".join(known))
    return {name: known[name] for name in config.targets}


def init(config: LoraConfig, shape: ModelShape, key: jax.Array) -> Tree:
    """Fresh adapters, in float32."""
    layers = {}
    for i, (name, param) in enumerate(targets_of(config, shape).items()):
        stacks, inward, outward = param.split_dims
        noise = jax.random.normal(jax.random.fold_in(key, i), (*stacks, *inward, config.rank), jnp.float32)
        layers[name + A] = noise * prod(inward) ** -0.5
        layers[name + B] = jnp.zeros((*stacks, config.rank, *outward), jnp.float32)
    return {"layers": layers}


def joined(trained: Tree, frozen: Tree) -> Tree:
    """One tree of both, as the decoder takes it."""
    both = {**frozen, **trained}
    if "layers" in trained and "layers" in frozen:
        base, adapters = frozen["layers"], trained["layers"]
        if isinstance(base, dict):
            both["layers"] = {**base, **adapters}
        else:  # the layers are written out
            both["layers"] = [{**b, **a} for b, a in zip(base, adapters, strict=True)]
    return both


def projection(config: LoraConfig) -> Project:
    """The decoder's `project`, with adapters and int8 scales where a matrix has them."""
    by = config.alpha / config.rank

    def project(name: str, x: jax.Array, weights: Weights, inputs: int) -> jax.Array:
        out = contract(name, x, weights, inputs)
        if name + _SCALE in weights:
            out = (out * weights[name + _SCALE]).astype(x.dtype)
        if name + A in weights:
            low = jnp.tensordot(x, weights[name + A].astype(x.dtype), axes=inputs)
            out = out + by * jnp.tensordot(low, weights[name + B].astype(x.dtype), axes=1)
        return out

    return project


def widening(config: LoraConfig) -> Widen:
    """The decoder's `widen`: a stack of experts, times its int8 scales and with its adapters where it has them."""

    def widen(name: str, weights: Weights) -> Matrix:
        stack = weights[name]
        if name + _SCALE in weights:
            stack = (stack * weights[name + _SCALE][:, None, :]).astype(stack.dtype)
        if name + A not in weights:
            return stack
        a, b = weights[name + A].astype(stack.dtype), weights[name + B].astype(stack.dtype)
        return Adapted(stack, a, config.alpha / config.rank * b)

    return widen


def freeze(tree: Tree, config: LoraConfig, shape: ModelShape) -> Tree:
    """The base weights as they are kept: in one dtype, or the matrices of the layers (experts too) in int8."""
    if config.base != "int8":
        plain: Tree = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(config.base)), tree)
        return plain
    kept: dict[str, Any] = {}
    for name, leaf in tree["layers"].items():
        param = adaptable(shape).get(name)
        if param is None:
            kept[name] = leaf.astype(jnp.bfloat16)
        else:
            kept[name], kept[name + _SCALE] = _to_int8(leaf, param)
    ends = {name: leaf.astype(jnp.bfloat16) for name, leaf in tree.items() if name != "layers"}
    return {**ends, "layers": kept}


def _to_int8(leaf: jax.Array, param: Param) -> tuple[jax.Array, jax.Array]:
    wide = leaf.astype(jnp.float32)
    inputs = _input_axes(param)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=inputs), 1e-30) / 127
    spread = jnp.expand_dims(scale, inputs)
    return jnp.clip(jnp.round(wide / spread), -127, 127).astype(jnp.int8), scale


def _input_axes(param: Param) -> tuple[int, ...]:
    """After the stacked ones: layers, and experts."""
    return tuple(range(param.stacked, param.stacked + param.inputs))


def merge(trained: Tree, frozen: Tree, config: LoraConfig, shape: ModelShape) -> Tree:
    """The model that base and adapters make together, as plain weights."""
    table, adapters = adaptable(shape), trained["layers"]
    layers = {}
    for name, leaf in frozen["layers"].items():
        if is_scale(name):
            continue
        wide = leaf.astype(jnp.float32)
        if name in table and name + _SCALE in frozen["layers"]:
            wide = wide * jnp.expand_dims(frozen["layers"][name + _SCALE], _input_axes(table[name]))
        if name + A in adapters:
            a, b = adapters[name + A].astype(jnp.float32), adapters[name + B].astype(jnp.float32)
            stacks = table[name].split_dims.stacks
            low, high = a.reshape(*stacks, -1, config.rank), b.reshape(*stacks, config.rank, -1)
            wide = wide + config.alpha / config.rank * (low @ high).reshape(wide.shape)
        layers[name] = wide
    return {**{name: leaf for name, leaf in frozen.items() if name != "layers"}, "layers": layers}
