"""The methods of `Client` that are about schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podway.server.urls import quote

if TYPE_CHECKING:
    from podway.launch_options import LaunchRequest
    from podway.server.connection import ServerConnection
    from podway.server.schedule_api import ScheduleView


class ScheduleCalls:
    """A base of `Client`: see there."""

    _connection: ServerConnection

    def schedules(self) -> list[ScheduleView]:
        """Runs that start by the clock; the one that is due next first."""
        from podway.server.schedule_api import SchedulesReply  # few commands need it

        return self._connection.call("GET", "/v1/schedules", SchedulesReply).schedules

    def put_schedule(self, request: LaunchRequest) -> ScheduleView:
        """Start a run at the times its task names, or replace the schedule of that name; its files have been uploaded."""
        from podway.server.schedule_api import ScheduleView

        self._connection.match_environment()
        return self._connection.call("POST", "/v1/schedules", ScheduleView, request)

    def delete_schedule(self, name: str) -> None:
        """End a schedule; a run that it started goes on."""
        from podway.server.schedule_api import SchedulesReply

        self._connection.call("DELETE", f"/v1/schedules/{quote(name)}", SchedulesReply)
