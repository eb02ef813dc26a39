"""`Plan`: one way to train on one kind of slice, with what it needs, how long a step takes, and what it costs.

`evaluate` makes one from a fixed configuration; `search.py` makes many and ranks them. Pure functions: nothing here
reads a clock, a file or a network.
"""

from functools import cache

import msgspec

from podway.catalog.prices import price_of
from podway.catalog.slices import Slice
from podway.errors import UserError
from podway.model.flops import Convention, flops_per_token
from podway.model.layout import TRAIN_RULES, MeshShape, kept_whole
from podway.model.shape import PLANNED_ONLY, ModelShape, no_quantized_products
from podway.plan.chips import device_of
from podway.plan.memory import GIB, SPREAD, Memory, train_memory
from podway.plan.network import place
from podway.plan.steptime import StepTime, step_time
from podway.plan.training import Training
from podway.plan.uncertainty import Uncertainty, kind_of_step, uncertainty_of

HOUR = 3600.0


class Rehearsed(msgspec.Struct, frozen=True, kw_only=True):
    """What the compiler says of a step: seconds by its program, bytes of HBM on a device."""

    seconds: float
    bytes: int


class TrainPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration and what it will do."""

    slice: Slice
    mesh: MeshShape
    training: Training
    memory: Memory
    time: StepTime
    model_flops: float  # of a step, by the program's convention: what MFU counts
    dollars_per_hour: float | None  # of all slices; None: no price is published
    mixture: bool = False  # of experts
    rehearsed: Rehearsed | None = None  # where it was compiled
    # Where it was not: how much longer than planned the compiled plans of the same question take on this generation.
    slower: float = 1.0

    @property
    def seconds(self) -> float:
        """Of a step: by its program where it was compiled."""
        return self.rehearsed.seconds if self.rehearsed else self.time.total * self.slower

    @property
    def hbm_bytes(self) -> float:
        """Of a device, likewise."""
        return float(self.rehearsed.bytes) if self.rehearsed else self.memory.total

    @property
    def slices(self) -> int:
        """How many slices are joined."""
        return self.mesh.slices

    @property
    def chips(self) -> int:
        """Of all slices."""
        return self.slices * self.slice.chips

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        return self.training.tokens / self.seconds

    @property
    def tflops_per_chip(self) -> float:
        """Model TFLOP/s of a chip."""
        return self.model_flops / self.seconds / self.chips / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak of the precision that products are computed in."""
        device = device_of(self.slice.generation)
        return self.tflops_per_chip * 1e12 / (device.peak(self.training.compute) * device.per_chip)

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """Dollars for a million tokens trained on."""
        if self.dollars_per_hour is None:
            return None
        return self.dollars_per_hour / HOUR / self.tokens_per_second * 1e6

    @property
    def kind(self) -> str:
        """What published steps it is like."""
        return kind_of_step(self.training.compute, mixture=self.mixture)

    @property
    def uncertainty(self) -> Uncertainty:
        """How far the step time may be off."""
        offloads = bool(self.training.offload)
        return uncertainty_of(self.seconds, self.slice.generation, self.kind, slices=self.slices, offloads=offloads)

    def hours(self, tokens: float) -> float:
        """Hours to train on this many tokens."""
        return tokens / self.tokens_per_second / HOUR

    def dollars(self, tokens: float) -> float | None:
        """What that costs."""
        return None if self.dollars_per_hour is None else self.dollars_per_hour * self.hours(tokens)


def evaluate(shape: ModelShape, slice: Slice, mesh: MeshShape, training: Training, *, spot: bool = False) -> TrainPlan:
    """One configuration, whether it fits or not; a UserError where it makes no sense."""
    check_products(shape, training)
    device = device_of(slice.generation)
    placement = place(mesh, slice)
    if mesh.tile is None and mesh.tensor > 1:
        mesh = msgspec.structs.replace(mesh, tile=placement.tensor.box)
    flops = _flops(shape, training.seq, training.program.convention)
    if training.adapters is not None:
        flops *= 2 / 3  # frozen matrices have no gradient of their own
    hourly = _price(slice, spot)
    plan = TrainPlan(
        slice=slice,
        mesh=mesh,
        training=training,
        memory=train_memory(
            shape,
            mesh,
            training,
            device.hbm_limit,
            host_limit=device.host_bytes,
            device=device,
        ),
        time=step_time(shape, mesh, training, device, placement),
        model_flops=flops * training.tokens,
        dollars_per_hour=None if hourly is None else hourly * mesh.slices,
        mixture=shape.experts is not None,
    )
    if plan.mfu > 1:
        raise above_peak(plan.mfu, f"{slice.accelerator_type} {mesh}")
    return plan


def above_peak(mfu: float, where: str) -> AssertionError:
    """A figure above the chip's peak is a mistake of the model of the chip: it is reported, never printed as a result."""
    return AssertionError(f"internal error: the estimate for {where} is above the peak of its chips (MFU {mfu:.2f})")


@cache
def _flops(shape: ModelShape, seq: int, convention: Convention) -> float:
    return flops_per_token(shape, seq, convention)


@cache
def check_products(shape: ModelShape, training: Training) -> None:
    """Refuse products that Podway's trainer has not."""
    if training.program.name == "podway" and (why := no_quantized_products(shape, training.compute)):
        raise UserError(why, "leave --compute out, or plan MaxText's program: --program maxtext")


def _price(slice: Slice, spot: bool) -> float | None:
    return price_of(slice, spot=spot)


def notes_on(shape: ModelShape, plan: TrainPlan) -> list[str]:
    """What a person should know of a plan beside its figures."""
    notes = list(kept_whole(shape, plan.mesh, TRAIN_RULES))
    if plan.time.relayout:
        rows = shape.d_model // plan.mesh.fsdp
        notes.append(
            f"fsdp={plan.mesh.fsdp} cuts d_model {shape.d_model} into {rows} rows, not a multiple of 8: gathered weights are "
            f"copied into another tiling ({plan.time.relayout:.2f} s a step)"
        )
    if plan.memory.verdict == "close":
        notes.append(
            f"{plan.memory.total / GIB:.1f} GiB are planned where {plan.memory.limit / GIB:.1f} may be used: the estimate is within "
            f"{100 * SPREAD:.0f}% of the compiler's figure, so it may fit; podway rehearse train compiles it and says"
        )
    if shape.family in PLANNED_ONLY:
        notes.append(f"podway train has no {shape.family} decoder: this model is planned, not trained")
    if plan.dollars_per_hour is None:
        notes.append(f"no price is published for {plan.slice.generation}: costs are unknown, not zero")
    return notes
