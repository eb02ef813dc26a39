"""The loop that makes one cluster what it is asked to be: observe, decide (pure), act, guarded write.

A controller wakes when a verb wrote something, when an action ended, or when its wait is over; it reads the rows, asks the
provider what is there, and does the one thing `decide` answers. Actions are idempotent, so a server killed between an action
and its write is harmless: the next one observes the result, or does it again.

Hosts that are not available are tried elsewhere, and lost hosts are recreated while a job waits for them; both go the
same way: the row says `clearing`, what is there is deleted, and then the next place is taken (`provisioning.py` writes the rows).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from podway import crash
from podway.control import provisioning, transitions
from podway.control.archive import Archive
from podway.control.decide import Action, decide, lost
from podway.control.failover import Place, PlaceRecord
from podway.control.fleet import Fleet
from podway.control.gang import Gang
from podway.control.heartbeat import Heartbeat
from podway.control.one_shot import submit
from podway.control.one_shot_job import OneShotJob
from podway.control.records import Cluster, ClusterState, Event, Job, JobState
from podway.control.ssh_entries import SshEntries
from podway.control.store import AlreadyEnded, Stale, Store
from podway.control.vault import SecretVault
from podway.errors import ProviderError, UserError
from podway.hosts.blobs import BlobStore
from podway.providers import Observation, Provider, stoppable
from podway.quantities import format_count
from podway.storage.attach import make_missing
from podway.task.task import Autostop

PATIENCE_S = 2.0  # between tries of an action that failed
LOOK_S = 5.0  # between looks at hosts that run jobs: they may be preempted
CONNECTIONS_S = 10.0  # between looks at whether somebody is logged in to an idle cluster
SLOWEST_S = 2.0  # between looks at something that takes its time

log = logging.getLogger("podway.controller")


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What every controller works with."""

    store: Store
    blobs: BlobStore
    vault: SecretVault
    archive: Archive
    provider: Callable[[str], Provider]
    cache_dir: str
    owner: str
    home: Path  # where the files behind `ssh NAME` are


def name_hosts(seen: Observation, cluster: str) -> Observation:
    """With hosts that name their cluster, whether or not the provider (or an older one's record) says it."""
    hosts = tuple(msgspec.structs.replace(host, cluster=cluster) for host in seen.hosts)
    return msgspec.structs.replace(seen, hosts=hosts) if hosts != seen.hosts else seen


class Controller:
    """Drives one cluster while this server holds its lease."""

    def __init__(self, parts: Parts, cluster_id: str) -> None:
        self.parts = parts
        self.cluster_id = cluster_id
        self.wake = asyncio.Event()
        self.gangs: dict[int, tuple[Gang | OneShotJob, asyncio.Task[None]]] = {}
        self.cluster: Cluster
        self.failures = 0
        self._last = ("", 0)  # the last verb, and how often it came in a row
        self._said = ("", "")  # the last error that was told, and what the cluster was to become
        self._heartbeat = Heartbeat(self._arm_autostop)
        self._ssh_entries = SshEntries(parts.home)
        self._next_connections = 0.0

    async def run(self) -> None:
        """Until the cluster is gone or the lease is lost."""
        try:
            while await self._step():
                pass
        except Stale:
            log.info("cluster %s is driven by another server", self.cluster_id)
        finally:
            self._heartbeat.close()
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
            seen = name_hosts(await provider.observe(cluster.name), cluster.name)
            if (billed := transitions.open_billing(cluster, seen.billed_since)) != cluster:
                await self._save("", billed)
                cluster = self.cluster
            wait = await self._act(provider, decide(cluster, jobs, seen, time.time(), self.gangs), seen, jobs)
            wait = min(wait, self._heartbeat.beat(provider, self.cluster))
            await self._ssh_entries.publish(provider, self.cluster)
            wait = min(wait, await self._note_connections(provider, jobs))
            self.failures = 0
        except (ProviderError, UserError, OSError) as error:
            self.failures += 1
            await self._tell_error(error)
            if isinstance(error, UserError) and cluster.goal == "up" and cluster.state is ClusterState.INIT:
                await self._give_up(jobs, error.what, JobState.FAILED_DRIVER)
            wait = min(30.0, PATIENCE_S * self.failures)
        if wait > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), wait)
        return True

    async def _act(self, provider: Provider, action: Action, seen: Observation, jobs: list[Job]) -> float:
        """Do it; how long to rest before looking again."""
        cluster, wait = self.cluster, self._pace(action.verb)
        match action.verb:
            case "submit":
                crash.point("provision.before-submit")
                if self._last[1] == 0:
                    await self._event(f"Starting {provisioning.describe(cluster.order)}", kind="progress")
                await make_missing(cluster.order.buckets, self.parts.blobs.root.parent, self._tell)
                await submit(provider, cluster, jobs, self.parts.vault)
                crash.point("provision.after-submit")
                await self._tell_waiting(seen)
            case "start":
                if self._last[1] == 0:
                    await self._event("Starting the hosts again", kind="progress")
                await stoppable(provider).start(cluster.name)
            case "stop":
                await stoppable(provider).stop(cluster.name)
                crash.point("stop.after-stop")
            case "destroy":
                crash.point("down.before-destroy")
                if self._last[1] == 0:
                    await self._event(f"Deleting {provisioning.describe(cluster.order)}", kind="progress")
                await provider.destroy(cluster.name)
                crash.point("down.after-destroy")
            case "clear":
                crash.point("again.before-clear")
                await provider.destroy(cluster.name)
                crash.point("again.after-clear")
            case "take-next":
                await self._save("", provisioning.take_next(cluster, await self._tries(), time.time()))
                crash.point("again.marked")
                return 0
            case "fail-over":
                await self._fail_over(jobs, action.reason, seen)
                return 0
            case "recover" | "lose":
                await self._lost(action.reason)
                return 0
            case "fail-jobs":
                await self._end_jobs(
                    [job for job in jobs if job.number in action.jobs], JobState.FAILED_NO_RESOURCE, action.reason
                )
                return 0
            case "end-jobs":
                await self._drop_gangs()
                await self._end_jobs(jobs, JobState.CANCELLED, action.reason)
                return 0
            case "mark":
                await self._mark(action, seen)
                return 0
            case "autostop":
                return await self._autostop(provider, action.reason)
            case "begin-jobs":
                self._begin(provider, action.jobs)
                return LOOK_S
            case "cancel-jobs":
                if self._last[1] == 0:
                    await self._event(f"Ending {format_count(len(action.jobs), 'job')} first", kind="progress")
                await self._cancel_jobs(provider, action)
                return 1.0
            case _:
                return action.wait_s
        return wait

    def _pace(self, verb: str) -> float:
        """Look again at once after a first try; less and less often when the same is to be done once more."""
        last, times = self._last
        self._last = (verb, times + 1 if verb == last else 0)
        return min(SLOWEST_S, 0.2 * self._last[1])

    # hosts that are not available, or were lost

    async def _fail_over(self, jobs: list[Job], reason: str, seen: Observation) -> None:
        cluster, now = self.cluster, time.time()
        await asyncio.to_thread(self.parts.store.note_try, cluster.order, False, now)
        elsewhere = seen.elsewhere or seen.condition == "preempted"
        if cluster.hosts:  # it was stopped, and does not start: it is not recreated, since its disks would go
            await self._end_jobs(jobs, JobState.FAILED_NO_RESOURCE, reason)
            await self._save(f"could not be started: {reason}", transitions.refuse_start(cluster, reason))
            return
        text, new = provisioning.failed(cluster, jobs, reason, await self._tries(), now)
        if elsewhere and new is not None:
            await self._save(text, new)
            crash.point("failover.marked")
        else:
            await self._give_up(jobs, text if elsewhere else reason, JobState.FAILED_NO_RESOURCE)

    async def _lost(self, reason: str) -> None:
        """The hosts are gone, or count as gone: jobs that come back wait, the others have failed."""
        await self._drop_gangs()
        # Decided again on the rows as they are now: a job that was waiting when the hosts were looked at may have begun since.
        jobs = await asyncio.to_thread(self.parts.store.jobs, self.cluster_id, open_only=True)
        action = lost(self.cluster, jobs, reason)
        back = [job for job in jobs if job.number in action.jobs]
        failed, why = [job for job in jobs if job not in back], f"its hosts were lost: {action.reason}"
        await self._end_jobs(failed, JobState.FAILED_DRIVER, why, hosts_lost=True)
        if action.verb == "lose":
            await self._save(action.reason, transitions.request_down(self.cluster, action.reason))
            return
        generation, now = self.cluster.search.generation, time.time()
        for job in back:
            if job.state not in (JobState.PENDING, JobState.RECOVERING):
                await self._update_job(
                    job.number,
                    lambda row: transitions.mark_recovering(row, action.reason, now, lost_generation=generation),
                    f"is recovering: {action.reason}",
                )
        crash.point("recover.jobs-marked")
        if self.cluster.state is ClusterState.UP:
            await asyncio.to_thread(self.parts.store.note_try, self.cluster.order, False, time.time())
        await self._save(*provisioning.lost(self.cluster, back, action.reason, await self._tries(), time.time()))
        crash.point("recover.marked")

    async def _tries(self) -> Mapping[Place, PlaceRecord]:
        return await asyncio.to_thread(self.parts.store.tries)

    async def _give_up(self, jobs: list[Job], why: str, state: JobState) -> None:
        """It cannot be created: its jobs failed, and what there is of it goes."""
        await self._drop_gangs()
        await self._end_jobs(jobs, state, why)
        await self._save(f"could not be created: {why}", transitions.request_down(self.cluster, why))

    # states

    async def _mark(self, action: Action, seen: Observation) -> None:
        now, cluster = time.time(), self.cluster
        if action.state is ClusterState.UP:
            crash.point("provision.before-up")
            text, new = provisioning.up(cluster, seen, now)
            if cluster.state is not ClusterState.UP:
                await asyncio.to_thread(self.parts.store.note_try, new.order, True, now)
            await self._save(text, new)
        elif action.state is ClusterState.GONE:
            await self._save("is gone", transitions.mark_gone(cluster, action.reason, now))
        else:
            await self._save("is stopped", transitions.mark_stopped(cluster, action.reason, now))

    async def _autostop(self, provider: Provider, reason: str) -> float:
        if await self._someone_is_there(provider):
            await self._touch()
            return 30.0
        down = self.cluster.autostop is not None and self.cluster.autostop.down
        change = transitions.request_down if down else transitions.request_stop
        text = "" if self.cluster.one_shot else f"{'down' if down else 'stop'} by autostop: {reason}"
        await self._save(text, change(self.cluster))
        return 0

    async def _note_connections(self, provider: Provider, jobs: list[Job]) -> float:
        """The idle time counts from the end of the last connection, so it is looked for while the cluster idles."""
        cluster, now = self.cluster, time.monotonic()
        if cluster.state is not ClusterState.UP or cluster.goal != "up" or cluster.autostop is None or jobs:
            return CONNECTIONS_S
        pause = min(CONNECTIONS_S, max(0.5, cluster.autostop.idle_minutes * 60 / 4))
        if now >= self._next_connections:
            if await self._someone_is_there(provider):
                await self._touch()
            self._next_connections = time.monotonic() + pause
        return max(0.1, self._next_connections - time.monotonic())

    async def _someone_is_there(self, provider: Provider) -> bool:
        """Whoever is logged in keeps a cluster awake, unless its autostop policy says that only jobs count."""
        if self.cluster.autostop is None or self.cluster.autostop.wait_for != "jobs_and_ssh":
            return False
        fleet = Fleet(provider, self.cluster)
        try:
            answers = await asyncio.gather(*(session.call("connected", patience=2.0) for session in fleet.sessions))
            return any(answer.get("connected") for answer in answers)
        except ProviderError:
            return False
        finally:
            fleet.close()

    # jobs

    def _begin(self, provider: Provider, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            if number in self.gangs:
                continue
            gang = self._gang(provider)
            self.gangs[number] = (gang, asyncio.create_task(self._drive(gang, number)))

    def _gang(self, provider: Provider) -> Gang | OneShotJob:
        parts, cluster = self.parts, self.cluster
        if cluster.one_shot:
            return OneShotJob(
                store=parts.store,
                provider=provider,
                vault=parts.vault,
                archive=parts.archive,
                owner=parts.owner,
                cluster=cluster,
            )
        return Gang(
            store=parts.store,
            # A cache of programs is run by whoever reads it: users do not share one.
            fleet=Fleet(provider, cluster, "" if cluster.order.isolated else parts.cache_dir),
            blobs=parts.blobs,
            vault=parts.vault,
            archive=parts.archive,
            owner=parts.owner,
            cluster=cluster,
        )

    async def _drive(self, gang: Gang | OneShotJob, number: int) -> None:
        try:
            await gang.run(number)
            await self._touch()
        except Exception:
            log.exception("job %s of %s", number, self.cluster_id)
            await asyncio.sleep(PATIENCE_S)
        finally:
            (gang.fleet if isinstance(gang, Gang) else gang).close()
            self.gangs.pop(number, None)
            self.wake.set()

    async def _drop_gangs(self) -> None:
        """Stop driving every job here; its row stays as it is."""
        tasks = [task for _, task in self.gangs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _cancel_jobs(self, provider: Provider, action: Action) -> None:
        for number in action.jobs:
            await self._update_job(number, lambda row: transitions.request_cancel(row, action.reason), "")
        self._begin(provider, action.jobs)
        for gang, _ in self.gangs.values():
            gang.changed.set()

    async def _end_jobs(self, jobs: list[Job], state: JobState, why: str, *, hosts_lost: bool = False) -> None:
        """Write them as ended: there are no hosts to ask."""
        now = time.time()
        for job in jobs:
            await asyncio.to_thread(self.parts.archive.close, job)
            await self._update_job(
                job.number, lambda row: transitions.mark_ended(row, state, why, now, hosts_lost=hosts_lost), why
            )

    async def _update_job(self, number: int, change: Callable[[Job], Job], text: str) -> None:
        """Over whatever a verb or a gang wrote to the row in between, unless that ended it."""
        store, owner = self.parts.store, self.parts.owner
        with contextlib.suppress(AlreadyEnded):
            await asyncio.to_thread(store.update_job, self.cluster_id, number, change, owner=owner, text=text)

    # rows and events

    async def _touch(self) -> None:
        """Autostop counts from the end of the last job."""
        now, store = time.time(), self.parts.store
        with contextlib.suppress(Stale):
            await asyncio.to_thread(
                store.update, self.cluster_id, lambda row: transitions.mark_active(row, now), owner=self.parts.owner
            )

    async def _arm_autostop(self, autostop: Autostop | None) -> None:
        """The head host has confirmed the policy: whoever set it is waiting to hear so."""
        store = self.parts.store
        with contextlib.suppress(Stale):
            await asyncio.to_thread(
                store.update,
                self.cluster_id,
                lambda row: transitions.arm_autostop(row, autostop),
                owner=self.parts.owner,
            )

    async def _save(self, text: str, new: Cluster) -> None:
        """Write what was decided on what was read, and tell it in words, if any."""
        event = Event(time=time.time(), cluster_id=new.id, text=text, detail={"state": new.state.value})
        events = (event,) if text else ()
        try:
            self.cluster = await asyncio.to_thread(
                self.parts.store.save_cluster, new, owner=self.parts.owner, events=events
            )
        except Stale:
            # Either a verb wrote a new goal (look again), or the lease went to another server (stop).
            leases = await asyncio.to_thread(self.parts.store.leases)
            if not any(key == self.cluster_id and owner == self.parts.owner for key, owner, _ in leases):
                raise

    async def _tell_waiting(self, seen: Observation) -> None:
        """Why the hosts are not there yet, whenever that has changed: in the events, and in the row for `status`."""
        if seen.condition == "creating" and seen.reason and seen.reason != self.cluster.reason:
            await self._event(f"Waiting: {seen.reason}", kind="progress")
            await self._save("", msgspec.structs.replace(self.cluster, reason=seen.reason))

    async def _tell_error(self, error: Exception) -> None:
        """Once for each goal, not at every try."""
        text = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
        if (self.cluster.goal, text) != self._said:
            self._said = (self.cluster.goal, text)
            await self._event(text, kind="error")

    async def _tell(self, text: str) -> None:
        await self._event(text, kind="progress")

    async def _event(self, text: str, kind: Literal["progress", "error"]) -> None:
        event = Event(time=time.time(), cluster_id=self.cluster_id, kind=kind, text=text)
        await asyncio.to_thread(self.parts.store.add_event, event)
