"""Where the devices of a compiled program lie, and how long its collectives take over ICI, per axis and direction.

1. A `Fabric` knows the torus of a slice and the place of each device, in the order of the program's own numbers.
2. `groups_in(instruction)` reads the devices that exchange, in the three ways the compiler writes them; `exchange_of` turns
   them into a box of the torus, as one device sees it.
3. `seconds(exchange)` prices it by the planner's own model of links (`plan.network.Group`): the links along each physical
   axis, both directions of a ring; between slices, the share of the data-centre network.
4. `lanes(exchange)` names the (axis, direction) pairs that it keeps busy, so that two transfers that share a link wait for
   each other and two that do not run side by side.
"""

import re
from collections.abc import Sequence
from itertools import pairwise, product
from math import gcd, prod
from typing import NamedTuple

from podway.catalog.slices import Slice
from podway.plan.chips import HOP_SECONDS, Device, device_of
from podway.plan.network import Group, bounds_of, group_of
from podway.rehearse.hlo import BITS, Instruction
from podway.rehearse.program import Exchange, Lane

Place = tuple[int, ...]  # slice, x, y[, z][, core]
NETWORK: Lane = (-1, 0)


class Fabric(NamedTuple):
    """The devices of a program; `places` is needed to read one, not to price it."""

    slice: Slice
    places: tuple[Place, ...] = ()
    # Rows that the buffers of a mixture's experts hold, over those that are in them on average: grouped products skip the others.
    spare_rows: float = 1.0

    @property
    def device(self) -> Device:
        """What it is made of."""
        return device_of(self.slice.generation)

    def exchange_of(self, one: Instruction, kind: str) -> Exchange:
        """The collective of an instruction."""
        moved = moved_bytes(one, kind)
        if kind == "collective-permute":
            hops, load, lane, crosses = self._longest_way(one)
            return Exchange(kind=kind, moved=moved, hops=hops, load=load, lane=lane, slices=2 if crosses else 1)
        members = groups_in(one, len(self.places))[0]
        box, stride = self._box(members)
        slices = len({self.places[m][0] for m in members})
        return Exchange(kind=kind, moved=moved, box=box, stride=stride, slices=slices)

    def between_slices(self, one: Instruction, kind: str) -> Exchange:
        """What each device exchanges with its peers in the other slices."""
        moved = max((shape.elements * BITS.get(shape.dtype, 32) / 8 for shape in one.shapes), default=0.0)
        alone = (1,) * len(bounds_of(self.slice)[0])
        return Exchange(
            kind=kind, moved=moved, box=alone, stride=alone, slices=len({place[0] for place in self.places}) or 1
        )

    def _box(self, members: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The devices of one slice among these: how many along each axis, and how far apart."""
        first = self.places[members[0]][0]
        inside = [self.places[m][1:] for m in members if self.places[m][0] == first]
        box, stride = [], []
        for along in zip(*inside, strict=True):
            values = sorted(set(along))
            steps = [b - a for a, b in pairwise(values)]
            box.append(len(values))
            stride.append(gcd(*steps) if steps else 1)
        return tuple(box), tuple(stride)

    def _longest_way(self, one: Instruction) -> tuple[int, int, Lane, bool]:
        """Hops of the pair that is furthest apart, transfers on the busiest link, the lane, and whether a pair lies in two slices.

        Data goes along one axis after the other and passes through a chip without stopping there, so that hops alone cost
        little; what costs is a link that several transfers need. The way from the last device of a line back to the first is
        long, but its links lead the other way and are free.
        """
        bounds, wrap, cores = bounds_of(self.slice)
        longest, lane, crosses = 0, (0, 0), False
        busy: dict[tuple[int, int, Place], int] = {}
        for source, target in _pairs(one):
            here, there = list(self.places[source]), self.places[target]
            crosses |= here[0] != there[0]
            for axis in range(len(bounds) - cores):
                way = there[1 + axis] - here[1 + axis]
                ahead = way % bounds[axis]
                hops = min(ahead, bounds[axis] - ahead) if wrap[axis] else abs(way)
                forward = ahead <= bounds[axis] - ahead if wrap[axis] else way > 0
                if hops > longest:
                    longest, lane = hops, (axis, int(forward))
                for _ in range(hops):
                    link = (axis, int(forward), tuple(here))
                    busy[link] = busy.get(link, 0) + 1
                    here[1 + axis] = (here[1 + axis] + (1 if forward else -1)) % bounds[axis]
        return longest, max(busy.values(), default=1), lane, crosses

    def group(self, exchange: Exchange) -> Group:
        """The planner's view of the devices that exchange."""
        return group_of(exchange.size, exchange.box, exchange.stride, *bounds_of(self.slice))

    def seconds(self, exchange: Exchange) -> float:
        """A collective alone on the network."""
        device, moved, kind = self.device, exchange.moved, exchange.kind
        if kind == "collective-permute":
            if exchange.slices > 1 and device.dcn_bandwidth:
                return moved / device.dcn_bandwidth
            shared = exchange.load * moved / device.link_bandwidth
            return max(shared, exchange.hops * HOP_SECONDS) if exchange.hops else 0.0
        group, total = self.group(exchange), 0.0
        if group.size > 1:
            if kind == "all-to-all":
                total = group.exchange_seconds(moved, device)
            elif kind == "all-reduce":
                total = group.reduce_seconds(moved, device)
            else:
                total = group.gather_seconds(moved, device)
        if exchange.slices > 1 and device.dcn_bandwidth:
            share = moved / group.size if kind == "all-reduce" else moved
            each = share * (exchange.slices - 1) / exchange.slices / device.dcn_bandwidth
            total += 2 * each if kind == "all-reduce" else each
        return total

    def lanes(self, exchange: Exchange) -> tuple[Lane, ...]:
        """Which links of a chip a collective uses."""
        if exchange.kind == "collective-permute":
            if exchange.slices > 1:
                return (NETWORK,)
            return (exchange.lane,) if exchange.hops and exchange.lane else ()
        found = [(axis, way) for axis, side in enumerate(exchange.box) if side > 1 for way in (0, 1)]
        return tuple(found) + ((NETWORK,) if exchange.slices > 1 else ())


def moved_bytes(one: Instruction, kind: str) -> float:
    """Bytes on a device of what a collective makes, or of what it takes where that is more."""
    shapes = one.shapes
    if one.opcode.endswith("-start") and len(shapes) > 1:  # (operand, result, flags)
        shapes = (max(shapes, key=lambda shape: shape.bytes),)
    made = sum(shape.elements * BITS.get(shape.dtype, 32) / 8 for shape in shapes)
    return made * len(groups_in(one, 1)[0]) if kind == "reduce-scatter" else made


def _pairs(one: Instruction) -> list[tuple[int, int]]:
    found = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", one.text)
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", found[1])] if found else []


def groups_in(one: Instruction, devices: int) -> list[list[int]]:
    """The groups of devices that exchange: `{{0,1},{2,3}}`, `[2,2]<=[4]` or `mesh['a'=2,'b'=2] {'b'}`."""
    text = one.text
    if found := re.search(r"replica_groups=\{(\{[0-9,{} ]*\})\}", text):
        return [[int(i) for i in part.split(",")] for part in re.findall(r"\{([0-9, ]+)\}", found[1])]
    if found := re.search(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", text):
        rows, dims = _ints(found[1]), _ints(found[2])
        order = _ints(found[3]) if found[3] else list(range(len(dims)))
        return _cut(_transposed(dims, order), rows[-1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        chosen = [name for name in re.findall(r"'([^']+)'", found[2]) if name in axes]
        names = list(axes)
        order = [names.index(n) for n in names if n not in chosen] + [names.index(n) for n in chosen]
        return _cut(_transposed(list(axes.values()), order), prod(axes[n] for n in chosen))
    return [list(range(devices))]


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _transposed(dims: list[int], order: list[int]) -> list[int]:
    """The numbers 0, 1, 2, … laid out over `dims`, read with the dimensions in another order."""
    strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
    return [
        sum(place * strides[axis] for place, axis in zip(places, order, strict=True))
        for places in product(*(range(dims[axis]) for axis in order))
    ]


def _cut(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]
