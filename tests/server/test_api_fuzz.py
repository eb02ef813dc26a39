"""The HTTP API under bad input: whatever is sent, the answer is clean JSON and never a 5xx."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from podway.control.verbs import Control
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.server.openapi import document
from podway.server.routes import ROUTES
from podway.server.routing import Stream
from podway.task.task import Accelerator, Resources, Task
from tests.server.in_process import server_in

TOKEN = "test-token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def web(tmp_path: Path) -> Iterator[TestClient]:
    with server_in(tmp_path, TOKEN) as client:
        yield client


LAUNCH = msgspec.to_builtins(
    LaunchRequest(
        task=Task(
            name="x",
            run="true",
            env={"A": "b"},
            secrets={"S": "t"},
            resources=(Resources(accelerator=Accelerator(type="v6e-8")),),
        ),
        options=LaunchOptions(cluster="c1"),
        request_id="r",
    )
)
SERVICE = {
    **LAUNCH,
    "task": {**LAUNCH["task"], "kind": "service", "service": {"port": 8000, "model": {"name": "m"}}},
    "options": {"cluster": "s1"},
    "request_id": "s",
}
SEEDS: dict[str, Any] = {
    "ApplyBody": {"request": SERVICE, "canary": None},
    "ScaleBody": {"min_replicas": 1, "max_replicas": 1},
    "CanaryBody": {"share": 0.1},
    "RollbackBody": {"revision": 1},
    "LaunchRequest": LAUNCH,
    "ExecBody": {"task": LAUNCH["task"], "files": []},
    "RunBody": {"command": "true"},
    "CertificateBody": {"public_key": "ssh-ed25519 AAAA", "rank": 0},
    "CancelBody": {"jobs": [1], "all": False},
    "AutostopBody": {"autostop": {"idle_minutes": 5, "down": True}},
    "DigestsBody": {"digests": ["0" * 64]},
    "TokenBody": {"user": "bob", "role": "viewer", "name": "laptop", "lifetime_s": 60.0},
    "GrantBody": {"right": "use"},
    "MemberBody": {"role": "viewer"},
    "VolumeBody": {"spec": {"name": "v", "placement": {"provider": "local"}}},
    "PoolBody": {"size": {"workers": 1, "max_workers": 1}, "request": {**LAUNCH, "task": {"setup": "true"}}},
    "GroupBody": {"tasks": [{"request": LAUNCH, "primary": True, "delay_s": 1.0}]},
    "PoolJobsBody": {"request": LAUNCH, "count": 2},
    "PoolCancelBody": {"jobs": [1]},
    "GatewayKeyBody": {"name": "app", "services": ["s"], "requests_per_minute": 60, "tokens_per_day": 1000},
    "GatewayReport": {
        "gateway": "g1",
        "sequence": 1,
        "url": "http://gateway",
        "services": [{"service": "s", "window_s": 5.0, "arrived": 3, "failures": {"s-1": 1}, "ttft": {"count": 3}}],
        "usage": [{"day": "2026-11-16", "user": "bob", "service": "s", "model": "m", "requests": 3}],
    },
    "RehearsalBody": {"slice": "v6e-8", "mesh": "fsdp=8", "batch": 8, "model": "no-such-model"},
    "ChatBody": {"model": "m", "messages": [{"role": "user", "content": "hello"}], "temperature": 0.5},
    "PlanBody": {"model": "llama3.1-8b", "tpu": "v6e-8", "seq": 1024, "tokens": 1e9},
}
OUTSIDE = {(path, "GET") for path in ("/openapi.json", "/healthz", "/", "/login", "/page/{path:path}")}
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    "",
    "x" * 5000,
    "\ud800",
    "\x00",
    "../../etc",
    [],
    {},
    [[]],
    {"": {}},
    "v6e-16",
    "A100",
]


def mutate(value: Any, rng: random.Random) -> Any:
    """One random change somewhere in a JSON tree."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        change = dict(value)
        roll = rng.random()
        if roll < 0.6:
            change[key] = mutate(value[key], rng)
        elif roll < 0.75:
            del change[key]
        else:
            change[rng.choice(["bogus", key + "x", ""])] = rng.choice(ODD)
        return change
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], mutate(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD)


def request(rng: random.Random) -> tuple[str, str, bytes | None]:
    route = rng.choice(
        [one for one in ROUTES if one.path != "/v1/changes"]
    )  # it goes on for an hour, unless told otherwise
    path = route.path.replace("{cluster}", rng.choice(["c1", "nope", "%00", "a b", "..", "é", "x" * 300]))
    path = path.replace("{job}", rng.choice(["1", "0", "-1", "99999999999999999999", "x", "1.5", "%F0%9F%92%A9"]))
    path = path.replace("{service}", rng.choice(["s1", "nope", "%00", "a b", "..", "x" * 300]))
    path = path.replace("{user}", rng.choice(["bob", "%2F", "x"]))
    path = path.replace("{project}", rng.choice(["p", "%2F", "x" * 200]))
    path = path.replace("{rehearsal}", rng.choice(["0" * 16, "%00", "x"]))
    path = path.replace("{token}", rng.choice(["0123456789ab", "%00", "x"]))
    if path.endswith(("/watch", "/metrics")):  # of a job that nothing drives here: to its end would be for ever
        path += "?follow=false"
    if rng.random() < 0.3:
        names = ["wait", "past", "after", "limit", "rank", "tail"]
        values = ["1e999", "nan", "-1", "x", "", "0", "%00"]
        path += f"{'&' if '?' in path else '?'}{rng.choice(names)}={rng.choice(values)}"
    if route.body is None or isinstance(route.body, Stream):
        return route.method, path, rng.randbytes(30) if route.body else None
    body: Any = SEEDS[route.body.__name__]
    for _ in range(rng.randrange(4)):
        body = mutate(body, rng)
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    roll = rng.random()
    if roll < 0.1:
        cut = rng.randrange(len(data) + 1)
        data = data[:cut] + rng.randbytes(rng.randrange(6)) + data[cut:]
    elif roll < 0.13:
        data = b"[" * 100_000
    return route.method, path, data


def fuzz(web: TestClient, count: int, seed: int) -> dict[int, int]:
    rng, seen = random.Random(seed), dict[int, int]()
    for _ in range(count):
        method, path, body = request(rng)
        headers = (
            HEADERS if rng.random() < 0.97 else {"Authorization": rng.choice(["", "Bearer", "Bearer x", "Basic x"])}
        )
        answer = web.request(method, path, content=body, headers=headers)
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (method, path, body, answer.text)
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error["what"] and "Traceback" not in error["what"] and "\n" not in error["what"], error
    return seen


def test_fuzzed_requests_get_clean_answers(web: TestClient) -> None:
    seen = fuzz(web, 700, seed=1)
    assert {200, 400, 401, 404} <= set(seen), seen


@pytest.mark.soak
def test_ten_thousand_fuzzed_requests(web: TestClient) -> None:
    assert sum(fuzz(web, 10_000, seed=2).values()) == 10_000


def test_a_token_is_needed_everywhere(web: TestClient) -> None:
    for path, verbs in document()["paths"].items():
        for verb in verbs:
            answer = web.request(verb, path.replace("{", "").replace("}", ""))
            assert answer.status_code == 401, (verb, path)


def test_the_openapi_document_covers_every_route(web: TestClient) -> None:
    shown = web.get("/openapi.json").json()
    assert {(r.path, r.method.lower()) for r in ROUTES} == {
        (p, v) for p, verbs in shown["paths"].items() for v in verbs
    }
    for route in ROUTES:
        told = shown["paths"][route.path][route.method.lower()]
        assert {p["name"] for p in told["parameters"] if p["in"] == "query"} == set(route.query)
    mounted = {(path.path, method) for path in web.app.routes for method in path.methods - {"HEAD"}}  # type: ignore[attr-defined]
    assert mounted - OUTSIDE == {(r.path, r.method) for r in ROUTES}
    assert shown["openapi"].startswith("3.1")


@pytest.mark.parametrize("number", ["\u00b2", "%C2%B2", "\u0663", "1e3", "-1", "+1", "0x1", "1_0", "9" * 30, " 1"])
def test_what_is_no_number_is_not_found(web: TestClient, number: str) -> None:
    for path in (f"/v1/clusters/c1/jobs/{number}", f"/v1/clusters/c1/jobs/{number}/watch?follow=false"):
        assert web.get(path, headers=HEADERS).status_code in (400, 404), path
    for path in (f"/v1/clusters/c1/events?after={number}", f"/v1/audit?limit={number}"):
        assert web.get(path, headers=HEADERS).status_code in (200, 400, 404), path


def test_a_path_can_neither_forge_lines_of_the_log_nor_steer_a_terminal(
    web: TestClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Control, "find_for", lambda *_: 1 / 0)
    assert web.get("/v1/clusters/a%0A%1B%5B2J2026-01-01 INFO forged", headers=HEADERS).status_code == 500
    (record,) = [one for one in caplog.records if "forged" in one.getMessage()]
    assert record.getMessage().isprintable()


def test_an_unknown_key_is_named(web: TestClient) -> None:
    body = {**LAUNCH, "task": {**LAUNCH["task"], "nmae": "x"}}
    error = web.post("/v1/launch", json=body, headers=HEADERS).json()["error"]
    assert "nmae" in error["what"] and "$.task" in error["what"]


def test_only_an_administrator_makes_tokens(web: TestClient) -> None:
    token = web.post("/v1/tokens", json={"user": "bob"}, headers=HEADERS).json()["token"]
    bob = {"Authorization": f"Bearer {token}"}
    assert web.get("/v1/info", headers=bob).json()["user"] == "bob"
    assert web.post("/v1/tokens", json={"user": "eve"}, headers=bob).status_code == 403
    assert web.delete("/v1/users/bob", headers=HEADERS).status_code == 200
    assert web.get("/v1/info", headers=bob).status_code == 401


def test_a_request_sent_twice_is_one_job(web: TestClient) -> None:
    first = web.post("/v1/launch", json=LAUNCH, headers=HEADERS).json()
    assert web.post("/v1/launch", json=LAUNCH, headers=HEADERS).json()["job"] == first["job"]
    assert len(web.get("/v1/clusters/c1/jobs", headers=HEADERS).json()["jobs"]) == 1


def test_what_was_agreed_to_is_what_is_launched(web: TestClient) -> None:
    shown = web.post("/v1/preview", json=LAUNCH, headers=HEADERS).json()
    other = {**LAUNCH, "agreed": "something else"}
    refused = web.post("/v1/launch", json=other, headers=HEADERS)
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "offer_changed"
    assert "v6e-8 (1 host, simulated on this machine)" in refused.json()["error"]["what"]
    assert web.get("/v1/clusters", headers=HEADERS).json()["clusters"] == []
    agreed = {**LAUNCH, "agreed": shown["digest"]}
    first = web.post("/v1/launch", json=agreed, headers=HEADERS).json()
    assert web.post("/v1/launch", json=agreed, headers=HEADERS).json()["job"] == first["job"]  # its answer was lost
    # Somebody else's cluster has taken the name since: it is not what was agreed to.
    assert web.post("/v1/launch", json={**agreed, "request_id": "s"}, headers=HEADERS).status_code == 409
    again = web.post("/v1/preview", json=LAUNCH, headers=HEADERS).json()
    assert again["exists"] and again["order"] == shown["order"] and again["digest"] != shown["digest"]
    agreed = {**LAUNCH, "agreed": again["digest"], "request_id": "s"}
    assert web.post("/v1/launch", json=agreed, headers=HEADERS).json()["job"] == first["job"] + 1


def test_the_latest_job_is_not_an_ad_hoc_command(web: TestClient) -> None:
    bare = {"resources": LAUNCH["task"]["resources"]}
    web.post("/v1/launch", json={**LAUNCH, "task": bare}, headers=HEADERS)
    assert web.get("/v1/clusters/c1/jobs/latest", headers=HEADERS).status_code == 404
    web.post("/v1/clusters/c1/run", json={"command": "uptime"}, headers=HEADERS)
    assert web.get("/v1/clusters/c1/jobs/latest", headers=HEADERS).json()["number"] == 1
    web.post("/v1/clusters/c1/jobs", json={"task": LAUNCH["task"]}, headers=HEADERS)
    web.post("/v1/clusters/c1/run", json={"command": "uptime"}, headers=HEADERS)
    latest = web.get("/v1/clusters/c1/jobs/latest", headers=HEADERS).json()
    assert (latest["number"], latest["ad_hoc"]) == (2, False)
    assert web.get("/v1/clusters/c1/jobs/\u00b2", headers=HEADERS).status_code == 404


def test_secret_values_are_not_in_the_database(web: TestClient, tmp_path: Path) -> None:
    task = {**LAUNCH["task"], "secrets": {"S": "hunter2-value"}}
    assert web.post("/v1/launch", json={**LAUNCH, "task": task}, headers=HEADERS).status_code == 200
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"hunter2-value" not in path.read_bytes(), path
