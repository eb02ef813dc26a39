"""Encoder-decoder T5 1.1 as t5x trains it: memory and step time on a (data, model) mesh of tiles.

Podway does not train T5; people choose tiles for it by trial, and their tables of trials are the best published test of
a planner's torus (docs/planning.md). What differs from a decoder: two stacks, cross-attention, attention scores that are
written to HBM, nothing computed again, parameters split along one dimension over the tile and whole along `data`, and
microbatches that are padded where the batch does not divide.

Where the trials leave something unknown, the assumption is written beside the figure. Those assumptions were chosen with
the table of trials in view, so its memory rows test that they are consistent, not that they were foreseen.
"""

from collections.abc import Sequence
from functools import cache
from math import ceil, prod

import msgspec

from podway.catalog.prices import price_of
from podway.catalog.slices import Slice
from podway.errors import UserError
from podway.model.layout import MeshShape
from podway.plan.chips import Device, device_of
from podway.plan.fsdp_time import Traffic
from podway.plan.memory import Memory
from podway.plan.network import MeshPlacement, place, tiles
from podway.plan.plans import TrainPlan
from podway.plan.products import Product
from podway.plan.search import DEFAULT_BATCH_TOKENS, PlanOptions, Rejected, Search, ranked
from podway.plan.steptime import StepTime
from podway.plan.training import COMPUTE_BYTES, Program, Training

# Softmax in float32: its result (4 bytes) and the bfloat16 copy that meets the values (2) stay for the backward pass.
SCORE_BYTES = 6
# Bytes a parameter: float32 weights and gradients; Adafactor's rows and columns are too small to count.
STEP_BYTES = 4 + 4
# Inside the loop over microbatches, also the sum of gradients and its next value, and the bfloat16 weights in both
# layouts (forward and transposed), which the compiler moves out of the loop.
LOOP_BYTES = STEP_BYTES + 4 + 4 + 2 + 2
# Passes over each saved tensor: written and read forward, read backward, its gradient written and read.
SAVED_PASSES = 5
# The stream whole on every chip of a tile while a layer works: input, norm, and the gradients of both (as memory.py).
STREAMS = 4

T5X = Program(
    name="t5x",
    causal=False,
    gradients="all-reduce",
    gradient_bytes=4,
    casts_once=False,
    logits_share=None,
    convention="full",
)


class T5Shape(msgspec.Struct, frozen=True, kw_only=True):
    """T5 1.1: gated GELU, untied output matrix, no biases."""

    name: str
    layers: int  # of the encoder, and as many of the decoder
    d_model: int
    heads: int
    d_head: int
    d_ff: int
    vocab: int = 32_128
    split_stream: bool = True  # t5x activation_partitioning_dims=2: the stream is split over the tile

    @property
    def attention(self) -> int:
        """Parameters of one attention block."""
        return 4 * self.d_model * self.heads * self.d_head

    @property
    def mlp(self) -> int:
        """Parameters of one MLP."""
        return 3 * self.d_model * self.d_ff

    @property
    def params(self) -> int:
        """All parameters but norms and position biases."""
        return self.layers * (3 * self.attention + 2 * self.mlp) + 2 * self.vocab * self.d_model

    def flops_per_sample(self, seq: int) -> float:
        """Training FLOPs of a sample: `seq` tokens through the encoder, and as many through the decoder."""
        matrices = self.layers * (3 * self.attention + 2 * self.mlp) + self.vocab * self.d_model
        scores = 3 * self.layers * 4 * self.heads * self.d_head * seq
        return 3.0 * seq * (2 * matrices + scores)


# t5x examples/t5/t5_1_1/xxl.gin. That the stream is split follows from the trials: what fits scales with the tile.
XXL = T5Shape(name="t5-1.1-xxl", layers=24, d_model=4096, heads=64, d_head=64, d_ff=10_240)
# Dimensions unpublished. Assumed: XXL doubled in width, and 37 + 37 layers, which makes 67.6 B parameters; the stream
# whole on every chip, as t5x does by default, because three sequences of 1024 fit a tile of 64 chips and four do not.
T5_68B = T5Shape(name="t5-68b", layers=37, d_model=8192, heads=128, d_head=64, d_ff=20_480, split_stream=False)
T5_MODELS = {shape.name: shape for shape in (XXL, T5_68B)} | {"t5-11b": XXL, "t5-xxl": XXL}


# The part of peak that large products of t5x reach on v4: calibrated on the T5-11B trial with tiles of 4x2x2 and batch 5376. Its
# program is another than the decoders', whose rate (`chips.py`) is lower; why is not known.
T5X_MATRIX_EFFICIENCY = 0.844


def t5x_device(generation: str) -> Device:
    """A device at the rate that t5x reaches."""
    return msgspec.structs.replace(device_of(generation), matrix_efficiency=T5X_MATRIX_EFFICIENCY)


def t5_mesh(slice: Slice, tile: tuple[int, ...]) -> MeshShape:
    """Tiles of a slice: `model` inside a tile, `data` across them."""
    tensor = prod(tile)
    if slice.devices % tensor:
        raise UserError(
            f"tiles of {tensor} chips do not fill {slice.accelerator_type} with its {slice.devices}",
            f"each size of the tile must divide {slice.topology_text}",
        )
    return MeshShape(data=slice.devices // tensor, tensor=tensor, tile=tile)


def rows_of(training: Training, mesh: MeshShape) -> int:
    """Sequences of a microbatch on a tile; what does not divide is padded."""
    return ceil(training.batch / max(1, training.microbatches) / mesh.data)


def t5_memory(shape: T5Shape, mesh: MeshShape, training: Training, limit: int) -> Memory:
    """HBM of one chip by part."""
    rows, tile = rows_of(training, mesh), mesh.tensor
    held = shape.params / tile
    looped = training.microbatches > 1
    stream = COMPUTE_BYTES * rows * training.seq * shape.d_model
    return Memory(
        weights=held * (4 + (4 if looped else 0)),
        optimizer=0.0,
        gradients=held * ((LOOP_BYTES if looped else STEP_BYTES) - 4 - (4 if looped else 0)),
        saved=rows * saved_bytes(shape, training.seq, tile),
        logits=rows * training.seq * shape.vocab / tile * 2 * 4,
        temp=STREAMS * stream + 2 * rows * shape.heads / tile * training.seq**2 * 4,
        limit=limit,
    )


@cache
def saved_bytes(shape: T5Shape, seq: int, tile: int) -> float:
    """Bytes that a sequence leaves on a chip until the backward pass; nothing is computed again.

    Each norm keeps its input and its output (encoder 4 tensors of d_model a layer, decoder 6); attention its queries,
    keys, values, context and scores; the MLP both inputs, the activated one and the product.
    """
    stream = (4 + 6) * shape.d_model
    inner = (4 + 6 + 2) * shape.heads * shape.d_head + (4 + 4) * shape.d_ff
    scores = 3 * shape.heads * seq * SCORE_BYTES
    split = COMPUTE_BYTES * (inner + (stream if shape.split_stream else 0)) + scores
    whole = 0 if shape.split_stream else COMPUTE_BYTES * stream
    return float(shape.layers * seq * (split / tile + whole))


def t5_time(shape: T5Shape, mesh: MeshShape, training: Training, device: Device, placement: MeshPlacement) -> StepTime:
    """The step by part: every exchange of a tile is waited for, the gradients of all tiles are summed once."""
    rows, tile, loops = rows_of(training, mesh), mesh.tensor, max(1, training.microbatches)
    tokens = rows * training.seq
    matrix = sum(p.seconds(tokens, device, passes=(1, 1, 1)) for p in _products(shape, tile))
    scores = Product("scores", shape.d_head, training.seq)
    heads = 3 * shape.layers * shape.heads / tile * rows
    attention = 2 * heads * scores.seconds(training.seq, device, passes=(1, 1, 1))
    held = shape.params / tile
    gradients = held * (4 + 8 if loops > 1 else 4)  # written, and added to the sum
    hbm = SAVED_PASSES * rows * saved_bytes(shape, training.seq, tile) + gradients
    update = held * 4 * 5 / device.hbm_bandwidth  # weights read and written, gradients read three times by Adafactor
    once = placement.tensor.gather_seconds(COMPUTE_BYTES * tokens * shape.d_model, device)
    each_way = loops * shape.layers * (2 + 3) * 2 * once  # a branch ends in a sum; so does its gradient
    data = placement.data.reduce_seconds(4 * held, device)
    return StepTime(
        matrix=loops * matrix,
        attention=loops * attention,
        hbm=loops * hbm / device.hbm_bandwidth + update,
        relayout=0.0,
        traffic=(
            Traffic(axis="tensor", direction="reduce", seconds=each_way, exposed=each_way),
            Traffic(axis="tensor", direction="gather", seconds=each_way, exposed=each_way),
            Traffic(axis="data", direction="reduce", seconds=data, exposed=data),
        ),
        dcn=0.0,
        straggler=0.0,
    )


@cache
def _products(shape: T5Shape, tile: int) -> tuple[Product, ...]:
    """All matrices that a tile multiplies, those of like shape as copies with all the rows each."""
    d, inner, wide = shape.d_model, shape.heads * shape.d_head // tile, shape.d_ff // tile
    inward = [Product("qkv", d, inner)] * (9 * shape.layers)
    outward = [Product("out", inner, d)] * (3 * shape.layers)
    mlp = [Product("wi", d, wide)] * (4 * shape.layers) + [Product("wo", wide, d)] * (2 * shape.layers)
    return (*inward, *outward, *mlp, Product("logits", d, shape.vocab // tile))


def evaluate_t5(shape: T5Shape, slice: Slice, training: Training, tile: tuple[int, ...]) -> TrainPlan:
    """One configuration of t5x."""
    mesh, device = t5_mesh(slice, tile), t5x_device(slice.generation)
    return TrainPlan(
        slice=slice,
        mesh=mesh,
        training=training,
        memory=t5_memory(shape, mesh, training, device.hbm_limit),
        time=t5_time(shape, mesh, training, device, place(mesh, slice)),
        model_flops=shape.flops_per_sample(training.seq) * training.batch,
        dollars_per_hour=price_of(slice),
    )


def search_t5(shape: T5Shape, options: PlanOptions, candidates: Sequence[Slice]) -> Search:
    """Tiles and microbatches for a batch, ranked; several slices: the best plan of each."""
    if options.slices not in (None, 1) or options.mesh is not None or options.remat not in (None, "none"):
        raise UserError(
            f"{shape.name} is planned as t5x runs it: one slice, a (data, model) mesh given by its tile, no remat",
            "use --tpu, --tile, --batch and --microbatches",
        )
    batch = options.batch or max(1, DEFAULT_BATCH_TOKENS // options.seq)
    plans: list[TrainPlan] = []
    rejected: list[Rejected] = []
    for slice in {s.accelerator_type: s for s in candidates}.values():
        found, closest = _on_tiles(shape, options, slice, batch)
        found.sort(key=lambda plan: plan.time.total)
        plans += found if len(candidates) == 1 else found[:1]
        if not found:
            one = Rejected(slice=slice.accelerator_type, slices=1, reason=closest[1], excess=closest[0])
            rejected.append(one)
    return Search(plans=tuple(ranked(plans, options, one_kind=len(candidates) == 1)), rejected=tuple(rejected))


def _on_tiles(
    shape: T5Shape, options: PlanOptions, slice: Slice, batch: int
) -> tuple[list[TrainPlan], tuple[float, str]]:
    """For each tile of a slice the fewest microbatches that fit; and what came closest of the others."""
    found: list[TrainPlan] = []
    closest = (float("inf"), "no tile of 1 to 64 chips divides it")
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if shape.heads % size == 0 and slice.devices % size == 0]
    for tile in [options.tile] if options.tile else [box for size in sizes for box in tiles(size, slice)]:
        data = slice.devices // prod(tile)
        per_tile = max(1, batch // data)
        loops = (
            [options.microbatches] if options.microbatches else [m for m in range(1, per_tile + 1) if per_tile % m == 0]
        )
        for count in loops:
            training = Training(
                seq=options.seq, batch=batch, microbatches=count, remat="none", optimizer="adafactor", program=T5X
            )
            plan = evaluate_t5(shape, slice, training, tile)
            if plan.memory.fits:
                found.append(plan)
                break
            over = plan.memory.total - plan.memory.limit
            closest = min(closest, (over, f"{plan.memory.excess} (tile {'x'.join(map(str, tile))})"))
    return found, closest
