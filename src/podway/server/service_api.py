"""The records of the HTTP API that are about services and gateways.

Apart from `api.py` for size; light on purpose too, since commands import it.
"""

from typing import Annotated

import msgspec

from podway.gateway.report import Count, Label
from podway.gateway.table import RouteTable
from podway.launch_options import LaunchRequest
from podway.server.api import Body, EventView, PreviewReply, Reply


class ApplyBody(Body, frozen=True):
    """A service to make, or to bring to what the task says; `options.cluster` is its name, where the task's is not."""

    request: LaunchRequest
    canary: float | None = None  # share of the traffic for the new revision, in place of a rolling update


class ScaleBody(Body, frozen=True):
    """Another range of replicas; the same number twice for a fixed one."""

    min_replicas: int
    max_replicas: int
    group: str | None = None  # which, of a service with groups


class CanaryBody(Body, frozen=True):
    """Another share of the traffic for the canary; null: all of it, by a rolling update."""

    share: float | None = None


class RollbackBody(Body, frozen=True):
    """Back to a revision; null: from the canary, or to the revision before."""

    revision: int | None = None


class ReplicaView(Reply, frozen=True):
    """One replica; it takes traffic while it is READY."""

    number: int
    revision: int
    state: str
    reason: str
    cluster: str
    spot: bool
    zone: str | None
    infra: str
    resources: str
    address: str | None
    port: int
    created: float
    ready_since: float | None
    ended: float | None
    hourly_cost: float | None
    cost: float | None
    group: str = ""  # of a service with groups
    workers: tuple[int, ...] = ()  # of a router: the replicas it has on its list


class RevisionView(Reply, frozen=True):
    """One version of what a service runs."""

    number: int
    created: float
    user: str


class ReplicaGroupView(Reply, frozen=True):
    """One group of replicas of a service that has groups."""

    name: str
    state: str
    reason: str
    router: str | None  # its type, where the group is the router of the others
    min_replicas: int
    max_replicas: int
    target_replicas: int
    ready_replicas: int


class ServiceView(Reply, frozen=True):
    """One service, with the replicas it has."""

    id: str
    name: str
    user: str
    state: str
    reason: str
    model: str | None
    url: str | None  # at the gateway that reported last; None while there is none
    path: str  # of the service at any gateway
    port: int
    auth: bool
    created: float
    ended: float | None
    revision: int
    revisions: list[RevisionView]
    canary: int | None
    canary_share: float
    min_replicas: int
    max_replicas: int
    target_replicas: int
    replicas: list[ReplicaView]
    stalled: bool  # its newest revision has failed too often to be tried again
    rps: float | None  # requests per second lately; None: no gateway reports
    project: str | None
    shared_with: dict[str, str]  # person -> view or use
    hourly_cost: float | None
    cost: float | None
    groups: tuple[ReplicaGroupView, ...] = ()


class ServicesReply(Reply, frozen=True):
    """Services, oldest first."""

    services: list[ServiceView]


class ApplyReply(Reply, frozen=True):
    """The service, and what was done: create, roll, in-place or none."""

    service: ServiceView
    change: str


class DifferenceView(Reply, frozen=True):
    """One thing that the file says otherwise than the service is; `rolls`: it changes what runs."""

    path: str
    old: str
    new: str
    rolls: bool


class ServicePreviewReply(Reply, frozen=True):
    """What an apply would do: create, roll, in-place or none; and where replicas would be made."""

    name: str
    change: str
    differences: list[DifferenceView]
    launch: PreviewReply | None
    groups: dict[str, PreviewReply] = msgspec.field(default_factory=dict)  # by group, of those that get new replicas


class ServiceEventsReply(Reply, frozen=True):
    """History after a point, oldest first; `job` is the number of a replica."""

    events: list[EventView]


class RoutesReply(Reply, frozen=True):
    """The routes as they are; `table.version` is what to give as `after` next time."""

    table: RouteTable


class GatewayReportReply(Reply, frozen=True):
    """Whether it was new."""

    accepted: bool


class ModelUsageView(Reply, frozen=True):
    """What one person (or key, as USER/NAME) used of one model on one day."""

    day: str
    user: str
    service: str
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: (
        float | None
    )  # dollars: their share, by tokens, of what the service's hosts cost that day; None: no price is known


class ModelUsageReply(Reply, frozen=True):
    """What was used, by day, person, service and model."""

    usage: list[ModelUsageView]


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
