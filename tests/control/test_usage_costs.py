"""What usage cost: shares of what the service's hosts cost on each day."""

from pathlib import Path

import msgspec
import pytest

from podway.control.store import open_store, sqlite_url
from podway.control.usage_costs import usage_costs
from podway.gateway.report import ModelUsage
from tests.control.samples import ORDER, cluster
from tests.control.service_samples import replica, service

NOON = 1_794_787_200.0 + 12 * 3600  # 2026-11-16 12:00 UTC


def used(day: str, user: str, tokens: int, requests: int = 1, service: str = "web") -> ModelUsage:
    return ModelUsage(day=day, user=user, service=service, model="m", requests=requests, prompt_tokens=tokens)


def test_rows_share_what_the_hosts_cost_on_their_day(tmp_path: Path) -> None:
    store = open_store(sqlite_url(tmp_path / "p.db"))
    dear = msgspec.structs.replace(ORDER, hourly_cost=2.0)
    # Up since 18 hours: 12 of them on this day, 6 on the day before.
    store.add_cluster(cluster(order=dear, created=NOON - 18 * 3600, up_since=NOON - 18 * 3600))
    store.services.add(service())
    store.services.add_replica(replica(0, cluster_id="c0ffee"), name=lambda n: f"web-{n}")
    rows = [
        used("2026-11-15", "ann", 10),
        used("2026-11-16", "ann", 30),
        used("2026-11-16", "bob/app", 10),
        used("2026-11-16", "eve", 0, requests=0, service="gone"),
        used("2026-99-99", "eve", 5),
    ]
    costs = usage_costs(store, rows, NOON)
    assert costs[:3] == [pytest.approx(12.0), pytest.approx(18.0), pytest.approx(6.0)]
    assert costs[3:] == [None, None]
    store.engine.dispose()
