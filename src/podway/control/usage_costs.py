"""What the usage of services cost: each row its share, by tokens, of what the service's hosts cost on that day.

A cluster's cost is spread evenly over the time from its start to its end; idle time is paid for by those who used the service that
day. A day on which nobody used it is nobody's. Rows without tokens share by requests.
"""

import calendar
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from podway.control.records import Cluster
from podway.control.store import Store
from podway.gateway.report import ModelUsage

DAY_S = 86_400.0


def usage_costs(store: Store, rows: Sequence[ModelUsage], now: float) -> list[float | None]:
    """The cost in dollars of each row, which must be all rows of its day; None where no price is known."""
    clusters = {name: _clusters(store, name) for name in {row.service for row in rows}}
    weights: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        weights[row.day, row.service] += _weight(row)
    found: list[float | None] = []
    for row in rows:
        spent = _spent_on(clusters[row.service], row.day, now)
        found.append(None if spent is None else spent * _weight(row) / weights[row.day, row.service])
    return found


def _weight(row: ModelUsage) -> int:
    return row.prompt_tokens + row.completion_tokens or row.requests or 1


def _clusters(store: Store, name: str) -> list[Cluster]:
    replicas = [
        one for service in store.services.named(name) for one in store.services.replicas(service.id, open_only=False)
    ]
    found = (store.cluster(one.cluster_id) for one in replicas if one.cluster_id is not None)
    return [cluster for cluster in found if cluster is not None]


def _spent_on(clusters: Iterable[Cluster], day: str, now: float) -> float | None:
    try:
        begin = float(calendar.timegm(time.strptime(day, "%Y-%m-%d")))
    except ValueError:
        return None  # what a gateway reported looks like a day and is none
    costs = [cost for cluster in clusters if (cost := _share(cluster, begin, begin + DAY_S, now)) is not None]
    return sum(costs) if costs else None


def _share(cluster: Cluster, begin: float, end: float, now: float) -> float | None:
    """Of a cluster's cost, what falls between two times."""
    hourly, billing = cluster.order.hourly_cost, cluster.billing
    if hourly is None:
        return None
    running = 0.0 if billing.up_since is None else max(0.0, now - billing.up_since)
    cost = billing.spent + hourly * running / 3600
    first, last = cluster.created, cluster.ended or now
    overlap = max(0.0, min(last, end) - max(first, begin))
    return cost * overlap / (last - first) if last > first else 0.0
