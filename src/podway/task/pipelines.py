"""A file of several tasks: SkyPilot's pipeline, whose tasks run one after the other.

They share one cluster: it is there when the next task begins, and nothing is billed twice. It is made for the task that asks for a
slice (for the most nodes, where none does), and every task gets its resources: one that asks for other chips is refused; one that
asks for none, or for fewer machines, runs on the first hosts of the cluster.
"""

import msgspec

from podway.catalog.slices import find_slice
from podway.errors import UserError
from podway.task.task import Resources, Task


def share_cluster(tasks: tuple[Task, ...], places: tuple[str, ...]) -> tuple[Task, ...]:
    """The tasks with the resources of the cluster that they share; `places` says where in the file each of them is."""
    for task, place in zip(tasks, places, strict=True):
        if task.kind != "task":
            raise UserError(
                f"{place}: a {task.kind} cannot be part of a pipeline",
                "give it a file of its own: podway apply -f FILE",
            )
    lead = max(tasks, key=lambda task: (_types(task) != {None}, task.slices))
    resources = _common(tasks, places, lead)
    counts = [_hosts(one, lead.slices) for one in resources]
    hosts, most = min(counts), max(counts)
    autostop = next((task.autostop for task in tasks if task.autostop), None)
    shared = []
    for task, place in zip(tasks, places, strict=True):
        own = task.resources[0]
        notes, on_cpus = task.notes, _types(task) == {None}
        if on_cpus and task.slices > hosts:
            raise UserError(
                f"{place}: the task asks for {task.slices} nodes, and the cluster of its pipeline has {hosts}",
                "--num-nodes gives all tasks of the file the same number; or give the task a file of its own",
            )
        if not on_cpus and task.slices != lead.slices:
            raise UserError(
                f"{place}: the tasks of a pipeline share one cluster, and ask for {task.slices} and {lead.slices} slices",
                "--num-nodes gives all of them the same number; or give the task a file of its own",
            )
        if on_cpus and resources[0].accelerator is not None:
            notes = (*notes, f"it names no slice, and runs on the cluster of its pipeline ({_named(resources)})")
        shared.append(
            msgspec.structs.replace(
                task,
                resources=tuple(msgspec.structs.replace(one, image=own.image) for one in resources),
                ordered=lead.ordered,
                slices=lead.slices,
                first_hosts=task.slices if on_cpus and task.slices < most else None,
                autostop=autostop,
                notes=notes,
            )
        )
    return tuple(shared)


def _types(task: Task) -> set[str | None]:
    """The slices a task may run on; None for CPU hosts."""
    return {one.accelerator.type if one.accelerator else None for one in task.resources}


def _common(tasks: tuple[Task, ...], places: tuple[str, ...], lead: Task) -> tuple[Resources, ...]:
    """The resources of the lead that do for every task."""
    found = list(lead.resources)
    for task, place in zip(tasks, places, strict=True):
        types = _types(task)
        if types == {None}:
            continue
        found = [one for one in found if one.accelerator and one.accelerator.type in types]
        if not found:
            raise UserError(
                f"{place}: the tasks of a pipeline share one cluster, and this one asks for {_named(task.resources)}"
                f" where another asks for {_named(lead.resources)}",
                "--tpus v6e-8 gives all of them the same slice; or give the task a file of its own",
            )
    return tuple(found)


def _named(resources: tuple[Resources, ...]) -> str:
    return " or ".join(dict.fromkeys(one.accelerator.type if one.accelerator else "CPUs" for one in resources))


def _hosts(one: Resources, slices: int) -> int:
    return slices * (find_slice(one.accelerator.type, one.accelerator.topology).hosts if one.accelerator else 1)
