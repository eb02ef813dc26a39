"""The records of the HTTP API, version 1: what the CLI, `podway.Client` and the OpenAPI document are made of.

Light on purpose: the CLI imports it on every command.
"""

from typing import Any, Literal

import msgspec

from podway.hosts.manifest import FileTree
from podway.hosts.pod_address import PodAddress
from podway.hosts.ssh.endpoint import Endpoint
from podway.order import Host, Order
from podway.task.task import Autostop, Task

VERSION = 1  # of the API: another number is another language
VERSION_HEADER = "podway-api"  # of requests: this number and the version of Podway, "1 0.4.0"
NO_CERTIFICATES = "no_certificates"  # the code of an error: people log in to such hosts with keys of their own


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request body: unknown keys are refused with their path."""


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """An answer: read leniently, so that an older client understands a newer server."""


class ExecBody(Body, frozen=True):
    """A task to queue on a cluster that is up; setup is not run."""

    task: Task
    files: tuple[FileTree, ...] = ()
    request_id: str | None = None


class RunBody(Body, frozen=True):
    """A command to run on every host at once, bypassing the queue."""

    command: str
    request_id: str | None = None


class CancelBody(Body, frozen=True):
    """Which jobs: these, or all, or (neither) the latest that has not ended."""

    jobs: tuple[int, ...] = ()
    all: bool = False


class AutostopBody(Body, frozen=True):
    """The autostop policy to set; null clears it."""

    autostop: Autostop | None


class DigestsBody(Body, frozen=True):
    """Content digests (sha256, hex) to look for."""

    digests: tuple[str, ...]


class TokenBody(Body, frozen=True):
    """A person to make a token for. `lifetime_s`: null for one that never expires."""

    user: str
    role: Literal["admin", "member", "viewer", "gateway"] = "member"
    name: str = ""
    lifetime_s: float | None = 90 * 86400.0


class GrantBody(Body, frozen=True):
    """What a person may do with a cluster."""

    right: Literal["view", "use"] = "use"


class MemberBody(Body, frozen=True):
    """What a person is in a project."""

    role: Literal["member", "viewer"] = "member"


class DigestsReply(Reply, frozen=True):
    """Those of them that are not here, and how many bytes came of those whose upload broke off."""

    missing: list[str]
    arrived: dict[str, int] = {}


class BlocksReply(Reply, frozen=True):
    """The blocks of a content, as hosts/agent/blocks.py lists them: none if it is not here, or too large for it."""

    mean: int
    rows: bytes


class LaunchReply(Reply, frozen=True):
    """Which cluster and job came of it."""

    cluster: str
    cluster_id: str
    job: int | None
    created: bool
    then: list[int] = []  # the jobs of a pipeline's later tasks, each after the one before
    notes: list[str] = []


class OfferView(Reply, frozen=True):
    """One way to get the resources; `chosen` marks the one taken."""

    provider: str
    accelerator_type: str | None
    topology: str | None
    slices: int
    hosts: int
    chips: int
    zone: str | None
    spot: bool
    hourly_cost: float | None
    note: str
    chosen: bool
    blocked: str = ""  # why it is not tried, for people
    blocked_code: str = ""  # the same for programs: not_offered, quota, refused, price, simulated


class PreviewReply(Reply, frozen=True):
    """What a launch would do, and exactly what would be sent."""

    cluster: str
    exists: bool
    offers: list[OfferView]
    order: Order
    request: dict[str, Any]
    digest: str = ""  # of what is shown; a launch that carries it is refused when it would do something else
    notes: list[str] = []


class ExitView(Reply, frozen=True):
    """How one rank ended."""

    rank: int
    code: int | None
    signal: int | None
    lost: bool
    cpu_s: float
    max_rss: int


class JobView(Reply, frozen=True):
    """One job."""

    cluster: str
    number: int
    name: str | None
    user: str
    state: str
    submitted: float
    started: float | None
    ended: float | None
    resources: str
    reason: str
    exits: list[ExitView]
    exclusive: bool
    priority: int = 0  # of the jobs that wait, the highest is next
    after: int | None = None  # it begins when this job has succeeded
    ad_hoc: bool = False  # a command of `podway run`
    attempt: int = 1
    kind: str = "task"  # task, service or dev-environment
    ports: list[
        str
    ] = []  # to forward while attached: local:remote, `*` for any local port, a trailing `?` for any if it is taken
    ide: str = ""  # the editor that a dev environment is for
    working_dir: str = ""  # on the host, where its task fixes it


class AttemptView(Reply, frozen=True):
    """One try to get a cluster's hosts."""

    provider: str
    accelerator_type: str | None
    zone: str | None
    spot: bool
    begun: float
    ended: float | None
    outcome: str
    reason: str


class ClusterView(Reply, frozen=True):
    """One cluster."""

    id: str
    name: str
    user: str
    state: str
    goal: str
    infra: str
    resources: str
    simulated: bool
    order: Order
    hosts: list[Host]
    autostop: Autostop | None
    created: float
    up_since: float | None
    ended: float | None
    billed_s: float
    hourly_cost: float | None
    cost: float | None
    reason: str
    open_jobs: int
    project: str | None = None
    shared_with: dict[str, str] = {}  # person -> view or use
    recovering: bool = False
    self_teardown: bool = False  # its hosts can end it by themselves; told by `autostop` alone
    autostop_armed: bool = False  # they have confirmed that they do, while no server runs
    attempts: list[AttemptView] = []


class ClustersReply(Reply, frozen=True):
    """Clusters, oldest first; how many orphans the last look found, and how many services and schedules there are."""

    clusters: list[ClusterView]
    orphans: int = 0
    services: int = 0
    schedules: int = 0


class OrphanView(Reply, frozen=True):
    """A resource in a cloud that carries this Podway's mark, and that no cluster or volume accounts for."""

    provider: str
    kind: str
    name: str
    cluster: str
    zone: str | None
    condition: str
    accelerator_type: str | None
    created: float | None
    hourly_cost: float | None
    volume: str = ""  # of a disk: the volume that was lost; purging it deletes what it holds


class OrphansReply(Reply, frozen=True):
    """The orphans there are, and which providers could not be asked."""

    orphans: list[OrphanView]
    unreachable: dict[str, str] = {}
    purging: bool = False  # their deletion goes on


class JobsReply(Reply, frozen=True):
    """Jobs, oldest first."""

    jobs: list[JobView]


class CancelReply(Reply, frozen=True):
    """The jobs that were asked to end."""

    jobs: list[int]


class EventView(Reply, frozen=True):
    """One line of history."""

    id: int
    time: float
    job: int | None
    kind: str
    text: str
    detail: dict[str, Any]


class EventsReply(Reply, frozen=True):
    """History after a point, oldest first."""

    events: list[EventView]


class ShellReply(Reply, frozen=True):
    """Where a shell on a host is. The client makes the command line by itself (`shell.py`)."""

    home: str
    env: dict[str, str]
    endpoint: Endpoint | None = None
    known_hosts: list[str] = []
    pod: PodAddress | None = None


class CertificateBody(Body, frozen=True):
    """A public key ("ssh-ed25519 AAAA…") to certify for one host."""

    public_key: str
    rank: int = 0


class CertificateReply(Reply, frozen=True):
    """An OpenSSH certificate for that key: one line, for a few minutes, for this cluster alone."""

    certificate: str
    expires: float


class UsageView(Reply, frozen=True):
    """What one rank of a job uses now."""

    rank: int
    cpu_s: float
    rss: int
    processes: int


class UsageReply(Reply, frozen=True):
    """What a job uses on every host."""

    ranks: list[UsageView]


class InfoReply(Reply, frozen=True):
    """Which server this is."""

    name: str
    version: str
    api: int
    user: str
    admin: bool
    pid: int
    role: str = ""
    projects: dict[str, str] = {}


class TokenReply(Reply, frozen=True):
    """A new token; it is shown once and only its digest is kept."""

    user: str
    token: str


class TokenView(Reply, frozen=True):
    """One token; what it is made of is not kept."""

    id: str
    user: str
    name: str
    role: str
    created: float
    expires: float | None


class TokensReply(Reply, frozen=True):
    """The caller's tokens; everybody's, for an administrator."""

    tokens: list[TokenView]


class MemberView(Reply, frozen=True):
    """A person in a project."""

    project: str
    user: str
    role: str


class MembersReply(Reply, frozen=True):
    """Who is in the caller's projects; in all of them, for an administrator."""

    members: list[MemberView]


class AuditView(Reply, frozen=True):
    """What somebody did or tried."""

    time: float
    user: str
    token: str
    address: str
    action: str
    target: str
    status: int


class AuditReply(Reply, frozen=True):
    """The latest first."""

    entries: list[AuditView]


class ErrorView(Reply, frozen=True):
    """What went wrong and what to do; `code` is set where a program is to react to it (`offer_changed`, `provider_failed`)."""

    what: str
    hint: str
    code: str = ""


class ErrorReply(Reply, frozen=True):
    """Every answer with a status of 400 and above has this shape."""

    error: ErrorView


class Frame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a watch stream. `cursor` continues the stream after it, without loss or repetition."""

    kind: Literal["event", "log", "end", "ping"]
    text: str = ""
    cursor: str = ""
    event: int = 0
    time: float = 0.0
    state: str = ""
    reason: str = ""
    tail: str = ""
