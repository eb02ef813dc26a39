"""A process in a pod joined to whoever asked for it by `exec`: over a WebSocket, as clients and API servers since Kubernetes 1.36 ask a
node, or over SPDY, as the API servers before do on behalf of their clients.
"""

import contextlib
import fcntl
import json
import os
import signal
import struct
import subprocess
import termios
import threading
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Protocol

from podway.providers.gke.streams import CLOSE_STREAM, ERROR, STDERR, STDIN, STDOUT, frame
from podway.sandbox.kubernetes.spdy import SpdyStreams

CHUNK = 32 << 10
RESIZE = 4
HANG_UP_S = 30.0
SPDY_CHANNELS = {"stdin": STDIN, "stdout": STDOUT, "stderr": STDERR, "error": ERROR, "resize": RESIZE}
_BINARY, _CLOSE = 2, 8


class Caller(Protocol):
    """Who asked for the process."""

    def read(self) -> tuple[int, bytes] | None:
        """What came next, and on which channel; None when the caller has gone."""

    def send(self, channel: int, data: bytes) -> None:
        """What the process wrote."""

    def end(self, status: bytes) -> None:
        """How the process ended, after all it wrote."""


class WebSocketCaller:
    """One connection on which the first byte of a message is its channel."""

    def __init__(self, incoming: BufferedIOBase, outgoing: BufferedIOBase) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._sending = threading.Lock()

    def read(self) -> tuple[int, bytes] | None:
        while (message := self._message()) is not None:
            if message:
                return message[0], message[1:]
        return None

    def send(self, channel: int, data: bytes) -> None:
        self._send(_BINARY, bytes([channel]) + data)

    def end(self, status: bytes) -> None:
        self.send(ERROR, status)
        self._send(_CLOSE, struct.pack("!H", 1000))

    def _send(self, opcode: int, data: bytes) -> None:
        with self._sending:
            self._outgoing.write(frame(opcode, data, masked=False))
            self._outgoing.flush()

    def _message(self) -> bytes | None:
        whole = b""
        while True:
            head = self._incoming.read(2)
            if len(head) < 2 or head[0] & 0x0F == _CLOSE:
                return None
            size = head[1] & 0x7F
            if size > 125:
                size = int.from_bytes(self._incoming.read(2 if size == 126 else 8), "big")
            mask = self._incoming.read(4) if head[1] & 0x80 else b""
            data: bytes = self._incoming.read(size)
            if mask:
                pattern = (mask * (size // 4 + 1))[:size]
                data = (int.from_bytes(data, "big") ^ int.from_bytes(pattern, "big")).to_bytes(size, "big")
            whole += data
            if head[0] & 0x80:
                return whole


class SpdyCaller:
    """One connection with a stream for each channel."""

    def __init__(self, streams: SpdyStreams) -> None:
        self._streams = streams
        self._rest: list[tuple[int, bytes]] = []

    def read(self) -> tuple[int, bytes] | None:
        if self._rest:
            return self._rest.pop()
        found = self._streams.read()
        if found is None:
            return None
        channel, data, last = found
        if last and channel == STDIN:
            self._rest.append((CLOSE_STREAM, bytes([STDIN])))
        return channel, data

    def send(self, channel: int, data: bytes) -> None:
        self._streams.write(channel, data)

    def end(self, status: bytes) -> None:
        for channel in (STDOUT, STDERR):
            self._streams.write(channel, b"", last=True)
        self._streams.write(ERROR, status, last=True)


class ProcessStreams:
    """A process' own streams, or its terminal."""

    def __init__(self, process: "subprocess.Popen[bytes]", terminal: int | None) -> None:
        self.process, self.terminal = process, terminal
        self.out: list[tuple[IO[bytes], int]] = []
        if terminal is not None:
            self.input: IO[bytes] = os.fdopen(os.dup(terminal), "wb", buffering=0)
            self.out = [(os.fdopen(terminal, "rb"), STDOUT)]
        else:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            self.input = process.stdin
            self.out = [(process.stdout, STDOUT), (process.stderr, STDERR)]

    def take(self, channel: int, data: bytes) -> None:
        """What the caller sent on a channel."""
        if channel == STDIN:
            self.input.write(data)
            self.input.flush()
        elif channel == RESIZE and self.terminal is not None:
            size = json.loads(data)
            fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size["Height"], size["Width"], 0, 0))
        elif channel == CLOSE_STREAM and self.terminal is None and data == bytes([STDIN]):
            self.input.close()

    def hang_up(self) -> None:
        """End it; of a terminal, the leader of its session, whose end the system tells everything there."""
        pid = self.process.pid
        if self.process.poll() is not None:
            return  # its number may be another's by now
        with contextlib.suppress(OSError, ValueError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for child in children if self.terminal is not None else ():
                os.kill(int(child), signal.SIGKILL)
        self.process.kill()


def join(streams: ProcessStreams, caller: Caller) -> None:
    """Both ways until either ends; then how it ended."""
    process = streams.process

    def out(stream: IO[bytes], channel: int) -> None:
        try:
            while data := stream.read1(CHUNK):  # type: ignore[attr-defined]
                caller.send(channel, data)
        except (OSError, ValueError):
            if streams.terminal is None:  # a terminal ends so
                process.kill()

    def feed() -> None:
        try:
            while (found := caller.read()) is not None:
                with contextlib.suppress(BrokenPipeError, ValueError):  # it closed its stdin: what else comes is lost
                    streams.take(*found)
        except (OSError, ValueError):
            pass
        finally:  # the caller has gone
            streams.hang_up()

    feeding = threading.Thread(target=feed, daemon=True)
    feeding.start()
    copies = [threading.Thread(target=out, args=pair, daemon=True) for pair in streams.out]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.join()
    with contextlib.suppress(OSError, ValueError):
        caller.end(exit_status(process.wait()))
    # The caller hangs up: a connection that is closed with something unread in it may lose what was just sent.
    feeding.join(HANG_UP_S)


def exit_status(code: int) -> bytes:
    """The Status object of an exit code, as a kubelet sends it."""
    if not code:
        return json.dumps({"metadata": {}, "status": "Success"}).encode()
    details = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
    message = f"command terminated with exit code {code}"
    status = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "message": message, "details": details}
    return json.dumps(status).encode()
