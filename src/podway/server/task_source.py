"""What a Python program may launch: the path of a task file, its content as a dict, or a `Task`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypedDict

import msgspec

from podway.errors import UserError
from podway.task.task import Task

TaskSource = Task | Mapping[str, object] | str | os.PathLike[str]


class TaskKeywords(TypedDict, total=False):
    """What may be changed of a task while it is read, as the options of `podway launch` and `podway exec` do."""

    name: str | None  # of the job
    tpus: str | None  # slice type, such as v6e-16
    num_nodes: int | None  # slices
    use_spot: bool | None
    infra: str | None  # cloud[/region[/zone]], or local
    workdir: str | os.PathLike[str] | None
    env: Mapping[str, str]
    secrets: Mapping[str, str]  # masked in logs, encrypted at rest


def read_source(
    task: TaskSource,
    *,
    name: str | None = None,
    tpus: str | None = None,
    num_nodes: int | None = None,
    use_spot: bool | None = None,
    infra: str | None = None,
    workdir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] = {},
    secrets: Mapping[str, str] = {},
) -> Task:
    """The task; the keywords go over what the file or the dict says."""
    changes = [name, tpus, num_nodes, use_spot, infra, workdir, env or None, secrets or None]
    if isinstance(task, Task):
        if any(change is not None for change in changes):
            raise UserError("a Task is launched as it is", "set these fields of the Task, or pass a file or a dict")
        return task
    # The readers and YAML are slow to import, and most commands read no task.
    from podway.task.environment import Overrides
    from podway.task.read import read_task, read_task_text

    overrides = Overrides(
        name=name,
        tpus=tpus,
        num_nodes=num_nodes,
        use_spot=use_spot,
        infra=infra,
        workdir=None if workdir is None else os.fspath(workdir),
        env=tuple(f"{key}={value}" for key, value in env.items()),
        secrets=tuple(f"{key}={value}" for key, value in secrets.items()),
        local_env=dict(os.environ),
    )
    if isinstance(task, Mapping):
        try:
            text = msgspec.json.encode(dict(task))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the task holds what a task file cannot: {error}", "use text, numbers, lists and dicts"
            ) from None
        return read_task_text(text, name="<dict>", overrides=overrides)
    return read_task(os.fspath(task), overrides=overrides)
