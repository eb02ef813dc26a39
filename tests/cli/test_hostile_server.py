"""A team's server that answers every question with escape sequences: no command lets one through to the terminal."""

import json
import os
import pty
import re
import subprocess
import sys
import threading
import time
import types
import typing
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from podway.server.api import Frame
from podway.server.routes import ROUTES
from podway.server.routing import Stream

HOSTILE = "\x1b]52;c;cm0gLXJm\x07copied\x1b]0;title\x07\x1b[2J\x1b[H\x9b31m\x08\r\u202e"
ERROR = json.dumps({"error": {"what": HOSTILE, "hint": HOSTILE, "code": HOSTILE}}).encode()
STEERS = re.compile(r"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f]")
# Colours, and what Podway itself draws a spinner with.
OWN = re.compile(r"\x1b\[[0-9;:]*m|\r\x1b\[2K|\r\n")


def sample(kind: Any, depth: int = 0) -> Any:
    """A value of a type in which every text is hostile."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return arguments[0]
    if origin in (typing.Union, types.UnionType):
        return None if depth > 6 else sample(next(one for one in arguments if one is not type(None)), depth + 1)
    if origin in (list, tuple):
        return [sample(arguments[0], depth + 1)]
    if origin is dict:
        return {HOSTILE: sample(arguments[1], depth + 1)}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {name: sample(field, depth + 1) for name, field in typing.get_type_hints(kind).items()}
    return {str: HOSTILE, int: 1, float: 1.0, bool: True}.get(kind)


def reply_to(method: str, path: str) -> tuple[int, bytes]:
    for route in ROUTES:
        pattern = re.sub(r"\{[^}]*\}", "[^/]+", route.path)
        if route.method == method and re.fullmatch(pattern, path):
            if not isinstance(route.reply, Stream):
                return 200, json.dumps(sample(route.reply)).encode()
            if route.reply.lines is Frame:
                frames = [{"kind": "event", "text": HOSTILE, "event": 1}, {"kind": "log", "text": f"{HOSTILE}\n"}]
                end = {"kind": "end", "state": "FAILED", "reason": HOSTILE, "tail": HOSTILE}
                return 200, b"".join(json.dumps(frame).encode() + b"\n" for frame in [*frames, end])
            return 200, HOSTILE.encode()
    return 404, ERROR


class Answers(BaseHTTPRequestHandler):
    failing = False

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        status, body = reply_to(self.command, path)
        if self.failing and path != "/v1/info":
            status, body = 409, ERROR
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Nothing to say."""


class FailingAnswers(Answers):
    failing = True


@pytest.fixture(params=[Answers, FailingAnswers], ids=["answers", "errors"])
def laptop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A Podway home that is logged in to it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), request.param)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    remote = {"url": f"http://127.0.0.1:{server.server_port}", "token": "pw_x"}
    (home / "remote.json").write_text(json.dumps(remote))
    yield home
    server.shutdown()
    server.server_close()
    thread.join()


COMMANDS = [
    "status",
    "status -v",
    "status --orphans",
    "queue",
    "cost",
    "logs x 1 --no-follow",
    "logs x 1 --status",
    "cancel x 1 -y",
    "down x -y",
    "stop x -y",
    "autostop x --idle-minutes 5",
    "share x ann",
    "top x",
    "ssh x true",
    "exec x true -d",
    "launch -y -d -c x --tpus v6e-8 true",
    "launch --dryrun -c x --tpus v6e-8 true",
    "down --purge -y",
    "server users",
    "server members",
    "server audit",
    "server status",
    "server member p ann",
    "server revoke ann",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_passes_an_escape_on(laptop: Path, command: str) -> None:
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "podway.cli.main", *command.split()],
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "PODWAY_HOME": str(laptop), "TERM": "xterm", "NO_COLOR": ""},
    )
    os.close(terminal)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.extend(iter(lambda: read_some(main), b"")), daemon=True)
    reader.start()
    began = time.monotonic()
    # Some wait for a state that never comes: what they say until then is enough.
    while process.poll() is None and time.monotonic() - began < (3 if read else 60):
        time.sleep(0.05)
    process.kill()
    process.wait()
    reader.join(20)
    os.close(main)
    written = b"".join(read).decode(errors="replace")
    assert written
    assert "Traceback" not in written and "Podway itself failed" not in written, written
    assert not STEERS.search(OWN.sub("", written)), ascii(written)


def read_some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # what had it open is gone
        return b""
