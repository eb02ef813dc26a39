"""What would make a step fit that does not: changes of one thing each, tried with the planner in milliseconds (pure).

The compiler's figure is the truth for the step that was asked for; the planner's for the others is within 10% of it, so each
is scaled by how far the planner was off there, and offered only if it then fits.
"""

from collections.abc import Iterator

import msgspec

from podway.catalog.slices import Slice, slices_of
from podway.errors import UserError
from podway.model.layout import MeshShape
from podway.model.shape import ModelShape
from podway.plan.memory import GIB
from podway.plan.plans import evaluate
from podway.plan.training import Training
from podway.rehearse.memory import Hbm


def what_would_fit(shape: ModelShape, slice: Slice, mesh: MeshShape, training: Training, found: Hbm) -> list[str]:
    """Lines such as `batch.microbatches=4: about 13.2 of 15.75 GiB`, the least change first."""
    try:
        planned = evaluate(shape, slice, mesh, training).memory.total
    except UserError:
        return []
    off = found.total / planned
    lines = []
    for words, where, sizes, changed in _changes(slice, mesh, training):
        try:
            memory = evaluate(shape, where, sizes, changed).memory
        except UserError:
            continue
        needs = memory.total * off
        if needs <= memory.limit:
            lines.append(f"{words}: about {needs / GIB:.1f} of {memory.limit / GIB:.2f} GiB")
    return lines[:5]


def _changes(slice: Slice, mesh: MeshShape, training: Training) -> Iterator[tuple[str, Slice, MeshShape, Training]]:
    """(in words, slice, mesh, step), from the smallest change to the largest."""
    replace = msgspec.structs.replace
    groups = mesh.slices * mesh.data * mesh.fsdp * mesh.expert
    rows = training.batch // groups
    for parts in (p for p in range(training.microbatches + 1, rows + 1) if rows % p == 0):
        yield f"--microbatches {parts}", slice, mesh, replace(training, microbatches=parts)
    if training.remat != "full":
        yield "--remat full", slice, mesh, replace(training, remat="full")
        for parts in (p for p in range(training.microbatches + 1, rows + 1) if rows % p == 0):
            both = replace(training, remat="full", microbatches=parts)
            yield f"--remat full --microbatches {parts}", slice, mesh, both
    if training.optimizer == "adamw" and training.moments == "float32" and training.adapters is None:
        yield "--opt-dtype bf16", slice, mesh, replace(training, moments="bfloat16")
        yield "--optimizer adafactor", slice, mesh, replace(training, optimizer="adafactor")
    for fewer in sorted({rows // part for part in (2, 4, 8, 16) if rows >= part and rows % part == 0}, reverse=True):
        smaller = replace(training, batch=fewer * groups, microbatches=1)
        yield f"--batch {fewer * groups}", slice, mesh, smaller
    larger = [one for one in slices_of(slice.generation) if one.chips > slice.chips]
    for bigger in sorted({one.chips: one for one in reversed(larger)}.values(), key=lambda one: one.chips):
        times = bigger.devices // mesh.chips * mesh.slices
        if times and bigger.devices * mesh.slices == mesh.chips * times:
            wider = replace(mesh, fsdp=mesh.fsdp * times, tile=None)
            if training.batch % (groups * times) == 0:
                yield f"--tpu {bigger.accelerator_type}", bigger, wider, training
            else:
                more = replace(training, batch=rows * groups * times)
                yield f"--tpu {bigger.accelerator_type} --batch {more.batch}", bigger, wider, more
