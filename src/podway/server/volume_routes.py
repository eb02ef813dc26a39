"""The functions of the routes about volumes."""

from podway.catalog.disks import disk_hourly_cost
from podway.control.access import Right
from podway.control.volume_store import VolumeRecord
from podway.control.volumes import VolumeControl
from podway.errors import UserError
from podway.server.routing import ApiCall
from podway.server.volume_api import VolumeBody, VolumesReply, VolumeView


def volumes(call: ApiCall) -> VolumesReply:
    """Volumes you may use; all of them, for an administrator."""
    verbs = call.services.control.volumes
    return VolumesReply(volumes=[_view(verbs, one) for one in verbs.list_for(call.caller)])


async def create_volume(call: ApiCall) -> VolumeView:
    """Create the volume of the path, or register an existing disk under its name; the same again goes on with it."""
    body: VolumeBody = call.body
    if body.spec.name != call.path["volume"]:
        raise UserError("the body is of another volume than the path", "give both the same name")
    verbs = call.services.control.volumes
    record = await verbs.create(body.spec, call.caller, body.project)
    return await call.in_thread(lambda: _view(verbs, record))


async def delete_volume(call: ApiCall) -> VolumesReply:
    """Delete a volume and what it holds; one that was registered is only forgotten."""
    verbs, name = call.services.control.volumes, call.path["volume"]
    await call.in_thread(lambda: verbs.find_for(name, call.caller, Right.MANAGE))
    await verbs.delete(name, call.caller)
    return await call.in_thread(lambda: volumes(call))


def _hourly_cost(record: VolumeRecord) -> float | None:
    """A disk bills from when it is asked for; a directory of a host costs nothing of its own."""
    made = record.made
    size = made.size_gb if made else record.spec.size_gb
    return 0.0 if size is None else disk_hourly_cost(made.disk_type if made else None, size)


def _view(verbs: VolumeControl, record: VolumeRecord) -> VolumeView:
    made, place = record.made, record.spec.placement
    return VolumeView(
        name=record.name,
        user=record.user,
        project=record.project,
        provider=record.provider,
        region=made.region if made else place.region,
        zone=made.zone if made else place.zone,
        size_gb=made.size_gb if made else record.spec.size_gb,
        disk_type=made.disk_type if made else None,
        disk=made.disk if made else None,
        registered=record.spec.disk_id is not None,
        state=record.state,
        used_by=verbs.used_by(record.name),
        created=record.created,
        hourly_cost=_hourly_cost(record),
    )
