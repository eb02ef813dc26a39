"""LoRA adapters of a server, many in one batch: their matrices beside those of the model, and which row uses which.

Letters: L layers, N adapters that may be loaded, r the largest rank, T tokens of a step.

For a matrix `q` the adapters are `q_lora_a` (L, inputs..., N * r) and `q_lora_b` (L, N * r, outputs...), those of all adapters side
by side, zero where none is loaded. A token of adapter n adds

    ((x @ a) * mask) @ b        where the mask is 1 in the r columns of n and 0 elsewhere

So a step is two narrow products more for each matrix, whatever adapters its rows have; columns of others are multiplied by zero.
The cost grows with N * r, which is why both are bounded by flags. Adapter numbers count from 1; 0 is the model itself.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
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


def adapted(compute: Compute, adapter_T: jax.Array, sizes: AdapterSizes) -> Compute:
    """The same, for tokens of these adapters."""
    owner = jnp.arange(sizes.columns, dtype=jnp.int32) // sizes.rank + 1
    mask_TC = owner[None, :] == adapter_T[:, None]

    def project(name: str, x: jax.Array, weights: Weights, inputs: int) -> jax.Array:
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
        new = {name: _put(layers[name], part, begin, 1 if name.endswith(B) else -1) for name, part in columns.items()}
        return {**tree, "layers": {**layers, **new}}
    single = []
    for at, layer in enumerate(layers):
        new = {
            name: _put(layer[name], part[at], begin, 0 if name.endswith(B) else -1) for name, part in columns.items()
        }
        single.append({**layer, **new})
    return {**tree, "layers": single}


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


def _put(old: jax.Array, new: NDArray[np.float32], begin: int, axis: int) -> jax.Array:
    made: jax.Array = _update(old, new.astype(old.dtype), begin, axis % old.ndim)
    return made


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _update(old: jax.Array, new: jax.Array, begin: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(old, new, begin, axis)
