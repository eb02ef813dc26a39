"""The two things that change: a `Cluster` (one or more slices under a name) and a `Job` (a gang run on it).

Both are frozen; a transition makes a new value and a guarded write of its row. States are closed enums with the words
people know from SkyPilot, and each enum's terminal set stands next to it.
"""

import enum
import os
from typing import Any, Literal

import msgspec

from podway.hosts.manifest import FileTree
from podway.order import Host, Order
from podway.task.task import Autostop, Task


class ClusterState(enum.StrEnum):
    """Where a cluster is. INIT covers everything between the row and the first ready host."""

    INIT = "INIT"
    UP = "UP"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    TERMINATING = "TERMINATING"
    GONE = "GONE"


class JobState(enum.StrEnum):
    """Where a job is. CANCELLING lasts until nothing of the job runs on any host; RECOVERING until it begins again."""

    PENDING = "PENDING"
    SETTING_UP = "SETTING_UP"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    FAILED_SETUP = "FAILED_SETUP"
    FAILED_DRIVER = "FAILED_DRIVER"
    FAILED_NO_RESOURCE = "FAILED_NO_RESOURCE"
    CANCELLED = "CANCELLED"


ENDED: frozenset[JobState] = frozenset(
    {
        JobState.SUCCEEDED,
        JobState.FAILED,
        JobState.FAILED_SETUP,
        JobState.FAILED_DRIVER,
        JobState.FAILED_NO_RESOURCE,
        JobState.CANCELLED,
    }
)
# These own the chips: the queue waits for them, also while one of them waits for new hosts.
ACTIVE: frozenset[JobState] = frozenset(
    {JobState.SETTING_UP, JobState.RUNNING, JobState.RECOVERING, JobState.CANCELLING}
)

Goal = Literal["up", "stopped", "gone"]


class ProvisionAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One try to get a cluster's hosts: where, for how long it was billed, and how it ended."""

    provider: str
    accelerator_type: str | None
    zone: str | None
    spot: bool = False
    begun: float
    ended: float | None = None
    outcome: Literal["trying", "up", "failed", "lost"] = "trying"
    reason: str = ""


class CapacitySearch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a cluster's hosts may come from, what was tried, and what comes next (`provisioning.py`)."""

    candidates: tuple[
        tuple[Order, ...], ...
    ] = ()  # every way it may be created, one zone each; groups in the task's order
    left: tuple[Order, ...] = ()  # those not yet tried in this round, best first
    untried: tuple[str, ...] = ()  # places that are no candidates, each with the reason
    attempts: tuple[ProvisionAttempt, ...] = ()  # what was tried, oldest first
    rounds: int = 0  # how often every candidate has failed
    retry: bool = False  # start over when every candidate has failed
    clearing: bool = False  # delete what is there, then take the next candidate
    recovering: bool = False  # its hosts were lost, and a job waits for new ones
    generation: int = 0  # counts the times hosts were asked for
    not_before: float = 0.0  # no try earlier than this


class Billing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How long a cluster was up and what that cost."""

    up_since: float | None = None
    billed_s: float = 0.0  # seconds up before `up_since`
    spent: float = 0.0  # dollars before `up_since`, each interval at the price of where it was


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What a person who is neither owner nor in the project may do with a cluster."""

    user: str
    right: Literal["view", "use"]


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A named set of slices, what it should be (`goal`), and what it is (`state`, with the `reason` for people)."""

    id: str
    name: str
    user: str
    created: float
    ended: float | None = None
    goal: Goal
    state: ClusterState
    reason: str = ""
    order: Order
    hosts: tuple[Host, ...] = ()
    autostop: Autostop | None = None
    autostop_armed: bool = False  # its head host has confirmed that it ends the cluster while no server runs
    request_id: str | None = None  # of the launch that created it
    one_shot: bool = False  # it runs one job to its end by itself, and goes with it: no agents, no other jobs
    project: str | None = None  # whose members may manage it too
    grants: tuple[Grant, ...] = ()  # what its owner allows others
    active_at: float  # last time a job ended or was submitted; autostop counts from here
    search: CapacitySearch = CapacitySearch()
    billing: Billing = Billing()
    version: int = 0

    @property
    def live(self) -> bool:
        """True until nothing of it is left."""
        return self.state is not ClusterState.GONE


def default_name(user: str) -> str:
    """A cluster name for a launch that gives none."""
    return f"podway-{''.join(filter(str.isalnum, user)) or 'user'}-{os.urandom(2).hex()}"


def shell_key(cluster: Cluster) -> str:
    """The mark of interactive shells on a cluster's hosts, in the place of a job's key."""
    return f"{cluster.id}-shell"


def phase_label(phase: str, attempt: int) -> str:
    """`run` for the first attempt, `run-2` for the second."""
    return phase if attempt == 1 else f"{phase}-{attempt}"


def phase_of(label: str) -> tuple[str, int]:
    """(phase, attempt) of a label."""
    phase, _, attempt = label.partition("-")
    return phase, int(attempt or 1)


class Exit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one rank ended: a code, or a signal, or lost with its host."""

    rank: int
    code: int | None = None
    signal: int | None = None
    lost: bool = False
    pid: int | None = None
    cpu_s: float = 0.0
    max_rss: int = 0

    @property
    def ok(self) -> bool:
        """True for a plain exit 0."""
        return self.code == 0 and not self.lost

    @property
    def killed(self) -> bool:
        """True for a signal, also where a shell tells of it by its exit code."""
        return self.signal is not None or 128 < (self.code or 0) <= 128 + 64

    def __str__(self) -> str:
        if self.lost and self.signal is None:
            return "was lost (its host does not answer)"
        if self.lost:
            return "was lost (its process supervisor was killed)"
        if self.signal is not None:
            return f"was killed by signal {self.signal}"
        return f"exited with code {self.code}"


class JobAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The attempt a job is in, and what a resumed or later one needs to know of the earlier ones."""

    number: int = 1
    started: float | None = None
    pids: dict[str, list[int]] = {}  # label of a phase -> pid by rank, of every attempt
    skew_ms: tuple[int, ...] = ()  # by rank: what to add to its host's clock
    error_restarts: int = 0
    recovering_since: float | None = None
    lost_generation: int | None = None  # it needs other hosts than those of this generation of the cluster


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a job ended."""

    ended: float | None = None
    exits: tuple[Exit, ...] = ()
    blamed_rank: int | None = None  # whose exit failed the gang
    hosts_lost: bool = False  # it ended because its hosts went from under it


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One gang on a cluster. `number` counts from 1 on each cluster; `key` is unique everywhere."""

    cluster_id: str
    number: int
    name: str | None
    user: str
    submitted: float
    task: Task
    files: tuple[FileTree, ...] = ()
    sealed_secrets: bytes = b""  # encrypted; see control/vault.py
    run_setup: bool = True
    exclusive: bool = True  # False: bypasses the queue, because its task names no chips
    gang: bool = True  # False: `podway run`, where each host finishes whatever the others do
    state: JobState
    reason: str = ""  # why it is in this state, for people
    cancel: bool = False  # somebody asked for it to end
    held: bool = False  # waits until the others of its job group have hosts too
    after: int | None = None  # begins when this job of the cluster has succeeded; cancelled when it ends otherwise
    attempt: JobAttempt = JobAttempt()
    outcome: JobOutcome = JobOutcome()
    version: int = 0

    @property
    def key(self) -> str:
        """The name of the job, the same in every attempt."""
        return f"{self.cluster_id}-{self.number}"

    @property
    def agent_job_id(self) -> str:
        """The name this attempt has on its hosts: what was cancelled there never starts again, so each has its own."""
        return self.key if self.attempt.number == 1 else f"{self.key}.{self.attempt.number}"

    def label(self, phase: str) -> str:
        """The name of a phase of this attempt in `pids`, logs and the archive."""
        return phase_label(phase, self.attempt.number)

    @property
    def done(self) -> bool:
        """True when it will not change again."""
        return self.state in ENDED


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of history: what happened to a cluster or job, for people and for `watch`."""

    id: int = 0
    time: float
    cluster_id: str
    job: int | None = None
    kind: Literal["state", "progress", "error"] = "state"
    text: str
    detail: dict[str, Any] = {}
