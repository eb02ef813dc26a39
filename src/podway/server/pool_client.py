"""The methods of `Client` that are about pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podway.launch_options import with_request_id
from podway.server.urls import quote

if TYPE_CHECKING:
    from podway.launch_options import LaunchRequest
    from podway.server.connection import ServerConnection
    from podway.server.pool_api import PoolView
    from podway.task.pools import PoolSize


class PoolCalls:
    """A base of `Client`: see there."""

    _connection: ServerConnection

    def pools(self) -> list[PoolView]:
        """Pools of workers, by name."""
        from podway.server.pool_api import PoolsReply  # few commands need it

        return self._connection.call("GET", "/v1/pools", PoolsReply).pools

    def pool(self, name: str) -> PoolView:
        """One pool, with its latest jobs."""
        from podway.server.pool_api import PoolView

        return self._connection.call("GET", f"/v1/pools/{quote(name)}", PoolView)

    def apply_pool(self, name: str, size: PoolSize, request: LaunchRequest | None = None) -> PoolView:
        """Make a pool of workers or change it; without a request only its size. The files have been uploaded."""
        from podway.server.pool_api import PoolBody, PoolView

        self._connection.match_environment()
        body = PoolBody(size=size, request=request)
        return self._connection.call("PUT", f"/v1/pools/{quote(name)}", PoolView, body)

    def submit_to_pool(self, name: str, request: LaunchRequest, count: int = 1) -> list[int]:
        """Queue jobs for free workers, the same task `count` times; their numbers in the pool."""
        from podway.server.pool_api import PoolJobsBody, PoolJobsReply

        body = PoolJobsBody(request=with_request_id(request), count=count)
        return self._connection.call("POST", f"/v1/pools/{quote(name)}/jobs", PoolJobsReply, body).jobs

    def cancel_pool_jobs(self, name: str, jobs: tuple[int, ...] = ()) -> list[int]:
        """Cancel these jobs of a pool, or all that are open; their numbers."""
        from podway.server.pool_api import PoolCancelBody, PoolJobsReply

        body = PoolCancelBody(jobs=jobs)
        return self._connection.call("POST", f"/v1/pools/{quote(name)}/cancel", PoolJobsReply, body).jobs

    def end_pool(self, name: str) -> None:
        """Take down a pool's workers, and forget it when they are gone."""
        from podway.server.pool_api import PoolsReply

        self._connection.call("DELETE", f"/v1/pools/{quote(name)}", PoolsReply)
