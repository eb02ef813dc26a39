"""A worker behind a router: `python worker_program.py PORT WORD [MODE]`. Its answers are its word, and what came before it.

/server_info tells the mode as SGLang's does; a file `broken` in its home makes /health fail.
"""

import json
import pathlib
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORD, MODE = sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "null"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/server_info":
            self._send(200, {"status": "ready", "disaggregation_mode": MODE, "disaggregation_bootstrap_port": 8998})
        else:
            self._send(500 if (pathlib.Path.home() / "broken").exists() else 200, {"status": "ok"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)))
        before = asked.get("after", {}).get("said", [])
        self._send(200, {"said": [*before, WORD]})

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
