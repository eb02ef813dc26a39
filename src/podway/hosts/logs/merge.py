"""From the lines of every rank to one stream, ordered by time.

Each rank's lines come in order. A line may leave as soon as every other live rank has reported past its time, since then
nothing earlier can come; or once it has waited `hold`, since a silent rank must not hold the others up. What leaves together
leaves in order of time, ranks in turn where times are equal; a rank's own order is always kept. Times are the hosts' own
clocks, to which `skew` (rank -> ns to add) may be applied. The result depends on what was pushed and on `now` alone.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from operator import itemgetter

from podway.hosts.logs.lines import END, TEXT, TIME, Line

HOLD_S = 0.3
# Memory a line takes beyond its bytes: the tuple and the objects in it.
LINE_COST = 220
_FOREVER = 1 << 63
_time = itemgetter(TIME)


class Merger:
    """Buffers what cannot leave yet; `limit` is about how many bytes of it a rank may have before it is `full`."""

    def __init__(
        self, hosts: int, *, hold: float = HOLD_S, skew: Mapping[int, int] | None = None, limit: int = 1 << 20
    ) -> None:
        self._hold = hold
        self._skew = dict(skew or {})
        self._limit = limit
        self._live = set(range(hosts))
        self._reported = [0] * hosts
        self._last = [0] * hosts  # the time of each rank's last line: a rank's times never go back
        self._queues: list[deque[tuple[float, list[Line]]]] = [deque() for _ in range(hosts)]
        self._sizes = [0] * hosts

    def push(self, rank: int, lines: list[Line], now: float, reported: int = 0) -> None:
        """Take the next lines of a rank; `reported` is the time up to which it has nothing else to tell."""
        skew = self._skew.get(rank, 0)
        self._reported[rank] = max(self._reported[rank], reported + skew if reported else 0)
        if not lines:
            return
        if skew or lines[0][TIME] < self._last[rank]:
            floor = self._last[rank]
            lines = [(max(floor, line[TIME] + skew), *line[1:]) for line in lines]
        self._last[rank] = lines[-1][TIME]
        self._reported[rank] = max(self._reported[rank], self._last[rank])
        self._sizes[rank] += _size(lines)
        self._queues[rank].append((now, lines))

    def end(self, rank: int) -> None:
        """Nothing more comes from this rank, and nobody waits for it."""
        self._live.discard(rank)

    def holds(self, rank: int) -> bool:
        """True while lines of this rank have not left."""
        return bool(self._queues[rank])

    @property
    def full(self) -> set[int]:
        """The ranks not to read from until more has been popped."""
        return {rank for rank, size in enumerate(self._sizes) if size >= self._limit}

    def due(self) -> float | None:
        """When the next line leaves even if nothing more is pushed; None if there is none."""
        arrived = min((queue[0][0] for queue in self._queues if queue), default=None)
        return None if arrived is None else arrived + self._hold

    def pop(self, now: float) -> list[Line]:
        """The lines that may leave, in order."""
        bound = self._bound(now)
        runs = [run for rank in range(len(self._queues)) for run in self._take(rank, bound)]
        merged = [line for run in runs for line in run] if len(runs) != 1 else runs[0]
        if len(runs) > 1:
            merged.sort(key=_time)  # stable, and quick on sorted runs
        return merged

    def _bound(self, now: float) -> int:
        """The time up to which lines may leave."""
        bound = min((self._reported[rank] for rank in self._live), default=_FOREVER)
        for queue in self._queues:
            for arrived, lines in queue:
                if arrived + self._hold > now:
                    break
                bound = max(bound, lines[-1][TIME])
        return bound

    def _take(self, rank: int, bound: int) -> list[list[Line]]:
        """The runs of a rank's lines up to `bound`."""
        queue = self._queues[rank]
        runs = []
        while queue and queue[0][1][0][TIME] <= bound:
            arrived, lines = queue.popleft()
            self._sizes[rank] -= _size(lines)
            if lines[-1][TIME] > bound:
                at = bisect_right(lines, bound, key=_time)
                rest, lines = lines[at:], lines[:at]
                queue.appendleft((arrived, rest))
                self._sizes[rank] += _size(rest)
            runs.append(lines)
        return runs


def _size(lines: list[Line]) -> int:
    """About the memory of a run of one rank's lines, told by its offsets rather than line by line."""
    return max(0, lines[-1][END] - lines[0][END]) + len(lines[0][TEXT]) + LINE_COST * len(lines)
