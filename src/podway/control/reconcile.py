"""Which server drives what: leases, and a controller for each cluster and each service this server may drive.

Each server runs one `Reconciler` for clusters and one for services. It claims a lease on every live row that nobody drives, and
gives each a controller of its own (controller.py, service_controller.py); it wakes the controllers whose rows were written, by this
server or by another one on the same database. A server that dies leaves its leases to run out, or, on the same machine, is seen to
be dead at once.
"""

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from podway.hosts.agent import processes

LEASE_S = 15.0
POLL_S = 1.0  # how soon a server sees what another one wrote to the shared database

log = logging.getLogger("podway.reconcile")


def owner_name() -> str:
    """Names this server process so that another on the same machine can tell whether it still lives."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.getpid()}/{_start_time(os.getpid())}/{uuid.uuid4().hex[:8]}"


def is_dead(owner: str) -> bool:
    """True only when the owner is known to be gone: same boot of the same machine, and no such process."""
    boot, pid, started, _ = owner.split("/")
    if boot != Path("/proc/sys/kernel/random/boot_id").read_text().strip():
        return False
    return _start_time(int(pid)) != started


def _start_time(pid: int) -> str:
    process = processes.read(pid)
    return str(process.start) if process is not None and process.alive else ""


class Leases(Protocol):
    """Rows that one server at a time may drive."""

    def leases(self) -> list[tuple[str, str | None, float]]:
        """(id, owner, until) of every live row."""

    def claim(self, key: str, owner: str, until: float, dead: tuple[str, ...] = (), /) -> bool:
        """Take or keep a lease."""

    def pulse(self) -> dict[str, tuple[int, int, int]]:
        """A mark for each live row that changes whenever it, or what belongs to it, was written."""


class Driver(Protocol):
    """What drives one row."""

    wake: asyncio.Event

    async def run(self) -> None:
        """Until the row is gone or the lease is lost."""


class Reconciler:
    """Keeps one controller for each row this server may drive."""

    def __init__(
        self,
        rows: Leases,
        owner: str,
        drive: Callable[[str], Driver],
        publish: Callable[[str], None],
        written: Callable[[int], tuple[int, set[str]]] = lambda last: (last, set()),
    ) -> None:
        self.rows = rows
        self.owner = owner
        self.drive = drive
        self.publish = publish  # told of every row that another server wrote to
        self.written = written  # by the last event seen: the latest one, and which rows have events since
        self._last_event = 0
        self.controllers: dict[str, tuple[Driver, asyncio.Task[None]]] = {}
        self.nudge = asyncio.Event()
        self._pulse: dict[str, tuple[int, int, int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def wake(self, key: str) -> None:
        """From any thread: something about this row was written."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake, key)

    def _wake(self, key: str) -> None:
        if key in self.controllers:
            self.controllers[key][0].wake.set()
        self.nudge.set()

    async def run(self) -> None:
        """Claim, keep and drive, until cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            self.nudge.clear()
            try:
                await self._claim_all()
                await self._notice()
            except Exception:
                log.exception("cannot read the database")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.nudge.wait(), POLL_S)

    async def _notice(self) -> None:
        """Wake the controllers whose rows changed, and tell who waits for them: another server may have written them."""
        pulse = await asyncio.to_thread(self.rows.pulse)
        changed = {key for key in pulse.keys() | self._pulse.keys() if pulse.get(key) != self._pulse.get(key)}
        for key in changed & self.controllers.keys():
            self.controllers[key][0].wake.set()
        self._pulse = pulse
        self._last_event, with_events = await asyncio.to_thread(self.written, self._last_event)
        for key in changed | with_events:
            self.publish(key)

    async def _claim_all(self) -> None:
        rows, me = self.rows, self.owner
        for key, owner, until in await asyncio.to_thread(rows.leases):
            dead = (owner,) if owner and owner != me and is_dead(owner) else ()
            if owner is not None and owner != me and not dead and until > time.time():
                continue
            if owner == me and until > time.time() + LEASE_S / 2 and key in self.controllers:
                self._keep(key)  # no need to write the lease each second
                continue
            if await asyncio.to_thread(rows.claim, key, me, time.time() + LEASE_S, dead):
                self._keep(key)

    def _keep(self, key: str) -> None:
        known = self.controllers.get(key)
        if known is not None and not known[1].done():
            return
        if known is not None and not known[1].cancelled() and known[1].exception() is not None:
            log.error("controller of %s died", key, exc_info=known[1].exception())
        controller = self.drive(key)
        self.controllers[key] = (controller, asyncio.create_task(controller.run()))
