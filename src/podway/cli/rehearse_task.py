"""`podway rehearse TASK.yaml`: from what a task file would run to the rehearsal of it.

The task is read as `launch` reads it, but for variables that it leaves to the person (a token): a rehearsal needs no secret, so
they stay as they are written.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from podway.catalog.slices import Slice
from podway.errors import UserError
from podway.model.layout import MeshShape
from podway.plan.picking import one_slice
from podway.plan.task_needs import Command, command_of, folder_of, settings_of, training_of
from podway.plan.training import Training
from podway.rehearse.rehearsal import Rehearsal
from podway.serve.options import parser
from podway.task.environment import Overrides
from podway.task.read import read_task
from podway.task.task import Task
from podway.task.yamlfile import Mapping, Scalar, parse

# Settings of the trainer that change what is compiled; the others name files, steps and logs.
_COMPILED = {"batch", "optimizer", "precision", "loss", "mesh", "remat", "lora", "schedule", "compile"}
_ENGINE = ("max_len", "max_seqs", "page", "prompt_tokens", "decode_steps", "dtype", "quantize", "kv")


def _is_compiled(key: str) -> bool:
    return key.partition(".")[0] in _COMPILED or key.startswith("model.attention_")


class Trained(NamedTuple):
    """A training step of a task."""

    rehearsal: Rehearsal
    mesh: MeshShape
    training: Training


class Served(NamedTuple):
    """An engine of a task."""

    model: str
    tensor: int
    options: dict[str, Any]


def what_runs(file: str, env: tuple[str, ...], tpu: str | None, *, fast: bool) -> tuple[Slice, Trained | Served]:
    """The slice of a task, and the step or the engine that it would run there."""
    task = read_task(file, overrides=Overrides(env=(*env, *_unset(file, env)), local_env=os.environ))
    found = command_of(task)
    if found is None:
        raise UserError(
            f"{file} runs no `podway train` or `podway serve`", "rehearse a model instead: podway rehearse train MODEL"
        )
    slice = one_slice(tpu or _named(task, file))
    if found.verb == "serve":
        return slice, _engine(found)
    settings = settings_of(found, folder_of(task))
    model = settings.pop("model.name", "tiny-llama3")
    mesh, training = training_of(settings, slice.devices * task.slices, task.slices)
    kept = [f"{k}={v}" for k, v in settings.items() if _is_compiled(k) and "$" not in v]
    rehearsal = Rehearsal(
        model=model,
        slice=slice.accelerator_type,
        topology=slice.topology_text,
        slices=task.slices,
        settings=tuple(kept),
        fast=fast,
    )
    return slice, Trained(rehearsal, mesh, training)


def _named(task: Task, file: str) -> str:
    for one in task.resources:
        if one.accelerator is not None:
            shape = one.accelerator.topology
            return f"{one.accelerator.type.partition('-')[0]}-{shape}" if shape else one.accelerator.type
    raise UserError(f"{file} asks for no TPU", "say which with --tpu")


def _engine(found: Command) -> Served:
    try:
        report = parser().parse_args(list(found.words))
    except (UserError, SystemExit):
        raise UserError(
            f"the task's command cannot be read: {found}", "run it with --help to see its options"
        ) from None
    kept = {name: value for name in _ENGINE if (value := getattr(report, name)) is not None}
    return Served(report.model, report.tp, kept)


def _unset(file: str, env: tuple[str, ...]) -> list[str]:
    """`NAME=$NAME` for each variable that the file declares without a value and nobody gives."""
    try:
        documents = parse(Path(file).expanduser().read_bytes(), file)
    except OSError:
        return []  # read_task says what is wrong with the file
    given = {word.partition("=")[0] for word in env}
    found = []
    for document in documents:
        for key in ("envs", "secrets"):
            entry = document.entries.get(key) if isinstance(document, Mapping) else None
            names = entry.value.entries.items() if entry and isinstance(entry.value, Mapping) else ()
            for name, one in names:
                if name not in given and isinstance(one.value, Scalar) and one.value.kind == "null":
                    found.append(f"{name}=${name}")
    return found
