"""What is open for long never holds a quick answer: waiters, followers, slow clouds, clients that do not read."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.conftest import wait_until
from tests.e2e.harness import Podway, task

# Far below what a request that had to wait for one of these would take, far above what a loaded machine needs.
QUICK_S = 5.0


def ask(pod: Podway, path: str) -> socket.socket:
    """A request whose answer nobody reads yet."""
    found = json.loads((pod.home / "server.json").read_text())
    host, port = found["url"].removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {found['token']}\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode())
    return connection


@contextlib.contextmanager
def open_requests(pod: Podway, path: str, count: int) -> Iterator[list[socket.socket]]:
    opened = [ask(pod, path) for _ in range(count)]
    try:
        yield opened
    finally:
        for connection in opened:
            connection.close()


def quick(pod: Podway) -> None:
    began = time.monotonic()
    assert [cluster.name for cluster in pod.client.clusters()] == ["c"]
    assert time.monotonic() - began < QUICK_S


@pytest.fixture
def busy(pod: Podway) -> Podway:
    pod.start()
    pod.client.launch(task("echo begun; sleep 1000", stop_duration_s=1), cluster="c")
    wait_until(lambda: pod.client.job("c", 1).state == "RUNNING", what="the job")
    return pod


def test_waiters_are_answered_when_the_job_ends_and_hold_nobody(busy: Podway) -> None:
    with open_requests(busy, "/v1/clusters/c/jobs/1?wait=60", 100) as waiters:
        quick(busy)
        busy.client.cancel("c", [1])
        for waiter in waiters:
            answer = b""
            while piece := waiter.recv(65536):
                answer += piece
            assert b'"state":"CANCELLED"' in answer
    busy.down("c")


def test_followers_that_do_not_read_hold_nobody(busy: Podway) -> None:
    busy.client.exec("c", task("seq 200000; sleep 1000"))
    with open_requests(busy, "/v1/clusters/c/jobs/1/watch", 60):
        for _ in range(5):
            quick(busy)
    busy.client.cancel("c", every=True)
    busy.down("c")


def test_slow_work_holds_nobody(busy: Podway) -> None:
    """45 clients that upload a byte a second, and 45 that ask the providers."""
    found = json.loads((busy.home / "server.json").read_text())
    host, port = found["url"].removeprefix("http://").split(":")
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {found['token']}\r\nContent-Length: 9999\r\n\r\n"
    )
    uploads = [socket.create_connection((host, int(port)), timeout=30) for _ in range(45)]
    try:
        for connection in uploads:
            connection.sendall(head.encode() + b"P")
        asked = [threading.Thread(target=busy.client.orphans) for _ in range(45)]
        for thread in asked:
            thread.start()
        quick(busy)
        for thread in asked:
            thread.join(60)
            assert not thread.is_alive()
    finally:
        for connection in uploads:
            connection.close()
    busy.client.cancel("c", every=True)
    busy.down("c")
