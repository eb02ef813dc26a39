"""From one ordered stream of lines to what is shown: a line that all ranks print alike is shown once.

Two lines are alike if they say the same, whatever the time of day on each host (alike.py); that is meant by "text" below. Every
rank has a queue of lines that are not shown yet, and for each text it is known which ranks have it in their queue.

1. When the last rank that was missing prints a text, it is shown once for all of them. Whatever they have queued before it is
   shown first: nobody can print those lines alike any more without a line changing its place.
2. A line waits for the others at most `window` (by the hosts' clocks and by ours), rank 0's line at most `patience`, so
   that a person who watches is not kept waiting. Then it is shown, with every line that is older, whoever printed it.
3. Among lines shown together, a text that at least `GROUP` ranks printed is shown once for those ranks. A copy may move up to
   the first one only past lines of other ranks.

So each rank's lines are shown in its own order, none is lost, none is repeated, and memory is bounded: past `limit` lines or
`MOST_BYTES` the older half is shown. Stragglers of a text that was shown too early are a group of their own.
"""

import math
from bisect import bisect_right
from collections import deque
from operator import itemgetter
from typing import Final, cast

from podway.hosts.logs.alike import Alike
from podway.hosts.logs.lines import RANK, TEXT, TIME, Line
from podway.hosts.logs.text import RUN

WINDOW_S = 2.0
PATIENCE_S = 0.4  # with the merger's 0.3 s, rank 0's line is on the screen within 0.7 s
GROUP = 3
MOST_BYTES = 8 << 20
_STEP_NS = 100_000_000  # how exactly the window is kept by the hosts' clocks
_STEP_S = 0.05  # arrivals closer than this count as one
_AT_ONCE = 1024  # how exactly the limits are kept
_FOREVER = 1 << 63

Shown = Line | list[Line]  # one rank's line; or lines of one phase that say the same, of different ranks in their order
Key = bytes | tuple[str, bytes]
_Queued = tuple[int, Key, Line]  # its time, what is equal for lines that say the same, and the line
_KEY: Final = 1
_LINE: Final = 2
_time = itemgetter(TIME)  # of a line and of a queued one
_line = itemgetter(_LINE)
_rank = itemgetter(RANK)
_text = itemgetter(TEXT)


class Collapser:
    """`push` lines in the merger's order, `pop` what is to be shown, `finish` at the end."""

    def __init__(
        self,
        hosts: int,
        *,
        alike: Alike | None = None,
        window: float = WINDOW_S,
        patience: float = PATIENCE_S,
        limit: int = 16384,
    ) -> None:
        self._alike = alike or Alike()
        self._window = window
        self._window_ns = int(window * 1e9)
        self._patience = patience
        self._limit = limit
        self._bits = [1 << rank for rank in range(hosts)]
        self._quorum = (1 << hosts) - 1  # the ranks that have to print a text for it to be everybody's
        self._ended = 0
        self._queues: list[list[_Queued]] = [[] for _ in range(hosts)]
        self._holders: dict[Key, int] = {}  # text -> the ranks that have it queued
        self._again: list[dict[Key, int]] = [{} for _ in range(hosts)]  # how many more copies of it
        self._lines = 0
        self._bytes = 0
        self._next_check = 0  # host time at which the window has to be looked at
        self._arrivals: deque[tuple[float, int]] = deque()  # (now, host time) of what waits
        self._lead: deque[tuple[float, int]] = deque()  # the same of rank 0
        self._shown: list[Shown] = []

    def push(self, lines: list[Line], now: float) -> None:
        """Take the next lines."""
        if not self._lines:
            self._arrivals.clear()
            self._lead.clear()
        for start in range(0, len(lines), _AT_ONCE):
            some = lines[start : start + _AT_ONCE]
            self._lines += len(some)
            self._bytes += sum(map(len, map(_text, some)))
            lead = self._queue(some)
            if lead >= 0:
                _note(self._lead, now, lead)
            while self._lines > self._limit or self._bytes > MOST_BYTES:
                self._make_room()
        if lines:
            _note(self._arrivals, now, lines[-1][TIME])

    def _queue(self, lines: list[Line]) -> int:
        """Queue these lines, and show those that are now everybody's; answer the time of rank 0's last one, or -1."""
        queues, holders, bits = self._queues, self._holders, self._bits
        lead = -1
        _, ranks, _, _, texts = zip(*lines, strict=True)
        for line, said in zip(lines, self._alike.keys(ranks, texts), strict=True):
            time, rank, phase, _, _ = line
            if time >= self._next_check:
                self._expire(time)
            if not rank:
                lead = time
            key: Key = said if phase == RUN else (phase, said)
            queues[rank].append((time, key, line))
            bit = bits[rank]
            held = holders.get(key, 0)
            if held & bit:
                again = self._again[rank]
                again[key] = again.get(key, 0) + 1
            else:
                holders[key] = held = held | bit
                if held == self._quorum:
                    self._show_for_all(key)
        return lead

    def end(self, rank: int) -> None:
        """Nothing more comes from this rank: nobody waits for it once its lines are shown."""
        self._ended |= self._bits[rank]
        self._drop_ended()

    def due(self) -> float | None:
        """When something will be shown even if nothing more is pushed; None if nothing waits."""
        if not self._lines:
            return None
        times = [self._arrivals[0][0] + self._window] if self._arrivals else []
        if self._lead:
            times.append(self._lead[0][0] + self._patience)
        return min(times, default=None)

    def pop(self, now: float) -> list[Shown]:
        """What is to be shown now, in order."""
        bound = _overdue(self._arrivals, self._window, now)
        lead = _overdue(self._lead, self._patience, now)
        if self._queues[0] and self._queues[0][0][TIME] <= lead:  # or else rank 0's line was shown meanwhile
            bound = max(bound, lead)
        if bound >= 0:
            self._show_until(bound)
        shown, self._shown = self._shown, []
        return shown

    def finish(self) -> list[Shown]:
        """All that is left."""
        self._show_until(_FOREVER)
        return self.pop(math.inf)

    def _expire(self, time: int) -> None:
        """Show what is older than the window at this host time."""
        self._next_check = time + _STEP_NS
        bound = time - self._window_ns
        if any(queue and queue[0][TIME] <= bound for queue in self._queues):
            self._show_until(bound)

    def _make_room(self) -> None:
        """Show the older half of what waits."""
        times = sorted(line[TIME] for queue in self._queues for line in queue)
        self._show_until(times[len(times) // 2])

    def _show_for_all(self, key: Key) -> None:
        """Every rank has printed this text: show what they printed before it, then the text."""
        before: list[_Queued] = []
        members: list[_Queued] = []
        for queue, bit in zip(self._queues, self._bits, strict=True):
            if not self._quorum & bit:
                continue
            at = 0
            while queue[at][_KEY] != key:
                at += 1
            members.append(queue[at])
            if at:
                before += queue[:at]
            del queue[: at + 1]
        if before:
            self._show(*self._grouped(before)[:2])
        self._release(members, key)
        self._show_group(members)
        self._drop_ended()

    def _show_until(self, bound: int) -> None:
        """Show every line up to this host time."""
        taken: list[_Queued] = []
        for queue in self._queues:
            if queue and queue[0][TIME] <= bound:
                at = bisect_right(queue, bound, key=_time)
                taken += queue[:at]
                del queue[:at]
        if taken:
            groups, found, place = self._grouped(taken)
            if found:
                self._take_along(groups, found, place)
            self._show(groups, found)
            self._drop_ended()

    def _grouped(self, taken: list[_Queued]) -> tuple[list[_Queued | list[_Queued]], dict[Key, int], list[int]]:
        """These lines, which have left their queues, in order of time, the same text put together where it may be.

        Also where the latest copy of each text is that more than one rank has queued, and each rank's latest line.
        """
        taken.sort(key=_time)
        self._count_off(taken)
        groups: list[_Queued | list[_Queued]] = []
        found: dict[Key, int] = {}
        place = [-1] * len(self._queues)
        holders, again = self._holders, self._again
        for queued in taken:
            _, key, (_, rank, _, _, _) = queued
            if again[rank] and self._was_copy(rank, key):
                rest = 1
            else:
                rest = holders.pop(key) ^ self._bits[rank]
                if rest:
                    holders[key] = rest
            if rest or key in found:
                at = found.get(key, -1)
                if at > place[rank]:
                    place[rank] = at
                    cast(list[_Queued], groups[at]).append(queued)
                    continue
                found[key] = len(groups)
                groups.append([queued])
            else:
                groups.append(queued)
            place[rank] = len(groups) - 1
        return groups, found, place

    def _take_along(self, groups: list[_Queued | list[_Queued]], found: dict[Key, int], place: list[int]) -> None:
        """Lines not due yet that others are being shown with: no reason to show them apart."""
        for rank, queue in enumerate(self._queues):
            if queue:
                key = queue[0][_KEY]
                at = found.get(key, -1)
                if at > place[rank]:
                    line = queue.pop(0)
                    cast(list[_Queued], groups[at]).append(line)
                    self._release([line], key)

    def _show(self, groups: list[_Queued | list[_Queued]], found: dict[Key, int]) -> None:
        for group in groups:
            if isinstance(group, list):
                self._show_group(group)
            else:
                self._shown.append(group[_LINE])

    def _show_group(self, queued: list[_Queued]) -> None:
        """Once for all of them, or one by one if they are few."""
        lines = [*map(_line, queued)]
        if len(lines) >= GROUP or len(lines) == len(self._queues):
            lines.sort(key=_rank)
            self._shown.append(lines)
        else:
            self._shown += lines

    def _count_off(self, queued: list[_Queued]) -> None:
        self._lines -= len(queued)
        self._bytes -= sum(map(len, map(_text, map(_line, queued))))

    def _release(self, queued: list[_Queued], key: Key) -> None:
        """Copies of one text have left the queues of different ranks."""
        self._count_off(queued)
        held = self._holders.pop(key)
        for _, _, (_, rank, _, _, _) in queued:
            if not (self._again[rank] and self._was_copy(rank, key)):
                held ^= self._bits[rank]
        if held:
            self._holders[key] = held

    def _was_copy(self, rank: int, key: Key) -> bool:
        """Count off one of several copies of a text that a rank has queued; False if there was only one."""
        again = self._again[rank]
        more = again.get(key, 0)
        if more > 1:
            again[key] = more - 1
        elif more:
            del again[key]
        return more > 0

    def _drop_ended(self) -> None:
        """Ranks that have ended and shown everything are not waited for."""
        if self._ended & self._quorum:
            for rank, queue in enumerate(self._queues):
                if self._ended & self._bits[rank] and not queue:
                    self._quorum &= ~self._bits[rank]


def _overdue(queue: deque[tuple[float, int]], wait: float, now: float) -> int:
    """Take off what has waited so long; answer its host time, or -1."""
    bound = -1
    while queue and queue[0][0] + wait <= now:  # the same sum as in `due`, to the last bit
        bound = max(bound, queue.popleft()[1])
    return bound


def _note(queue: deque[tuple[float, int]], now: float, time: int) -> None:
    """Remember that something up to this host time waits since now."""
    if queue and now - queue[-1][0] < _STEP_S:
        now, known = queue.pop()
        time = max(time, known)
    queue.append((now, time))
