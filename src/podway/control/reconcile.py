"""The loop that makes clusters what they are asked to be: observe, decide (pure), act, guarded write.

One `Reconciler` runs in each server. It claims a lease on every live cluster that nobody drives, and gives each its own
`Controller` task. A controller wakes when a verb wrote something, when an action ended, or when its wait is over; it reads the
rows, asks the provider what is there, and does the one thing `decide` answers. Actions are idempotent, so a server killed between
an action and its write is harmless: the next one observes the result, or does it again.
"""

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from podway import crash
from podway.control.archive import Archive
from podway.control.decide import Action, decide
from podway.control.fleet import Fleet
from podway.control.gang import Gang
from podway.control.records import Cluster, ClusterState, Event, Job, JobState, shell_key
from podway.control.secret_box import SecretBox
from podway.control.store import Stale, Store
from podway.errors import ProviderError, UserError
from podway.hosts.blobs import BlobStore
from podway.providers import Observation, Provider

LEASE_S = 15.0
POLL_S = 1.0  # how soon a server sees what another one wrote to the shared database
PATIENCE_S = 2.0  # between tries of an action that failed

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
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # a zombie is dead, though its parent has not looked yet


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What every controller works with."""

    store: Store
    blobs: BlobStore
    box: SecretBox
    archive: Archive
    provider: Callable[[str], Provider]
    cache_dir: str
    owner: str


class Controller:
    """Drives one cluster while this server holds its lease."""

    def __init__(self, parts: Parts, cluster_id: str) -> None:
        self.parts = parts
        self.cluster_id = cluster_id
        self.wake = asyncio.Event()
        self.gangs: dict[int, tuple[Gang, asyncio.Task[None]]] = {}
        self.cluster: Cluster
        self.failures = 0

    async def run(self) -> None:
        """Until the cluster is gone or the lease is lost."""
        try:
            while await self._step():
                pass
        except Stale:
            log.info("cluster %s is driven by another server", self.cluster_id)
        finally:
            for _, task in self.gangs.values():
                task.cancel()

    async def _step(self) -> bool:
        store = self.parts.store
        self.wake.clear()
        cluster = await asyncio.to_thread(store.cluster, self.cluster_id)
        if cluster is None or cluster.state is ClusterState.GONE:
            return False
        self.cluster = cluster
        jobs = await asyncio.to_thread(store.jobs, self.cluster_id, open_only=True)
        for gang, _ in self.gangs.values():
            gang.changed.set()
        wait = PATIENCE_S
        try:
            provider = self.parts.provider(cluster.order.provider)
            seen = await provider.observe(cluster.name)
            action = decide(cluster, jobs, seen, time.time())
            wait = await self._act(provider, action, seen)
            self.failures = 0
        except (ProviderError, UserError, OSError) as error:
            self.failures += 1
            await self._event(
                f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error), kind="error"
            )
            if isinstance(error, UserError) and cluster.state is ClusterState.INIT:
                await self._give_up(jobs, error.what)
            wait = min(30.0, PATIENCE_S * self.failures)
        if wait > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), wait)
        return True

    async def _give_up(self, jobs: list[Job], why: str) -> None:
        """It cannot be created: its jobs failed, and what there is of it goes."""
        for job in jobs:
            failed = msgspec.structs.replace(
                job, state=JobState.FAILED_DRIVER, reason=why, ended=time.time(), secret_box=b""
            )
            event = Event(
                time=time.time(),
                cluster_id=job.cluster_id,
                job=job.number,
                text=why,
                detail={"state": failed.state.value},
            )
            await asyncio.to_thread(self.parts.store.save_job, failed, owner=self.parts.owner, events=(event,))
        await self._save(f"could not be created: {why}", goal="gone", reason=why)

    async def _act(self, provider: Provider, action: Action, seen: Observation) -> float:
        """Do it; how long to rest before looking again."""
        cluster = self.cluster
        match action.verb:
            case "submit":
                crash.point("provision.before-submit")
                await self._event(f"Starting {_what(cluster)}", kind="progress")
                await provider.submit(provider.render(cluster.name, cluster.order))
                crash.point("provision.after-submit")
                return 0
            case "start":
                await self._event("Starting the hosts again", kind="progress")
                await provider.start(cluster.name)
                return 0
            case "stop":
                await provider.stop(cluster.name)
                crash.point("stop.after-stop")
                return 0
            case "destroy":
                if cluster.goal != "gone":
                    await self._save(action.reason, goal="gone", reason=action.reason, state=ClusterState.TERMINATING)
                crash.point("down.before-destroy")
                await provider.destroy(cluster.name)
                crash.point("down.after-destroy")
                return 0
            case "mark":
                await self._mark(action, seen)
                return 0
            case "autostop":
                if await self._someone_is_there(provider):
                    await self._touch()
                    return 30.0
                goal = "gone" if cluster.autostop and cluster.autostop.down else "stopped"
                state = ClusterState.TERMINATING if goal == "gone" else ClusterState.STOPPING
                await self._save(
                    f"{'down' if goal == 'gone' else 'stop'} by autostop: {action.reason}", goal=goal, state=state
                )
                return 0
            case "begin-jobs":
                self._begin(provider, action.jobs)
                return 30.0
            case "cancel-jobs":
                await self._cancel_jobs(provider, action)
                return 1.0
            case _:
                return action.wait_s

    async def _mark(self, action: Action, seen: Observation) -> None:
        now, cluster = time.time(), self.cluster
        changes: dict[str, Any] = {"state": action.state, "reason": action.reason}
        if action.state is ClusterState.UP:
            crash.point("provision.before-up")
            changes |= {"hosts": seen.hosts, "up_since": now, "active_at": now}
            await self._save(f"is up: {_what(cluster)}", **changes)
            return
        billed = cluster.billed_s + (now - cluster.up_since if cluster.up_since else 0.0)
        changes |= {"up_since": None, "billed_s": billed}
        if action.state is ClusterState.GONE:
            changes["ended"] = now
        await self._save("is gone" if action.state is ClusterState.GONE else "is stopped", **changes)

    def _begin(self, provider: Provider, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            if number in self.gangs:
                continue
            parts = self.parts
            gang = Gang(
                store=parts.store,
                fleet=Fleet(provider, self.cluster, parts.cache_dir),
                blobs=parts.blobs,
                box=parts.box,
                archive=parts.archive,
                owner=parts.owner,
                cluster=self.cluster,
            )
            self.gangs[number] = (gang, asyncio.create_task(self._drive(gang, number)))

    async def _drive(self, gang: Gang, number: int) -> None:
        try:
            await gang.run(number)
            await self._touch()
        except Exception:
            log.exception("job %s of %s", number, self.cluster_id)
            await asyncio.sleep(PATIENCE_S)
        finally:
            gang.fleet.close()
            self.gangs.pop(number, None)
            self.wake.set()

    async def _someone_is_there(self, provider: Provider) -> bool:
        """An open shell keeps a cluster awake, unless its rest rule says that only jobs count."""
        if self.cluster.autostop is None or self.cluster.autostop.wait_for != "jobs_and_ssh":
            return False
        fleet = Fleet(provider, self.cluster)
        try:
            job = shell_key(self.cluster)
            used = await asyncio.gather(*(s.call("marked", job=job, patience=2.0) for s in fleet.sessions))
            return any(answer.get("processes") for answer in used)
        except ProviderError:
            return False
        finally:
            fleet.close()

    async def _touch(self) -> None:
        """Autostop counts from the end of the last job."""
        for _ in range(10):
            fresh = await asyncio.to_thread(self.parts.store.cluster, self.cluster_id)
            if fresh is None or fresh.state is ClusterState.GONE:
                return
            try:
                new = msgspec.structs.replace(fresh, active_at=time.time())
                await asyncio.to_thread(self.parts.store.save_cluster, new, owner=self.parts.owner)
                return
            except Stale:
                continue

    async def _cancel_jobs(self, provider: Provider, action: Action) -> None:
        for number in action.jobs:
            job = await asyncio.to_thread(self.parts.store.job, self.cluster_id, number)
            if job is not None and not job.done and not job.cancel:
                wish = msgspec.structs.replace(job, cancel=True, reason=action.reason)
                await asyncio.to_thread(self.parts.store.save_job, wish)
        self._begin(provider, action.jobs)
        for gang, _ in self.gangs.values():
            gang.changed.set()

    async def _save(self, text: str, **changes: Any) -> None:
        new = msgspec.structs.replace(self.cluster, **changes)
        event = Event(time=time.time(), cluster_id=new.id, text=text, detail={"state": new.state.value})
        try:
            self.cluster = await asyncio.to_thread(
                self.parts.store.save_cluster, new, owner=self.parts.owner, events=(event,)
            )
        except Stale:
            # Either a verb wrote a new goal (look again), or the lease went to another server (stop).
            leases = await asyncio.to_thread(self.parts.store.leases)
            if not any(key == self.cluster_id and owner == self.parts.owner for key, owner, _ in leases):
                raise

    async def _event(self, text: str, kind: Any) -> None:
        event = Event(time=time.time(), cluster_id=self.cluster_id, kind=kind, text=text)
        await asyncio.to_thread(self.parts.store.add_event, event)


def _what(cluster: Cluster) -> str:
    order = cluster.order
    kind = order.accelerator_type or "CPU host"
    many = f"{order.slices} x {kind}" if order.slices > 1 else kind
    where = "simulated on this machine" if order.provider == "local" else f"{order.provider} {order.zone or ''}".strip()
    return f"{many} ({order.hosts} host{'s' if order.hosts > 1 else ''}, {where})"


class Reconciler:
    """Keeps one controller for each cluster this server may drive."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
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
        """Wake the controllers whose rows changed: another server may have written them."""
        pulse = await asyncio.to_thread(self.parts.store.pulse)
        for cluster_id, mark in pulse.items():
            if self._pulse.get(cluster_id) != mark and cluster_id in self.controllers:
                self.controllers[cluster_id][0].wake.set()
        self._pulse = pulse

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
