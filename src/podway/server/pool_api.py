"""The types of the API that are about pools."""

import msgspec

from podway.launch_options import LaunchRequest
from podway.task.pools import PoolSize


class PoolBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool to make or change; without a request, only its size."""

    size: PoolSize
    request: LaunchRequest | None = None


class PoolJobsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs for free workers: the same task, `count` times."""

    request: LaunchRequest
    count: int = 1


class PoolCancelBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs to cancel; none: all that are open."""

    jobs: tuple[int, ...] = ()


class PoolJobsReply(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of jobs, in their pool."""

    jobs: list[int]


class PoolWorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker."""

    number: int
    cluster: str
    state: str  # new, starting, free, busy, broken, leaving or gone
    job: int | None  # of the pool, that it has
    outdated: bool  # of an earlier revision: it goes when its job has ended


class PoolJobView(msgspec.Struct, frozen=True, kw_only=True):
    """One job of a pool."""

    number: int
    name: str | None
    user: str
    state: str
    reason: str
    submitted: float
    cluster: str | None  # the worker it has or had
    job: int | None  # its number there


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """One pool."""

    name: str
    user: str
    project: str | None
    size: PoolSize
    accelerators: list[str]  # any of them; empty: CPU hosts
    slices: int  # of each worker
    revision: int
    leaving: bool
    reason: str
    created: float
    waiting: int  # jobs
    workers: list[PoolWorkerView]
    jobs: list[PoolJobView] = []  # the latest, where one pool was asked for


class PoolsReply(msgspec.Struct, frozen=True, kw_only=True):
    """Pools."""

    pools: list[PoolView]
