"""What a service becomes when somebody asks for something: pure functions from the old value to the new one.

A change of what runs (the commands, the environment, the files, the resources, the port) is a new revision, which rolls out. A change
of how it is looked after (replicas, scaling, probes, limits, the model's name) is made in place, in the revision there is.
"""

from typing import Any, Literal

import msgspec

from podway.control.access import with_grant
from podway.control.service_records import Revision, ScalingMemory, Service
from podway.errors import UserError
from podway.hosts.manifest import FileTree
from podway.task.task import LocalDir, Scaling, ServiceSpec, Task

REVISIONS_KEPT = 10
# Parts of a task that change nothing in what a replica runs.
_IN_PLACE = ("service", "notes", "priority", "tags", "stop_duration_s", "name", "autostop", "ports")

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
    service = msgspec.structs.replace(
        service, revision=number, canary=None, canary_share=0.0, failures=0, not_before=0.0, reason=""
    )
    return retarget(service)


def set_share(service: Service, share: float) -> Service:
    """Another part of the traffic for the canary there is."""
    if service.canary is None:
        raise UserError(f"service {service.name} has no canary", "update it with --canary first", status=409)
    return msgspec.structs.replace(service, canary_share=share)


def scale(service: Service, low: int, high: int) -> Service:
    """Another range of replicas; a fixed number where both ends are the same."""
    now = service.current
    scaling = now.spec.scaling
    if low != high and not has_target(scaling):
        raise UserError(
            f"nothing says when service {service.name} is to add replicas",
            "give one number, or add scaling with a target to its file and apply it",
        )
    spec = _with(now.spec, scaling=msgspec.structs.replace(scaling, min_replicas=low, max_replicas=high))
    revision = msgspec.structs.replace(now, task=msgspec.structs.replace(now.task, service=spec))
    return retarget(_with_revision(service, revision))


def has_target(scaling: Scaling) -> bool:
    """Whether it says when to add replicas."""
    return bool(scaling.target_qps or scaling.target_qps_by_type or scaling.target)


def retarget(service: Service) -> Service:
    """A target within the range that is now, and a new try for what had failed."""
    scaling = service.spec.scaling
    target = min(max(service.memory.target, scaling.min_replicas), max(scaling.max_replicas, scaling.min_replicas))
    return msgspec.structs.replace(service, memory=ScalingMemory(target=target), failures=0, not_before=0.0)


def set_grant(service: Service, user: str, right: Literal["view", "use"] | None) -> Service:
    """Let a person view or use it, or (None) no longer."""
    return msgspec.structs.replace(service, grants=with_grant(service.grants, user, right))


def request_down(service: Service) -> Service:
    """It and all its replicas are to end."""
    return msgspec.structs.replace(service, goal="gone")


def _with(spec: ServiceSpec, **changes: Any) -> ServiceSpec:
    return msgspec.structs.replace(spec, **changes)


def _with_revision(service: Service, revision: Revision) -> Service:
    """Added, or in the place of the one of that number; old ones that nothing runs are forgotten."""
    others = [one for one in service.revisions if one.number != revision.number]
    kept = sorted([*others, revision], key=lambda one: one.number)
    needed = {service.revision, service.canary}
    while len(kept) > REVISIONS_KEPT and any(one.number not in needed for one in kept[:-1]):
        kept.remove(next(one for one in kept if one.number not in needed))
    return msgspec.structs.replace(service, revisions=tuple(kept))
