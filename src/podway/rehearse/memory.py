"""HBM of a compiled program on one device: its total, and what is alive at the fullest moment, by name.

libtpu writes two tables before it makes code, also for a program that does not fit: the allocations (`buffer-assignment`) and
what is live when (`live-range`, with the peak). The names there are those of instructions. Parameters carry the path of the
array they are (`state.trained['layers']['q']`); what a program makes on the way is named by the jax operation it comes from,
and by the parameter of the same dimensions if there is one: a stack of gradients, or a copy in another type.
"""

import re

import msgspec

from podway.rehearse.hlo import Instruction, Module, Shape

GIB = 2**30
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(.*)$", re.MULTILINE)
_LIVE = re.compile(r"^    ([\w.\-]+)\{([0-9,]*)\}: (\d+) bytes", re.MULTILINE)


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
    for size, rest in _ALLOCATION.findall(assignment):
        if (
            "color " in rest or "thread-local" in rest
        ):  # not HBM; operands of a called computation, which lie in its caller's
            continue
        if " parameter " in rest:
            arguments += int(size)
        else:
            temporary += int(size)
    return Hbm(
        arguments=arguments,
        temporary=temporary,
        limit=limit,
        buffers=tuple(_at_peak(live, module)[:most]),
    )


def _at_peak(live: str, module: Module) -> list[Buffer]:
    """What is alive at the fullest moment, largest first."""
    begin = live.find("(peak):")
    if begin < 0:
        return []
    end = live.find("Stack trace", begin)
    by_name = {one.name: one for computation in module.computations.values() for one in computation}
    stored: dict[tuple[int, ...], str] = {}
    for array in sorted(module.entry.parameters.values(), key=lambda p: "trained" not in p.op_name):
        if array.shapes and array.op_name and len(array.shapes[0].dims) > 1:
            stored.setdefault(array.shapes[0].dims, array_name(array.op_name))
    found = []
    for name, index, size in _LIVE.findall(live, begin, end if end > 0 else len(live)):
        one = by_name.get(name)
        if one is None or (one.opcode == "parameter" and one.name not in module.entry.instructions):
            continue  # what a loop is handed is counted where it comes from
        buffer = _buffer(module, one, [int(i) for i in index.split(",") if i], int(size), stored)
        if buffer is not None:
            found.append(buffer)
    return sorted(found, key=lambda buffer: -buffer.bytes)


def _buffer(
    module: Module, one: Instruction, index: list[int], size: int, stored: dict[tuple[int, ...], str]
) -> Buffer | None:
    """None for what does not lie in HBM."""
    if one.opcode == "parameter":
        return Buffer(bytes=size, name=array_name(one.op_name) or one.name, shape=str(one.shapes[0]), made=False)
    shape: Shape | None = one.shapes[0] if len(one.shapes) == 1 else None
    source = one
    if index and index[0] < len(one.shapes):
        shape = one.shapes[index[0]]
        body = module.called(one, "body") if one.opcode == "while" else None
        if body is not None and body.root.opcode == "tuple" and index[0] < len(body.root.operands):
            source = body[body.root.operands[index[0]]]
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
    return Buffer(bytes=size, name=name, shape=str(shape) if shape is not None else "", made=True)


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
