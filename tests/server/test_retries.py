"""A client sends again what is safe to send twice, also to a remote server, until a deadline; and nothing else."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from podway.errors import UserError
from podway.server.client import Client


class Flaky:
    """A server that fails so many times before it answers."""

    def __init__(self, failures: list[str]) -> None:
        self.failures = failures
        self.seen: list[tuple[str, str, bytes]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(flaky: Flaky) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            flaky.seen.append((self.command, self.path, body))
            failure = flaky.failures.pop(0) if flaky.failures else ""
            if failure == "cut":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{")
            elif failure == "closed":
                pass
            elif failure:
                status, _, code = failure.partition(" ")
                body = json.dumps({"error": {"what": "away", "hint": "", "code": code}}).encode()
                self.send_response(int(status))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            else:
                reply = {"cluster": "c", "cluster_id": "i", "job": 1, "created": True, "clusters": [], "user": "u"}
                data = json.dumps(reply | {"token": "t"}).encode()
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
            self.close_connection = True

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Flaky]]:
    monkeypatch.setattr("podway.server.connection.FIRST_PAUSE_S", 0.01)
    made: list[Flaky] = []

    def one(*failures: str) -> Flaky:
        made.append(Flaky(list(failures)))
        return made[-1]

    yield one
    for flaky in made:
        flaky.close()


@pytest.mark.parametrize("failure", ["cut", "closed", "502", "503", "504"])
def test_a_safe_call_is_sent_again(make: Callable[..., Flaky], failure: str) -> None:
    flaky = make(failure, failure, failure)
    assert Client(flaky.url, "t").clusters() == []
    assert len(flaky.seen) == 4


def test_a_launch_is_sent_again_with_the_same_id(make: Callable[..., Flaky]) -> None:
    flaky = make("closed", "cut")
    assert Client(flaky.url, "t").run("c", "true").job == 1
    bodies = {body for _, _, body in flaky.seen}
    assert len(flaky.seen) == 3 and len(bodies) == 1 and b"request_id" in bodies.pop()


def test_a_token_is_made_once(make: Callable[..., Flaky]) -> None:
    flaky = make("closed")
    with pytest.raises(UserError):
        Client(flaky.url, "t").make_token("bob")
    assert len(flaky.seen) == 1


@pytest.mark.parametrize("failure", ["400", "401", "404", "409", "500", "503 provider_failed"])
def test_what_the_server_says_is_not_asked_again(make: Callable[..., Flaky], failure: str) -> None:
    flaky = make(failure)
    with pytest.raises(UserError, match="away"):
        Client(flaky.url, "t").clusters()
    assert len(flaky.seen) == 1


def test_the_deadline_ends_it_in_words(make: Callable[..., Flaky]) -> None:
    flaky = make(*["closed"] * 1000)
    with pytest.raises(UserError) as caught:
        Client(flaky.url, "t", retry_s=0.3).clusters()
    assert caught.value.status == 503 and 2 <= len(flaky.seen) < 1000
    gone = make()
    gone.close()
    with pytest.raises(UserError, match="no Podway server answers"):
        Client(gone.url, "t", retry_s=0.1).clusters()
