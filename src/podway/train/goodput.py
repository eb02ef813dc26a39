"""Goodput: the time of productive steps over the time since the run was first launched (no jax).

A step is productive if its result is kept: steps that were skipped, or that were lost with a host and run again after
the last checkpoint, are not. Neither are compilation, restoring, saving, evaluation, and the time between launches.
"""

import time
from collections.abc import Callable, Sequence


class Goodput:
    """Of one run, over all its launches."""

    def __init__(
        self, launches: Sequence[float] = (), productive: float = 0.0, now: Callable[[], float] = time.time
    ) -> None:
        self._now = now
        self.launches = tuple(launches) or (now(),)
        self.productive_seconds = productive  # at a checkpoint: of the steps that it holds
        self._steps = 0

    def add_step(self, seconds: float, *, good: bool) -> None:
        """Take in one step. The first of a launch compiles: it counts for as long as the second."""
        self._steps += 1
        if good and self._steps > 1:
            self.productive_seconds += seconds * (2 if self._steps == 2 else 1)

    @property
    def wall_seconds(self) -> float:
        """Since the first launch."""
        return max(self._now() - self.launches[0], 1e-9)

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return min(self.productive_seconds / self.wall_seconds, 1.0)

    def __str__(self) -> str:
        count = len(self.launches)
        launches = f", {count} launches" if count > 1 else ""
        return f"goodput: {self.share:.1%} ({self.productive_seconds:.0f} of {self.wall_seconds:.0f} s{launches})"
