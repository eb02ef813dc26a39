"""Requests on their way in: what HTTP asks for, what the protos allow, which fault is injected. Pure."""

from typing import Any

import hypothesis.strategies as st
import pytest
from google.cloud import tpu_v2
from hypothesis import given, settings

from podway.sandbox.agenda import Agenda
from podway.sandbox.compute.resources import Compute
from podway.sandbox.compute.routes import compute_route
from podway.sandbox.faults import Call, Faults, Rule
from podway.sandbox.hosts.guests import users_of
from podway.sandbox.ledger import Ledger
from podway.sandbox.names import read_duration, read_stamp, stamp
from podway.sandbox.status import STATUSES, ApiError
from podway.sandbox.tpu.routes import route
from podway.sandbox.tpu.schema import as_numbers, message_type, named

P = "projects/p/locations/us-east5-b"


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "v2/projects/p/locations", "ListLocations"),
        ("GET", f"v2/{P}", "GetLocation"),
        ("GET", f"v1/{P}/nodes", "ListNodes"),
        ("POST", f"v2alpha1/{P}/nodes", "CreateNode"),
        ("GET", f"v2/{P}/nodes/n", "GetNode"),
        ("DELETE", f"v2/{P}/nodes/n", "DeleteNode"),
        ("PATCH", f"v2/{P}/nodes/n", "UpdateNode"),
        ("POST", f"v2/{P}/nodes/n:stop", "StopNode"),
        ("POST", f"v2/{P}/nodes/n:getGuestAttributes", "GetGuestAttributes"),
        ("POST", f"v2alpha1/{P}/nodes/n:simulateMaintenanceEvent", "SimulateMaintenanceEvent"),
        ("POST", f"v2/{P}/queuedResources", "CreateQueuedResource"),
        ("POST", f"v2/{P}/queuedResources/q:reset", "ResetQueuedResource"),
        ("GET", f"v1/{P}/tensorflowVersions", "ListTensorFlowVersions"),
        ("GET", f"v2alpha1/{P}/reservations", "ListReservations"),
        ("POST", f"v2/{P}:generateServiceIdentity", "GenerateServiceIdentity"),
        ("GET", f"v2/{P}/operations/o", "GetOperation"),
        ("POST", f"v2/{P}/operations/o:cancel", "CancelOperation"),
    ],
)
def test_each_address_is_a_method(method: str, path: str, expected: str) -> None:
    assert route(method, path, {"alt": "json"}, None).method == expected


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PATCH", f"v1/{P}/nodes/n"),  # v1 has no update
        ("GET", f"v1/{P}/queuedResources"),
        ("GET", f"v2/{P}/reservations"),
        ("POST", f"v2/{P}/nodes/n:simulateMaintenanceEvent"),
        ("PUT", f"v2/{P}/nodes/n"),
        ("GET", "v3/projects/p/locations"),
        ("GET", f"v2/{P}/nodes/n/more"),
        ("GET", "v2/projects"),
    ],
)
def test_what_a_version_does_not_have_is_not_found(method: str, path: str) -> None:
    with pytest.raises(ApiError) as caught:
        route(method, path, {}, None)
    assert caught.value.http_code == 404


def test_query_and_body_become_the_fields_of_the_request() -> None:
    asked = route("POST", f"v2/{P}/nodes", {"nodeId": "n", "$alt": "json"}, {"acceleratorType": "v6e-8", "state": 2})
    assert asked.fields == {"nodeId": "n", "parent": P, "node": {"acceleratorType": "v6e-8", "state": "READY"}}
    asked = route("DELETE", f"v2/{P}/queuedResources/q", {"force": "True"}, None)
    assert asked.fields == {"force": True, "name": f"{P}/queuedResources/q"}
    assert asked.zone == "us-east5-b"
    assert asked.name == "q"


@pytest.mark.parametrize(
    "body",
    [
        {"acceleratorTyp": "v6e-8"},
        {"networkConfig": {"netwerk": "x"}},
        {"labels": ["a"]},
        {"acceleratorType": 8},
        {"acceleratorConfig": {"type": 99}},
        {"networkConfig": "default"},
        [],
        "x",
    ],
)
def test_what_the_protos_do_not_know_is_refused(body: Any) -> None:
    with pytest.raises(ApiError) as caught:
        route("POST", f"v2/{P}/nodes", {"nodeId": "n"}, body or {"x": 1})
    assert caught.value.status == "INVALID_ARGUMENT"


def test_enums_by_number_and_back() -> None:
    node = message_type("v2", "Node").DESCRIPTOR
    by_name = {"state": "READY", "acceleratorConfig": {"type": "V6E"}, "dataDisks": [{"mode": "READ_WRITE"}]}
    by_number = {
        "state": 2,
        "acceleratorConfig": {"type": int(tpu_v2.AcceleratorConfig.Type.V6E)},
        "dataDisks": [{"mode": 1}],
    }
    assert as_numbers(node, by_name) == by_number
    assert named(node, by_number) == by_name
    assert named(node, by_name) == by_name


@settings(max_examples=60)
@given(st.text(max_size=80), st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE"]))
def test_any_address_is_routed_or_refused(path: str, method: str) -> None:
    for start in ("", "v2/", f"v2/{P}/", f"v2/{P}/nodes/", "v1/projects/"):
        try:
            route(method, start + path, {}, None)
        except ApiError as error:
            assert error.status in ("NOT_FOUND", "INVALID_ARGUMENT")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 500) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "state", "labels", "tags", "acceleratorConfig", "type", "dataDisks"]), inner
        )
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(JSON)
def test_any_body_is_shaped_or_refused(body: Any) -> None:
    try:
        shaped = named(message_type("v2", "Node").DESCRIPTOR, body)
    except ApiError as error:
        assert error.status == "INVALID_ARGUMENT"
    else:
        assert named(message_type("v2", "Node").DESCRIPTOR, shaped) == shaped


@settings(max_examples=60)
@given(
    st.text(max_size=40), st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE"]), st.none() | st.just({"name": "x"})
)
def test_any_compute_address_is_routed_or_refused(path: str, method: str, body: Any) -> None:
    agenda = Agenda(1.0)
    compute = Compute(agenda, Ledger())
    for start in ("", "projects/p/", "projects/p/zones/us-east5-b/disks/", "projects/p/global/firewalls/"):
        try:
            _, act = compute_route(compute, lambda disk: [], method, f"/compute/v1/{start}{path}", {}, body)
            act(0.0, None)
        except ApiError as error:
            assert error.status in STATUSES


@settings(max_examples=60)
@given(st.floats(0, 4e9))
def test_times_come_back(when: float) -> None:
    assert read_stamp(stamp(when)) == pytest.approx(when, abs=1e-5)


@pytest.mark.parametrize("text", ["", "6h", "s", "3600", "-", "1e400x"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ApiError):
        read_duration(text)


CALLS = [
    Call(service="tpu", method=method, zone=zone, name="n")
    for method in ("CreateNode", "GetNode")
    for zone in ("a", "b")
]


def test_faults_pick_by_pattern_count_and_times() -> None:
    faults = Faults()
    faults.add(Rule(kind="error", method="Create*", zone="b", nth=2))
    struck = [call.zone for _ in range(3) for call in CALLS if faults.pick(call)]
    assert struck == ["b"]
    faults.remove(None)
    id = faults.add(Rule(kind="drop", service="tpu", times=3))
    assert sum(faults.pick(call) is not None for call in CALLS) == 3
    assert faults.view()[0]["struck"] == 3
    faults.remove(id)
    assert not any(faults.pick(call) for call in CALLS)
    with pytest.raises(ApiError):
        faults.remove(id)


@settings(max_examples=60)
@given(st.integers(0, 1000), st.floats(0, 1))
def test_the_same_seed_strikes_the_same_requests(seed: int, probability: float) -> None:
    def history() -> list[bool]:
        faults = Faults()
        faults.add(Rule(kind="lost", probability=probability, seed=seed))
        return [faults.pick(CALLS[0]) is not None for _ in range(50)]

    assert history() == history()


def test_who_may_log_in() -> None:
    node = {"ssh-keys": "\nann:ssh-ed25519 AAA ann@x\nroot:ssh-rsa BBB\nnonsense\n:no\nann:ssh-rsa CCC"}
    assert users_of({"ssh-keys": "bob:k"}, node) == {
        "bob": ["k"],
        "ann": ["ssh-ed25519 AAA ann@x", "ssh-rsa CCC"],
        "root": ["ssh-rsa BBB"],
    }
