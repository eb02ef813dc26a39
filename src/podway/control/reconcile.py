"""Which server drives which cluster: leases, and a controller for each cluster this server may drive.

One `Reconciler` runs in each server. It claims a lease on every live cluster that nobody drives, and gives each its own
`Controller` task (controller.py); it wakes the controllers whose rows were written, by this server or by another one on the
same database. A server that dies leaves its leases to run out, or, on the same machine, is seen to be dead at once.
"""

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from podway.control.controller import Controller, Parts
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


class Reconciler:
    """Keeps one controller for each cluster this server may drive."""

    def __init__(self, parts: Parts, publish: Callable[[str], None]) -> None:
        self.parts = parts
        self.publish = publish  # told of every cluster that another server wrote to
        self._last_event = 0
        self.controllers: dict[str, tuple[Controller, asyncio.Task[None]]] = {}
        self.nudge = asyncio.Event()
        self._pulse: dict[str, tuple[int, int, int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def wake(self, cluster_id: str) -> None:
        """From any thread: something about this cluster was written."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake, cluster_id)

    def _wake(self, cluster_id: str) -> None:
        if cluster_id in self.controllers:
            self.controllers[cluster_id][0].wake.set()
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
        store = self.parts.store
        pulse = await asyncio.to_thread(store.pulse)
        changed = {key for key in pulse.keys() | self._pulse.keys() if pulse.get(key) != self._pulse.get(key)}
        for cluster_id in changed & self.controllers.keys():
            self.controllers[cluster_id][0].wake.set()
        self._pulse = pulse
        self._last_event, with_events = await asyncio.to_thread(store.clusters_with_events, self._last_event)
        for cluster_id in changed | with_events:
            self.publish(cluster_id)

    async def _claim_all(self) -> None:
        store, me = self.parts.store, self.parts.owner
        for cluster_id, owner, until in await asyncio.to_thread(store.leases):
            dead = (owner,) if owner and owner != me and is_dead(owner) else ()
            if owner is not None and owner != me and not dead and until > time.time():
                continue
            if owner == me and until > time.time() + LEASE_S / 2 and cluster_id in self.controllers:
                self._keep(cluster_id)  # no need to write the lease each second
                continue
            if await asyncio.to_thread(store.claim, cluster_id, me, time.time() + LEASE_S, dead):
                self._keep(cluster_id)

    def _keep(self, cluster_id: str) -> None:
        known = self.controllers.get(cluster_id)
        if known is not None and not known[1].done():
            return
        if known is not None and not known[1].cancelled() and known[1].exception() is not None:
            log.error("controller of %s died", cluster_id, exc_info=known[1].exception())
        controller = Controller(self.parts, cluster_id)
        self.controllers[cluster_id] = (controller, asyncio.create_task(controller.run()))
