"""Which replica takes a request: the one that has its beginning cached, unless another has much less to do. Pure.

1. Replicas that failed several times in a row are left out for a while, longer each time; half of them always stay in.
2. Load is the number of tokens that a replica has been given and not yet answered, divided by its weight; between equals the one
   that was given least so far, by its weight, so that a canary of weight 0.1 gets a tenth also when nothing waits.
3. The beginning of a prompt is known by hashes of its first bytes, at lengths that double. The replica that last had the longest
   of them is taken while it has at most `SLACK_TOKENS` more to do than the least loaded one: computing a prompt again costs about
   as much as waiting for that many tokens.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Container, Sequence

from podway.gateway.table import Backend

FIRST_PREFIX = 256  # bytes; shorter beginnings are not worth a cache
LONGEST_PREFIX = 1 << 20
SLACK_TOKENS = 4096
MOST_PREFIXES = 100_000
FAILURES = 3  # in a row, before a replica is left out
FIRST_REST_S = 5.0
LONGEST_REST_S = 300.0


def prefixes(text: bytes) -> list[bytes]:
    """Hashes of the beginnings of a prompt, shortest first."""
    found = []
    hashed = hashlib.blake2b(digest_size=16)
    begin, end = 0, FIRST_PREFIX
    while end <= len(text) and end <= LONGEST_PREFIX:
        hashed.update(text[begin:end])
        found.append(hashed.digest())
        begin, end = end, end * 2
    return found


class ReplicaHealth:
    """How a replica has done lately."""

    __slots__ = ("failures", "rests", "until")

    def __init__(self) -> None:
        self.failures = 0
        self.rests = 0  # how often it was left out without a success between
        self.until = 0.0

    def succeeded(self) -> None:
        """An answer came."""
        self.failures = self.rests = 0
        self.until = 0.0

    def failed(self, now: float) -> None:
        """It refused, broke off before an answer, or answered that it cannot."""
        self.failures += 1
        if self.failures >= FAILURES and now >= self.until:
            self.until = now + min(LONGEST_REST_S, FIRST_REST_S * 2**self.rests)
            self.rests += 1

    def resting(self, now: float) -> bool:
        """Whether it is left out at this time."""
        return now < self.until


class Balancer:
    """What each replica has to do, how it has done, and which beginnings it has seen."""

    def __init__(self) -> None:
        self.outstanding: dict[str, int] = {}
        self._given: dict[
            str, float
        ] = {}  # tokens ever, divided by weight; a newcomer begins at the least of the others
        self.health: dict[str, ReplicaHealth] = {}
        self._seen: OrderedDict[tuple[str, bytes], str] = OrderedDict()  # (service, prefix) -> replica

    def choose(
        self,
        service: str,
        backends: Sequence[Backend],
        beginnings: Sequence[bytes],
        now: float,
        tried: Container[str] = (),
    ) -> Backend | None:
        """The replica for a request; None when every one was tried."""
        open_ones = [one for one in backends if one.id not in tried and one.weight > 0]
        if not open_ones:
            return None
        usable = self._usable(open_ones, now)
        fewest = min((self._given[one.id] for one in usable if one.id in self._given), default=0.0)
        least = min(usable, key=lambda one: (self._load(one), self._given.setdefault(one.id, fewest), one.id))
        cached = self._holder(service, beginnings, usable)
        if cached is not None and self._load(cached) <= self._load(least) + SLACK_TOKENS:
            return cached
        return least

    def _usable(self, backends: list[Backend], now: float) -> list[Backend]:
        well = [one for one in backends if not self._health(one.id).resting(now)]
        if len(well) * 2 >= len(backends):
            return well
        # Where most rest, the trouble is likely elsewhere: those that come back soonest stay in too.
        resting = sorted((one for one in backends if one not in well), key=lambda one: self._health(one.id).until)
        return well + resting[: (len(backends) + 1) // 2 - len(well)]

    def _load(self, backend: Backend) -> float:
        return self.outstanding.get(backend.id, 0) / backend.weight

    def _holder(self, service: str, beginnings: Sequence[bytes], usable: list[Backend]) -> Backend | None:
        by_id = {one.id: one for one in usable}
        for beginning in reversed(beginnings):
            replica = self._seen.get((service, beginning))
            if replica in by_id:
                return by_id[replica]
        return None

    def begun(self, service: str, replica: Backend, tokens: int, beginnings: Sequence[bytes]) -> None:
        """A request went to a replica."""
        self.outstanding[replica.id] = self.outstanding.get(replica.id, 0) + tokens
        self._given[replica.id] = self._given.get(replica.id, 0.0) + tokens / replica.weight
        for beginning in beginnings:
            self._seen[service, beginning] = replica.id
            self._seen.move_to_end((service, beginning))
        while len(self._seen) > MOST_PREFIXES:
            self._seen.popitem(last=False)

    def ended(self, replica: str, tokens: int) -> None:
        """The answer is complete, or given up."""
        left = self.outstanding.get(replica, 0) - tokens
        if left > 0:
            self.outstanding[replica] = left
        else:
            self.outstanding.pop(replica, None)

    def _health(self, replica: str) -> ReplicaHealth:
        return self.health.setdefault(replica, ReplicaHealth())

    def succeeded(self, replica: str) -> None:
        """An answer came."""
        self._health(replica).succeeded()

    def failed(self, replica: str, now: float) -> None:
        """No answer came."""
        self._health(replica).failed(now)

    def keep(self, replicas: set[str]) -> None:
        """Forget replicas that are no more."""
        for gone in (set(self.health) | set(self._given)) - replicas:
            self.health.pop(gone, None)
            self._given.pop(gone, None)
