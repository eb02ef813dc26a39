"""The methods of `Client` that are about services and gateways."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import msgspec

from podway.server.urls import query, quote

if TYPE_CHECKING:
    from podway.gateway.report import GatewayReport
    from podway.gateway.table import RouteTable
    from podway.launch_options import LaunchRequest
    from podway.server import page_api, service_api
    from podway.server.api import EventView
    from podway.server.connection import ServerConnection
    from podway.server.service_api import GatewayKeyView

EVENTS_IN_A_REPLY = 500  # as many as the server sends at once


class ServiceCalls:
    """A base of `Client`: see there."""

    _connection: ServerConnection

    # services

    def preview_service(self, request: LaunchRequest) -> service_api.ServicePreviewReply:
        """What `apply_service` would do: the difference to the service there is, and the offers for a new replica."""
        from podway.server.service_api import ServicePreviewReply  # few commands need it

        self._connection.match_environment()
        return self._connection.call("POST", "/v1/services/preview", ServicePreviewReply, request)

    def apply_service(self, request: LaunchRequest, *, canary: float | None = None) -> service_api.ApplyReply:
        """Make a service or update the one of that name; its files have been uploaded. Returns at once."""
        from podway.server.service_api import ApplyBody, ApplyReply

        request = msgspec.structs.replace(request, request_id=request.request_id or os.urandom(8).hex())
        self._connection.match_environment()
        return self._connection.call("POST", "/v1/services", ApplyReply, ApplyBody(request=request, canary=canary))

    def services(self) -> list[service_api.ServiceView]:
        """Services that exist."""
        from podway.server.service_api import ServicesReply

        return self._connection.call("GET", "/v1/services", ServicesReply).services

    def service(self, name: str, *, past: bool = False) -> service_api.ServiceView:
        """One service; with `past`, replicas that ended too."""
        from podway.server.service_api import ServiceView

        return self._connection.call("GET", f"{_at(name)}?{query({'past': past})}", ServiceView)

    def scale_service(
        self, name: str, low: int, high: int | None = None, group: str | None = None
    ) -> service_api.ServiceView:
        """Keep this many replicas, or a range of them; `group`: of which group, in a service that has groups."""
        from podway.server.service_api import ScaleBody, ServiceView

        body = ScaleBody(min_replicas=low, max_replicas=low if high is None else high, group=group)
        return self._connection.call("POST", f"{_at(name)}/scale", ServiceView, body)

    def set_canary(self, name: str, share: float | None = None) -> service_api.ServiceView:
        """Give the canary another share of the traffic; None promotes it to all replicas."""
        from podway.server.service_api import CanaryBody, ServiceView

        return self._connection.call("POST", f"{_at(name)}/canary", ServiceView, CanaryBody(share=share))

    def rollback_service(self, name: str, revision: int | None = None) -> service_api.ServiceView:
        """Back to a revision; None: from the canary, or to the revision before."""
        from podway.server.service_api import RollbackBody, ServiceView

        return self._connection.call("POST", f"{_at(name)}/rollback", ServiceView, RollbackBody(revision=revision))

    def share_service(
        self, name: str, user: str, right: Literal["view", "use"] | None = "use"
    ) -> service_api.ServiceView:
        """Let a person view or use a service (send it requests, with a key of theirs), or (None) no longer."""
        from podway.server.api import GrantBody
        from podway.server.service_api import ServiceView

        path = f"{_at(name)}/grants/{quote(user)}"
        if right is None:
            return self._connection.call("DELETE", path, ServiceView)
        return self._connection.call("PUT", path, ServiceView, GrantBody(right=right))

    def end_service(self, name: str) -> service_api.ServiceView:
        """End a service and delete its replicas; returns at once."""
        from podway.server.service_api import ServiceView

        return self._connection.call("DELETE", _at(name), ServiceView)

    def service_load(self, name: str, seconds: float = 900.0) -> list[page_api.LoadPoint]:
        """What gateways saw of a service over the last seconds: requests, TTFT and TPOT percentiles, what waits; oldest first."""
        from podway.server.page_api import ServiceLoadReply

        path = f"{_at(name)}/load?{query({'seconds': seconds})}"
        return self._connection.call("GET", path, ServiceLoadReply).points

    def service_events(self, name: str, after: int = 0) -> list[EventView]:
        """A service's history after an event id, oldest first."""
        from podway.server.service_api import ServiceEventsReply

        found: list[EventView] = []
        while True:
            page = self._connection.call("GET", f"{_at(name)}/events?after={after}", ServiceEventsReply).events
            found += page
            if len(page) < EVENTS_IN_A_REPLY:
                return found
            after = page[-1].id

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

    def usage_by_day(self, since: str = "") -> list[service_api.ModelUsageView]:
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


def _at(service: str) -> str:
    return f"/v1/services/{quote(service)}"
