"""The routes of services and gateways: a part of the table in `routes.py`."""

from podway.gateway.report import GatewayReport
from podway.server import gateway_routes, service_api
from podway.server.routing import Route

SERVICE_ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path="/v1/gateway/routes",
        function=gateway_routes.routes,
        access="gateway",
        summary="Routes of the gateway",
        reply=service_api.RoutesReply,
        query={"after": int, "wait": float},
    ),
    Route(
        method="POST",
        path="/v1/gateway/report",
        function=gateway_routes.report,
        access="gateway",
        summary="What a gateway saw",
        body=GatewayReport,
        reply=service_api.GatewayReportReply,
    ),
    Route(
        method="GET",
        path="/v1/usage",
        function=gateway_routes.usage,
        access="anyone",
        summary="Usage of services",
        reply=service_api.ModelUsageReply,
        query={"since": str},
    ),
)
