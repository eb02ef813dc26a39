"""A SkyPilot task file, read into a `Task`.

1. Variables the file declares and the flags give are put into workdir, file_mounts, volumes and service.
2. The whole is checked against the table of keys (`skypilot_keys.TASK`): unknown keys, types, notes.
3. Variables without a value are complained about, and each section is read by its own function.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from podway.task import yamlfile
from podway.task.environment import Declared, Overrides, SealedAt, Supplied, settle, substitute, supplied
from podway.task.fields import Field, FlagField, shorten
from podway.task.images import skypilot_registry
from podway.task.mounts import read_file_mounts, read_volumes, read_workdir
from podway.task.paths import LocalMachine
from podway.task.problems import Problems
from podway.task.shapes import check
from podway.task.skypilot_keys import TASK
from podway.task.skypilot_resources import first, read_autostop, read_disks, read_recovery, read_resources
from podway.task.skypilot_service import read_service
from podway.task.task import FileMount, Git, LocalDir, Resources, Task, Volume
from podway.task.values import sky_name

_SUBSTITUTED = ("workdir", "file_mounts", "volumes", "service")
# Where secrets stay by name: the server fills them in when it probes, and a host's shell when it fetches.
_SEALED_AT: dict[str, SealedAt] = {
    "service": lambda above, text: above[:2] in (("readiness_probe", "headers"), ("readiness_probe", "post_data")),
    "file_mounts": lambda above, text: text.strip().lower().startswith(("http://", "https://")),
}


def read_skypilot(root: Field, overrides: Overrides, bases: tuple[Path, ...]) -> Task:
    """The task; relative paths start from the first of `bases` under which they exist."""
    if overrides.run_args:
        flag = FlagField(shorten(" ".join(overrides.run_args)), "")
        raise flag.error(
            "a SkyPilot file takes no arguments", "give values with --env NAME=VALUE, and use $NAME in `run`"
        )
    given = supplied(overrides)
    notes: list[str] = []
    declared = _declared(root)
    root = _with_variables(root, declared, given)
    problems = Problems()
    check(root, TASK, notes, problems)
    read = problems.read
    local = LocalMachine(bases, overrides.local_env)
    env, secrets = read(lambda: settle(declared, given, {}), ({}, {}))
    resources, in_order = read(lambda: _resources(root, overrides, notes), ((), False))
    mounts, volumes = read(lambda: _mounts(root, local, notes), ([], []))
    registry, resources = read(lambda: skypilot_registry(root, env, secrets, resources), (None, resources))
    whole = root.get("resources")
    service, priority = root.get("service"), first(whole, "priority")
    task = Task(
        name=read(lambda: _name(root, overrides), None),
        kind="service" if service else "task",
        dialect="skypilot",
        resources=resources,
        ordered=in_order,
        slices=read(lambda: _slices(root, overrides, resources), 1),
        setup=_script(root, "setup"),
        run=overrides.run if overrides.run is not None else _script(root, "run"),
        env=env,
        secrets=secrets,
        workdir=read(lambda: _workdir(root, overrides, local), None),
        file_mounts=tuple(mounts),
        volumes=tuple(volumes),
        registry=registry,
        autostop=read(lambda: read_autostop(first(whole, "autostop")), None),
        recovery=read(lambda: read_recovery(first(whole, "job_recovery", "spot_recovery")), None),
        priority=overrides.priority if overrides.priority is not None else priority.integer() if priority else 0,
        service=read(lambda: read_service(service, resources, local, secrets, notes), None) if service else None,
        notes=tuple(notes),
    )
    problems.raise_any()
    return task


def _resources(root: Field, overrides: Overrides, notes: list[str]) -> tuple[tuple[Resources, ...], bool]:
    resources, in_order = read_resources(root.get("resources"), overrides, notes)
    return _with_config(root.get("config"), resources, notes), in_order


def _mounts(root: Field, local: LocalMachine, notes: list[str]) -> tuple[list[FileMount], list[Volume]]:
    section, named = root.get("file_mounts"), root.get("volumes")
    mounts, volumes = read_file_mounts(section, local, notes) if section else ([], [])
    volumes += read_volumes(named) if named else []
    return mounts, [*volumes, *read_disks(first(root.get("resources"), "volumes"))]


def _declared(root: Field) -> dict[str, Declared]:
    """What `envs` and `secrets` name. Shapes are checked later, so what is malformed is passed over here."""
    found: dict[str, Declared] = {}
    envs, secrets = root.get("envs"), root.get("secrets")
    for name, field in envs.entries().items() if envs and envs.is_mapping else ():
        found[name] = Declared(field, _value(field))
    named: list[tuple[str, Field, str | None]] = []
    if secrets and secrets.is_mapping:
        named = [(name, field, _value(field)) for name, field in secrets.entries().items()]
    elif secrets and secrets.is_list:
        texts = [(field, _value(field)) for field in secrets.items()]
        named = [(text.removeprefix("secrets:"), field, None) for field, text in texts if text is not None]
    for name, field, value in named:
        if name in found:
            raise field.error(f"{name} is declared twice", "keep it in envs, or in secrets to hide it")
        found[name] = Declared(field, value, secret=True)
    return found


def _value(field: Field) -> str | None:
    return field.node.text if isinstance(field.node, yamlfile.Scalar) and not field.is_null else None


def _with_variables(root: Field, declared: Mapping[str, Declared], given: Supplied) -> Field:
    """The root with variables in the sections that may hold them; names without a value stay as they are."""
    assert isinstance(root.node, yamlfile.Mapping)
    hidden = {name for name, one in declared.items() if one.secret} | set(given.secrets)
    env = {name: one.value for name, one in declared.items() if one.value is not None and name not in hidden}
    env |= {name: value for name, value in given.env.items() if name not in hidden}
    entries = dict(root.node.entries)
    for key in _SUBSTITUTED:
        section = root.get(key)
        if section is not None:
            node = substitute(section, env, hidden, _SEALED_AT.get(key, lambda above, text: False)).node
            entries[key] = yamlfile.KeyValue(entries[key].key, node)
    return Field(root.file, msgspec.structs.replace(root.node, entries=entries), root.path)


def _name(root: Field, overrides: Overrides) -> str | None:
    if overrides.name is not None:
        return sky_name(FlagField("--name", overrides.name))
    field = root.get("name")
    return sky_name(field) if field else None


def _slices(root: Field, overrides: Overrides, resources: tuple[Resources, ...]) -> int:
    field = root.get("num_nodes")
    if overrides.num_nodes is not None:
        field = FlagField("--num-nodes", str(overrides.num_nodes))
    count = field.integer() if field else 1
    if field and not 1 <= count <= 10_000:
        raise field.error(f"{count} is out of range", "must be at least 1 and at most 10,000")
    node = next((one for one in resources if one.accelerator and not one.accelerator.tpu_vm), None)
    if field and node and count > 1:
        raise field.error("a TPU Node has one host, and so one node", "set num_nodes to 1, or use a TPU VM")
    return count


def _script(root: Field, key: str) -> str:
    field = root.get(key)
    return field.text() if field else ""


def _workdir(root: Field, overrides: Overrides, local: LocalMachine) -> LocalDir | Git | None:
    if overrides.workdir is not None:
        flag = FlagField("--workdir", overrides.workdir)
        return LocalDir(path=local.existing(flag, overrides.workdir, directory=True))
    field = root.get("workdir")
    return read_workdir(field, local) if field else None


def _with_config(config: Field | None, resources: tuple[Resources, ...], notes: list[str]) -> tuple[Resources, ...]:
    """`config`: the network and labels of gcp are used, hooks are refused, the rest is noted key by key."""
    for key, section in config.entries().items() if config else ():
        if key == "hooks" and not section.is_null:
            raise section.error("Podway runs no lifecycle hooks", "trap SIGTERM in `run`, or save as you go")
        if key != "gcp" or not section.is_mapping:
            notes.append(f"{section.path}: it sets up SkyPilot itself")
            continue
        for name, value in section.entries().items():
            if name == "vpc_name" and not value.is_null:
                resources = tuple(msgspec.structs.replace(one, network=value.words()) for one in resources)
            elif name == "labels" and value.is_mapping:
                labels = {label: text.text() for label, text in value.entries().items()}
                resources = tuple(msgspec.structs.replace(one, labels=labels | one.labels) for one in resources)
            else:
                notes.append(f"{value.path}: it sets up SkyPilot itself")
    return resources
