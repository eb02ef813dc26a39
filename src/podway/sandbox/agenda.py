"""What is due when: a heap of actions over a clock that others read.

Durations are those of the pretended cloud, and pass `speed` times faster than here; times are of this machine's clock, so that
clients may compare them with their own.
"""

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[float], None]


class Agenda:
    """Actions by the time they are due."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._heap: list[tuple[float, int, Action]] = []
        self._count = itertools.count()

    def after(self, now: float, seconds: float, action: Action) -> float:
        """Do `action` after this many seconds of the cloud's time; when that is."""
        due = now + seconds / self.speed
        self.at(due, action)
        return due

    def at(self, due: float, action: Action) -> None:
        """Do `action` at a time of this machine's clock."""
        heapq.heappush(self._heap, (due, next(self._count), action))

    def next_due(self) -> float | None:
        """When there is something to do next."""
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Do what is due, in order, each at its own time."""
        while self._heap and self._heap[0][0] <= now:
            due, _, action = heapq.heappop(self._heap)
            action(due)
