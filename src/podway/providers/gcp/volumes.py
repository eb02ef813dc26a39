"""Volumes on Google Cloud: persistent disks that no cluster owns, and the mounting of them on hosts.

A disk is named and marked by its volume, and not by a cluster: `destroy` passes it over. It is attached when
a node is made (`render.py`), since that is when the API of TPUs attaches disks for certain.
"""

import asyncio
import re
import time
import uuid

from podway.catalog.prices import all_prices
from podway.errors import ProviderError, UserError
from podway.providers import CreatedVolume, Step
from podway.providers.gcp.account import Account
from podway.providers.gcp.api import Cloud
from podway.providers.gcp.errors import GcpError
from podway.providers.gcp.render import NEWER_DISKS, VOLUMES_AT, ident, volume_mark
from podway.providers.gcp.resources import Resource
from podway.task.volumes import VolumeSpec

READY_S = 120.0
_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+-[a-z]")
LEAST_GB, MOST_GB = 10, 65_536  # of a balanced persistent disk; a hyperdisk begins at 4


class GcpVolumes:
    """The disks of one project."""

    def __init__(self, account: Account, cloud: Cloud) -> None:
        self._account = account
        self._cloud = cloud

    async def create(self, spec: VolumeSpec) -> CreatedVolume:
        """Make the disk, or look at the one to register, and wait until it is ready."""
        self._account.check()
        zone = _zone_of(spec)
        if spec.disk_id is not None:
            path = f"projects/{self._account.project}/zones/{zone}/disks/{spec.disk_id.rpartition('/')[2]}"
        else:
            step = volume_step(spec, zone, self._account.project, self._account.owner)
            path = step.target
            try:
                await self._cloud.in_thread(self._cloud.perform, step, uuid.uuid4().hex)
            except GcpError as error:
                if error.kind != "exists":
                    raise error.as_error() from None
        return await self._ready(spec, path, zone)

    async def _ready(self, spec: VolumeSpec, path: str, zone: str) -> CreatedVolume:
        began = time.monotonic()
        while True:
            try:
                disk = await self._cloud.in_thread(self._cloud.disk, path)
            except GcpError as error:
                if error.kind == "absent" and spec.disk_id is not None:
                    raise UserError(
                        f"there is no disk {spec.disk_id} in {zone}", "see: gcloud compute disks list"
                    ) from None
                if spec.disk_id is None and error.kind == "never":  # the disk may have been made: its row must stay
                    raise ProviderError(f"the disk of volume {spec.name}: {error.what}", transient=False) from None
                if error.kind != "absent":
                    raise error.as_error() from None
                disk = None
            if (
                disk is not None
                and spec.disk_id is None
                and disk.description != volume_mark(spec.name, self._account.owner)
            ):
                raise UserError(f"{path} exists, and is not this volume's", "use another name")
            if disk is not None and disk.status == "READY":
                return CreatedVolume(
                    disk=path,
                    directory=f"{VOLUMES_AT}/{spec.name}",
                    region=zone.rpartition("-")[0],
                    zone=zone,
                    size_gb=disk.size_gb,
                    disk_type=disk.type.rpartition("/")[2] or None,
                )
            if disk is not None and disk.status == "FAILED":
                raise ProviderError(f"Google Cloud could not make the disk of volume {spec.name}")
            if time.monotonic() - began > READY_S:
                raise ProviderError(f"the disk of volume {spec.name} is not ready after {READY_S:.0f} s")
            await asyncio.sleep(1.0)

    async def delete(self, spec: VolumeSpec) -> None:
        """Delete the disk of a volume; silence when it is gone."""
        zone = _zone_of(spec)
        path = volume_step(spec, zone, self._account.project, self._account.owner).target
        try:
            await self._cloud.in_thread(self._cloud.delete, Resource(kind="disk", path=path, zone=zone, state=""))
        except GcpError as error:
            raise error.as_error() from None


def volume_step(spec: VolumeSpec, zone: str, project: str, owner: str) -> Step:
    """The call that makes a volume's disk. Pure."""
    size = spec.size_gb or 0
    if not LEAST_GB <= size <= MOST_GB:
        raise UserError(
            f"a disk of {size} GB cannot be made", f"give a size from {LEAST_GB}GB to {MOST_GB:,}GB", status=400
        )
    name = ident(owner, f"volume {spec.name}")
    return Step(
        verb="create-disk",
        target=f"projects/{project}/zones/{zone}/disks/{name}",
        body={
            "name": name,
            "description": volume_mark(spec.name, owner),
            "sizeGb": str(size),
            "type": f"zones/{zone}/diskTypes/{spec.disk_type or usual_type(zone)}",
            "labels": {
                "podway-owner": owner,
                "podway-volume": name.removeprefix("volume-").rpartition("-")[0] or "volume",
            },
        },
    )


def usual_type(zone: str) -> str:
    """The kind of disk that the TPUs of a zone take: newer ones take hyperdisks alone, and no older one takes those."""
    kinds = {price.generation for price in all_prices() if price.zone == zone}
    return "hyperdisk-balanced" if kinds and kinds <= NEWER_DISKS else "pd-balanced"


def _zone_of(spec: VolumeSpec) -> str:
    """A disk is in one zone."""
    place = spec.placement
    if place.zone:
        if not _ZONE.fullmatch(place.zone):  # it becomes part of an address
            raise UserError(f"{place.zone!r} is not a zone", "name one as Google Cloud does: us-east5-b")
        return place.zone
    zones = sorted({price.zone for price in all_prices() if price.zone and price.zone.startswith(f"{place.region}-")})
    if place.region and len(zones) == 1:
        return zones[0]
    where = f"region {place.region}" if place.region else "Google Cloud"
    why = f"and {where} has several" if zones or not place.region else f"and {where} has none with TPUs"
    known = ", ".join(zones) or "availability_zone in the file, or --infra gcp/us-east5/us-east5-b"
    raise UserError(f"volume {spec.name}: a disk is in one zone, {why}", f"name one: {known}")
