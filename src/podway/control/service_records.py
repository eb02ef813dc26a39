"""The third thing that changes: a `Service` (a task that answers requests, under a name) with its `Replica`s.

A service has revisions: each is a task with its files. Every replica runs one revision on a cluster of its own, named after the
service and the replica's number, so that clusters go on being all that is ever billed. Both records are frozen; a transition makes
a new value and a guarded write of its row (`service_store.py`), and `decide_service.py` says which.
"""

import enum
from typing import Literal

import msgspec

from podway.control.records import Grant
from podway.gateway.report import ServiceLoad
from podway.hosts.manifest import FileTree
from podway.order import Host
from podway.task.task import ServiceSpec, Task, group_tasks


class ServiceState(enum.StrEnum):
    """Where a service is; READY as soon as one replica takes traffic, NO_REPLICA while scaled to zero."""

    STARTING = "STARTING"
    READY = "READY"
    NOT_READY = "NOT_READY"
    NO_REPLICA = "NO_REPLICA"
    FAILED = "FAILED"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    GONE = "GONE"


class ReplicaState(enum.StrEnum):
    """Where a replica is. Only READY takes traffic; FAILED and GONE are ends, when nothing of its cluster is left."""

    PENDING = "PENDING"
    PROVISIONING = "PROVISIONING"
    STARTING = "STARTING"
    READY = "READY"
    NOT_READY = "NOT_READY"
    DRAINING = "DRAINING"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    FAILED = "FAILED"
    GONE = "GONE"


REPLICA_ENDED: frozenset[ReplicaState] = frozenset({ReplicaState.FAILED, ReplicaState.GONE})
# These are on their way out: nothing brings them back, and they do not count as replicas the service has.
LEAVING: frozenset[ReplicaState] = frozenset(
    {ReplicaState.DRAINING, ReplicaState.SHUTTING_DOWN, ReplicaState.FAILED, ReplicaState.GONE}
)

# Why a replica was asked to end.
EndCause = Literal["failed", "preempted", "scaled-down", "updated", "service-down"]


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """One version of what a service runs. Changes that run nothing else (scaling, probes, limits) stay in the same revision."""

    number: int
    task: Task  # without the values of its secrets
    files: tuple[FileTree, ...] = ()
    sealed_secrets: bytes = b""
    created: float
    user: str
    since: dict[str, int] = {}  # by group: the revision from which on it has run the same; absent: this one

    @property
    def spec(self) -> ServiceSpec:
        """What makes the task a service."""
        assert self.task.service is not None  # `verbs` takes no other
        return self.task.service

    def of_group(self, name: str) -> "Revision | None":
        """The revision as the replicas of a group run it; None where it has no such group. '' is a service without groups."""
        task = group_tasks(self.task).get(name)
        return None if task is None else msgspec.structs.replace(self, task=task)


class ScalingMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the autoscaler remembers between two looks: since when it has wanted another number of replicas."""

    target: int = 0  # replicas wanted now
    above_since: float | None = None  # more than the target have been wanted since
    falls: tuple[tuple[int, float], ...] = ()  # (count, since): at most so many have been wanted since; falling counts


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a group of replicas is: of a service with groups, each has this for itself."""

    state: ServiceState = ServiceState.STARTING
    reason: str = ""
    memory: ScalingMemory = ScalingMemory()
    failures: int = 0
    not_before: float = 0.0


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A named service: what it should be (`goal`, `revision`), and what it is (`state`, with the `reason` for people)."""

    id: str
    name: str
    user: str
    project: str | None = None
    grants: tuple[Grant, ...] = ()
    created: float
    ended: float | None = None
    goal: Literal["up", "gone"] = "up"
    state: ServiceState = ServiceState.STARTING
    reason: str = ""
    provider: str | None = None  # where its replicas are to be; None: where the task says
    revisions: tuple[Revision, ...]  # oldest first; the last few
    revision: int = 1  # the one that all replicas are to run
    canary: int | None = None  # the revision that only a share of the traffic sees
    canary_share: float = 0.0
    memory: ScalingMemory = ScalingMemory()
    failures: int = 0  # replicas that failed since one was last ready
    not_before: float = 0.0  # no new replica earlier than this
    sealed_tls: bytes = b""  # of `spec.tls`: the pair that gateways serve with, the same in every revision
    groups: dict[str, GroupStatus] = {}  # by name, of a service with groups: these count, and not the three above
    request_id: str | None = None
    version: int = 0

    @property
    def live(self) -> bool:
        """True until nothing of it is left."""
        return self.state is not ServiceState.GONE

    def find_revision(self, number: int) -> Revision | None:
        """By number, if it is still known."""
        return next((one for one in self.revisions if one.number == number), None)

    @property
    def current(self) -> Revision:
        """What all replicas are to run."""
        found = self.find_revision(self.revision)
        assert found is not None  # a revision in use is never dropped
        return found

    @property
    def spec(self) -> ServiceSpec:
        """Of the current revision."""
        return self.current.spec

    @property
    def group_names(self) -> list[str]:
        """Of the current revision; '' alone for a service without groups."""
        return [one.name for one in self.spec.groups] or [""]


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of a service on a cluster of its own. `number` counts from 1 and is never used twice."""

    service_id: str
    number: int
    revision: int
    group: str = ""  # '' in a service without groups
    cluster: str  # the name of its cluster
    cluster_id: str | None = None  # None until the cluster's row is written
    state: ReplicaState = ReplicaState.PENDING
    reason: str = ""
    spot: bool | None = None  # None: as the task says
    cause: EndCause | None = None
    host: Host | None = None  # that listens; None until its cluster is up
    zone: str | None = None
    port: int
    created: float
    up_since: float | None = None  # its cluster is up
    ready_since: float | None = None
    failing_since: float | None = None  # its probes have not passed since
    drain_since: float | None = None
    ended: float | None = None
    workers: tuple[int, ...] = ()  # of a router: the replicas it has on its list
    worker_roles: dict[int, str] = {}  # of a router: what each of them does of a request, as it lists them
    router_address: str | None = None  # of a worker that is told it: where the router was when this one was launched
    version: int = 0

    @property
    def done(self) -> bool:
        """True when it will not change again."""
        return self.state in REPLICA_ENDED

    @property
    def id(self) -> str:
        """What the gateway calls it."""
        return self.cluster

    @property
    def request_id(self) -> str:
        """Of its launch: sent again after a crash, it is one cluster and one job."""
        return f"{self.service_id}-{self.number}"


class LoadSample(msgspec.Struct, frozen=True, kw_only=True):
    """A load with the gateway that saw it and the end of its window."""

    gateway: str
    at: float
    load: ServiceLoad


class GatewayInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway that reports here."""

    id: str
    url: str = ""  # where clients reach it
    seen: float = 0.0
    sequence: int = 0  # of its last report: one sent twice counts once
