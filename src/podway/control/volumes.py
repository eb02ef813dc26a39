"""Volumes: what people create, list and delete, and what of them a launch finds.

A volume is a row from before it is made until after it is deleted, so that nothing of it is ever forgotten: what was interrupted is
finished by asking for the same again. A launch replaces the names in its task by where on a host each volume is (`attach`), and
restricts the task to the provider and zone that has them.
"""

import re
import time
from collections.abc import Callable

import msgspec

from podway.control.access import Caller, Right, check_inventory, check_project, require, right_on
from podway.control.bucket_mounts import with_buckets
from podway.control.store import Store
from podway.control.volume_store import VolumeRecord
from podway.control.writing import Stale
from podway.errors import UserError
from podway.launch_options import LaunchRequest
from podway.order import Order, OrderVolume
from podway.provider_table import provider_rows, row_of
from podway.providers import HostsHere, Provider, SupportsVolumes
from podway.task.task import Placement, Resources, Task, Volume
from podway.task.volumes import VolumeSpec, for_node, is_per_node

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,61}")


class VolumeControl:
    """The verbs of volumes, and what launches ask of them."""

    def __init__(self, store: Store, provider: Callable[[str], Provider], hosts_here: Callable[[], HostsHere]) -> None:
        self.store = store
        self.rows = store.volumes
        self._provider = provider
        self._hosts_here = hosts_here

    async def create(self, spec: VolumeSpec, caller: Caller, project: str | None = None) -> VolumeRecord:
        """Make the volume, or go on where an earlier try was interrupted."""
        check_project(caller, project)
        check_inventory(caller, Task(resources=(Resources(placement=spec.placement),)))
        if spec.disk_id is not None and not caller.admin:
            raise UserError(
                f"{caller.user} may not register an existing disk: the server reaches every disk of its account",
                "ask an administrator to register it into your project, or create a new one",
                status=403,
            )
        if not NAME.fullmatch(spec.name):
            raise UserError(
                f"{spec.name!r} cannot be the name of a volume", "use letters, digits and . _ -, at most 62 characters"
            )
        provider = self._provider(spec.placement.provider or "")
        self._check_provider(provider.name)
        known = self.rows.get(spec.name)
        if known is None:
            record = VolumeRecord(name=spec.name, user=caller.user, project=project, spec=spec, created=time.time())
            if not self.rows.add(record):
                raise _changed(spec.name)
        else:
            record = self._again(known, spec, caller)
            if record.state == "ready":
                return record
        assert isinstance(provider, SupportsVolumes)
        try:
            made = await provider.create_volume(spec)
        except UserError:  # it will never work as asked, and nothing was made
            if known is None:
                self.rows.delete(spec.name)
            raise
        try:
            return self.rows.save(msgspec.structs.replace(record, state="ready", made=made))
        except Stale:
            raise _changed(spec.name) from None

    def _check_provider(self, name: str) -> None:
        if "volumes" not in row_of(name).capabilities:
            others = ", ".join(row.name for row in provider_rows().values() if "volumes" in row.capabilities)
            raise UserError(f"Podway makes no volumes on {name}", f"use one of: {others}; or a bucket in file_mounts")
        if row_of(name).on_server and self._hosts_here() == "isolated":
            raise UserError(
                f"volumes on {name} would be the server's own files, and this server runs each cluster as another user",
                "use a bucket in file_mounts, or another provider",
                status=403,
            )

    def _again(self, known: VolumeRecord, spec: VolumeSpec, caller: Caller) -> VolumeRecord:
        """The row of that name, for a caller who asks for the same again."""
        if right_on(known, caller) is None:
            raise UserError(f"the name {known.name!r} is taken", "use another name", status=409)
        require(known, caller, Right.MANAGE)
        if known.state == "deleting":
            raise UserError(
                f"volume {known.name} is being deleted", f"finish it: podway volume delete {known.name}", status=409
            )
        for what, old, new in (
            ("is on", known.spec.placement, spec.placement),
            ("has a size of", known.spec.size_gb, spec.size_gb),
            ("is the disk", known.spec.disk_id, spec.disk_id),
            ("has the access mode", known.spec.access_mode, spec.access_mode),
        ):
            if old != new:
                shown = "/".join(filter(None, msgspec.structs.astuple(old))) if isinstance(old, Placement) else old
                raise UserError(
                    f"volume {known.name} exists, and {what} {shown}",
                    "volumes are not changed: use another name, or delete it first",
                    status=409,
                )
        return known

    def list_for(self, caller: Caller) -> list[VolumeRecord]:
        """Those the caller may know of."""
        return [one for one in self.rows.all() if right_on(one, caller) is not None]

    def find_for(self, name: str, caller: Caller, needed: Right) -> VolumeRecord:
        """The volume of that name; for whoever may not know of it there is none."""
        found = self.rows.get(name)
        if found is None or right_on(found, caller) is None:
            names = ", ".join(one.name for one in self.list_for(caller))[:200]
            hint = f"existing volumes: {names}; or create it" if names else "create it"
            raise UserError(
                f"there is no volume {name!r}",
                f"{hint}: podway volume create {name} --size 100GB --infra gcp/us-east5/us-east5-b",
                status=404,
            )
        require(found, caller, needed)
        return found

    async def delete(self, name: str, caller: Caller) -> None:
        """Delete a volume and what it holds; one that was registered is only forgotten."""
        record = self.find_for(name, caller, Right.MANAGE)
        try:
            record = self.rows.save(msgspec.structs.replace(record, state="deleting"))
        except Stale:
            raise _changed(name) from None
        user = self.used_by(name)
        if user is not None:
            self.rows.save(msgspec.structs.replace(record, state="ready" if record.made else "creating"))
            raise UserError(
                f"volume {name} is used by cluster {user}", f"take it down first: podway down {user}", status=409
            )
        if record.spec.disk_id is None:
            provider = self._provider(record.provider)
            if isinstance(provider, SupportsVolumes):
                await provider.delete_volume(record.spec)
        self.rows.delete(name)

    def used_by(self, name: str) -> str | None:
        """A live cluster that has the volume attached, or an open job that names it."""
        for cluster in self.store.live_clusters():
            if any(one.name == name for one in cluster.order.volumes):
                return cluster.name
            if any(name in named_volumes(job.task) for job in self.store.jobs(cluster.id, open_only=True)):
                return cluster.name
        return None

    # launching

    def attach(self, request: LaunchRequest, caller: Caller) -> LaunchRequest:
        """The request with the volumes of its tasks found, and restricted to where they are."""
        if not any(
            volume.name for task in (request.task, *(one.task for one in request.then)) for volume in task.volumes
        ):
            return request
        task = self._attach(request.task, request.options.provider, caller)
        then = tuple(
            msgspec.structs.replace(one, task=self._attach(one.task, request.options.provider, caller))
            for one in request.then
        )
        return msgspec.structs.replace(request, task=task, then=then)

    def attach_task(self, task: Task, caller: Caller) -> Task:
        """The same, of one task for a cluster that exists."""
        return self._attach(task, None, caller)

    def _attach(self, task: Task, provider: str | None, caller: Caller) -> Task:
        found: list[VolumeRecord] = []
        volumes = []
        for volume in task.volumes:
            if volume.name is not None:
                name, records = self._find(volume, volume.name, task.slices, caller)
                found += records
                assert records[0].made is not None
                directory = records[0].made.directory.removesuffix(records[0].name) + name
                inside = f"{directory}/{volume.sub_path}" if volume.sub_path else directory
                volume = msgspec.structs.replace(volume, name=name, instance_path=inside)
            volumes.append(volume)
        if not found:
            return task
        resources = tuple(_placed(one, found, provider) for one in task.resources)
        return msgspec.structs.replace(task, volumes=tuple(volumes), resources=resources)

    def _find(self, volume: Volume, name: str, slices: int, caller: Caller) -> tuple[str, list[VolumeRecord]]:
        """The first of the names that exists, for every node where each has one of its own."""
        problem: UserError | None = None
        for one in (name, *volume.alternatives):
            try:
                nodes = range(slices) if is_per_node(one) else (0,)
                return one, [self._ready(for_node(one, node), caller) for node in nodes]
            except UserError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def _ready(self, name: str, caller: Caller) -> VolumeRecord:
        record = self.find_for(name, caller, Right.USE)
        self._check_provider(record.provider)
        if record.state != "ready" or record.made is None:
            raise UserError(
                f"volume {name} is not ready: {record.state}",
                f"finish it: apply its file again, or podway volume delete {name}",
                status=409,
            )
        return record

    def of_order(self, request: LaunchRequest, order: Order) -> Order:
        """The order with what its hosts have from the start: the time to end in, buckets and volumes."""
        task, capabilities = request.task, row_of(order.provider).capabilities
        tasks = (task, *(step.task for step in request.then))
        order = with_buckets(order, tasks)
        graces = [one.stop_duration_s for one in tasks if one.stop_duration_s is not None]
        if graces and "hosts-of-image" in capabilities:
            order = msgspec.structs.replace(order, grace_s=max(graces))
        if any(one.registry is not None for one in tasks) and "hosts-of-image" in capabilities:
            order = msgspec.structs.replace(order, pull_login=True)
        if "attached-volumes" not in capabilities:
            return order
        attached: list[OrderVolume] = []
        names = list(dict.fromkeys(volume.name for volume in task.volumes if volume.name is not None))
        for name in names:
            per_node = is_per_node(name)
            for node in range(order.slices) if per_node else (0,):
                record = self.rows.get(for_node(name, node))
                if record is None or record.made is None:
                    raise _changed(for_node(name, node))
                attached.append(
                    OrderVolume(
                        name=record.name,
                        disk=record.made.disk,
                        size_gb=record.made.size_gb or 0,
                        disk_type=record.made.disk_type,
                        blank=record.spec.disk_id is None,
                        slice=node if per_node else None,
                        shared=record.made.shared,
                        read_only=all(one.read_only for one in task.volumes if one.name == name),
                    )
                )
        return msgspec.structs.replace(order, volumes=tuple(attached)) if attached else order

    def check_free(self, order: Order) -> None:
        """A disk is attached to one cluster at a time, unless many may write to it."""
        for volume in (one for one in order.volumes if not one.shared):
            user = self.used_by(volume.name)
            if user is not None:
                raise UserError(
                    f"volume {volume.name} is attached to cluster {user}",
                    f"run there (-c {user}), or take it down",
                    status=409,
                )


def named_volumes(task: Task) -> set[str]:
    """The volumes that a task names, of every node."""
    names = [volume.name for volume in task.volumes if volume.name is not None]
    return {for_node(name, node) for name in names for node in range(task.slices)}


def check_attached(order: Order, cluster: str, task: Task) -> None:
    """A task's volumes must be where the cluster is; a disk must have been attached when the cluster was made."""
    names = named_volumes(task)
    if not names:
        return
    where = {one.placement.provider for one in task.resources}
    missing = names - {one.name for one in order.volumes}
    attached = "attached-volumes" in row_of(order.provider).capabilities
    if where != {order.provider} or (attached and missing):
        raise UserError(
            f"cluster {cluster} does not have the volume {sorted(missing or names)[0]}",
            f"volumes are attached when a cluster is made: use another cluster name (-c), or podway down {cluster} first",
            status=409,
        )


def _placed(resources: Resources, found: list[VolumeRecord], provider: str | None) -> Resources:
    """The resources, where the volumes are."""
    place = resources.placement
    if provider is not None and provider != place.provider:
        place = Placement(provider=provider)
    for record in found:
        made = record.made
        assert made is not None
        there = Placement(provider=record.provider, region=made.region, zone=made.zone)
        for what, asked, has in (
            ("provider", place.provider, there.provider),
            ("region", place.region, there.region),
            ("zone", place.zone, there.zone),
        ):
            if asked and has and asked != has:
                raise UserError(
                    f"volume {record.name} is on {has}, and the run is to be on {asked}",
                    f"leave the {what} out, or name volumes that are in one place",
                )
        place = Placement(provider=there.provider, region=place.region or there.region, zone=place.zone or there.zone)
    return msgspec.structs.replace(resources, placement=place)


def _changed(name: str) -> UserError:
    return UserError(f"volume {name} was changed at the same moment", "run the command again", status=409)
