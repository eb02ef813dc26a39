"""The records of the HTTP API that are about services and gateways.

Apart from `api.py` for size; light on purpose too, since commands import it.
"""

from podway.control.service_records import Count, Label, ServiceLoad, Usage
from podway.gateway.table import RouteTable
from podway.server.api import Body, Reply


class RoutesReply(Reply, frozen=True):
    """The routes as they are; `table.version` is what to give as `after` next time."""

    table: RouteTable


class GatewayReportBody(Body, frozen=True):
    """What one gateway saw since its last report. A report with a `sequence` that is not above the last one counts for nothing."""

    gateway: Label
    sequence: Count
    url: Label = ""  # where clients reach this gateway
    services: tuple[ServiceLoad, ...] = ()
    usage: tuple[Usage, ...] = ()


class GatewayReportReply(Reply, frozen=True):
    """Whether it was new."""

    accepted: bool


class ModelUsageReply(Reply, frozen=True):
    """What was used, by day, person, service and model."""

    usage: list[Usage]
