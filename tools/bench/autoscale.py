"""The autoscaler over days of load, in seconds: replica hours and late requests, beside the rules of SkyServe and dstack.

    python -m tools.bench.autoscale [--trace FILE] [--write docs/services.md]

The service is a fluid queue: replicas that are ready each answer CAPACITY requests a second, a new one takes STARTUP_S to be ready
(and is paid for meanwhile), requests that find no free capacity wait, in order. A request is late when it waits longer than LATE_S.
The peers' rules are written here from their documentation and sources:

    SkyServe   every 20 s: wanted = ceil(requests of the last 60 s / 60 / target); when more (or fewer) have been wanted at every look
               for the whole delay, what is wanted now is taken
    dstack     every 15 s: wanted = ceil(requests in the window / window / target); taken at once when the last change is at least
               the delay ago, and from zero immediately

A trace is a CSV file of `second,requests` rows; without one, four synthetic ones of three days each are used.
"""

import argparse
import collections
import csv
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from podway.control.autoscale import LoadView, autoscale
from podway.control.service_records import ScalingMemory
from podway.task.task import Scaling

CAPACITY = 2.0  # requests a second that one replica answers
TARGET = 1.4  # of them are what the file asks for: room for noise
SERVICE_S = 4.0  # how long one request takes
STARTUP_S = 240  # a slice, its setup and the weights
LATE_S = 2.0
DAY = 86_400
WINDOW_S = 60
BEGIN, END = "<!-- autoscale: begin -->", "<!-- autoscale: end -->"

Rule = Callable[[float, LoadView, int], int]  # (now, load, target) -> target


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule cost and missed."""

    hours: float
    late: float
    worst_s: float
    moves: int


def podway(scaling: Scaling) -> Rule:
    """The autoscaler itself, every 2 s as its controller asks it."""
    memory = ScalingMemory(target=scaling.min_replicas)

    def rule(now: float, load: LoadView, target: int) -> int:
        nonlocal memory
        if now % 2 == 0:
            memory = autoscale(memory, scaling, load, now)
        return memory.target

    return rule


def skyserve(scaling: Scaling) -> Rule:
    """See the module docstring."""
    above = below = 0

    def rule(now: float, load: LoadView, target: int) -> int:
        nonlocal above, below
        if now % 20:
            return target
        wanted = _wanted(scaling, load.rps)
        above, below = (above + 1 if wanted > target else 0), (below + 1 if wanted < target else 0)
        if above * 20 >= scaling.up_delay_s or below * 20 >= scaling.down_delay_s:
            above = below = 0
            return wanted
        return target

    return rule


def dstack(scaling: Scaling) -> Rule:
    """See the module docstring."""
    moved = -1e9

    def rule(now: float, load: LoadView, target: int) -> int:
        nonlocal moved
        if now % 15:
            return target
        wanted = _wanted(scaling, load.rps)
        if wanted == target:
            return target
        delay = scaling.up_delay_s if wanted > target else scaling.down_delay_s
        if target == 0 or now - moved >= delay:
            moved = now
            return wanted
        return target

    return rule


def _wanted(scaling: Scaling, rps: float) -> int:
    assert scaling.target_qps is not None
    return min(max(math.ceil(rps / scaling.target_qps), scaling.min_replicas), scaling.max_replicas)


def simulate(arrivals: list[int], rule: Rule, first: int) -> Outcome:
    """Second by second."""
    ready, starting = first, list[int]()  # when each of those that start will be ready
    target, moves, paid, late, worst, total = first, 0, 0.0, 0, 0.0, 0
    recent: collections.deque[int] = collections.deque(maxlen=WINDOW_S)
    waiting: collections.deque[tuple[int, float]] = collections.deque()  # (arrived at, how many)
    for now, count in enumerate(arrivals):
        total += count
        recent.append(count)
        while starting and starting[0] <= now:
            starting.pop(0)
            ready += 1
        if count:
            waiting.append((now, float(count)))
        room = ready * CAPACITY
        while waiting and room > 0:
            since, left = waiting[0]
            done = min(left, room)
            room -= done
            if now - since > LATE_S:
                late += round(done)
            worst = max(worst, now - since)
            if done >= left - 1e-9:
                waiting.popleft()
            else:
                waiting[0] = (since, left - done)
        queued = sum(left for _, left in waiting)
        rps = sum(recent) / len(recent)
        load = LoadView(
            rps=rps,
            concurrency=min(rps, ready * CAPACITY) * SERVICE_S + queued,
            waiting=math.ceil(queued) if ready == 0 else 0,
        )
        wanted = rule(float(now), load, target)
        moves += wanted != target
        target = wanted
        have = ready + len(starting)
        starting += [now + STARTUP_S] * max(0, target - have)
        for _ in range(max(0, have - target)):  # those that start go first
            if starting:
                starting.pop()
            else:
                ready -= 1
        paid += ready + len(starting)
    late += sum(round(left) for since, left in waiting if len(arrivals) - since > LATE_S)
    return Outcome(hours=paid / 3600, late=late / max(total, 1), worst_s=worst, moves=moves)


def _poisson(rng: random.Random, rate: float) -> int:
    if rate <= 0:
        return 0
    limit, count, product = math.exp(-rate), 0, rng.random()
    while product > limit:
        count, product = count + 1, product * rng.random()
    return count


def traces() -> dict[str, list[int]]:
    """Three days each, the same at every run."""
    rng = random.Random(14)
    found: dict[str, list[int]] = {}
    wave = [3.0 - 2.6 * math.cos(2 * math.pi * t / DAY) for t in range(3 * DAY)]
    found["day and night"] = [_poisson(rng, rate) for rate in wave]
    found["office hours, nothing at night"] = [
        _poisson(rng, 4.0 if 9 <= t % DAY / 3600 < 17 else 0.0) for t in range(3 * DAY)
    ]
    found["short bursts"] = [_poisson(rng, 8.0 if t % 3600 < 90 else 1.0) for t in range(3 * DAY)]
    found["a crowd each noon"] = [
        _poisson(rng, 1.2 + (8.0 if 0 <= t % DAY - DAY // 2 < 2700 else 0.0)) for t in range(3 * DAY)
    ]
    return found


def read_trace(path: Path) -> list[int]:
    """A recorded one."""
    rows = [(int(float(row[0])), int(float(row[1]))) for row in csv.reader(path.open()) if row and row[0][:1].isdigit()]
    first = min(second for second, _ in rows)
    found = [0] * (max(second for second, _ in rows) - first + 1)
    for second, count in rows:
        found[second - first] += count
    return found


def table(loads: dict[str, list[int]]) -> str:
    """Every rule on every trace."""
    lines = [
        "| load | rule | replica hours | late requests | longest wait | changes |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, arrivals in loads.items():
        least = 0 if any(not any(arrivals[t : t + 3600]) for t in range(0, len(arrivals), 3600)) else 1
        base = Scaling(min_replicas=least, max_replicas=8, target_qps=TARGET, up_delay_s=60, down_delay_s=300)
        busy = msgspec.structs.replace(base, metric="concurrency", target=TARGET * SERVICE_S)
        rules: dict[str, Rule] = {
            "Podway, requests/s": podway(base),
            "Podway, concurrency": podway(busy),
            "SkyServe": skyserve(base),
            "dstack": dstack(base),
            f"always {_peak(arrivals)}": lambda now, load, target: target,
        }
        for title, rule in rules.items():
            first = _peak(arrivals) if title.startswith("always") else least
            got = simulate(arrivals, rule, first)
            cells = (f"{got.hours:.1f}", f"{got.late:.2%}", f"{got.worst_s:.0f} s", str(got.moves))
            lines.append(f"| {name} | {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _peak(arrivals: list[int]) -> int:
    """Replicas that the busiest minute needs."""
    minutes = (sum(arrivals[t : t + 60]) / 60 for t in range(0, len(arrivals), 60))
    return max(1, math.ceil(max(minutes) / TARGET))


def main() -> None:
    """Print the table, and write it into a page."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--trace", type=Path, action="append", default=[])
    options.add_argument("--write", type=Path)
    given = options.parse_args()
    begun = time.monotonic()
    loads = {path.stem: read_trace(path) for path in given.trace} or traces()
    made = table(loads)
    days = sum(len(arrivals) for arrivals in loads.values()) / DAY
    print(made)
    print(f"\n{days:g} days of load, 5 rules each, in {time.monotonic() - begun:.0f} s")
    if given.write:
        text = given.write.read_text()
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        given.write.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")


if __name__ == "__main__":
    main()
