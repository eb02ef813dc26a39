"""The two things that change: a `Cluster` (one or more slices under a name) and a `Job` (a gang run on it).

Both are frozen; a transition makes a new value and a guarded write of its row. States are closed enums with the words
people know from SkyPilot, and each enum's terminal set stands next to it.
"""

import enum
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
    """Where a job is. CANCELLING lasts until nothing of the job runs on any host."""

    PENDING = "PENDING"
    SETTING_UP = "SETTING_UP"
    RUNNING = "RUNNING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    FAILED_SETUP = "FAILED_SETUP"
    FAILED_DRIVER = "FAILED_DRIVER"
    CANCELLED = "CANCELLED"


ENDED: frozenset[JobState] = frozenset(
    {
        JobState.SUCCEEDED,
        JobState.FAILED,
        JobState.FAILED_SETUP,
        JobState.FAILED_DRIVER,
        JobState.CANCELLED,
    }
)
ACTIVE: frozenset[JobState] = frozenset({JobState.SETTING_UP, JobState.RUNNING, JobState.CANCELLING})

Goal = Literal["up", "stopped", "gone"]


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A named set of slices, what it was asked to be (`goal`), and what it is (`state`)."""

    id: str
    name: str
    user: str
    state: ClusterState
    goal: Goal
    order: Order
    hosts: tuple[Host, ...] = ()
    autostop: Autostop | None = None
    created: float
    up_since: float | None = None
    ended: float | None = None
    active_at: float  # last time a job ended or was submitted; autostop counts from here
    billed_s: float = 0.0  # seconds UP before `up_since`
    reason: str = ""
    version: int = 0

    @property
    def live(self) -> bool:
        """True until nothing of it is left."""
        return self.state is not ClusterState.GONE


def shell_key(cluster: Cluster) -> str:
    """The mark of interactive shells on a cluster's hosts, in the place of a job's key."""
    return f"{cluster.id}-shell"


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

    def __str__(self) -> str:
        if self.lost:
            return "was lost (its process supervisor was killed)"
        if self.signal is not None:
            return f"was killed by signal {self.signal}"
        return f"exited with code {self.code}"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One gang on a cluster. `number` counts from 1 on each cluster; `key` is unique everywhere."""

    cluster_id: str
    number: int
    name: str | None
    user: str
    state: JobState
    task: Task
    files: tuple[FileTree, ...] = ()
    secret_box: bytes = b""  # encrypted; see control.secrets
    run_setup: bool = True
    exclusive: bool = True  # False: `podway run`, beside the queue and without the chips
    submitted: float
    started: float | None = None
    ended: float | None = None
    exits: tuple[Exit, ...] = ()
    pids: dict[str, list[int]] = {}  # phase -> pid by rank
    reason: str = ""
    cancel: bool = False
    down_after: bool = False  # take the cluster down when this job ends
    version: int = 0

    @property
    def key(self) -> str:
        """The name the job has on its hosts."""
        return f"{self.cluster_id}-{self.number}"

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
