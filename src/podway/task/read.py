"""The way in: a task file, a text, or a command line, to a `Task`.

Which dialect a file is written in follows from the file: a top-level `type:` means dstack, anything else SkyPilot (a dstack
file that lacks its `type` is told so, instead of which keys SkyPilot does not know). Both end in the same `Task`, and what
the flags say (`Overrides`) is applied on the way.
"""

from pathlib import Path
from typing import Literal

import msgspec

from podway.errors import UserError
from podway.task.dstack import read_dstack
from podway.task.dstack_keys import TELLING_KEYS
from podway.task.environment import Overrides
from podway.task.fields import Field, FlagField
from podway.task.images import with_image_flags
from podway.task.job_groups import GroupSpec, group_of
from podway.task.paths import absolute, read_file
from podway.task.pipelines import share_cluster
from podway.task.places import from_infra
from podway.task.pools import PoolSpec, read_fleet, read_sky_pool, sky_worker, without_key
from podway.task.skypilot import read_skypilot
from podway.task.skypilot_keys import TASK as SKYPILOT_TASK
from podway.task.skypilot_keys import VOLUME_TYPES
from podway.task.ssh_fleets import SshFleet, read_ssh_fleet
from podway.task.task import Task
from podway.task.volumes import CLAIM, VolumeSpec, read_volume_text
from podway.task.yamlfile import KeyValue, Mapping, Node, Scalar, parse

Dialect = Literal["skypilot", "dstack"]

# Keys of the document before the tasks of a SkyPilot pipeline or job group.
_HEADER = frozenset(("name", "execution", "primary_tasks", "termination_delay"))
_IN_BOTH = frozenset(("name", "resources", "volumes", "setup"))  # keys of SkyPilot's tasks that dstack's have too


def read_task(path: Path | str, *, overrides: Overrides = Overrides(), dialect: Dialect | None = None) -> Task:
    """The task of a file."""
    data, base = _file(path, overrides)
    return read_task_text(data, name=str(path), base=base, overrides=overrides, dialect=dialect)


def read_tasks(path: Path | str, *, overrides: Overrides = Overrides()) -> tuple[Task, ...]:
    """The task of a file, or those of a pipeline in their order."""
    data, base = _file(path, overrides)
    return read_tasks_text(data, name=str(path), base=base, overrides=overrides)


def _file(path: Path | str, overrides: Overrides) -> tuple[bytes, Path]:
    """What is in a task file, and the directory it is in."""
    file = absolute(str(path), overrides.here, overrides.local_env)
    return read_file(file, "a task file", str(path)), Path(file).parent


def read_volume(path: str, text: bytes | None, overrides: Overrides = Overrides()) -> VolumeSpec | None:
    """The volume that a file (or, where given, a text) describes; None where it is something else. --name and --infra replace its own."""
    data, name = (_file(path, overrides)[0], path) if text is None else (text, "<stdin>")
    placement = from_infra(FlagField("--infra", overrides.infra)) if overrides.infra else None
    return read_volume_text(data, name=name, called=overrides.name, placement=placement)


def read_pool(path: str, text: bytes | None, overrides: Overrides = Overrides()) -> PoolSpec | SshFleet | None:
    """The pool of workers, or the machines, that a file (or, where given, a text) describes; None where it is something else."""
    data, base = _file(path, overrides) if text is None else (text, overrides.here)
    name = path if text is None else "<stdin>"
    documents = parse(data, name)
    if len(documents) != 1 or not isinstance(documents[0], Mapping):
        return None
    root = Field(name, documents[0])
    kind, section = root.get("type"), root.get("pool")
    if kind is not None:
        is_fleet = not (kind.is_mapping or kind.is_list) and kind.text() == "fleet"
        return (read_ssh_fleet(root, overrides) or read_fleet(root, overrides)) if is_fleet else None
    if section is None:
        return None
    size = read_sky_pool(section)
    task = sky_worker(_read(without_key(root, "pool"), base, overrides, "skypilot"), section)
    return PoolSpec(name=overrides.name or task.name, task=task, size=size)


def read_group_file(path: str, overrides: Overrides = Overrides()) -> GroupSpec | None:
    """The job group of a file: several tasks behind a header that says `execution: parallel`; None where it is something else."""
    data, base = _file(path, overrides)
    return read_group_text(data, name=path, base=base, overrides=overrides)


def read_group_text(
    text: str | bytes, *, name: str = "<stdin>", base: Path | None = None, overrides: Overrides = Overrides()
) -> GroupSpec | None:
    """The same, of a text."""
    parts = parse(text, name)
    if len(parts) < 2 or not isinstance(parts[0], Mapping) or not set(parts[0].entries) <= _HEADER:
        return None
    header = Field(name, parts[0])
    execution = header.get("execution")
    if execution is None or execution.plain() != "parallel":
        return None
    documents = [Field(name, one) for one in parts[1:]]
    own = msgspec.structs.replace(overrides, name=None)  # --name is the group's
    tasks = [_read(one, base, own, "skypilot") for one in documents if isinstance(one.node, Mapping)]
    if len(tasks) < len(documents):
        raise header.error("every task of a job group is a mapping", "write `key: value` lines")
    return group_of(header, tasks, documents, overrides.name)


def read_task_text(
    text: str | bytes,
    *,
    name: str = "<stdin>",
    base: Path | None = None,
    overrides: Overrides = Overrides(),
    dialect: Dialect | None = None,
) -> Task:
    """The task of a text. dstack's relative paths start from `base`; SkyPilot's from where the command is typed, or,
    when there is nothing there, from `base`.
    """
    documents = _documents(parse(text, name), name)
    if len(documents) > 1:
        lines = ", ".join(str(one.line) for one in documents)
        raise UserError(
            f"{name}:{documents[1].line}:{documents[1].column}: this is a SkyPilot pipeline: the file holds {len(documents)}"
            f" tasks (at lines {lines})",
            "run them one after the other with: podway launch FILE",
        )
    return _read(Field(name, documents[0]), base, overrides, dialect)


def read_tasks_text(
    text: str | bytes, *, name: str = "<stdin>", base: Path | None = None, overrides: Overrides = Overrides()
) -> tuple[Task, ...]:
    """The tasks of a text, as `read_task_text` reads each; those of a pipeline share one cluster."""
    documents = _documents(parse(text, name), name)
    if len(documents) == 1:
        return (_read(Field(name, documents[0]), base, overrides, None),)
    own = msgspec.structs.replace(overrides, name=None)  # --name is the pipeline's
    tasks = tuple(_read(Field(name, one), base, own, None) for one in documents)
    return share_cluster(tasks, tuple(f"{name}:{one.line}:{one.column}" for one in documents))


def _read(root: Field, base: Path | None, overrides: Overrides, dialect: Dialect | None) -> Task:
    cwd = overrides.here
    _refuse_volume(root)
    if (dialect or _dialect(root)) == "dstack":
        if root.get("type") is None:
            raise root.error("this is a dstack file, and its `type` is missing", f"add `type: {_likely_type(root)}`")
        return with_image_flags(read_dstack(root, overrides, base or cwd, cwd), overrides)
    return with_image_flags(read_skypilot(root, overrides, (cwd, base) if base else (cwd,)), overrides)


def _dialect(root: Field) -> Dialect:
    """By `type`; without it, by keys that only one of the two has."""
    if root.get("type") is not None:
        return "dstack"
    keys = set(root.entries())
    return "dstack" if keys & set(TELLING_KEYS) and not keys & set(SKYPILOT_TASK.keys) - _IN_BOTH else "skypilot"


def _likely_type(root: Field) -> str:
    return next((kind for key, kind in TELLING_KEYS.items() if root.get(key)), "task")


def _refuse_volume(root: Field) -> None:
    kind = root.get("type")
    if kind is not None and not (kind.is_mapping or kind.is_list) and kind.text() in VOLUME_TYPES:
        make = "create it with: podway apply -f FILE" if kind.text() == CLAIM else "Podway makes no such volumes"
        raise kind.error(f"a {kind.text()} volume of SkyPilot is not a task", make)


def task_from_command(command: str, overrides: Overrides = Overrides()) -> Task:
    """A task that runs one bash command."""
    if not command.strip():
        raise UserError("the command is empty", "give a task file or a bash command")
    value = Scalar(line=1, column=1, text=command)
    entries = {"run": KeyValue(Scalar(line=1, column=1, text="run"), value)}
    cwd = overrides.here
    root = Field("<command>", Mapping(line=1, column=1, entries=entries))
    return with_image_flags(read_skypilot(root, overrides, (cwd,)), overrides)


def _documents(documents: list[Node], name: str) -> list[Mapping]:
    """The tasks of a file; a first document with nothing but a name gives it to the one task that follows (SkyPilot's pipelines
    and job groups begin so), or numbers those that have none.
    """
    if not documents:
        raise UserError(f"{name}:1:1: the file is empty", "write at least `run: echo hello`")
    for document in documents:
        if not isinstance(document, Mapping):
            found = Field(name, document).found
            raise UserError(
                f"{name}:{document.line}:{document.column}: a task file is a mapping, not {found}",
                "write `key: value` lines, such as `run: echo hello`",
            )
    maps = [document for document in documents if isinstance(document, Mapping)]
    has_header = len(maps) > 1 and bool(maps[0].entries) and set(maps[0].entries) <= _HEADER
    tasks = maps[1:] if has_header else maps
    if len(tasks) > 1:
        _check_pipeline(name, Field(name, maps[0]).get("execution") if has_header else None, tasks)
    given = maps[0].entries.get("name") if has_header else None
    return [_named(task, given, number, len(tasks)) for number, task in enumerate(tasks, start=1)]


def _named(task: Mapping, given: KeyValue | None, number: int, count: int) -> Mapping:
    """A task with the name of its pipeline, where it has none of its own."""
    if given is None or "name" in task.entries or not isinstance(given.value, Scalar):
        return task
    value = given.value if count == 1 else msgspec.structs.replace(given.value, text=f"{given.value.text}-{number}")
    return msgspec.structs.replace(task, entries={"name": KeyValue(given.key, value), **task.entries})


def _check_pipeline(name: str, execution: Field | None, tasks: list[Mapping]) -> None:
    """Several documents are tasks that run one after the other; other files of several parts are refused with what they are."""
    at = f"{name}:{tasks[1].line}:{tasks[1].column}"
    lines = ", ".join(str(task.line) for task in tasks)
    if any("type" in task.entries for task in tasks):
        raise UserError(
            f"{at}: the file holds {len(tasks)} dstack configurations (at lines {lines})",
            "a file is one run: split it, and apply each part",
        )
    if execution is not None and execution.plain() == "parallel":
        raise UserError(
            f"{at}: this is a SkyPilot job group: the file holds {len(tasks)} tasks (at lines {lines}) that run together",
            "launch it: podway launch FILE",
        )
