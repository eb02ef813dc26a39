"""A compiled TPU program as libtpu prints it: computations, instructions, shapes with their padding, and loop counts.

The text is undocumented and changes with releases, so this reads little of it: names, types, opcodes, operands and a few
attributes, each by a pattern that a test holds to recorded text. What cannot be read is left out and counted, never
guessed: `Module.unread` says how many lines, `trips` is None for a loop whose turns cannot be told.

The instructions of a computation stand in the order in which the chip runs them (`is_scheduled=true`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3b11fnuz": 8, "token": 0,
}  # fmt: skip
_SHAPE = re.compile(r"(\w+)\[([0-9,<= ]*)\](?:\{([0-9,]*)(?::((?:[A-Z]\([^)]*\)|\([^)]*\))*))?[^}]*\})?")
_TILE = re.compile(r"T?\(([0-9,*]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_BEGINS = re.compile(r"  (ROOT )?%?[\w.\-]+ = ")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")


@dataclass(frozen=True)
class Shape:
    """One array: its dimensions, how it is tiled, and in which memory it lies (0: HBM)."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()  # dimensions from minor to major
    tile: tuple[int, ...] = ()
    space: int = 0

    @property
    def elements(self) -> int:
        """As the program sees it."""
        return prod(self.dims)

    @property
    def bytes(self) -> int:
        """As it lies in memory, tiles filled up."""
        dims = [self.dims[i] for i in reversed(self.order)] if len(self.order) == len(self.dims) else list(self.dims)
        for back, unit in enumerate(reversed(self.tile[-len(dims) :] if dims else ()), start=1):
            dims[-back] = -(-dims[-back] // unit) * unit
        return prod(dims) * BITS.get(self.dtype, 32) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # the leaves of a tuple, or one
    operands: tuple[str, ...]
    text: str  # what follows the operands
    root: bool = False
    literal: str = ""  # of a constant or a parameter: what stands in the parentheses

    def attribute(self, key: str) -> str | None:
        """`calls=%x` -> x; `called_computations={%x}` -> x; `index=3` -> 3."""
        found = re.search(rf"(?:^|[ ,]){key}=\{{?%?([\w.\-]+)", self.text)
        return found[1] if found else None

    @cached_property
    def op_name(self) -> str:
        """The path of jax operations that it came from."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""

    @cached_property
    def cycles(self) -> int | None:
        """What the compiler itself expects it to take; only in a program that was compiled to the end."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.text)
        return int(found[1]) if found and int(found[1]) else None

    @property
    def target(self) -> str:
        """Of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.text)
        return found[1] if found else ""


@dataclass
class Computation:
    """Instructions in the order they run."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[name]

    def get(self, name: str) -> Instruction | None:
        """None for what is not here."""
        return self.instructions.get(name)

    @cached_property
    def root(self) -> Instruction:
        """What it gives back."""
        return next((i for i in self if i.root), list(self)[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """By number."""
        return {int(i.literal): i for i in self if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who reads each value."""
        found: dict[str, list[Instruction]] = {}
        for one in self:
            for name in dict.fromkeys(one.operands):
                found.setdefault(name, []).append(one)
        return found


@dataclass
class Module:
    """A program."""

    computations: dict[str, Computation]
    entry: Computation
    unread: int = 0

    def called(self, instruction: Instruction, key: str = "calls") -> Computation | None:
        """The computation that an instruction names."""
        name = instruction.attribute(key)
        return self.computations.get(name) if name else None


def read_module(text: str) -> Module:
    """The program of a text."""
    computations: dict[str, Computation] = {}
    entry = here = None
    unread = 0
    for line in _lines(text):
        if line.startswith("  ") and here is not None:
            one = _instruction(line.strip())
            if one is None:
                unread += 1
            else:
                here.instructions[one.name] = one
        elif head := _HEAD.match(line):
            here = computations[head[2]] = Computation(head[2])
            entry = here if head[1] else entry
        else:
            here = None
    if entry is None:
        raise ValueError("the text holds no ENTRY computation")
    return Module(computations, entry, unread)


def _lines(text: str) -> Iterator[str]:
    """Instructions and headers, each on one line: the settings of a kernel may be printed over several."""
    parts: list[str] = []
    inside = False
    for line in text.splitlines():
        closes = line.startswith("}") and not line.startswith("}}")  # `}` or `}, execution_thread="sparsecore"`
        if inside and not closes and not _BEGINS.match(line):
            parts.append(line)
            continue
        if parts:
            yield " ".join(parts)
        parts = [line]
        inside = not closes and (inside or _HEAD.match(line) is not None)
    if parts:
        yield " ".join(parts)


def _instruction(line: str) -> Instruction | None:
    root = line.startswith("ROOT ")
    name, equals, rest = line.removeprefix("ROOT ").partition(" = ")
    if not equals:
        return None
    end = _closing(rest, 0) + 1 if rest.startswith("(") else 0
    found = _OPCODE.search(rest, end)
    if found is None:
        return None
    close = _closing(rest, found.end() - 1)
    inside = rest[found.end() : close]
    return Instruction(
        name=name.lstrip("%"),
        opcode=found[1],
        shapes=tuple(_shapes(rest[: found.start()])),
        operands=tuple(_NAME.findall(inside)),
        text=rest[close + 1 :],
        root=root,
        literal=inside if found[1] in ("constant", "parameter") else "",
    )


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for at in range(start, len(text)):
        if text[at] == "(":
            depth += 1
        elif text[at] == ")":
            depth -= 1
            if not depth:
                return at
    return len(text)


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims, order, layout in _SHAPE.findall(text):
        if dtype not in BITS:
            continue
        tile = _TILE.search(layout) if layout.startswith("T") else None
        space = _SPACE.search(layout)
        yield Shape(
            dtype=dtype,
            dims=tuple(int(d.strip("<= ")) for d in dims.split(",") if d.strip("<= ")),
            order=tuple(int(d) for d in order.split(",") if d),
            tile=tuple(int(t) for t in tile[1].split(",") if t.isdigit()) if tile else (),
            space=int(space[1]) if space else 0,
        )


def trips(module: Module, loop: Instruction, around: Computation) -> int | None:
    """How often a loop turns: (bound - start) / step of the counter that its condition compares."""
    condition, body = module.called(loop, "condition"), module.called(loop, "body")
    if condition is None or body is None:
        return None
    test = condition.root
    while test.opcode in ("bitcast", "convert", "copy") and test.operands:
        test = condition[test.operands[0]]
    if test.opcode == "fusion":
        inner = module.called(test)
        if inner is None:
            return None
        return _trips(inner.root, inner, test, condition, loop, around, body)
    return _trips(test, condition, None, condition, loop, around, body)


def _trips(
    test: Instruction,
    inside: Computation,
    fusion: Instruction | None,
    condition: Computation,
    loop: Instruction,
    around: Computation,
    body: Computation,
) -> int | None:
    if test.opcode != "compare" or len(test.operands) != 2:
        return None
    index = bound = None
    for name in test.operands:
        one = inside[name]
        if fusion is not None and one.opcode == "parameter":
            one = condition[fusion.operands[int(one.literal)]]
        if one.opcode == "get-tuple-element" and (value := _carried(one, loop, around, body)) is not None:
            bound = value
        elif one.opcode == "get-tuple-element":
            index = int(one.attribute("index") or -1)
        else:
            bound = _constant(one)
    if index is None or bound is None:
        return None
    start, step = _start(loop, around, index), _step(loop, around, body, index)
    if start is None or not step:
        return None
    direction = re.search(r"direction=(\w+)", test.text)
    over = 1 if direction and direction[1] in ("LE", "GE") else 0
    return max(0, -(-(bound + over - start) // step)) if step > 0 else max(0, -(-(start - bound + over) // -step))


def _constant(one: Instruction) -> int | None:
    return int(one.literal) if one.opcode == "constant" and re.fullmatch(r"-?\d+", one.literal) else None


def _carried(one: Instruction, loop: Instruction, around: Computation, body: Computation) -> int | None:
    """A constant that the loop carries round unchanged."""
    index = int(one.attribute("index") or -1)
    back = body.root.operands
    if body.root.opcode != "tuple" or index >= len(back):
        return None
    same = body[back[index]]
    if same.opcode != "get-tuple-element" or same.attribute("index") != str(index):
        return None
    return _start(loop, around, index)


def _start(loop: Instruction, around: Computation, index: int) -> int | None:
    first = around.get(loop.operands[0])
    if first is None or first.opcode != "tuple" or index >= len(first.operands):
        return None
    return _constant(_copied(around[first.operands[index]], around))


def _copied(one: Instruction, here: Computation) -> Instruction:
    """What an instruction is a copy of."""
    while one.opcode in ("copy", "bitcast") and one.operands:
        one = here[one.operands[0]]
    return one


def _step(loop: Instruction, around: Computation, body: Computation, index: int) -> int | None:
    if body.root.opcode != "tuple" or index >= len(body.root.operands):
        return None
    last = _copied(body[body.root.operands[index]], body)
    if last.opcode != "add":
        return None
    for one in (_copied(body[name], body) for name in last.operands):
        value = _carried(one, loop, around, body) if one.opcode == "get-tuple-element" else _constant(one)
        if value is not None:
            return value
    return None
