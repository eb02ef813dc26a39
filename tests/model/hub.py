"""A small server that speaks the Hugging Face hub's protocol: models of tests, gated ones, and connections that break."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse


class Hub:
    """What it holds, what it was asked, and what is wrong with it."""

    def __init__(self, models: Mapping[str, Mapping[str, bytes]], gated: frozenset[str] = frozenset()) -> None:
        self.models, self.gated = models, gated
        self.commit = "0123456789abcdef" * 2 + "01234567"
        self.break_after: int | None = None  # bytes of a weight file, after which the connection is cut, once
        self.refuse_after_break = False  # every request after it answers 500
        self.asked: list[tuple[str, str, str]] = []  # method, path, Range
        self.url = ""

    def fetched(self, name: str) -> list[str]:
        """The ranges of a file that were asked for."""
        return [range for method, path, range in self.asked if method == "GET" and path.endswith(name)]


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """The hub on a port of its own."""
    made = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), made)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        hub = self.hub
        hub.asked.append((self.command, path, self.headers.get("Range", "")))
        if hub.refuse_after_break and hub.break_after is None:
            self._send(500, b"broken")
            return
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._info("/".join(parts[2:4]), parts[4:])
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._send(404, b"")

    def _refused(self, model: str, revision: str) -> bool:
        if model not in self.hub.models:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif model in self.hub.gated and self.headers.get("Authorization") != "Bearer hf_allowed":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif revision not in ("main", self.hub.commit):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            return False
        return True

    def _info(self, model: str, rest: list[str]) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        if self._refused(model, revision):
            return
        files = self.hub.models[model]
        if rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}
                for name, data in files.items()
            ]
            self._send(200, json.dumps(entries).encode())
            return
        facts = {"id": model, "modelId": model, "sha": self.hub.commit, "private": False, "tags": [], "downloads": 0}
        self._send(200, json.dumps(facts | {"siblings": [{"rfilename": name} for name in files]}).encode())

    def _file(self, model: str, revision: str, name: str) -> None:
        if self._refused(model, revision):
            return
        data = self.hub.models[model].get(name)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        about = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": self.hub.commit}
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if first:
            about["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        cut = None
        if name.endswith(".safetensors") and self.command == "GET" and self.hub.break_after is not None:
            cut, self.hub.break_after = self.hub.break_after, None
        self._send(206 if first else 200, data[first:], about, cut)

    def _send(self, code: int, body: bytes, headers: Mapping[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(code)
        for name, value in {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass
