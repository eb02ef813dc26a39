"""What the two full moments of a training step hold beside its state and what is saved: the loss, and a layer that goes backward.

`loss_bytes` is the first moment: logits of a chunk, the output matrix and its gradient. `backward_bytes` is the second: weights as
they are used, gradients on their way, and what flows through the layer. Read from the buffers that are alive at the peak of programs
as libtpu 0.0.51 compiles them (`rehearse/memory.py`): docs/planning.md says which, and compares.
"""

from functools import cache, lru_cache
from math import ceil
from typing import NamedTuple

from podway.model.expert_dispatch import Dispatch
from podway.model.layout import MeshShape
from podway.model.shape import ModelShape, layer_kinds
from podway.plan.chips import LANES, SUBLANES, Device
from podway.plan.products import Product, head_product, largest_matrix, layer_weights, widths
from podway.plan.training import BYTES, COMPUTE_BYTES, Training

_WHOLE = 1.02  # HBM over the part of it that a program may use: 1.003 (v5p) to 1.024 (v6e)


class Loss(NamedTuple):
    """The output matrix, and how many chunks the loss is computed in."""

    head: Product
    parts: int


def loss_of(shape: ModelShape, tensor: int, context: int, training: Training, tokens: float, usable: int) -> Loss:
    """That of a step on a device with so much HBM."""
    head, share = head_product(shape, tensor), training.program.logits_share
    if share is None:
        return Loss(head, 1)
    least = ceil(training.program.logits_bytes * tokens * head.columns / (share * usable * _WHOLE))
    return Loss(head, _chunks(training.seq // context, least))


class Cut(NamedTuple):
    """How fsdp cuts the matrices of a model: all that a working set depends on of its size, which is another on every slice."""

    split: bool  # over several devices
    uneven: bool  # into shards that are no whole tiles of rows
    padded_head: float  # `_padded_head`


@lru_cache(maxsize=4096)
def cut_of(shape: ModelShape, fsdp: int, device: Device | None) -> Cut:
    """That of fsdp over so many devices."""
    return Cut(fsdp > 1, _cut_unevenly(shape, fsdp), _padded_head(shape, fsdp, device))


def loss_bytes(
    shape: ModelShape, tensor: int, cut: Cut, training: Training, tokens: float, loss: Loss, device: Device | None
) -> float:
    """float32 logits of a chunk; the gathered output matrix and its gradient; the last layer's output and its gradient, in bfloat16
    and float32. The gradient of the logits is a part of the product that uses it, but on tpu7x and in the rings of a tensor group."""
    head, parts = loss
    logits = training.program.logits_bytes * tokens * head.columns
    passed = (1.5 if tensor > 2 or (device is not None and device.late_gradients) else 1.0) * logits / parts
    if parts > 1 and cut.padded_head:
        # Gathered in one tiling, used in another: the place of the first is free then, for logits if they fit in it.
        gathered = head.weights * COMPUTE_BYTES * cut.padded_head
        passed = gathered if passed <= gathered else gathered + passed
    stream = (2 + 6 / tensor) * tokens * shape.d_model  # gathered once, three pieces of a tensor group
    held = head.weights * COMPUTE_BYTES + stream
    if training.program.gradients != "rings":  # MaxText's: with a quarter for what the logits' place wastes
        copies = 2 if cut.uneven else 1
        held = head.weights * copies * COMPUTE_BYTES + 8 * tokens * shape.d_model
        return held + 1.25 * logits + head.weights * (0.0 if training.adapters else BYTES["float32"])
    if training.adapters is not None:
        return held + passed
    if parts == 1:  # the gradient is made at once, when the float32 logits are gone
        return held + max(passed, 0.5 * logits + head.weights * COMPUTE_BYTES)
    return held + passed + head.weights * BYTES["float32"]  # summed over the chunks in float32


def _padded_head(shape: ModelShape, fsdp: int, device: Device | None) -> float:
    """The size of the gathered output matrix in whole tiles, over its own, where it must be copied from there: where fsdp cuts d_model,
    which is its rows, or the lanes of a tied one, into parts that are no whole tiles. 0: it is gathered into the tiling that is
    used, as always on v4 and v5p."""
    if fsdp == 1 or shape.d_model % fsdp or device is None or not (device.end_sum or device.ringed_gradients):
        return 0.0
    part = shape.d_model // fsdp
    if shape.embedding.tied:
        return 1.0 if part % LANES else 0.0  # gathered the other way round
    return -(-part // SUBLANES) * SUBLANES / part if part % SUBLANES else 0.0


@cache
def _chunks(length: int, least: int) -> int:
    """The fewest equal parts of a sequence that are at least this many (podway.train.loss.choose_chunks)."""
    return next((n for n in range(max(1, least), length + 1) if length % n == 0), max(1, length))


# Asked for the same tokens on the same groups on many slices of a search.
@lru_cache(maxsize=8192)
def backward_bytes(
    shape: ModelShape,
    tensor: int,
    expert: int,
    context: int,
    cut: Cut,
    training: Training,
    tokens: float,
    loss: Loss,
    device: Device | None,
    *,
    tight: bool,
) -> float:
    """The working set of the fullest kind of layer while it goes backward."""
    # Attention whose result is kept is not computed again before the MLP goes backward: gradients are made late there too.
    late = bool(training.offload) or ("context" in training.saved and "mlp_in" not in training.saved)
    late = late or (device is not None and device.late_gradients)
    wide = bool(shape.experts) and device is not None and device.grouped_float32
    at_end = shape.embedding.tied or wide or (device is not None and device.end_sum)
    at_end = at_end and training.program.gradients == "rings"
    held = 0.0
    # A scheduler that looks for less memory a second time lets nothing wait then.
    again = tight and device is not None and device.generation in training.program.reschedules
    if training.adapters is None and ((late and not again) or (at_end and not tight)):
        # The gradient of the output matrix waits as well: for that of the embedding, if it is the same matrix, or to be summed over
        # devices at the end of the step.
        head, once = loss.head, loss.parts == 1 and training.program.casts_once
        held = head.weights * (COMPUTE_BYTES if once else BYTES["float32"])
        if once and device is not None and device.late_gradients:  # that is made late too, of the logits
            held = training.program.logits_bytes * tokens * head.columns
    residuals = at_end and device is not None and device.end_sum and not tight
    stored = training.adapters.base if training.adapters else training.params
    how = _How(
        saved=training.saved,
        alone=training.program.gradients != "rings",
        trained=training.adapters is None,
        cast=cut.split or stored != "bfloat16",
        late=late,
        residuals=residuals,
        tight=tight,
        wide=wide,
        parts=_parts_of_dq(shape, context, training, device),
        dispatch=training.program.dispatch,
        tuned_experts=training.program.tuned_experts,
    )
    layers = _layers(shape, cut.uneven, tensor, expert, how)
    return held + COMPUTE_BYTES * max(weights + tokens * flow for weights, flow in layers)


class _How(NamedTuple):
    """What decides how a layer goes backward, beside its shape and mesh."""

    saved: tuple[str, ...]
    alone: bool  # MaxText's program: all of a layer is gathered, each branch of a tensor group gathers for itself
    trained: bool  # the weights have gradients
    cast: bool  # there is a copy of the weights to use
    late: bool  # weight gradients are made at the end of the layer, so that what they are made of is there till then
    residuals: bool  # the attention kernel's sums wait, in float32 and a row of lanes each
    tight: bool  # there is little room, and nothing waits
    wide: bool  # gradients of experts are float32
    parts: int  # in which one backward kernel writes the gradient of the queries, to be summed
    dispatch: Dispatch  # how tokens reach the experts of other chips
    tuned_experts: bool


@lru_cache(maxsize=4096)
def _layers(shape: ModelShape, uneven: bool, tensor: int, expert: int, how: _How) -> tuple[tuple[float, float], ...]:
    """Elements of weights, and numbers of a token, of each kind of layer."""
    return tuple(
        (_working_weights(kind, uneven, tensor, expert, how), _flow_width(kind, tensor, expert, how))
        for kind in layer_kinds(shape)
    )


# Matrices of a layer that exist at once as they are used, with the pieces of gradients that are on their way: two gathered ones, or
# one and pieces of another's gradient. Counted in 30 compiled steps: 2 to 3 of the largest.
_MATRICES_AT_ONCE = 2.5


def _working_weights(shape: ModelShape, uneven: bool, tensor: int, expert: int, how: _How) -> float:
    """Elements of weights as they are used, and of gradients before they are summed."""
    layer = layer_weights(shape, tensor, expert)
    if how.alone:  # all of a layer, and its gradients whole
        return layer * (how.cast + how.trained + uneven)
    if shape.experts and how.wide and how.trained:
        return 2 * layer  # and all of them wait together
    if shape.experts:  # gradients of experts one matrix after the other
        return layer * (how.cast + how.trained / 3)
    padded = 1.9 if uneven else 0.0  # two are gathered in one tiling, with empty rows, and used in another
    return largest_matrix(shape, tensor, expert) * (_MATRICES_AT_ONCE + padded) if how.cast else 0.0


def _flow_width(shape: ModelShape, tensor: int, expert: int, how: _How) -> float:
    """Numbers a token needs at once while a layer goes backward, as libtpu 0.0.51 schedules it.

    The stream four times (input, norm and the gradients of both; seven in a parallel block), of which a tensor group has three whole.
    Beside it the fuller one of two moments: the MLP goes backward, with its inputs, their gradients and, if it is gated, what the
    gate lets through, while queries, keys, values and attention's result, which it stands on, wait to be used again; or attention
    does, whose rotation takes queries apart into float32 halves of a head, each of whole rows of lanes.
    """
    width = widths(shape, tensor, expert)
    heads, pairs = _in_lanes(shape, tensor, shape.heads), _in_lanes(shape, tensor, shape.kv_heads)
    mlp = width["mlp_in"] * _mlp_tensors(shape, how)
    if shape.experts:
        # Three tensors of an expert's width and five of the stream's for each row; two of these where answers are weighed before they
        # are made and no rows are exchanged (Mixtral on v6e-256).
        streams = 2 if how.tuned_experts and expert == 1 else 5
        spare = how.dispatch.spare_rows(chips=expert, per_token=shape.experts.per_token)
        mlp = spare * (1.5 * width["mlp_in"] + streams * shape.experts.per_token * shape.d_model)
    waiting = (0.0 if "qkv" in how.saved else heads + 2 * pairs) + (0.0 if "context" in how.saved else heads)
    if how.residuals and "context" not in how.saved:
        waiting += 2 * LANES * (shape.heads // tensor if shape.heads % tensor == 0 else shape.heads)
    stream = 4.0 if tensor == 1 else 3 + 4 / tensor
    if shape.block == "parallel":
        waiting = 0.0  # there the MLP goes backward before attention is computed again
        stream = 4.0 if how.alone or tensor > 4 else 7.0 if tensor == 1 else 8.75  # halves of pieces, in rings
    elif how.alone and tensor > 1:
        stream = 8.0
    # Or attention's gradient comes in parts of the queries' size, beside queries and its own sum.
    turned = max(7 if shape.rope is not None else 2, how.parts + 2 if how.parts else 0) * heads
    return stream * shape.d_model + (mlp + waiting + turned if how.late else max(mlp + waiting, turned))


def _parts_of_dq(shape: ModelShape, context: int, training: Training, device: Device | None) -> int:
    """Blocks of keys for each of which one backward kernel writes a part; none where there are two kernels."""
    if device is None:
        return 0
    size, fused = training.program.attention_blocks(
        device.generation, seq=training.seq, context=context, d_head=shape.d_head, window=shape.layer_windows[0]
    )
    return training.seq // size if fused else 0


def _mlp_tensors(shape: ModelShape, how: _How) -> float:
    """Of the width of the MLP's input: that and its gradient; where it is gated also what the gate lets through, if it is not used
    up before (one of two times where the kernel's residuals wait)."""
    if how.late or how.alone or how.tight or not shape.gated:
        return 2.0
    return 2.25 if how.residuals else 2.5


def _in_lanes(shape: ModelShape, tensor: int, heads: int) -> float:
    """Numbers of these heads of a token on a device, in tiles whose rows have 128 lanes."""
    each = heads // tensor if heads % tensor == 0 else heads
    return float(each * -(-shape.d_head // LANES) * LANES)


def misaligned(shape: ModelShape, mesh: MeshShape) -> bool:
    """Whether fsdp cuts d_model into shards that are no whole tiles of rows, so that a gathered weight must be copied."""
    return _cut_unevenly(shape, mesh.fsdp)


def _cut_unevenly(shape: ModelShape, fsdp: int) -> bool:
    return fsdp > 1 and shape.d_model % fsdp == 0 and shape.d_model // fsdp % SUBLANES != 0
