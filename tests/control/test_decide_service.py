"""What is decided for a service: alone, and in a simulated world where clusters come up, programs fail and servers answer."""

import random
from typing import Any

import msgspec
import pytest

from podway.control import service_changes
from podway.control.autoscale import LoadView
from podway.control.decide_service import MOST_FAILURES, decide_service
from podway.control.records import Cluster, ClusterState, JobState
from podway.control.replica_states import DRAIN_S, FAIL_AFTER_S, ProbeSummary, ReplicaSeen, advance, end
from podway.control.service_records import LEAVING, Replica, ReplicaState, ScalingMemory, Service, ServiceState
from podway.task.task import Probe, Resources, Scaling, Task
from tests.control import samples
from tests.control.service_samples import replica, revision, service

R = ReplicaState
PASSING = ProbeSummary(passing=True)
UP = samples.cluster(state=ClusterState.UP, hosts=samples.hosts())
GOING = msgspec.structs.replace(UP, goal="gone", reason="its hosts were preempted")


def seen(**changes: Any) -> ReplicaSeen:
    return msgspec.structs.replace(ReplicaSeen(cluster=UP, job=JobState.RUNNING, probe=PASSING), **changes)


def after(state: ReplicaState, look: ReplicaSeen, now: float = 2000.0, **changes: Any) -> Replica:
    return advance(replica(1, **{"state": state, "up_since": 1999.0, **changes}), look, revision(), now)


def test_a_replica_on_its_way_up() -> None:
    assert after(R.PENDING, ReplicaSeen(), cluster_id=None).state is R.PENDING
    making = seen(cluster=samples.cluster(), job=JobState.PENDING, probe=ProbeSummary())
    assert after(R.PENDING, making, cluster_id=None).cluster_id == "c0ffee"
    assert after(R.PENDING, making).state is R.PROVISIONING
    waiting = seen(probe=ProbeSummary(failures=3, refused=True, error="nothing listens"))
    found = after(R.PROVISIONING, waiting)
    assert (found.state, found.reason) == (R.STARTING, "nothing listens")
    assert found.host is not None and found.host.address == "127.20.0.1"
    assert after(R.STARTING, seen()).state is R.READY
    assert after(R.STARTING, seen()).ready_since == 2000.0


def test_probes_gate_traffic_at_all_times() -> None:
    one = seen(probe=ProbeSummary(failures=1, error="500"))
    assert after(R.READY, one).state is R.READY
    two = seen(probe=ProbeSummary(failures=2, error="500"))
    lost = after(R.READY, two)
    assert (lost.state, lost.failing_since, lost.reason) == (R.NOT_READY, 2000.0, "500")
    assert after(R.READY, seen(probe=ProbeSummary(failures=1, refused=True))).state is R.NOT_READY
    assert after(R.READY, seen(probe=ProbeSummary())).state is R.READY  # a server that has just started
    again = after(R.NOT_READY, seen(), failing_since=1990.0)
    assert (again.state, again.failing_since, again.ready_since) == (R.READY, None, 2000.0)
    late = after(R.NOT_READY, two, failing_since=2000.0 - FAIL_AFTER_S)
    assert (late.state, late.cause) == (R.SHUTTING_DOWN, "failed")


def test_a_replica_that_is_not_ready_in_time() -> None:
    slow = revision(probes=(Probe(initial_delay_s=30),))
    waiting = replica(1, state=R.STARTING, up_since=1000.0)
    none = seen(probe=ProbeSummary())
    assert advance(waiting, none, slow, 1029.0).state is R.STARTING
    assert advance(waiting, none, slow, 1031.0).cause == "failed"


@pytest.mark.parametrize("state", [R.PROVISIONING, R.STARTING, R.READY, R.NOT_READY])
def test_a_program_or_cluster_that_ends(state: ReplicaState) -> None:
    died = after(state, seen(job=JobState.FAILED, job_reason="exited with code 3"))
    assert (died.state, died.cause) == (R.SHUTTING_DOWN, "failed") and "code 3" in died.reason
    gone = after(state, seen(cluster=GOING))
    assert (gone.state, gone.cause) == (R.SHUTTING_DOWN, "failed")
    spot = msgspec.structs.replace(
        GOING,
        order=msgspec.structs.replace(GOING.order, spot=True),
        billing=msgspec.structs.replace(GOING.billing, up_since=1.0),
    )
    assert after(state, seen(cluster=spot)).cause == "preempted"


def test_draining() -> None:
    drains = end(replica(1), "scaled-down", "enough", 2000.0)
    assert (drains.state, drains.drain_since) == (R.DRAINING, 2000.0)
    assert end(replica(1, state=R.STARTING), "scaled-down", "", 1.0).state is R.SHUTTING_DOWN
    assert end(replica(1), "failed", "", 1.0).state is R.SHUTTING_DOWN
    rev = revision()
    assert advance(drains, seen(busy=True), rev, 2001.0).state is R.DRAINING
    assert advance(drains, seen(busy=None), rev, 2001.0).state is R.DRAINING
    assert advance(drains, seen(busy=False), rev, 2001.0).state is R.SHUTTING_DOWN
    assert advance(drains, seen(busy=True), rev, 2000.0 + DRAIN_S).state is R.SHUTTING_DOWN
    assert advance(drains, seen(job=JobState.FAILED, busy=True), rev, 2001.0).state is R.SHUTTING_DOWN
    assert end(drains, "service-down", "", 2005.0) == msgspec.structs.replace(drains, reason="")


def test_a_replica_has_ended_only_when_its_cluster_is_gone() -> None:
    going = replica(1, state=R.SHUTTING_DOWN, cause="failed", cluster_id="c0ffee")
    assert advance(going, seen(), revision(), 2000.0).state is R.SHUTTING_DOWN
    gone = msgspec.structs.replace(GOING, state=ClusterState.GONE)
    assert advance(going, seen(cluster=gone), revision(), 2000.0).state is R.FAILED
    updated = msgspec.structs.replace(going, cause="updated")
    assert advance(updated, seen(cluster=gone), revision(), 2000.0).state is R.GONE


class World:
    """A service with its replicas, where time passes as the test says and things happen as chance has it."""

    def __init__(self, made: Service, seed: int = 0, crash_rate: float = 0.0) -> None:
        self.service, self.now, self.next = made, 10_000.0, 1
        self.rows: dict[int, Replica] = {}
        self.clusters: dict[int, Cluster] = {}
        self.broken: set[int] = set()  # revisions that never answer
        self.dead: set[int] = set()  # replicas whose program has ended
        self.rng, self.crash_rate = random.Random(seed), crash_rate
        self.load: LoadView | None = None

    @property
    def open(self) -> list[Replica]:
        return [one for one in self.rows.values() if not one.done]

    def ready(self, number: int | None = None) -> list[Replica]:
        found = [one for one in self.open if one.state is R.READY]
        return found if number is None else [one for one in found if one.revision == number]

    def look(self, one: Replica) -> ReplicaSeen:
        cluster = self.clusters.get(one.number)
        job = None if cluster is None else JobState.FAILED if one.number in self.dead else JobState.RUNNING
        answers = one.revision not in self.broken and cluster is not None and cluster.state is ClusterState.UP
        probe = PASSING if answers else ProbeSummary(failures=5, refused=True, error="nothing listens")
        return ReplicaSeen(cluster=cluster, job=job, probe=probe, busy=False)

    def step(self, seconds: float = 1.0) -> None:
        self.now += seconds
        before, open_rows = self.service, self.open
        looks = {one.number: self.look(one) for one in open_rows}
        done = decide_service(self.service, open_rows, looks, self.load, self.now)
        self.service = done.service
        for one in done.replicas:
            self.rows[one.number] = one
        for new in done.create:
            row = replica(self.next, revision=new.revision, state=R.PENDING, host=None, spot=new.spot)
            self.rows[self.next] = msgspec.structs.replace(row, created=self.now)
            self.next += 1
        self.act()
        assert before.id == self.service.id

    def act(self) -> None:
        for one in self.open:
            cluster = self.clusters.get(one.number)
            if one.state is R.PENDING and cluster is None:
                self.clusters[one.number] = samples.cluster(id=f"c{one.number}")
            elif one.state is R.SHUTTING_DOWN and cluster is not None:
                self.clusters[one.number] = msgspec.structs.replace(cluster, goal="gone", state=ClusterState.GONE)
            elif cluster is not None and cluster.state is ClusterState.INIT:
                up = {"state": ClusterState.UP, "hosts": samples.hosts()}
                self.clusters[one.number] = msgspec.structs.replace(cluster, **up)
            if self.rng.random() < self.crash_rate:
                self.dead.add(one.number)

    def settle(self, steps: int = 60, seconds: float = 1.0) -> None:
        for _ in range(steps):
            self.step(seconds)

    def left(self) -> list[str]:
        return [one.name for one in self.clusters.values() if one.state is not ClusterState.GONE]


def fixed(count: int) -> Scaling:
    return Scaling(min_replicas=count, max_replicas=count)


def made(scaling: Scaling, **changes: Any) -> Service:
    target = ScalingMemory(target=scaling.min_replicas)
    return service(revisions=(revision(scaling=scaling),), memory=target, **changes)


def test_replicas_come_up_and_stay() -> None:
    world = World(made(fixed(3)))
    world.settle(6)
    assert len(world.ready()) == 3 and world.service.state is ServiceState.READY
    world.settle(50)
    assert world.next == 4  # none was made without need


def test_a_failed_replica_is_replaced() -> None:
    world = World(made(fixed(2)))
    world.settle(6)
    world.dead.add(1)
    world.settle(12)
    assert {one.number for one in world.ready()} == {2, 3}
    assert world.rows[1].state is R.FAILED and world.service.failures == 0


def test_one_that_never_works_is_given_up_and_tried_again_when_changed() -> None:
    quick = (Probe(initial_delay_s=5),)
    first = revision(scaling=fixed(1), probes=quick)
    world = World(service(revisions=(first,), memory=ScalingMemory(target=1)))
    world.broken.add(1)
    world.settle(400, 1.0)
    assert world.service.state is ServiceState.FAILED and world.left() == [] and world.next == MOST_FAILURES + 1
    assert "nothing listens" in world.service.reason
    world.service = service_changes.add_revision(world.service, revision(scaling=fixed(1), run="better"))
    world.settle(10)
    assert world.service.state is ServiceState.READY and [one.revision for one in world.ready()] == [2]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_rolling_update_never_has_fewer_ready(count: int) -> None:
    world = World(made(fixed(count)))
    world.settle(10)
    world.service = service_changes.add_revision(world.service, revision(scaling=fixed(count), run="new"))
    most = 0
    for _ in range(count * 12):
        world.step()
        assert len(world.ready()) >= count
        most = max(most, len([one for one in world.open if one.state not in LEAVING]))
    assert [one.revision for one in world.ready()] == [2] * count
    assert most <= count + max(1, -(-count // 4))


def test_a_broken_update_leaves_the_old_ones_and_can_be_rolled_back() -> None:
    world = World(made(fixed(2)))
    world.settle(10)
    bad = revision(scaling=fixed(2), run="bad", probes=(Probe(initial_delay_s=3),))
    world.broken.add(2)
    world.service = service_changes.add_revision(world.service, bad)
    for _ in range(300):
        world.step()
        assert len(world.ready(1)) == 2
    assert world.service.state is ServiceState.READY and "revision 2 failed" in world.service.reason
    world.service = service_changes.roll_to(world.service, 1)
    world.settle(10)
    assert len(world.ready(1)) == 2 and len(world.left()) == 2 and world.service.reason == ""


def test_a_canary_stands_beside_and_is_promoted() -> None:
    world = World(made(fixed(4)))
    world.settle(10)
    world.service = service_changes.add_revision(world.service, revision(scaling=fixed(4), run="new"), 0.25)
    world.settle(10)
    assert (len(world.ready(1)), len(world.ready(2))) == (4, 1)
    world.service = service_changes.roll_to(world.service, 2)
    world.settle(60)
    assert (len(world.ready(1)), len(world.ready(2))) == (0, 4)


def test_scaling_up_down_and_to_zero() -> None:
    scaling = Scaling(min_replicas=0, max_replicas=4, target_qps=1.0, up_delay_s=5, down_delay_s=10)
    world = World(made(scaling))
    world.settle(5)
    assert world.service.state is ServiceState.NO_REPLICA and world.left() == []
    world.load = LoadView(waiting=1, concurrency=1.0)
    world.settle(6)
    assert len(world.ready()) == 1
    world.load = LoadView(rps=4.0)
    world.settle(20)
    assert len(world.ready()) == 4
    world.load = LoadView()
    world.settle(40)
    assert world.service.state is ServiceState.NO_REPLICA and world.left() == []


def test_a_service_that_is_deleted_leaves_nothing() -> None:
    for steps in range(12):
        world = World(made(fixed(3)))
        world.settle(steps)
        world.service = service_changes.request_down(world.service)
        world.settle(12)
        assert world.service.state is ServiceState.GONE and world.left() == []


def spot_service(base: int, dynamic: bool, count: int) -> Service:
    first = revision(scaling=fixed(count), spot_fallback=base, dynamic_fallback=dynamic)
    task: Task = msgspec.structs.replace(first.task, resources=(Resources(spot="yes"),))
    return service(revisions=(msgspec.structs.replace(first, task=task),), memory=ScalingMemory(target=count))


def test_spot_replicas_with_on_demand_fallback() -> None:
    world = World(spot_service(base=1, dynamic=False, count=3))
    world.settle(10)
    assert sorted(one.spot is False for one in world.ready()) == [False, False, True]
    world = World(spot_service(base=0, dynamic=True, count=2))
    world.step()
    assert sorted(one.spot is False for one in world.open) == [False, False, True, True]  # stand-ins from the start
    world.settle(20)
    assert [one.spot for one in world.ready()] == [True, True]  # and they go when the spot ones are there
    for one in world.open:
        going = msgspec.structs.replace(world.clusters[one.number], goal="gone")
        spot = msgspec.structs.replace(going.order, spot=True)
        world.clusters[one.number] = msgspec.structs.replace(
            going, order=spot, billing=msgspec.structs.replace(going.billing, up_since=1.0)
        )
    world.step()
    assert sum(one.spot is False for one in world.open if one.state not in LEAVING) == 2
    assert world.service.failures == 0  # a preemption is not the service's fault


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_it_converges_and_nothing_leaks(seed: int) -> None:
    rng = random.Random(seed)
    scaling = Scaling(min_replicas=1, max_replicas=5, target_qps=1.0, up_delay_s=3, down_delay_s=3)
    world = World(made(scaling), seed, crash_rate=0.03)
    for _ in range(120):
        world.step(rng.choice([0.1, 1.0, 5.0]))
        if rng.random() < 0.1:
            world.load = rng.choice([None, LoadView(), LoadView(rps=rng.random() * 9), LoadView(waiting=2)])
        if rng.random() < 0.03:
            share = rng.choice([None, 0.3])
            world.service = service_changes.add_revision(world.service, revision(scaling=scaling, run="n"), share)
        if rng.random() < 0.02:
            world.service = service_changes.roll_to(world.service, rng.choice(world.service.revisions).number)
        if rng.random() < 0.02:
            low = rng.randrange(3)
            world.service = service_changes.scale(world.service, low, low + rng.randrange(3))
        assert world.service.find_revision(world.service.revision) is not None
    world.crash_rate, world.load = 0.0, None
    world.service = service_changes.retarget(world.service)
    world.settle(150)
    wanted = world.service.memory.target
    current = [one for one in world.ready() if one.revision == world.service.revision]
    assert len(current) == wanted and len(world.left()) == len(world.open)
    world.service = service_changes.request_down(world.service)
    world.settle(15)
    assert world.service.state is ServiceState.GONE and world.left() == []
