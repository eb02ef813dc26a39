"""Where mesh axes lie in a torus, and how long collectives over them take."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.catalog.slices import Slice, all_slices, find_slice
from podway.errors import UserError
from podway.model.layout import MeshShape
from podway.plan.chips import HOP_SECONDS, device_of
from podway.plan.network import boxes, dcn_reduce_seconds, group_of, place, tiles

sides = st.sampled_from([1, 2, 4, 8, 12, 16])


@given(size=st.integers(1, 64), bounds=st.tuples(sides, sides, sides))
def test_every_box_has_the_size_and_divides_the_bounds(size: int, bounds: tuple[int, ...]) -> None:
    found = boxes(size, bounds)
    assert len(set(found)) == len(found)
    for box in found:
        assert prod(box) == size
        assert all(bound % side == 0 for bound, side in zip(bounds, box, strict=True))


def test_fsdp_over_a_wrapped_pod_has_all_four_links() -> None:
    group = place(MeshShape(fsdp=256), find_slice("v5e-256")).fsdp
    assert (group.links, group.box) == (4.0, (16, 16))


def test_an_unwrapped_slice_has_half_of_them() -> None:
    assert place(MeshShape(fsdp=16), find_slice("v5e-16")).fsdp.links == 2.0


def test_the_published_all_reduce_of_the_compiler() -> None:
    """libtpu schedules 14.4 ms for an all-reduce of 1.34 GB over v5e-256."""
    group = place(MeshShape(fsdp=256), find_slice("v5e-256")).fsdp
    assert group.reduce_seconds(1.342e9, device_of("v5e")) == pytest.approx(14.4e-3, rel=0.10)


def test_tensor_takes_a_whole_ring_and_leaves_one_to_fsdp() -> None:
    placed = place(MeshShape(fsdp=16, tensor=16), find_slice("v5e-256"))
    assert placed.tensor.links == placed.fsdp.links == 2.0
    assert sorted(placed.tensor.box) == [1, 16]


@pytest.mark.parametrize(("tile", "links"), [((4, 2, 2), 4.0), ((2, 4, 2), 3.0), ((2, 2, 4), 3.0), ((4, 8, 1), 4.0)])
def test_a_tile_that_spans_an_axis_closes_its_ring(tile: tuple[int, ...], links: float) -> None:
    mesh = MeshShape(data=256 // prod(tile), tensor=prod(tile), tile=tile)
    assert place(mesh, find_slice("v4-512")).tensor.links == links


def test_interleaved_groups_share_links() -> None:
    mesh = MeshShape(data=16, tensor=16, tile=(4, 2, 2))
    data = place(mesh, find_slice("v4-512")).data
    assert data.box == (1, 4, 4)
    assert data.links == 2.0  # two rings of 8 at half each


def test_the_core_of_a_megacore_chip_is_always_one() -> None:
    slice = find_slice("v4-512")
    place(MeshShape(data=16, tensor=16, tile=(4, 2, 2, 1)), slice)
    with pytest.raises(UserError, match="core is always 1"):
        place(MeshShape(data=128, tensor=2, tile=(1, 1, 1, 2)), slice)


def test_cores_of_v3_are_an_axis_of_their_own_and_the_nearest_neighbours() -> None:
    slice = find_slice("v3-32")  # 16 chips, 32 devices
    chip = place(MeshShape(data=16, tensor=2, tile=(1, 1, 2)), slice).tensor
    halves = place(MeshShape(data=16, tensor=2, tile=(2, 1, 1)), slice).tensor
    assert chip.links > halves.links
    assert place(MeshShape(data=16, tensor=2), slice).tensor.box == (1, 1, 2)


def test_a_tile_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(UserError, match="does not divide the 4x8x8 chips") as caught:
        place(MeshShape(data=32, tensor=8, tile=(8, 1, 1)), find_slice("v4-512"))
    assert "4x2x1" in caught.value.hint


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(UserError, match="has 4 devices a slice, and v6e-8 has 8"):
        place(MeshShape(fsdp=4), find_slice("v6e-8"))


@pytest.mark.parametrize("slice", all_slices()[::7], ids=lambda s: s.accelerator_type)
def test_every_slice_can_hold_pure_fsdp_and_small_tensor_groups(slice: Slice) -> None:
    whole = place(MeshShape(fsdp=slice.devices), slice).fsdp
    assert whole.size == slice.devices and (whole.links > 0) == (slice.devices > 1)
    for box in tiles(2, slice):
        group = place(MeshShape(fsdp=slice.devices // 2, tensor=2, tile=box), slice)
        assert group.tensor.links > 0


def test_a_scatter_ring_by_ring_uses_one_axis_at_a_time() -> None:
    group, device = place(MeshShape(fsdp=256), find_slice("v5e-256")).fsdp, device_of("v5e")
    assert group.rings == ((16, 2.0, True), (16, 2.0, True))
    assert group.ring_scatter_seconds(1e9, device) == pytest.approx(2 * group.gather_seconds(1e9, device), rel=0.01)


def test_small_messages_cost_hops() -> None:
    group = place(MeshShape(fsdp=256), find_slice("v5e-256")).fsdp
    assert group.gather_seconds(1, device_of("v5e")) == group.hops * HOP_SECONDS


def test_slices_without_a_network_cannot_be_joined() -> None:
    assert dcn_reduce_seconds(1e9, 1, device_of("v3")) == 0
    with pytest.raises(UserError, match="multislice starts at v4"):
        dcn_reduce_seconds(1e9, 2, device_of("v3"))


def test_dcn_all_reduce_is_two_passes_over_a_chip_s_share_of_its_host() -> None:
    # 12.5 GB/s a host of 4 chips (docs/v5e): 3.125 GB/s a chip
    assert dcn_reduce_seconds(3.125e9, 2, device_of("v5e")) == pytest.approx(1.0)
    assert dcn_reduce_seconds(3.125e9, 32, device_of("v5e")) == pytest.approx(2 * 31 / 32)


def test_an_exchange_of_all_with_all_is_bound_by_the_middle_of_its_longest_axis() -> None:
    """Of 4x2 chips half of the bytes of four cross two links; the other axis runs beside it and takes half as long."""
    device, bytes_each = device_of("v6e"), 8e8
    box = group_of(8, (4, 2), (1, 1), (16, 16), (True, True), False)
    assert box.exchange_seconds(bytes_each, device) == pytest.approx(4 * bytes_each / 2 / 2 / device.link_bandwidth)
    line = group_of(8, (8, 1), (1, 1), (16, 16), (True, True), False)
    assert line.exchange_seconds(bytes_each, device) == pytest.approx(4 * bytes_each / 2 / device.link_bandwidth)
