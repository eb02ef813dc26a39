"""HBM of a compiled program on one device: its total, and what is alive at the fullest moment, by name.

libtpu writes two tables before it makes code, also for a program that does not fit: the allocations (`buffer-assignment`) and
what is live when (`live-range`). The fullest moment is found from both: the `peak` that libtpu names leaves out what is carried
through loops, which for a training step are the saved activations and the gradients. The names there are those of instructions.
Parameters carry the path of the array they are (`state.trained['layers']['q']`); what a program makes on the way is named by the
jax operation it comes from, and by the parameter of the same dimensions if there is one: a stack of gradients, or a copy in
another type.
"""

import re
from typing import NamedTuple

import msgspec

from podway.rehearse.hlo import Computation, Module, Shape

GIB = 2**30
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(.*)$", re.MULTILINE)
# `value: <3609 while.131{2} (phi) @0> (size=1073741824,offset=105365504): bf16[32,2,4096,2048]...`
_VALUE = re.compile(
    r"^ value: <\d+ ([^\s{]+)(?:\{([0-9,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)", re.MULTILINE
)
_RANGE = re.compile(r"^    ([\w.\-]+)\{([0-9,]*)\}:(\d+)-(\d+)$", re.MULTILINE)


class Buffer(msgspec.Struct, frozen=True, kw_only=True):
    """One array at the fullest moment."""

    bytes: int
    name: str
    shape: str
    made: bool  # by the program; False: it comes in


class Hbm(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one device."""

    arguments: int  # weights, optimizer state, batch, cache
    temporary: int  # all that the program makes
    limit: int  # that a program may use
    buffers: tuple[Buffer, ...] = ()  # the largest at the peak

    @property
    def total(self) -> int:
        """What must be free for the program to load."""
        return self.arguments + self.temporary

    @property
    def fits(self) -> bool:
        """Whether it loads."""
        return self.total <= self.limit

    @property
    def line(self) -> str:
        """`12.11 of 15.75 GiB`, or by how much it does not fit."""
        text = f"{self.total / GIB:.2f} of {self.limit / GIB:.2f} GiB"
        return text if self.fits else f"{text}: OOM by {(self.total - self.limit) / GIB:.2f} GiB"


def read_memory(assignment: str, live: str, module: Module, limit: int, *, most: int = 24) -> Hbm:
    """The memory of a program from libtpu's two tables and its text."""
    arguments = temporary = 0
    placed: list[_Placed] = []
    ranges = {(name, index): (int(first), int(last)) for name, index, first, last in _RANGE.findall(live)}
    for allocation in _ALLOCATION.finditer(assignment):
        size, rest = allocation.groups()
        if (
            "color " in rest or "thread-local" in rest
        ):  # not HBM; operands of a called computation, which lie in its caller's
            continue
        if " parameter " in rest:
            arguments += int(size)
            continue
        temporary += int(size)
        end = assignment.find("\nallocation ", allocation.end())
        for name, index, bytes, offset in _VALUE.findall(
            assignment, allocation.end(), end if end > 0 else len(assignment)
        ):
            if (name, index) in ranges:
                placed.append(
                    _Placed(int(bytes), (int(allocation.start()), int(offset)), name, index, *ranges[name, index])
                )
    return Hbm(
        arguments=arguments,
        temporary=temporary,
        limit=limit,
        buffers=tuple(_at_peak(placed, module)[:most]),
    )


class _Placed(NamedTuple):
    """A value that the program makes: where it lies in HBM, and from which instruction to which."""

    bytes: int
    place: tuple[int, int]
    name: str
    part: str  # of a tuple: its place
    first: int
    last: int


def _fullest(placed: list[_Placed]) -> list[_Placed]:
    """What is alive at the moment at which most bytes are."""
    changes: dict[int, int] = {}
    for one in placed:  # the value that takes a place over begins where the one before it ends
        changes[one.first] = changes.get(one.first, 0) + one.bytes
        changes[one.last] = changes.get(one.last, 0) - one.bytes
    alive = most = moment = 0
    for time in sorted(changes):
        alive += changes[time]
        if alive > most:
            most, moment = alive, time
    here = [one for one in placed if one.first <= moment < one.last]
    return list({one.place: one for one in sorted(here, key=lambda one: one.bytes)}.values())


def _at_peak(placed: list[_Placed], module: Module) -> list[Buffer]:
    """What is alive at the fullest moment, largest first: the arrays that come in, and what the program has made."""
    where = {one.name: computation for computation in module.computations.values() for one in computation}
    stored: dict[tuple[int, ...], str] = {}
    found = []
    for array in sorted(module.entry.parameters.values(), key=lambda p: "trained" not in p.op_name):
        if array.shapes and array.op_name and len(array.shapes[0].dims) > 1:
            stored.setdefault(array.shapes[0].dims, array_name(array.op_name))
        if array.shapes and array.shapes[0].space == 0:
            name = array_name(array.op_name) or array.name
            found.append(Buffer(bytes=array.shapes[0].bytes, name=name, shape=str(array.shapes[0]), made=False))
    for one in _fullest(placed):
        computation = where.get(one.name)
        if computation is None:
            continue
        buffer = _buffer(module, computation, one, stored)
        if buffer is not None:
            found.append(buffer)
    return sorted(found, key=lambda buffer: -buffer.bytes)


def _buffer(
    module: Module, computation: Computation, value: _Placed, stored: dict[tuple[int, ...], str]
) -> Buffer | None:
    """None for what does not lie in HBM, and for a tuple's own pointers."""
    one = source = computation[value.name]
    shape: Shape | None = one.shapes[0] if len(one.shapes) == 1 else None
    index = int(value.part.split(",")[0]) if value.part else None
    if index is None and len(one.shapes) > 1:
        return None
    if index is not None and index < len(one.shapes):
        shape = one.shapes[index]
        # What a loop carries is named by what its body makes of it.
        body = (
            module.called(one, "body") if one.opcode == "while" else computation if one.opcode == "parameter" else None
        )
        if body is not None and body.root.opcode == "tuple" and index < len(body.root.operands):
            source = body[body.root.operands[index]]
    if shape is not None and shape.space != 0:
        return None
    where = _operation(source.op_name or one.op_name)
    like = stored.get(shape.dims) if shape is not None else None
    if like is not None:
        what = "gradient of" if "transpose" in (source.op_name or one.op_name) else "copy of"
        name = f"{what} {like}"
    elif _is_saved(source.op_name, shape):
        name = "saved of every layer for the backward pass"
    else:
        name = where or one.name
    return Buffer(bytes=value.bytes, name=name, shape=str(shape) if shape is not None else "", made=True)


def _is_saved(path: str, shape: Shape | None) -> bool:
    """A stack over the layers that the forward pass fills: made empty, then updated layer by layer."""
    stacked = shape is not None and len(shape.dims) >= 4
    return stacked and "transpose(" not in path and path.endswith(("dynamic_update_slice", "broadcast_in_dim"))


def array_name(path: str) -> str:
    """`state.trained['layers']['q']` -> `trained/layers/q`."""
    plain = path.replace("\\", "").removeprefix("state.")
    return re.sub(r"\['?([^'\]]*)'?\]", r"/\1", plain).replace(".", "/")


def _operation(path: str) -> str:
    """The end of jax's path, and whether it belongs to the backward pass."""
    parts = [
        part for part in path.split("/") if part not in ("while", "body", "closed_call", "shard_map", "checkpoint")
    ]
    backward = "backward " if "transpose(" in path else ""
    return f"{backward}{'/'.join(parts[-2:])}" if parts and parts != [""] else ""
