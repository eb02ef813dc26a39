"""HBM of one device in a training step, by part.

Weights, optimizer state and gradients are the bytes of the real sharded arrays (podway.model.layout). Saved activations
follow the remat policy and the named tensors of the parameter table. There are two full moments, one after the other, and the
fuller one counts: the end of the forward pass, with `logits`, before there are gradients of layers; and the backward pass of
a layer, with all gradients and `temp`, its working set: gathered weights, the gradient of them before it is reduced, and
what flows through the layer.

How the compiler schedules a step differs by generation (`Device`): where gradients of weights are made late, where that of the output
matrix is summed at the end. Against programs as libtpu 0.0.51 compiles them (published/compiled_hbm.csv: the 16B-128B jobs;
docs/measurements: Podway's own trainer over a grid of models and meshes) this is within 5%; docs/planning.md has the table.
"""

from functools import cache, lru_cache
from math import prod
from typing import Literal, NamedTuple

import msgspec

from podway.model.expert_dispatch import DROPLESS
from podway.model.layout import TRAIN_RULES, MeshShape, params_per_chip, shard_dims, shard_shape
from podway.model.params import activations, params
from podway.model.shape import ModelShape, layer_kinds
from podway.plan.chips import LANES, Device
from podway.plan.products import head_product, layer_weights
from podway.plan.training import BYTES, COMPUTE_BYTES, Adapters, Training
from podway.plan.working_set import Cut, Loss, backward_bytes, cut_of, loss_bytes, loss_of

GIB = 2**30
# How far above the limit a step is said to be close to it: published steps of MaxText that ran are up to 7.4% above. Podway's own
# compiled steps are within 5% (docs/planning.md; `make bench-plan` holds the planner to it).
SPREAD = 0.09
# Filled to more than this, the compiler orders a step for memory: sums and kernels' residuals do not wait. (Llama 3.2 1B on v6e-8, 256
# sequences of 4096: 22.5 GiB of 31.2 where an order like that of smaller batches would take 28.)
_TIGHT, _HOPELESS = 0.85, 2.0


Verdict = Literal["fits", "close", "does not fit"]


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one device by part, and the limit that the compiler holds a program to."""

    weights: float
    optimizer: float
    gradients: float
    saved: float  # activations kept for the backward pass
    logits: float
    temp: float
    limit: int
    early: float | None = None  # gradients that exist beside the logits; None: all of them
    host: float = 0.0  # bytes of host memory that offloaded activations take, for this device
    host_limit: float = float("inf")  # this device's share of it

    @property
    def total(self) -> float:
        """The peak."""
        early = self.gradients if self.early is None else self.early
        return self.weights + self.optimizer + self.saved + max(early + self.logits, self.gradients + self.temp)

    @property
    def fits(self) -> bool:
        """Whether a program of this size loads."""
        return self.total <= self.limit and self.host <= self.host_limit

    @property
    def verdict(self) -> Verdict:
        """Whether it loads, as far as an estimate can tell: `close` is above the limit by less than the estimate may be off."""
        if self.fits:
            return "fits"
        close = self.total <= self.limit * (1 + SPREAD) and self.host <= self.host_limit
        return "close" if close else "does not fit"

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by name, in the order people are shown."""
        return {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "saved activations": self.saved,
            "logits": self.logits,
            "temp": self.temp,
        }

    @property
    def excess(self) -> str:
        """`OOM by 3.1 GiB; most of it is saved activations (6.0 GiB)`; empty where it fits."""
        if self.fits:
            return ""
        if self.host > self.host_limit:
            return f"offloaded activations need {self.host / GIB:.0f} GiB of host memory a device, which has {self.host_limit / GIB:.0f}"
        name, size = max(self.parts.items(), key=lambda part: part[1])
        return f"OOM by {(self.total - self.limit) / GIB:.1f} GiB, mostly {name} ({size / GIB:.1f} GiB)"


def train_memory(
    shape: ModelShape,
    mesh: MeshShape,
    training: Training,
    limit: int,
    *,
    usable: int | None = None,
    host_limit: float = float("inf"),
    device: Device | None = None,
) -> Memory:
    """What one device holds at the peak of a step; `usable` is its HBM where the limit is set below it, `device` what decides how the
    compiler schedules the step: one that does nothing special where it is left out."""
    tokens, whole = training.tokens_per_device(mesh), usable or limit
    weights, optimizer, gradients = _state(shape, mesh, training)
    summed, early = _whole_sum(shape, mesh, training, device), _early(gradients, training)
    cut, step = cut_of(shape, mesh.fsdp, device), training.one_sequence
    flow = _flow_of(shape, mesh.tensor, mesh.expert, mesh.context, cut, step, tokens, whole, device)
    first = Memory(
        weights=weights,
        optimizer=optimizer,
        gradients=gradients + summed,
        saved=flow.saved,
        logits=flow.logits,
        temp=flow.temp,
        limit=limit,
        early=None if early is None else early + summed,
        host=flow.outside,
        host_limit=host_limit,
    )
    if _TIGHT * whole < first.total < _HOPELESS * whole:
        temp = backward_bytes(
            shape, mesh.tensor, mesh.expert, mesh.context, cut, step, tokens, flow.loss, device, tight=True
        )
        return msgspec.structs.replace(first, temp=temp)
    return first


class _Flow(NamedTuple):
    """What tokens take of a device, beside the state."""

    outside: float  # in host memory
    saved: float
    logits: float
    temp: float  # where there is room
    loss: Loss


# A search asks for the same tokens on the same tensor and expert groups on many slices: what fsdp splits is another each time, and
# this is not.
@lru_cache(maxsize=8192)
def _flow_of(
    shape: ModelShape,
    tensor: int,
    expert: int,
    context: int,
    cut: Cut,
    step: Training,
    tokens: float,
    whole: int,
    device: Device | None,
) -> _Flow:
    """That of a step, whatever its batch and microbatches: `tokens` of it are on a device."""
    outside = tokens * _saved_bytes(shape, tensor, expert, step.offload) if step.offload else 0.0
    loss = loss_of(shape, tensor, context, step, tokens, whole)
    # What is offloaded passes through HBM: that of the next layer comes while this one goes backward. In a parallel block the
    # layer's own waits until then, because its MLP goes backward first.
    saved = (
        tokens * _saved_bytes(shape, tensor, expert, step.held)
        + _kept_weights(shape, tensor, expert, cut, step)
        + outside / shape.layers * (2 if shape.block == "parallel" else 1)
    )
    logits = loss_bytes(shape, tensor, cut, step, tokens, loss, device)
    temp = backward_bytes(shape, tensor, expert, context, cut, step, tokens, loss, device, tight=False)
    return _Flow(outside, saved, logits, temp, loss)


def _whole_sum(shape: ModelShape, mesh: MeshShape, training: Training, device: Device | None) -> float:
    """Bytes of the sum over microbatches of the output matrix's gradient that exist beside a device's own part of it.

    Where that gradient is summed over devices at the end, so is the sum over microbatches: over a slice of 4x4 it is whole, over a
    larger one it is summed along one axis before.
    """
    if device is None or not device.end_sum or training.microbatches == 1 or training.adapters is not None:
        return 0.0
    if shape.embedding.tied or training.program.gradients != "rings":
        return 0.0
    return BYTES["float32"] * head_product(shape, mesh.tensor).weights / (1 if mesh.fsdp <= 16 else 4)


def _early(gradients: float, training: Training) -> float | None:
    """The sum over microbatches is there from the beginning; the gradients of one come with the backward pass."""
    if not training.program.casts_once:
        return None
    summed = BYTES["float32"] if training.microbatches > 1 else 0.0
    return gradients * summed / gradient_bytes(training)


def _state(shape: ModelShape, mesh: MeshShape, training: Training) -> tuple[float, float, float]:
    """Weights, optimizer state, gradients."""
    held = float(held_params(shape, mesh.fsdp, mesh.expert, mesh.tensor))
    trained, stored, frozen = held, BYTES[training.params], 0.0
    if training.adapters is not None:
        trained, stored = float(adapter_params(shape, training.adapters)), BYTES["float32"]
        frozen = held * COMPUTE_BYTES
        if training.adapters.base == "int8":
            frozen -= (COMPUTE_BYTES - 1) * _held_matrices(shape, mesh.fsdp, mesh.expert, mesh.tensor)
    copies = COMPUTE_BYTES if training.program.casts_once and stored != COMPUTE_BYTES else 0
    kept, split = trained, state_shards(mesh, training)
    if split > mesh.fsdp:  # a step's weights are gathered from all slices at its beginning
        kept = float(held_params(shape, split, mesh.expert, mesh.tensor))
        copies = COMPUTE_BYTES
    if training.optimizer == "adamw":
        moments = 2 * kept * BYTES[training.moments]
    elif training.adapters is not None:
        moments = 0.0  # a row and a column of a thin matrix
    else:
        moments = BYTES["float32"] * factored_params(shape, split, mesh.expert, mesh.tensor)
    return frozen + kept * stored + trained * copies, moments, trained * gradient_bytes(training)


def state_shards(mesh: MeshShape, training: Training) -> int:
    """Into how many parts weights and moments are cut beside expert and tensor groups: over the slices too where these share them."""
    return mesh.fsdp * mesh.slices if training.state_over_slices else mesh.fsdp


def gradient_bytes(training: Training) -> float:
    """Bytes of an element of the gradient, with the float32 sum over microbatches where there are several."""
    return training.program.gradient_bytes + (BYTES["float32"] if training.microbatches > 1 else 0)


def held_params(shape: ModelShape, fsdp: int, expert: int, tensor: int) -> int:
    """Parameters on each device: those of `params_per_chip`, which a search asks for too many meshes to ask it each time.

    fsdp splits d_model and nothing else, and only where it divides it.
    """
    whole, split = _held_by_axis(shape, expert, tensor)
    return whole + (split // fsdp if shape.d_model % fsdp == 0 else split)


@cache
def _held_by_axis(shape: ModelShape, expert: int, tensor: int) -> tuple[int, int]:
    """Parameters on each device if fsdp were 1: of arrays without d_model's axis, and with it."""
    mesh = MeshShape(expert=expert, tensor=tensor)
    split = sum(prod(shard_shape(p, mesh, TRAIN_RULES)) for p in params(shape) if "embed" in p.axes)
    return params_per_chip(shape, mesh, TRAIN_RULES) - split, split


@cache
def _held_matrices(shape: ModelShape, fsdp: int, expert: int, tensor: int) -> int:
    """Parameters on each device that an int8 base keeps in int8: matrices of layers, not of experts or routers."""
    mesh = MeshShape(fsdp=fsdp, expert=expert, tensor=tensor)
    dense = [p for p in params(shape) if p.inputs and p.name.startswith("layers/") and "router" not in p.name]
    return sum(prod(shard_shape(p, mesh, TRAIN_RULES)) for p in dense if "experts" not in p.axes)


@lru_cache(maxsize=2048)
def factored_params(shape: ModelShape, fsdp: int, expert: int, tensor: int) -> int:
    """Numbers that Adafactor keeps: a row and a column of each matrix, all of each vector (Shazeer & Stern 2018)."""
    mesh, kept = MeshShape(fsdp=fsdp, expert=expert, tensor=tensor), 0
    for param in params(shape):
        dims = shard_shape(param, mesh, TRAIN_RULES)
        size, large = prod(dims), sorted(dims)[-2:]
        factored = len(large) == 2 and large[0] >= 128
        kept += size // large[0] + size // large[1] if factored else size
    return kept


@cache
def adapter_params(shape: ModelShape, adapters: Adapters) -> int:
    """LoRA parameters on each device: rank x (inputs + outputs) of each matrix that is adapted."""
    width = 0
    for param in params(shape):
        if param.name.rpartition("/")[2] in adapters.targets:
            stacks, inputs, outputs = param.split_dims
            width += prod(stacks) * (prod(inputs) + prod(outputs))
    return adapters.rank * width


def saved_bytes_per_token(shape: ModelShape, mesh: MeshShape, saved: tuple[str, ...]) -> float:
    """Bytes that a token leaves on its device until the backward pass, over all layers."""
    return _saved_bytes(shape, mesh.tensor, mesh.expert, saved)


@lru_cache(maxsize=2048)
def _saved_bytes(shape: ModelShape, tensor: int, expert: int, saved: tuple[str, ...]) -> float:
    return sum(_saved_of_kind(kind, tensor, expert, saved) for kind in layer_kinds(shape))


def _saved_of_kind(shape: ModelShape, tensor: int, expert: int, saved: tuple[str, ...]) -> float:
    mesh, size = MeshShape(tensor=tensor, expert=expert), 0.0
    wide = 0
    for kept in activations(shape):
        width = prod(shard_dims(kept.axes, kept.dims, mesh, TRAIN_RULES))
        if kept.axes[-1] == "head_dim":  # the lanes of a tile that a narrow head leaves empty
            each = kept.dims[-1]
            width = width // each * -(-each // LANES) * LANES
        wide += width if kept.name == "mlp_in" else 0
        if kept.name in saved and _asked_for(kept.name, shape):
            if shape.experts and kept.name == "mlp_in" and expert > 1:
                if DROPLESS.choose(chips=expert, per_token=shape.experts.per_token) == "all-to-all":
                    continue  # the exchange of rows computes them again
                width = width * expert  # the buffers hold the rows of the whole group
            size += width
    if "rest" in saved:
        # What has no name: two norms in float32, each with its input, and the activation with what its gradient needs.
        size += 8 * shape.d_model / tensor + 2 * wide
    return float(size * shape.layers * COMPUTE_BYTES)


def _asked_for(name: str, shape: ModelShape) -> bool:
    """Whether the backward pass needs a tensor at all: the end of a layer is the saved input of the next, and no policy keeps
    what nothing asks for."""
    if name == "mlp_out":
        return shape.block == "sandwich"
    return name != "attn_out" or shape.block != "parallel"


def _kept_weights(shape: ModelShape, tensor: int, expert: int, cut: Cut, training: Training) -> float:
    """Where nothing is computed again, the gathered weights of every layer stay for the backward pass."""
    if not training.keeps_gathered or not cut.split:
        return 0.0
    kinds = layer_kinds(shape)
    return COMPUTE_BYTES * sum(kind.layers * layer_weights(kind, tensor, expert) for kind in kinds)
