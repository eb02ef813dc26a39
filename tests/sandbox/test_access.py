"""Who may ask the sandbox for anything: no API answers without its token, to a web page, or for a foreign host name."""

import base64
import http.client
import json
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.api_core import exceptions
from google.cloud import tpu_v1, tpu_v2, tpu_v2alpha1
from starlette.testclient import TestClient

from podway.sandbox.access import HOST, OWNER, Access
from podway.sandbox.hosts.metadata import Metadata
from podway.sandbox.running import Running, running_sandbox
from podway.sandbox.status import ApiError
from tests.sandbox.clients import over_grpc

PARENT = "projects/sandbox/locations/us-east5-b"
NODE = {
    "acceleratorType": "v6e-1",
    "runtimeVersion": "v2-alpha-tpuv6e",
    "metadata": {"ssh-keys": "root:ssh-ed25519 AAAA eve"},
}
# One reading and one changing request of each API.
REQUESTS = {
    "tpu list": ("GET", f"/v2/{PARENT}/nodes", None),
    "tpu create": ("POST", f"/v2/{PARENT}/nodes?nodeId=eve", NODE),
    "tpu v1 create": ("POST", f"/v1/{PARENT}/nodes?nodeId=eve", NODE),
    "tpu v2alpha1 create": ("POST", f"/v2alpha1/{PARENT}/nodes?nodeId=eve", NODE),
    "compute list": ("GET", "/compute/v1/projects/sandbox/zones/us-east5-b/instances", None),
    "compute insert": ("POST", "/compute/v1/projects/sandbox/zones/us-east5-b/instances", {"name": "eve"}),
    "compute keys": ("POST", "/compute/v1/projects/sandbox/setCommonInstanceMetadata", {"items": []}),
    "storage list": ("GET", "/storage/v1/b?project=sandbox", None),
    "storage create": ("POST", "/storage/v1/b?project=sandbox", {"name": "eves"}),
    "storage upload": ("POST", "/upload/storage/v1/b/eves/o?uploadType=media&name=x", {}),
    "storage resumed": ("PUT", "/upload/storage/v1/b/eves/o?uploadType=resumable&upload_id=upload-1", {}),
    "storage download": ("GET", "/download/storage/v1/b/eves/o/x?alt=media", None),
    "service usage": ("GET", "/v1beta1/projects/sandbox/services/tpu.googleapis.com/consumerQuotaMetrics", None),
    "resource manager": ("GET", "/v1/projects/sandbox", None),
    "command": ("GET", "/sandbox/ledger", None),
    "changing command": ("POST", "/sandbox/stock", {"chips": 0}),
    "metadata": ("GET", "/computeMetadata/v1/instance/service-accounts/default/token", None),
    "nothing": ("GET", "/", None),
}


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_sandbox(tmp_path_factory.mktemp("sandbox"), hosts="none") as running:
        yield running


def ask(sandbox: Running, what: str, headers: dict[str, str]) -> tuple[int, str]:
    """The status and the body of an answer; headers that are given replace those that a good client sends."""
    method, path, body = REQUESTS[what]
    connection = http.client.HTTPConnection(sandbox.rest.removeprefix("http://"), timeout=20)
    try:
        text = None if body is None else json.dumps(body)
        sent = {"Content-Type": "application/json", "Metadata-Flavor": "Google"} | headers
        connection.request(method, path, text, {key: value for key, value in sent.items() if value})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


WRONG = {
    "no token": {},
    "an empty token": {"Authorization": "Bearer "},
    "a wrong token": {"Authorization": "Bearer ya29.nothing"},
    "a token of another kind": {"Authorization": "Negotiate abc"},
    "a token that is no text": {"Authorization": "Basic /////w=="},
    "a wrong password": {"Authorization": "Basic " + base64.b64encode(b"sandbox:wrong").decode()},
}


@pytest.mark.parametrize("what", REQUESTS)
def test_every_api_wants_the_token(sandbox: Running, what: str) -> None:
    for why, headers in WRONG.items():
        status, body = ask(sandbox, what, headers)
        assert status == 401, f"{what} with {why}: {status} {body}"
        assert "podway sandbox env" in body


@pytest.mark.parametrize("what", REQUESTS)
def test_what_a_web_page_can_send_is_refused_with_the_token_too(sandbox: Running, what: str) -> None:
    port = sandbox.rest.rpartition(":")[2]
    foreign = [
        {"Host": name} for name in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "[evil]")
    ]
    origins = [{"Origin": origin} for origin in ("https://evil.example", "null", sandbox.rest)]
    for headers in (*foreign, *origins, {"Sec-Fetch-Site": "cross-site"}):
        status, body = ask(sandbox, what, {**sandbox.headers(), **headers})
        assert status == 403, f"{what} with {headers}: {status} {body}"


def test_a_body_must_say_that_it_is_json(sandbox: Running) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        for what in ("tpu create", "compute insert", "storage create", "changing command"):
            status, body = ask(sandbox, what, {**sandbox.headers(), "Content-Type": kind})
            assert status == 400 and "application/json" in body, (what, kind, body)
    assert sandbox.command("GET", "ledger")["living"] == []


def test_a_token_opens_all_of_them(sandbox: Running) -> None:
    basic = {"Authorization": "Basic " + base64.b64encode(f"sandbox:{sandbox.token}".encode()).decode()}
    for headers in (sandbox.headers(), basic, {**sandbox.headers(), "Host": "localhost"}):
        for what, (method, _, _) in REQUESTS.items():
            if method == "GET" and what not in ("metadata", "nothing", "storage download"):
                assert ask(sandbox, what, headers)[0] == 200, what
    # What only hosts are told is not told out here, to anybody.
    assert ask(sandbox, "metadata", sandbox.headers())[0] == 404


@pytest.mark.parametrize("module", [tpu_v1, tpu_v2, tpu_v2alpha1])
def test_grpc_wants_the_token_too(sandbox: Running, module: object) -> None:
    for token in ("", "wrong"):
        with pytest.raises(exceptions.Unauthenticated):
            next(iter(over_grpc(module, sandbox, token).list_nodes(parent=PARENT)), None)
    next(iter(over_grpc(module, sandbox).list_nodes(parent=PARENT)), None)


def test_grpc_without_metadata_or_with_an_origin_is_refused(sandbox: Running) -> None:
    with grpc.insecure_channel(sandbox.grpc) as channel:
        call = channel.unary_unary("/google.cloud.tpu.v2.Tpu/ListNodes")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=20)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
        login = ("authorization", f"Bearer {sandbox.token}")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=20, metadata=[login, ("origin", "https://evil.example")])
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED  # type: ignore[attr-defined]


def test_files_with_the_token_are_their_owners_alone(sandbox: Running) -> None:
    state = Path(sandbox.state)
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    holding = [
        path for path in state.rglob("*") if path.is_file() and sandbox.token in path.read_text(errors="replace")
    ]
    assert {path.name for path in holding} == {"sandbox.json", "token", "credentials.json"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in holding)
    arguments = Path(f"/proc/{sandbox.pid}/cmdline").read_text()
    assert sandbox.token not in arguments


def test_a_hosts_token_ends_with_its_node() -> None:
    access = Access()
    token = access.host_token(7, 0)
    assert access.host_token(7, 0) == token != access.host_token(7, 1)
    assert access.caller(f"Bearer {token}") == HOST
    assert access.caller(f"Bearer {access.token}") == OWNER
    access.revoke(7)
    with pytest.raises(ApiError, match="invalid"):
        access.caller(f"Bearer {token}")


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"origin": "https://evil.example"},
        {"x-forwarded-for": "1.2.3.4"},
        {"metadata-flavor": ""},
    ],
)
def test_the_metadata_server_tells_web_pages_nothing(headers: dict[str, str]) -> None:
    good = {"host": "metadata.google.internal", "metadata-flavor": "Google"}
    client = TestClient(Metadata(lambda: {"instance": {"name": "w-0"}}))
    path = "/computeMetadata/v1/instance/name"
    assert client.get(path, headers=good).text == "w-0"
    assert client.get(path, headers=good | {"host": "169.254.169.254"}).text == "w-0"
    assert client.get(path, headers=good | headers).status_code == 403


# What Google's services answer for a project that does not exist, and for one of somebody else's.
REFUSED = {
    "tpu list": ((403, "Permission denied on resource project nope."), (403, "'tpu.nodes.list' denied on 'projects/")),
    "compute list": ((404, "The resource 'projects/nope' was not found"), (403, "permission for 'projects/theirs'")),
    "service usage": (
        (403, "Project 'nope' not found or permission"),
        (403, "Project 'theirs' not found or permission"),
    ),
    "resource manager": ((403, "caller does not have permission"), (403, "caller does not have permission")),
    "storage list": ((400, "Unknown project id: nope"), (403, "denied on 'projects/theirs'")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_project_that_is_not_there_is_refused_as_each_service_does_it(
    sandbox: Running, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox.command("POST", "projects", {"name": "theirs", "access": False})
    method, path, body = REQUESTS[what]
    assert "sandbox" in path
    for project, (status, said) in zip(("nope", "theirs"), REFUSED[what], strict=True):
        monkeypatch.setitem(REQUESTS, what, (method, path.replace("sandbox", project), body))
        answered, text = ask(sandbox, what, sandbox.headers())
        assert (answered, said in text) == (status, True), text
