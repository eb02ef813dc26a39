"""Data parallelism by hand: what is gathered, what is scattered, and where every array of the state lies.

Letters: B batch, S length, D d_model, V vocab.

The loss and its gradient run inside `shard_map` over the axes that split the batch (`MANUAL`); the other axes (expert,
context, tensor) stay with the compiler. Written out this way, a weight that fsdp splits is all-gathered where a layer
uses it, and its gradient leaves the layer as a reduce-scatter, because that is what the transpose of an all-gather is.
Left alone, the TPU compiler reduces the whole gradient on every chip and throws most of it away. It does the same with
one reduce-scatter over a whole 2D torus (seen in the program that libtpu 0.0.51 makes for v5e:16x16), and keeps those
that run along one ring; so gradients are scattered ring by ring (`rings_of`).
What data and slices repeat is summed once a step, after all microbatches. Slices may share the state as fsdp does inside each
(`mesh.state_over_slices`): then this sum is scattered over them, and weights are gathered from them at the start of a step.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from msgspec.structs import replace

from podway.model.decoder import Compute, Gather, Tree
from podway.model.embedding import look_up
from podway.model.layout import Axes, MeshShape, Rules, Spec, spec_on
from podway.model.mesh import context_mesh, context_spec, mesh_axes, named_sharding, per_chip, spec
from podway.model.params import Param, params
from podway.model.shape import ModelShape

P = ParamSpec("P")
T = TypeVar("T")

MANUAL = ("slices", "data", "fsdp")

Leaves = dict[str, Any]  # arrays by their path, 'layers/q'


def flat(tree: Tree) -> Leaves:
    """A tree of dicts as one dict by path."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        found["/".join(str(key.key) for key in path)] = leaf
    return found


def mesh_shape(mesh: jax.sharding.Mesh) -> MeshShape:
    """The sizes of a jax mesh made by `make_mesh`."""
    return MeshShape(**mesh.shape)


def stored_spec(name: str, dims: tuple[int, ...], shape: ModelShape, mesh: MeshShape, rules: Rules) -> Spec:
    """Where a leaf of the parameters lies; what the table does not know (LoRA, int8 scales) is whole everywhere."""
    param = _table(shape).get(name)
    return (None,) * len(dims) if param is None else spec_on(param.axes, param.dims, mesh, rules)


def manual_part(whole: Spec) -> PartitionSpec:
    """The axes of a spec that `shard_map` handles here."""
    parts = []
    for part in whole:
        kept = tuple(axis for axis in mesh_axes(part) if axis in MANUAL)
        parts.append(kept if len(kept) > 1 else kept[0] if kept else None)
    return spec(*parts)


def is_split(mesh: MeshShape) -> bool:
    """Whether any axis of MANUAL has more than one device."""
    return any(mesh.size(axis) > 1 for axis in MANUAL)


def rings_of(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """The sizes of the straight lines of chips that the fsdp axis is made of, outermost first; their product is fsdp.

    (16, 16) for fsdp=256 over a v5e-256; one line where devices know no neighbours.
    """
    line = np.moveaxis(mesh.devices, mesh.axis_names.index("fsdp"), -1).reshape(-1, mesh.shape["fsdp"])[0]
    if not hasattr(line[0], "coords"):
        return (len(line),)
    places = [(*device.coords, getattr(device, "core_on_chip", 0)) for device in line]
    rings: list[int] = []
    while len(places) > 1:
        run = next((i for i in range(2, len(places)) if _directions(places[: i + 1]) > 1), len(places))
        if len(places) % run or any(_directions(places[i : i + run]) > 1 for i in range(0, len(places), run)):
            return (len(line),)
        rings.append(run)
        places = places[::run]
    return tuple(reversed(rings)) or (1,)


def _directions(places: Sequence[tuple[int, ...]]) -> int:
    """How many coordinates change among these places."""
    return sum(len(set(along)) > 1 for along in zip(*places, strict=True))


def _gather_fsdp(x: jax.Array, dim: int, rings: tuple[int, ...]) -> jax.Array:
    """All-gather over fsdp along `dim`; the gradient is reduce-scattered over one ring after the other."""

    @jax.custom_vjp
    def gather(x: jax.Array) -> jax.Array:
        return _gather_pieces(x, dim)

    gather.defvjp(lambda x: (gather(x), None), lambda _, g: (_scatter_sums(g, dim, rings),))
    whole: jax.Array = gather(x)
    return whole


def _gather_pieces(x: jax.Array, dim: int) -> jax.Array:
    gathered: jax.Array = lax.all_gather(x, "fsdp", axis=dim, tiled=True)
    return gathered


def _scatter_sums(g: jax.Array, dim: int, rings: tuple[int, ...]) -> jax.Array:
    # The compiler keeps a reduce-scatter of rows and unmakes one of columns, so the split dimension goes first.
    rows = jnp.moveaxis(g, dim, 0)
    inside = prod(rings)
    for size in rings:
        blocks, inside = inside, inside // size
        starts = [start + i for start in range(0, prod(rings), blocks) for i in range(inside)]
        groups = [[start + inside * k for k in range(size)] for start in starts] if len(rings) > 1 else None
        rows = lax.psum_scatter(rows, "fsdp", scatter_dimension=0, axis_index_groups=groups, tiled=True)  # type: ignore[no-untyped-call]
    return jnp.moveaxis(rows, 0, dim)


class Exchange(NamedTuple):
    """How a weight that fsdp splits becomes whole, and a device's gradient of the whole the sum of its piece."""

    gather: Callable[[jax.Array], jax.Array]
    scatter: Callable[[jax.Array], jax.Array]
    own_outputs: Callable[[jax.Array], jax.Array]  # of numbers for each output of the whole, those of a device's piece


def exchange_of(param: Param, mesh: MeshShape, rings: tuple[int, ...], rules: Rules) -> Exchange:
    """The exchange of one layer of a stacked parameter, for a product that gathers by itself (`quantized.py`)."""
    axes = param.axes[1:]
    split = spec_on(param.axes, param.dims, mesh, rules)[1:]
    dims = [dim for dim, part in enumerate(split) if mesh.fsdp > 1 and "fsdp" in mesh_axes(part)]

    def through(one: Callable[..., jax.Array], **how: object) -> Callable[[jax.Array], jax.Array]:
        def run(x: jax.Array) -> jax.Array:
            for dim in dims:
                x = _own(partial(one, dim=dim, **how), x, axes, rules)
            return x

        return run

    def own_outputs(x: jax.Array) -> jax.Array:
        for dim in (dim - param.inputs for dim in dims if dim >= param.inputs):
            size = x.shape[dim] // mesh.fsdp
            x = lax.dynamic_slice_in_dim(x, lax.axis_index("fsdp") * size, size, dim)
        return x

    return Exchange(through(_gather_pieces), through(_scatter_sums, rings=rings), own_outputs)


def gatherer(
    compute: Compute, mesh: MeshShape, rings: tuple[int, ...], elsewhere: Collection[str] = frozenset()
) -> Gather:
    """The decoder's `gather`: cast to the compute dtype, then all-gather what fsdp split.

    Matrices of `elsewhere` stay as they are: the products with them gather them.
    """

    def gather(param: Param, array: jax.Array) -> jax.Array:
        if param.axes[-1] == "norm" and not param.name.endswith("_bias"):
            return array  # norms work in float32
        if param.name.removeprefix("layers/") in elsewhere:
            return array
        whole = spec_on(param.axes, param.dims, mesh, compute.rules)
        if array.dtype != jnp.int8:  # int8 weights travel as they are, and are widened when they are used
            array = array.astype(compute.dtype)
        for dim, part in enumerate(whole[len(whole) - array.ndim :]):  # inside the scan the layer axis is gone
            if mesh.fsdp > 1 and "fsdp" in mesh_axes(part):
                gather_piece = partial(_gather_fsdp, dim=dim, rings=rings)
                array = _own(gather_piece, array, param.axes[len(param.axes) - array.ndim :], compute.rules)
        return array.astype(compute.dtype)

    return gather


def _own(f: Callable[[jax.Array], jax.Array], x: jax.Array, axes: Axes, rules: Rules) -> jax.Array:
    """`f` of what this device holds of the axes beside fsdp.

    By hand over those too: the compiler would gather a weight whole that tensor or expert splits, and reduce its gradient
    whole (seen in the programs of libtpu 0.0.51 for fsdp=16,tensor=16: 16 times the bytes of both).
    """
    others = context_mesh()
    if others.chips == 1:
        return f(x)
    where = context_spec(axes, x.shape, replace(rules, embed=()))
    own: jax.Array = per_chip(f, in_specs=(where,), out_specs=where)(x)
    return own


def embed(table: jax.Array, tokens_BS: jax.Array, shape: ModelShape, compute: Compute, mesh: MeshShape) -> jax.Array:
    """Embeddings, with neither the table nor its gradient ever whole on a device.

    Each device holds some channels of every token. It looks those up for the sequences of all its fsdp neighbours, and
    an all-to-all trades (all sequences, some channels) for (own sequences, all channels).
    """
    table = table.astype(compute.dtype)
    split = mesh.fsdp > 1 and "fsdp" in mesh_axes(spec_on(("embed",), (shape.d_model,), mesh, compute.rules)[0])
    if split:
        tokens_BS = lax.all_gather(tokens_BS, "fsdp", axis=0, tiled=True)
    x_BSD = look_up(table, tokens_BS, compute.rules)
    if split:
        x_BSD = lax.all_to_all(x_BSD, "fsdp", split_axis=0, concat_axis=2, tiled=True)  # type: ignore[no-untyped-call]
    return x_BSD * jnp.asarray(shape.embedding.scale, compute.dtype)


def sum_gradients(gradients: Tree, specs: Mapping[str, Spec], mesh: MeshShape) -> Tree:
    """Sum each gradient over the devices that have the same piece of its weight; where slices share it, each keeps its part."""
    names = flat(gradients)

    def one(name: str, g: jax.Array) -> jax.Array:
        scattered = {axis for part in specs[name] for axis in mesh_axes(part)}
        over = tuple(axis for axis in MANUAL if axis not in scattered and mesh.size(axis) > 1)
        g = lax.psum(g, over) if over else g  # type: ignore[no-untyped-call]
        for dim, part in enumerate(specs[name]):
            if "slices" in mesh_axes(part):
                g = lax.psum_scatter(g, "slices", scatter_dimension=dim, tiled=True)  # type: ignore[no-untyped-call]
        return g

    return unflat({name: one(name, g) for name, g in names.items()}, gradients)


def unflat(leaves: Leaves, like: Tree) -> Tree:
    """The leaves of `flat`, in the tree they came from."""
    done: Tree = jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in flat(like)])
    return done


def laid_out(tree: Tree, shape: ModelShape, mesh: jax.sharding.Mesh, rules: Rules) -> Tree:
    """The sharding of each array in a tree of parameters."""
    whole = NamedSharding(mesh, spec())
    table = _table(shape)

    def one(name: str) -> NamedSharding:
        param = table.get(name)
        return whole if param is None else named_sharding(mesh, param.axes, param.dims, rules)

    return unflat({name: one(name) for name in flat(tree)}, tree)


def state_shardings(state: object, shardings: Mapping[str, NamedSharding], dims: Mapping[str, tuple[int, ...]]) -> Tree:
    """The sharding of every leaf of an optimizer's state: that of its parameter where it has its dimensions.

    Counters and the factored rows and columns of Adafactor are small, and whole on every device.
    """
    whole = NamedSharding(next(iter(shardings.values())).mesh, spec())

    def one(path: tuple[object, ...], leaf: jax.Array) -> NamedSharding:
        keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        name = "/".join(keys)
        return shardings[name] if name in shardings and tuple(leaf.shape) == dims[name] else whole

    found: Tree = jax.tree_util.tree_map_with_path(one, state)
    return found


def on_each(f: Callable[P, T], mesh: MeshShape, in_specs: object, out_specs: object) -> Callable[P, T]:
    """`f` by hand over the axes of MANUAL; `f` itself where none of them is split."""
    if not is_split(mesh):
        return f
    mapped: Callable[P, T] = jax.shard_map(
        f, in_specs=in_specs, out_specs=out_specs, axis_names=set(MANUAL), check_vma=False
    )
    return mapped


def _table(shape: ModelShape) -> dict[str, Param]:
    return {param.name: param for param in params(shape)}
