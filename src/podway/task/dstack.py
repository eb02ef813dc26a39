"""A dstack configuration (task, service or dev-environment), read into a `Task`.

1. `type` picks the table of keys the file is checked against; types that are no runs are refused with what to use.
2. Groups are folded into the run (`dstack_groups.py`): one gang, whose nodes run the script of their group.
3. Variables are settled: a bare `- NAME` comes from a flag or from the local environment, `${{ secrets.X }}` from
   `--secret`, and makes its variable a secret.
4. Each part is read by its own function; commands become one script.
"""

import re
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from podway.task.commands import join_commands, join_words
from podway.task.cron import read_schedule
from podway.task.dstack_files import read_dstack_volumes, read_files, read_repos
from podway.task.dstack_groups import NodeGroup, by_slice, differing_slices, listed_groups, node_address, read_groups
from podway.task.dstack_keys import OTHER_TYPES, PYTHONS, TABLES
from podway.task.dstack_replicas import GroupScript, read_replica_groups
from podway.task.dstack_resources import read_idle, read_resources, read_retry, read_stop_duration
from podway.task.dstack_service import read_model, read_service
from podway.task.environment import Declared, Overrides, Supplied, interpolate, settle, supplied
from podway.task.fields import Field, FlagField, Layers, did_you_mean
from podway.task.mounts import WORKDIR_NAME, settled
from podway.task.paths import LocalMachine, absolute
from podway.task.problems import Problems
from podway.task.shapes import check
from podway.task.task import DevEnvironment, FileMount, Git, LocalDir, Registry, ReplicaGroup, Resources, Task
from podway.task.values import ENV_NAME, dstack_name, duration_or_off, port_mapping

_PASSWORD = "PODWAY_REGISTRY_PASSWORD"


def read_dstack(root: Field, overrides: Overrides, base: Path, cwd: Path) -> Task:
    kind = _kind(root)
    notes: list[str] = []
    problems = Problems()
    check(root, TABLES[kind], notes, problems)
    listed = listed_groups(root, kind)
    groups = read_groups(listed, kind)
    group = groups[0].field if groups else None
    run = Layers(group, root) if group else Layers(root)
    given = supplied(overrides)
    read = problems.read
    env, secrets = read(lambda: _environment(run, given, overrides.local_env), ({}, {}))
    registry = read(lambda: _registry(run, given, env, secrets), None)
    local = LocalMachine((base,), overrides.local_env)
    workdir, mounts = read(lambda: _files(run, overrides, local, cwd, notes), (None, []))
    volumes, priority, tags, fleets = (run.get(key) for key in ("volumes", "priority", "tags", "fleets"))
    opened = run.get("ports")
    notes += [
        f"{at.path}: ports are forwarded from the first node only"
        for one in groups[1:]
        if (at := one.field.get("ports"))
    ]
    limit = run.get("max_duration")
    if _word(run, "startup_order") not in (None, "any"):
        notes.append("startup_order: all hosts start together, as one gang")
    autostop = read(lambda: read_idle(run), None)
    if kind == "dev-environment" and autostop and (idle := run.get("idle_duration")):
        notes.append(f"{idle.path}: inactivity_duration says when a dev environment ends")
    replicas = (
        _replica_groups(root, run, listed, (env, secrets), overrides, notes, problems) if kind == "service" else ()
    )
    # What a service's groups have for themselves, the task has of the first.
    own = replicas[0] if replicas else _own(root, run, groups, overrides, notes, problems)
    task = Task(
        name=read(lambda: _name(root, overrides), None),
        kind=kind,  # type: ignore[arg-type]
        dialect="dstack",
        resources=own.resources,
        slices=read(lambda: _slices(root, overrides, groups), 1),
        run=own.run,
        shell=own.shell,
        python=own.python,
        user=read(lambda: _user(run, notes), None),
        env=env,
        secrets=secrets,
        workdir=workdir,
        working_dir=read(lambda: _working_dir(run), None),
        file_mounts=tuple(mounts),
        volumes=tuple(read(lambda: read_dstack_volumes(volumes), [])) if volumes else (),
        registry=registry,
        ports=read(lambda: tuple(port_mapping(one) for one in opened.items()), ()) if opened else (),
        pools=tuple(one.words() for one in fleets.items()) if fleets else (),
        reuse_only=_word(run, "creation_policy") == "reuse",
        stop_when="head-done" if _word(run, "stop_criteria") == "master-done" else "all-done",
        autostop=autostop if kind != "dev-environment" else None,
        recovery=read(lambda: read_retry(run), None),
        max_duration_s=read(lambda: duration_or_off(limit, None), None) if limit else None,
        stop_duration_s=read(lambda: read_stop_duration(run, notes), 0),
        priority=overrides.priority if overrides.priority is not None else priority.integer() if priority else 0,
        schedule=read(lambda: read_schedule(run), ()),
        service=read(lambda: read_service(run, group, replicas, env, secrets), None) if kind == "service" else None,
        dev=read(lambda: _dev(run), None) if kind == "dev-environment" else None,
        tags={key: value.text() for key, value in tags.entries().items()} if tags else {},
        notes=tuple(notes),
    )
    problems.raise_any()
    return task


def _own(
    root: Field, run: Layers, groups: tuple[NodeGroup, ...], overrides: Overrides, notes: list[str], problems: Problems
) -> ReplicaGroup:
    """What the run is to do, on what; all its replicas are one group."""
    read = problems.read
    return ReplicaGroup(
        name="",
        resources=read(lambda: _resources(root, run, groups, overrides, notes), ()),
        run=overrides.run
        if overrides.run is not None
        else read(lambda: _scripts(root, run, groups, overrides, notes), ""),
        shell=read(lambda: _shell(run), ""),
        python=read(lambda: _python(run), None),
    )


def _replica_groups(
    root: Field,
    run: Layers,
    listed: list[Field],
    variables: tuple[Mapping[str, str], Mapping[str, str]],
    overrides: Overrides,
    notes: list[str],
    problems: Problems,
) -> tuple[ReplicaGroup, ...]:
    def script(one: Layers) -> GroupScript:
        return GroupScript(_script(one, "service", (), overrides, notes), _shell(one), _python(one))

    def groups() -> tuple[ReplicaGroup, ...]:
        found = read_replica_groups(listed, root, overrides, script, (read_model(run), *variables), notes)
        if found and overrides.run is not None:
            flag = FlagField("--", overrides.run)
            raise flag.error("the groups of this service have commands of their own", "change `commands` in the file")
        return found

    return problems.read(groups, ())


def _kind(root: Field) -> str:
    field = root.get("type")
    assert field is not None  # it is what makes the file dstack's
    kind = field.text()
    if kind in OTHER_TYPES:
        raise field.error(f"a {kind} cannot be run: {OTHER_TYPES[kind][0]}", OTHER_TYPES[kind][1])
    if kind not in TABLES:
        raise field.error(f"{field.found} is not a type of dstack file", did_you_mean(kind, TABLES))
    return kind


def _layers(root: Field, groups: tuple[NodeGroup, ...]) -> list[Layers]:
    """The run as each group sees it."""
    return [Layers(group.field, root) for group in groups] or [Layers(root)]


def _resources(
    root: Field, run: Layers, groups: tuple[NodeGroup, ...], overrides: Overrides, notes: list[str]
) -> tuple[Resources, ...]:
    found = [read_resources(one, overrides, notes) for one in _layers(root, groups)]
    for group, one in zip(groups, found, strict=False):
        if {each.accelerator for each in one} != {each.accelerator for each in found[0]}:
            raise differing_slices(group)
    return found[0]


def _slices(root: Field, overrides: Overrides, groups: tuple[NodeGroup, ...]) -> int:
    if overrides.num_nodes is not None and len(groups) > 1:
        flag = FlagField("--num-nodes", str(overrides.num_nodes))
        raise flag.error("the groups of the file say how many nodes each has", "change `nodes` in the file")
    if overrides.num_nodes is not None:
        if not 1 <= overrides.num_nodes <= 10_000:
            flag = FlagField("--num-nodes", str(overrides.num_nodes))
            raise flag.error(f"{overrides.num_nodes} is out of range", "must be at least 1 and at most 10,000")
        return overrides.num_nodes
    nodes = root.get("nodes")
    return nodes.integer() if nodes else groups[-1].first + groups[-1].nodes if groups else 1


def _environment(run: Layers, given: Supplied, local: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    declared: dict[str, Declared] = {}
    field = run.get("env")
    for name, value, at in _listed(field) if field else ():
        if not re.fullmatch(ENV_NAME, name):
            raise at.error(
                f"`{name}` is not a variable name", "write NAME=VALUE, or NAME to take it from your environment"
            )
        if name in declared:
            first = declared[name].field.node
            raise at.error(f"{name} is given twice: here and at line {first.line}", "keep one of them")
        hidden = value is not None and re.search(r"(?<!\$)\$\{\{\s*secrets\.", value) is not None
        text = None if value is None else interpolate(at, value, partial(_secret, at, given))
        declared[name] = Declared(at, text, secret=hidden)
    return settle(declared, given, local)


def _listed(field: Field) -> list[tuple[str, str | None, Field]]:
    if field.is_mapping:
        return [(name, None if one.is_null else one.text(), one) for name, one in field.entries().items()]
    parts = [(one.text().partition("="), one) for one in field.items()]
    return [(name, value if equals else None, one) for (name, equals, value), one in parts]


def _secret(field: Field, given: Supplied, word: str) -> str | None:
    space, _, name = word.partition(".")
    if space != "secrets":
        return None
    value = given.secrets.get(name)
    if value is None:
        raise field.error(f"the secret {name} has no value", f"give it with `--secret {name}` or `--secret {name}=...`")
    return value


def _registry(run: Layers, given: Supplied, env: Mapping[str, str], secrets: dict[str, str]) -> Registry | None:
    """Credentials for the image; the password joins the task's secrets."""
    field = run.get("registry_auth")
    if field is None:
        return None
    user, password = field.get("username"), field.get("password")
    assert user is not None and password is not None  # the shape requires them

    def known(at: Field, word: str) -> str | None:
        space, _, name = word.partition(".")
        return (env.get(name) or secrets.get(name)) if space == "env" else _secret(at, given, word)

    if "secrets." in user.text():
        raise user.error("the user name is stored and shown", "write it out, or use ${{ env.NAME }}")
    name = interpolate(user, user.text(), lambda word: env.get(word.removeprefix("env.")))
    secrets[_PASSWORD] = interpolate(password, password.text(), lambda word: known(password, word))
    return Registry(username=name, password_secret=_PASSWORD)


def _files(
    run: Layers, overrides: Overrides, local: LocalMachine, cwd: Path, notes: list[str]
) -> tuple[LocalDir | Git | None, list[FileMount]]:
    repos, files = run.get("repos"), run.get("files")
    workdir, mounts = read_repos(repos, local, notes) if repos else (None, [])
    if overrides.workdir is not None:
        flag = FlagField("--workdir", overrides.workdir)
        here = LocalMachine((cwd,), overrides.local_env)
        workdir = LocalDir(path=here.existing(flag, overrides.workdir, directory=True))
    return workdir, mounts + (read_files(files, local) if files else [])


def _name(root: Field, overrides: Overrides) -> str | None:
    if overrides.name is not None:
        return dstack_name(FlagField("--name", overrides.name))
    field = root.get("name")
    return dstack_name(field) if field else None


def _scripts(root: Field, run: Layers, groups: tuple[NodeGroup, ...], overrides: Overrides, notes: list[str]) -> str:
    """The script of the run; of several groups, each node runs that of its own."""
    kind = _kind(root)
    scripts = [_script(one, kind, groups, overrides, notes) for one in _layers(root, groups)]
    return scripts[0] if len(scripts) == 1 else by_slice(groups, scripts)


def _script(run: Layers, kind: str, groups: tuple[NodeGroup, ...], overrides: Overrides, notes: list[str]) -> str:
    if kind == "dev-environment":
        if overrides.run_args:
            raise _unused_args(overrides)
        init = _commands(run, "setup", groups, overrides) + _commands(run, "init", groups, overrides)
        entrypoint = run.get("entrypoint")
        if entrypoint:
            raise entrypoint.error("a dev environment has no entrypoint", "put the command into `init`")
        return join_commands(init)  # when they have ended, the environment is ready: it is a cluster that stays up
    old = run.get("setup")
    if old:
        notes.append(f"{old.path}: dstack ignores it too; put it into `commands`")
    commands = _commands(run, "commands", groups, overrides)
    if overrides.run_args and not any("run.args" in one.text() for one in _items(run, "commands")):
        raise _unused_args(overrides)
    entrypoint = run.get("entrypoint")
    if entrypoint:
        try:
            return join_words(entrypoint.text(), commands)
        except ValueError as error:
            raise entrypoint.error(f"not a command line: {error}", "close the quotes") from None
    if not commands and not run.get("image"):
        raise run.inner.error("there is nothing to run", "add `commands:`, or an `image:` with a command of its own")
    return join_commands(commands)


def _items(run: Layers, key: str) -> list[Field]:
    field = run.get(key)
    return field.items() if field else []


def _commands(run: Layers, key: str, groups: tuple[NodeGroup, ...], overrides: Overrides) -> list[str]:
    def filled(at: Field) -> str:
        def known(word: str) -> str | None:
            if word == "run.args":
                return shlex.join(overrides.run_args)
            if address := node_address(word, groups, at):
                return address
            if word.startswith("secrets."):
                name = word.removeprefix("secrets.")
                raise at.error(
                    "secrets cannot be put into commands", f"add `{name}=${{{{ {word} }}}}` to env, and use ${name}"
                )
            if word.startswith("groups["):
                hint = "use $DSTACK_NODES_IPS, one address a line"
                if ".replicas[" in word:
                    hint = "replicas come and go: give the service a group with `router`, which is told of them"
                raise at.error(f"`{word}` is not known before the run", hint)
            return None

        return interpolate(at, at.text(), known)

    return [filled(at) for at in _items(run, key)]


def _unused_args(overrides: Overrides) -> Exception:
    flag = FlagField("--", " ".join(overrides.run_args))
    return flag.error("the file has no place for arguments", "write ${{ run.args }} where they belong in `commands`")


def _shell(run: Layers) -> str:
    """bash; sh when an image is given, as its user may have no bash."""
    field = run.get("shell")
    if field is None:
        return "sh" if run.get("image") else "bash"
    shell = field.words()
    if shell not in ("sh", "bash") and not shell.startswith("/"):
        raise field.error(f"{field.found} is not a shell", "write sh, bash, or the absolute path of one")
    return shell


def _python(run: Layers) -> str | None:
    """The version as written; `3.1` is what YAML writers make of 3.10."""
    field = run.get("python")
    image, docker = run.get("image"), run.get("docker")
    if docker and docker.flag():
        for other in filter(None, (image, field)):
            raise other.error("`docker` is given too", "keep one of image, python and docker")
    if field is None:
        return None
    if image:
        raise field.error("an image has its own Python", "remove `python`, or `image`")
    version = field.text()
    return version if version in PYTHONS else "3.10"


def _user(run: Layers, notes: list[str]) -> str | None:
    """The user inside an image; on a host itself commands run as the host's."""
    field = run.get("user")
    if field is None or run.get("image"):
        return field.words() if field else None
    notes.append("user: without an image, commands run as the user of the host")
    return None


def _working_dir(run: Layers) -> str | None:
    field = run.get("working_dir")
    if field is None:
        return None
    path = field.words()
    if not path.startswith("/"):  # dstack of old: below the repository
        inside = settled(path)
        if inside is None or path.startswith("~") or inside.startswith("~"):
            raise field.error(
                f"{field.found} is not below the repository", "begin it with /, or name a directory of it"
            )
        return f"~/{WORKDIR_NAME}/{inside}".rstrip("/")
    return absolute(path, Path("/"), {})


def _word(run: Layers, key: str) -> str | None:
    field = run.get(key)
    return field.text().lower() if field else None


def _dev(run: Layers) -> DevEnvironment:
    version, idle = run.get("version"), run.get("inactivity_duration")
    return DevEnvironment(
        ide=_word(run, "ide"),
        version=version.words() if version else None,
        inactivity_s=duration_or_off(idle, None) if idle else None,
    )
