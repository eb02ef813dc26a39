"""What a compiled program does, as numbers: the instructions of the chip in order, without the text they were read from.

`reading.py` makes a `Program` of libtpu's text, `timeline.py` says how long it takes. It is what the cache keeps and what
`docs/measurements` records, so that an estimate can be made again, and checked, without compiling again.
"""

from typing import Literal

import msgspec

from podway.plan.network import Box

Kind = Literal["matrix", "memory", "kernel", "collective", "prefetch", "wait", "loop", "branch"]
ProductDtype = Literal["", "int8", "fp8"]  # of both operands; "": bfloat16 or wider
Lane = tuple[int, int]  # physical axis (-1: the data-centre network, -2: HBM, -3: the host), direction (0 or 1)


class Exchange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A collective: what moves, and between which chips as one of them sees it."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all, collective-permute
    moved: float  # bytes on a device: the larger one of what goes in and what comes out
    box: Box = ()  # devices along each physical axis of a slice
    stride: Box = ()
    slices: int = 1
    hops: int = 0  # of a permute: the longest way
    load: int = 1  # of a permute: transfers that share its busiest link
    lane: Lane | None = None  # of a permute

    @property
    def size(self) -> int:
        """Devices of one slice that exchange."""
        found = 1
        for side in self.box:
            found *= side
        return found


class Attention(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A kernel of attention: its walk over blocks of scores, of all heads and sequences of a device together."""

    part: Literal["forward", "dq", "dkv"]
    d_head: int
    size: int  # sides of a block
    grid: float  # steps
    computed: float  # steps that the mask leaves
    rows: float
    fused: bool = False  # dkv makes dq as well


class Grouped(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A product of rows with one of several matrices each (`ragged_dot`, the experts of a mixture), as its tiles compute it."""

    rows: float  # tiles that two groups share counted twice
    inner: float
    columns: float
    groups: int
    cycles: float = 0.0  # of its kernel (podway.model.expert_tiles); 0: not known

    @property
    def flops(self) -> float:
        """Of one pass."""
        return 2.0 * self.rows * self.inner * self.columns


class Op(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instruction."""

    name: str
    kind: Kind
    what: str = ""  # where in the model it comes from
    shape: str = ""
    flops: float = 0.0
    dtype: ProductDtype = ""  # of what its products multiply
    bytes: float = 0.0  # through HBM
    host: Literal["", "in", "out"] = ""  # its bytes come from host memory, or go there
    cycles: int | None = None  # as the compiler expects; only in a program that was compiled to the end
    shuffled: float = 0.0  # elements of a copy from one tiling into another, which the vector unit must take apart
    attention: Attention | None = None
    grouped: Grouped | None = None
    exchange: Exchange | None = None
    starts: bool = False  # an exchange that goes on beside what follows, until an op waits for it
    waits_for: str = ""
    turns: int | None = 1  # of a loop; None: they cannot be read; 0: it is there for rare cases, and is not counted
    blocks: "tuple[tuple[Op, ...], ...]" = ()  # the body of a loop; the ways of a branch


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    ops: tuple[Op, ...]
    complete: bool  # compiled to the end: the ops carry cycles
    unread: int = 0  # lines of the text that could not be read


def each(ops: tuple[Op, ...], times: int = 1) -> "list[tuple[Op, int]]":
    """Every instruction, and how often it runs; a loop whose turns are unknown counts once, one that is not entered not at all."""
    found: list[tuple[Op, int]] = []
    for op in ops:
        if op.turns == 0:
            continue
        if not op.blocks:
            found.append((op, times))
        for block in op.blocks:
            found += each(block, times * (op.turns or 1))
    return found


def asynchronous(program: Program) -> dict[str, tuple[int, int]]:
    """{kind of collective: (that run beside other work, that are waited for)}; the body of a loop counts once."""
    found: dict[str, tuple[int, int]] = {}
    for op, _ in each(program.ops):
        if op.exchange is not None:
            beside, alone = found.get(op.exchange.kind, (0, 0))
            found[op.exchange.kind] = (beside + op.starts, alone + (not op.starts))
    return dict(sorted(found.items()))
