"""What the gateway may do: services with their replicas, and who may use them. Frozen; a change is a new table.

The server makes the table and the gateway only reads it, from the server or, while that is away, from the file that keeps the
last one. API keys are known by their SHA-256 alone, and the private keys of endpoints are kept apart and sealed, so the file holds nothing
that opens a door.
"""

import hashlib
import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from podway.certificates import TlsKeyPair


class Backend(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica that takes traffic."""

    id: str
    address: str  # 'host:port', or 'unix:/path' of a socket that leads to it
    # How its port is reached where the address is not (JSON, `server/tunnels.py`), for gateways that may. The key is as older ones know it.
    tunnel: str = msgspec.field(default="", name="ssh")
    weight: float = 1.0  # share of traffic beside the others; a canary has less than 1
    revision: int = 1

    @property
    def place(self) -> str:
        """Where connections to it lead; private addresses may be those of two hosts."""
        return f"{self.address} {self.tunnel}" if self.tunnel else self.address

    @property
    def port(self) -> int:
        """Of its address; 0 for a socket's path."""
        text = self.address.rpartition(":")[2]
        return int(text) if text.isdigit() else 0


class RequestLimit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """At most `rps` requests a second under a path, for each client address or value of a header."""

    prefix: str = "/"  # of the path as the service sees it; of several that fit, the longest counts
    header: str | None = None  # None: by the client's address
    rps: float
    burst: int = 0


class RoutedService(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One service: how requests find it, and the replicas behind it."""

    name: str
    backends: tuple[Backend, ...] = ()
    model: str | None = None  # requests of the OpenAI API that name it come here
    model_prefix: str = "/v1"  # where the replica has its OpenAI API
    format: Literal["openai", "tgi"] = "openai"  # what the replica speaks; tgi with a template: translated (tgi.py)
    chat_template: str | None = None
    eos_token: str | None = None
    hosts: tuple[str, ...] = ()  # host names that stand for it
    auth: bool = True
    strip_prefix: bool = True
    limits: tuple[RequestLimit, ...] = ()
    hold_s: float = 0.0  # how long a request waits for a first replica; 0: it is refused at once
    created: float = 0.0
    tls: TlsKeyPair | None = None  # it takes https only, with this pair


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who has a key, and how much of what they may use."""

    user: str
    admin: bool = False  # may read /metrics from anywhere
    services: tuple[str, ...] | None = None  # None: all
    requests_per_minute: float | None = None
    tokens_per_day: int | None = None


class RouteTable(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at once; `version` names this content, and another table has another one (but for what was spent)."""

    version: int = 0
    day: str = ""  # of `spent`, as 2026-11-16 (UTC)
    spent: dict[str, int] = {}  # tokens that keys with a budget have used on that day, through all gateways
    services: tuple[RoutedService, ...] = ()
    keys: dict[str, ApiKey] = {}  # SHA-256 of the key, in hex


class Routes:
    """A table with its indexes: what each request looks up."""

    def __init__(self, table: RouteTable = RouteTable()) -> None:
        self.table = table
        services = [_usable(service) for service in table.services]
        self.by_name = {service.name: service for service in services}
        self.by_host = {host.lower(): service for service in services for host in service.hosts}
        # Of two services with the same model the newest answers, as people expect after a second deployment.
        newest = sorted(services, key=lambda service: service.created)
        self.by_model = {service.model: service for service in newest if service.model}

    def key(self, token: str) -> ApiKey | None:
        """Who holds this key."""
        return self.table.keys.get(digest(token))

    def models(self, key: ApiKey | None) -> Iterator[RoutedService]:
        """The services with a model that this caller may use."""
        return (one for one in self.by_model.values() if allows(one, key))


LONGEST_HOLD_S = 3600.0


def _usable(service: RoutedService) -> RoutedService:
    """Without what cannot be used, whoever wrote it: addresses that are none, weights and times that are no number."""
    backends = tuple(one for one in service.backends if _is_address(one.address) and 0 < one.weight < math.inf)
    limits = tuple(one for one in service.limits if 0 < one.rps < math.inf and one.burst >= 0)
    hold = service.hold_s if 0 <= service.hold_s <= LONGEST_HOLD_S else 0.0
    if (backends, limits, hold) == (service.backends, service.limits, service.hold_s):
        return service
    return msgspec.structs.replace(service, backends=backends, limits=limits, hold_s=hold)


def _is_address(text: str) -> bool:
    if text.startswith("unix:"):
        return len(text) > len("unix:") and "\0" not in text
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536


def limit_for(service: RoutedService, target: bytes) -> RequestLimit | None:
    """The limit of the longest prefix that a path (as the service sees it) has."""
    fitting = [limit for limit in service.limits if target.startswith(limit.prefix.encode())]
    return max(fitting, key=lambda limit: len(limit.prefix), default=None)


Refusal = Literal["no-key", "other-service"]


def refusal(service: RoutedService, key: ApiKey | None) -> Refusal | None:
    """Why a caller may not use a service, or None."""
    if not service.auth:
        return None
    if key is None:
        return "no-key"
    return None if key.services is None or service.name in key.services else "other-service"


def allows(service: RoutedService, key: ApiKey | None) -> bool:
    """Whether a caller may use a service."""
    return refusal(service, key) is None


def digest(token: str) -> str:
    """How a key is known to the table."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
