"""The table that gateways route by, from services, their replicas and who holds which token. Pure.

Its version names its content, so that every server on one database gives the same table the same version, before and after a
restart: a gateway that has this version has this table.
"""

import hashlib
from collections.abc import Callable, Iterable

import msgspec

from podway.certificates import TlsKeyPair
from podway.control.access import Caller, Right, right_on
from podway.control.gateway_keys import GatewayKey
from podway.control.service_records import Replica, Service
from podway.control.traffic import taking_traffic
from podway.gateway.table import ApiKey, Backend, RequestLimit, RoutedService, RouteTable
from podway.task.task import RateLimit, Scaling, ServiceSpec

VERSION_SHIFT = 64 - 39  # a version has at most 12 digits, as every number in a query
HOLD_S = 30.0  # how long a request waits for a replica where there is one to come soon
HOLD_FROM_ZERO_S = 300.0  # and of a service that is scaled to zero: a first replica takes its time


def direct_address(replica: Replica) -> str | None:
    """The address that the host of a replica has, if it has one yet."""
    if replica.host is None:
        return None
    host = replica.host.external_address or replica.host.address
    return f"[{host}]:{replica.port}" if ":" in host else f"{host}:{replica.port}"


def route_table(
    services: Iterable[Service],
    replicas: Iterable[Replica],
    holders: Iterable[tuple[str, Caller]],
    address: Callable[[Replica], str | None] = direct_address,
    gateway_keys: Iterable[tuple[GatewayKey, Caller]] = (),
    tunnel: Callable[[Replica], str] = lambda _: "",
    tls: Callable[[Service], TlsKeyPair | None] = lambda _: None,
) -> RouteTable:
    """`holders`: the digest of each token, and whose it is. `address`, `tunnel`: how a replica is reached. `gateway_keys`: with owners.

    `tls`: the key pair of a service's endpoint.
    """
    known = [service for service in services if service.live and service.goal == "up"]
    own: dict[str, list[Replica]] = {service.id: [] for service in known}
    for replica in replicas:
        if replica.service_id in own:
            own[replica.service_id].append(replica)
    routed = tuple(
        _routed(service, taking_traffic(service, own[service.id]), address, tunnel, tls(service))
        for service in sorted(known, key=lambda one: one.name)
    )
    keys = {digest: _key(caller, known) for digest, caller in sorted(holders)}
    for one, owner in sorted(gateway_keys, key=lambda pair: pair[0].digest):
        keys[one.digest] = _limited(one, _key(owner, known))
    table = RouteTable(services=routed, keys={digest: key for digest, key in keys.items() if key is not None})
    content = hashlib.sha256(msgspec.json.encode(table)).digest()
    return msgspec.structs.replace(table, version=int.from_bytes(content[:8], "big") >> VERSION_SHIFT)


def _routed(
    service: Service,
    ready: list[Replica],
    address: Callable[[Replica], str | None],
    tunnel: Callable[[Replica], str],
    tls: TlsKeyPair | None,
) -> RoutedService:
    spec = service.spec
    weights = _weights(service, ready)
    reached = [(replica, address(replica)) for replica in sorted(ready, key=lambda one: one.number)]
    return RoutedService(
        name=service.name,
        backends=tuple(
            Backend(
                id=one.id, address=at, tunnel=tunnel(one), weight=weights.get(one.revision, 1.0), revision=one.revision
            )
            for one, at in reached
            if at is not None and weights.get(one.revision, 1.0) > 0
        ),
        model=spec.model.name if spec.model else None,
        model_prefix=spec.model.prefix if spec.model else "/v1",
        format=spec.model.format if spec.model else "openai",
        chat_template=spec.model.chat_template if spec.model else None,
        eos_token=spec.model.eos_token if spec.model else None,
        auth=spec.auth,
        strip_prefix=spec.strip_prefix,
        limits=tuple(_limit(one) for one in spec.rate_limits),
        hold_s=HOLD_FROM_ZERO_S if any(one.min_replicas == 0 for one in _scalings(spec)) else HOLD_S,
        created=service.created,
        tls=tls,
    )


def _scalings(spec: ServiceSpec) -> list[Scaling]:
    return [one.scaling for one in spec.groups] or [spec.scaling]


def _weights(service: Service, ready: list[Replica]) -> dict[int, float]:
    """By revision: while there is a canary, its replicas together have its share of the traffic."""
    if service.canary is None:
        return {}
    canaries = sum(replica.revision == service.canary for replica in ready)
    others = len(ready) - canaries
    if not canaries or not others:
        return {}
    share = min(max(service.canary_share, 0.0), 0.99)
    return {service.canary: round(share / canaries / ((1 - share) / others), 6)}


def _limit(one: RateLimit) -> RequestLimit:
    return RequestLimit(prefix=one.prefix, header=one.header, rps=one.rps, burst=one.burst)


def _limited(key: GatewayKey, owners: ApiKey | None) -> ApiKey | None:
    """What a key opens: of what its owner may use, what it names."""
    if owners is None:
        return None
    names = owners.services
    if key.services is not None:
        names = tuple(name for name in key.services if owners.services is None or name in owners.services)
    return ApiKey(
        user=key.label,
        services=names,
        requests_per_minute=key.requests_per_minute,
        tokens_per_day=key.tokens_per_day,
    )


def _key(caller: Caller, services: list[Service]) -> ApiKey | None:
    """What a token opens; None: nothing."""
    if caller.admin:
        return ApiKey(user=caller.user, admin=True)
    names = tuple(sorted(one.name for one in services if (right_on(one, caller) or 0) >= Right.USE))
    return ApiKey(user=caller.user, services=names) if names else None
