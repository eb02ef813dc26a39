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
        method="POST",
        path="/v1/gateway/keys",
        function=gateway_routes.make_key,
        access="create",
        audited=True,
        summary="Make a key for services",
        body=service_api.GatewayKeyBody,
        reply=service_api.GatewayKeyReply,
    ),
    Route(
        method="GET",
        path="/v1/gateway/keys",
        function=gateway_routes.keys,
        access="anyone",
        summary="Keys for services",
        reply=service_api.GatewayKeysReply,
    ),
    Route(
        method="DELETE",
        path="/v1/gateway/keys/{key}",
        function=gateway_routes.delete_key,
        access="anyone",
        audited=True,
        summary="Delete a key for services",
        reply=service_api.GatewayKeysReply,
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
