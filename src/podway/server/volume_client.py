"""The methods of `Client` that are about volumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podway.server.urls import quote

if TYPE_CHECKING:
    from podway.server.connection import ServerConnection
    from podway.server.volume_api import VolumeView
    from podway.task.volumes import VolumeSpec


class VolumeCalls:
    """A base of `Client`: see there."""

    _connection: ServerConnection

    def volumes(self) -> list[VolumeView]:
        """Volumes you may use."""
        from podway.server.volume_api import VolumesReply  # few commands need it

        return self._connection.call("GET", "/v1/volumes", VolumesReply).volumes

    def create_volume(self, spec: VolumeSpec, *, project: str | None = None) -> VolumeView:
        """Create a volume, or register an existing disk; returns when it is ready."""
        from podway.server.volume_api import VolumeBody, VolumeView

        self._connection.match_environment()
        body = VolumeBody(spec=spec, project=project)
        return self._connection.call("PUT", f"/v1/volumes/{quote(spec.name)}", VolumeView, body)

    def delete_volume(self, name: str) -> None:
        """Delete a volume and what it holds; one that was registered is only forgotten."""
        from podway.server.volume_api import VolumesReply

        self._connection.call("DELETE", f"/v1/volumes/{quote(name)}", VolumesReply)
