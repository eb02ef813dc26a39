"""What a gateway asks the server: the routes, waited for, and its reports."""

import threading
import time
from pathlib import Path

from podway.control.people import token_digest
from podway.control.service_records import ReplicaState
from podway.control.store import open_store, sqlite_url
from podway.control.vault import SecretVault
from podway.server.gateway_chat import page_key
from tests.control.service_samples import replica, service
from tests.server.in_process import server_in
from tests.server.test_api_fuzz import SERVICE

TOKEN = {"Authorization": "Bearer t"}


def test_routes_are_waited_for(tmp_path: Path) -> None:
    with server_in(tmp_path, "t") as web:
        first = web.get("/v1/gateway/routes", headers=TOKEN).json()["table"]
        assert first["services"] == []
        other = open_store(sqlite_url(tmp_path / "p.db"))  # another server on the same database

        def write() -> None:
            time.sleep(0.3)
            other.services.add(service())
            other.services.add_replica(replica(0, state=ReplicaState.READY), name=lambda n: f"web-{n}")

        thread = threading.Thread(target=write)
        thread.start()
        began = time.monotonic()
        found = first
        while not (found["services"] and found["services"][0]["backends"]):
            path = f"/v1/gateway/routes?after={found['version']}&wait=30"
            found = web.get(path, headers=TOKEN).json()["table"]
            assert time.monotonic() - began < 60
        thread.join()
        other.engine.dispose()
        assert found["services"][0]["backends"][0]["id"] == "web-1"
        same = web.get(f"/v1/gateway/routes?after={found['version']}&wait=0.1", headers=TOKEN).json()["table"]
        assert same == found


def test_a_report_is_bounded(tmp_path: Path) -> None:
    with server_in(tmp_path, "t") as web:
        body = {"gateway": "g", "sequence": 1, "services": [{"service": "web", "window_s": 1.0, "arrived": -1}]}
        assert web.post("/v1/gateway/report", json=body, headers=TOKEN).status_code == 400
        body["services"] = [{"service": "web", "window_s": 1.0, "arrived": 1}]
        assert web.post("/v1/gateway/report", json=body, headers=TOKEN).json() == {"accepted": True}
        assert web.post("/v1/gateway/report", json=body, headers=TOKEN).json() == {"accepted": False}


def test_the_page_s_requests_have_keys_of_their_own(tmp_path: Path) -> None:
    vault = SecretVault(tmp_path / "key")
    assert page_key(vault, "ann") == page_key(SecretVault(tmp_path / "key"), "ann") != page_key(vault, "bob")
    with server_in(tmp_path, "t") as web:
        owner = "amy"
        for user, role in ((owner, "member"), ("vic", "viewer"), ("gus", "gateway")):
            assert web.post("/v1/tokens", json={"user": user, "role": role}, headers=TOKEN).status_code == 200
        other = open_store(sqlite_url(tmp_path / "p.db"))
        other.services.add(service(user=owner))
        other.engine.dispose()
        keys = web.get("/v1/gateway/routes", headers=TOKEN).json()["table"]["keys"]
        found = keys[token_digest(page_key(vault, owner))]
        assert found["user"] == owner and found["services"] == ["web"] and not found.get("admin")
        assert not {token_digest(page_key(vault, user)) for user in ("vic", "gus")} & set(keys)
        assert web.get("/v1/info", headers={"Authorization": f"Bearer {page_key(vault, owner)}"}).status_code == 401
        asked = {"model": "m", "prompt": "x"}
        assert web.post("/v1/services/web/chat", json=asked, headers=TOKEN).status_code == 409  # it serves no model


def test_keys_open_what_their_owner_may_use_and_are_counted_by_themselves(tmp_path: Path) -> None:
    with server_in(tmp_path, "t") as web:
        owner = service().user
        made = web.post("/v1/tokens", json={"user": owner}, headers=TOKEN).json()["token"]
        own = {"Authorization": f"Bearer {made}"}
        asked = {"name": "app", "services": ["web", "other"], "tokens_per_day": 100, "requests_per_minute": 6}
        key = web.post("/v1/gateway/keys", json=asked, headers=own).json()["key"]
        assert web.post("/v1/gateway/keys", json=asked, headers=own).status_code == 409
        assert web.post("/v1/gateway/keys", json={**asked, "user": "root"}, headers=own).status_code == 403
        assert web.post("/v1/gateway/keys", json={**asked, "name": "a/b"}, headers=own).status_code == 400
        other = open_store(sqlite_url(tmp_path / "p.db"))
        other.services.add(service())
        used = {"day": time.strftime("%Y-%m-%d", time.gmtime()), "user": f"{owner}/app", "service": "web", "model": "m"}
        report = {"gateway": "g", "sequence": 1, "usage": [{**used, "requests": 1, "prompt_tokens": 60}]}
        for _ in range(2):  # the second counts for nothing
            web.post("/v1/gateway/report", json=report, headers=TOKEN)
        table = web.get("/v1/gateway/routes", headers=TOKEN).json()["table"]
        assert table["spent"] == {f"{owner}/app": 60} and table["day"] == used["day"]
        found = table["keys"][token_digest(key)]
        assert found["user"] == f"{owner}/app" and found["services"] == ["web"]
        assert found["requests_per_minute"] == 6 and found["tokens_per_day"] == 100
        assert web.get("/v1/info", headers={"Authorization": f"Bearer {key}"}).status_code == 401  # services only
        assert [one["user"] for one in web.get("/v1/usage", headers=own).json()["usage"]] == [f"{owner}/app"]
        shown = web.get("/v1/gateway/keys", headers=own).json()["keys"]
        assert [one["name"] for one in shown] == ["app"] and key not in str(shown)
        stranger = web.post("/v1/tokens", json={"user": "eve"}, headers=TOKEN).json()["token"]
        path = f"/v1/gateway/keys/{shown[0]['id']}"
        assert web.delete(path, headers={"Authorization": f"Bearer {stranger}"}).status_code == 404
        assert web.delete(path, headers=own).json() == {"keys": []}
        table = web.get("/v1/gateway/routes", headers=TOKEN).json()["table"]
        assert token_digest(key) not in table["keys"]
        other.engine.dispose()


def test_a_service_is_not_launched_as_a_job(tmp_path: Path) -> None:
    with server_in(tmp_path, "t") as web:
        refused = web.post("/v1/launch", json=SERVICE, headers=TOKEN)
        assert refused.status_code == 400 and "podway apply" in refused.json()["error"]["hint"]
        assert web.get("/v1/clusters", headers=TOKEN).json()["clusters"] == []
