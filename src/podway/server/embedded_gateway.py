"""The gateway of this machine's own server: a process of its own, there while there are services.

It holds the lock of `PODWAY_HOME/gateway`, so a server that starts after a crash finds the one that runs and leaves it alone: streams
go on meanwhile, and the gateway asks the new server as soon as it is there. Its port stays the same where it is free, since people have
its URL in their programs. It ends when the last service is gone, and with `podway server stop` only if there is none; and by itself when no
server will end it (`gateway/lifetime.py`).
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from podway.gateway.state_dir import read_info, running_gateway

LOOK_S = 1.0
AGAIN_S = (1.0, 60.0)  # after a start that failed: the first pause, and the longest
UNUSED_S = 30.0  # without a service, before it ends: the next one may come soon
USUAL_PORT = 8080

log = logging.getLogger("podway.gateway")


class EmbeddedGateway:
    """Starts and ends it."""

    def __init__(self, place: Path, needed: Callable[[], bool]) -> None:
        self._place = place
        self._folder = place / "gateway"
        self._needed = needed
        self._child: subprocess.Popen[bytes] | None = None
        self._unused_since: float | None = None
        self._not_before, self._pause = 0.0, AGAIN_S[0]

    async def keep(self) -> None:
        """For as long as the server runs."""
        try:
            while True:
                try:
                    await asyncio.to_thread(self.look, time.monotonic())
                except Exception:
                    log.exception("the gateway")
                await asyncio.sleep(LOOK_S)
        finally:
            if not self._needed():
                self._end()

    def look(self, now: float) -> None:
        """Once: start it, end it, or leave it as it is."""
        ended = self._child is not None and self._child.poll() is not None
        running = running_gateway(self._folder)
        if self._needed():
            self._unused_since = None
            if running is not None:
                self._pause = AGAIN_S[0]
            elif (self._child is None or ended) and now >= self._not_before:
                self._not_before, self._pause = now + self._pause, min(2 * self._pause, AGAIN_S[1])
                self._start()
        elif running is not None:
            self._unused_since = self._unused_since if self._unused_since is not None else now
            if now - self._unused_since >= UNUSED_S:
                self._end()

    def _start(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        before = read_info(self._folder)
        port = _free_or_any(before.port if before is not None else USUAL_PORT)
        command = [sys.executable, "-m", "podway.cli.main", "gateway", "run", "--single", "--port", str(port)]
        environment = {name: value for name, value in os.environ.items() if name != "PODWAY_CRASH_AT"}
        with open(self._folder / "gateway.log", "ab") as out:
            self._child = subprocess.Popen(
                [*command, "--state", str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd="/",
                env={**environment, "PODWAY_HOME": str(self._place)},
            )
        log.info("started a gateway (pid %d)", self._child.pid)

    def _end(self) -> None:
        running = running_gateway(self._folder)
        if running is not None:
            log.info("no service is left: ending the gateway (pid %d)", running.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGTERM)
        self._unused_since = None


def _free_or_any(port: int) -> int:
    """The port if nobody listens on it, else 0: any."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port
