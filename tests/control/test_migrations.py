"""A database of any released Podway opens with all that is in it; one of a newer Podway is refused in words."""

import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa

from podway.cli.main import main
from podway.control.migrations import MIGRATIONS, SCHEMA
from podway.control.records import ClusterState, JobState
from podway.control.store import open_store, sqlite_url
from podway.errors import UserError
from tests.control.samples import cluster, job

DUMPS = Path(__file__).parent / "fixtures"


def old_database(tmp_path: Path, schema: int) -> str:
    path = tmp_path / "p.db"
    with sqlite3.connect(path) as db:
        db.executescript((DUMPS / f"schema-{schema}.sql").read_text())
    db.close()
    return sqlite_url(path)


def test_every_earlier_schema_has_its_dump() -> None:
    assert len(MIGRATIONS) == SCHEMA - 1
    assert {path.name for path in DUMPS.glob("schema-*.sql")} == {f"schema-{n}.sql" for n in range(1, SCHEMA)}


def in_postgres(url: str, tmp_path: Path, schema: int) -> str:
    """The same tables and rows in a database of a PostgreSQL server."""
    name = f"old_{schema}"
    admin = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT")
    with admin.connect() as db:
        db.exec_driver_sql(f"DROP DATABASE IF EXISTS {name}")
        db.exec_driver_sql(f"CREATE DATABASE {name}")
    admin.dispose()
    there = url.replace("/postgres?", f"/{name}?")
    source = sa.create_engine(old_database(tmp_path, schema))
    target = sa.create_engine(there.replace("postgresql://", "postgresql+psycopg://"))
    tables = sa.MetaData()
    tables.reflect(source)
    for column in (column for table in tables.tables.values() for column in table.columns):
        column.type = column.type.as_generic()
    with source.connect() as old, target.begin() as new:
        tables.create_all(new)
        for table in tables.sorted_tables:
            rows = [dict(row._mapping) for row in old.execute(sa.select(table))]
            if rows:
                new.execute(sa.insert(table), rows)
        new.exec_driver_sql("SELECT setval(pg_get_serial_sequence('events', 'id'), (SELECT max(id) FROM events))")
    source.dispose()
    target.dispose()
    return there


@pytest.mark.e2e
@pytest.mark.parametrize("schema", range(1, SCHEMA))
def test_it_is_read_in_postgres_too(tmp_path: Path, postgres: str, schema: int) -> None:
    check_what_is_read(in_postgres(postgres, tmp_path, schema))


@pytest.mark.parametrize("schema", range(1, SCHEMA))
def test_what_an_older_podway_wrote_is_read(tmp_path: Path, schema: int) -> None:
    check_what_is_read(old_database(tmp_path, schema))


def check_what_is_read(url: str) -> None:
    store = open_store(url)
    up, gone = store.find("demo"), store.find("old", gone=True)
    assert up is not None and gone is not None
    assert (up.state, up.user, len(up.hosts), up.autostop and up.autostop.down) == (ClusterState.UP, "ann", 4, True)
    assert {host.cluster for host in up.hosts} == {"demo"}
    assert (up.billing.up_since, up.billing.billed_s, up.billing.spent) == (1010.0, 60.0, 1.5)
    search = up.search
    assert (search.rounds, search.retry, search.generation, len(search.candidates)) == (2, True, 3, 1)
    assert search.attempts[0].outcome == "up" and search.untried == ("v5p-8 in x: no quota",)
    assert (gone.state, gone.reason, gone.ended) == (ClusterState.GONE, "could not be created: no capacity", 1100.0)
    recovering, failed = store.jobs(up.id)
    attempt = recovering.attempt
    assert recovering.state is JobState.RECOVERING and recovering.sealed_secrets == b"sealed"
    assert recovering.task.recovery is not None and recovering.task.env == {"A": "b"}
    assert (attempt.number, attempt.started, attempt.error_restarts, attempt.lost_generation) == (2, 1020.0, 1, 3)
    assert attempt.pids["run"] == [21, 22, 23, 24] and attempt.skew_ms == (0, 1, 0, 0)
    assert recovering.agent_job_id == "c0ffee-1.2"
    outcome = failed.outcome
    assert (failed.state, outcome.ended, outcome.blamed_rank) == (JobState.FAILED, 1050.0, 1)
    assert [end.code for end in outcome.exits] == [0, 3] and outcome.exits[0].cpu_s == 0.5
    assert not failed.run_setup and not failed.gang and failed.attempt.pids == {"run": [5, 6]}
    assert store.open_job_counts() == {up.id: 1}
    assert [event.text for event in store.events(up.id)] == ["submitted"]
    assert store.tries() and store.leases()[0][1] == "boot/1/2/x"
    roles = {row.user: (row.role, row.name, row.expires) for row in store.people.tokens()}
    assert roles.pop("bob") == ("admin", "", None)
    assert set(roles.values()) <= {("member", "", None)}
    store.save_cluster(up)  # and it can be written
    store.engine.dispose()
    open_store(url).engine.dispose()


@pytest.mark.parametrize("schema", range(1, SCHEMA))
def test_a_migrated_database_has_the_tables_of_a_new_one(tmp_path: Path, schema: int) -> None:
    def shape(url: str) -> dict[str, list[tuple[str, str, bool]]]:
        opened = open_store(url)
        inspector = sa.inspect(opened.engine)
        found = {
            table: [(c["name"], str(c["type"]), c["nullable"]) for c in inspector.get_columns(table)]
            for table in inspector.get_table_names()
        }
        opened.engine.dispose()
        return found

    assert shape(old_database(tmp_path, schema)) == shape(sqlite_url(tmp_path / "new.db"))


def test_a_step_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(db: sa.Connection) -> None:
        db.exec_driver_sql("DELETE FROM jobs")
        raise RuntimeError("power cut")

    url = old_database(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr("podway.control.migrations.MIGRATIONS", (broken,))
        with pytest.raises(RuntimeError):
            open_store(url)
    store = open_store(url)
    assert len(store.jobs("c0ffee")) == 2
    store.engine.dispose()


def test_a_newer_database_is_refused_with_what_to_do(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "p.db")
    store = open_store(url)
    store.add_cluster(cluster())
    store.add_job(job())
    with store.engine.begin() as db:
        db.exec_driver_sql(f"UPDATE podway_info SET value = '{SCHEMA + 1}'")
    store.engine.dispose()
    with pytest.raises(UserError) as caught:
        open_store(url)
    assert "newer Podway" in caught.value.what and "pip install -U" in caught.value.hint


def test_the_cli_says_why_the_server_did_not_start(podway_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    podway_home.mkdir(mode=0o700)
    store = open_store(sqlite_url(podway_home / "podway.db"))
    with store.engine.begin() as db:
        db.exec_driver_sql(f"UPDATE podway_info SET value = '{SCHEMA + 1}'")
    store.engine.dispose()
    assert main(["status"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("Error: the Podway server did not start: the database is of a newer Podway")
    assert told.endswith("update Podway on this machine: pip install -U podway\n")
