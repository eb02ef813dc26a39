"""The types of the API that are about volumes."""

import msgspec

from podway.task.volumes import VolumeSpec


class VolumeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A volume to create or register."""

    spec: VolumeSpec
    project: str | None = None


class VolumeView(msgspec.Struct, frozen=True, kw_only=True):
    """One volume."""

    name: str
    user: str
    project: str | None
    provider: str
    region: str | None
    zone: str | None
    size_gb: int | None
    disk_type: str | None  # in the provider's words
    disk: str | None  # what the provider calls it
    registered: bool  # it existed before, and stays when the volume is deleted here
    state: str  # creating, ready or deleting
    used_by: str | None  # a cluster
    created: float
    hourly_cost: float | None = None  # dollars, by published prices; None: unknown, 0: it costs nothing


class VolumesReply(msgspec.Struct, frozen=True, kw_only=True):
    """Volumes."""

    volumes: list[VolumeView]
