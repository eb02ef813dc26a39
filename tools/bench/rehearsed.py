"""What the compiler reported, recorded: the published 16B-128B jobs, and a grid of models x meshes for the planner's bytes.

Compiling takes minutes and libtpu, so `make bench-plan` reads what was recorded in docs/measurements, with the versions it was
recorded with; `python -m tools.bench.plan --fresh` asks the compiler again. An estimate is always computed again from the recorded
program: no step time is recorded.
"""

from pathlib import Path

import msgspec

from podway.catalog.slices import find_slice
from podway.decoding import from_json
from podway.model.families import find_model
from podway.model.flops import flops_per_token
from podway.model.layout import MeshShape, parse_mesh
from podway.plan.evidence import Comparison, job_plan
from podway.plan.memory import GIB
from podway.plan.plans import evaluate
from podway.plan.published_rows import is_calibration, rows_of
from podway.plan.training import MAXTEXT_2023, PODWAY, Adapters, Optimizer, Training
from podway.rehearse.fabric import Fabric
from podway.rehearse.rehearsal import CompileReport, Rehearsal, rehearse_training
from podway.rehearse.running import rehearse
from podway.rehearse.timeline import Estimate, estimate

MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"
JOBS, BYTES = MEASUREMENTS / "rehearsed-jobs.json", MEASUREMENTS / "rehearsed-bytes.json"
STEPS = MEASUREMENTS / "rehearsed-steps.json"
# What the grid was recorded with: attention in blocks of 512 and two backward kernels, as the trainer did by default then.
RECORDED = msgspec.structs.replace(PODWAY, attention_block=512, attention_fused=False)


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
    # The attention kernel that it was compiled with: what is recorded does not follow the trainer's choice when that changes.
    block: int = 512
    fused: bool = False

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
            program=msgspec.structs.replace(PODWAY, attention_block=self.block, attention_fused=self.fused),
        )

    @property
    def name(self) -> str:
        """For a table."""
        more = [self.remat] if self.remat != "full" else []
        more += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        more += [self.optimizer] if self.optimizer != "adamw" else []
        more += [f"LoRA {self.lora}"] if self.lora else []
        more += [f"offload {'+'.join(self.offload)}"] if self.offload else []
        where = self.slice if self.slices == 1 else f"{self.slices} x {self.slice}"
        return " ".join([f"{self.model} {where} {self.mesh} {self.batch}x{self.seq}", *more])


class CompiledStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the grid, and its program: what it takes is estimated from it each time."""

    cell: Cell
    report: CompileReport


class CompiledBytes(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the grid and the bytes that the compiler gives it on a device."""

    cell: Cell
    bytes: int
    jax: str
    libtpu: str


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


def record_steps(*, again: bool = True) -> list[str]:
    """Compile TIMED one after the other and keep the programs, written down after each; lines about what did not compile."""
    known = {} if again else {row.cell: row for row in recorded_steps()}
    failed = []
    for cell in (cell for cell in TIMED if cell not in known):
        (report,) = rehearse([rehearsal_of(cell)], jobs=1, fresh=again)
        if report.program is None:
            failed.append(f"{cell.name}: {report.failed}")
            continue
        known[cell] = CompiledStep(cell=cell, report=without_buffers(report))
        rows = [known[cell] for cell in TIMED if cell in known]
        STEPS.write_bytes(b"[\n" + b",\n".join(msgspec.json.encode(row) for row in rows) + b"\n]\n")
    return failed


def without_buffers(report: CompileReport) -> CompileReport:
    """What is recorded of a report: not the names of what is alive at its peak."""
    memory = report.memory and msgspec.structs.replace(report.memory, buffers=())
    return msgspec.structs.replace(report, memory=memory)


def recorded_steps() -> list[CompiledStep]:
    """The programs of TIMED that were compiled."""
    return from_json(STEPS.read_bytes(), list[CompiledStep]) if STEPS.exists() else []


def timed() -> list[Comparison]:
    """Seconds of a step: estimated of the compiled program, and planned."""
    found = []
    for row in recorded_steps():
        assert row.report.program is not None
        slice = find_slice(row.cell.slice)
        plan = evaluate(find_model(row.cell.model), slice, row.cell.sizes, row.cell.training)
        found.append(
            Comparison(row.cell.name, estimate(row.report.program, Fabric(slice)).point, plan.time.total, False)
        )
    return found


def record_jobs() -> list[str]:
    """Compile the four jobs and record the reports; lines about those that failed."""
    rows = [row for row in rows_of("v5e_jobs") if row["slices"] == "1"]
    wanted = []
    for row in rows:
        plan = job_plan(row)
        wanted.append(rehearse_training(row["model"], plan.slice, _untiled(plan.mesh), plan.training, fast=True))
    report = rehearse(wanted, fresh=True)
    JOBS.write_bytes(msgspec.json.encode({row["row"]: one for row, one in zip(rows, report, strict=True)}) + b"\n")
    return [f"{one.title}: {of.failed}" for one, of in zip(wanted, report, strict=True) if of.failed]


def record_bytes(*, again: bool = True) -> list[str]:
    """Compile the grid and write its bytes down; lines about what did not compile. `again`: also what is recorded."""
    known = {} if again else {row.cell: row for row in _recorded()}
    cells = [cell for cell in GRID if cell not in known]
    failed = []
    for cell in cells:
        (one,) = rehearse([rehearsal_of(cell)], jobs=1, fresh=again)
        if one.memory is None:
            failed.append(f"{cell.name}: {one.failed}")
            continue
        known[cell] = CompiledBytes(cell=cell, bytes=one.memory.total, jax=one.jax, libtpu=one.libtpu)
        rows = [known[cell] for cell in GRID if cell in known]
        BYTES.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    return failed


def _recorded() -> list[CompiledBytes]:
    return from_json(BYTES.read_bytes(), list[CompiledBytes]) if BYTES.exists() else []


def rehearsal_of(cell: Cell) -> Rehearsal:
    """What is compiled for a step of the grid."""
    slice = find_slice(cell.slice)
    placed = evaluate(
        find_model(cell.model), slice, cell.sizes, cell.training
    ).mesh  # tensor groups where the planner puts them
    return rehearse_training(cell.model, slice, placed, cell.training, fast=True)


def _untiled(mesh: MeshShape) -> MeshShape:
    """The published jobs left the order of devices to jax."""
    return msgspec.structs.replace(mesh, tile=None)


def jobs() -> tuple[list[Comparison], dict[str, tuple[CompileReport, Estimate]]]:
    """MFU in percent of the four jobs on one slice: published, and as estimated of the recorded programs."""
    recorded = from_json(JOBS.read_bytes(), dict[str, CompileReport])
    compared, found = [], {}
    for row in rows_of("v5e_jobs"):
        report = recorded.get(row["row"])
        if report is None or report.program is None:
            continue
        slice, seq = find_slice(row["slice"]), int(row["seq"])
        guess = estimate(report.program, Fabric(slice))
        flops = flops_per_token(find_model(row["model"]), seq, MAXTEXT_2023.convention)
        work = flops * seq * int(row["sequences_per_chip"]) / slice.generation_facts.peak_bf16
        calibration = is_calibration("v5e_jobs", row["row"])
        compared.append(Comparison(row["row"], float(row["mfu_percent"]), 100 * work / guess.point, calibration))
        found[row["row"]] = (report, guess)
    return compared, found


def weighed() -> list[Comparison]:
    """GiB of a device over the grid: compiled, and planned."""
    return [_compared(row) for row in _recorded()]


def _compared(row: CompiledBytes) -> Comparison:
    cell = row.cell
    memory = evaluate(find_model(cell.model), find_slice(cell.slice), cell.sizes, cell.training).memory
    return Comparison(cell.name, row.bytes / GIB, memory.total / GIB, False)


def versions() -> str:
    """`jax 0.10.2, libtpu 0.0.51` of what was recorded."""
    return ", ".join(sorted({f"jax {row.jax}, libtpu {row.libtpu}" for row in _recorded()}))
