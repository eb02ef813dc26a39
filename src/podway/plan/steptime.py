"""How long a training step takes on one slice or several, by part.

A step is a sum of what is exposed, because it is a chain of layers:

1. Matrix products at the reached rate, or at the speed of HBM where they are thin; the attention kernel.
2. HBM: norms, rotations, activations in the backward pass, the softmax of the logits, the optimizer.
3. ICI inside a slice. Where the program runs gathers of fsdp weights beside the layer's products (`Program.beside`), they are
   exposed only where they take longer; elsewhere, as are gradient reductions and the exchanges of tensor, context and
   expert groups, they are waited for.
4. Host memory: tensors that are offloaded go out beside the forward pass and come back beside the backward pass.
5. DCN between slices: one all-reduce of the gradients, exposed; and the wait for the slowest slice.

What each part is compared with, and how far off it is: docs/planning.md.
"""

from functools import cache
from math import log2
from typing import NamedTuple

import msgspec

from podway.model.layout import MeshShape
from podway.model.shape import ModelShape
from podway.plan.chips import (
    RELAYOUT_ELEMENTS_PER_CYCLE,
    STRAGGLER_LOSS_PER_DOUBLING,
    Device,
)
from podway.plan.kernels import blocks_of
from podway.plan.memory import adapter_params, held_params, misaligned
from podway.plan.network import MeshPlacement, dcn_reduce_seconds
from podway.plan.products import dispatch_seconds, head_product, layer_products, layer_weights, needed_again, widths
from podway.plan.training import BYTES, COMPUTE_BYTES, Program, Training


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What one mesh axis moves over ICI in a step, in one direction."""

    axis: str
    direction: str  # gather, reduce, exchange
    seconds: float  # if nothing else happened
    exposed: float  # of which the step waits


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step by part; the parts add up to the step."""

    matrix: float
    attention: float
    hbm: float
    relayout: float
    traffic: tuple[Traffic, ...]
    dcn: float
    straggler: float
    host: float = 0.0  # transfers to and from host memory that nothing hides

    @property
    def ici(self) -> float:
        """What the step waits for ICI."""
        return sum(one.exposed for one in self.traffic)

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return (
            self.matrix + self.attention + self.hbm + self.relayout + self.ici + self.host + self.dcn + self.straggler
        )

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by name, in the order people are shown."""
        named = {"matrix": self.matrix, "attention": self.attention, "HBM": self.hbm, "relayout copies": self.relayout}
        for one in self.traffic:
            named[f"ICI {one.axis} {one.direction}"] = one.exposed
        return named | {"host memory": self.host, "DCN": self.dcn, "slowest slice": self.straggler}

    @property
    def binds(self) -> str:
        """The resource that most of the step is costs on."""
        groups = {
            "the matrix unit": self.matrix,
            "the attention kernel": self.attention,
            "HBM": self.hbm + self.relayout,
            "ICI": self.ici,
            "host memory": self.host,
            "DCN": self.dcn + self.straggler,
        }
        return max(groups, key=lambda name: groups[name])


class _Layer(NamedTuple):
    """One layer of one microbatch on one device."""

    forward: float  # products and kernels
    backward: float
    attention: float  # of both
    hbm: float
    relayout: float
    weights: float  # elements of the layer that fsdp gathers
    first: float  # of which those of the matrix that a pass starts with


def step_time(
    shape: ModelShape, mesh: MeshShape, training: Training, device: Device, placement: MeshPlacement
) -> StepTime:
    """The step by part."""
    tokens = training.tokens_per_device(mesh)
    times = training.microbatches * shape.layers
    layer = _layer(shape, mesh, training, device, tokens)
    loss, loss_hbm = _loss(shape, mesh, training, device, tokens)
    traffic = _traffic(shape, mesh, training, device, placement, layer, tokens)
    update, reduced = _update(shape, mesh, training, device)
    data = placement.data.reduce_seconds(reduced, device)
    if data:
        traffic.append(Traffic(axis="data", direction="reduce", seconds=data, exposed=data))
    dcn = dcn_reduce_seconds(reduced, mesh.slices, device)
    one = StepTime(
        matrix=times * (layer.forward + layer.backward - layer.attention) + training.microbatches * loss,
        attention=times * layer.attention,
        hbm=times * layer.hbm + training.microbatches * loss_hbm + update,
        relayout=times * layer.relayout,
        traffic=tuple(traffic),
        dcn=dcn,
        straggler=0.0,
        host=times * _host(shape, mesh, training, device, tokens, layer),
    )
    waits = one.total * STRAGGLER_LOSS_PER_DOUBLING * log2(mesh.slices)
    return msgspec.structs.replace(one, straggler=waits)


def _layer(shape: ModelShape, mesh: MeshShape, training: Training, device: Device, tokens: float) -> _Layer:
    products = layer_products(shape, mesh)
    again = needed_again(shape, training)
    trained = 0.0 if training.adapters else 1.0  # frozen matrices need no gradient of their own
    forward = backward = 0.0
    for product in products:
        forward += product.seconds(tokens, device, passes=(1, 0, 0), training=training)
        passes = (float(product.name in again), 1.0, trained)
        backward += product.seconds(tokens, device, passes=passes, training=training)
    dispatch = dispatch_seconds(shape, training, device, tokens)
    forward += dispatch
    backward += dispatch * (2 + ("mlp_in" not in training.saved))
    ahead, back = _attention(shape, mesh, training, device, tokens)
    weights = layer_weights(shape, mesh.tensor, mesh.expert)
    relayout = 0.0
    if training.program.relayouts and misaligned(shape, mesh):
        # Matrices that end in d_model, once for each pass that gathers them.
        copied = 2.0 * sum(p.weights for p in products if p.name in ("o", "down", "experts_down", "shared_down"))
        relayout = copied / RELAYOUT_ELEMENTS_PER_CYCLE / device.clock
    return _Layer(
        forward=forward + ahead,
        backward=backward + back,
        attention=ahead + back,
        hbm=tokens * _elementwise_bytes(shape, mesh.tensor, mesh.expert, training) / device.hbm_bandwidth,
        relayout=relayout,
        weights=weights,
        first=float(products[0].weights),
    )


def _attention(
    shape: ModelShape, mesh: MeshShape, training: Training, device: Device, tokens: float
) -> tuple[float, float]:
    """Mean over the layers of the kernel's forward and backward time; computed again unless its result is kept."""
    heads = shape.heads // mesh.tensor if shape.heads % mesh.tensor == 0 else shape.heads
    again = 0.0 if "context" in training.saved else 1.0
    ahead, back = _mean_attention(shape, training.seq, mesh.context, training.program, device)
    scale = tokens * mesh.context / training.seq * heads
    return ahead * scale, (again * ahead + back) * scale


@cache
def _mean_attention(shape: ModelShape, seq: int, context: int, program: Program, device: Device) -> tuple[float, float]:
    """Seconds of one head over a device's piece of a sequence, forward and backward, mean over the layers."""
    size, fused = attention_block(seq // context or 1, program.attention_block), program.attention_fused
    ahead = back = 0.0
    for window in shape.layer_windows:
        blocks = blocks_of(size, max(1, seq // context), seq, window=window, causal=program.causal)
        ahead += device.attention_seconds("forward", blocks, fused=fused, d_head=shape.d_head)
        back += device.attention_seconds("backward", blocks, fused=fused, d_head=shape.d_head)
    return ahead / shape.layers, back / shape.layers


def attention_block(seq: int, largest: int) -> int:
    """The largest block up to `largest` that divides a sequence (podway.model.attention)."""
    size = largest
    while size > 128 and seq % size:
        size //= 2
    return min(size, seq)


def _host(
    shape: ModelShape, mesh: MeshShape, training: Training, device: Device, tokens: float, layer: _Layer
) -> float:
    """What a layer's transfers to host memory take beyond its forward pass, and those back beyond its backward pass."""
    if not training.offload:
        return 0.0
    width = widths(shape, mesh.tensor, mesh.expert)
    seconds = COMPUTE_BYTES * tokens * sum(width[name] for name in training.offload) / device.host_bandwidth
    return max(0.0, seconds - layer.forward) + max(0.0, seconds - layer.backward)


def _elementwise_bytes(shape: ModelShape, tensor: int, expert: int, training: Training) -> float:
    """HBM bytes of a token in one layer that no matrix product hides.

    Forward: each norm reads and writes the stream, each branch adds to it; queries, keys and values change
    their order of heads and length for the kernel; rotations rewrite queries and keys in halves of a head, which fill
    half of each row of lanes and so cost twice. The backward pass does that again and once more for the gradients; a
    gated activation is taken apart into two gradients (three reads, two writes). Other activations ride on the products.
    """
    width = widths(shape, tensor, expert)
    norms = {"sequential": 2, "sandwich": 4, "parallel": 1}[shape.block]
    forward = (2 * norms + 2) * width["residual"] + 2 * width["qkv"]
    if shape.rope is not None:
        forward += 4 * width["qkv"]
    if shape.experts is not None:  # rows are sorted by expert and back
        forward += 4 * shape.experts.per_token * shape.d_model
    backward = 2 * forward + (2.5 * width["mlp_in"] if shape.gated else 0)
    again = 0.0 if "rest" in training.saved else 1.0
    return COMPUTE_BYTES * (forward * (1 + again) + backward)


def _loss(shape: ModelShape, mesh: MeshShape, training: Training, device: Device, tokens: float) -> tuple[float, float]:
    """The output matrix (forward and both gradients), and the passes over float32 logits: softmax and its gradient."""
    head = head_product(shape, mesh.tensor)
    products = head.seconds(tokens, device, passes=(1, 1, 0 if training.adapters else 1))
    return products, 4 * BYTES["float32"] * tokens * head.columns / device.hbm_bandwidth


def _update(shape: ModelShape, mesh: MeshShape, training: Training, device: Device) -> tuple[float, float]:
    """Time of the optimizer, which streams its state through HBM, and bytes of gradient that replicas agree on."""
    trained = float(held_params(shape, mesh.fsdp, mesh.expert, mesh.tensor))
    stored = BYTES[training.params]
    if training.adapters is not None:
        trained, stored = float(adapter_params(shape, training.adapters)), BYTES["float32"]
    gradient = BYTES["float32"] if training.microbatches > 1 else float(training.program.gradient_bytes)
    # Read and write weights and moments; read the gradient twice (clipping by the norm of all of it comes first).
    moments = 4 * BYTES[training.moments] if training.optimizer == "adamw" else 2 * stored
    return trained * (2 * stored + moments + 2 * gradient) / device.hbm_bandwidth, trained * gradient


def _traffic(
    shape: ModelShape,
    mesh: MeshShape,
    training: Training,
    device: Device,
    placement: MeshPlacement,
    layer: _Layer,
    tokens: float,
) -> list[Traffic]:
    """Everything that moves over ICI but the final all-reduce of replicas."""
    times = training.microbatches * shape.layers
    found = _fsdp(shape, mesh, training, device, placement, layer, times)
    stream = COMPUTE_BYTES * tokens * shape.d_model
    if mesh.tensor > 1:
        gathers, scatters = _tensor_exchanges(shape, training)
        once = placement.tensor.gather_seconds(stream, device)
        if training.program.gradients == "rings" and device.generation == "v5e":
            # There the compiler makes rings of permutes of them, one beside each product: one link, one direction.
            once = max(once, stream * (mesh.tensor - 1) / mesh.tensor / device.link_bandwidth)
        extra = training.microbatches * once  # the output matrix gathers the stream, and scatters its gradient
        for direction, count in (("gather", gathers), ("reduce", scatters)):
            seconds = times * count * once + extra
            found.append(Traffic(axis="tensor", direction=direction, seconds=seconds, exposed=seconds))
    if mesh.context > 1:
        # Keys and values of the whole sequence come to every device; their gradients go back.
        pairs = COMPUTE_BYTES * tokens * mesh.context * 2 * shape.d_head * _kv_heads(shape, mesh.tensor)
        again = 0 if "context" in training.saved else 1
        once = placement.context.gather_seconds(pairs, device)
        for direction, count in (("gather", 1 + again + 1), ("reduce", 1)):
            seconds = times * count * once
            found.append(Traffic(axis="context", direction=direction, seconds=seconds, exposed=seconds))
    if mesh.expert > 1 and shape.experts is not None:
        # The tokens of the group come to every device, and its answers are summed back; the same in the other order
        # for gradients, and the tokens once more where the layer is computed again.
        again = 0 if "mlp_in" in training.saved else 1
        once = placement.expert.gather_seconds(stream * mesh.expert, device)
        for direction, count in (("gather", 2 + again), ("reduce", 2)):
            seconds = times * count * once
            found.append(Traffic(axis="expert", direction=direction, seconds=seconds, exposed=seconds))
    return found


def _kv_heads(shape: ModelShape, tensor: int) -> int:
    return shape.kv_heads // tensor if shape.kv_heads % tensor == 0 else shape.kv_heads


def _fsdp(
    shape: ModelShape,
    mesh: MeshShape,
    training: Training,
    device: Device,
    placement: MeshPlacement,
    layer: _Layer,
    times: int,
) -> list[Traffic]:
    """Weights gathered for the forward and for the backward pass, gradients reduced."""
    if mesh.fsdp == 1:
        return []
    each = BYTES["int8"] if training.adapters and training.adapters.base == "int8" else COMPUTE_BYTES
    gather = placement.fsdp.gather_seconds(each * layer.weights, device)
    # The first matrix of each pass has nothing before it to be gathered beside: the compiled loop waits for it.
    first = placement.fsdp.gather_seconds(each * layer.first, device)
    waits = 2 * gather
    if (device.generation, "gather") in training.program.beside:
        waits = max(first, gather - layer.forward) + max(first, gather - layer.backward)
    head = float(head_product(shape, mesh.tensor).weights) * training.microbatches
    ends = placement.fsdp.gather_seconds(COMPUTE_BYTES * head, device)
    exposed = times * waits + (0.0 if waits < 2 * gather else ends)
    found = [Traffic(axis="fsdp", direction="gather", seconds=times * 2 * gather + ends, exposed=exposed)]
    if training.adapters is None:
        moved = training.program.gradient_bytes * (times * layer.weights + head)
        at_once = training.program.gradients == "all-reduce"
        sums = placement.fsdp.reduce_seconds if at_once else placement.fsdp.ring_scatter_seconds
        seconds = exposed = sums(moved, device)
        if (device.generation, "reduce") in training.program.beside:
            exposed = max(0.0, seconds - times * layer.backward)
        found.append(Traffic(axis="fsdp", direction="reduce", seconds=seconds, exposed=exposed))
    return found


def _tensor_exchanges(shape: ModelShape, training: Training) -> tuple[int, int]:
    """How often a layer gathers the stream over a tensor group, and how often it scatters a sum, both ways.

    Forward: a gather before each branch (one for both of a parallel block), a scatter after it. Computed again: the
    gathers, and the scatter of attention where the MLP stands on it. Backward: the mirror image of forward.
    """
    branches = 1 if shape.block == "parallel" else 2
    saved = training.saved
    again_gathers = (0 if "qkv" in saved else 1) + (0 if "mlp_in" in saved else 1)
    again_gathers = min(again_gathers, branches)
    again_scatters = 0 if shape.block == "parallel" or "attn_out" in saved else 1
    if shape.block == "sandwich" and "mlp_out" not in saved:
        again_scatters += 1
    return branches + again_gathers + branches, 2 + again_scatters + branches
