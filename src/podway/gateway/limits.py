"""How much a caller may ask for: token buckets by name, and tokens by day. Pure: the clock is an argument."""

import math
from collections import OrderedDict

MOST_LIMITED = 100_000  # callers seen long ago are forgotten first


class RateLimiter:
    """A bucket for each name. It fills by `rate` a second up to `size`, and each request takes one out."""

    def __init__(self) -> None:
        self._levels: OrderedDict[tuple[str, ...], tuple[float, float]] = OrderedDict()  # name -> level, when

    def take(self, name: tuple[str, ...], rate: float, size: float, now: float) -> float:
        """Take one: 0.0 when there was one, else the seconds until there will be (nothing is taken then)."""
        level, then = self._levels.get(name, (size, now))
        level = min(size, level + max(0.0, now - then) * rate)
        wait = 0.0 if level >= 1.0 else (1.0 - level) / rate if rate > 0 else math.inf
        self._levels[name] = (level - 1.0 if wait == 0.0 else level, now)
        self._levels.move_to_end(name)
        if len(self._levels) > MOST_LIMITED:
            self._levels.popitem(last=False)
        return wait


class Budgets:
    """Tokens that each caller has used on the present day (UTC)."""

    def __init__(self) -> None:
        self._day = -1
        self._used: dict[str, int] = {}

    def spend(self, user: str, tokens: int, now: float) -> None:
        """Count tokens that were used."""
        self._turn(now)
        self._used[user] = self._used.get(user, 0) + tokens

    def at_least(self, user: str, tokens: int, now: float) -> None:
        """Others know of so many: through other gateways, or before this one began."""
        self._turn(now)
        self._used[user] = max(self._used.get(user, 0), tokens)

    def left(self, user: str, budget: int, now: float) -> int:
        """What is left of a budget for this day; never below 0."""
        self._turn(now)
        return max(0, budget - self._used.get(user, 0))

    def _turn(self, now: float) -> None:
        day = int(now // 86_400)
        if day != self._day:
            self._day, self._used = day, {}


def seconds_to_midnight(now: float) -> float:
    """Until budgets begin again."""
    return 86_400 - now % 86_400
