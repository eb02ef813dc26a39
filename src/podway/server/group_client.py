"""The methods of `Client` that are about job groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from podway.launch_options import with_request_id
from podway.server.urls import quote

if TYPE_CHECKING:
    from podway.server.connection import ServerConnection
    from podway.server.group_api import GroupTaskBody, GroupView


class GroupCalls:
    """A base of `Client`: see there."""

    _connection: ServerConnection

    def groups(self) -> list[GroupView]:
        """Job groups: open ones, and those that ended within a week."""
        from podway.server.group_api import GroupsReply  # few commands need it

        return self._connection.call("GET", "/v1/groups", GroupsReply).groups

    def group(self, name: str) -> GroupView:
        """One job group."""
        from podway.server.group_api import GroupView

        return self._connection.call("GET", f"/v1/groups/{quote(name)}", GroupView)

    def launch_group(self, name: str, tasks: tuple[GroupTaskBody, ...]) -> GroupView:
        """Launch a cluster for each task, and run all when every host is up; their files have been uploaded."""
        from podway.server.group_api import GroupBody, GroupView

        self._connection.match_environment()
        body = GroupBody(tasks=tuple(replace(one, request=with_request_id(one.request)) for one in tasks))
        return self._connection.call("PUT", f"/v1/groups/{quote(name)}", GroupView, body)

    def cancel_group(self, name: str) -> GroupView:
        """Cancel every job of a group."""
        from podway.server.group_api import GroupView

        return self._connection.call("POST", f"/v1/groups/{quote(name)}/cancel", GroupView)
