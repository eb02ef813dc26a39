"""What of a task a provider does not do: refused when ignoring it would be wrong, noted by name otherwise. Pure.

A provider says in `capabilities` which of these it does for real; nothing a task asks for is dropped without a word.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from podway.errors import UserError
from podway.hosts.manifest import FileTree
from podway.launch import runs_image_command
from podway.provider_table import ProviderRow, load, provider_rows, row_of, why_no_image
from podway.task.mounts import settled
from podway.task.task import (
    Bucket,
    DevEnvironment,
    Resources,
    ServiceSpec,
    Task,
    Volume,
    container_image,
    group_tasks,
    takes_chips,
)


class Remarks(msgspec.Struct, frozen=True, kw_only=True):
    """`refusal` ends the launch; `notes` are shown and it goes on."""

    refusal: UserError | None = None
    notes: tuple[str, ...] = ()


def remarks(
    task: Task, capabilities: frozenset[str], *, simulated: bool, setup: bool = True, no_image: str = ""
) -> Remarks:
    """Judge a task against what a provider does, and against what Podway does for a job that brings no `setup`.

    `no_image` says why an image cannot be used there (`provider_table.why_no_image`).
    """
    parts = group_tasks(task)
    if "" not in parts:
        return _remarks_of_groups(parts, capabilities, simulated=simulated, setup=setup, no_image=no_image)
    refusal = _escape_refusal(task) or _bucket_refusal(task, capabilities, simulated)
    refusal = refusal or _volume_refusal(task, capabilities, simulated)
    refusal = (
        refusal or (_image_refusal(task, no_image) if no_image else None) or _host_image_refusal(task, capabilities)
    )
    if refusal is None and simulated:
        refusal = _path_refusal(task)
    return Remarks(refusal=refusal, notes=tuple(_notes(task, capabilities, simulated, setup)))


def _remarks_of_groups(
    parts: Mapping[str, Task], capabilities: frozenset[str], *, simulated: bool, setup: bool, no_image: str
) -> Remarks:
    """Of a service with groups: what holds for any of them, once."""
    found = []
    for part in parts.values():
        has_image = any(container_image(one.image) for one in part.resources)
        why = no_image if has_image else ""
        found.append(remarks(part, capabilities, simulated=simulated, setup=setup, no_image=why))
    notes = dict.fromkeys(note for one in found for note in one.notes)
    return Remarks(refusal=next((one.refusal for one in found if one.refusal is not None), None), notes=tuple(notes))


def _every_resource(task: Task) -> list[Resources]:
    return [one for part in group_tasks(task).values() for one in part.resources]


def places_of(task: Task) -> list[ProviderRow]:
    """The providers that a launch of this task may ask: those it names, else all."""
    names = {one.placement.provider for one in _every_resource(task)}
    if None in names:
        return list(provider_rows().values())
    return [row_of(name) for name in sorted(name for name in names if name is not None)]


def forecast(task: Task) -> tuple[str, ...]:
    """What a launch would say of this task wherever it may go, in the words the launch itself uses.

    What holds for every provider is said once, what holds for some with their names.
    """
    said: dict[str, list[str]] = {}
    rows = places_of(task)
    for row in rows:
        found = remarks(task, row.capabilities, simulated=row.simulated, no_image=no_image_for(task, row))
        lines = list(found.notes)
        if not row.opens:
            lines = [f"there is no provider {row.name!r} in this version: launch refuses it"]
        elif found.refusal is not None:
            lines.insert(0, f"launch refuses it: {found.refusal.what}; {found.refusal.hint}")
        for line in lines:
            said.setdefault(line, []).append(row.name)
    return tuple(line if len(names) == len(rows) else f"on {', '.join(names)}: {line}" for line, names in said.items())


def check_places(task: Task, root: Path) -> tuple[str, ...]:
    """Refuse a region or zone that its provider does not have, before anybody is asked; remarks on those it may not have."""
    found = {one.placement: row_of(one.placement.provider) for one in _every_resource(task) if one.placement.provider}
    remarks = (load(row.check_place)(root, place) for place, row in found.items() if row.check_place)
    return tuple(remark for remark in remarks if remark)


def no_image_for(task: Task, row: ProviderRow) -> str:
    """Why a provider cannot give a task its image; '' where it can, or there is none to give. Asks only if need be."""
    return why_no_image(row) if any(container_image(one.image) for one in _every_resource(task)) else ""


def _image_refusal(task: Task, why: str) -> UserError | None:
    images = sorted({image for one in task.resources if (image := container_image(one.image))})
    if not images:
        return None
    return UserError(
        f"image {', '.join(images)} cannot be used here: {why}",
        "choose hosts that have Docker (--infra gcp, or ssh), or add --ignore-image to run in the hosts' own environment",
    )


def _host_image_refusal(task: Task, capabilities: frozenset[str]) -> UserError | None:
    """Of hosts that are made of the image before any of the task is there."""
    if "hosts-of-image" not in capabilities:
        return None
    if not runs_image_command(task):
        return None
    return UserError("the image's own command is not known here", "write it into `commands`")


def _bucket_refusal(task: Task, capabilities: frozenset[str], simulated: bool) -> UserError | None:
    """Mounts take a host of its own; copies come by way of the server, to any host."""
    for mount in task.file_mounts:
        source = mount.source
        if isinstance(source, Bucket) and source.mode != "COPY" and "buckets" not in capabilities:
            why = "these hosts share this machine's root" if simulated else "its hosts may not mount anything"
            return UserError(
                f"file_mounts {mount.target}: {source.uri} cannot be mounted here: {why}",
                "use mode: COPY, or a provider with hosts of their own (gcp, ssh)",
            )
    return None


def _is_cached(source: object) -> bool:
    return isinstance(source, Bucket) and source.mode == "MOUNT_CACHED"


def _volume_refusal(task: Task, capabilities: frozenset[str], simulated: bool) -> UserError | None:
    for volume in task.volumes:
        why = _why_no_volume(task, volume, capabilities, simulated)
        if why and not volume.optional:
            return UserError(f"volumes: {_volume_name(volume)} cannot be seen at {volume.path} here: {why}", _NO_VOLUME)
    return None


_NO_VOLUME = (
    "use a bucket in file_mounts, or --infra gcp or ssh; a simulated host takes volumes below its home (~/data)"
)


def _volume_name(volume: Volume) -> str:
    return volume.name or volume.instance_path or "a new one"


def _why_no_volume(task: Task, volume: Volume, capabilities: frozenset[str], simulated: bool) -> str:
    """'' where it is done: a directory of the host, or a volume of its provider, is linked, or bound into the image."""
    if volume.name is None and volume.instance_path is None:
        return "a volume is made by a name: podway volume create NAME --size 100GB"
    if volume.name is not None and "volumes" not in capabilities:
        return "Podway has no volumes there"
    if volume.name is None and "instance-paths" not in capabilities:
        return "its hosts show no directories of their own"
    in_home = volume.name is not None and volume.path.startswith("~/")
    if simulated and not in_home and not all(container_image(one.image) for one in task.resources):
        return "without an image the hosts of a simulated slice share this machine's root directory"
    return ""


def _binds(task: Task, capabilities: frozenset[str]) -> bool:
    """Whether a volume is mounted for the task, and not linked."""
    return "hosts-of-image" in capabilities or all(container_image(one.image) for one in task.resources)


def _volume_notes(task: Task, capabilities: frozenset[str], simulated: bool) -> list[str]:
    notes = []
    for volume in task.volumes:
        why = _why_no_volume(task, volume, capabilities, simulated)
        if not why and volume.name is not None and volume.size_gb:
            notes.append(f"the size of {volume.name} has no effect here: it is as large as it was made")
        if why and volume.optional:
            notes.append(f"the optional volume {_volume_name(volume)} is left out at {volume.path}: {why}")
        elif not why and volume.read_only and not _binds(task, capabilities):
            notes.append(
                f"read_only has no effect on {volume.path} without an image: the host's directory is linked there"
            )
    return notes


def _escape_refusal(task: Task) -> UserError | None:
    """Files are refused where they are read; a task may also come from a program."""
    for target in (*(mount.target for mount in task.file_mounts), *(volume.path for volume in task.volumes)):
        if settled(target) != target:
            return UserError(f"file_mounts {target}: the path has `.` or `..` in it", "write the path without them")
    for part in (volume.sub_path for volume in task.volumes if volume.sub_path is not None):
        if settled(part) != part or part.startswith(("/", "~")):
            return UserError(f"volumes: {part} leads out of its volume", "write a directory below it")
    for source in (volume.instance_path for volume in task.volumes if volume.instance_path and volume.name is None):
        if settled(source) != source or not source.startswith("/"):
            return UserError(
                f"volumes: {source} is not an absolute path", "write it from the root, without `.` and `..`"
            )
    return None


def _path_refusal(task: Task) -> UserError | None:
    return next((_shared_root(mount.target) for mount in task.file_mounts if mount.target.startswith("/")), None)


def _shared_root(target: str) -> UserError:
    return UserError(
        f"file_mounts {target}: the hosts of a simulated slice share this machine's root directory",
        f"mount it below the home instead, e.g. ~{target}",
    )


def check_targets(trees: Sequence[FileTree], *, simulated: bool) -> None:
    """The same for uploaded trees, which name their own targets: whoever sends them may not have read the task."""
    for tree in trees:
        if tree.kind == "bucket":
            continue
        if settled(tree.target.rstrip("/")) != tree.target.rstrip("/") or "\0" in tree.target:
            raise UserError(
                f"file_mounts {tree.target!r}: not a path below the home or the root", "write it without `..`"
            )
        if simulated and tree.target.startswith("/"):
            raise _shared_root(tree.target)


def _service_notes(spec: ServiceSpec, setup: bool) -> list[str]:
    """What a service file says that the gateway decides, and what it comes to on a cluster that is there already."""
    if not setup:
        return ["the service runs as a plain job on this cluster: make a service of it with podway apply"]
    notes = []
    if spec.load_balancing not in (None, "least_load", "least_outstanding"):
        notes.append(
            f"load_balancing_policy {spec.load_balancing} has no effect: requests go to the replica with the least to do"
        )
    if spec.https is not None:
        notes.append("https has no effect: the certificate of the gateway decides")
    return notes


def _unattended(task: Task, capabilities: frozenset[str], simulated: bool, setup: bool) -> list[str]:
    """What a task says of how people and requests reach it."""
    notes = []
    if task.service is not None:
        notes += _service_notes(task.service, setup)
    if task.dev is not None:
        notes += _dev_notes(task, task.dev, capabilities)
    if task.ports and "forwarding" not in capabilities:
        notes.append("ports are not forwarded to this machine: use the hosts' own addresses, or ssh -L")
    if any(one.ports for one in task.resources) and "ports" not in capabilities and not simulated:
        notes.append("ports are not opened here: the hosts' own firewall decides")
    if any((one.cpus or one.memory) and one.accelerator is None for one in task.resources):
        notes.append("cpus and memory choose no machine: name one with instance_type")
    return notes


def _dev_notes(task: Task, dev: DevEnvironment, capabilities: frozenset[str]) -> list[str]:
    """What a dev environment says that nothing comes of."""
    notes = []
    if "dev" not in capabilities:
        notes.append("ide and inactivity_duration have no effect here: nobody can log in to the hosts over ssh")
    elif dev.version:
        notes.append(
            f"version {dev.version} of the editor has no effect: it installs what it needs on the host by itself"
        )
    if task.max_duration_s is not None:
        notes.append("max_duration has no effect on a dev environment: inactivity_duration ends it, or podway down")
    return notes


def _notes(task: Task, capabilities: frozenset[str], simulated: bool, setup: bool) -> list[str]:
    notes = []
    for image in sorted({one.image for one in task.resources if one.image and not container_image(one.image)}):
        if simulated or any(one.accelerator for one in task.resources):
            notes.append(f"image_id {image} has no effect: runtime_version chooses the software of a TPU host")
    if task.python and "python" not in capabilities:
        notes.append(f"python {task.python} is not installed here: the task runs with the hosts' own python3")
    if any(resources.disk_gb for resources in task.resources) and "disk" not in capabilities:
        notes.append("disk_size has no effect here: the hosts have the disks they have")
    if any(resources.priority_class for resources in task.resources) and "priority-classes" not in capabilities:
        notes.append(
            "priority_class has no effect here: pods of Kubernetes have one; `priority` orders a cluster's jobs"
        )
    if task.priority and task.service is not None and setup:
        notes.append("priority has no effect on a service: each replica has a cluster of its own")
    elif task.priority and not takes_chips(task):
        notes.append("priority has no effect: the task bypasses the queue of its cluster")
    if task.recovery is not None and not setup:
        notes.append(
            "recovery has no effect on a job without setup (exec, --no-setup): new hosts would lack what the launch set up"
        )
    if any(isinstance(mount.source, Bucket) and not mount.source.persistent for mount in task.file_mounts):
        notes.append("persistent: false has no effect: Podway never deletes a bucket")
    cached = [mount for mount in task.file_mounts if _is_cached(mount.source)]
    if cached and "attached-buckets" in capabilities:
        notes.append(
            f"file_mounts {cached[0].target}: MOUNT_CACHED is MOUNT here: a file is in the bucket once it is closed"
        )
    notes += _volume_notes(task, capabilities, simulated)
    notes += _unattended(task, capabilities, simulated, setup)
    if simulated and any(resources.spot != "no" for resources in task.resources):
        notes.append("spot has no effect: a simulated slice is never preempted")
    return notes
