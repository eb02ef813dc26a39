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

from functools import lru_cache
from math import log2
from typing import NamedTuple

import msgspec

from podway.model.expert_dispatch import DispatchKind
from podway.model.layout import MeshShape
from podway.model.shape import Experts, ModelShape, layer_kinds
from podway.plan.chips import (
    RELAYOUT_ELEMENTS_PER_CYCLE,
    STRAGGLER_LOSS_PER_DOUBLING,
    SUBLANES,
    Device,
)
from podway.plan.fsdp_time import ProductTime, Traffic, fsdp_traffic, head_traffic, ring_sums
from podway.plan.kernels import blocks_of
from podway.plan.memory import adapter_params, held_params, saved_bytes_per_token, state_shards
from podway.plan.network import MeshPlacement, dcn_reduce_seconds
from podway.plan.products import (
    dispatch_seconds,
    head_product,
    layer_products,
    layer_weights,
    needed_again,
    widths,
)
from podway.plan.tensor_time import summed_bytes, tensor_traffic
from podway.plan.training import BYTES, COMPUTE_BYTES, Program, Training
from podway.plan.working_set import misaligned


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
    until_attention: float  # of the forward pass: norm, queries, keys and values
    products: tuple[ProductTime, ...]  # of each matrix, in the order of the forward pass


def step_time(
    shape: ModelShape, mesh: MeshShape, training: Training, device: Device, placement: MeshPlacement
) -> StepTime:
    """The step by part."""
    tokens = training.tokens_per_device(mesh)
    loss, loss_hbm = _loss(shape, mesh.tensor, device, tokens, trained=training.adapters is None)
    traffic = _ends_traffic(shape, mesh, training, device, placement, tokens)
    update, reduced = _update(shape, mesh, training, device)
    spent = dict.fromkeys(("matrix", "attention", "hbm", "relayout", "host"), 0.0)
    step = training.one_sequence
    for kind in layer_kinds(shape):
        times = training.microbatches * kind.layers
        layer = _layer(kind, mesh.tensor, mesh.expert, mesh.context, step, device, tokens)
        found = _traffic(kind, mesh, training, device, placement, layer, tokens)
        traffic += found
        spent["matrix"] += times * (layer.forward + layer.backward - layer.attention)
        spent["attention"] += times * layer.attention
        spent["hbm"] += times * (layer.hbm + ring_sums(layer.products, mesh, training, device, placement.fsdp))
        spent["relayout"] += times * (_relayout(kind, mesh, training, device) if misaligned(kind, mesh) else 0.0)
        gathers = sum(one.exposed for one in found if (one.axis, one.direction) == ("fsdp", "gather")) / (2 * times)
        spent["host"] += times * _host(kind, mesh, training, device, tokens, layer, gathers)
    data = placement.data.reduce_seconds(reduced, device)
    if data:
        traffic.append(Traffic(axis="data", direction="reduce", seconds=data, exposed=data))
    spent["matrix"] += training.microbatches * loss
    spent["hbm"] += training.microbatches * (loss_hbm + _stacking(shape, mesh, training, device, tokens)) + update
    # Gradients all-reduced; or, where slices share the state, scattered, and weights gathered.
    moved = reduced if not training.state_over_slices else (reduced + COMPUTE_BYTES * _held(shape, mesh)) / 2
    dcn = dcn_reduce_seconds(moved, mesh.slices, device)
    one = StepTime(traffic=_summed(traffic), dcn=dcn, straggler=0.0, **spent)
    waits = one.total * STRAGGLER_LOSS_PER_DOUBLING * log2(mesh.slices)
    return msgspec.structs.replace(one, straggler=waits)


def _stacking(shape: ModelShape, mesh: MeshShape, training: Training, device: Device, tokens: float) -> float:
    """Seconds that kept activations take to be copied into the stack of all layers, and out of it again: read and written, twice.

    Where nothing is computed again that is so on every generation, and gathered weights are copied into a stack too, from which
    products read them (Llama 3.2 1B on v5e-16: 0.094 s through HBM, of which 0.049 s is waited for; 3B on v6e-16).
    """
    whole = training.keeps_gathered
    if training.program.gradients != "rings" or not (device.copies_stacks or whole):
        return 0.0
    kept = tuple(name for name in training.held if name != "residual")
    moved = 4 * tokens * saved_bytes_per_token(shape, mesh, kept) if kept else 0.0
    if whole and mesh.fsdp > 1:
        kinds = layer_kinds(shape)
        moved += 2 * COMPUTE_BYTES * sum(k.layers * layer_weights(k, mesh.tensor, mesh.expert) for k in kinds)
    return moved / device.hbm_bandwidth


def _summed(traffic: list[Traffic]) -> tuple[Traffic, ...]:
    """One for each axis and direction."""
    found: dict[tuple[str, str], Traffic] = {}
    for one in traffic:
        key = (one.axis, one.direction)
        before = found.get(key)
        seconds, exposed = (before.seconds, before.exposed) if before else (0.0, 0.0)
        found[key] = msgspec.structs.replace(one, seconds=seconds + one.seconds, exposed=exposed + one.exposed)
    return tuple(found.values())


# Many slices have the same tokens on the same tensor and expert groups; fsdp, which they differ in, is not asked for here.
@lru_cache(maxsize=4096)
def _layer(
    shape: ModelShape, tensor: int, expert: int, context: int, training: Training, device: Device, tokens: float
) -> _Layer:
    products = layer_products(shape, tensor, expert)
    again = needed_again(shape, training)
    if shape.experts and _dispatch(training, shape.experts, expert) == "all-to-all":
        # the backward pass of the exchange takes its rounds again, whatever is kept
        again |= {product.name for product in products if product.name.startswith("experts")}
    trained = 0.0 if training.adapters else 1.0  # frozen matrices need no gradient of their own
    forward = backward = 0.0
    each = []
    for product in products:
        once, back, gradient = product.pass_seconds(tokens, device, training)
        gradient *= trained
        forward += once
        backward += once * (product.name in again) + back + gradient
        routed, last = product.name.startswith("experts"), product.saved_as == "qkv"
        each.append(ProductTime(float(product.weights), once, gradient, routed, last))
    dispatch = dispatch_seconds(shape, training, device, tokens)
    forward += dispatch
    backward += dispatch * (2 + ("mlp_in" not in training.saved))
    ahead, back = _attention(shape, tensor, context, training, device, tokens)
    return _Layer(
        forward=forward + ahead,
        backward=backward + back,
        attention=ahead + back,
        hbm=tokens * _elementwise_bytes(shape, tensor, expert, training) / device.hbm_bandwidth,
        until_attention=sum(one.forward for one in each if one.last),
        products=tuple(each),
    )


def _relayout(shape: ModelShape, mesh: MeshShape, training: Training, device: Device) -> float:
    """Gathered matrices whose shards are not whole tiles, copied into another tiling once for each pass that gathers them."""
    products = layer_products(shape, mesh.tensor, mesh.expert)
    if training.program.relayouts == "transposed":  # those that end in d_model: lanes are taken apart
        copied = 2.0 * sum(p.weights for p in products if p.name in ("o", "down", "experts_down", "shared_down"))
        return copied / RELAYOUT_ELEMENTS_PER_CYCLE / device.clock
    # The matrices of the MLP, which lie in two dimensions: read with the empty rows of their tiles, written without.
    rows = shape.d_model // mesh.fsdp
    copied = 2.0 * sum(p.weights for p in products if p.name.endswith(("gate", "up", "down")))
    return COMPUTE_BYTES * copied * (-(-rows // SUBLANES) * SUBLANES / rows + 1) / device.hbm_bandwidth


def _attention(
    shape: ModelShape, tensor: int, context: int, training: Training, device: Device, tokens: float
) -> tuple[float, float]:
    """Mean over the layers of the kernel's forward and backward time; computed again unless its result is kept."""
    heads = shape.heads // tensor if shape.heads % tensor == 0 else shape.heads
    again = 0.0 if "context" in training.saved else 1.0
    ahead, back = _mean_attention(shape, training.seq, context, training.program, device)
    scale = tokens * context / training.seq * heads
    return ahead * scale, (again * ahead + back) * scale


@lru_cache(maxsize=2048)
def _mean_attention(shape: ModelShape, seq: int, context: int, program: Program, device: Device) -> tuple[float, float]:
    """Seconds of one head over a device's piece of a sequence, forward and backward, mean over the layers."""
    queries = max(1, seq // context)
    ahead = back = 0.0
    for window in shape.layer_windows:
        size, fused = program.attention_blocks(
            device.generation, seq=seq, context=context, d_head=shape.d_head, window=window
        )
        blocks = blocks_of(size, queries, seq, window=window, causal=program.causal)
        ahead += device.attention_seconds("forward", blocks, fused=fused, d_head=shape.d_head)
        back += device.attention_seconds("backward", blocks, fused=fused, d_head=shape.d_head)
    return ahead / shape.layers, back / shape.layers


# Where the scheduler begins transfers early, those of a layer come back beside this part of the backward pass of the one after it: from
# attention's gradients on (Llama 3.2 3B on v6e-16; 3.1 70B on v6e-64 and v6e-256 wait for none of them).
_FETCHED_BESIDE = 0.5


def _host(
    shape: ModelShape,
    mesh: MeshShape,
    training: Training,
    device: Device,
    tokens: float,
    layer: _Layer,
    gathers: float,
) -> float:
    """What a layer's transfers to host memory take beyond the part of its forward pass that they run beside; likewise those back.

    `gathers`: what a pass waits for its weights. Where transfers begin early, all that a layer has kept goes out from the beginning of the
    next one; all but attention's result must be out before that one's attention begins, so gathers and the products of queries,
    keys and values are beside it.
    """
    if not training.offload:
        return 0.0

    def seconds_of(names: tuple[str, ...]) -> float:
        return tokens * saved_bytes_per_token(shape, mesh, names) / shape.layers / device.host_bandwidth

    seconds = seconds_of(training.offload)
    if device.generation in training.program.reschedules:
        before = seconds_of(tuple(name for name in training.offload if name not in ("context", "attn_out", "mlp_in")))
        first = max(0.0, before - gathers - layer.until_attention)
        rest = max(0.0, seconds - first - gathers - layer.forward - layer.hbm / 4)
        back = max(0.0, seconds - _FETCHED_BESIDE * (layer.backward + 3 * layer.hbm / 4))
        return first + rest + back
    ahead, back = training.program.host_beside
    passes = (ahead * (layer.forward + layer.hbm / 4 + gathers), back * (layer.backward + 3 * layer.hbm / 4 + gathers))
    return sum(max(0.0, seconds - beside) for beside in passes)


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
    inner, routed = width["mlp_in"], 0.0
    if shape.experts is not None:
        # Rows are sorted by expert and back, weighed and summed: 37 passes over their width, 9 of them forward, and activations are
        # passes of their own. Where rows are exchanged they are sorted on both sides and gradients of the matrices added up over
        # rounds: the compiled steps of Mixtral (v5p-128, expert=8) and Qwen1.5-MoE (v6e-16, expert=2) pass as often again.
        spare = training.program.dispatch.spare_rows(chips=expert, per_token=shape.experts.per_token)
        exchanged = _dispatch(training, shape.experts, expert) == "all-to-all"
        forward += (20 if exchanged else 9) * spare * shape.experts.per_token * shape.d_model
        own = (1 + shape.gated) * shape.experts.per_token * shape.experts.d_ff / tensor
        inner, routed = inner - own, 4.5 * own * spare
    backward = 2 * forward + (2.5 * inner if shape.gated else 0)
    again = 0.0 if "rest" in training.saved else 1.0
    return COMPUTE_BYTES * (forward * (1 + again) + backward + routed)


@lru_cache(maxsize=4096)
def _loss(shape: ModelShape, tensor: int, device: Device, tokens: float, *, trained: bool) -> tuple[float, float]:
    """The output matrix (forward and both gradients), and the passes over float32 logits: softmax and its gradient."""
    head = head_product(shape, tensor)
    products = head.seconds(tokens, device, passes=(1, 1, 1 if trained else 0))
    return products, 4 * BYTES["float32"] * tokens * head.columns / device.hbm_bandwidth


def _update(shape: ModelShape, mesh: MeshShape, training: Training, device: Device) -> tuple[float, float]:
    """Time of the optimizer, which streams its state through HBM, and bytes of gradient that replicas agree on."""
    trained, stored = _held(shape, mesh), BYTES[training.params]
    if training.adapters is not None:
        trained, stored = float(adapter_params(shape, training.adapters)), BYTES["float32"]
    gradient = BYTES["float32"] if training.microbatches > 1 else float(training.program.gradient_bytes)
    # Read and write weights and moments; read the gradient twice (clipping by the norm of all of it comes first).
    moments = 4 * BYTES[training.moments] if training.optimizer == "adamw" else 2 * stored
    kept = trained
    if training.state_over_slices:
        kept = float(held_params(shape, state_shards(mesh, training), mesh.expert, mesh.tensor))
    return kept * (2 * stored + moments + 2 * gradient) / device.hbm_bandwidth, trained * gradient


def _held(shape: ModelShape, mesh: MeshShape) -> float:
    """Parameters on a device, as a step uses them."""
    return float(held_params(shape, mesh.fsdp, mesh.expert, mesh.tensor))


def _traffic(
    shape: ModelShape,
    mesh: MeshShape,
    training: Training,
    device: Device,
    placement: MeshPlacement,
    layer: _Layer,
    tokens: float,
) -> list[Traffic]:
    """What layers of one kind move over ICI."""
    times = training.microbatches * shape.layers
    found = fsdp_traffic(layer.products, layer.backward, mesh, training, device, placement, times)
    stream = COMPUTE_BYTES * tokens * shape.d_model
    if mesh.tensor > 1:
        found += tensor_traffic(shape, mesh, training, device, placement.tensor, stream, times)
    if mesh.context > 1:
        # Keys and values of the whole sequence come to every device; their gradients go back, all-reduced and then cut.
        pairs = COMPUTE_BYTES * tokens * mesh.context * (shape.d_head + shape.d_value) * _kv_heads(shape, mesh.tensor)
        again = 0 if "context" in training.saved else 1
        once = placement.context.gather_seconds(pairs, device)
        # Each device has a piece of every sequence: gradients of weights are summed over the group before they are scattered.
        summed = 0.0
        if training.adapters is None:
            each_bytes = max(training.program.gradient_bytes, summed_bytes(training))
            moved = each_bytes * sum(one.weights for one in layer.products)
            summed = placement.context.reduce_seconds(moved, device)
        for direction, each in (("gather", (1 + again + 1) * once), ("reduce", 2 * once + summed)):
            seconds = times * each
            found.append(Traffic(axis="context", direction=direction, seconds=seconds, exposed=seconds))
    if mesh.expert > 1 and shape.experts is not None:
        if _dispatch(training, shape.experts, mesh.expert) == "all-to-all":
            # Rows go to the chips of their experts and answers come back: forward, once more in the backward pass, which
            # computes the experts again, and for the gradients of both.
            spare = training.program.dispatch.spare_rows(chips=mesh.expert, per_token=shape.experts.per_token)
            once, counts = placement.expert.exchange_seconds(spare * stream * shape.experts.per_token, device), (3, 3)
        else:  # tokens come forward, computed again and as gradients of the answers; answers and gradients of tokens go back
            once, counts = placement.expert.gather_seconds(stream * mesh.expert, device), (3, 2)
        for direction, count in zip(("gather", "reduce"), counts, strict=True):
            seconds = times * count * once
            found.append(Traffic(axis="expert", direction=direction, seconds=seconds, exposed=seconds))
    return found


def _dispatch(training: Training, experts: Experts, chips: int) -> DispatchKind | None:
    """How tokens reach experts of other chips; None where each chip has all of them."""
    return training.program.dispatch.choose(chips=chips, per_token=experts.per_token) if chips > 1 else None


def _kv_heads(shape: ModelShape, tensor: int) -> int:
    return shape.kv_heads // tensor if shape.kv_heads % tensor == 0 else shape.kv_heads


def _ends_traffic(
    shape: ModelShape, mesh: MeshShape, training: Training, device: Device, placement: MeshPlacement, tokens: float
) -> list[Traffic]:
    """What the output matrix moves: it is gathered over fsdp and its gradient is summed; in a tensor group it gathers the stream,
    and scatters the gradient of it."""
    found = head_traffic(head_product(shape, mesh.tensor).weights, mesh, training, device, placement)
    if mesh.tensor > 1:
        stream = COMPUTE_BYTES * tokens * shape.d_model
        seconds = training.microbatches * placement.tensor.gather_seconds(stream, device)
        found += [
            Traffic(axis="tensor", direction=way, seconds=seconds, exposed=seconds) for way in ("gather", "reduce")
        ]
    return found
