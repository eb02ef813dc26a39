"""Every TPU slice that Google offers, and the way from a name to one.

1. `slices.csv` holds a row per accelerator type and machine type (sources: docs/catalog.md); `all_slices` reads it
   once.
2. `find_slice` reads the name (`names`), finds the size, then the topology and the machine, and answers a `Slice`.
3. A 3D size exists in more shapes than its default: any AxBxC of whole 4x4x4 cubes with A <= B <= C, as Google
   documents for v4 and later, makes the same slice with another topology.
"""

import csv
import functools
import math
from collections.abc import Callable
from pathlib import Path

import msgspec

from podway.catalog.generations import GENERATIONS, Generation, MachineType
from podway.catalog.names import SliceName, is_tpu_name, parse_name, parse_topology
from podway.errors import UserError

__all__ = ["Slice", "all_slices", "find_slice", "is_tpu_name", "slices_of"]

_CUBE = 4  # chips along each side of the block that 3D pods are wired from (docs/v4)


class Slice(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One size of TPU that can be asked for: a box of chips and the hosts that hold them."""

    accelerator_type: str  # what the Cloud TPU API calls it
    generation: str
    chips: int
    cores: int
    hosts: int
    chips_per_host: int
    topology: tuple[int, ...]
    wrap: tuple[bool, ...]  # per axis: whether its ends are joined, which makes a ring of it
    gke_accelerator: str | None
    gke_machine_type: str | None
    aot_name: str  # what jax.experimental.topologies calls it

    @property
    def generation_facts(self) -> Generation:
        """The chip it is made of."""
        return GENERATIONS[self.generation]

    @property
    def topology_text(self) -> str:
        """`4x4`."""
        return _text(self.topology)

    @property
    def count(self) -> int:
        """The number in its name, TensorCores or chips: what it takes of a project's quota."""
        return self.cores if self.generation_facts.names_count == "cores" else self.chips

    @property
    def single_host(self) -> bool:
        """Whether one machine holds all of it."""
        return self.hosts == 1

    @property
    def devices(self) -> int:
        """How many devices jax shows on all hosts together."""
        return self.chips * self.generation_facts.devices_per_chip

    @property
    def host(self) -> MachineType | None:
        """The machine that each of its hosts is, where known."""
        return self.generation_facts.host(self.chips_per_host)

    @property
    def hbm_bytes(self) -> int:
        """HBM of all chips."""
        return self.chips * self.generation_facts.chip_hbm_bytes

    @property
    def peak_bf16(self) -> float:
        """FLOP/s of all chips."""
        return self.chips * self.generation_facts.peak_bf16

    @property
    def dcn_bandwidth(self) -> float | None:
        """Bytes/s of all hosts to the data-centre network: it grows with the chips of a host."""
        per_host = self.generation_facts.dcn_bandwidth_per_host
        return None if per_host is None else per_host / 4 * self.chips


@functools.cache
def all_slices() -> tuple[Slice, ...]:
    """All rows of `slices.csv`, in its order: by generation, then by size."""
    with open(Path(__file__).with_name("slices.csv"), encoding="utf-8", newline="") as file:
        return tuple(_slice(row) for row in csv.DictReader(file))


@functools.cache
def slices_of(generation: str) -> tuple[Slice, ...]:
    """The slices of one generation, smallest first."""
    return tuple(row for row in all_slices() if row.generation == generation)


def find_slice(name: str, topology: str | None = None, machine_type: str | None = None) -> Slice:
    """The slice that `name` means, in any spelling people use: `v6e-8`, `tpu-v5litepod-8`, `v4-4x8x8`, `ironwood-8`.

    `topology` picks a shape other than the default one (or completes a bare `v4`). `machine_type` picks the two-host
    layout that GKE has of v6e-8 and v5e-8; without it they are one host.
    """
    wanted = parse_name(name)
    shape = wanted.topology
    if topology is not None:
        shape = parse_topology(topology)
        if wanted.topology not in (None, shape):
            raise UserError(
                f"The name {name.strip()} and topology {topology.strip()} disagree.",
                "Give the topology once: in the name or beside it.",
            )
    if wanted.host_chips is not None:
        return _of_hosts(wanted, wanted.host_chips, shape)
    if wanted.count is None and shape is None:
        sizes = list(dict.fromkeys(row.accelerator_type for row in slices_of(wanted.generation)))
        raise UserError(
            f"{name.strip()} is a generation of TPUs, not a slice: its size is missing.",
            f"Choose from {_some(sizes)}; `podway tpus {wanted.generation}` lists all.",
        )
    rows = _rows_of_shape(wanted, shape) if shape else _rows_of_count(wanted)
    if machine_type is None:
        return min(rows, key=lambda row: row.hosts)
    return _on_machine(rows, machine_type)


def _of_hosts(wanted: SliceName, chips: int, shape: tuple[int, ...] | None) -> Slice:
    """The slice whose hosts have so many chips, as GKE counts them: one host, or as many as the topology takes."""
    if shape is not None:
        row = min(_rows_of_shape(wanted, shape), key=lambda row: row.hosts)
        if row.chips_per_host != chips:
            raise UserError(
                f"The hosts of {row.accelerator_type} ({_text(shape)}) have {row.chips_per_host} chips each, not {chips}.",
                f"The number after a GKE label counts the chips of one host: write {row.chips_per_host}, or name the slice "
                f"{row.accelerator_type}.",
            )
        return row
    alone = [row for row in slices_of(wanted.generation) if row.hosts == 1]
    rows = [row for row in alone if row.chips == chips]
    if not rows:
        sizes = ", ".join(str(row.chips) for row in alone)
        several = [row.accelerator_type for row in slices_of(wanted.generation) if row.chips == chips]
        slice_name = several[0] if several else slices_of(wanted.generation)[-1].accelerator_type
        raise UserError(
            f"No {wanted.generation} host has {_chips(chips)}: the number after a GKE label counts those of one host.",
            f"Write {sizes}; a slice of several hosts is named by its type, such as {slice_name}, or gets its topology.",
        )
    return rows[0]


def _rows_of_count(wanted: SliceName) -> list[Slice]:
    """The rows of a size given as a number; there are two where it has two host layouts."""
    counts = GENERATIONS[wanted.generation].names_count
    rows = [row for row in slices_of(wanted.generation) if getattr(row, counts) == wanted.count]
    if not rows:
        said = f"There is no {_type(wanted.generation)}-{wanted.count}"
        if counts == "cores":
            said += " (the number counts TensorCores, two a chip)"
        raise UserError(f"{said}.", _nearest(wanted, wanted.count or 0, lambda row: int(getattr(row, counts))))
    return rows


def _rows_of_shape(wanted: SliceName, shape: tuple[int, ...]) -> list[Slice]:
    """The rows of a topology, those of the catalog or the same size laid out in another legal shape."""
    facts = GENERATIONS[wanted.generation]
    chips = math.prod(shape)
    if wanted.count is not None:
        rows = _rows_of_count(wanted)
        if rows[0].chips != chips:
            raise UserError(
                f"{rows[0].accelerator_type} has {rows[0].chips} chips; topology {_text(shape)} has {chips}.",
                f"Leave the topology out (it is {rows[0].topology_text}) or give one of {rows[0].chips} chips.",
            )
    else:
        rows = [row for row in slices_of(wanted.generation) if row.chips == chips]
    same = [row for row in rows if row.topology == shape]
    if same:
        return same
    if rows and facts.ici_axes == 3 and _whole_cubes(shape):
        return [_reshaped(row, shape) for row in rows]
    said = f"There is no {wanted.generation} slice of topology {_text(shape)}"
    if len(shape) != facts.ici_axes:
        raise UserError(
            f"{said}: its chips lie on {facts.ici_axes} axes.", _nearest(wanted, chips, lambda row: row.chips)
        )
    turned = [row for row in rows if sorted(row.topology) == sorted(shape)]
    in_order = tuple(sorted(shape))
    if turned or (rows and facts.ici_axes == 3 and _whole_cubes(in_order)):
        right = turned[0].topology if turned else in_order
        raise UserError(f"{said}.", f"Its axes are written in another order: {_text(right)}.")
    raise UserError(f"{said}.", _nearest(wanted, chips, lambda row: row.chips))


def _on_machine(rows: list[Slice], machine_type: str) -> Slice:
    """The row of one machine type."""
    word = machine_type.strip().lower()
    for row in rows:
        if row.gke_machine_type == word:
            return row
    known = [row.gke_machine_type for row in rows if row.gke_machine_type]
    raise UserError(
        f"{rows[0].accelerator_type} is not made of machines of type {machine_type.strip()!r}.",
        f"Use {' or '.join(known)}." if known else "Leave the machine type out.",
    )


def _nearest(wanted: SliceName, asked: int, measure: Callable[[Slice], int]) -> str:
    """The hint that names the real sizes on both sides of one that does not exist."""
    rows = slices_of(wanted.generation)
    below = [row for row in rows if measure(row) <= asked][-1:]
    above = [row for row in rows if measure(row) > asked][:1]
    near = [f"{row.accelerator_type} ({_chips(row.chips)}, {row.topology_text})" for row in below + above]
    if not below:
        return f"The smallest is {near[0]}."
    if not above:
        return f"The largest is {near[0]}."
    return f"The nearest are {near[0]} and {near[1]}."


def _slice(row: dict[str, str]) -> Slice:
    """A row of `slices.csv`."""
    topology = tuple(int(axis) for axis in row["topology"].split("x"))
    return Slice(
        accelerator_type=row["accelerator_type"],
        generation=row["generation"],
        chips=int(row["chips"]),
        cores=int(row["cores"]),
        hosts=int(row["hosts"]),
        chips_per_host=int(row["chips_per_host"]),
        topology=topology,
        wrap=_wrap(GENERATIONS[row["generation"]], topology),
        gke_accelerator=row["gke_accelerator"] or None,
        gke_machine_type=row["gke_machine_type"] or None,
        aot_name=row["system_name_for_aot"],
    )


def _wrap(facts: Generation, topology: tuple[int, ...]) -> tuple[bool, ...]:
    """Which axes are rings.

    In 2D the wires run to the edge of the pod, so an axis closes only where it spans it (16 chips on v5e and v6e); in
    3D optical switches close every axis of a box of whole cubes, and none of a smaller one. Sources: scaling-book,
    "TPU networking"; MaxText `accelerator_to_spec_map.py`, whose wrap columns both rules reproduce.
    """
    if facts.ici_axes == 2:
        return tuple(axis == edge for axis, edge in zip(topology, facts.pod_topology, strict=True))
    return (all(axis % _CUBE == 0 for axis in topology),) * len(topology)


def _whole_cubes(shape: tuple[int, ...]) -> bool:
    """Whether a shape is legal beside the default one of its size (docs, "TPU types and topologies")."""
    return all(axis > 0 and axis % _CUBE == 0 for axis in shape) and list(shape) == sorted(shape) and len(shape) == 3


def _reshaped(row: Slice, shape: tuple[int, ...]) -> Slice:
    """The same chips in another box."""
    system = row.aot_name.partition(":")[0]
    return msgspec.structs.replace(
        row, topology=shape, wrap=_wrap(row.generation_facts, shape), aot_name=f"{system}:{_text(shape)}"
    )


def _type(generation: str) -> str:
    """The prefix of the generation's accelerator types: `v5litepod` for v5e."""
    return slices_of(generation)[0].accelerator_type.rpartition("-")[0]


def _some(names: list[str]) -> str:
    """All of a short list; the ends of a long one."""
    return ", ".join(names) if len(names) <= 10 else ", ".join([*names[:6], "…", names[-1]])


def _chips(count: int) -> str:
    return "1 chip" if count == 1 else f"{count} chips"


def _text(topology: tuple[int, ...]) -> str:
    return "x".join(str(axis) for axis in topology)
