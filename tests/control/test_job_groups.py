"""Job groups: all hosts before any job, addresses of each other, and what ends with what; whatever is killed when."""

import time
from pathlib import Path

import msgspec
import pytest

from podway import crash
from podway.control.access import Caller
from podway.control.decide import decide
from podway.control.group_store import GroupRecord
from podway.control.job_groups import GroupControl
from podway.control.records import ClusterState, Grant, Job, JobState
from podway.control.store import open_store, sqlite_url
from podway.control.vault import SecretVault
from podway.control.verbs import Control
from podway.errors import UserError
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.order import Host
from podway.providers import Observation, open_provider
from podway.task.job_groups import GroupSpec
from podway.task.read import read_group_text, read_task_text, read_tasks_text

replace = msgspec.structs.replace
ANN, BOB = Caller(user="ann"), Caller(user="bob")
FILE = """name: duo
execution: parallel
primary_tasks: [trainer]
termination_delay: {default: 30s, server: 1m}
---
name: trainer
num_nodes: 2
resources: {accelerators: tpu-v6e-1}
envs: {AT: "http://server-0.duo:80"}
run: curl server-0.${SKYPILOT_JOBGROUP_NAME}:80 my-server-0.duo server-0.duo-2 trainer-1.$SKYPILOT_JOBGROUP_NAME/x
---
name: server
resources: {cpus: 2+}
secrets: {KEY: s3cret}
setup: listen trainer-0.duo
run: serve
"""


def spec(text: str = FILE) -> GroupSpec:
    found = read_group_text(text)
    assert found is not None
    return found


def person(user: str) -> Caller | None:
    return Caller(user=user)


class Killed(BaseException):
    """The server, with -9."""


def killed(*_: object, **__: object) -> None:
    raise Killed


class World:
    def __init__(self, place: Path) -> None:
        self.control = Control(
            store=open_store(sqlite_url(place / "p.db")),
            vault=SecretVault(place / "key"),
            provider=lambda name: open_provider(name, place),
            wake=lambda _: None,
        )
        self.store, self.groups = self.control.store, GroupControl(self.control)
        tasks = tuple(
            (one, LaunchRequest(task=one.task, options=LaunchOptions(provider="local"))) for one in spec().tasks
        )
        self.tasks = tasks
        self.launch = lambda who: self.groups.launch("duo", tasks, who)

    def look(self, at: float | None = None, times: int = 2) -> None:
        for _ in range(times):
            self.groups.look(time.time() if at is None else at, person)

    def up(self, name: str) -> None:
        found = self.store.find(name)
        assert found is not None
        count = 2 if name == "duo-trainer" else 1
        hosts = tuple(
            Host(rank=at, slice=at, worker=0, address=f"10.0.{count}.{at}", home="/", id=str(at)) for at in range(count)
        )
        self.store.update(found.id, lambda row: replace(row, state=ClusterState.UP, hosts=hosts))

    def job(self, name: str) -> Job:
        found = self.store.find(name, gone=True)
        assert found is not None
        (job,) = self.store.jobs(found.id)
        return job

    def end(self, name: str, state: JobState) -> None:
        job = self.job(name)
        self.store.update_job(job.cluster_id, 1, lambda row: replace(row, state=state, reason="it ended"))

    def group(self) -> GroupRecord:
        found = self.groups.rows.get("duo")
        assert found is not None
        return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.launch(ANN)
    return made


def test_no_job_begins_before_all_hosts_are_there(world: World) -> None:
    world.look()
    world.up("duo-trainer")
    world.look()
    job, cluster = world.job("duo-trainer"), world.store.find("duo-trainer")
    assert cluster is not None and job.held and not world.group().released
    seen = Observation(condition="ready", hosts=cluster.hosts)
    assert decide(cluster, [job], seen, 1.0).verb == "wait", "it is held"
    world.up("duo-server")
    world.look()
    job = world.job("duo-trainer")
    assert not job.held and decide(cluster, [job], seen, 1.0).verb == "begin-jobs"
    assert job.task.run == "curl 10.0.1.0:80 my-server-0.duo server-0.duo-2 10.0.2.1/x"
    assert job.task.env["AT"] == "http://10.0.1.0:80" and job.task.env["SKYPILOT_JOBGROUP_NAME"] == "duo"
    assert job.task.env["PODWAY_GROUP_HOSTS"].splitlines() == [
        "trainer-0.duo 10.0.2.0",
        "trainer-1.duo 10.0.2.1",
        "server-0.duo 10.0.1.0",
    ]
    server = world.job("duo-server")
    assert server.task.setup == "listen 10.0.2.0" and server.task.secrets == {"KEY": ""}
    assert world.control.vault.open(server.sealed_secrets) == {"KEY": "s3cret"}
    found = world.store.find("duo-server")
    assert found is not None and found.autostop is not None and found.autostop.down, "a cluster goes with its job"


def start(world: World) -> None:
    world.look()
    for name in ("duo-trainer", "duo-server"):
        world.up(name)
    world.look()
    assert world.group().released


def test_others_end_after_their_delay_when_the_primary_has(world: World) -> None:
    start(world)
    world.end("duo-trainer", JobState.FAILED)
    now = time.time()
    world.look(now)
    world.look(now + 59)
    assert not world.job("duo-server").cancel
    world.look(now + 61)
    assert world.job("duo-server").cancel and world.job("duo-server").reason == "the primary tasks have ended"
    world.end("duo-server", JobState.CANCELLED)
    world.look(now + 62)
    assert world.group().ended is not None
    world.look(now + 8 * 24 * 3600)
    assert world.groups.rows.get("duo") is None


def test_a_failure_of_one_that_is_not_primary_ends_nothing(world: World) -> None:
    start(world)
    world.end("duo-server", JobState.FAILED)
    world.look()
    assert not world.job("duo-trainer").cancel and world.group().ended is None


def test_where_one_cannot_be_had_nothing_runs(world: World) -> None:
    world.look()
    world.up("duo-trainer")
    world.end("duo-server", JobState.FAILED_NO_RESOURCE)
    world.look()
    assert world.job("duo-trainer").cancel and world.group().reason == "server: it ended"
    world.end("duo-trainer", JobState.CANCELLED)
    world.look()
    assert world.group().ended is not None


def test_cancel_ends_all_and_belongs_to_its_owner(world: World) -> None:
    start(world)
    with pytest.raises(UserError, match="there is no job group"):
        world.groups.cancel("duo", BOB)
    with pytest.raises(UserError, match="is taken"):
        world.launch(BOB)
    with pytest.raises(UserError, match="already"):
        world.launch(ANN)
    world.groups.cancel("duo", ANN)
    world.look()
    assert world.job("duo-trainer").cancel and world.job("duo-server").cancel


def test_killed_at_any_write_there_is_one_cluster_and_job_for_each(world: World) -> None:
    real = world.groups.rows.save
    for _ in range(2):  # before what was launched is written, and before that it was released
        world.groups.rows.save = killed  # type: ignore[method-assign,assignment]
        with pytest.raises(Killed):
            world.look()
        world.groups.rows.save = real  # type: ignore[method-assign]
        world.look(times=1)
        for name in ("duo-trainer", "duo-server"):
            if world.store.find(name) is not None:
                world.up(name)
    assert world.group().released and not world.job("duo-trainer").held
    assert sorted(one.name for one in world.store.live_clusters()) == ["duo-server", "duo-trainer"]


def test_a_cluster_launched_by_a_server_that_was_killed_goes_with_its_group(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second launch is done, nobody has written so, and the group is cancelled."""
    real, times = world.control.launch, iter(range(9))

    def launch(*given: object, **more: object) -> object:
        made = real(*given, **more)  # type: ignore[arg-type]
        return killed() if next(times) else made

    monkeypatch.setattr(world.control, "launch", launch)
    with pytest.raises(Killed):
        world.look()
    monkeypatch.undo()
    assert all(one.cluster_id is None for one in world.group().members)
    assert sorted(one.name for one in world.store.live_clusters()) == ["duo-server", "duo-trainer"]
    world.groups.cancel("duo", ANN)
    world.look()
    assert world.group().ended is not None and {one.goal for one in world.store.live_clusters()} == {"gone"}


def test_what_is_cancelled_while_it_is_launched_goes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = world.control.launch

    def launch(*given: object, **more: object) -> object:
        world.groups.cancel("duo", ANN)
        return real(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(world.control, "launch", launch)
    world.look()
    assert world.group().cancel and {one.goal for one in world.store.live_clusters()} == {"gone"}


def test_where_nothing_has_run_no_cluster_is_waited_for(world: World) -> None:
    """One that waits for capacity for ever would come after its group is forgotten."""
    world.look()
    world.groups.cancel("duo", ANN)
    world.look()
    assert {one.goal for one in world.store.live_clusters()} == {"gone"}


@pytest.mark.parametrize("at", ["group.release-written", "group.half-released"])
def test_killed_while_the_jobs_are_released_all_of_them_run(
    world: World, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first has succeeded, and its cluster is gone, before another server looks."""
    world.look()
    for name in ("duo-trainer", "duo-server"):
        world.up(name)
    monkeypatch.setattr(crash, "point", lambda name: killed() if name == at else None)
    with pytest.raises(Killed):
        world.look()
    monkeypatch.undo()
    if at == "group.half-released":
        assert not world.job("duo-trainer").held
        world.end("duo-trainer", JobState.SUCCEEDED)
        found = world.store.find("duo-trainer")
        assert found is not None
        world.store.update(found.id, lambda row: replace(row, state=ClusterState.GONE, goal="gone"))
    assert world.job("duo-server").held
    world.look(times=1)
    server = world.job("duo-server")
    assert not server.held and not server.cancel and server.task.setup == "listen 10.0.2.0"
    assert not world.group().cancel


def test_a_cluster_of_another_is_left_alone(world: World) -> None:
    """Of the same name, and launched after the group was written."""
    task = spec().tasks[1].task
    mine = LaunchRequest(task=task, options=LaunchOptions(provider="local", cluster="duo-server"))
    world.control.launch(mine, ANN)
    world.look()
    assert "there is a cluster duo-server already" in world.group().reason
    kept = world.store.find("duo-server")
    assert kept is not None and kept.goal == "up" and kept.autostop is None and len(world.store.jobs(kept.id)) == 1


def test_a_launch_sent_twice_is_one_group(world: World) -> None:
    tasks = tuple((one, replace(request, request_id="r1")) for one, request in world.tasks)
    first = world.groups.launch("trio", tasks, ANN)
    assert world.groups.launch("trio", tasks, ANN) == first
    other = tuple((one, replace(request, request_id="r2")) for one, request in world.tasks)
    with pytest.raises(UserError, match="has not ended"):
        world.groups.launch("trio", other, ANN)


def test_an_ended_group_is_replaced_by_those_who_manage_it_alone(world: World) -> None:
    world.groups.rows.save(replace(world.group(), ended=time.time(), grants=(Grant(user="bob", right="view"),)))
    with pytest.raises(UserError, match="may not"):
        world.launch(BOB)
    assert world.group().user == "ann"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("name: duo\n", "", "a job group has a name"),
        ("name: server\n", "", "a name of its own"),
        ("name: server\n", "name: trainer\n", "a name of its own"),
        ("[trainer]", "[trainr]", "no task `trainr`"),
        ("server: 1m", "servr: 1m", "no task `servr`"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(before: str, after: str, says: str) -> None:
    assert before in FILE
    with pytest.raises(UserError, match=says):
        read_group_text(FILE.replace(before, after, 1))


def test_a_group_is_told_from_a_pipeline() -> None:
    assert [(one.task.name, one.primary, one.delay_s) for one in spec().tasks] == [
        ("trainer", True, 30.0),
        ("server", False, 60.0),
    ]
    assert all(one.primary for one in spec(FILE.replace("primary_tasks: [trainer]\n", "")).tasks)
    serial = FILE.replace("execution: parallel", "execution: serial")
    assert read_group_text(serial) is None and read_group_text("run: x") is None
    for read in (read_task_text, read_tasks_text):
        with pytest.raises(UserError) as error:
            read(FILE)
        assert error.value.hint == "launch it: podway launch FILE"
