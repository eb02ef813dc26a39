"""The records of the HTTP API that are about services and gateways.

Apart from `api.py` for size; light on purpose too, since commands import it.
"""

from podway.gateway.report import Usage
from podway.gateway.table import RouteTable
from podway.server.api import Reply


class RoutesReply(Reply, frozen=True):
    """The routes as they are; `table.version` is what to give as `after` next time."""

    table: RouteTable


class GatewayReportReply(Reply, frozen=True):
    """Whether it was new."""

    accepted: bool


class ModelUsageReply(Reply, frozen=True):
    """What was used, by day, person, service and model."""

    usage: list[Usage]
