"""A head host that idles without a server ends its own machines, with the machine's own token, and never before its time."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.hosts.agent_host import Host, Refusal, until

from podway.hosts.agent.connections import ATTACHED_VARIABLE
from podway.hosts.agent.records import CONFINED


class Cloud:
    """A metadata server and an API in one: what was asked, and with which token."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str | None]] = []
        self.status = 200
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = b"{}"
                if self.path == "/token":
                    status = 200 if self.headers["Metadata-Flavor"] == "Google" else 403
                    body = json.dumps({"access_token": "of-the-machine"}).encode()
                else:
                    cloud.asked.append((self.command, self.path, self.headers["Authorization"]))
                    status = cloud.status
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_DELETE = do_POST = answer

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def policy(self, idle_s: float = 0.3, silence_s: float = 0.4, **more: Any) -> dict[str, Any]:
        calls = [{"method": "DELETE", "url": f"{self.url}/nodes/{n}"} for n in (1, 0)]
        return {"idle_s": idle_s, "silence_s": silence_s, "token_url": f"{self.url}/token", "calls": calls, **more}


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    made = Cloud()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with Host(tmp_path) as made:
        yield made


BOTH = [("DELETE", "/nodes/1", "Bearer of-the-machine"), ("DELETE", "/nodes/0", "Bearer of-the-machine")]


def test_idle_and_alone_it_leaves_once(host: Host, cloud: Cloud) -> None:
    assert host.call("idle_shutdown", policy=cloud.policy())["armed"]
    until(lambda: len(cloud.asked) == 2)
    time.sleep(0.5)  # long enough for a second look
    assert cloud.asked == BOTH


def test_a_server_that_is_heard_keeps_it(host: Host, cloud: Cloud) -> None:
    until_then = time.monotonic() + 3.5
    while time.monotonic() < until_then:
        host.call(
            "idle_shutdown", policy=cloud.policy(silence_s=2.5)
        )  # longer than this test may be held up between two calls
        time.sleep(0.05)
    assert cloud.asked == []
    until(lambda: cloud.asked == BOTH)


def test_a_job_keeps_it(host: Host, cloud: Cloud) -> None:
    host.start("mkfifo gate; echo up; read < gate")
    host.printed(b"up\n")
    host.call("idle_shutdown", policy=cloud.policy())
    time.sleep(1.0)
    assert cloud.asked == []
    (host.home / "gate").write_text("go\n")
    until(lambda: cloud.asked == BOTH)


def test_a_shell_keeps_it_where_the_rule_counts_them(host: Host, cloud: Cloud) -> None:
    host.restart(**{CONFINED: "1"})  # as a simulated host: there a connection is a process with a mark
    shell = subprocess.Popen(["sleep", "100"], env={**os.environ, ATTACHED_VARIABLE: host.host_id})
    other = subprocess.Popen(["sleep", "100"], env={**os.environ, ATTACHED_VARIABLE: f"{host.host_id}0"})
    try:
        host.call("idle_shutdown", policy=cloud.policy(shell="c0ffee-shell"))
        time.sleep(1.0)
        assert cloud.asked == []
    finally:
        shell.kill()
        shell.wait()
    try:
        until(lambda: cloud.asked == BOTH)
    finally:
        other.kill()
        other.wait()


def test_no_rule_no_leaving(host: Host, cloud: Cloud) -> None:
    host.call("idle_shutdown", policy=cloud.policy(idle_s=2.0))
    assert not host.call("idle_shutdown", policy=None)["armed"]
    time.sleep(2.5)
    assert cloud.asked == []


def test_the_rule_outlives_the_agent(host: Host, cloud: Cloud) -> None:
    host.call("idle_shutdown", policy=cloud.policy(idle_s=0.8, silence_s=0.8))
    host.restart()
    until(lambda: cloud.asked == BOTH)


def test_a_refused_call_is_not_followed_by_the_next(host: Host, cloud: Cloud) -> None:
    cloud.status = 403
    host.call("idle_shutdown", policy=cloud.policy())
    until(lambda: cloud.asked)
    time.sleep(0.5)
    assert cloud.asked == BOTH[:1]
    assert "403" in (host.state / "agent.log").read_text()


@pytest.mark.parametrize(
    "change",
    [
        {"idle_s": -1},
        {"idle_s": "1"},
        {"silence_s": None},
        {"calls": "DELETE"},
        {"calls": [{"method": "GET", "url": "http://x"}]},
        {"calls": [{"method": "DELETE", "url": "file:///etc/passwd"}]},
        {"token_url": "nowhere"},
        {"shell": 1},
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(host: Host, cloud: Cloud, change: dict[str, Any]) -> None:
    with pytest.raises(Refusal):
        host.call("idle_shutdown", policy={**cloud.policy(), **change})
    with pytest.raises(Refusal):
        host.call("idle_shutdown", policy="now")
