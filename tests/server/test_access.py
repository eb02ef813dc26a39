"""Every route against every kind of caller: who is let through, who is refused, and who is not even told."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from starlette.testclient import TestClient

from podway.control.access import Caller, Right, right_on
from podway.control.people import AuditEntry, token_digest
from podway.control.records import Grant
from podway.control.store import open_store, sqlite_url
from podway.server.routes import ROUTES
from podway.server.routing import Route
from tests.control.samples import cluster
from tests.server.in_process import server_in
from tests.server.test_api_fuzz import LAUNCH, SEEDS, SERVICE

LOCAL = "local-token"


class World(NamedTuple):
    web: TestClient
    tokens: dict[str, str | None]

    def ask(self, who: str, method: str, path: str, body: Any = None) -> Any:
        token = self.tokens[who]
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        data = None if body is None else json.dumps(body).encode()
        return self.web.request(method, path, headers=headers, content=data)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Cluster c1 and service s1 are amy's, in the project `vision`, shared with uma (use) and with vic (view)."""
    with server_in(tmp_path, LOCAL) as web:
        world = World(web, {"local": LOCAL, "none": None, "wrong": "pw_wrong"})

        def token(who: str, user: str, **more: Any) -> None:
            made = world.ask("local", "POST", "/v1/tokens", {"user": user, **more})
            assert made.status_code == 200, made.text
            world.tokens[who] = made.json()["token"]

        token("owner", "amy")
        token("owner, read-only", "amy", role="viewer")
        token("admin", "root", role="admin")
        token("project member", "mia")
        token("project viewer", "pat")
        token("other project", "olf")
        token("may use", "uma")
        token("may view", "vic")
        token("other", "eve")
        token("revoked", "rex")
        token("gateway", "edge", role="gateway")
        token("expired", "amy", lifetime_s=0.001)
        world.ask("local", "PUT", "/v1/projects/vision/members/amy", {})
        world.ask("local", "PUT", "/v1/projects/vision/members/mia", {})
        world.ask("local", "PUT", "/v1/projects/vision/members/pat", {"role": "viewer"})
        world.ask("local", "PUT", "/v1/projects/other/members/olf", {})
        assert world.ask("local", "DELETE", "/v1/users/rex").status_code == 200
        launch = {**LAUNCH, "options": {"cluster": "c1", "project": "vision"}}
        assert world.ask("owner", "POST", "/v1/launch", launch).status_code == 200
        service = {**SERVICE, "options": {"cluster": "s1", "project": "vision"}}
        assert world.ask("owner", "POST", "/v1/services", {"request": service}).status_code == 200
        for user, right in (("uma", "use"), ("vic", "view")):
            for owned in ("clusters/c1", "services/s1"):
                granted = world.ask("owner", "PUT", f"/v1/{owned}/grants/{user}", {"right": right})
                assert granted.status_code == 200 and granted.json()["shared_with"][user] == right, granted.text
        time.sleep(0.01)  # the token of a thousandth of a second
        yield world


# What each caller is answered by a route that needs this: let through, or refused with this status.
OK = 0
ACCESS = ("anyone", "create", "view", "use", "manage", "admin", "gateway")
MATRIX: dict[str, tuple[int, ...]] = {
    "none": (401, 401, 401, 401, 401, 401, 401),
    "wrong": (401, 401, 401, 401, 401, 401, 401),
    "revoked": (401, 401, 401, 401, 401, 401, 401),
    "expired": (401, 401, 401, 401, 401, 401, 401),
    "owner": (OK, OK, OK, OK, OK, 403, 403),
    "owner, read-only": (OK, 403, OK, 403, 403, 403, 403),
    "project member": (OK, OK, OK, OK, OK, 403, 403),
    "project viewer": (OK, OK, OK, 403, 403, 403, 403),
    "other project": (OK, OK, 404, 404, 404, 403, 403),
    "may use": (OK, OK, OK, OK, 403, 403, 403),
    "may view": (OK, OK, OK, 403, 403, 403, 403),
    "other": (OK, OK, 404, 404, 404, 403, 403),
    "admin": (OK, OK, OK, OK, OK, OK, OK),
    "gateway": (403, 403, 403, 403, 403, 403, OK),
    "local": (OK, OK, OK, OK, OK, OK, OK),
}


def a_request(route: Route) -> tuple[str, str, Any]:
    path = (
        route.path.replace("{cluster}", "c1")
        .replace("{service}", "s1")
        .replace("{job}", "1")
        .replace("{user}", "nobody")
    )
    path = path.replace("{project}", "none").replace("{token}", "0" * 12)
    path = path.replace("{rehearsal}", "0" * 16).replace("{key}", "0" * 12).replace("{digest}", "0" * 64)
    if path.endswith(("/watch", "/metrics")):
        path += "?follow=false"
    if path.endswith("/changes"):
        path += "?seconds=0.01"
    body = SEEDS.get(getattr(route.body, "__name__", ""), {}) if route.body is not None else None
    if route.path.endswith("/cancel"):
        body = {}  # the latest: the caller's own, of the routes before
    if route.path in ("/v1/launch", "/v1/preview"):
        body = {**LAUNCH, "options": {"cluster": "new"}, "request_id": None}
    if route.path == "/v1/services/preview":
        body = {**SERVICE, "options": {"cluster": "new"}, "request_id": None}
    return route.method, path, body


@pytest.mark.parametrize("who", MATRIX)
def test_the_matrix(world: World, who: str) -> None:
    # What ends the cluster comes last, so that it is there for all others.
    for route in sorted(ROUTES, key=lambda route: route.function.__name__ in ("down", "stop", "purge", "end_service")):
        method, path, body = a_request(route)
        answer = world.ask(who, method, path, body)
        expected = MATRIX[who][ACCESS.index(route.access)]
        told = (who, method, path, answer.status_code, answer.text[:300])
        if expected:
            assert answer.status_code == expected, told
            assert "c1" not in answer.text.replace(path, "") or expected != 404 or "'c1'" in answer.text, told
        else:
            assert answer.status_code not in (401, 403, 500), told
            assert answer.status_code != 404 or (
                "cluster 'c1'" not in answer.text and "service 's1'" not in answer.text
            ), told


def test_the_table_has_every_kind_of_route() -> None:
    """A new route says who may call it (there is no default), and one on a cluster needs a right on it."""
    for route in ROUTES:
        owned = "{cluster}" in route.path or "{service}" in route.path
        assert owned == (route.access in ("view", "use", "manage")), route.path
        changes = route.method != "GET" and route.function.__name__ not in (
            "preview",
            "preview_service",
            "files_missing",
            "upload",
            "plan",
            "report",  # several a minute from each gateway, and only counts
            "chat",
        )
        assert route.audited or not changes, route.path
        assert route.access != "view" or route.method == "GET", route.path


def test_what_one_may_not_see_is_not_listed_and_its_name_is_taken(world: World) -> None:
    for who, seen in (("owner", ["c1"]), ("may view", ["c1"]), ("other", []), ("other project", []), ("admin", ["c1"])):
        assert [c["name"] for c in world.ask(who, "GET", "/v1/clusters").json()["clusters"]] == seen
    missing = world.ask("other", "GET", "/v1/clusters/nope").json()["error"]
    assert "c1" not in json.dumps(missing)
    for route in ("/v1/launch", "/v1/preview"):
        taken = world.ask("other", "POST", route, LAUNCH)
        assert taken.status_code == 409 and "taken" in taken.json()["error"]["what"]
        assert world.ask("may view", "POST", route, LAUNCH).status_code == 403
    assert world.ask("may use", "POST", "/v1/launch", {**LAUNCH, "request_id": "u"}).status_code == 200
    with_autostop = {**LAUNCH, "options": {"cluster": "c1", "autostop": {"idle_minutes": 1}}}
    assert world.ask("may use", "POST", "/v1/launch", with_autostop).status_code == 403


def test_pools_and_groups_are_those_of_their_owner_and_project(world: World) -> None:
    """By every route of theirs: who may see them, who may change them, and for whom there are none."""
    vision = {"cluster": None, "project": "vision"}
    pool = {"size": {"workers": 1, "max_workers": 1}, "request": {"task": {"setup": "true"}, "options": vision}}
    group = {"tasks": [{"request": {"task": {"name": "a", "run": "true"}, "options": vision}}]}
    assert world.ask("owner", "PUT", "/v1/pools/p1", pool).status_code == 200
    assert world.ask("owner", "PUT", "/v1/groups/g1", group).status_code == 200
    jobs = {"request": {"task": {"run": "true"}}, "count": 1}
    own = {**pool, "request": {"task": {"setup": "true"}}}
    routes = (
        ("GET", "/v1/pools/p1", None),
        ("GET", "/v1/groups/g1", None),
        ("POST", "/v1/pools/p1/jobs", jobs),
        ("POST", "/v1/pools/p1/cancel", {}),
        ("PUT", "/v1/pools/p1", {"size": pool["size"]}),
        ("PUT", "/v1/pools/p1", own),
        ("PUT", "/v1/groups/g1", {"tasks": [{"request": {"task": {"name": "a", "run": "true"}}}]}),
        ("POST", "/v1/groups/g1/cancel", None),
        ("DELETE", "/v1/pools/p1", None),
    )
    ours = {(route.method, route.path.replace("{pool}", "p1").replace("{group}", "g1")) for route in ROUTES}
    named = {one for one in ours if one[1].startswith(("/v1/pools/", "/v1/groups/"))}
    assert named == {(method, path) for method, path, _ in routes}, "every route is asked"
    sees = ("owner", "owner, read-only", "project member", "project viewer", "admin", "local")
    for who in (*(one for one in MATRIX if one not in sees), "owner, read-only", "project viewer"):
        for method, path, body in routes:
            answer = world.ask(who, method, path, body)
            told = (who, method, path, answer.status_code, answer.text[:200])
            if method == "GET" and who in sees:
                assert answer.status_code == 200, told
            else:
                assert answer.status_code in (401, 403, 404, 409), told
                assert answer.status_code != 409 or "is taken" in answer.text, told
                assert who in sees or ("amy" not in answer.text and "vision" not in answer.text), told
        for kind in ("pools", "groups"):
            listed = world.ask(who, "GET", f"/v1/{kind}")
            assert listed.status_code in (401, 403) or len(listed.json()[kind]) == (who in sees), (who, kind)
    for who in ("owner", "project member", "admin", "local"):
        for method, path, body in routes[:5]:
            assert world.ask(who, method, path, body).status_code == 200, (who, method, path)
    assert world.ask("project member", "POST", "/v1/groups/g1/cancel").status_code == 200
    assert world.ask("project member", "DELETE", "/v1/pools/p1").status_code == 200


def test_names_and_bodies_of_pools_and_groups_are_refused_in_one_line(world: World) -> None:
    plain = {"task": {"name": "a", "run": "true"}}
    pool = {"size": {"workers": 1, "max_workers": 1}, "request": {"task": {"setup": "true"}}}
    names = ("..", "-x", "1x", "a b", "a%0Ab", "%F0%9F%92%A5", "x" * 300, "a;rm", "a%00b", "a%2Fb")
    asked: list[tuple[str, str, Any]] = [("PUT", f"/v1/pools/{name}", pool) for name in names]
    asked += [("PUT", f"/v1/groups/{name}", {"tasks": [{"request": plain}]}) for name in names]
    sizes = ({"workers": -1, "max_workers": 1}, {"workers": 1, "max_workers": 10**9}, {"workers": 2, "max_workers": 1})
    asked += [("PUT", "/v1/pools/p", {**pool, "size": size}) for size in (*sizes, {}, [], {"workers": "1"}, None)]
    tasks = ([], [{"request": plain}] * 2, [{"request": plain}] * 1000, [{"request": plain, "primary": False}])
    asked += [("PUT", "/v1/groups/g", {"tasks": some}) for some in (*tasks, {}, None, [None], [{"request": {}}])]
    bad = {"task": {"name": "../../x", "run": "true"}}
    asked += [("PUT", "/v1/groups/g", {"tasks": [{"request": bad}]}), ("PUT", "/v1/pools/p", {"size": None})]
    assert world.ask("owner", "PUT", "/v1/pools/p1", pool).status_code == 200
    counts = (0, -1, 10_001, 10**30, 1.5, "1", None, [])
    asked += [("POST", "/v1/pools/p1/jobs", {"request": plain, "count": count}) for count in counts]
    cancels: tuple[Any, ...] = ({"jobs": [99]}, {"jobs": [-1]}, {"jobs": [10**30]}, {"jobs": "1"}, {"all": True})
    asked += [("POST", "/v1/pools/p1/cancel", body) for body in cancels]
    for method, path, body in asked:
        answer = world.ask("owner", method, path, body)
        told = (method, path[:60], str(body)[:100], answer.status_code, answer.text[:300])
        assert 400 <= answer.status_code < 500, told
        if answer.status_code != 404 or answer.headers["content-type"] == "application/json":
            error = answer.json()["error"]
            assert error["what"] and error["what"].isprintable() and len(error["what"]) < 600, told
    assert world.ask("owner", "GET", "/v1/groups").json()["groups"] == []
    assert [one["name"] for one in world.ask("owner", "GET", "/v1/pools").json()["pools"]] == ["p1"]


def test_launching_into_a_project_takes_a_member(world: World) -> None:
    launch = {**LAUNCH, "options": {"cluster": "new", "project": "vision"}, "request_id": "n"}
    for who, status in (("other", 403), ("project viewer", 403), ("project member", 200)):
        assert world.ask(who, "POST", "/v1/launch", launch).status_code == status


def test_files_of_the_servers_machine_are_for_administrators(world: World) -> None:
    """Who could name an inventory would log in, with the server's own keys, to a machine of their choice: the server's, say."""
    places = [{"provider": "ssh", "region": "/etc/passwd"}, {"region": "/etc/passwd"}]
    for place in places:
        task = {"run": "true", "resources": [{"placement": place}]}
        body = {"task": task, "options": {"cluster": "new", "provider": "ssh"}, "request_id": "i"}
        for route in ("/v1/launch", "/v1/preview"):
            for who in ("owner", "project member", "other"):
                refused = world.ask(who, "POST", route, body)
                assert refused.status_code == 403, refused.text
                assert "may not name a file of the server's machine" in refused.text and "root:" not in refused.text
            assert world.ask("admin", "POST", route, body).status_code != 403


def test_whoever_may_use_a_cluster_cancels_their_own_jobs(world: World) -> None:
    assert world.ask("may use", "POST", "/v1/clusters/c1/cancel", {"jobs": [1]}).status_code == 403
    mine = world.ask("may use", "POST", "/v1/clusters/c1/run", {"command": "true"}).json()["job"]
    assert world.ask("may use", "POST", "/v1/clusters/c1/cancel", {"jobs": [mine]}).json()["jobs"] == [mine]
    assert world.ask("may use", "POST", "/v1/clusters/c1/cancel", {"all": True}).status_code == 403
    assert world.ask("project member", "POST", "/v1/clusters/c1/cancel", {"all": True}).status_code == 200


def test_what_was_granted_can_be_taken_back(world: World) -> None:
    assert world.ask("owner", "GET", "/v1/clusters/c1").json()["shared_with"] == {"uma": "use", "vic": "view"}
    world.ask("owner", "DELETE", "/v1/clusters/c1/grants/uma")
    assert world.ask("may use", "GET", "/v1/clusters/c1").status_code == 404
    world.ask("local", "DELETE", "/v1/projects/vision/members/mia")
    assert world.ask("project member", "GET", "/v1/clusters/c1").status_code == 404


def test_a_shared_service_is_opened_by_the_keys_of_those_who_may_use_it(world: World) -> None:
    """Their tokens and the keys they make; not of those who may only view it, and no longer when it was taken back."""

    def opened(key: str | None) -> list[str] | None:
        table = world.ask("admin", "GET", "/v1/gateway/routes").json()["table"]
        found = table["keys"].get(token_digest(key or ""))
        return None if found is None else found["services"]

    made = {
        who: world.ask(who, "POST", "/v1/gateway/keys", {"name": "app"}).json()["key"]
        for who in ("may use", "may view")
    }
    assert opened(made["may use"]) == opened(world.tokens["may use"]) == ["s1"]
    assert opened(made["may view"]) is opened(world.tokens["may view"]) is opened(world.tokens["other"]) is None
    assert [one["name"] for one in world.ask("may view", "GET", "/v1/services").json()["services"]] == ["s1"]
    assert world.ask("may use", "PUT", "/v1/services/s1/grants/eve", {"right": "use"}).status_code == 403
    assert world.ask("owner", "PUT", "/v1/services/s1/grants/uma", {"right": "manage"}).status_code == 400
    world.ask("owner", "DELETE", "/v1/services/s1/grants/uma")
    assert opened(made["may use"]) is opened(world.tokens["may use"]) is None
    assert world.ask("may use", "GET", "/v1/services/s1").status_code == 404
    assert world.ask("owner", "GET", "/v1/services/s1").json()["shared_with"] == {"vic": "view"}
    told = [event["text"] for event in world.ask("owner", "GET", "/v1/services/s1/events").json()["events"]]
    assert "is shared with uma (use)" in told and "is no longer shared with uma" in told


def test_tokens_are_listed_to_their_owner_and_revoked_one_by_one(world: World) -> None:
    mine = world.ask("owner", "GET", "/v1/tokens").json()["tokens"]
    assert {row["user"] for row in mine} == {"amy"} and len(mine) == 3
    assert len(world.ask("admin", "GET", "/v1/tokens").json()["tokens"]) > 8
    theirs = world.ask("other", "GET", "/v1/tokens").json()["tokens"][0]["id"]
    assert world.ask("owner", "DELETE", f"/v1/tokens/{theirs}").status_code == 404
    assert world.ask("other", "DELETE", f"/v1/tokens/{theirs}").status_code == 200
    assert world.ask("other", "GET", "/v1/info").status_code == 401
    for token in filter(None, world.tokens.values()):
        assert token not in world.ask("admin", "GET", "/v1/tokens").text


@pytest.mark.parametrize(
    "body",
    [{"user": ""}, {"user": "a b"}, {"user": "x" * 101}, {"user": "\x1b[2J"}, {"user": "a", "role": "king"},
     {"user": "a", "name": "../x"}, {"user": "a", "lifetime_s": 0}, {"user": "a", "lifetime_s": -5}],
)  # fmt: skip
def test_a_token_for_nobody(world: World, body: dict[str, Any]) -> None:
    assert world.ask("admin", "POST", "/v1/tokens", body).status_code == 400


def test_the_audit_log_tells_who_did_what(world: World) -> None:
    world.ask("other", "DELETE", "/v1/clusters/c1")
    world.ask("project member", "DELETE", "/v1/clusters/c1")
    entries = world.ask("admin", "GET", "/v1/audit?limit=2").json()["entries"]
    told = [(entry["user"], entry["action"], entry["target"], entry["status"]) for entry in entries]
    assert told == [("mia", "down", "c1", 200), ("eve", "down", "c1", 404)]
    assert entries[0]["token"] and entries[0]["address"]
    by_amy = world.ask("admin", "GET", "/v1/audit?user=amy").json()["entries"]
    assert {entry["action"] for entry in by_amy} == {"launch", "share", "share_service", "apply"}


@pytest.mark.parametrize("role", ["admin", "member", "viewer"])
@pytest.mark.parametrize("project", [None, "p"])
@pytest.mark.parametrize("membership", [None, "member", "viewer"])
@pytest.mark.parametrize("grant", [None, "view", "use"])
@pytest.mark.parametrize("owner", [True, False])
def test_rights(role: Any, project: str | None, membership: Any, grant: Any, owner: bool) -> None:
    caller = Caller(user="u", role=role, projects={"p": membership} if membership else {})
    grants = (Grant(user="u", right=grant),) if grant else ()
    here = msgspec.structs.replace(cluster(), user="u" if owner else "o", project=project, grants=grants)
    found = right_on(here, caller)
    if role == "admin":
        assert found is Right.MANAGE
        return
    best = max(
        Right.MANAGE if owner else 0,
        {"member": Right.MANAGE, "viewer": Right.VIEW, None: 0}[membership] if project else 0,
        {"use": Right.USE, "view": Right.VIEW, None: 0}[grant],
    )
    assert (found or 0) == (min(best, Right.VIEW) if role == "viewer" else best)


def test_old_entries_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podway.control.people.AUDIT_KEPT", 10)
    store = open_store(sqlite_url(tmp_path / "p.db"))
    people = store.people
    for number in range(1000):
        people.record(
            AuditEntry(time=float(number), user="u", token="t", address="", action="down", target="c", status=200)
        )
    assert len(people.audit(10_000)) == 10
    store.engine.dispose()
