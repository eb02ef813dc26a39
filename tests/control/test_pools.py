"""Pools: workers are kept, each job takes a free one and is run once, whatever is killed when."""

import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.control.access import Caller
from podway.control.decide_pool import SeenWorker, WorkerChanges, decide_pool
from podway.control.pool_driver import PoolDriver
from podway.control.pool_store import PoolWorker, WorkerPool
from podway.control.pools import PoolControl
from podway.control.records import ClusterState, Exit, Grant, JobOutcome, JobState
from podway.control.store import open_store, sqlite_url
from podway.control.vault import SecretVault
from podway.control.verbs import Control
from podway.errors import UserError
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.providers import open_provider
from podway.task.pools import PoolSize
from podway.task.task import Accelerator, Recovery, Resources, Task
from tests.long import every

ANN, BOB = Caller(user="ann"), Caller(user="bob")
replace = msgspec.structs.replace
ON = (Resources(accelerator=Accelerator(type="v6e-1")),)
WORKER = LaunchRequest(
    task=Task(setup="echo $KEY", secrets={"KEY": "s3cret"}, resources=ON), options=LaunchOptions(provider="local")
)
JOB = LaunchRequest(task=Task(name="work", run="true", secrets={"TOKEN": "hush"}, resources=ON))


def person(user: str) -> Caller | None:
    return Caller(user=user)


class World:
    """The verbs and the driver over one store; `up` does what the controllers of clusters would."""

    def __init__(self, place: Path) -> None:
        control = Control(
            store=open_store(sqlite_url(place / "p.db")),
            vault=SecretVault(place / "key"),
            provider=lambda name: open_provider(name, place),
            wake=lambda _: None,
        )
        self.verbs, self.store, self.control = PoolControl(control), control.store, control
        self.driver = PoolDriver(self.verbs, "one")

    def look(self, times: int = 3) -> None:
        for _ in range(times):
            self.driver.look(time.time(), person)

    def up(self) -> None:
        """Every worker is up, and every job on it has succeeded."""
        for cluster in self.store.live_clusters():
            if cluster.goal == "gone":
                self.store.update(cluster.id, lambda row: replace(row, state=ClusterState.GONE))
                continue
            self.store.update(cluster.id, lambda row: replace(row, state=ClusterState.UP))
            for job in self.store.jobs(cluster.id, open_only=True):
                end = JobState.CANCELLED if job.cancel else JobState.SUCCEEDED
                self.store.update_job(cluster.id, job.number, lambda row, end=end: replace(row, state=end))  # type: ignore[misc]

    def pool(self) -> WorkerPool:
        found = self.verbs.rows.get("p")
        assert found is not None
        return found

    def clusters(self) -> list[str]:
        return sorted(one.name for one in self.store.live_clusters())

    def jobs(self) -> list[tuple[int, str | None, str]]:
        return [(one.number, one.cluster, one.end) for one in self.verbs.rows.jobs(self.pool())]


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.verbs.apply("p", WORKER, PoolSize(workers=2, max_workers=2), ANN)
    return made


def test_jobs_take_free_workers_in_their_turn(world: World, tmp_path: Path) -> None:
    first = JOB, replace(JOB, task=replace(JOB.task, priority=9))
    assert world.verbs.submit("p", first[0], 2, ANN) == (1, 2) and world.verbs.submit("p", first[1], 1, ANN) == (3,)
    world.look()
    assert world.clusters() == ["p-1", "p-2"]
    assert world.jobs() == [(1, None, ""), (2, None, ""), (3, None, "")], "no worker is set up yet"
    world.up()
    world.look()
    assert world.jobs() == [(1, "p-2", ""), (2, None, ""), (3, "p-1", "")], "the highest priority first"
    setup, work = world.store.jobs(world.store.find("p-1").id)  # type: ignore[union-attr]
    assert world.control.vault.open(setup.sealed_secrets) == {"KEY": "s3cret"} and setup.run_setup
    assert world.control.vault.open(work.sealed_secrets) == {"TOKEN": "hush"} and not work.run_setup
    assert (work.task.env["SKYPILOT_JOB_RANK"], work.task.env["SKYPILOT_NUM_JOBS"]) == ("0", "1")
    world.up()
    world.look()
    assert world.jobs() == [(1, "p-2", "SUCCEEDED"), (2, "p-1", ""), (3, "p-1", "SUCCEEDED")]
    kept = (tmp_path / "p.db").read_bytes() + (tmp_path / "p.db-wal").read_bytes()
    assert b"s3cret" not in kept and b"hush" not in kept


def test_killed_at_any_write_every_worker_and_job_is_one(world: World) -> None:
    """The driver dies before each of its writes in turn, and another one goes on."""

    world.verbs.submit("p", JOB, 3, ANN)
    rows, writes = world.verbs.rows, ("save", "save_job")
    real = {name: getattr(rows, name) for name in writes}
    for deadly in range(40):
        left = [deadly % 4]

        def counted(name: str, left: list[int]) -> object:
            def write(record: object) -> object:
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return real[name](record)

            return write

        for name in writes:
            setattr(rows, name, counted(name, left))
        try:
            world.look(1)
        except Killed:
            pass
        finally:
            for name in writes:
                setattr(rows, name, real[name])
        pool = world.pool()
        if pool.held_by:  # the time of the dead one has passed
            rows.save(replace(pool, held_until=0.0))
        if deadly % 3 == 2:
            world.up()
    world.look()
    assert world.clusters() == ["p-1", "p-2"] and [end for _, _, end in world.jobs()] == ["SUCCEEDED"] * 3
    ran = [job.name for one in world.store.live_clusters() for job in world.store.jobs(one.id)]
    assert sorted(ran, key=str) == [None, None, "work", "work", "work"]


def test_size_and_revision(world: World) -> None:
    world.look()
    world.up()
    world.verbs.submit("p", JOB, 1, ANN)
    world.look()
    world.verbs.apply("p", None, PoolSize(workers=1, max_workers=1), ANN)
    world.look()
    assert [(one.number, one.drained) for one in world.pool().workers] == [(1, False), (2, True)], "the idle one goes"
    world.verbs.apply("p", WORKER, PoolSize(workers=1, max_workers=1), ANN)
    assert world.pool().revision == 1, "nothing but the number has changed"
    world.verbs.apply(
        "p", replace(WORKER, task=replace(WORKER.task, setup="other")), PoolSize(workers=1, max_workers=1), ANN
    )
    world.look()
    cluster = world.store.find("p-1")
    assert cluster is not None and cluster.goal == "up", "it has a job"
    assert world.clusters() == ["p-1", "p-2"], "no second set of workers while the first is there"
    world.up()  # the job ends, and p-2 is gone
    world.look()
    world.up()
    world.look()
    assert world.clusters() == ["p-3"] and world.jobs() == [(1, "p-1", "SUCCEEDED")]


def test_a_lost_workers_job_gets_another(world: World) -> None:
    world.verbs.submit("p", JOB, 1, ANN)
    world.look()
    world.up()
    world.look()
    cluster = world.store.find("p-1")
    assert cluster is not None
    world.store.update_job(cluster.id, 2, lambda row: replace(row, state=JobState.FAILED_DRIVER))
    world.store.update(cluster.id, lambda row: replace(row, state=ClusterState.GONE, goal="gone", reason="preempted"))
    world.look()
    assert world.jobs() == [(1, "p-2", "")] and world.pool().reason == "preempted"
    world.up()
    world.look()
    assert world.jobs() == [(1, "p-2", "SUCCEEDED")]


def test_cancel_and_down(world: World) -> None:
    world.look()
    world.up()
    world.verbs.submit("p", JOB, 3, ANN)
    world.look()
    assert world.verbs.cancel("p", (), ANN) == (1, 2, 3)
    world.look()
    world.up()
    world.look()
    assert [end for _, _, end in world.jobs()] == ["CANCELLED"] * 3
    with pytest.raises(UserError, match="no job 9"):
        world.verbs.cancel("p", (9,), ANN)
    world.verbs.submit("p", JOB, 3, ANN)
    world.look()
    world.verbs.down("p", ANN)
    with pytest.raises(UserError, match="being taken down"):
        world.verbs.submit("p", JOB, 1, ANN)
    world.look()
    world.up()
    world.look()
    assert world.verbs.rows.get("p") is None and world.clusters() == []


def test_a_pool_is_its_owners_and_takes_what_fits(world: World) -> None:
    with pytest.raises(UserError, match="is taken"):
        world.verbs.apply("p", WORKER, PoolSize(workers=1, max_workers=1), BOB)
    for ask in (lambda: world.verbs.submit("p", JOB, 1, BOB), lambda: world.verbs.down("p", BOB)):
        with pytest.raises(UserError, match="there is no pool"):
            ask()
    assert world.verbs.list_for(BOB) == []
    other = replace(JOB, task=replace(JOB.task, resources=(Resources(accelerator=Accelerator(type="v6e-8")),)))
    with pytest.raises(UserError, match="the workers of pool p are v6e-1, and the task asks for v6e-8"):
        world.verbs.submit("p", other, 1, ANN)
    with pytest.raises(UserError, match="run nothing by themselves"):
        world.verbs.apply("q", JOB, PoolSize(workers=1, max_workers=1), ANN)
    with pytest.raises(UserError, match="from 3 to 2 workers"):
        world.verbs.apply("q", WORKER, PoolSize(workers=3, max_workers=2), ANN)


def test_a_cluster_of_that_name_is_left_alone(world: World) -> None:
    taken = LaunchRequest(task=Task(run="true", resources=ON), options=LaunchOptions(provider="local", cluster="p-1"))
    world.control.launch(taken, ANN)
    world.look()
    assert world.pool().workers == () and "there is a cluster p-1 already" in world.pool().reason


STATES = st.sampled_from(["new", "starting", "free", "busy", "broken", "leaving", "gone"])


@given(
    st.lists(st.tuples(STATES, st.booleans(), st.booleans(), st.floats(0, 1000)), max_size=8),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 6),
    st.booleans(),
)
def test_no_plan_has_too_many_workers_or_ends_a_job(
    rows: list[tuple[str, bool, bool, float]], least: int, more: int, waiting: int, up: bool
) -> None:
    seen = [
        SeenWorker(
            worker=PoolWorker(
                number=number,
                revision=2 if new else 1,
                cluster_id=None if state == "new" else "c",
                drained=drained,
            ),
            state=state,  # type: ignore[arg-type]
            idle_s=idle,
        )
        for number, (state, new, drained, idle) in enumerate(rows, start=1)
    ]
    pool = WorkerPool(
        id="i",
        name="p",
        user="ann",
        request=WORKER,
        size=PoolSize(workers=least, max_workers=least + more or 1, idle_s=300),
        goal="up" if up else "gone",
        revision=2,
        workers=tuple(one.worker for one in seen),
        next_worker=len(seen) + 1,
        created=0.0,
    )
    plan = decide_pool(pool, seen, waiting, 1.0)
    there = [one for one in seen if one.state != "gone" and one.worker.number not in plan.forget]
    assert plan.add == 0 or len(there) + plan.add <= pool.size.max_workers
    busy = {one.worker.number for one in seen if one.state == "busy"}
    assert not up or not busy & set(plan.take_down)
    assert not {one.worker.number for one in seen if one.state in ("leaving", "gone", "new")} & set(plan.take_down)
    if up and not seen:
        assert plan == WorkerChanges(add=max(least, min(waiting, pool.size.max_workers) if more or not least else 0))


class Killed(BaseException):
    """The server, with -9."""


def killed(*_: object) -> None:
    raise Killed


@pytest.mark.parametrize("what", ["down", "smaller", "refused"])
def test_a_worker_launched_by_a_server_that_was_killed_is_not_forgotten(
    world: World, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch is done, and nobody has written so: whatever the pool is to be then, its cluster goes."""
    real, times = world.control.launch, iter(range(9))
    monkeypatch.setattr(world.control, "launch", lambda *a: killed(real(*a)) if next(times) else real(*a))
    with pytest.raises(Killed):
        world.look(1)
    assert world.clusters() == ["p-1", "p-2"] and [one.cluster_id is None for one in world.pool().workers] == [0, 1]
    world.verbs.rows.save(replace(world.pool(), held_until=0.0))  # the time of the dead one has passed
    monkeypatch.undo()
    if what == "down":
        world.verbs.down("p", ANN)
        world.look(1)
    elif what == "smaller":
        world.verbs.apply("p", None, PoolSize(workers=1, max_workers=1), ANN)
        world.look(1)
    else:
        world.driver.look(time.time(), lambda user: None)
        assert "no valid token" in world.pool().reason
    assert [one.number for one in world.pool().workers] == [1]
    world.up()
    assert world.clusters() == ([] if what == "down" else ["p-1"])


def end_job(world: World, name: str, state: JobState, **outcome: object) -> None:
    """The open job of a worker ends so."""
    found = world.store.find(name)
    assert found is not None
    (job,) = world.store.jobs(found.id, open_only=True)
    ended = JobOutcome(ended=1.0, **outcome)  # type: ignore[arg-type]
    world.store.update_job(found.id, job.number, lambda row: replace(row, state=state, outcome=ended))


def ready_with(world: World, job: LaunchRequest) -> str:
    """The worker that a job was given to."""
    world.look()
    world.up()
    world.verbs.submit("p", job, 1, ANN)
    world.look()
    (row,) = world.verbs.rows.jobs(world.pool())
    assert row.cluster is not None
    return row.cluster


LOST: dict[str, object] = {"hosts_lost": True}
CODE_3: dict[str, object] = {"exits": (Exit(rank=0, code=3),), "blamed_rank": 0}
NO_PROCESS: dict[str, object] = {"exits": (Exit(rank=0, lost=True),), "blamed_rank": 0}


@pytest.mark.parametrize(
    ("recovery", "state", "outcome", "again"),
    every(
        2,
        [
            # Hosts that are lost end no job, also in the moment before its cluster is marked as going.
            (None, JobState.FAILED_DRIVER, LOST, True),
            (None, JobState.FAILED, NO_PROCESS, True),
            (Recovery(events=("error",), max_restarts_on_errors=1), JobState.FAILED_DRIVER, LOST, False),
            (None, JobState.FAILED_DRIVER, {}, False),
            (None, JobState.FAILED, CODE_3, False),
            (Recovery(), JobState.FAILED, CODE_3, False),
            (Recovery(exit_codes=(3,)), JobState.FAILED, CODE_3, True),
            (Recovery(events=("error",), max_restarts_on_errors=1), JobState.FAILED, CODE_3, True),
            (Recovery(events=("error",), max_restarts_on_errors=1), JobState.CANCELLED, {}, False),
        ],
    ),
)
def test_a_job_begins_again_as_its_task_says(
    world: World, recovery: Recovery | None, state: JobState, outcome: dict[str, object], again: bool
) -> None:
    name = ready_with(world, replace(JOB, task=replace(JOB.task, recovery=recovery)))
    end_job(world, name, state, **outcome)
    world.look()
    (row,) = world.verbs.rows.jobs(world.pool())
    assert (row.end == "") == again and row.end in ("", state.value)
    if not again:
        return
    assert row.cluster is not None and "begins again" in row.reason
    end_job(world, row.cluster, JobState.FAILED, **CODE_3)
    world.look()
    (row,) = world.verbs.rows.jobs(world.pool())
    # From lost hosts it comes back every time, from errors as often as its task allows.
    assert (row.end == "") == (recovery is not None and 3 in recovery.exit_codes)
    ran = [job.number for one in world.store.live_clusters() for job in world.store.jobs(one.id) if job.name == "work"]
    assert len(ran) == (3 if row.end == "" else 2)


def test_jobs_sent_twice_are_submitted_once(world: World) -> None:
    """The answer was lost, and the client sends the request again; another person's id of the same text is another."""
    world.verbs.rows.save(replace(world.pool(), grants=(Grant(user="bob", right="use"),)))
    sent = replace(JOB, request_id="r1")
    assert [world.verbs.submit("p", sent, 2, ANN) for _ in range(2)] == [(1, 2), (1, 2)]
    assert world.verbs.submit("p", sent, 1, BOB) == (3,)
    assert world.verbs.submit("p", replace(JOB, request_id="r2"), 1, ANN) == (4,)
    assert [world.verbs.submit("p", JOB, 1, ANN) for _ in range(2)] == [(5,), (6,)]
    assert len(world.jobs()) == 6


def test_a_job_whose_worker_is_taken_down_in_that_moment_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.look()
    world.up()
    world.verbs.submit("p", JOB, 1, ANN)
    real = world.control.execute

    def taken_down(name: str, *given: object) -> object:
        if name == "p-1":
            world.control.down("p-1")
        return real(name, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(world.control, "execute", taken_down)
    world.look()
    assert [(end, cluster) for _, cluster, end in world.jobs()] == [("", "p-2")]


@pytest.mark.long
def test_two_hundred_jobs_for_four_workers_run_once_each(world: World) -> None:
    world.verbs.apply("p", None, PoolSize(workers=4, max_workers=4), ANN)
    assert len(world.verbs.submit("p", JOB, 200, ANN)) == 200
    for _ in range(120):
        world.look(1)
        open_work = [job for one in world.store.live_clusters() for job in world.store.jobs(one.id, open_only=True)]
        assert len(open_work) <= 4
        world.up()
        if all(end for _, _, end in world.jobs()):
            break
    assert [end for _, _, end in world.jobs()] == ["SUCCEEDED"] * 200
    assert world.clusters() == ["p-1", "p-2", "p-3", "p-4"]
    ranks = [
        job.task.env["SKYPILOT_JOB_RANK"]
        for one in world.store.live_clusters()
        for job in world.store.jobs(one.id)
        if job.name == "work"
    ]
    assert sorted(map(int, ranks)) == list(range(200))


def test_a_pool_that_cannot_be_looked_at_does_not_stop_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.verbs.apply("a", WORKER, PoolSize(workers=1, max_workers=1), ANN)
    real = world.driver._drive

    def broken(pool: WorkerPool, *given: object) -> None:
        if pool.name == "a":
            raise ValueError("no")
        real(pool, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(world.driver, "_drive", broken)
    world.look()
    assert world.clusters() == ["p-1", "p-2"]
