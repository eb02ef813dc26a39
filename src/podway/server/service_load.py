"""What gateways saw of a service, over time, for charts. Pure.

Reports of all gateways are put into bins. Counts add up; of a median the mean by requests is taken, and of the slow ends of each
gateway the slowest: a person who looks for trouble is not told a mean.
"""

from collections.abc import Iterable, Sequence

from podway.control.service_records import LoadSample
from podway.gateway.report import LatencySummary
from podway.server import page_api

MOST_POINTS = 180
LEAST_BIN_S = 5.0


def load_points(samples: Iterable[LoadSample], since: float, now: float) -> list[page_api.LoadPoint]:
    """Bins from `since` to now in which something was reported, oldest first."""
    size = max(LEAST_BIN_S, (now - since) / MOST_POINTS)
    bins: dict[int, list[LoadSample]] = {}
    for sample in samples:
        if since <= sample.at <= now + 1.0:
            bins.setdefault(int((sample.at - since) / size), []).append(sample)
    return [_point(since + (index + 1) * size, size, bins[index]) for index in sorted(bins)]


def _point(at: float, size: float, samples: Sequence[LoadSample]) -> page_api.LoadPoint:
    loads = [sample.load for sample in samples]
    gateways = {sample.gateway for sample in samples}
    spans = {name: sum(one.load.window_s for one in samples if one.gateway == name) for name in gateways}
    span = max(1e-3, *spans.values(), min(size, LEAST_BIN_S))
    latest = {sample.gateway: sample.load.waiting for sample in samples}
    return page_api.LoadPoint(
        at=at,
        rps=sum(one.arrived for one in loads) / span,
        failed=sum(one.failed for one in loads) / span,
        in_flight=sum(one.in_flight * one.window_s for one in loads) / span,
        waiting=sum(latest.values()),
        ttft=_latency([one.ttft for one in loads if one.ttft.count]),
        tpot=_latency([one.tpot for one in loads if one.tpot.count]),
        queue=_latency([one.queue for one in loads if one.queue.count]),
    )


def _latency(found: Sequence[LatencySummary]) -> page_api.LatencyView | None:
    total = sum(one.count for one in found)
    if not total:
        return None
    return page_api.LatencyView(
        p50=sum(one.p50 * one.count for one in found) / total,
        p90=max(one.p90 for one in found),
        p99=max(one.p99 for one in found),
    )
