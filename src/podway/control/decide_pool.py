"""What a pool does next, as a pure function of what it should be and what is seen of its workers.

Workers are never more than the pool may have, those that are being taken down or are of an earlier revision among them: a change of
the file costs no second set of slices. A worker that has a job is never taken down; it is drained, and goes when the job has ended.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from podway.control.pool_store import PoolWorker, WorkerPool

WorkerState = Literal[
    "new",  # to be launched
    "starting",  # its hosts come up, or it sets up
    "free",
    "busy",
    "broken",  # its setup failed
    "leaving",  # it is being taken down
    "gone",
]


class SeenWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, and how it is."""

    worker: PoolWorker
    state: WorkerState
    idle_s: float = 0.0
    reason: str = ""


class WorkerChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with its workers, by number."""

    forget: tuple[int, ...] = ()  # they are gone
    drain: tuple[int, ...] = ()  # they get no more jobs
    take_down: tuple[int, ...] = ()
    add: int = 0

    def __bool__(self) -> bool:
        return bool(self.forget or self.drain or self.take_down or self.add)


def decide_pool(pool: WorkerPool, workers: Sequence[SeenWorker], waiting: int, now: float) -> WorkerChanges:
    """The plan; `waiting`: jobs without a worker."""
    there = [one for one in workers if one.state != "gone"]
    forget = tuple(one.worker.number for one in workers if one.state == "gone")
    if pool.goal == "gone":
        leave = [one for one in there if one.state not in ("leaving", "new")]
        unmade = tuple(one.worker.number for one in there if one.state == "new")
        return WorkerChanges(forget=forget + unmade, take_down=tuple(one.worker.number for one in leave))
    current = [one for one in there if one.worker.revision == pool.revision and one.state != "leaving"]
    serving = [one for one in current if not one.worker.drained and one.state != "broken"]
    wanted = _wanted(pool, serving, waiting)
    # Of those too many, the ones that cost least to lose: not yet made, idle the longest; the busy only drain.
    order = sorted(serving, key=lambda one: (_ORDER[one.state], -one.idle_s, -one.worker.number))
    surplus = order[: max(0, len(serving) - wanted)]
    old = [one for one in there if one.worker.revision != pool.revision and one.state != "leaving"]
    going = [*surplus, *old, *(one for one in current if one.worker.drained)]
    drain = tuple(one.worker.number for one in going if not one.worker.drained)
    down = tuple(one.worker.number for one in going if one.state not in ("busy", "new"))
    unmade = tuple(one.worker.number for one in going if one.state == "new")
    room = pool.size.max_workers - (len(there) - len(unmade))
    add = max(0, min(wanted - len(serving), room)) if now >= pool.not_before else 0
    return WorkerChanges(forget=forget + unmade, drain=drain, take_down=down, add=add)


_ORDER: dict[WorkerState, int] = {"new": 0, "free": 1, "starting": 2, "busy": 3}


def _wanted(pool: WorkerPool, serving: Sequence[SeenWorker], waiting: int) -> int:
    """How many there should be: those that are kept, those that work or are not idle for long, one more for each job that waits."""
    size = pool.size
    if size.max_workers <= size.workers:
        return size.workers
    first = size.first_workers or 0
    recent = [one for one in serving if one.state != "free" or size.idle_s is None or one.idle_s < size.idle_s]
    begun = first if pool.next_worker <= first else 0  # what is made at once, when the pool is new
    unserved = waiting - sum(one.state in ("new", "starting", "free") for one in serving)
    return min(size.max_workers, max(size.workers, begun, len(recent) + max(0, unserved)))
