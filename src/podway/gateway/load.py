"""What a gateway sees of each service between two reports. Pure: the clock is an argument.

Concurrency is an average over the window, since a sample at its end would miss every short request; latencies are summed up from at
most `MOST_KEPT` of them, each as likely as any other.
"""

import random

from podway.gateway.report import LatencySummary, ServiceLoad

MOST_KEPT = 1000


class Latencies:
    """Some durations, and a fair choice of them."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = 0.0
        self._kept: list[float] = []

    def add(self, seconds: float) -> None:
        """One more."""
        self._count += 1
        self._sum += seconds
        if len(self._kept) < MOST_KEPT:
            self._kept.append(seconds)
        elif (place := random.randrange(self._count)) < MOST_KEPT:
            self._kept[place] = seconds

    def summary(self) -> LatencySummary:
        """What is told of them."""
        if not self._count:
            return LatencySummary()
        kept = sorted(self._kept)
        p50, p90, p99 = (kept[min(len(kept) - 1, int(len(kept) * part))] for part in (0.5, 0.9, 0.99))
        return LatencySummary(count=self._count, mean=self._sum / self._count, p50=p50, p90=p90, p99=p99)


class ServiceMeter:
    """One service, since the last report."""

    def __init__(self, now: float) -> None:
        self._running = self._waiting = 0
        self._open: dict[str, int] = {}
        self._busy = 0.0  # request-seconds
        self._changed = now
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._since = now
        self._arrived = self._completed = self._failed = 0
        self._ttft, self._tpot, self._queue = Latencies(), Latencies(), Latencies()
        self._failures: dict[str, int] = {}

    def arrived(self) -> None:
        """A request came that may use the service."""
        self._arrived += 1

    def held(self, change: int) -> None:
        """So many more (or fewer) wait for a replica."""
        self._waiting += change

    def sent(self, queued_s: float, now: float) -> None:
        """A replica has the request."""
        self._queue.add(queued_s)
        self._turn(now)
        self._running += 1

    def returned(self, now: float) -> None:
        """The replica has it no more."""
        self._turn(now)
        self._running -= 1

    def with_replica(self, replica: str, change: int) -> None:
        """So many more (or fewer) requests are with a replica, also with one that the routes have dropped meanwhile."""
        count = self._open.pop(replica, 0) + change
        if count:
            self._open[replica] = count

    def answered(self, status: int, first_byte_s: float | None, token_s: float | None = None) -> None:
        """It is over; `token_s`: the time between two of its tokens, where it was a stream of them."""
        if status >= 500:
            self._failed += 1
        else:
            self._completed += 1
        if first_byte_s is not None:
            self._ttft.add(first_byte_s)
        if token_s is not None:
            self._tpot.add(token_s)

    def replica_failed(self, replica: str) -> None:
        """An attempt on it failed."""
        self._failures[replica] = self._failures.get(replica, 0) + 1

    def _turn(self, now: float) -> None:
        self._busy += self._running * max(0.0, now - self._changed)
        self._changed = now

    @property
    def quiet(self) -> bool:
        """Nothing to tell."""
        return not (self._arrived or self._running or self._waiting or self._completed or self._failed or self._busy)

    def take(self, service: str, now: float) -> ServiceLoad:
        """What was seen since the last time; counting begins again."""
        self._turn(now)
        window = max(now - self._since, 1e-3)
        found = ServiceLoad(
            service=service,
            window_s=window,
            arrived=self._arrived,
            completed=self._completed,
            failed=self._failed,
            in_flight=self._busy / window,
            waiting=self._waiting,
            ttft=self._ttft.summary(),
            tpot=self._tpot.summary(),
            queue=self._queue.summary(),
            failures=dict(self._failures),
            open_requests=dict(self._open),
        )
        self._busy = 0.0
        self._begin(now)
        return found


class LoadMeter:
    """Every service."""

    def __init__(self) -> None:
        self._services: dict[str, ServiceMeter] = {}

    def of(self, service: str, now: float) -> ServiceMeter:
        """The meter of one."""
        found = self._services.get(service)
        if found is None:
            found = self._services[service] = ServiceMeter(now)
        return found

    def take(self, now: float, known: set[str]) -> tuple[ServiceLoad, ...]:
        """Of every service that the table has: one that is quiet is told too, since none may be scaled by silence."""
        for gone in [name for name, meter in self._services.items() if name not in known and meter.quiet]:
            del self._services[gone]
        return tuple(self.of(name, now).take(name, now) for name in sorted(known))
