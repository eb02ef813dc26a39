"""From `MeshShape` to a jax mesh over real devices, and sharding constraints that follow the logical-axis rules.

`make_mesh` puts devices in an order that suits the network: slices outermost; then either the tile that was asked for
(contiguous boxes of the torus) or jax's own assignment of mesh axes to the torus. The caller enters it once,
`with jax.set_mesh(make_mesh(...))`; inside, `constrain` reads the mesh from the context, so that no function carries it.
With no mesh in the context every constraint is a no-op, and the same code runs on one device. Axes that a surrounding
`shard_map` has made manual are left alone, so a trainer may take over fsdp by hand and keep tensor automatic.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import msgspec
import numpy as np
import numpy.typing as npt
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from podway.catalog.slices import Slice
from podway.errors import UserError
from podway.model.layout import AXES, Axes, MeshShape, Rules, spec_on, tile_order


def make_mesh(mesh: MeshShape, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A jax mesh with the axes of `MeshShape`, over these devices (default: all of them)."""
    devices = jax.devices() if devices is None else devices
    if len(devices) != mesh.chips:
        raise UserError(
            f"mesh {mesh} needs {mesh.chips} devices, and there are {len(devices)}",
            "the sizes of the axes must multiply to the number of devices",
        )
    sizes = tuple(mesh.size(axis) for axis in AXES)
    if mesh.tile:
        grid = np.array(_tiled(devices, mesh), dtype=object).reshape(sizes)
    elif hasattr(devices[0], "coords"):
        grid = _by_torus(devices, mesh)
    else:  # CPU and GPU devices know no neighbours: in order of process and index
        grid = np.array(devices, dtype=object).reshape(sizes)
    return jax.sharding.Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _slices(devices: Sequence[jax.Device], mesh: MeshShape) -> list[list[jax.Device]]:
    """The devices of each slice; each slice must have as many."""
    groups: dict[int, list[jax.Device]] = {}
    for device in devices:
        groups.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    if len(groups) != mesh.slices:
        raise UserError(f"mesh {mesh} needs {mesh.slices} slices, and there are {len(groups)}", "change slices=")
    return [groups[index] for index in sorted(groups)]


def _tiled(devices: Sequence[jax.Device], mesh: MeshShape) -> list[jax.Device]:
    assert mesh.tile is not None
    if not hasattr(devices[0], "coords"):
        raise UserError(
            f"a tile of {mesh.tile} needs devices that lie in a torus, not {devices[0]}", "leave the tile out"
        )
    ordered = []
    for members in _slices(devices, mesh):
        at = {(*device.coords, getattr(device, "core_on_chip", 0)): device for device in members}
        bounds = tuple(max(place[i] for place in at) + 1 for i in range(len(next(iter(at)))))
        ordered += [at[place] for place in tile_order(bounds, mesh.tile)]
    return ordered


def _by_torus(devices: Sequence[jax.Device], mesh: MeshShape) -> npt.NDArray[np.object_]:
    inner = tuple(mesh.size(axis) for axis in AXES[1:])
    per_slice = []
    for members in _slices(devices, mesh):
        try:
            grid = mesh_utils.create_device_mesh(inner, members)
        except NotImplementedError:  # a mesh axis that is not a whole torus axis: let one be split
            grid = mesh_utils.create_device_mesh(inner, members, allow_split_physical_axes=True)
        per_slice.append(grid)
    return np.stack(per_slice)


def spec(*parts: str | tuple[str, ...] | None) -> PartitionSpec:
    return PartitionSpec(*parts)  # type: ignore[no-untyped-call]


@cache
def _automatic(mesh: jax.sharding.AbstractMesh) -> MeshShape:
    """The mesh of the context, with 1 for axes that are manual here (or absent)."""
    free = {
        name: size
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and name in AXES
    }
    return MeshShape(**free)


def context_mesh() -> MeshShape:
    """The mesh that this code is traced under, as far as constraints may use it; all ones where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return MeshShape() if mesh.empty else _automatic(mesh)


def context_spec(axes: Axes, dims: tuple[int, ...], rules: Rules) -> PartitionSpec:
    """Where an array with these logical axes lies on the mesh of the context; mesh axes of size 1 are left out."""
    mesh = context_mesh()
    return spec(*spec_on(axes, dims, mesh, _live(mesh, rules)))


@cache
def _live(mesh: MeshShape, rules: Rules) -> Rules:
    """The rules without mesh axes of size 1, which a spec inside a `shard_map` may not name when they are manual."""
    axes = {axis: wished for axis, wished in msgspec.structs.asdict(rules).items() if isinstance(wished, tuple)}
    live = {axis: tuple(m for m in wished if mesh.size(m) > 1) for axis, wished in axes.items()}
    return msgspec.structs.replace(rules, **live)


def constrain(x: jax.Array, axes: Axes, rules: Rules) -> jax.Array:
    """Ask the compiler to lay `x` out by the rules; nothing where no mesh is in the context."""
    if context_mesh().chips == 1:
        return x
    laid_out: jax.Array = jax.lax.with_sharding_constraint(x, context_spec(axes, x.shape, rules))  # type: ignore[no-untyped-call]
    return laid_out


def per_chip(f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`f` on the piece of each chip of the mesh of the context, with collectives written out; `f` itself without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return f
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    free = {name for name, kind in kinds if kind == AxisType.Auto}
    if not free:
        return f
    # The replication check refuses kernels that it cannot see into; the tests compare every mesh with one device.
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=free, check_vma=False)


def split_axes() -> tuple[str, ...]:
    """The axes of the whole mesh that have more than one chip, for code inside `per_chip`."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True) if size > 1)


def mesh_axes(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in one part of a spec."""
    return part if isinstance(part, tuple) else (part,) if part else ()


def summed(x: jax.Array, axis: str | tuple[str, ...], *, scatter: int | None = None) -> jax.Array:
    """The sum over mesh axes inside `per_chip`, whole on every chip or scattered along a dimension."""
    total: jax.Array = (
        jax.lax.psum(x, axis)  # type: ignore[no-untyped-call]
        if scatter is None
        else jax.lax.psum_scatter(x, axis, scatter_dimension=scatter, tiled=True)  # type: ignore[no-untyped-call]
    )
    return total


def abstract_array(dims: Sequence[int], dtype: DTypeLike, sharding: Sharding | None = None) -> jax.Array:
    """What tracing and lowering need of an array: shape, dtype and where it lies. Typed as the array that it stands for."""
    stand_in: jax.Array = jax.ShapeDtypeStruct(tuple(dims), dtype, sharding=sharding)  # type: ignore[no-untyped-call, assignment]
    return stand_in


def named_sharding(mesh: jax.sharding.Mesh, axes: Axes, dims: tuple[int, ...], rules: Rules) -> NamedSharding:
    """The sharding that an array is stored with on a mesh made by `make_mesh`."""
    return NamedSharding(mesh, spec(*spec_on(axes, dims, _automatic(mesh.abstract_mesh), rules)))


def described(slice: Slice, slices: int = 1) -> list[jax.Device]:
    """The devices of a slice (or several), as libtpu describes them."""
    asked: dict[str, object] = {}
    if any(slice.wrap):
        asked["wrap"] = [int(w) for w in (*slice.wrap, False)[:3]]
    if slice.generation == "v4":
        asked["chip_config_name"] = "megacore"  # one device a chip, as the runtime shows it
    if slices > 1:
        asked["num_slices"] = slices
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=slice.aot_name, **asked).devices)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        first = str(error).splitlines()[0][:200]
        raise UserError(
            f"libtpu cannot describe {slice.aot_name}: {first}", "try another slice, or: pip install 'podway[rehearse]'"
        ) from None
