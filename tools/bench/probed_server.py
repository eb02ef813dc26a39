"""`python -m podway.serve` with a probe beside it: how long its event loop was blocked, and the CPU of its threads.

    python -m tools.bench.probed_server SOCKET ARGUMENTS…

A task of the event loop wakes every two milliseconds. The time by which it wakes too late is the lag that any stream has then; the
CPU that the loop's thread used between two of its turns is the same without what other processes of the machine take. Whoever
connects to SOCKET gets the largest of both since the last connection, and the CPU seconds of each thread so far, as JSON.
"""

import asyncio
import json
import socket
import sys
import threading
import time
from typing import Any

import podway.serve.__main__ as program

_TURN = 0.002


class Probe:
    """The largest figures since they were last read."""

    def __init__(self) -> None:
        self.lag = self.cpu = 0.0

    async def watch(self) -> None:
        """In the event loop, for ever."""
        while True:
            begun, used = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_TURN)
            self.lag = max(self.lag, time.perf_counter() - begun - _TURN)
            self.cpu = max(self.cpu, time.thread_time() - used)

    def answer(self, place: str) -> None:
        """In a thread, for ever."""
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(place)
        listening.listen()
        while True:
            peer, _ = listening.accept()
            with peer:
                peer.sendall(json.dumps({"lag": self.lag, "cpu": self.cpu, "threads": threads()}).encode())
            self.lag = self.cpu = 0.0


def threads() -> dict[str, float]:
    """CPU seconds by the name of the thread; those that are not Python's are `others`."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            name = thread.name.split("_")[0]
            seconds = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            found[name] = found.get(name, 0.0) + seconds
    found["others"] = time.process_time() - sum(found.values())
    return found


def main(place: str, arguments: list[str]) -> int:
    """Serve until it is stopped."""
    probe = Probe()
    serve = program._Server.serve

    async def probed(self: Any, sockets: list[socket.socket] | None = None) -> None:
        watching = asyncio.ensure_future(probe.watch())
        await serve(self, sockets)
        watching.cancel()

    program._Server.serve = probed  # type: ignore[method-assign]
    threading.Thread(target=probe.answer, args=(place,), name="probe", daemon=True).start()
    return program.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
