"""The server as a gateway asks it: at a fixed address, or wherever the server of this machine is at the moment.

A gateway outlives restarts of the server, and this machine's own has another address and token after each; so they are read again
for every question. It is never started from here: a server that was stopped stays so.
"""

from pathlib import Path

import msgspec

from podway.errors import UserError
from podway.gateway.report import GatewayReport
from podway.gateway.table import RouteTable
from podway.server.async_client import AsyncClient


class GatewaySource:
    """A `ControlServer` of the gateway."""

    def __init__(self, place: Path, url: str | None = None, token: str | None = None, *, own: bool = False) -> None:
        """`own`: this machine's own server, also where commands go to a team's."""
        self._place = place
        self._own = own
        self._fixed = (url, token or "") if url else None
        self._client: tuple[tuple[str, str], AsyncClient] | None = None

    async def gateway_routes(self, after: int | None = None, wait: float = 0.0) -> RouteTable:
        """The table of routes."""
        return await self._current().gateway_routes(after, wait)

    async def gateway_report(self, report: GatewayReport) -> bool:
        """What the gateway saw."""
        return await self._current().gateway_report(report)

    def _current(self) -> AsyncClient:
        address = self._fixed or self._known()
        if self._client is None or self._client[0] != address:
            self._client = (address, AsyncClient(*address, retry_s=0.0))
        return self._client[1]

    def _known(self) -> tuple[str, str]:
        remote = self._place / "remote.json"
        path = remote if remote.exists() and not self._own else self._place / "server.json"
        try:
            found = msgspec.json.decode(path.read_bytes())
            return str(found["url"]), str(found["token"])
        except (OSError, msgspec.DecodeError, KeyError, TypeError):
            hint = "start it: podway server start"
            raise UserError("no Podway server runs on this machine", hint, status=503) from None
