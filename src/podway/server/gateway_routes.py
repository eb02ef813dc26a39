"""The functions of the routes about the gateway: it learns the routes and reports what it saw; people make keys and see usage."""

import asyncio
import time

import msgspec

from podway.control.endpoint_certificates import open_pair
from podway.control.route_table import route_table
from podway.control.service_records import GatewayInfo, Replica
from podway.control.service_store import ROUTES
from podway.control.usage_costs import usage_costs
from podway.errors import ProviderError, UserError
from podway.gateway.report import GatewayReport
from podway.gateway.table import RouteTable
from podway.server.gateway_chat import page_keys
from podway.server.people_routes import checked_name
from podway.server.routing import ApiCall
from podway.server.service_api import (
    GatewayKeyBody,
    GatewayKeyReply,
    GatewayKeysReply,
    GatewayKeyView,
    GatewayReportReply,
    ModelUsageReply,
    ModelUsageView,
    RoutesReply,
)
from podway.server.tunnels import tunnel_route

LONGEST_WAIT_S = 60.0
LOOK_S = 2.0  # how soon a change of tokens is seen, and what another server on the same database wrote


def _table(call: ApiCall) -> RouteTable:
    store, tokens, now = call.services.store, call.services.tokens, time.time()
    rows = store.services
    keys = [key for key in store.gateway_keys.all() if key.expires is None or key.expires > now]
    owned = [(key, tokens.owner(key.user)) for key in keys]
    holders = tokens.holders()
    holders += page_keys(call.services.control.vault, [caller for _, caller in holders])
    table = route_table(
        rows.live(),
        rows.open_replicas(),
        holders,
        gateway_keys=owned,
        tunnel=lambda one: _tunnel(call, one),
        tls=lambda one: open_pair(call.services.control.vault, one),
    )
    day, spent = time.strftime("%Y-%m-%d", time.gmtime(now)), dict[str, int]()
    limited = {key.user for key in table.keys.values() if key.tokens_per_day is not None}
    for used in rows.usage(day) if limited else ():
        if used.user in limited and used.day == day:
            spent[used.user] = spent.get(used.user, 0) + used.prompt_tokens + used.completion_tokens
    return msgspec.structs.replace(table, day=day, spent=spent)


def _tunnel(call: ApiCall, replica: Replica) -> str:
    """How a gateway reaches the host of a replica; empty: at its address."""
    cluster = call.services.store.cluster(replica.cluster_id or "")
    if cluster is None or replica.host is None:
        return ""
    try:
        return tunnel_route(call.services.provider(cluster.order.provider), replica.host)
    except (UserError, ProviderError):
        return ""  # its pool or account is not there any more: the address is all that is left


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
    since, caller, store = call.query.get("since", ""), call.caller, call.services.store
    found = store.services.usage(since)
    costs = usage_costs(store, found, time.time())
    own = [
        (row, cost)
        for row, cost in zip(found, costs, strict=True)
        if caller.admin or row.user == caller.user or row.user.startswith(f"{caller.user}/")
    ]
    return ModelUsageReply(usage=[ModelUsageView(**{**msgspec.structs.asdict(row), "cost": cost}) for row, cost in own])


def make_key(call: ApiCall) -> GatewayKeyReply:
    """A key that opens services, shown this once; for somebody else, by an administrator."""
    body: GatewayKeyBody = call.body
    user = body.user or call.caller.user
    if user != call.caller.user and not call.caller.admin:
        raise UserError(f"{call.caller.user} may not make keys for {user}", "make one of your own", status=403)
    checked_name(user, "user")
    checked_name(body.name, "key name")
    lifetime = body.lifetime_s
    made = call.services.store.gateway_keys.add(
        user,
        body.name,
        lifetime,
        services=body.services,
        requests_per_minute=body.requests_per_minute,
        tokens_per_day=body.tokens_per_day,
    )
    if made is None:
        hint = "delete it first, or choose another name"
        raise UserError(f"{user} has a key called {body.name!r} already", hint, status=409)
    call.services.notifier.publish(ROUTES)
    return GatewayKeyReply(user=user, name=body.name, key=made)


def keys(call: ApiCall) -> GatewayKeysReply:
    """Your keys; everybody's, for an administrator."""
    caller = call.caller
    rows = [row for row in call.services.store.gateway_keys.all() if caller.admin or row.user == caller.user]
    fields = set(GatewayKeyView.__struct_fields__) - {"id"}
    shown = [{name: value for name, value in msgspec.structs.asdict(row).items() if name in fields} for row in rows]
    return GatewayKeysReply(keys=[GatewayKeyView(id=row.id, **one) for row, one in zip(rows, shown, strict=True)])


def delete_key(call: ApiCall) -> GatewayKeysReply:
    """A key opens nothing any more: your own, or anybody's for an administrator."""
    store, found = call.services.store.gateway_keys, call.path["key"]
    row = next((row for row in store.all() if row.id == found), None)
    if row is None or not (call.caller.admin or row.user == call.caller.user):
        raise UserError(f"there is no key {found!r}", "see: podway gateway keys list", status=404)
    store.delete(row.digest)
    call.services.notifier.publish(ROUTES)
    return keys(call)
