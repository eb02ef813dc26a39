"""Services with groups of replicas: each group is decided for itself, and what is put together is one service."""

import random
from typing import Any

import msgspec
import pytest

from podway.control import service_changes
from podway.control.autoscale import LoadView
from podway.control.decide_groups import decide_service_groups, group_failed, view_of
from podway.control.decide_service import MOST_FAILURES, Decision
from podway.control.records import ClusterState, JobState
from podway.control.replica_states import ProbeSummary, ReplicaSeen
from podway.control.route_table import HOLD_FROM_ZERO_S, route_table
from podway.control.service_records import LEAVING, Replica, ReplicaState, Revision, Service, ServiceState
from podway.control.traffic import taking_traffic
from podway.errors import UserError
from podway.task.task import ReplicaGroup, Resources, RoutedWorker, Scaling
from tests.control import samples
from tests.control.service_samples import HOST, replica, revision, service
from tests.long import every

R = ReplicaState
UP = samples.cluster(state=ClusterState.UP, hosts=samples.hosts())
READY = ReplicaSeen(cluster=UP, job=JobState.RUNNING, probe=ProbeSummary(passing=True))


def group(name: str, count: int = 1, high: int | None = None, run: str = "", **changes: Any) -> ReplicaGroup:
    scaling = Scaling(
        min_replicas=count, max_replicas=count if high is None else high, target_qps=1.0, up_delay_s=0, down_delay_s=0
    )
    plain = ReplicaGroup(name=name, resources=(Resources(),), run=run or f"run {name}", scaling=scaling)
    return msgspec.structs.replace(plain, **changes)


ROUTER = group("router", router="smg")
PREFILL = group("prefill", worker=RoutedWorker(role="prefill"))
DECODE = group("decode", 2, worker=RoutedWorker(role="decode"))


def grouped(*groups: ReplicaGroup, number: int = 1) -> Revision:
    return revision(number, groups=groups or (ROUTER, PREFILL, DECODE))


def ready(number: int, name: str, **changes: Any) -> Replica:
    return replica(number, group=name, **changes)


def decide(found: Service, replicas: list[Replica], load: LoadView | None = None, **seen: ReplicaSeen) -> Decision:
    looks = {one.number: seen.get(f"r{one.number}", READY) for one in replicas}
    return decide_service_groups(found, replicas, looks, load, 2000.0)


ALL = [ready(1, "router", workers=(2, 3, 4)), ready(2, "prefill"), ready(3, "decode"), ready(4, "decode")]


def test_each_group_gets_its_replicas() -> None:
    made = decide(service(revisions=(grouped(),)), [])
    assert sorted(one.group for one in made.create) == ["decode", "decode", "prefill", "router"]
    assert made.service.state is ServiceState.STARTING and set(made.service.groups) == {"router", "prefill", "decode"}
    whole = decide(made.service, ALL)
    assert whole.create == () and whole.service.state is ServiceState.READY
    assert {one.state for one in whole.service.groups.values()} == {ServiceState.READY}
    lost = decide(whole.service, ALL, r2=msgspec.structs.replace(READY, job=JobState.FAILED, job_reason="code 3"))
    assert [one.state for one in lost.replicas] == [R.READY, R.SHUTTING_DOWN, R.READY, R.READY]
    assert lost.create == () and lost.service.groups["prefill"].failures == 1  # after a pause
    assert lost.service.groups["decode"].failures == 0 and lost.service.state is ServiceState.NOT_READY
    gone = decide(service_changes.request_down(whole.service), ALL)
    assert {one.state for one in gone.replicas} == {R.DRAINING} and gone.service.state is ServiceState.SHUTTING_DOWN


def test_the_router_takes_traffic_when_it_lists_a_worker_of_every_role() -> None:
    found = service(revisions=(grouped(),))
    assert [one.number for one in taking_traffic(found, ALL)] == [1]
    for listed in ((), (2,), (3, 4), (9,)):
        bare = [msgspec.structs.replace(ALL[0], workers=listed), *ALL[1:]]
        assert taking_traffic(found, bare) == [] and route_table([found], bare, []).services[0].backends == ()
        assert decide(found, bare).service.state is ServiceState.STARTING
    assert [one.number for one in taking_traffic(found, ALL[:3])] == [1]
    assert taking_traffic(found, [ALL[0], ALL[1]]) == [] and taking_traffic(found, ALL[1:]) == []
    # What a worker does may stand in its own answers alone: then it is what the router says it is.
    plain = service(revisions=(grouped(ROUTER, group("prefill"), group("decode")),))
    told = {2: "prefill", 3: "decode"}
    for listed, takes in (((2,), []), ((3,), []), ((2, 3), [1])):
        roles = {number: told[number] for number in listed}
        seen = [msgspec.structs.replace(ALL[0], workers=listed, worker_roles=roles), *ALL[1:3]]
        assert [one.number for one in taking_traffic(plain, seen)] == takes
    gone = [msgspec.structs.replace(ALL[0], workers=(2, 3), worker_roles=told), ALL[1]]
    assert taking_traffic(plain, gone) == []  # the only one that decodes
    dynamo = service(revisions=(grouped(group("router", router="dynamo"), PREFILL, DECODE),))
    assert [one.number for one in taking_traffic(dynamo, [ready(1, "router"), *ALL[1:]])] == [1]
    alike = service(revisions=(grouped(group("small"), group("large")),))
    both = [ready(1, "small"), ready(2, "large"), ready(3, "large", state=R.NOT_READY)]
    assert [one.number for one in taking_traffic(alike, both)] == [1, 2]


def test_an_update_of_one_group_leaves_the_others_alone() -> None:
    found = service(revisions=(grouped(),))
    task = grouped(ROUTER, PREFILL, msgspec.structs.replace(DECODE, run="better")).task
    changes = service_changes.differences(found.current, task, (), False)
    assert [(one.path, one.rolls) for one in changes] == [("service.groups[2].run", True)]
    same = service_changes.unchanged_groups(found.current, task, changes)
    assert same == {"router": 1, "prefill": 1}
    second = msgspec.structs.replace(found.current, task=task, since=same)
    rolling = service_changes.add_revision(found, second)
    step = decide(rolling, ALL)
    assert [one.revision for one in step.replicas] == [2, 2, 1, 1]
    assert [(one.group, one.revision) for one in step.create] == [("decode", 2)]
    new = [*step.replicas, ready(5, "decode", revision=2), ready(6, "decode", revision=2)]
    # An old worker leaves when the router lists another in its place, and not when that is merely ready.
    for listed, leave in (((2, 3, 4), []), ((2, 3, 4, 6), [4]), ((2, 3, 4, 5, 6), [3, 4])):
        new[0] = msgspec.structs.replace(new[0], workers=listed)
        done = decide(step.service, new)
        assert [one.number for one in done.replicas if one.state is R.DRAINING] == leave
        assert {one.state for one in done.replicas if one.number not in leave} == {R.READY}
        assert [one.number for one in taking_traffic(done.service, done.replicas)] == [1]
    back = service_changes.roll_to(done.service, 1)
    assert [one.revision for one in decide(back, [*step.replicas[:2], *new[4:]]).replicas] == [1, 1, 2, 2]
    # Two groups after each other: what did not change is that of the first revision still.
    third = grouped(ROUTER, msgspec.structs.replace(PREFILL, run="faster"), task.service.groups[2]).task  # type: ignore[union-attr]
    found3 = service_changes.differences(rolling.current, third, (), False)
    assert service_changes.unchanged_groups(rolling.current, third, found3) == {"router": 1, "decode": 2}


def test_of_workers_that_are_too_many_those_leave_first_that_get_no_requests() -> None:
    found = decide(service(revisions=(grouped(),)), ALL).service
    fewer = service_changes.scale(found, 1, 1, "decode")
    for listed, leaves in (((2, 3, 4), 4), ((2, 4), 3)):
        rows = [msgspec.structs.replace(ALL[0], workers=listed), *ALL[1:]]
        assert [one.number for one in decide(fewer, rows).replicas if one.state is R.DRAINING] == [leaves]


@pytest.mark.parametrize("what", ["env", "secrets", "files", "port"])
def test_what_all_groups_have_rolls_all(what: str) -> None:
    found = service(revisions=(grouped(),))
    task = found.current.task
    if what == "env":
        task = msgspec.structs.replace(task, env={"A": "2"})
    if what == "port":
        task = msgspec.structs.replace(task, service=msgspec.structs.replace(task.service, port=81))  # type: ignore[type-var]
    changes = service_changes.differences(found.current, task, (), what == "secrets")
    if what == "files":
        changes.append(service_changes.Difference(path="files", old="", new="x", rolls=True))
    assert service_changes.unchanged_groups(found.current, task, changes) == {}


def test_scaling_and_probes_of_a_group_change_in_place() -> None:
    found = decide(service(revisions=(grouped(),)), ALL).service
    task = grouped(
        ROUTER, msgspec.structs.replace(PREFILL, scaling=Scaling(min_replicas=3, max_replicas=3)), DECODE
    ).task
    changes = service_changes.differences(found.current, task, (), False)
    assert service_changes.kind_of(changes) == "in-place"
    more = decide(service_changes.update_in_place(found, task), ALL)
    assert [one.group for one in more.create] == ["prefill", "prefill"]
    fewer = service_changes.scale(found, 0, 0, "decode")
    step = decide(fewer, ALL)
    assert [one.state for one in step.replicas] == [R.READY, R.READY, R.DRAINING, R.DRAINING]
    idle = decide(step.service, ALL[:2]).service
    assert idle.groups["decode"].state is ServiceState.NO_REPLICA and idle.state is ServiceState.NO_REPLICA
    assert route_table([idle], ALL[:2], []).services[0].hold_s == HOLD_FROM_ZERO_S
    for name, low, says in (("", 1, "say which"), ("x", 1, "no group"), ("router", 2, "is the router")):
        with pytest.raises(UserError) as error:
            service_changes.scale(found, low, low, name)
        assert says in f"{error.value.what} {error.value.hint}"
    with pytest.raises(UserError, match="has no groups"):
        service_changes.scale(service(), 1, 1, "x")


def test_a_group_that_fails_is_given_up_by_its_name() -> None:
    found = service(revisions=(grouped(),))
    for _ in range(MOST_FAILURES):
        found = group_failed(found, "decode", "", 1000.0)
    step = decide(found, ALL[:2])
    assert [one.group for one in step.create] == [] and step.service.state is ServiceState.FAILED
    assert step.service.reason.startswith("group decode: revision 1 failed 5 times")
    assert step.service.groups["prefill"].failures == 0
    assert service_changes.retarget(step.service).groups["decode"].failures == 0


def test_workers_follow_their_router_by_its_address() -> None:
    found = service(revisions=(grouped(group("router", router="dynamo"), PREFILL, DECODE),))
    told = [ready(1, "router"), *(ready(n, "decode", router_address=HOST.address) for n in (3, 4)), ALL[1]]
    assert {one.state for one in decide(found, told).replicas} == {R.READY}
    moved = msgspec.structs.replace(UP, hosts=(msgspec.structs.replace(UP.hosts[0], address="127.20.9.9"),))
    step = decide(found, told, r1=msgspec.structs.replace(READY, cluster=moved))
    assert [one.state for one in step.replicas] == [R.READY, R.DRAINING, R.DRAINING, R.READY]
    task = grouped(group("router", router="dynamo", run="other"), PREFILL, DECODE).task
    with pytest.raises(UserError, match="cannot be replaced while it runs"):
        service_changes.add_revision(found, msgspec.structs.replace(found.current, task=task, since={"decode": 1}))
    with pytest.raises(UserError, match="another type"):
        service_changes.add_revision(found, grouped())


def test_from_one_kind_of_replica_to_groups_and_back() -> None:
    """Old replicas answer until all groups do."""
    plain = service()
    rolling = service_changes.add_revision(plain, grouped(number=2))
    old = replica(9)
    step = decide(rolling, [old])
    assert step.replicas[0].state is R.READY and taking_traffic(rolling, [old]) == [old]
    new = [msgspec.structs.replace(one, revision=2) for one in ALL]
    bare = [msgspec.structs.replace(new[0], workers=()), *new[1:]]
    assert decide(step.service, [old, *bare]).replicas[0].state is R.READY
    done = decide(step.service, [old, *new])
    assert done.replicas[0].state is R.DRAINING
    back = service_changes.roll_to(done.service, 1)
    step = decide(back, [old, *new])
    assert step.service.groups == {} and step.service.state is ServiceState.READY


def test_the_load_is_shared_where_no_router_has_it_all() -> None:
    load = LoadView(rps=4.0, concurrency=4.0)
    alike = service(revisions=(grouped(group("small", 1, 9), group("large", 1, 9)),))
    both = [ready(1, "small"), ready(2, "large"), ready(3, "large"), ready(4, "large")]
    shared = decide(alike, both, load).service
    assert [view_of(shared, name).memory.target for name in ("small", "large")] == [1, 3]
    behind = service(revisions=(grouped(ROUTER, group("worker", 0, 9)),))
    assert view_of(decide(behind, [ALL[0]], load).service, "worker").memory.target == 4


@pytest.mark.parametrize("seed", every(14, range(42)))
def test_random_lives_end_as_the_file_says(seed: int) -> None:
    """Replicas come up and fail at random while groups are scaled, updated, added and removed; the end is what was asked for."""
    dice = random.Random(seed)
    found, open_, number, now = service(revisions=(grouped(),)), list[Replica](), 0, 2000.0
    for turn in range(120):
        quiet = turn > 60
        if not quiet and dice.random() < 0.15:
            found = _changed(found, dice)
        looks = {one.number: _look(one, dice, quiet) for one in open_}
        step = decide_service_groups(found, open_, looks, None, now)
        assert [one.number for one in step.replicas] == [one.number for one in open_]
        found, open_ = step.service, [one for one in step.replicas if not one.done]
        for new in step.create:
            number += 1
            assert new.group in found.group_names and new.revision == found.revision
            open_.append(replica(number, group=new.group, revision=new.revision, state=R.PENDING, host=None))
        listed = tuple(one.number for one in open_ if one.state is R.READY and one.group != "router")
        open_ = [msgspec.structs.replace(o, workers=listed) if o.group == "router" else o for o in open_]
        now += 30.0
    wanted = {one.name: one.scaling.min_replicas for one in found.spec.groups}
    alive = [one for one in open_ if one.state not in LEAVING]
    assert {name: sum(one.group == name for one in alive) for name in wanted} == wanted
    assert len(alive) == sum(wanted.values()) and {one.revision for one in alive} <= {found.revision}
    assert found.state in (ServiceState.READY, ServiceState.NO_REPLICA)


def _look(one: Replica, dice: random.Random, quiet: bool) -> ReplicaSeen:
    if one.state is R.SHUTTING_DOWN:
        return ReplicaSeen()
    failed = not quiet and dice.random() < 0.05
    job = JobState.FAILED if failed else JobState.RUNNING
    return ReplicaSeen(cluster=UP, job=job, probe=ProbeSummary(passing=quiet or dice.random() < 0.8), busy=False)


def _changed(found: Service, dice: random.Random) -> Service:
    groups = {one.name: one for one in found.spec.groups}
    name = dice.choice(["prefill", "decode"])
    what = dice.choice(["scale", "update", "env", "remove", "again"])
    if what == "scale":
        return service_changes.scale(found, *[dice.randrange(3)] * 2, name) if name in groups else found  # type: ignore[arg-type]
    if what == "again":
        return service_changes.retarget(found)
    if what == "remove" and name in groups and len(groups) > 2:
        del groups[name]
    elif what == "update":
        base = groups.get(name) or (PREFILL if name == "prefill" else DECODE)
        groups[name] = msgspec.structs.replace(base, run=f"run {dice.randrange(1000)}")
    task = msgspec.structs.replace(
        found.current.task,
        service=msgspec.structs.replace(found.spec, groups=tuple(groups.values())),
        env={"A": str(dice.randrange(1000))} if what == "env" else found.current.task.env,
    )
    changes = service_changes.differences(found.current, task, (), False)
    if service_changes.kind_of(changes) != "roll":
        return found
    same = service_changes.unchanged_groups(found.current, task, changes)
    return service_changes.add_revision(found, msgspec.structs.replace(found.current, task=task, since=same))
