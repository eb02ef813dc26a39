"""Which replicas take traffic, and who may send it."""

import msgspec
import pytest

from podway.control.access import Caller
from podway.control.records import Grant
from podway.control.route_table import HOLD_FROM_ZERO_S, route_table
from podway.control.service_records import ReplicaState
from podway.gateway.table import ApiKey
from podway.task.task import RateLimit, Scaling
from tests.control.service_samples import replica, revision, service


@pytest.mark.parametrize("state", ReplicaState)
def test_only_ready_replicas_are_in_it(state: ReplicaState) -> None:
    found = route_table([service()], [replica(1, state=state)], []).services[0].backends
    assert [one.address for one in found] == (["127.20.0.1:8000"] if state is ReplicaState.READY else [])


def test_a_service_that_ends_is_not_in_it() -> None:
    assert route_table([service(goal="gone")], [replica()], []).services == ()


def test_what_the_spec_says() -> None:
    limits = (RateLimit(prefix="/v1", rps=5, burst=2),)
    made = service(revisions=(revision(rate_limits=limits, auth=False, scaling=Scaling(min_replicas=0)),))
    found = route_table([made], [], []).services[0]
    assert (found.model, found.auth, found.hold_s) == ("tiny", False, HOLD_FROM_ZERO_S)
    assert (found.limits[0].prefix, found.limits[0].rps, found.limits[0].burst) == ("/v1", 5, 2)


def test_a_canary_has_its_share() -> None:
    made = service(revisions=(revision(1), revision(2)), canary=2, canary_share=0.1)
    ready = [replica(1), replica(2), replica(3), replica(4, revision=2)]
    weights = {one.id: one.weight for one in route_table([made], ready, []).services[0].backends}
    assert weights["web-4"] / sum(weights.values()) == pytest.approx(0.1)
    alone = route_table([made], ready[3:], []).services[0].backends
    assert [one.weight for one in alone] == [1.0]  # nothing else is there to answer


def test_who_may_use_which_service() -> None:
    shared = service(id="2", name="shared", grants=(Grant(user="bob", right="use"), Grant(user="eve", right="view")))
    team = service(id="3", name="team", user="mia", project="vision")
    callers = {
        "a": Caller(user="ann"),
        "b": Caller(user="bob"),
        "c": Caller(user="eve"),
        "d": Caller(user="root", role="admin"),
        "e": Caller(user="pat", projects={"vision": "member"}),
        "f": Caller(user="ann", role="viewer"),
        "g": Caller(user="ann", role="gateway"),
    }
    keys = route_table([service(), shared, team], [], callers.items()).keys
    assert keys == {
        "a": ApiKey(user="ann", services=("shared", "web")),
        "b": ApiKey(user="bob", services=("shared",)),
        "d": ApiKey(user="root", admin=True),
        "e": ApiKey(user="pat", services=("team",)),
    }


def test_the_version_names_the_content() -> None:
    table = route_table([service()], [replica(1), replica(2)], [])
    assert table == route_table([service()], [replica(2), replica(1)], [])
    assert table.version != route_table([service()], [replica(1)], []).version
    assert 0 <= table.version < 10**12
    assert msgspec.json.decode(msgspec.json.encode(table), type=type(table)) == table
