"""The records of the HTTP API that are about services and gateways.

Apart from `api.py` for size; light on purpose too, since commands import it.
"""

from typing import Annotated

import msgspec

from podway.gateway.report import Count, Label, Usage
from podway.gateway.table import RouteTable
from podway.server.api import Body, Reply


class RoutesReply(Reply, frozen=True):
    """The routes as they are; `table.version` is what to give as `after` next time."""

    table: RouteTable


class GatewayReportReply(Reply, frozen=True):
    """Whether it was new."""

    accepted: bool


class ModelUsageReply(Reply, frozen=True):
    """What was used, by day, person, service and model."""

    usage: list[Usage]


Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class GatewayKeyBody(Body, frozen=True):
    """A key to make, for oneself or (as an administrator) for somebody else."""

    name: Label
    user: Label | None = None
    services: tuple[Label, ...] | None = None  # None: all that its owner may use
    requests_per_minute: Positive | None = None
    tokens_per_day: Count | None = None
    lifetime_s: Positive | None = None  # None: it never expires


class GatewayKeyReply(Reply, frozen=True):
    """The key, shown this once."""

    user: str
    name: str
    key: str


class GatewayKeyView(Reply, frozen=True):
    """A key as lists show it."""

    id: str
    user: str
    name: str
    created: float
    expires: float | None
    services: tuple[str, ...] | None
    requests_per_minute: float | None
    tokens_per_day: int | None


class GatewayKeysReply(Reply, frozen=True):
    """Keys."""

    keys: list[GatewayKeyView]
