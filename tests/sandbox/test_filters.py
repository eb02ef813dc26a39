"""Filters of list requests, labels and network paths, as Google's APIs take and show them."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.sandbox.filters import matches
from podway.sandbox.names import check_labels
from podway.sandbox.status import ApiError
from podway.sandbox.tpu.shapes import with_defaults

ITEM = {
    "name": "web-1",
    "status": "RUNNING",
    "sizeGb": "20",
    "on": True,
    "labels": {"team": "nlp", "empty": ""},
    "tags": ["a", "b"],
}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name=web-1",
        'name = "web-1"',
        "name:web-*",
        "name eq web-.*",
        "name ne db-.*",
        "name!=db",
        "labels.team=nlp AND status=RUNNING",
        "labels.team=nlp status=RUNNING",
        "(labels.team=nlp) (status=RUNNING)",
        "status=STOPPED OR status=RUNNING",
        "labels.team=nlp AND status=STOPPED OR status=RUNNING",  # OR binds closer
        "NOT status=STOPPED",
        "-status=STOPPED",
        "labels.team:*",
        "labels.nobody!=x",
        "tags:b",
        "on=true",
        "sizeGb>3 AND sizeGb<=20",
        "((name=web-1))",
    ],
)
def test_a_filter_lets_pass(text: str) -> None:
    assert matches(ITEM, text)


@pytest.mark.parametrize(
    "text",
    [
        "name=web",
        "name=db-1",
        "labels.team=nlp AND status=STOPPED",
        "status=STOPPED OR name=x",
        "status=RUNNING OR name=x AND labels.team=vision",
        "NOT name=web-1",
        "labels.nobody:*",
        "tags:c",
        "sizeGb>20",
        "name!=web-1",
    ],
)
def test_a_filter_holds_back(text: str) -> None:
    assert not matches(ITEM, text)


@pytest.mark.parametrize(
    "text", ["name", "name=", "=x", "(name=x", "name=x)", "name eq [", 'name="x', "a = b = c", "(" * 40]
)
def test_what_is_not_a_filter_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match="Invalid value for field 'filter'"):
        matches(ITEM, text)


@given(st.text(alphabet="ab.:=!<>()\"'\\ *ANDORT-1", max_size=40))
def test_any_text_passes_holds_back_or_is_refused(text: str) -> None:
    with contextlib.suppress(ApiError):
        matches(ITEM, text)


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ({"test-name": "r1.9"}, 'value "r1.9" contains invalid character \'.\' at index 2 for key "test-name"'),
        ({"Team": "x"}, "key \"Team\" contains invalid character 'T' at index 0"),
        ({"1st": "x"}, 'key "1st" must begin with a lowercase letter'),
        ({"": "x"}, "must begin with a lowercase letter"),
        ({"a" * 64: "x"}, "longer than 63"),
        ({"a": "x" * 64}, "longer than 63"),
        ({f"k{number}": "" for number in range(65)}, "at most 64"),
        ("a=b", "an object is expected"),
    ],
)
def test_labels_are_checked(labels: object, why: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_labels(labels)
    assert refused.value.status == "INVALID_ARGUMENT"
    assert why in refused.value.message


def test_good_labels_pass() -> None:
    check_labels(None)
    check_labels({"a": "", "team_1-x": "1-a_b", "größe": "klein", "k" * 63: "v" * 63})


@pytest.mark.parametrize(
    ("given_network", "network", "subnetwork"),
    [
        ({}, "projects/p/global/networks/default", "projects/p/regions/us-east5/subnetworks/default"),
        (
            {"network": "mine", "subnetwork": "tpus"},
            "projects/p/global/networks/mine",
            "projects/p/regions/us-east5/subnetworks/tpus",
        ),
        (
            {"network": "projects/q/global/networks/shared", "subnetwork": "regions/us-east5/subnetworks/tpus"},
            "projects/q/global/networks/shared",
            "projects/p/regions/us-east5/subnetworks/tpus",
        ),
        (
            {"network": "https://www.googleapis.com/compute/v1/projects/q/global/networks/shared"},
            "projects/q/global/networks/shared",
            "projects/p/regions/us-east5/subnetworks/default",
        ),
    ],
)
def test_networks_are_shown_by_their_full_paths(given_network: dict[str, str], network: str, subnetwork: str) -> None:
    shown = with_defaults({"networkConfig": given_network}, "p", "us-east5-b", "")["networkConfig"]
    assert (shown["network"], shown["subnetwork"]) == (network, subnetwork)
