"""The cloud's words become Podway's in one table, and several zones become one answer."""

import msgspec
import pytest
from google.cloud import tpu_v2
from hypothesis import given
from hypothesis import strategies as st

from podway.providers import Request, Step
from podway.providers.gcp.resources import Resource
from podway.providers.gcp.state import DISK, INSTANCE, NODE, QUEUED, ClusterRecord, condition_of, judge, owned_resource

A, B = "us-east5-b", "us-east1-d"


def node(zone: str = A, state: str = "READY", name: str = "demo-1", **more: object) -> Resource:
    path = f"projects/p/locations/{zone}/nodes/{name}"
    facts = {"accelerator_type": "v6e-16", "addresses": (("10.0.0.1", None),), **more}
    return Resource(kind="node", path=path, zone=zone, state=state, cluster="demo", owner="me", **facts)  # type: ignore[arg-type]


def queued(zone: str = A, state: str = "ACTIVE", **more: object) -> Resource:
    path = f"projects/p/locations/{zone}/queuedResources/demo"
    facts = {"accelerator_type": "v6e-16", **more}
    return Resource(kind="queued resource", path=path, zone=zone, state=state, cluster="demo", owner="me", **facts)  # type: ignore[arg-type]


def record(*zones: str, **more: object) -> ClusterRecord:
    steps = tuple(
        Step(verb="create-queued-resource", target=f"projects/p/locations/{zone}/queuedResources/demo")
        for zone in zones
    )
    asked = {step.target: 1.0 for step in steps}
    made = ClusterRecord(request=Request(provider="gcp", name="demo", steps=steps), nonce="n", began=0.0, asked=asked)
    return msgspec.structs.replace(made, **more)


def test_the_tables_hold_every_state_the_api_has() -> None:
    assert set(NODE) == {state.name for state in tpu_v2.Node.State}
    assert set(QUEUED) == {state.name for state in tpu_v2.QueuedResourceState.State}


def test_nothing_there_is_absent_and_a_record_makes_it_creating() -> None:
    assert judge((), None).condition == "absent"
    assert judge((), record(A)).condition == "creating"
    assert judge((), record(A, ending=True)).condition == "deleting"


@pytest.mark.parametrize(
    ("queue", "nodes", "expected"),
    [
        ("WAITING_FOR_RESOURCES", [], "creating"),
        ("PROVISIONING", ["CREATING"], "creating"),
        ("ACTIVE", ["CREATING"], "creating"),
        ("ACTIVE", [], "creating"),
        ("ACTIVE", ["READY"], "ready"),
        ("ACTIVE", ["PREEMPTED"], "preempted"),
        ("ACTIVE", ["REPAIRING"], "preempted"),
        ("SUSPENDING", ["PREEMPTED"], "preempted"),
        ("SUSPENDED", [], "preempted"),
        ("DELETING", ["READY"], "deleting"),
        ("FAILED", [], "failed"),
    ],
)
def test_a_queue_and_its_node(queue: str, nodes: list[str], expected: str) -> None:
    state = judge((queued(state=queue), *(node(state=one) for one in nodes)), record(A))
    assert state.condition == expected
    assert state.elsewhere == (expected == "failed")
    assert bool(state.reason) == (expected != "ready")


def test_maintenance_is_seen_on_a_node_that_is_ready() -> None:
    state = judge((node(health="UNHEALTHY_MAINTENANCE"),), None)
    assert (state.condition, state.reason) == ("preempted", f"v6e-16 in {A} is under maintenance")


def test_slices_come_in_their_order_and_only_together() -> None:
    parts = [node(name=f"demo-1-{i}", parts=12) for i in (10, 2, 0, 11, 1, 3, 4, 5, 6, 7, 8, 9)]
    state = judge((queued(parts=12), *parts), record(A))
    assert state.condition == "ready"
    assert state.unit is not None
    assert [resource.id for resource in state.unit.nodes] == [f"demo-1-{i}" for i in range(12)]
    assert judge((queued(parts=12), *parts[1:]), record(A)).condition == "creating"
    lost = judge((queued(parts=12), *parts[1:]), record(A, zone=A))
    assert (lost.condition, lost.reason) == ("preempted", f"1 of 12 in {A} are gone")


def test_the_first_whole_zone_is_kept_and_the_rest_is_surplus() -> None:
    waiting = queued(A, "WAITING_FOR_RESOURCES")
    there = (queued(B), node(B))
    state = judge((waiting, *there), record(A, B))
    assert state.condition == "ready"
    assert state.unit is not None
    assert (state.unit.zone, state.surplus) == (B, (waiting,))
    both = judge((queued(A), node(A), *there), record(A, B))
    assert both.unit is not None
    assert (both.unit.zone, both.surplus) == (A, there)
    # A cluster that runs in one zone stays there, whatever comes to be ready elsewhere.
    late = judge((queued(A), node(A), *there), record(A, B, zone=B))
    assert late.unit is not None
    assert late.unit.zone == B
    assert set(late.surplus) == {queued(A), node(A)}


def test_a_zone_that_failed_counts_when_no_other_is_left() -> None:
    refused = {A: f"quota X is 0 in {A}"}
    assert judge((), record(A, B, failures=refused)).condition == "creating"
    both = judge((), record(A, B, failures={**refused, B: f"no capacity for v6e-16 in {B}"}))
    assert (both.condition, both.elsewhere) == ("failed", True)
    assert both.reason == f"quota X is 0 in {A}; no capacity for v6e-16 in {B}"
    expired = judge((queued(B, "FAILED", why="expired"),), record(A, B, failures=refused))
    assert (expired.condition, expired.reason) == ("failed", f"quota X is 0 in {A}; expired")


def test_a_cluster_whose_nodes_are_gone_is_not_absent() -> None:
    """Else its disk and its rule would stay behind."""
    assert judge((), record(A, zone=A)).condition == "preempted"


def test_stopping_halfway_goes_on_as_it_was_wished() -> None:
    halves = (node(name="demo-1-0", parts=2, state="STOPPED"), node(name="demo-1-1", parts=2))
    assert judge(halves, record(A, zone=A, halted=True)).condition == "stopping"
    assert judge(halves, record(A, zone=A)).condition == "stopped"


THINGS = st.lists(
    st.one_of(
        st.builds(queued, st.sampled_from([A, B]), st.sampled_from(sorted(QUEUED))),
        st.builds(
            node, st.sampled_from([A, B]), st.sampled_from(sorted(NODE)), st.sampled_from(["demo-0", "demo-1"]),
            parts=st.integers(1, 2), queued=st.sampled_from(["", "projects/p/locations/z/queuedResources/demo"]),
        ),
        st.builds(
            Resource, kind=st.just("disk"), path=st.just(f"projects/p/zones/{A}/disks/demo"), zone=st.just(A),
            state=st.sampled_from(sorted(DISK)), cluster=st.just("demo"), owner=st.just("me"),
        ),
        st.builds(
            Resource, kind=st.just("instance"), path=st.just(f"projects/p/zones/{A}/instances/demo"), zone=st.just(A),
            state=st.sampled_from([*sorted(INSTANCE), "NEW_WORD"]), cluster=st.just("demo"), owner=st.just("me"),
            spot=st.booleans(),
        ),
    ),
    max_size=6,
)  # fmt: skip


@given(
    THINGS,
    st.one_of(
        st.none(),
        st.builds(
            lambda zone, failures, halted, ending: record(
                A, B, zone=zone, failures=dict.fromkeys(failures, "why"), halted=halted, ending=ending
            ),
            st.sampled_from([None, A, B]),
            st.sets(st.sampled_from([A, B])),
            st.booleans(),
            st.booleans(),
        ),
    ),
)
def test_no_answer_loses_anything(resources: list[Resource], known: ClusterRecord | None) -> None:
    """Absent is said only when nothing is there; ready only of whole units; and what is kept is never surplus."""
    state = judge(tuple(resources), known)
    if state.condition == "absent":
        assert not resources
        assert known is None
    if state.condition == "ready":
        assert state.unit is not None
        assert all(condition_of(part) == "ready" for part in state.unit.nodes)
        assert not {resource.zone for resource in state.surplus} & {state.unit.zone, None}
    if state.elsewhere:
        assert state.condition == "failed"
        assert state.reason


def test_a_forgotten_disk_has_a_price() -> None:
    disk = Resource(kind="disk", path="d", zone=A, state="READY", size_gb=730, disk_type="hyperdisk-balanced")
    assert owned_resource(disk).hourly_cost == pytest.approx(0.08)
    assert owned_resource(msgspec.structs.replace(disk, disk_type="new-kind")).hourly_cost is None
