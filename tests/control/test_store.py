"""The store on SQLite and on a real PostgreSQL: guarded writes, leases, names, numbers."""

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from podway.control import transitions
from podway.control.people import token_digest
from podway.control.records import Cluster, ClusterState, Event, JobState
from podway.control.store import AlreadyEnded, Stale, Store, open_store, sqlite_url
from podway.control.writing import add_events
from podway.errors import UserError
from tests.control.samples import cluster, job


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.e2e)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "sqlite":
        opened = open_store(sqlite_url(tmp_path / "p.db"))
    else:
        opened = open_store(request.getfixturevalue("postgres"))
        with opened.engine.begin() as db:
            for table in ("events", "jobs", "clusters", "tokens", "tries"):
                db.exec_driver_sql(f"DELETE FROM {table}")
    yield opened
    opened.engine.dispose()


def test_a_cluster_comes_back_as_it_was_written(store: Store) -> None:
    store.add_cluster(cluster())
    assert store.find("demo") == cluster()
    assert store.cluster("c0ffee") == cluster()
    assert store.find("other") is None


def test_a_live_name_is_taken_and_a_gone_one_is_free(store: Store) -> None:
    store.add_cluster(cluster())
    with pytest.raises(Stale):
        store.add_cluster(cluster(id="other"))
    store.save_cluster(cluster(state=ClusterState.GONE))
    store.add_cluster(cluster(id="other", created=2000.0))
    assert [c.id for c in store.live_clusters()] == ["other"]
    assert [c.id for c in store.past_clusters(0)] == ["c0ffee"]
    found = store.find("demo", gone=True)
    assert found and found.id == "other"


def test_a_write_over_an_old_version_is_refused(store: Store) -> None:
    store.add_cluster(cluster())
    read = store.find("demo")
    assert read
    store.save_cluster(msgspec.structs.replace(read, reason="first"))
    with pytest.raises(Stale):
        store.save_cluster(msgspec.structs.replace(read, reason="second"))
    again = store.find("demo")
    assert again and again.reason == "first"


def test_a_refused_write_leaves_no_event(store: Store) -> None:
    store.add_cluster(cluster())
    event = Event(time=1.0, cluster_id="c0ffee", text="x")
    with pytest.raises(Stale):
        store.save_cluster(cluster(version=7), events=(event,))
    assert store.events("c0ffee") == []


def test_only_the_owner_of_the_lease_writes(store: Store) -> None:
    store.add_cluster(cluster())
    assert store.claim("c0ffee", "one", time.time() + 60)
    assert not store.claim("c0ffee", "two", time.time() + 60)
    with pytest.raises(Stale):
        store.save_cluster(cluster(reason="x"), owner="two")
    store.save_cluster(cluster(reason="x"), owner="one")
    made = store.add_job(job())
    with pytest.raises(Stale):
        store.save_job(msgspec.structs.replace(made, reason="x"), owner="two")
    store.save_job(msgspec.structs.replace(made, reason="x"), owner="one")


def test_an_update_is_applied_to_what_others_wrote_meanwhile(store: Store) -> None:
    store.add_cluster(cluster())
    store.add_job(job())
    writes = []

    def change(row: Cluster) -> Cluster:
        if len(writes) < 2:  # somebody else is quicker, twice
            store.save_cluster(msgspec.structs.replace(row, reason=f"theirs {len(writes)}"))
        writes.append(row.reason)
        return msgspec.structs.replace(row, active_at=5.0)

    after = store.update("c0ffee", change, text="touched")
    assert (after.reason, after.active_at, writes) == ("theirs 1", 5.0, ["", "theirs 0", "theirs 1"])
    assert [(event.text, event.detail) for event in store.events("c0ffee")] == [("touched", {"state": "INIT"})]
    version = after.version
    assert store.update("c0ffee", lambda row: row).version == version  # nothing to write, nothing written


def test_an_update_by_another_server_or_of_an_ended_job_is_refused(store: Store) -> None:
    store.add_cluster(cluster())
    made = store.add_job(job())
    assert store.claim("c0ffee", "one", time.time() + 60)
    with pytest.raises(Stale):
        store.update("c0ffee", lambda row: transitions.mark_active(row, 5.0), owner="two")
    with pytest.raises(Stale):
        store.update_job("c0ffee", 1, transitions.mark_running, owner="two")
    store.update_job("c0ffee", 1, lambda row: transitions.mark_ended(row, JobState.FAILED, "why", 9.0), text="why")
    with pytest.raises(AlreadyEnded):
        store.update_job("c0ffee", 1, lambda row: transitions.request_cancel(row, "no"))
    after = store.job("c0ffee", made.number)
    assert after and (after.state, after.reason, after.outcome.ended) == (JobState.FAILED, "why", 9.0)
    store.update("c0ffee", lambda row: transitions.mark_gone(row, "", 10.0), owner="one")
    with pytest.raises(Stale):
        store.update("c0ffee", transitions.request_down)


def test_reads_do_not_wait_for_a_writer(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "p.db")
    store = open_store(url)
    store.add_cluster(cluster())
    writer = sqlite3.connect(tmp_path / "p.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("UPDATE clusters SET state = 'half written'")
    try:
        done = threading.Event()

        def read() -> None:
            again = open_store(url)  # a server that starts meanwhile
            assert again.find("demo") == cluster() and again.leases() and again.pulse() and again.tries() == {}
            again.engine.dispose()
            done.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert done.wait(10)  # a writer that waits gives up after 15 s
    finally:
        writer.execute("ROLLBACK")
        writer.close()
        store.engine.dispose()


def test_a_lease_that_ran_out_or_whose_owner_died_is_free(store: Store) -> None:
    store.add_cluster(cluster())
    assert store.claim("c0ffee", "one", time.time() - 1)
    assert store.claim("c0ffee", "two", time.time() + 60)
    assert store.claim("c0ffee", "three", time.time() + 60, dead=("two",))
    assert store.leases()[0][1] == "three"


def test_jobs_are_numbered_without_gaps_under_contention(store: Store) -> None:
    store.add_cluster(cluster())
    errors: list[BaseException] = []

    def add() -> None:
        try:
            for _ in range(10):
                store.add_job(job())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [j.number for j in store.jobs("c0ffee")] == list(range(1, 41))


def test_the_jobs_of_a_pipeline_are_written_together_and_end_together(store: Store) -> None:
    store.add_cluster(cluster())
    store.add_job(job(), request_id="before")
    first = store.add_job(job(), request_id="r", then=[job(), job()])
    assert first.number == 2 and store.add_job(job(), request_id="r", then=[job(), job()]).number == 2
    assert [(one.number, one.after) for one in store.jobs("c0ffee")] == [(1, None), (2, None), (3, 2), (4, 3)]

    def end(number: int, state: JobState) -> None:
        store.update_job("c0ffee", number, lambda row: transitions.mark_ended(row, state, "", 1.0))

    end(2, JobState.SUCCEEDED)
    assert not any(one.cancel for one in store.jobs("c0ffee"))
    end(3, JobState.FAILED)
    (last,) = [one for one in store.jobs("c0ffee", open_only=True) if one.number == 4]
    assert last.cancel and last.reason == "job 3, which it follows, is FAILED"
    store.update_job("c0ffee", 4, lambda row: transitions.mark_ended(row, JobState.CANCELLED, row.reason, 1.0))


def test_a_gone_cluster_takes_no_job(store: Store) -> None:
    store.add_cluster(cluster())
    store.save_cluster(cluster(state=ClusterState.GONE))
    with pytest.raises(Stale):
        store.add_job(job())


def test_open_jobs_and_the_pulse(store: Store) -> None:
    store.add_cluster(cluster())
    made = store.add_job(job())
    before = store.pulse()
    store.save_job(msgspec.structs.replace(made, cancel=True))
    assert store.pulse() != before
    assert store.open_job_counts() == {"c0ffee": 1}
    fresh = store.job("c0ffee", 1)
    assert fresh
    store.save_job(msgspec.structs.replace(fresh, state=JobState.SUCCEEDED))
    assert store.jobs("c0ffee", open_only=True) == []
    assert store.open_job_counts() == {}


def test_tries_are_remembered_by_place(store: Store) -> None:
    order = cluster().order
    asked = msgspec.structs.replace(order, provider="gcp", zone="a", zones=("a", "b"))
    store.note_try(asked, False, 1000.0)
    store.note_try(msgspec.structs.replace(asked, zone="b"), True, 1000.0)
    found = store.tries()
    assert (found["gcp", "v6e-16", "a", False].good, found["gcp", "v6e-16", "a", False].bad) == (0.0, 1.0)
    assert (found["gcp", "v6e-16", "b", False].good, found["gcp", "v6e-16", "b", False].bad) == (1.0, 1.0)
    store.add_cluster(cluster())
    assert store.providers_used() == ("gcp", "local")


def test_tokens_are_kept_as_digests(store: Store) -> None:
    token = store.people.add_token("ann")
    (row,) = store.people.tokens()
    assert (row.user, row.role, row.digest, row.expires) == ("ann", "member", token_digest(token), None)
    with store.engine.connect() as db:
        rows = db.exec_driver_sql("SELECT * FROM tokens").all()
    assert token not in str(rows)
    assert store.people.revoke("ann") == 1
    assert store.people.tokens() == []


@pytest.mark.parametrize(
    "url", ["nonsense", "mysql://x/y", "postgresql://nobody@127.0.0.1:1/x", "sqlite:////no/such/dir/x.db"]
)
def test_a_bad_url_is_a_clear_error(url: str) -> None:
    with pytest.raises(UserError) as caught:
        open_store(url)
    assert "\n" not in caught.value.what


def test_a_password_never_shows(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        open_store("postgresql://ann:hunter2@127.0.0.1:1/x")
    assert "hunter2" not in str(caught.value)


@pytest.mark.e2e
def test_events_of_slow_writers_are_not_passed_by(postgres: str) -> None:
    """PostgreSQL hands out ids before a transaction is visible: whoever reads from the last id on must not miss the slower one."""
    store = open_store(postgres)
    slow, quick = (Event(time=1.0, cluster_id="race", text=text) for text in ("slow", "quick"))
    writer = threading.Thread(target=store.add_event, args=(quick,))
    with store.engine.begin() as db:
        add_events(db, (slow,))
        writer.start()
        writer.join(1.0)
        assert store.events("race") == []  # neither before the other
        assert writer.is_alive()
    writer.join(60)
    assert [event.text for event in store.events("race")] == ["slow", "quick"]
