"""The functions of the routes that gateways call: learn the routes, and report what was seen."""

import asyncio
import time

from podway.control.route_table import route_table
from podway.control.service_records import GatewayInfo
from podway.control.service_store import ROUTES
from podway.gateway.report import GatewayReport
from podway.gateway.table import RouteTable
from podway.server.routing import ApiCall
from podway.server.service_api import GatewayReportReply, ModelUsageReply, RoutesReply

LONGEST_WAIT_S = 60.0
LOOK_S = 2.0  # how soon a change of tokens is seen, and what another server on the same database wrote


def _table(call: ApiCall) -> RouteTable:
    rows = call.services.store.services
    return route_table(rows.live(), rows.open_replicas(), call.services.tokens.holders())


async def routes(call: ApiCall) -> RoutesReply:
    """The table of routes, once it is another than version `after`, or after `wait` seconds."""
    deadline = time.monotonic() + min(call.query.get("wait", 0.0), LONGEST_WAIT_S)
    after, notifier = call.query.get("after"), call.services.notifier
    while True:
        seen = notifier.tick(ROUTES)
        table = await call.in_thread(lambda: _table(call))
        left = deadline - time.monotonic()
        if table.version != after or left <= 0:
            return RoutesReply(table=table)
        await notifier.wait(ROUTES, seen, min(left, LOOK_S))
        await asyncio.sleep(0)  # many writes at once must not keep the loop from others


def report(call: ApiCall) -> GatewayReportReply:
    """What a gateway saw of each service, and what people used; a report sent twice counts once."""
    body: GatewayReport = call.body
    rows = call.services.store.services
    known = GatewayInfo(id=body.gateway, url=body.url, seen=time.time(), sequence=body.sequence)
    accepted, names = rows.add_report(known, body.services, body.usage)
    for service in rows.live() if any(load.arrived or load.waiting for load in body.services) else ():
        if service.name in names:
            call.services.control.wake(service.id)
    return GatewayReportReply(accepted=accepted)


def usage(call: ApiCall) -> ModelUsageReply:
    """What was used of services since a day (`2026-11-16`): everybody's for an administrator, else the caller's own."""
    since, caller = call.query.get("since", ""), call.caller
    return ModelUsageReply(usage=call.services.store.services.usage(since, None if caller.admin else caller.user))
