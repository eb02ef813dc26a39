"""What a service becomes when somebody asks for something: pure functions from the old value to the new one.

A change of what runs (the commands, the environment, the files, the resources, the port) is a new revision, which rolls out. A change
of how it is looked after (replicas, scaling, probes, limits, the model's name) is made in place, in the revision there is. Of a
service with groups only those roll whose own part has changed.
"""

from typing import Any, Literal, TypeVar

import msgspec

from podway.certificates import CertificateFacts
from podway.control.access import with_grant
from podway.control.decide_groups import change_group
from podway.control.service_records import Revision, ScalingMemory, Service
from podway.errors import UserError
from podway.hosts.manifest import FileTree
from podway.task.task import LocalDir, ReplicaGroup, Scaling, ServiceSpec, Task

REVISIONS_KEPT = 10
# Parts of a task that change nothing in what a replica runs.
_IN_PLACE = ("service", "notes", "priority", "tags", "stop_duration_s", "name", "autostop", "ports")
_GROUP_IN_PLACE = ("scaling", "probes")
# What each group has for itself; the task's own is that of one of them.
_BY_GROUP = ("run", "shell", "python", "resources")

ChangeKind = Literal["create", "none", "in-place", "roll"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a new file says otherwise; `old` or `new` is empty where one of them does not say it."""

    path: str
    old: str
    new: str
    rolls: bool  # it changes what runs


def differences(old: Revision, task: Task, files: tuple[FileTree, ...], secrets_changed: bool) -> list[Difference]:
    """What a task says otherwise than a revision does, by path."""
    before, after = _plain(old.task), _plain(task)
    found = [
        Difference(path=path, old=_shown(a), new=_shown(b), rolls=_rolls(path))
        for path, a, b in _walk("", before, after)
    ]
    if {tree.target: tree.manifest for tree in old.files} != {tree.target: tree.manifest for tree in files}:
        found.append(Difference(path="files", old="", new="their contents", rolls=True))
    if secrets_changed:
        found.append(Difference(path="secrets", old="", new="other values", rolls=True))
    return found


def _plain(task: Task) -> dict[str, Any]:
    tree: dict[str, Any] = _tree(msgspec.structs.replace(task, notes=(), secrets={}))
    tree["secrets"] = sorted(task.secrets)
    if isinstance(task.workdir, LocalDir):
        del tree["workdir"]  # where it was on the machine the command was typed on is not what runs; its contents are
    if task.service is not None and task.service.groups:
        for name in _BY_GROUP:
            del tree[name]
        for name in ("scaling", "probes"):
            del tree["service"][name]
    return tree


def _tree(value: Any) -> Any:
    """With every default in its place, so that a value that a file leaves out is shown too."""
    if isinstance(value, msgspec.Struct):
        return {name: _tree(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: _tree(one) for name, one in value.items()}
    return [_tree(one) for one in value] if isinstance(value, (list, tuple)) else value


def _walk(path: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [row for key in keys for row in _walk(f"{path}.{key}" if path else key, old.get(key), new.get(key))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [row for index, (a, b) in pairs for row in _walk(f"{path}[{index}]", a, b)]
    return [(path, old, new)]


def _rolls(path: str) -> bool:
    if path.startswith("service.groups"):
        return path.partition("].")[2].partition(".")[0].partition("[")[0] not in _GROUP_IN_PLACE
    return path == "service.port" or path.partition(".")[0].partition("[")[0] not in _IN_PLACE


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def kind_of(found: list[Difference]) -> ChangeKind:
    """What the differences come to."""
    if not found:
        return "none"
    return "roll" if any(one.rolls for one in found) else "in-place"


def update_in_place(service: Service, task: Task) -> Service:
    """The current revision with what the new task says of how it is looked after; what runs is the same."""
    now = service.current
    kept = {name: getattr(task, name) for name in _IN_PLACE}
    revision = msgspec.structs.replace(now, task=msgspec.structs.replace(now.task, **kept))
    return retarget(_with_revision(service, revision))


def unchanged_groups(old: Revision, task: Task, found: list[Difference]) -> dict[str, int]:
    """Of a revision that follows another: the groups that run the same in it, and since which revision."""
    if any(one.rolls and not one.path.startswith("service.groups") for one in found):
        return {}
    same: dict[str, int] = {}
    for group in task.service.groups if task.service else ():
        before = old.spec.find_group(group.name)
        kept = {} if before is None else {part: getattr(before, part) for part in _GROUP_IN_PLACE}
        if before is not None and msgspec.structs.replace(group, **kept) == before:
            same[group.name] = old.since.get(group.name, old.number)
    return same


def add_revision(service: Service, revision: Revision, canary_share: float | None = None) -> Service:
    """Roll to a new revision; or, with a share, try it as a canary beside the one there is."""
    number = max(one.number for one in service.revisions) + 1
    service = _with_revision(service, msgspec.structs.replace(revision, number=number))
    if canary_share is not None:
        return msgspec.structs.replace(service, canary=number, canary_share=canary_share, failures=0, not_before=0.0)
    return roll_to(service, number)


def roll_to(service: Service, number: int) -> Service:
    """All replicas are to run this revision; also to end a canary, by its promotion or the way back."""
    if service.find_revision(number) is None:
        known = ", ".join(str(one.number) for one in service.revisions)
        raise UserError(
            f"service {service.name} has no revision {number}", f"revisions that are kept: {known}", status=404
        )
    _check_router(service, service.find_revision(number) or service.current)
    service = msgspec.structs.replace(
        service, revision=number, canary=None, canary_share=0.0, failures=0, not_before=0.0, reason=""
    )
    return retarget(service)


def _check_router(service: Service, new: Revision) -> None:
    """Refuse to replace a router that its workers know by its address: the service would lose all its traffic."""
    now, then = service.spec.router, new.spec.router
    if now is None or then is None:
        return
    hint = f"end the service and apply the file again: podway service down {service.name}"
    if now.router != then.router:
        what = f"the router of service {service.name} cannot become one of another type while it runs"
        raise UserError(what, hint, status=409)
    since = [one.since.get(router.name, one.number) for one, router in ((service.current, now), (new, then))]
    if now.router == "dynamo" and (now.name != then.name or since[0] != since[1]):
        what = f"workers know the router of service {service.name} by its address: it cannot be replaced while it runs"
        raise UserError(what, f"change the other groups only; or {hint}", status=409)


def set_share(service: Service, share: float) -> Service:
    """Another part of the traffic for the canary there is."""
    if service.canary is None:
        raise UserError(f"service {service.name} has no canary", "update it with --canary first", status=409)
    return msgspec.structs.replace(service, canary_share=share)


def scale(service: Service, low: int, high: int, group: str = "") -> Service:
    """Another range of replicas; a fixed number where both ends are the same. `group`: of a service with groups, which."""
    now = service.current
    scaling = _scaled_part(service, group, low, high)
    if low != high and not has_target(scaling):
        raise UserError(
            f"nothing says when service {service.name} is to add replicas",
            "give one number, or add scaling with a target to its file and apply it",
        )
    scaling = msgspec.structs.replace(scaling, min_replicas=low, max_replicas=high)
    spec = now.spec
    if group:
        groups = (_with(one, scaling=scaling) if one.name == group else one for one in spec.groups)
        spec = _with(spec, groups=tuple(groups))
    else:
        spec = _with(spec, scaling=scaling)
    revision = msgspec.structs.replace(now, task=msgspec.structs.replace(now.task, service=spec))
    return retarget(_with_revision(service, revision))


def _scaled_part(service: Service, group: str, low: int, high: int) -> Scaling:
    spec = service.spec
    names = ", ".join(one.name for one in spec.groups)
    if not spec.groups:
        if group:
            raise UserError(f"service {service.name} has no groups", "leave --group out")
        return spec.scaling
    if not group:
        raise UserError(f"service {service.name} has groups of replicas", f"say which: --group NAME, one of: {names}")
    found = spec.find_group(group)
    if found is None:
        raise UserError(f"service {service.name} has no group {group!r}", f"its groups: {names}", status=404)
    if found.router and (low, high) != (1, 1):
        raise UserError(f"group {group} is the router of service {service.name}", "a service has one router")
    return found.scaling


def has_target(scaling: Scaling) -> bool:
    """Whether it says when to add replicas."""
    return bool(scaling.target_qps or scaling.target_qps_by_type or scaling.target)


def retarget(service: Service) -> Service:
    """A target within the range that is now, and a new try for what had failed."""
    if service.spec.groups:
        for name in service.group_names:
            service = change_group(service, name, retarget)
        return msgspec.structs.replace(service, memory=ScalingMemory(), failures=0, not_before=0.0)
    scaling = service.spec.scaling
    target = min(max(service.memory.target, scaling.min_replicas), max(scaling.max_replicas, scaling.min_replicas))
    return msgspec.structs.replace(service, memory=ScalingMemory(target=target), failures=0, not_before=0.0)


def set_certificate(service: Service, facts: CertificateFacts | None, sealed: bytes) -> Service:
    """Another pair for the endpoint, whichever revision it is that runs."""

    def changed(one: Revision) -> Revision:
        task = msgspec.structs.replace(one.task, service=msgspec.structs.replace(one.spec, tls=facts))
        return msgspec.structs.replace(one, task=task)

    return msgspec.structs.replace(
        service, revisions=tuple(changed(one) for one in service.revisions), sealed_tls=sealed
    )


def set_grant(service: Service, user: str, right: Literal["view", "use"] | None) -> Service:
    """Let a person view or use it, or (None) no longer."""
    return msgspec.structs.replace(service, grants=with_grant(service.grants, user, right))


def request_down(service: Service) -> Service:
    """It and all its replicas are to end."""
    return msgspec.structs.replace(service, goal="gone")


P = TypeVar("P", ServiceSpec, ReplicaGroup)


def _with(spec: P, **changes: Any) -> P:
    return msgspec.structs.replace(spec, **changes)


def _with_revision(service: Service, revision: Revision) -> Service:
    """Added, or in the place of the one of that number; old ones that nothing runs are forgotten."""
    others = [one for one in service.revisions if one.number != revision.number]
    kept = sorted([*others, revision], key=lambda one: one.number)
    needed = {service.revision, service.canary}
    while len(kept) > REVISIONS_KEPT and any(one.number not in needed for one in kept[:-1]):
        kept.remove(next(one for one in kept if one.number not in needed))
    return msgspec.structs.replace(service, revisions=tuple(kept))
