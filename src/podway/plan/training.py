"""What a training step is asked to be: batch, remat, optimizer, precision, and the program that will run it.

`Training` holds what a person chooses; `Program` what the code decides (which attention kernel, how gradients are
reduced). `PODWAY` is Podway's own trainer. Others exist so that published results of other programs can be compared:
what was measured is a program, not only a model.
"""

from typing import Literal

import msgspec

from podway.errors import UserError
from podway.model.attention_blocks import BlockChoice, Blocks, choose_blocks
from podway.model.expert_dispatch import DROPLESS, Dispatch
from podway.model.flops import Convention
from podway.model.layout import MeshShape

Optimizer = Literal["adamw", "adafactor"]
Dtype = Literal["float32", "bfloat16"]
Compute = Literal["bfloat16", "int8", "fp8"]  # what matrix products are computed in
Exchange = Literal["gather", "reduce"]
BYTES: dict[str, float] = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1, "int4": 0.5}
COMPUTE_BYTES = 2  # activations, gathered weights and reduced gradients are bfloat16

# The policies of Podway's trainer (podway.train.remat): named tensors of a layer (podway.model.params.activations) that stay
# for the backward pass; all others are computed again. The input of a layer always stays. `rest` is everything without a
# name: norms and activated products.
REMAT: dict[str, tuple[str, ...]] = {
    "none": ("qkv", "context", "attn_out", "mlp_in", "mlp_out", "rest"),
    "minimal": ("qkv", "context", "attn_out", "mlp_in"),
    "save_all_but_mlp": ("qkv", "context", "attn_out"),
    "save_attention": ("qkv", "context"),
    "save_context": ("context",),
    "full": (),
}


# What a layer may keep in host memory instead of HBM (podway.train.remat): its input too, which otherwise always stays.
OFFLOADABLE = ("residual", *REMAT["none"][:-1])


class Program(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """What the code of a trainer decides."""

    name: str
    causal: bool = True  # the attention kernel skips the blocks that the mask hides
    # Sides of the attention kernel's blocks, where the sequence divides by it, and whether one backward kernel takes the place of
    # two; None: as Podway's trainer chooses them by generation and shape.
    attention_block: int | None = 512
    attention_fused: bool | None = False
    # fsdp exchanges that the compiled program runs beside its products, by generation; others are waited for. By
    # libtpu 0.0.51 (docs/aot.md, docs/measurements/rehearsed-steps.json.gz): both on v5e, where the flag that fuses gathers is
    # accepted and gradients go round in asynchronous permutes, and on tpu7x, by its SparseCores.
    beside: tuple[tuple[str, Exchange], ...] = (
        ("v5e", "gather"), ("v5e", "reduce"), ("tpu7x", "gather"), ("tpu7x", "reduce"),
    )  # fmt: skip
    # Generations whose flags (podway.train.flags) give exchanges to the SparseCores, which run them beside the products: scatters of
    # gradients, also of a tensor group, and gathers of weights. Counted in programs of libtpu 0.0.51.
    sparsecore: tuple[str, ...] = ()
    # Whether that holds for gathers over several axes of the torus; without the flags for it only those of v6e slices of up to 16 chips.
    sparsecore_axes: bool = False
    # Generations whose flags let the scheduler begin transfers from host memory earlier, and look for less memory a second time.
    reschedules: tuple[str, ...] = ()
    # The part of a layer's forward and of its backward pass that transfers to and from host memory run beside. Podway's compiled loop
    # writes at the beginning of the next layer and waits after 0.17 of it; it fetches in the last quarter of a layer (Llama 3.2 3B
    # on v6e-16, libtpu 0.0.51).
    host_beside: tuple[float, float] = (0.17, 0.25)
    # How gathered weights whose shards are not whole tiles are copied: the MLP's row by row, or those that end in d_model, whose lanes
    # are taken apart.
    relayouts: Literal["rows", "transposed"] = "rows"
    # Rows of each expert are padded to this multiple of the even share and tokens above it are dropped; they reach their
    # expert by a product with a one-hot matrix (MaxText's capacity_factor). None: no token is dropped, rows are sorted.
    expert_capacity: float | None = None
    # Rows, inner and columns of a tile of grouped products (dropless experts); None: as Podway's trainer or the compiler chooses.
    expert_tile: tuple[int, int, int] | None = None
    # Experts as Podway trains them since 2026-11-16: tiles of their products are its own (model/expert_tiles.py), the router's weight is
    # multiplied in before the last of them, and groups of two chips may gather tokens (model/expert_dispatch.py). Else the compiler's
    # tiles, weights after it, and an all-to-all.
    tuned_experts: bool = False
    gathers_bytes: bool = False  # weights of quantised products are gathered as they are multiplied; else in bfloat16
    quantises_once: bool = (
        False  # quantised inputs and weights are used again in the backward pass; else each product casts its own
    )
    weight_gradient: Compute | None = None  # precision of weight gradients where products are quantised; None: the same
    # How gradients of split weights are summed: scattered along one ring of the torus after the other, or all-reduced
    # over all of them at once and then cut.
    gradients: Literal["rings", "all-reduce"] = "rings"
    gradient_bytes: int = 2  # of an element as it is summed over ICI, and kept if there is one microbatch
    casts_once: bool = True  # the step begins with a bfloat16 copy of the weights, each device its own piece
    # float32 logits that exist at once, as a share of a device's HBM (podway.train.loss); None: those of all tokens
    logits_share: float | None = 1 / 32
    logits_bytes: int = 4  # of an element
    convention: Convention = "causal"  # how the FLOPs of MFU are counted

    @property
    def dispatch(self) -> Dispatch:
        """How tokens reach the experts of other chips."""
        return DROPLESS if self.tuned_experts else Dispatch("all-to-all")

    def attention_blocks(
        self, generation: str | None, *, seq: int, context: int, d_head: int, window: int | None = None
    ) -> BlockChoice:
        """The blocks of the attention kernel on a device that has one of `context` pieces of a sequence."""
        queries = max(1, seq // context)
        size = self.attention_block
        while size is not None and size > 128 and queries % size:
            size //= 2
        asked = Blocks(None if size is None else min(size, queries), self.attention_fused, generation)
        chosen = choose_blocks(asked, queries=queries, keys=seq, d_head=d_head, window=window)
        return chosen or BlockChoice(min(128, queries), fused=False)


PODWAY = Program(
    name="podway", gathers_bytes=True, quantises_once=True, attention_block=None, attention_fused=None,
    sparsecore=("v5p", "v6e"), sparsecore_axes=True, reschedules=("v6e",), tuned_experts=True,
)  # fmt: skip # podway.train: sharding.py, step.py, loss.py
# MaxText of October 2023, which the 16B-128B table was measured with: a kernel without causal skipping; gradients
# all-reduced whole, in float32 (1.34 GB for a matrix of 10240 x 32768), and then sliced; all logits at once. Facts:
# MaxText @5ebcd67fe, and its program compiled with libtpu 0.0.51.
MAXTEXT_2023 = Program(
    name="maxtext-2023",
    causal=False,
    gradients="all-reduce",
    gradient_bytes=4,
    casts_once=False,
    logits_share=None,
    beside=(("v5e", "gather"),),
    host_beside=(1.0, 1.0),
    relayouts="transposed",
    convention="full-2023",
)
# MaxText since 2024: gradients all-reduced in bfloat16, all logits at once and in bfloat16 (5.9 GiB of them on a chip with 24,576
# tokens of Llama 3.1 8B). Its recipes choose blocks and flags by generation.
MAXTEXT = Program(
    name="maxtext",
    gradients="all-reduce",
    casts_once=False,
    logits_share=None,
    logits_bytes=2,
    beside=(("v5e", "gather"),),
    host_beside=(1.0, 1.0),  # its recipes ask for it; not compiled here
    expert_tile=(512, 1024, 1024),  # tile_batch_seq, tile_embed_dim and tile_mlp_dim of its base.yml
)
# Its v6e recipes: attention in blocks of 2048 with a fused backward pass; int8 products with bfloat16 weight gradients
# (MaxText's int8 configuration leaves the gradient of the right operand unquantised).
MAXTEXT_V6E = msgspec.structs.replace(
    MAXTEXT,
    name="maxtext-v6e",
    attention_block=2048,
    attention_fused=True,
    weight_gradient="bfloat16",
)
# Its tpu7x recipes: the same blocks; gathers and gradient sums run on the SparseCores beside the products.
MAXTEXT_TPU7X = msgspec.structs.replace(
    MAXTEXT, name="maxtext-tpu7x", attention_block=2048, attention_fused=True,
    beside=(("tpu7x", "gather"), ("tpu7x", "reduce")),
)  # fmt: skip
PROGRAMS = {program.name: program for program in (PODWAY, MAXTEXT_2023, MAXTEXT, MAXTEXT_V6E, MAXTEXT_TPU7X)}


class Adapters(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA: two thin matrices beside some matrices of a layer, whole on every device; all else is frozen."""

    rank: int
    targets: tuple[str, ...] = ("q", "k", "v", "o")  # as podway.train.config
    base: Literal["bfloat16", "int8"] = "bfloat16"


class Training(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One way to run a step."""

    seq: int
    batch: int  # sequences of a step, over all chips and microbatches
    microbatches: int = 1
    remat: str = "full"  # a key of REMAT, or names joined by +
    optimizer: Optimizer = "adamw"
    offload: tuple[str, ...] = ()  # tensors that are kept in host memory, of OFFLOADABLE
    compute: Compute = "bfloat16"
    params: Dtype = "float32"
    moments: Dtype = "float32"  # AdamW's two; Adafactor's are a row and a column, always float32
    adapters: Adapters | None = None
    state_over_slices: bool = (
        False  # slices share weights and moments, instead of each having a copy (`mesh.state_over_slices`)
    )
    program: Program = PODWAY

    def __post_init__(self) -> None:
        # A search makes tens of thousands of these: what is right is seen at once.
        for name in ("seq", "batch", "microbatches") if min(self.seq, self.batch, self.microbatches) < 1 else ():
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}", f"{name} must be at least 1")
        if self.adapters is not None and self.adapters.rank < 1:
            raise UserError(f"LoRA rank is {self.adapters.rank}", "a rank is at least 1; 8 to 64 are usual")
        if self.remat not in REMAT:
            saved_names(self.remat)
        for name in self.offload:
            if name not in OFFLOADABLE:
                raise UserError(f"offload {name!r} is not known", f"use names of {', '.join(OFFLOADABLE)}")
        if self.compute != "bfloat16" and self.adapters is not None:
            raise UserError(f"{self.compute} products with LoRA are not planned", "leave --compute out")
        if self.state_over_slices and self.adapters is not None:
            raise UserError("LoRA whose slices share the state is not planned", "leave --state-over-slices out")

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq * self.batch

    @property
    def weight_gradient(self) -> Compute:
        """What gradients of weights are multiplied in."""
        if self.compute == "fp8" and self.program.name == "podway":
            return "bfloat16"  # podway.train.quantized
        return self.program.weight_gradient or self.compute

    @property
    def gathered_bytes(self) -> float:
        """Of an element of a layer's weights as fsdp gathers it."""
        if self.adapters is not None and self.adapters.base == "int8":
            return BYTES["int8"]
        return BYTES[self.compute] if self.program.gathers_bytes else COMPUTE_BYTES

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of the tensors that remat keeps, in HBM or in host memory."""
        kept = REMAT.get(self.remat)
        kept = saved_names(self.remat) if kept is None else kept
        return (*kept, *self.offload) if self.offload else kept

    @property
    def held(self) -> tuple[str, ...]:
        """Names of the tensors that stay in HBM, the input of a layer included."""
        return tuple(name for name in ("residual", *saved_names(self.remat)) if name not in self.offload)

    @property
    def keeps_gathered(self) -> bool:
        """Whether gathered weights stay for the backward pass, as they do where nothing is computed again: they are gathered once."""
        return "rest" in self.saved and self.program.casts_once

    @property
    def one_sequence(self) -> "Training":
        """The same step of one sequence: what two steps have in common that differ in batch and microbatches alone."""
        return msgspec.structs.replace(self, batch=1, microbatches=1)

    def rows_per_device(self, mesh: MeshShape) -> float:
        """Sequences of one microbatch on one device; a UserError where they do not divide."""
        groups = mesh.slices * mesh.data * mesh.fsdp * mesh.expert
        if self.batch % (groups * self.microbatches):
            raise UserError(
                f"a batch of {self.batch} sequences does not divide into {self.microbatches} microbatches over "
                f"{groups} groups of chips ({mesh})",
                f"use a multiple of {groups * self.microbatches} sequences",
            )
        return self.batch / groups / self.microbatches

    def tokens_per_device(self, mesh: MeshShape) -> float:
        """Tokens of one microbatch on one device."""
        return self.rows_per_device(mesh) * self.seq / mesh.context


def saved_names(remat: str) -> tuple[str, ...]:
    """The tensors that a policy keeps: `full`, `minimal`, ... or names joined by + (`qkv+context`)."""
    if remat in REMAT:
        return REMAT[remat]
    names = tuple(remat.split("+"))
    unknown = [name for name in names if name not in REMAT["none"]]
    if unknown:
        raise UserError(
            f"remat {remat!r} is not known",
            f"use {', '.join(REMAT)}, or names of saved tensors joined by +: {', '.join(REMAT['none'])}",
        )
    return names
