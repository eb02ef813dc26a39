"""LoRA adapters of a server, many in one batch: their matrices beside those of the model, and which row uses which.

Letters: L layers, N adapters that may be loaded, r the largest rank, T tokens of a step.

For a matrix `q` the adapters are `q_lora_a` (L, inputs..., N * r) and `q_lora_b` (L, N * r, outputs...), those of all adapters side
by side, zero where none is loaded. A token of adapter n adds

    ((x @ a) * mask) @ b        where the mask is 1 in the r columns of n and 0 elsewhere

So a step is two narrow products more for each matrix, whatever adapters its rows have; columns of others are multiplied by zero.
The cost grows with N * r, which is why both are bounded by flags. Adapter numbers count from 1; 0 is the model itself.

A device that is bound by the number of its kernels gets `join`: `a` of the matrices that stand side by side are columns of the product
that is made anyway, `qkv` (inputs, outputs + 3 * N * r), and what they make is added in one kernel where rows are few
(`adapters_nvidia.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from podway.model.adapter_files import Adapter, matrices
from podway.model.decoder import Compute, Tree, Weights
from podway.model.layout import SERVE_RULES
from podway.model.mesh import named_sharding
from podway.model.shape import ModelShape
from podway.serve.adapters_nvidia import add_adapters, suits
from podway.serve.cache_layout import Plan
from podway.serve.weight_layout import GROUPS

A, B = "_lora_a", "_lora_b"


class AdapterSizes(msgspec.Struct, frozen=True):
    """How many adapters may be loaded at once, and the largest rank of one."""

    count: int
    rank: int

    @property
    def columns(self) -> int:
        return self.count * self.rank


class _Place(NamedTuple):
    dims: tuple[int, ...]
    axes: tuple[str | None, ...]


def _places(shape: ModelShape, sizes: AdapterSizes) -> dict[str, _Place]:
    """Every array of adapters, stacked over the layers."""
    found = {}
    for name, param in matrices(shape).items():
        cut = 1 + param.inputs
        found[name + A] = _Place((*param.dims[:cut], sizes.columns), (*param.axes[:cut], None))
        found[name + B] = _Place((param.dims[0], sizes.columns, *param.dims[cut:]), (None, None, *param.axes[cut:]))
    return found


def adapter_bytes(shape: ModelShape, sizes: AdapterSizes, itemsize: int) -> int:
    """Of all adapters together; split over devices only in part, so this is counted whole."""
    return sum(prod(place.dims) for place in _places(shape, sizes).values()) * itemsize


def with_room(
    tree: Tree, shape: ModelShape, sizes: AdapterSizes, dtype: DTypeLike, mesh: jax.sharding.Mesh | None
) -> Tree:
    """The tree (layers stacked) with the arrays of adapters, none loaded."""
    empty = {}
    for name, (dims, axes) in _places(shape, sizes).items():
        where = None if mesh is None else named_sharding(mesh, axes, dims, SERVE_RULES)
        empty[name] = jax.jit(lambda dims=dims: jnp.zeros(dims, dtype), out_shardings=where)()
    return {**tree, "layers": {**tree["layers"], **empty}}


def join(tree: Tree, shape: ModelShape) -> Tree:
    """The tree of `fuse` with `a` in the matrices and `b` side by side; each old array is let go when its new one is made."""
    return {**tree, "layers": [_join_layer(dict(layer), shape) for layer in tree["layers"]]}


def _join_layer(layer: Weights, shape: ModelShape) -> Weights:
    for name in list(layer):
        parts = GROUPS.get(name, (name,))
        if all(part + A in layer for part in parts):
            flat = [layer.pop(name).reshape(-1, sum(_widths(shape, name)))]
            flat += [layer.pop(part + A).reshape(flat[0].shape[0], -1) for part in parts]
            layer[name] = jnp.concatenate(flat, axis=1).block_until_ready()
            layer[name + B] = jnp.concatenate([layer.pop(part + B) for part in parts], axis=1).block_until_ready()
    return layer


def _widths(shape: ModelShape, name: str) -> tuple[int, ...]:
    """Outputs of the matrices that are side by side under this name."""
    table = matrices(shape)
    return tuple(prod(table[part].dims[1 + table[part].inputs :]) for part in GROUPS.get(name, (name,)))


def adapted(compute: Compute, shape: ModelShape, adapter_T: jax.Array, sizes: AdapterSizes, plan: Plan) -> Compute:
    """The same, for tokens of these adapters."""
    owner = jnp.arange(sizes.columns, dtype=jnp.int32) // sizes.rank + 1
    mask_TC = owner[None, :] == adapter_T[:, None]

    def joined(name: str, x: jax.Array, weights: Weights) -> jax.Array:
        """(T, outputs...)"""
        matrix, b = weights[name], weights[name + B]
        widths, b_CN = _widths(shape, name), b.reshape(b.shape[0], -1)
        made = x.reshape(-1, matrix.shape[0]) @ matrix
        if plan.backend == "nvidia" and suits(made.shape[0], widths, sizes.columns, sizes.rank):
            return add_adapters(made, b_CN, adapter_T, widths, sizes.rank, plan.interpret).reshape(-1, *b.shape[1:])
        ends = list(accumulate(widths))
        outers = jnp.split(b_CN, ends[:-1], axis=1)
        inners = jnp.split(made[:, ends[-1] :], len(widths), axis=1)
        added = [jnp.where(mask_TC, inner, 0) @ outer for inner, outer in zip(inners, outers, strict=True)]
        return (made[:, : ends[-1]] + jnp.concatenate(added, axis=1)).reshape(-1, *b.shape[1:])

    def project(name: str, x: jax.Array, weights: Weights, inputs: int) -> jax.Array:
        if name + B in weights and name + A not in weights:
            made = joined(name, x, weights)
            return made.reshape(*x.shape[: x.ndim - inputs], *made.shape[1:])
        out = compute.project(name, x, weights, inputs)
        parts = GROUPS.get(name, (name,))
        if parts[0] + A not in weights:
            return out
        added = []
        for part in parts:
            inner = jnp.tensordot(x, weights[part + A], axes=inputs)
            added.append(jnp.tensordot(jnp.where(mask_TC, inner, 0), weights[part + B], axes=1))
        return out + (added[0] if len(added) == 1 else jnp.concatenate(added, axis=2)).astype(out.dtype)

    return replace(compute, project=project)


def loaded(tree: Tree, shape: ModelShape, sizes: AdapterSizes, number: int, adapter: Adapter | None) -> Tree:
    """The tree with an adapter in its columns, or none; the arrays it had before are given up."""
    begin = (number - 1) * sizes.rank
    columns = _columns(shape, sizes, adapter)
    layers = tree["layers"]
    if isinstance(layers, dict):
        new = {
            name: _put(layers[name], part, (0, begin) if name.endswith(B) else (*[0] * (part.ndim - 1), begin))
            for name, part in columns.items()
        }
        return {**tree, "layers": {**layers, **new}}
    single = []
    for at, layer in enumerate(layers):
        changed = dict(layer)
        for name, part in columns.items():
            place, before = _place_in_layer(shape, sizes, layer, name)
            one = part[at] if name.endswith(B) or place == name else part[at].reshape(-1, sizes.rank)
            starts = (begin, before) if name.endswith(B) else (*[0] * (one.ndim - 1), before + begin)
            changed[place] = _put(changed[place], one, starts)
        single.append(changed)
    return {**tree, "layers": single}


def _place_in_layer(shape: ModelShape, sizes: AdapterSizes, layer: Weights, name: str) -> tuple[str, int]:
    """In which array of a layer the part `name` of the adapters is, and after how many columns (of `b`: outputs) it begins."""
    part = name.removesuffix(A).removesuffix(B)
    if part + A in layer:
        return name, 0
    whole = next((whole for whole, parts in GROUPS.items() if part in parts and whole in layer), part)
    parts = GROUPS.get(whole, (part,))
    number = parts.index(part)
    if name.endswith(A):
        return whole, sum(_widths(shape, whole)) + number * sizes.columns
    table = matrices(shape)
    return whole + B, sum(table[before].dims[1 + table[before].inputs] for before in parts[:number])


def _columns(shape: ModelShape, sizes: AdapterSizes, adapter: Adapter | None) -> Mapping[str, NDArray[np.float32]]:
    """What goes into the columns of one adapter: padded with zeros to the largest rank, heads repeated as the model's are."""
    found: dict[str, NDArray[np.float32]] = {}
    one = AdapterSizes(1, sizes.rank)
    for name, place in _places(shape, one).items():
        new = np.zeros(place.dims, np.float32)
        pair = adapter.pairs.get(name.removesuffix(A).removesuffix(B)) if adapter is not None else None
        if pair is not None and adapter is not None and name.endswith(A):
            new[..., : adapter.rank] = pair[0]
        elif pair is not None and adapter is not None:
            repeats = place.dims[2] // pair[1].shape[2]  # key/value heads that are on several devices
            new[:, : adapter.rank] = np.repeat(pair[1], repeats, axis=2)
        found[name] = new
    return found


def _put(old: jax.Array, new: NDArray[np.float32], starts: tuple[int, ...]) -> jax.Array:
    made: jax.Array = _update(old, new.astype(old.dtype), (*starts, *[0] * (old.ndim - len(starts))))
    return made


@partial(jax.jit, donate_argnums=0)
def _update(old: jax.Array, new: jax.Array, starts: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(old, new, starts)
