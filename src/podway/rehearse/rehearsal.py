"""`Rehearsal`: what is to be compiled, and `CompileReport`: what the compiler reports about it (no jax).

A rehearsal of training holds the very settings that `podway train` would read, so that what is compiled is what would run. It
is made of a plan, of a task file, or of words of the command line.
"""

from typing import Literal

import msgspec

from podway.catalog.slices import Slice, find_slice
from podway.errors import UserError
from podway.model.layout import MeshShape
from podway.plan.training import REMAT, Training, saved_names
from podway.rehearse.memory import Hbm
from podway.rehearse.messages import EngineOptions
from podway.rehearse.program import Program

ProgramName = Literal["podway", "maxtext-2023"]


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One program for one slice."""

    what: Literal["train", "serve"] = "train"
    model: str
    slice: str
    topology: str | None = None
    slices: int = 1
    settings: tuple[str, ...] = ()  # of the trainer: key=value
    program: ProgramName = "podway"
    options: EngineOptions = {}  # of the engine: fields of podway.serve.build.Options
    tensor: int | None = None  # of the engine: chips of a replica
    part: str | None = None  # of the engine: one of its programs
    flags: tuple[str, ...] = ()  # of libtpu, over those that the trainer would set
    fast: bool = False  # stop when memory and schedule are known: no code is made

    @property
    def tpu(self) -> Slice:
        """The slice it is for."""
        return find_slice(self.slice, self.topology)

    @property
    def title(self) -> str:
        """For people."""
        where = self.slice if self.slices == 1 else f"{self.slices} x {self.slice}"
        return f"{self.model} {self.part or self.what} on {where}"

    def setting(self, key: str) -> str | None:
        """The value of one setting."""
        return next((word.partition("=")[2] for word in reversed(self.settings) if word.startswith(f"{key}=")), None)


class CompileReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the compiler reports: kept in the cache, and in docs/measurements."""

    jax: str
    libtpu: str
    key: str  # of what was compiled: program text, flags, versions
    name: str = ""  # of the program
    lowering_seconds: float = 0.0
    compile_seconds: float = 0.0
    peak_bytes: int = 0  # of the compiler's own process
    memory: Hbm | None = None
    program: Program | None = None
    failed: str = ""  # in one line, where there is no program


def training_settings(mesh: MeshShape, training: Training) -> tuple[str, ...]:
    """The settings of `podway train` that make it run this step on this mesh."""
    words = [
        f"mesh.shape={mesh}",
        f"batch.sequences={training.batch}",
        f"batch.length={training.seq}",
        f"batch.microbatches={training.microbatches}",
        f"optimizer.kind={training.optimizer}",
        f"optimizer.moments={training.moments}",
        f"precision.weights={training.params}",
    ]
    if training.compute != "bfloat16":
        words.append(f"precision.products={training.compute}")
    program = training.program
    if program.attention_block is not None:
        words.append(f"model.attention_block={program.attention_block}")
    if program.attention_fused is not None:
        words.append(f"model.attention_fused={str(program.attention_fused).lower()}")
    if training.state_over_slices:
        words.append("mesh.state_over_slices=true")
    if mesh.tile is not None:
        words.append(f"mesh.tile=[{','.join(map(str, mesh.tile))}]")
    if training.offload:
        saved = [name for name in saved_names(training.remat) if name not in training.offload]
        words += [
            "remat.policy=custom",
            f"remat.save=[{','.join(saved)}]",
            f"remat.offload=[{','.join(training.offload)}]",
        ]
    elif training.remat in REMAT:
        words.append(f"remat.policy={training.remat}")
    else:
        words += ["remat.policy=custom", f"remat.save=[{','.join(saved_names(training.remat))}]"]
    if training.adapters is not None:
        words.append(f"lora.rank={training.adapters.rank}")
        words.append(f"lora.base={training.adapters.base}")
        words.append(f"lora.targets=[{','.join(training.adapters.targets)}]")
    return tuple(words)


def _is_changed(training: Training) -> bool:
    """Whether a step asks for what `maxtext_2023.lower` does not do."""
    plain = Training(seq=training.seq, batch=training.batch, program=training.program)
    return training != plain


def rehearse_training(model: str, slice: Slice, mesh: MeshShape, training: Training, *, fast: bool) -> Rehearsal:
    """The rehearsal of a plan; a UserError where no program of Podway's does it."""
    if training.compute != "bfloat16" and training.program.name != "podway":
        raise UserError(
            f"Podway has no program of {training.program.name} with {training.compute} products to compile",
            "leave --compute or --program out, or plan only",
        )
    if training.program.name not in ("podway", "maxtext-2023"):
        raise UserError(
            f"Podway has no program of {training.program.name} to compile", "leave --program out, or plan only"
        )
    if training.program.name == "maxtext-2023" and _is_changed(training):
        raise UserError(
            "Podway's program of maxtext-2023 has one microbatch, AdamW in float32 and computes every layer again",
            "leave --microbatches, --remat, --offload and --optimizer out, or plan only",
        )
    name: ProgramName = "maxtext-2023" if training.program.name == "maxtext-2023" else "podway"
    return Rehearsal(
        model=model,
        slice=slice.accelerator_type,
        topology=slice.topology_text,
        slices=mesh.slices,
        settings=training_settings(mesh, training),
        program=name,
        fast=fast,
    )
