"""The steps that planner and compiler are compared on: models x slices x meshes of Podway's own trainer."""

import msgspec

from podway.catalog.slices import find_slice
from podway.model.families import find_model
from podway.model.layout import MeshShape, parse_mesh
from podway.plan.training import PODWAY, Adapters, Compute, Optimizer, Training


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of the grid."""

    model: str
    slice: str
    mesh: str
    batch: int
    seq: int = 4096
    remat: str = "full"
    microbatches: int = 1
    optimizer: Optimizer = "adamw"
    lora: int = 0
    slices: int = 1
    offload: tuple[str, ...] = ()
    compute: Compute = "bfloat16"
    # The attention kernel that it was compiled with: what is recorded does not follow the trainer's choice when that changes. None: a
    # model whose layers differ in it, as the trainer chooses.
    block: int | None = 512
    fused: bool | None = False
    # And with the flags that give exchanges to the SparseCores of v5p and v6e (train/flags.py); those for several axes came later.
    sparsecore: bool = False
    sparsecore_axes: bool = False
    # And with the experts' tiles and exchanges of 2026-11-16 (plan/training.py).
    tuned_experts: bool = False

    @property
    def sizes(self) -> MeshShape:
        """Its mesh."""
        inside = parse_mesh(self.mesh, chips=find_slice(self.slice).devices)
        return msgspec.structs.replace(inside, slices=self.slices)

    @property
    def training(self) -> Training:
        """Its step."""
        return Training(
            seq=self.seq,
            batch=self.batch,
            microbatches=self.microbatches,
            remat=self.remat,
            optimizer=self.optimizer,
            adapters=Adapters(rank=self.lora) if self.lora else None,
            offload=self.offload,
            compute=self.compute,
            program=msgspec.structs.replace(
                PODWAY,
                attention_block=self.block,
                attention_fused=self.fused,
                sparsecore=PODWAY.sparsecore if self.sparsecore else (),
                sparsecore_axes=self.sparsecore_axes,
                reschedules=PODWAY.reschedules if self.sparsecore else (),
                tuned_experts=self.tuned_experts,
            ),
        )

    @property
    def name(self) -> str:
        """For a table."""
        more = [self.remat] if self.remat != "full" else []
        more += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        more += [self.optimizer] if self.optimizer != "adamw" else []
        more += [f"LoRA {self.lora}"] if self.lora else []
        more += [f"offload {'+'.join(self.offload)}"] if self.offload else []
        more += [self.compute] if self.compute != "bfloat16" else []
        where = self.slice if self.slices == 1 else f"{self.slices} x {self.slice}"
        return " ".join([f"{self.model} {where} {self.mesh} {self.batch}x{self.seq}", *more])


def as_trained(cell: Cell) -> Cell:
    """The same step with the attention kernel and the flags that the trainer chooses today."""
    shape, sizes = find_model(cell.model), cell.sizes
    generation = find_slice(cell.slice).generation
    chosen = {
        PODWAY.attention_blocks(generation, seq=cell.seq, context=sizes.context, d_head=shape.d_head, window=window)
        for window in shape.layer_windows
    }
    block, fused = chosen.pop() if len(chosen) == 1 else (None, None)
    return msgspec.structs.replace(cell, block=block, fused=fused, sparsecore=True, sparsecore_axes=True)


# Compiled after the planner's terms were settled: docs/planning.md tells what it said of these at first sight. The first eight
# led to two more terms; the last four came after those.
UNSEEN = (
    Cell(model="llama3.2-3b", slice="v5p-16", mesh="fsdp=4,tensor=2", batch=16),
    Cell(model="qwen2.5-14b", slice="v6e-64", mesh="fsdp=64", batch=64, remat="save_attention"),
    Cell(model="gemma2-27b", slice="v5p-64", mesh="fsdp=32", batch=32),
    Cell(model="mistral-7b", slice="v4-64", mesh="fsdp=16,tensor=2", batch=32),
    Cell(model="qwen3-8b", slice="v5litepod-64", mesh="fsdp=32,tensor=2", batch=64, microbatches=2),
    Cell(model="mixtral-8x7b", slice="v6e-64", mesh="fsdp=16,expert=4", batch=64),
    Cell(model="llama3.1-8b", slice="v6e-16", mesh="fsdp=8,context=2", batch=8, seq=16_384),
    Cell(model="llama2-13b", slice="v5p-32", mesh="data=2,fsdp=8", batch=32, remat="save_context"),
    Cell(model="qwen3-14b", slice="v6e-64", mesh="fsdp=32,tensor=2", batch=128, microbatches=2),
    Cell(model="llama3.2-3b", slice="v5litepod-16", mesh="fsdp=8,tensor=2", batch=16, remat="save_context"),
    Cell(model="mistral-7b", slice="v5p-32", mesh="fsdp=16", batch=32, remat="minimal"),
    Cell(model="llama2-7b", slice="v6e-16", mesh="fsdp=4,tensor=4", batch=16, seq=2048),
)
_HOST = ("residual", "qkv", "context")
# Offloading, tpu7x and experts that are split: the planner was far off here until these were compiled.
LATER = (
    Cell(model="llama3.2-1b", slice="v6e-8", mesh="fsdp=8", batch=1024, microbatches=4, offload=_HOST),
    Cell(model="llama3.2-1b", slice="v6e-8", mesh="fsdp=8", batch=64, offload=_HOST),
    Cell(model="llama3.2-1b", slice="v6e-8", mesh="fsdp=8", batch=256),
    Cell(model="llama3.2-1b", slice="v6e-8", mesh="fsdp=8", batch=1024, microbatches=8, remat="save_context"),
    Cell(model="llama3.2-3b", slice="v6e-16", mesh="fsdp=16", batch=64, offload=("residual", "qkv")),
    Cell(model="llama3.2-3b", slice="v6e-16", mesh="fsdp=16", batch=64, offload=("residual",)),
    Cell(model="llama3.2-1b", slice="tpu7x-8", mesh="fsdp=8", batch=64),
    Cell(model="llama3.2-1b", slice="tpu7x-8", mesh="fsdp=4,tensor=2", batch=32),
    Cell(model="llama3.2-3b", slice="tpu7x-16", mesh="fsdp=16", batch=64, remat="save_context"),
    Cell(model="mixtral-8x7b", slice="v5p-128", mesh="fsdp=8,expert=8", batch=64),
    Cell(model="qwen1.5-moe-a2.7b", slice="v6e-16", mesh="fsdp=8,expert=2", batch=32, seq=2048),
    Cell(model="32b", slice="v5p-128", mesh="fsdp=16,tensor=4", batch=512, seq=2048, remat="minimal"),
    Cell(model="llama3.1-8b", slice="v5p-16", mesh="fsdp=8", batch=16, remat="minimal"),
)
# Several microbatches and offloading on large slices, which the planner ranked first before it was held to these.
RANKED_FIRST = (
    Cell(model="16b", slice="v5litepod-256", mesh="fsdp=256", batch=2048, seq=2048, microbatches=8, remat="minimal"),
    Cell(
        model="16b", slice="v5litepod-256", mesh="fsdp=256", batch=2048, seq=2048, microbatches=2, remat="save_context"
    ),
    Cell(
        model="16b",
        slice="v5litepod-256",
        mesh="fsdp=256",
        batch=2048,
        seq=2048,
        microbatches=4,
        remat="save_all_but_mlp",
    ),
    Cell(model="16b", slice="v5litepod-256", mesh="fsdp=256", batch=2048, seq=2048),
    Cell(model="32b", slice="v5litepod-256", mesh="fsdp=256", batch=2048, seq=2048, microbatches=8, remat="minimal"),
    Cell(
        model="32b", slice="v5litepod-256", mesh="fsdp=256", batch=1024, seq=2048, microbatches=4, remat="save_context"
    ),
    Cell(model="64b", slice="v5litepod-256", mesh="fsdp=256", batch=2048, seq=2048, offload=("residual",)),
    Cell(model="32b", slice="v5litepod-256", mesh="fsdp=256", batch=512, seq=8192, offload=_HOST),
    Cell(
        model="llama3.1-8b",
        slice="v5litepod-256",
        mesh="fsdp=256",
        batch=2048,
        seq=2048,
        microbatches=8,
        remat="minimal",
    ),
    Cell(
        model="llama3.1-8b",
        slice="v5litepod-64",
        mesh="fsdp=64",
        batch=512,
        seq=8192,
        microbatches=8,
        remat="save_context",
    ),
    Cell(model="32b", slice="v5p-512", mesh="fsdp=256", batch=2048, seq=2048, remat="minimal"),
    Cell(model="16b", slice="v5p-128", mesh="fsdp=64", batch=2048, seq=2048, microbatches=4, remat="minimal"),
)
# Small models on every kind of axis, and a few real ones. Nothing was left out because it came out wrong.
GRID = (
    Cell(model="llama3.2-1b", slice="v5litepod-16", mesh="fsdp=16", batch=32),
    Cell(model="llama3.2-1b", slice="v5litepod-16", mesh="fsdp=8,tensor=2", batch=32),
    Cell(model="llama3.2-1b", slice="v5litepod-16", mesh="fsdp=4,tensor=4", batch=16),
    Cell(model="llama3.2-1b", slice="v6e-16", mesh="data=4,fsdp=4", batch=32),
    Cell(model="llama3.2-1b", slice="v6e-8", mesh="tensor=8", batch=8),
    Cell(model="llama3.2-1b", slice="v5litepod-8", mesh="fsdp=8", batch=64, seq=2048, remat="none", microbatches=2),
    Cell(model="llama3.2-1b", slice="v5litepod-8", mesh="fsdp=8", batch=64, seq=2048, remat="save_all_but_mlp"),
    Cell(
        model="llama3.2-1b",
        slice="v5litepod-8",
        mesh="fsdp=4,tensor=2",
        batch=64,
        seq=2048,
        remat="minimal",
        microbatches=2,
    ),
    Cell(model="llama3.2-3b", slice="v6e-16", mesh="fsdp=16", batch=32, remat="save_context"),
    Cell(model="llama3.2-3b", slice="v6e-16", mesh="fsdp=16", batch=16, seq=2048, remat="none"),
    Cell(model="llama3.2-3b", slice="v6e-16", mesh="fsdp=8,tensor=2", batch=16, remat="minimal"),
    Cell(model="qwen3-0.6b", slice="v5litepod-8", mesh="fsdp=8", batch=16, microbatches=2),
    Cell(model="qwen3-4b", slice="v6e-16", mesh="fsdp=8,tensor=2", batch=16),
    Cell(model="qwen2.5-7b", slice="v5p-16", mesh="fsdp=8", batch=16, optimizer="adafactor"),
    Cell(model="gemma2-2b", slice="v6e-8", mesh="fsdp=8", batch=16),
    Cell(model="mistral-7b", slice="v5litepod-64", mesh="fsdp=64", batch=64),
    Cell(model="llama3.1-8b", slice="v6e-16", mesh="fsdp=16", batch=32, seq=8192),
    Cell(model="llama3.1-8b", slice="v6e-16", mesh="fsdp=8,tensor=2", batch=16, seq=8192),
    Cell(model="llama3.1-8b", slice="v6e-16", mesh="fsdp=4,tensor=4", batch=16, seq=8192),
    Cell(model="llama3.1-8b", slice="v6e-8", mesh="fsdp=8", batch=16, lora=16),
    Cell(model="llama3.1-8b", slice="v4-32", mesh="fsdp=16", batch=32),
    Cell(model="llama3.1-8b", slice="v5p-16", mesh="fsdp=8", batch=16, seq=8192),
    Cell(model="llama3.1-8b", slice="v6e-16", mesh="fsdp=16", batch=64, microbatches=4, remat="save_attention"),
    Cell(model="mixtral-8x7b", slice="v5p-64", mesh="fsdp=8,expert=4", batch=64),
    Cell(model="llama3.1-70b", slice="v5p-128", mesh="fsdp=64", batch=64),
    Cell(model="llama3.1-70b", slice="v6e-64", mesh="fsdp=16,tensor=4", batch=32),
    Cell(model="llama3.2-1b", slice="v6e-16", mesh="fsdp=16", batch=32),
    Cell(model="llama3.1-8b", slice="v6e-256", mesh="fsdp=256", batch=512, seq=8192),
    Cell(model="llama3.1-8b", slice="v6e-16", mesh="fsdp=16", batch=64, seq=8192, microbatches=4, remat="save_context"),
    Cell(model="llama3.1-8b", slice="v5litepod-256", mesh="fsdp=256", batch=256),
    Cell(model="llama3.1-8b", slice="v6e-16", mesh="fsdp=16", batch=32, seq=2048, lora=16),
    Cell(
        model="llama3.1-8b",
        slice="v5p-128",
        mesh="fsdp=64",
        batch=256,
        seq=8192,
        remat="save_all_but_mlp",
        microbatches=2,
        optimizer="adafactor",
    ),
    Cell(model="qwen3-4b", slice="v6e-16", mesh="fsdp=16", batch=32, remat="minimal"),
    Cell(model="qwen3-14b", slice="v5litepod-256", mesh="fsdp=256", batch=256),
    Cell(model="qwen3-30b-a3b", slice="v5p-128", mesh="fsdp=64", batch=128),
    Cell(model="mixtral-8x7b", slice="v5p-128", mesh="fsdp=64", batch=128),
    Cell(model="gemma2-9b", slice="v5p-128", mesh="fsdp=64", batch=64, remat="save_attention"),
    Cell(model="gemma3-12b", slice="v6e-256", mesh="fsdp=256", batch=256, seq=8192, remat="save_context"),
    Cell(model="64b", slice="v5p-128", mesh="fsdp=64", batch=128, seq=2048),
    Cell(model="32b", slice="v5litepod-256", mesh="fsdp=256", batch=1024, seq=2048),
    Cell(model="128b", slice="v5litepod-256", mesh="fsdp=16,tensor=16", batch=256, seq=2048),
    *UNSEEN,
    *LATER,
    *RANKED_FIRST,
)


# Every generation and kind of axis, dense and mixture, one slice and two, offloaded: small models, so that compiling takes seconds.
TIMED = (
    Cell(model="llama3.2-1b", slice="v5litepod-16", mesh="fsdp=16", batch=32, seq=2048),
    Cell(model="llama3.2-1b", slice="v6e-16", mesh="fsdp=8,tensor=2", batch=32, seq=2048),
    Cell(model="llama3.2-1b", slice="v5p-16", mesh="fsdp=8", batch=32, seq=2048),
    Cell(model="llama3.2-1b", slice="tpu7x-8", mesh="fsdp=8", batch=32, seq=2048),
    Cell(model="llama3.2-1b", slice="v5litepod-16", mesh="fsdp=16", batch=64, seq=2048, slices=2),
    Cell(model="16b", slice="v5litepod-256", mesh="fsdp=256", batch=1536, seq=2048),
    Cell(model="16b", slice="v5litepod-256", mesh="fsdp=64,tensor=4", batch=1536, seq=2048, microbatches=2),
    Cell(model="llama3.2-1b", slice="v6e-8", mesh="fsdp=4,context=2", batch=8, seq=8192),
    Cell(model="qwen1.5-moe-a2.7b", slice="v6e-16", mesh="fsdp=16", batch=32, seq=2048),
    Cell(model="llama3.2-3b", slice="v6e-16", mesh="fsdp=16", batch=32, offload=("residual", "qkv", "context")),
    Cell(model="llama3.2-1b", slice="v4-16", mesh="fsdp=8", batch=32, seq=2048),
    Cell(model="llama3.2-1b", slice="v6e-8", mesh="fsdp=8", batch=64, offload=_HOST),
    Cell(model="llama3.2-1b", slice="tpu7x-8", mesh="fsdp=4,tensor=2", batch=32),
    Cell(model="llama3.2-3b", slice="tpu7x-16", mesh="fsdp=16", batch=64, remat="save_context"),
    Cell(model="mixtral-8x7b", slice="v5p-128", mesh="fsdp=8,expert=8", batch=64),
    Cell(model="qwen1.5-moe-a2.7b", slice="v6e-16", mesh="fsdp=8,expert=2", batch=32, seq=2048),
    Cell(model="32b", slice="v5p-128", mesh="fsdp=16,tensor=4", batch=512, seq=2048, remat="minimal"),
    Cell(model="llama3.1-8b", slice="v5p-16", mesh="fsdp=8", batch=16, remat="minimal"),
    Cell(model="llama3.2-1b", slice="v6e-16", mesh="fsdp=16", batch=128, seq=2048, slices=4),
    Cell(model="llama3.2-3b", slice="v5p-16", mesh="fsdp=4,tensor=2", batch=16),
    Cell(model="llama3.1-8b", slice="v6e-16", mesh="fsdp=4,tensor=4", batch=16, seq=8192),
    Cell(model="llama3.2-1b", slice="v5litepod-16", mesh="fsdp=4,tensor=4", batch=16),
    Cell(model="llama3.2-1b", slice="v5p-16", mesh="fsdp=4,context=2", batch=8, seq=8192),
    # Several microbatches on v5e, whose gradients go round in rings: closed ones (16x16), lines (8x8), one ring of all (4x4).
    Cell(model="16b", slice="v5litepod-256", mesh="fsdp=256", batch=2048, seq=2048, microbatches=8, remat="minimal"),
    Cell(
        model="32b", slice="v5litepod-256", mesh="fsdp=256", batch=1024, seq=2048, microbatches=4, remat="save_context"
    ),
    Cell(
        model="llama3.1-8b",
        slice="v5litepod-64",
        mesh="fsdp=64",
        batch=512,
        seq=8192,
        microbatches=8,
        remat="save_context",
    ),
    Cell(
        model="llama3.2-3b", slice="v5litepod-16", mesh="fsdp=16", batch=64, seq=2048, microbatches=4, remat="minimal"
    ),
    Cell(model="qwen1.5-moe-a2.7b", slice="tpu7x-16", mesh="fsdp=16", batch=32, seq=2048),
)


# Compiled after the terms of November 2026 were settled (matrices at once, sums at the end, rings of all chips on v6e): docs/planning.md
# tells what the planner said of these at first sight.
LATEST = (
    Cell(model="mixtral-8x7b", slice="v6e-64", mesh="fsdp=64", batch=64),
    Cell(model="qwen1.5-moe-a2.7b", slice="v5litepod-16", mesh="fsdp=16", batch=32, seq=2048),
    Cell(model="llama3.2-3b", slice="v5p-16", mesh="fsdp=8", batch=32, slices=2),
    Cell(model="llama3.2-3b", slice="v5p-16", mesh="fsdp=8", batch=32, offload=_HOST),
    Cell(model="llama3.1-8b", slice="v6e-16", mesh="fsdp=16", batch=64, slices=2, remat="save_context"),
    Cell(model="llama3.2-3b", slice="v5litepod-16", mesh="fsdp=16", batch=32, offload=("residual",)),
    Cell(model="qwen1.5-moe-a2.7b", slice="v4-32", mesh="fsdp=16", batch=32, seq=2048),
    Cell(model="mistral-7b", slice="v6e-16", mesh="fsdp=16", batch=32, remat="minimal"),
    Cell(model="llama3.1-8b", slice="v4-64", mesh="fsdp=32", batch=64),
    Cell(model="llama3.2-1b", slice="v5litepod-16", mesh="fsdp=16", batch=128, seq=2048, slices=4),
    Cell(model="qwen3-8b", slice="v5p-32", mesh="fsdp=16", batch=32, remat="save_context"),
    Cell(model="gemma2-2b", slice="v5litepod-16", mesh="fsdp=16", batch=16),
    Cell(model="llama3.1-8b", slice="v5litepod-16", mesh="fsdp=8,tensor=2", batch=16),
    Cell(model="qwen2.5-7b", slice="v6e-16", mesh="fsdp=8,tensor=2", batch=32),
)


def _tuned(cell: Cell) -> Cell:
    """The same step with the attention kernel and the flags that the trainer chooses since 2026-11-16."""
    generation = find_slice(cell.slice).generation
    block = 2048 if generation == "v6e" and cell.seq >= 8192 else 1024
    return msgspec.structs.replace(cell, block=block, fused=True, sparsecore=generation in ("v5p", "v6e"))


# Steps of every generation and kind of axis again, with larger blocks, one backward kernel and SparseCores.
TUNED = tuple(
    _tuned(cell)
    for cell in (
        Cell(model="llama3.2-1b", slice="v6e-16", mesh="fsdp=8,tensor=2", batch=32, seq=2048),
        Cell(model="llama3.2-1b", slice="v5p-16", mesh="fsdp=8", batch=32, seq=2048),
        Cell(model="llama3.2-1b", slice="tpu7x-8", mesh="fsdp=8", batch=32, seq=2048),
        Cell(model="llama3.2-1b", slice="v4-16", mesh="fsdp=8", batch=32, seq=2048),
        Cell(model="llama3.2-1b", slice="v5litepod-16", mesh="fsdp=16", batch=32, seq=2048),
        Cell(model="llama3.2-1b", slice="v6e-8", mesh="fsdp=4,context=2", batch=8, seq=8192),
        Cell(model="llama3.2-1b", slice="v5p-16", mesh="fsdp=4,context=2", batch=8, seq=8192),
        Cell(model="llama3.2-1b", slice="v6e-16", mesh="fsdp=16", batch=128, seq=2048, slices=4),
        Cell(model="llama3.2-3b", slice="v5p-16", mesh="fsdp=8", batch=32, slices=2),
        Cell(model="llama3.2-3b", slice="v6e-16", mesh="fsdp=16", batch=32, offload=_HOST),
        Cell(model="llama3.2-3b", slice="v5p-16", mesh="fsdp=8", batch=32, offload=_HOST),
        Cell(model="qwen1.5-moe-a2.7b", slice="v6e-16", mesh="fsdp=16", batch=32, seq=2048),
        Cell(model="qwen1.5-moe-a2.7b", slice="v6e-16", mesh="fsdp=8,expert=2", batch=32, seq=2048),
        Cell(model="llama3.1-8b", slice="v6e-16", mesh="fsdp=16", batch=32, seq=8192),
        Cell(model="llama3.2-1b", slice="tpu7x-8", mesh="fsdp=4,tensor=2", batch=32),
        Cell(model="llama3.2-3b", slice="v5p-16", mesh="fsdp=4,tensor=2", batch=16),
        Cell(model="llama3.2-1b", slice="v5litepod-16", mesh="fsdp=16", batch=128, seq=2048, slices=4),
        Cell(model="qwen3-8b", slice="v5p-32", mesh="fsdp=16", batch=32, remat="save_context"),
        Cell(model="llama3.1-8b", slice="v6e-16", mesh="fsdp=16", batch=64, slices=2, remat="save_context"),
        Cell(model="llama3.1-8b", slice="v4-64", mesh="fsdp=32", batch=64),
        Cell(model="llama3.1-8b", slice="v5litepod-16", mesh="fsdp=8,tensor=2", batch=16),
        Cell(model="mixtral-8x7b", slice="v5p-128", mesh="fsdp=8,expert=8", batch=64),
        Cell(model="mixtral-8x7b", slice="v6e-256", mesh="fsdp=32,expert=8", batch=2048),
        Cell(model="mixtral-8x7b", slice="v6e-64", mesh="fsdp=64", batch=64),
        Cell(model="mixtral-8x7b", slice="v5p-128", mesh="fsdp=64", batch=128),
        Cell(model="llama3.1-8b", slice="v5p-128", mesh="fsdp=64", batch=128, seq=8192),
        Cell(model="llama3.2-3b", slice="tpu7x-16", mesh="fsdp=16", batch=64, remat="save_context"),
        Cell(model="qwen1.5-moe-a2.7b", slice="tpu7x-16", mesh="fsdp=16", batch=32, seq=2048),
        Cell(model="llama3.1-8b", slice="v6e-16", mesh="fsdp=4,tensor=4", batch=16, seq=8192),
        Cell(model="16b", slice="v5litepod-256", mesh="fsdp=256", batch=1536, seq=2048),
    )
)
# What the planner proposed first for the jobs of docs/aot.md, with the flags for several axes too.
PLANNED = tuple(
    msgspec.structs.replace(_tuned(cell), sparsecore_axes=True)
    for cell in (
        Cell(model="llama3.1-8b", slice="v6e-16", mesh="fsdp=16", batch=48, seq=8192, remat="save_context"),
        Cell(model="llama3.1-70b", slice="v6e-256", mesh="fsdp=256", batch=1280, seq=8192, offload=_HOST),
        Cell(
            model="llama3.1-8b", slice="v5p-128", mesh="fsdp=64", batch=256, seq=8192, remat="minimal", microbatches=2
        ),
        Cell(model="mixtral-8x7b", slice="v5p-128", mesh="fsdp=64", batch=256, remat="save_all_but_mlp"),
        Cell(model="qwen3-30b-a3b", slice="v5p-64", mesh="fsdp=32", batch=128, remat="minimal"),
        Cell(model="mixtral-8x7b", slice="v6e-256", mesh="fsdp=256", batch=3072, offload=_HOST),
        Cell(model="llama3.1-8b", slice="v6e-64", mesh="fsdp=64", batch=320, seq=8192),
        Cell(model="llama3.1-70b", slice="v6e-64", mesh="fsdp=64", batch=128, seq=8192, offload=_HOST),
    )
)
# Drawn at random over generations, models, meshes, remat, precision and slices (docs/planning.md tells what was said at first sight), and
# steps with nothing computed again beside the same with `minimal`: as the trainer compiles them since 2026-11-16.
DRAWN = tuple(
    msgspec.structs.replace(cell, block=1024, fused=True, sparsecore=True, sparsecore_axes=True)
    for cell in (
        Cell(model="qwen2.5-1.5b", slice="v5litepod-16", mesh="fsdp=8,tensor=2", batch=64, compute="fp8"),
        Cell(
            model="qwen2.5-1.5b",
            slice="v5litepod-16",
            mesh="fsdp=2,context=4,tensor=2",
            batch=64,
            remat="minimal",
            microbatches=4,
            compute="int8",
        ),
        Cell(model="llama3.2-1b", slice="v5litepod-16", mesh="fsdp=16", batch=32, seq=2048, remat="none"),
        Cell(model="llama3.2-1b", slice="v5litepod-16", mesh="fsdp=16", batch=32, seq=2048, remat="minimal"),
        Cell(model="llama3.2-1b", slice="v5p-16", mesh="fsdp=8", batch=32, seq=2048, remat="none"),
    )
)
# Mixtures of experts with the tiles and exchanges that they are trained with since 2026-11-16. Those above were compiled before that.
MIXTURES = tuple(
    msgspec.structs.replace(_tuned(cell), sparsecore_axes=True, tuned_experts=True)
    for cell in (
        Cell(model="mixtral-8x7b", slice="v5p-128", mesh="fsdp=8,expert=8", batch=64),
        Cell(model="mixtral-8x7b", slice="v6e-256", mesh="fsdp=256", batch=2048),
        Cell(model="mixtral-8x7b", slice="v5p-128", mesh="fsdp=64", batch=256, remat="save_all_but_mlp"),
    )
)
ALL = tuple(dict.fromkeys((*GRID, *TIMED, *LATEST, *TUNED, *PLANNED, *DRAWN, *MIXTURES)))
