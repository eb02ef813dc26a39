"""How many replicas a service wants, from what gateways saw of it. Pure: no clock, no store.

1. `summarize` makes one figure of the reports of all gateways over the window of the file.
2. `wanted_replicas` says how many replicas that load asks for, by the metric of the file.
3. `autoscale` moves the target. Up, once more than the target have been wanted for the whole `up_delay_s`: to what is wanted then,
   so that a spike that ends inside the delay buys nothing. Down to the most that was wanted within the last `down_delay_s`: a
   replica goes once it has not been wanted for so long, and a short lull takes nothing away. From zero it goes up at once:
   somebody waits.

While no gateway reports, nothing is known of the load, and the target stays.
"""

import math
from collections.abc import Iterable, Sequence

import msgspec

from podway.control.service_records import LoadSample, ScalingMemory
from podway.task.task import Scaling

TOLERANCE = 0.1  # of a latency target, within which nothing is done
CALM = 0.5  # below this part of a latency target, a replica may go


class LoadView(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a service over a window."""

    rps: float = 0.0
    concurrency: float = 0.0  # requests under way or held, on average
    waiting: int = 0  # held for a replica, now
    queue_s: float = 0.0  # 90th percentile of the time before a replica has a request
    ttft_s: float = 0.0


def summarize(samples: Iterable[LoadSample], now: float, window_s: float) -> LoadView | None:
    """All gateways together; None: none of them has reported within the window."""
    recent = [sample for sample in samples if now - window_s < sample.at <= now + 1.0]
    if not recent:
        return None
    by_gateway: dict[str, list[LoadSample]] = {}
    for sample in sorted(recent, key=lambda one: one.at):
        by_gateway.setdefault(sample.gateway, []).append(sample)
    concurrency, waiting = 0.0, 0
    for seen in by_gateway.values():
        spans = sum(max(one.load.window_s, 1e-3) for one in seen)
        concurrency += sum(one.load.in_flight * max(one.load.window_s, 1e-3) for one in seen) / spans
        waiting += seen[-1].load.waiting
    # A service or gateway that is younger than the window has been seen only for so long.
    span = max(
        min(window_s, max(one.at for one in seen) - min(one.at - one.load.window_s for one in seen))
        for seen in by_gateway.values()
    )
    return LoadView(
        rps=sum(sample.load.arrived for sample in recent) / max(span, 1.0),
        concurrency=concurrency + waiting,
        waiting=waiting,
        queue_s=max((sample.load.queue.p90 for sample in recent if sample.load.queue.count), default=0.0),
        ttft_s=max((sample.load.ttft.p90 for sample in recent if sample.load.ttft.count), default=0.0),
    )


def wanted_replicas(scaling: Scaling, load: LoadView, current: int, types: Sequence[str | None] = ()) -> int:
    """How many replicas this load asks for, within the range of the file. `types`: the accelerators of those there are."""
    least = 1 if load.waiting else 0
    if scaling.metric == "rps":
        needed = _parts(load.rps, _qps_of_one(scaling, types))
    elif scaling.metric == "concurrency":
        needed = _parts(load.concurrency, scaling.target)
    else:
        needed = _by_latency(scaling, load, current)
    if needed > 0:
        needed += scaling.spare_replicas
    return clamp(scaling, max(needed, least))


def _parts(amount: float, each: float | None) -> int:
    if each is None or each <= 0:
        return 0
    return math.ceil(round(amount / each, 9))


def _qps_of_one(scaling: Scaling, types: Sequence[str | None]) -> float | None:
    """The target of one replica; of several types, their mean."""
    if not scaling.target_qps_by_type:
        return scaling.target_qps
    known = [scaling.target_qps_by_type[kind] for kind in types if kind in scaling.target_qps_by_type]
    known = known or list(scaling.target_qps_by_type.values())
    return sum(known) / len(known)


def _by_latency(scaling: Scaling, load: LoadView, current: int) -> int:
    """In proportion above the target, at most twice as many at once; one fewer well below it; none when nobody asks."""
    measured = load.queue_s if scaling.metric == "queue_time" else load.ttft_s
    if load.rps == 0 and load.concurrency == 0:
        return 0
    if scaling.target is None or current == 0:
        return max(current, 1)
    ratio = measured / scaling.target
    if ratio > 1 + TOLERANCE:
        return min(2 * current, max(current + 1, math.ceil(current * ratio)))
    return max(1, current - 1) if ratio < CALM else current


def clamp(scaling: Scaling, count: int) -> int:
    """Within the range of the file."""
    return min(max(count, scaling.min_replicas), max(scaling.max_replicas, scaling.min_replicas))


def autoscale(
    memory: ScalingMemory, scaling: Scaling, load: LoadView | None, now: float, types: Sequence[str | None] = ()
) -> ScalingMemory:
    """What is wanted from now on, and what to remember."""
    current = clamp(scaling, memory.target)
    if load is None or scaling.min_replicas >= scaling.max_replicas:
        return ScalingMemory(target=current)
    wanted = wanted_replicas(scaling, load, current, types)
    if wanted == current:
        return ScalingMemory(target=current)
    if wanted > current:
        if current == 0:
            return ScalingMemory(target=wanted)
        since = now if memory.above_since is None else memory.above_since
        if now - since >= scaling.up_delay_s:
            return ScalingMemory(target=wanted)
        return ScalingMemory(target=current, above_since=since)
    falls = _fallen(memory.falls, wanted, now)
    target = min([count for count, since in falls if now - since >= scaling.down_delay_s], default=current)
    return ScalingMemory(target=target, falls=tuple(one for one in falls if one[0] < target))


def _fallen(falls: tuple[tuple[int, float], ...], wanted: int, now: float) -> tuple[tuple[int, float], ...]:
    """With one more look: lower counts than what is wanted now have not held, and what is wanted has held for as long as they did."""
    kept = tuple(one for one in falls if one[0] >= wanted)
    if kept and kept[-1][0] == wanted:
        return kept
    broken = falls[len(kept) :]
    return (*kept, (wanted, broken[0][1] if broken else now))


def explain(scaling: Scaling, load: LoadView | None, old: int, new: int, types: Sequence[str | None] = ()) -> str:
    """Why the target moved, for people."""
    count = f"wants {new} replica{'' if new == 1 else 's'} in place of {old}"
    low, high = scaling.min_replicas, scaling.max_replicas
    if not low <= old <= high or load is None or low >= high:
        return f"{count}: the range is {low} to {high}" if low < high else f"{count}: as set"
    if load.waiting and old == 0:
        return f"{count}: {load.waiting} request{'' if load.waiting == 1 else 's'} waiting"
    if load.rps == 0 and load.concurrency == 0:
        return f"{count}: no requests for {scaling.down_delay_s} s"
    if scaling.metric == "rps":
        return f"{count}: {load.rps:.3g} requests/s, target {_qps_of_one(scaling, types) or 0:g} for each replica"
    if scaling.metric == "concurrency":
        return f"{count}: {load.concurrency:.3g} requests at once, target {scaling.target or 0:g} for each replica"
    measured, what = (load.queue_s, "queue time") if scaling.metric == "queue_time" else (load.ttft_s, "TTFT")
    return f"{count}: {what} {measured:.3g} s (90th percentile), target {scaling.target or 0:g} s"
