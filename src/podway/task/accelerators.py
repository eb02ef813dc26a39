"""From what a person calls a TPU to the `Accelerator` of a Task."""

import re

import msgspec

from podway.catalog.names import looks_like_tpu
from podway.catalog.slices import find_slice, is_tpu_name
from podway.errors import UserError
from podway.task.fields import RUN_ON_TPU, Field, GpuFile, NotHere
from podway.task.task import Accelerator

# Machine families of Google Cloud (Compute Engine docs, "Machine families"): those with CPUs only, and those with GPUs.
_CPU_MACHINE = re.compile(
    r"(c[234][ad]?|c4n|e2|f1|g1|h[34]d?|m[1234]|n[124][ad]?|t2[ad]|x4|z3)-[a-z0-9-]+|custom-[0-9-]+"
)
_GPU_MACHINE = re.compile(r"(a[234]x?|g[24])-[a-z0-9-]+")


class SliceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says about a slice beside its name."""

    topology: str | None = None
    runtime_version: str | None = None
    tpu_vm: bool = True
    tpu_name: str | None = None
    queued: bool | None = None
    reservation: str | None = None
    best_effort: bool = False


def accelerator(field: Field, name: str, options: SliceOptions = SliceOptions()) -> Accelerator:
    """The slice of that name; an error at `field` when there is none."""
    try:
        found = find_slice(name, options.topology)
    except UserError as error:
        what = error.what.rstrip(".")
        if is_tpu_name(name):
            raise field.error(what, error.hint) from None
        if looks_like_tpu(name):
            raise NotHere(field, what, error.hint) from None
        raise GpuFile(field, what) from None
    if not options.tpu_vm and found.generation not in ("v2", "v3"):
        # Cloud TPU docs, "TPU architecture": the TPU Node architecture exists on v2 and v3 only.
        raise field.error(
            f"{found.accelerator_type} is not offered as a TPU Node (tpu_vm: false)",
            "remove `tpu_vm`, or use v2-8 or v3-8",
        )
    by_shape = options.topology is not None or "x" in name.rpartition("-")[2]
    return Accelerator(
        type=found.accelerator_type,
        topology=found.topology_text if by_shape else None,
        runtime_version=options.runtime_version,
        tpu_vm=options.tpu_vm,
        tpu_name=options.tpu_name,
        queued=options.queued,
        reservation=options.reservation,
        best_effort=options.best_effort,
    )


def check_cpu_machine(field: Field, kind: str) -> None:
    """Refuse the machines of other clouds and those with GPUs: a task without a TPU runs on CPU hosts of Google Cloud."""
    if _CPU_MACHINE.fullmatch(kind):
        return
    if _GPU_MACHINE.fullmatch(kind):
        raise GpuFile(field, f"{kind} is a machine with GPUs, and Podway runs TPUs only")
    raise NotHere(field, f"{kind} is not a CPU machine of Google Cloud", RUN_ON_TPU)
