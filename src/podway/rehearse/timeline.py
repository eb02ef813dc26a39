"""How long a compiled program takes: its instructions in the order the chip runs them, with what overlaps.

1. Computation goes one instruction after the other. A loop is its body times its turns.
2. A transfer (an asynchronous collective, a prefetch from HBM, a slice to or from host memory) begins at its start, once the
   links it needs are free, and the chip waits for it where the program says so. A synchronous collective is waited for at once.
3. What an instruction takes is known three ways:
     high   the compiler's own cycles, for everything that has them
     point  products: their FLOPs at the rate that large products reach, no less than the compiler's cycles over
            OVERSTATED; copies from one tiling into another: the cycles; all else: the smaller one of cycles and roofline
     low    FLOPs over peak, and roofline for all else
   Grouped products (experts) are their tiles' FLOPs at the same rates, and no less than the cycles of their kernel.
   The interval is [low, high]. A program that was not compiled to the end carries no cycles; then `high` takes products at
   a rate below the lowest that the compiler's cycles gave a whole program (SLOW).

Rates are those of the planner (`plan/chips.py`); nothing is fitted here.
"""

from collections.abc import Callable
from math import log2
from typing import Literal

import msgspec

from podway.plan.chips import RELAYOUT_ELEMENTS_PER_CYCLE, STRAGGLER_LOSS_PER_DOUBLING, Device
from podway.plan.kernels import Blocks
from podway.rehearse.fabric import Fabric
from podway.rehearse.program import Lane, Op, Program, each

Mode = Literal["low", "point", "high"]
MODES: tuple[Mode, ...] = ("low", "point", "high")
_HBM: Lane = (-2, 0)  # prefetches share the way from HBM
_HOST: dict[str, Lane] = {"in": (-3, 0), "out": (-3, 1)}  # the link to the host carries both ways at once
# The compiler's cycles of a large product are 1.04 to 1.83 times its FLOPs over peak, the most where a norm or a softmax is
# fused into it, which the hardware hides: libtpu 0.0.51, the products of the four 16B-128B programs.
OVERSTATED = 1.83
SLOW = 0.80  # of peak, of all products of a program by its own cycles: 0.815 (32B) to 0.926 (128B)


class OpCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one instruction costs a step."""

    name: str
    kind: str
    what: str
    shape: str
    seconds: float  # over all its turns; of a collective what the chip waits for
    times: int


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: an interval with a point, and the point by part."""

    low: float
    point: float
    high: float
    parts: dict[str, float]
    top: tuple[OpCost, ...]
    notes: tuple[str, ...] = ()


def estimate(program: Program, fabric: Fabric, *, top: int = 12) -> Estimate:
    """How long a program takes on a slice."""
    runs = {mode: _Run(fabric, mode) for mode in MODES}
    slices = max((op.exchange.slices for op, _ in each(program.ops) if op.exchange is not None), default=1)
    waits = STRAGGLER_LOSS_PER_DOUBLING * log2(slices)  # for the slowest slice: in no program, but in every joined run
    seconds = {mode: (1 + waits) * run.block(program.ops, 1) for mode, run in runs.items()}
    point = runs["point"]
    parts: dict[str, float] = {}
    for one in point.costs.values():
        parts[one.kind] = parts.get(one.kind, 0.0) + one.seconds
    if waits:
        parts["slices"] = seconds["point"] * waits / (1 + waits)
    ranked = sorted(point.costs.values(), key=lambda one: -one.seconds)
    return Estimate(
        low=min(seconds.values()),
        point=seconds["point"],
        high=max(seconds.values()),
        parts=parts,
        top=tuple(ranked[:top]),
        notes=tuple(_notes(program)),
    )


def _notes(program: Program) -> list[str]:
    ops = each(program.ops)
    kernels = sorted({op.name.rstrip(".0123456789") for op, _ in ops if op.kind == "kernel" and op.attention is None})
    found = []
    if kernels:
        found.append(f"kernels priced by the bytes they move alone, a floor: {', '.join(kernels)}")
    if unknown := sum(loop.turns is None for loop in _loops(program.ops)):
        found.append(f"{unknown} loops whose turns the text does not tell are counted once")
    if any(op.turns == 0 for op in _loops(program.ops)):
        found.append("experts are used evenly enough that one exchange takes all rows; further ones are not counted")
    if program.unread:
        found.append(f"{program.unread} lines of the compiler's text could not be read")
    return found


def _loops(ops: tuple[Op, ...]) -> list[Op]:
    """Also those inside others."""
    return [
        found for op in ops for found in ([op] if op.kind == "loop" else []) + [o for b in op.blocks for o in _loops(b)]
    ]


class _Run:
    """One way to price a program."""

    def __init__(self, fabric: Fabric, mode: Mode) -> None:
        self.fabric = fabric
        self.device: Device = fabric.device
        self.mode: Mode = mode
        self.costs: dict[str, OpCost] = {}

    def block(self, ops: tuple[Op, ...], times: int) -> float:
        """Seconds of a list of instructions, once."""
        now = 0.0
        free: dict[Lane, float] = {}
        ends: dict[str, float] = {}
        for op in ops:
            if op.kind == "loop":
                turns = 1 if op.turns is None else op.turns
                now += turns * sum(self.block(body, times * turns) for body in op.blocks)
            elif op.kind == "branch":
                now += self._branch([self.block(way, times) for way in op.blocks])
            elif op.kind == "wait":
                ready = ends.get(op.waits_for, now)
                self._charge(op, "waiting", max(0.0, ready - now), times)
                now = max(now, ready)
            elif op.kind in ("collective", "prefetch"):
                now = self._transfer(op, times, now, free, ends)
            else:
                seconds = self._compute(op)
                self._charge(op, op.kind, seconds, times)
                now += seconds
        return now

    def _branch(self, each: list[float]) -> float:
        """One of several ways is taken: the shortest, the mean or the longest of them."""
        choose: dict[Mode, Callable[[list[float]], float]] = {
            "low": min, "high": max, "point": lambda all: sum(all) / len(all),
        }  # fmt: skip
        return choose[self.mode](each) if each else 0.0

    def _transfer(self, op: Op, times: int, now: float, free: dict[Lane, float], ends: dict[str, float]) -> float:
        lanes: tuple[Lane, ...] = (_HBM,)
        seconds = op.bytes / self.device.hbm_bandwidth
        if op.host:
            lanes, seconds = (_HOST[op.host],), op.bytes / self.device.host_bandwidth
        elif op.exchange is not None:
            lanes, seconds = self.fabric.lanes(op.exchange), self.fabric.seconds(op.exchange)
        begin = max([now, *(free.get(lane, 0.0) for lane in lanes)])
        free.update(dict.fromkeys(lanes, begin + seconds))
        if op.starts:
            ends[op.name] = begin + seconds
            return now
        self._charge(op, "collective", begin + seconds - now, times)
        return begin + seconds

    def _compute(self, op: Op) -> float:
        device = self.device
        moved = op.bytes / device.hbm_bandwidth
        if op.attention is not None:
            a = op.attention
            blocks = Blocks(a.size, a.grid, a.computed, a.rows)
            return max(moved, device.attention_seconds(a.part, blocks, fused=a.fused, d_head=a.d_head))
        if op.grouped is not None:
            rate = {"low": device.peak_bf16, "point": device.matrix_rate, "high": SLOW * device.peak_bf16}[self.mode]
            slowest = 0.0 if self.mode == "low" else op.grouped.cycles / device.clock / device.cores
            return max(moved, op.grouped.flops / rate, slowest)
        # Of a megacore they are those of both cores together: on v5p 1.07 to 1.88 times a large product's FLOPs over the chip's peak.
        cycles = None if op.cycles is None else op.cycles / device.clock
        if op.shuffled:
            slow = op.shuffled / RELAYOUT_ELEMENTS_PER_CYCLE / device.clock / device.cores
            return moved if self.mode == "low" else max(moved, slow if cycles is None else cycles)
        if not op.flops:
            if cycles is None or self.mode == "low":
                return moved
            return cycles if self.mode == "high" or not moved else min(cycles, moved)
        kind = op.dtype or "bfloat16"
        ideal = max(op.flops / device.peak(kind), moved)
        if self.mode == "low":
            return ideal
        if self.mode == "high":
            return max(op.flops / device.peak(kind) / SLOW, moved) if cycles is None else cycles
        reached = max(ideal, op.flops / device.product_rate(kind))
        return reached if cycles is None else max(reached, cycles / OVERSTATED)

    def _charge(self, op: Op, kind: str, seconds: float, times: int) -> None:
        if seconds > 0:
            self.costs[f"{len(self.costs)}"] = OpCost(
                name=op.name, kind=kind, what=op.what, shape=op.shape, seconds=seconds * times, times=times
            )
