"""Rows of services: guarded writes, numbers that are never used twice, and reports that count once."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from podway.control.service_records import (
    GatewayInfo,
    ReplicaState,
    ServiceState,
)
from podway.control.service_store import ROUTES
from podway.control.store import Stale, Store, open_store, sqlite_url
from podway.gateway.report import ModelUsage, ServiceLoad
from tests.control.service_samples import replica, service


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = open_store(sqlite_url(tmp_path / "p.db"))
    yield found
    found.engine.dispose()


def test_a_name_is_taken_as_long_as_the_service_lives(store: Store) -> None:
    rows = store.services
    rows.add(service())
    with pytest.raises(Stale):
        rows.add(service(id="other"))
    gone = rows.update("5e41ce", lambda row: msgspec.structs.replace(row, state=ServiceState.GONE))
    assert rows.find("web") is None and rows.find("web", gone=True) == gone and rows.live() == []
    rows.add(service(id="other"))


def test_a_write_over_an_older_version_is_refused(store: Store) -> None:
    rows = store.services
    rows.add(service())
    first = rows.get("5e41ce")
    assert first is not None
    rows.save(msgspec.structs.replace(first, reason="a"))
    with pytest.raises(Stale):
        rows.save(msgspec.structs.replace(first, reason="b"))


def test_only_the_holder_of_the_lease_writes_as_owner(store: Store) -> None:
    rows = store.services
    rows.add(service())
    assert rows.claim("5e41ce", "me", 4e9) and not rows.claim("5e41ce", "other", 4e9)
    made = rows.add_replica(replica(0), name=lambda n: f"web-{n}", owner="me")
    with pytest.raises(Stale):
        rows.add_replica(replica(0), name=lambda n: f"web-{n}", owner="other")
    with pytest.raises(Stale):
        rows.save_replica(msgspec.structs.replace(made, reason="x"), owner="other")
    assert rows.save_replica(msgspec.structs.replace(made, reason="x"), owner="me").version == 1


def test_a_number_is_never_used_twice(store: Store) -> None:
    rows = store.services
    rows.add(service())
    for number in (1, 2, 3):
        made = rows.add_replica(replica(0), name=lambda n: f"web-{n}")
        assert (made.number, made.cluster) == (number, f"web-{number}")
        rows.save_replica(msgspec.structs.replace(made, state=ReplicaState.FAILED))
    assert rows.replicas("5e41ce") == [] and len(rows.replicas("5e41ce", open_only=False)) == 3


def test_every_write_is_told(store: Store) -> None:
    told: list[str] = []
    store.written = told.append
    store.services.add(service(), "made")
    made = store.services.add_replica(replica(0), name=lambda n: f"web-{n}")
    store.services.save_replica(msgspec.structs.replace(made, reason="x"), text="is ready")
    assert told == ["5e41ce", ROUTES] * 3
    assert [(event.job, event.text) for event in store.events("5e41ce")] == [(None, "made"), (1, "is ready")]


def test_a_report_counts_once(store: Store) -> None:
    rows = store.services
    load = ServiceLoad(service="web", window_s=5.0, arrived=7)
    used = ModelUsage(day="2026-11-16", user="ann", service="web", model="tiny", requests=7, prompt_tokens=70)
    for sequence, new in ((1, True), (1, False), (2, True)):
        gateway = GatewayInfo(id="g", url="http://g", seen=1000.0 + sequence, sequence=sequence)
        assert rows.add_report(gateway, (load,), (used,))[0] is new
    assert [sample.load.arrived for sample in rows.loads("web", 0.0)] == [7, 7]
    assert [(one.requests, one.prompt_tokens) for one in rows.usage("2026-11-01")] == [(14, 140)]
    assert rows.usage("2026-11-17") == []
    assert rows.gateways()[0].sequence == 2
    rows.add_report(GatewayInfo(id="g", seen=5000.0, sequence=3), (), ())
    assert rows.loads("web", 0.0) == []  # too old to matter
