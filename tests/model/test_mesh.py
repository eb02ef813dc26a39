"""The order of devices: boxes of neighbours in a torus, slice after slice."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from podway.errors import UserError
from podway.model.layout import AXES, TRAIN_RULES, MeshShape
from podway.model.mesh import _tiled, constrain, context_mesh, context_spec, make_mesh


def torus(bounds: tuple[int, ...], slices: int = 1, cores: int = 1) -> list[Any]:
    """Devices as libtpu describes them, in an order that helps nobody."""
    places = [(s, c, place) for s in range(slices) for c in range(cores) for place in np.ndindex(*bounds)]
    return [SimpleNamespace(slice_index=s, core_on_chip=c, coords=place) for s, c, place in reversed(places)]


def test_a_tile_is_a_box_of_neighbours() -> None:
    mesh = MeshShape(data=4, tensor=16, tile=(4, 2, 2))
    groups = np.array(_tiled(torus((4, 4, 4)), mesh), dtype=object).reshape(4, 16)
    for group in groups:
        spans = [len({device.coords[axis] for device in group}) for axis in range(3)]
        assert spans == [4, 2, 2]


def test_both_cores_of_a_chip_come_first() -> None:
    """On v3 a chip has two devices; the tile (1, 1, 1, 2) is one chip."""
    mesh = MeshShape(data=16, tensor=2, tile=(1, 1, 1, 2))
    groups = np.array(_tiled(torus((4, 4, 1), cores=2), mesh), dtype=object).reshape(16, 2)
    assert all(a.coords == b.coords and a.core_on_chip != b.core_on_chip for a, b in groups)


def test_slices_are_outermost() -> None:
    mesh = MeshShape(slices=2, data=2, tensor=8, tile=(2, 4))
    ordered = _tiled(torus((4, 4, 1), slices=2), mesh)
    assert [device.slice_index for device in ordered] == [0] * 16 + [1] * 16


def test_a_tile_needs_a_torus(eight_devices: list[jax.Device]) -> None:
    with pytest.raises(UserError, match="torus"):
        make_mesh(MeshShape(data=2, tensor=4, tile=(2, 2)), eight_devices)


def test_the_number_of_devices_must_fit(eight_devices: list[jax.Device]) -> None:
    with pytest.raises(UserError, match="needs 4 devices, and there are 8"):
        make_mesh(MeshShape(fsdp=4), eight_devices)


def test_the_number_of_slices_must_fit() -> None:
    with pytest.raises(UserError, match="slices"):
        _tiled(torus((4, 4, 1), slices=2), MeshShape(data=4, tensor=8, tile=(2, 4)))


def test_the_mesh_is_read_from_the_context(eight_devices: list[jax.Device]) -> None:
    assert context_mesh() == MeshShape()
    shape = MeshShape(fsdp=4, tensor=2)
    mesh = make_mesh(shape, eight_devices)
    assert mesh.axis_names == AXES
    with jax.set_mesh(mesh):
        assert context_mesh() == shape
        assert context_spec(("batch", "length", "act_embed"), (8, 3, 6), TRAIN_RULES) == jax.P("fsdp", None, "tensor")
    x = jax.numpy.ones((8, 3, 6))
    assert constrain(x, ("batch", "length", "act_embed"), TRAIN_RULES) is x


def test_axes_that_are_manual_are_left_alone(eight_devices: list[jax.Device]) -> None:
    """A trainer that takes fsdp over by hand sees constraints on the other axes only."""
    seen = []

    def inside(x: jax.Array) -> jax.Array:
        seen.append(context_mesh())
        return constrain(x, ("batch", "length", "act_embed"), TRAIN_RULES) * jax.lax.axis_index("fsdp")

    with jax.set_mesh(make_mesh(MeshShape(fsdp=4, tensor=2), eight_devices)):
        by_hand = jax.shard_map(inside, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"), axis_names={"fsdp"})
        out = jax.jit(by_hand)(jax.numpy.ones((8, 3, 6)))
    assert seen[0] == MeshShape(tensor=2)
    assert np.asarray(out)[:, 0, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
