"""What a gateway asks the server: the routes, waited for, and its reports."""

import threading
import time
from pathlib import Path

from podway.control.service_records import ReplicaState
from podway.control.store import open_store, sqlite_url
from tests.control.service_samples import replica, service
from tests.server.in_process import server_in

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
