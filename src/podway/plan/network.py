"""Where mesh axes lie in the torus of a slice, and how long collectives over them take.

1. A slice is a box of chips; a link joins neighbours, and an axis that wraps is a ring. Where a chip shows two devices,
   they are one more, innermost axis (`core`) of size 2.
2. `place(mesh, slice)` gives each mesh axis a box of devices, from the inside out: tensor (the given tile, or the box
   with the most links), context and expert (along one axis as far as it goes, as jax lays them), fsdp, data. What an inner
   axis has taken of a physical axis makes the stride of the next one.
3. A `Group` counts the links that one device of it can use at once. A box that spans a whole wrapped axis has two links
   along it; a part of an axis is a line, whose ends have one. Groups that interleave with stride s share the links of an
   axis, and have 1/s of them each.
4. Times are the bandwidth bound over those links, and at least the hops. Sources: scaling-book, "Sharded matrices"; the
   tile construction is that of t5x (`partitioning.py`).
"""

from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

from podway.catalog.slices import Slice
from podway.errors import UserError
from podway.model.layout import MeshShape
from podway.plan.chips import HOP_SECONDS, Device

INSIDE_OUT = ("tensor", "context", "expert", "fsdp", "data")
# The two devices of a chip are joined by more than one link's worth: six times on tpu7x (Google, "TPU7x"). v2 and v3
# share an HBM; the same is assumed.
CORE_LINKS = 6.0

Box = tuple[int, ...]  # devices along x, y[, z][, core]


class Ring(NamedTuple):
    """The devices of a group along one physical axis, the links along it, and whether they close it."""

    size: int
    links: float
    closed: bool


class Group(NamedTuple):
    """The devices that one mesh axis joins, seen from one of them."""

    size: int
    links: float  # ICI links, one way, that bring data to one device
    hops: int
    box: Box
    rings: tuple[Ring, ...] = ()  # of each physical axis that it lies along

    def gather_seconds(self, gathered_bytes: float, device: Device) -> float:
        """An all-gather to this many bytes on each device, or a reduce-scatter from as many."""
        if self.size == 1:
            return 0.0
        moved = gathered_bytes * (self.size - 1) / self.size
        return max(moved / (self.links * device.link_bandwidth), self.hops * HOP_SECONDS)

    def reduce_seconds(self, bytes_each: float, device: Device) -> float:
        """An all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.gather_seconds(bytes_each, device)

    def exchange_seconds(self, bytes_each: float, device: Device) -> float:
        """Every device sends to every other. Half of all bytes cross the middle of an axis, whatever the others are: along a ring of n each
        of a device's two links carries n/8 of its bytes, n/4 in the middle of a line. The axes work at once; the slowest is waited for."""
        slowest = max((bytes_each * size / (4 * links) for size, links, _ in self.rings if size > 1), default=0.0)
        return max(slowest / device.link_bandwidth, self.hops * HOP_SECONDS)

    def ring_scatter_seconds(self, bytes_each: float, device: Device) -> float:
        """A reduce-scatter along one physical axis after the other: each sees only its own links."""
        total, left = 0.0, bytes_each
        for size, links, _ in self.rings:
            total += left * (size - 1) / size / (links * device.link_bandwidth)
            left /= size
        return max(total, self.hops * HOP_SECONDS)


ALONE = Group(1, 0.0, 0, ())


class MeshPlacement(NamedTuple):
    """A group for each mesh axis inside a slice."""

    tensor: Group
    context: Group
    expert: Group
    fsdp: Group
    data: Group


@lru_cache(maxsize=1024)  # bounded: what is kept, Python's garbage collector walks through again and again
def place(mesh: MeshShape, slice: Slice) -> MeshPlacement:
    """Where the axes of a mesh lie in one slice; a UserError where they cannot."""
    inside = mesh.chips // mesh.slices
    if inside != slice.devices:
        raise UserError(
            f"mesh {mesh} has {inside} devices a slice, and {slice.accelerator_type} has {slice.devices}",
            "the sizes of the axes inside a slice must multiply to its devices",
        )
    bounds, wrap, cores = bounds_of(slice)
    if mesh.tile is not None:
        start: Box = (1,) * len(bounds)
        tile = group_of(mesh.tensor, _tile(mesh.tile, slice), start, bounds, wrap, cores)
        return _placed(mesh, bounds, wrap, cores, tile)
    groups = _tensor_groups(mesh.tensor, slice)
    if not groups:
        raise UserError(
            f"tensor={mesh.tensor} is not a box of the {slice.topology_text} chips of {slice.accelerator_type}",
            "use a size whose factors divide the topology",
        )
    return max(
        (_placed(mesh, bounds, wrap, cores, group) for group in groups if group.links == groups[0].links),
        key=lambda p: (p.fsdp.links, p.data.links, p.tensor.box),
    )


def tiles(tensor: int, slice: Slice) -> list[Box]:
    """Every box of a slice that can hold a tensor group of this size."""
    return list(boxes(tensor, bounds_of(slice)[0]))


def check_tile(tile: Box, slice: Slice) -> None:
    """A UserError where a slice cannot be filled with boxes of this shape."""
    _tile(tile, slice)


def bounds_of(slice: Slice) -> tuple[Box, tuple[bool, ...], bool]:
    """The torus of devices: sizes, which of them wrap, and whether the last one is the cores of a chip."""
    if slice.generation_facts.devices_per_chip == 1:
        return slice.topology, slice.wrap, False
    return (*slice.topology, slice.generation_facts.devices_per_chip), (*slice.wrap, False), True


def _tile(tile: Box, slice: Slice) -> Box:
    """A tile as written, with the axes it leaves out."""
    bounds = bounds_of(slice)[0]
    plain = tile[: len(bounds)] + (1,) * (len(bounds) - len(tile))
    if any(extra != 1 for extra in tile[len(bounds) :]):
        raise UserError(
            f"tile {_text(tile)}: a chip of {slice.generation} is one device, so the core is always 1",
            "write x,y,z only, or 1 for the core; `podway plan explain core` says why",
        )
    if any(bound % part for bound, part in zip(bounds, plain, strict=True)):
        others = [_text(group.box) for group in _tensor_groups(prod(tile), slice)]
        raise UserError(
            f"tile {_text(tile)} does not divide the {slice.topology_text} chips of {slice.accelerator_type}",
            f"tiles of as many chips: {', '.join(others[:6])}" if others else "use sizes that divide the topology",
        )
    return plain


@lru_cache(maxsize=2048)
def _tensor_groups(size: int, slice: Slice) -> list[Group]:
    """Every box that can hold a tensor group, those with the most links first."""
    bounds, wrap, cores = bounds_of(slice)
    start: Box = (1,) * len(bounds)
    groups = [group_of(size, box, start, bounds, wrap, cores) for box in boxes(size, bounds)]
    return sorted(groups, key=lambda group: (-group.links, group.box))


def _text(box: Box) -> str:
    return "x".join(map(str, box))


@lru_cache(maxsize=1024)
def boxes(size: int, bounds: Box) -> tuple[Box, ...]:
    """All boxes of `size` devices whose sides divide `bounds`."""
    if not bounds:
        return ((),) if size == 1 else ()
    sides = [side for side in divisors(bounds[0]) if size % side == 0]
    return tuple((side, *rest) for side in sides for rest in boxes(size // side, bounds[1:]))


@cache
def divisors(number: int) -> tuple[int, ...]:
    """From 1 to the number itself."""
    return tuple(side for side in range(1, number + 1) if number % side == 0)


def _placed(mesh: MeshShape, bounds: Box, wrap: tuple[bool, ...], cores: bool, tensor: Group) -> MeshPlacement:
    stride: Box = (1,) * len(bounds)
    left = bounds
    groups = dict.fromkeys(INSIDE_OUT, ALONE)
    for axis in INSIDE_OUT:
        size = mesh.size(axis)
        if size == 1:
            continue
        if axis == "tensor":
            found = tensor
        elif size == prod(left):
            found = group_of(size, left, stride, bounds, wrap, cores)
        else:
            choices = [group_of(size, box, stride, bounds, wrap, cores) for box in boxes(size, left)]
            if not choices:
                raise UserError(
                    f"{axis}={size} does not divide what other axes leave of a torus of {_text(bounds)}",
                    "use sizes whose factors divide the topology",
                )
            # As jax's `mesh_utils` lays an axis that no tile is given for: along one physical axis as far as that goes (seen in
            # compiled programs: expert=8 is 8x1 of 16x16 chips, 4x2x1 of 4x4x4). Between the cores of a chip it was not seen.
            found = max(
                choices, key=lambda group: (group.links, group.box) if cores else (float(max(group.box)), group.box)
            )
        groups[axis] = found
        stride = tuple(taken * side for taken, side in zip(stride, found.box, strict=True))
        left = tuple(bound // taken for bound, taken in zip(bounds, stride, strict=True))
    return MeshPlacement(**groups)


def group_of(size: int, box: Box, stride: Box, bounds: Box, wrap: tuple[bool, ...], cores: bool) -> Group:
    """Devices that fill `box`, `stride` apart, in a torus of `bounds` (the last axis the cores of a chip, if `cores`)."""
    rings: list[Ring] = []
    hops = 0
    # The other core of a chip is in another group, and uses the same links.
    shared = bounds[-1] if cores and box[-1] == 1 and stride[-1] == 1 else 1
    links = 0.0
    for axis in range(len(bounds) - cores):
        side = box[axis]
        if side > 1:
            apart, bound = stride[axis], bounds[axis]
            # Strided devices that reach around the whole axis close the ring as well.
            ring = wrap[axis] and side * apart == bound
            along = (2.0 if ring else 1.0) / apart / shared
            rings.append(Ring(side, along, ring))
            links += along
            hops += bound // 2 if ring else (side - 1) * apart
    if cores and box[-1] > 1:
        rings.append(Ring(box[-1], CORE_LINKS, False))
        links = links or CORE_LINKS  # a chip with itself; else its links to others set the pace
    return Group(size, links, hops, box, tuple(rings))


def dcn_reduce_seconds(bytes_each: float, slices: int, device: Device) -> float:
    """An all-reduce between slices: each device exchanges its piece with its peers, through its share of the host."""
    if slices == 1:
        return 0.0
    if device.dcn_bandwidth is None:
        raise UserError(
            f"{device.generation} slices cannot be joined: multislice starts at v4", "plan for one slice of it"
        )
    return 2 * bytes_each * (slices - 1) / slices / device.dcn_bandwidth
