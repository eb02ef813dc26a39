"""A model server that any Python can run: `python replica_program.py PORT [NAME]`. Its answers name it.

A request with "stream" gets as many numbered events as its "max_tokens" says, 10 ms apart.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NAME = sys.argv[2] if len(sys.argv) > 2 else "replica"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200, {"status": "ok", "name": NAME})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if asked.get("stream"):
            self._stream(int(asked.get("max_tokens") or 10))
            return
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": NAME}}
        usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
        self._send(200, {**_frame("chat.completion"), "choices": [choice], "usage": usage})

    def _stream(self, events: int) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number in range(events):
            choice = {"index": 0, "delta": {"content": f"<{number}>"}, "finish_reason": None}
            self._chunk(
                b"data: " + json.dumps({**_frame("chat.completion.chunk"), "choices": [choice]}).encode() + b"\n\n"
            )
            time.sleep(0.01)
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def _send(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _frame(kind: str) -> dict:  # type: ignore[type-arg]
    return {"id": "1", "object": kind, "created": 1, "model": "m", "system_fingerprint": NAME}


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    Server((os.environ.get("LISTEN_ON", "0.0.0.0"), int(sys.argv[1])), Handler).serve_forever()
