"""The methods of `Client` that are about services and gateways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podway.server.urls import query

if TYPE_CHECKING:
    from podway.gateway.report import GatewayReport, Usage
    from podway.gateway.table import RouteTable
    from podway.server.connection import ServerConnection


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
