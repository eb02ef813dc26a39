"""Job groups: tasks of one file that run together, each on a cluster of its own (SkyPilot's `execution: parallel`).

The first document of the file names the group, which of its tasks are primary (all, unless it says so), and how long the others go on
after them. Each task names the others' hosts by `TASK-NUMBER.GROUP`; `with_addresses` puts their addresses in its place, once they
are known.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

from podway.task.fields import Field
from podway.task.task import Task, TaskPart
from podway.task.values import duration

GROUP_NAME = "SKYPILOT_JOBGROUP_NAME"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,30}")


class GroupTask(TaskPart, frozen=True):
    """One task of a group."""

    task: Task
    primary: bool = True
    delay_s: float = 0.0  # of one that is not primary: it ends so long after the last primary one


class GroupSpec(TaskPart, frozen=True):
    """A job group."""

    name: str
    tasks: tuple[GroupTask, ...]


def group_of(header: Field, tasks: Sequence[Task], places: Sequence[Field], name: str | None) -> GroupSpec:
    """The group of a file, from its header and its tasks; `name` takes the place of its own."""
    own = header.get("name")
    called = name or (own.words() if own else None)
    if called is None or not _NAME.fullmatch(called):
        raise header.error(
            "a job group has a name" if called is None else f"`{called}` cannot be the name of a job group",
            "add `name:` to the first part of the file: letters, digits and '-', at most 31",
        )
    names: list[str] = []
    for task, place in zip(tasks, places, strict=True):
        if task.name is None or not _NAME.fullmatch(task.name) or task.name in names:
            raise place.error(
                "every task of a job group has a name of its own",
                "add `name:` with letters, digits and '-', at most 31",
            )
        if task.kind != "task":
            raise place.error(f"a {task.kind} cannot be part of a job group", "give it a file of its own")
        names.append(task.name)
    listed = header.get("primary_tasks")
    primary = {one.words(): one for one in listed.items()} if listed else {}
    for word, field in primary.items():
        if word not in names:
            raise field.error(f"the file has no task `{word}`", f"its tasks: {', '.join(names)}")
    delays = _delays(header.get("termination_delay"), names)
    made = [
        GroupTask(task=task, primary=not primary or task.name in primary, delay_s=delays.get(task.name or "", 0.0))
        for task in tasks
    ]
    return GroupSpec(name=called, tasks=tuple(made))


def _delays(field: Field | None, names: Sequence[str]) -> dict[str, float]:
    if field is None:
        return {}
    if not field.is_mapping:
        return dict.fromkeys(names, float(duration(field)))
    given = {key: float(duration(one)) for key, one in field.entries().items()}
    for key in given:
        if key not in ("default", *names):
            raise field.error(f"the file has no task `{key}`", f"its tasks: {', '.join(names)}; or `default`")
    return {name: given.get(name, given.get("default", 0.0)) for name in names}


def with_addresses(task: Task, group: str, addresses: Mapping[str, Sequence[str]]) -> Task:
    """The task with the addresses of all hosts of its group: in its scripts and variables, and in the environment."""
    ends = rf"(?:{re.escape(group)}|\${{{GROUP_NAME}}}|\${GROUP_NAME})(?![\w-])"
    known = {f"{name}-{at}": where for name, hosts in addresses.items() for at, where in enumerate(hosts)}
    names = "|".join(sorted(map(re.escape, known), key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w.-])({names})\.{ends}")

    def filled(text: str) -> str:
        return pattern.sub(lambda match: known[match[1]], text)

    env = {key: filled(value) for key, value in task.env.items()}
    env[GROUP_NAME] = group
    env["PODWAY_GROUP_HOSTS"] = "\n".join(f"{name}.{group} {where}" for name, where in known.items())
    return msgspec.structs.replace(task, env=env, run=filled(task.run), setup=filled(task.setup))
