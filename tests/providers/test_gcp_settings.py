"""The settings file and what the environment says, and how each error of the cloud is read."""

import json
import os
import socket
from pathlib import Path

import pytest
import requests
from google.api_core import exceptions
from google.auth.exceptions import RefreshError
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import ProviderError, UserError
from podway.providers.gcp.account import Account
from podway.providers.gcp.errors import GcpError, explain, failed_operation
from podway.providers.gcp.settings import KEYS, Settings, parse_settings, read_settings

ZONE = "us-central2-b"
PARENT = f"projects/p/locations/{ZONE}"


def test_a_full_file_is_read() -> None:
    text = b"""
project: my-project
zones: [us-east5-b, us-central1-ai1]
network: lab
subnetwork: tpus
external_ips: false
service_account: tpu@my-project.iam.gserviceaccount.com
tags: [ssh]
labels: {team: nlp}
ssh_user: ada
owner: team-a
"""
    assert parse_settings(text, "gcp.yaml") == Settings(
        project="my-project",
        zones=("us-east5-b", "us-central1-ai1"),
        network="lab",
        subnetwork="tpus",
        external_ips=False,
        service_account="tpu@my-project.iam.gserviceaccount.com",
        tags=("ssh",),
        labels={"team": "nlp"},
        ssh_user="ada",
        owner="team-a",
    )
    assert parse_settings(b"", "gcp.yaml") == Settings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"projct: x\n", "gcp.yaml:1:9: projct: unknown key"),
        (b"project: My Project\n", "cannot be a project"),
        (b"zones: [us-east5]\n", "zones[0]: `us-east5` cannot be a zone"),
        (b"ssh_user: 'a b'\n", "cannot be a ssh user"),
        (b"external_ips: perhaps\n", "expected true or false"),
        (b"- a\n", "expected a mapping"),
        (b"a: 1\n---\nb: 2\n", "several documents"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: bytes, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_settings(text, "gcp.yaml")
    assert said in caught.value.what
    assert caught.value.hint


@given(
    st.dictionaries(st.sampled_from(KEYS), st.text(max_size=12) | st.lists(st.text(max_size=8), max_size=3), max_size=4)
)
def test_no_file_makes_anything_but_settings_or_one_line(content: dict[str, object]) -> None:
    lines = "".join(f"{key}: {value!r}\n" for key, value in content.items())
    try:
        assert isinstance(parse_settings(lines.encode(), "gcp.yaml"), Settings)
    except UserError as error:
        assert "\n" not in error.what


def test_the_environment_goes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gcp.yaml").write_text("project: from-file\nzones: [us-east5-b]\nnetwork: lab\n")
    monkeypatch.setenv("PODWAY_GCP_PROJECT", "from-env")
    monkeypatch.setenv("PODWAY_GCP_ENDPOINT", "http://127.0.0.1:1/")
    monkeypatch.delenv("PODWAY_GCP_ZONES", raising=False)
    found = read_settings(tmp_path)
    assert (found.project, found.zones, found.network) == ("from-env", ("us-east5-b",), "lab")
    assert found.endpoint == "http://127.0.0.1:1"
    monkeypatch.setenv("PODWAY_GCP_ZONES", "us-west4-a, us-west1-c")
    assert read_settings(tmp_path).zones == ("us-west4-a", "us-west1-c")


def test_the_key_pair_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    account = Account(tmp_path)
    public = account.public_key()
    assert public.startswith("ssh-ed25519 ")
    assert account.public_key() == Account(tmp_path).public_key() == public
    assert account.identity_file.stat().st_mode & 0o777 == 0o600
    assert account.folder.stat().st_mode & 0o777 == 0o700
    assert account.owner == Account(tmp_path).owner


def test_without_a_project_it_says_where_to_write_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PODWAY_GCP_PROJECT", "GOOGLE_CLOUD_PROJECT", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "nothing"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError) as caught:
        _ = Account(tmp_path).project
    assert "no Google Cloud project" in caught.value.what
    assert "gcp.yaml" in caught.value.hint
    with pytest.raises(UserError) as caught:
        Account(tmp_path).credentials()
    assert "gcloud auth application-default login" in caught.value.hint


def test_gcloud_is_asked_for_project_and_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing but `gcloud auth login` was done; a gcloud that has these answers stands for the real one."""
    for name in ("PODWAY_GCP_PROJECT", "PODWAY_GCP_ENDPOINT", "GOOGLE_CLOUD_PROJECT", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud-config"))
    (tmp_path / "gcloud-config").mkdir()
    (tmp_path / "gcloud-config" / "credentials.db").touch()  # what a login leaves
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    answer = {
        "configuration": {"properties": {"core": {"project": "from-gcloud"}}},
        "credential": {"access_token": "ya29.x", "token_expiry": "2999-01-01T00:00:00Z"},
    }
    (tmp_path / "gcloud").write_text(
        f"#!/bin/sh\n[ \"$1 $2\" = 'config config-helper' ] && echo '{json.dumps(answer)}'\n"
    )
    (tmp_path / "gcloud").chmod(0o755)
    account = Account(tmp_path)
    assert account.project == "from-gcloud"
    credentials = account.credentials()
    headers: dict[str, str] = {}
    credentials.before_request(None, "GET", "https://tpu.googleapis.com", headers)
    assert headers["authorization"] == "Bearer ya29.x"


QUOTA = "Quota limit 'TPUV4PreemptiblePodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone us-central2-b."
STOCK = f'There is no more capacity in the zone "{ZONE}"; you can try in another zone where Cloud TPU Nodes are offered [EID: 0x1]'


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (exceptions.NotFound(f"Resource '{PARENT}/nodes/x' was not found"), "absent", "was not found"),
        (exceptions.AlreadyExists("Resource 'x' already exists"), "exists", "already exists"),
        (exceptions.TooManyRequests(QUOTA), "elsewhere", f"quota TPUV4PreemptiblePodPerProjectPerZoneForTPUAPI is 0 in {ZONE}"),
        (exceptions.ResourceExhausted(STOCK), "elsewhere", f"no capacity for v4-32 in {ZONE}"),
        (
            exceptions.TooManyRequests("Quota exceeded for quota metric 'Write requests' and limit 'Write requests per minute'"),
            "again",
            "too many requests",
        ),
        (
            exceptions.Forbidden(f"Permission 'tpu.nodes.create' denied on '{PARENT}'"),
            "elsewhere",
            f"permission tpu.nodes.create is missing in {ZONE} of project {PARENT.split('/')[1]}",
        ),
        (
            exceptions.PermissionDenied("Permission 'tpu.nodes.list' denied on 'projects/p'"),
            "never",
            "permission tpu.nodes.list is missing in project p",
        ),
        (
            exceptions.Forbidden("Required 'compute.disks.create' permission for 'projects/p/zones/z/disks/d'"),
            "never",
            "permission compute.disks.create is missing in project p",
        ),
        (
            exceptions.Forbidden("Cloud TPU API has not been used in project 12 before or it is disabled."),
            "never",
            "Cloud TPU API is not enabled in project 12",
        ),
        (exceptions.InvalidArgument("Runtime version 'x' is malformed"), "never", "Runtime version 'x' is malformed"),
        (
            exceptions.InvalidArgument(f'Cloud TPU received an invalid argument. The "v4-32" accelerator type is not in zone "{ZONE}"'),
            "elsewhere",
            "is refused in",
        ),
        (exceptions.BadRequest("The disk resource 'x' is already being used by 'y'"), "again", "already being used"),
        (exceptions.Unauthorized("no"), "never", "did not accept the credentials"),
        (RefreshError("expired"), "never", "did not accept the credentials"),  # type: ignore[no-untyped-call]
        (exceptions.ServiceUnavailable("busy"), "again", "busy"),
        (exceptions.DeadlineExceeded("slow"), "again", "slow"),
        (requests.ConnectionError("cut"), "again", "cannot be reached"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)  # fmt: skip
def test_every_error_is_of_one_kind(error: Exception, kind: str, said: str) -> None:
    found = explain(error, "v4-32", ZONE)
    assert found.kind == kind
    assert said in found.what
    made = found.as_error()
    assert isinstance(made, UserError if kind == "never" else ProviderError)
    if isinstance(made, UserError):
        assert made.hint


def test_a_cloud_that_cannot_be_reached_is_told_in_the_systems_words() -> None:
    with socket.socket() as taken:  # nobody listens on it
        taken.bind(("127.0.0.1", 0))
        place = "{}:{}".format(*taken.getsockname())
        with pytest.raises(requests.ConnectionError) as refused:
            requests.get(f"http://{place}/v2/projects/p", timeout=60)
    assert explain(refused.value, "v4-32", ZONE).what == f"Google Cloud cannot be reached: {place}: Connection refused"


def test_only_an_answer_is_sure() -> None:
    assert explain(exceptions.AlreadyExists("x"), "v4-32", ZONE).sure
    assert explain(exceptions.TooManyRequests(QUOTA), "v4-32", ZONE).sure
    assert not explain(requests.ConnectionError("cut"), "v4-32", ZONE).sure
    assert not explain(exceptions.ServiceUnavailable("busy"), "v4-32", ZONE).sure


def test_an_operation_that_failed_sends_elsewhere() -> None:
    assert failed_operation(8, STOCK, "v4-32", ZONE).what == f"no capacity for v4-32 in {ZONE}"
    assert failed_operation(8, QUOTA, "v4-32", ZONE).kind == "elsewhere"
    assert failed_operation(13, "internal", "v4-32", ZONE).kind == "elsewhere"
    assert "came in time" in failed_operation(4, "expired", "v4-32", ZONE).what


def test_our_own_mistakes_are_not_hidden() -> None:
    with pytest.raises(KeyError):
        explain(KeyError("x"), "v4-32", ZONE)
    assert explain(GcpError("again", "x"), "v4-32", ZONE).what == "x"
