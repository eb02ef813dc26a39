"""The methods of `Client` that are about services and gateways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podway.server.urls import query, quote

if TYPE_CHECKING:
    from podway.gateway.report import GatewayReport, Usage
    from podway.gateway.table import RouteTable
    from podway.server.connection import ServerConnection
    from podway.server.service_api import GatewayKeyView


class ServiceCalls:
    """A base of `Client`: see there."""

    _connection: ServerConnection

    # gateways

    def gateway_routes(self, after: int | None = None, wait: float = 0.0) -> RouteTable:
        """The table of routes: once it is another than version `after`, or as it is after `wait` seconds."""
        from podway.server.service_api import RoutesReply  # few commands need it

        path = f"/v1/gateway/routes?{query({'after': after, 'wait': wait})}"
        return self._connection.call("GET", path, RoutesReply).table

    def gateway_report(self, report: GatewayReport) -> bool:
        """Tell the server what a gateway saw; False for a report that it had already."""
        from podway.server.service_api import GatewayReportReply

        return self._connection.call("POST", "/v1/gateway/report", GatewayReportReply, report).accepted

    def usage_by_day(self, since: str = "") -> list[Usage]:
        """What was used of services since a day (`2026-11-16`): yours, or everybody's for an administrator."""
        from podway.server.service_api import ModelUsageReply

        return self._connection.call("GET", f"/v1/usage?{query({'since': since})}", ModelUsageReply).usage

    def make_gateway_key(
        self,
        name: str,
        *,
        user: str | None = None,
        services: tuple[str, ...] | None = None,
        requests_per_minute: float | None = None,
        tokens_per_day: int | None = None,
        lifetime_s: float | None = None,
    ) -> str:
        """A key that opens services and nothing else; it is shown once. For somebody else: as an administrator."""
        from podway.server.service_api import GatewayKeyBody, GatewayKeyReply

        body = GatewayKeyBody(
            name=name,
            user=user,
            services=services,
            requests_per_minute=requests_per_minute,
            tokens_per_day=tokens_per_day,
            lifetime_s=lifetime_s,
        )
        return self._connection.call("POST", "/v1/gateway/keys", GatewayKeyReply, body).key

    def gateway_keys(self) -> list[GatewayKeyView]:
        """Your keys for services; everybody's, for an administrator."""
        from podway.server.service_api import GatewayKeysReply

        return self._connection.call("GET", "/v1/gateway/keys", GatewayKeysReply).keys

    def delete_gateway_key(self, key_id: str) -> None:
        """A key, by its id, opens nothing any more."""
        from podway.server.service_api import GatewayKeysReply

        self._connection.call("DELETE", f"/v1/gateway/keys/{quote(key_id)}", GatewayKeysReply)
