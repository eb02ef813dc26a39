"""A router that speaks the API of SGLang's model gateway, as far as it is documented: `python router_program.py PORT`.

- GET /workers lists workers; POST /workers adds one, some time after that answers /health; DELETE /workers/ID removes one. Both
  answer 202.
- A request goes to a regular worker; where there are none, to a prefill worker and then, with what that said, to a decode worker.
- Without the workers it needs it answers 503. It forgets everything when it ends.
"""

import itertools
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

workers: dict[str, dict] = {}  # type: ignore[type-arg]
lock = threading.Lock()
turn = itertools.count()


def fetch(url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def join(worker: dict) -> None:  # type: ignore[type-arg]
    """Listed once it is healthy and has been looked at, which takes a while, as with the real one."""
    for _ in range(200):
        try:
            fetch(f"{worker['url']}/health")
            break
        except OSError:
            time.sleep(0.05)
    else:
        return
    time.sleep(0.5)
    with lock:
        workers[worker["id"]] = worker


def pick(role: str) -> str | None:
    with lock:
        fitting = [one["url"] for one in workers.values() if one["worker_type"] == role]
    return fitting[next(turn) % len(fitting)] if fitting else None


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/workers":
            with lock:
                self._send(200, {"workers": list(workers.values()), "total": len(workers)})
        else:
            self._send(200, {"status": "ok"})

    def do_DELETE(self) -> None:
        with lock:
            gone = workers.pop(self.path.removeprefix("/workers/"), None)
        self._send(202 if gone else 404, {"status": "accepted", "worker_id": self.path})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == "/workers":
            self._add(json.loads(body))
            return
        try:
            answer = self._route(body)
        except OSError as error:
            self._send(502, {"error": str(error)})
            return
        if answer is None:
            self._send(503, {"error": "no worker"})
        else:
            self._send(200, answer)

    def _add(self, worker: dict) -> None:  # type: ignore[type-arg]
        with lock:
            known = any(one["url"] == worker["url"] for one in workers.values())
        if known:
            self._send(409, {"error": "known", "code": "WORKER_ALREADY_EXISTS"})
            return
        worker["id"] = f"w{abs(hash(worker['url']))}"
        threading.Thread(target=join, args=(worker,), daemon=True).start()
        self._send(202, {"status": "accepted", "worker_id": worker["id"]})

    def _route(self, body: bytes) -> object:
        regular = pick("regular")
        if regular is not None:
            return json.loads(fetch(regular + self.path, body))
        prefill, decode = pick("prefill"), pick("decode")
        if prefill is None or decode is None:
            return None
        first = json.loads(fetch(prefill + self.path, body))
        return json.loads(fetch(decode + self.path, json.dumps({"after": first}).encode()))

    def _send(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()
