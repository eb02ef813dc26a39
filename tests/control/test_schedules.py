"""Schedules: started once when due, by one server, with the rights and secrets of who made them."""

from pathlib import Path

import msgspec
import pytest

from podway.control.access import Caller
from podway.control.schedules import AGAIN_S, ScheduleControl
from podway.control.service_verbs import ServiceControl
from podway.control.store import open_store, sqlite_url
from podway.control.vault import SecretVault
from podway.control.verbs import Control
from podway.errors import UserError
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.providers import open_provider
from podway.task.task import Accelerator, Resources, Task

ANN, BOB = Caller(user="ann"), Caller(user="bob")
NOON = 1_794_830_400.0  # 2026-11-16 12:00 UTC
HOURLY = Task(
    name="train",
    run="echo $KEY",
    schedule=("0 * * * *",),
    secrets={"KEY": "s3cret"},
    resources=(Resources(accelerator=Accelerator(type="v6e-1")),),
)


def person(user: str) -> Caller | None:
    return Caller(user=user)


def open_schedules(place: Path) -> ScheduleControl:
    control = Control(
        store=open_store(sqlite_url(place / "p.db")),
        vault=SecretVault(place / "key"),
        provider=lambda name: open_provider(name, place),
        wake=lambda _: None,
    )
    return ScheduleControl(ServiceControl(control))


def request(task: Task = HOURLY) -> LaunchRequest:
    return LaunchRequest(task=task, options=LaunchOptions(provider="local"))


def test_a_due_run_is_started_once(tmp_path: Path) -> None:
    one, other = open_schedules(tmp_path), open_schedules(tmp_path)
    made = one.put(request(), ANN, NOON + 5)
    assert made.next_at == NOON + 3600
    assert b"s3cret" not in (tmp_path / "p.db").read_bytes() + (tmp_path / "p.db-wal").read_bytes()
    assert one.start_due(NOON + 3599, person) == 0
    assert one.start_due(NOON + 3601, person) + other.start_due(NOON + 3601, person) == 1
    store = one._control.store
    cluster = store.find("train")
    assert cluster is not None and cluster.user == "ann"
    (job,) = store.jobs(cluster.id)
    assert job.task.schedule == () and one._control.vault.open(job.sealed_secrets) == {"KEY": "s3cret"}
    # The run before has not ended: the next one is skipped, and the one after that is due.
    assert other.start_due(NOON + 7201, person) == 0
    found = other.rows.get("train")
    assert found is not None and (found.last, found.last_at, found.next_at) == ("skipped", NOON + 7200, NOON + 10800)
    assert "has not ended" in found.reason and len(store.jobs(cluster.id)) == 1


def test_a_server_killed_while_it_starts_a_run_makes_no_second_one(tmp_path: Path) -> None:
    schedules = open_schedules(tmp_path)
    schedules.put(request(), ANN, NOON)
    save = schedules.rows.save
    writes: list[float] = []

    def killed_after_the_launch(record: object) -> object:
        writes.append(0)
        if len(writes) == 2:
            raise KeyboardInterrupt
        return save(record)  # type: ignore[arg-type]

    schedules.rows.save = killed_after_the_launch  # type: ignore[assignment,method-assign]
    with pytest.raises(KeyboardInterrupt):
        schedules.start_due(NOON + 3600, person)
    again = open_schedules(tmp_path)
    assert again.start_due(NOON + 3600 + 1, person) == 0, "it is claimed"
    assert again.start_due(NOON + 3600 + AGAIN_S, person) == 1
    cluster = again._control.store.find("train")
    assert cluster is not None and len(again._control.store.jobs(cluster.id)) == 1
    found = again.rows.get("train")
    assert found is not None and (found.last, found.last_at, found.next_at) == ("started", NOON + 3600, NOON + 7200)


def test_what_was_missed_is_started_once(tmp_path: Path) -> None:
    schedules = open_schedules(tmp_path)
    schedules.put(request(), ANN, NOON)
    assert schedules.start_due(NOON + 10 * 3600 + 30, person) == 1
    found = schedules.rows.get("train")
    assert found is not None and found.next_at == NOON + 11 * 3600


def test_a_failure_is_told_and_the_next_time_comes(tmp_path: Path) -> None:
    schedules = open_schedules(tmp_path)
    schedules.put(request(), ANN, NOON)
    taken = LaunchRequest(
        task=Task(run="x", resources=HOURLY.resources), options=LaunchOptions(cluster="train", provider="local")
    )
    schedules._control.launch(taken, BOB)
    schedules.start_due(NOON + 3600, person)
    found = schedules.rows.get("train")
    assert found is not None and found.last == "failed" and found.next_at == NOON + 7200
    assert "the name 'train' is taken" in found.reason
    cluster = schedules._control.store.find("train")
    assert cluster is not None and cluster.user == "bob"
    assert len(schedules._control.store.jobs(cluster.id)) == 1, "nobody's schedule runs on another's cluster"


def test_a_schedule_is_its_owners(tmp_path: Path) -> None:
    schedules = open_schedules(tmp_path)
    schedules.put(request(), ANN, NOON)
    with pytest.raises(UserError, match="is taken"):
        schedules.put(request(), BOB, NOON)
    with pytest.raises(UserError, match="there is no schedule"):
        schedules.delete("train", BOB)
    assert schedules.list_for(BOB) == [] and len(schedules.list_for(ANN)) == 1
    schedules.delete("train", ANN)
    assert schedules.start_due(NOON + 99999, person) == 0


def test_a_scheduled_task_is_not_launched_at_once(tmp_path: Path) -> None:
    control = open_schedules(tmp_path)._control
    with pytest.raises(UserError, match="starts by a schedule"):
        control.launch(LaunchRequest(task=HOURLY, options=LaunchOptions(cluster="c", provider="local")), ANN)
    assert control.store.find("c") is None


def test_who_may_no_longer_launch_starts_nothing(tmp_path: Path) -> None:
    schedules = open_schedules(tmp_path)
    member = Caller(user="ann", projects={"lm": "member"})
    options = LaunchOptions(provider="local", project="lm")
    schedules.put(LaunchRequest(task=HOURLY, options=options), member, NOON)
    for hour, who, why in (
        (1, None, "ann has no valid token that may launch"),
        (2, ANN, "ann is not a member of project 'lm'"),
        (3, member, ""),
    ):
        started = schedules.start_due(NOON + hour * 3600, lambda user, who=who: who)
        found = schedules.rows.get("train")
        assert found is not None and started == (who is member) and why in found.reason


def test_what_was_read_before_a_schedule_was_replaced_is_not_saved_over_it(tmp_path: Path) -> None:
    schedules = open_schedules(tmp_path)
    schedules.put(request(), ANN, NOON)
    before = schedules.rows.get("train")
    assert before is not None
    schedules.put(request(msgspec.structs.replace(HOURLY, run="echo other")), ANN, NOON)
    assert schedules.rows.save(before) is None
    after = schedules.rows.get("train")
    assert after is not None and after.request.task.run == "echo other"
