"""One job on all hosts of a cluster: a gang.

1. every host's agent is reached (started if it is not there), and the job's files are brought to all of them;
2. setup starts on every host, then run on every host. `start` is idempotent by (job, phase), so a server that was killed
   simply does the step again;
3. the first failure, a cancel, or the time limit ends all ranks: SIGTERM, the grace, SIGKILL, until every agent says that
   nothing of the job is left and the chips are free;
4. each rank's output is copied to the archive, and only then is the job written as ended, so that an ended job's log is whole;
5. a job whose task comes back from what happened (recovery.py) is written as RECOVERING instead, and begins again as its next
   attempt: on the same hosts after an error of its own, on new ones when a host was lost.

Whatever happens, the row says where the job is: SETTING_UP and RUNNING are resumed by the next server, CANCELLING is finished.
On hosts that may vanish, the output is copied to the archive all along.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TypeVar

from podway import crash
from podway.control import transitions
from podway.control.archive import Archive
from podway.control.container_fields import container_fields, container_problem, registry_password
from podway.control.decide import RankStatus, Verdict, judge
from podway.control.fleet import LOST_AFTER_S, Fleet, HostSession, read_exit
from podway.control.records import Cluster, Event, Exit, Job, JobState
from podway.control.recovery import Cause, cause_of, comes_back
from podway.control.stopping import stop_job
from podway.control.store import Stale, Store
from podway.control.vault import SecretVault
from podway.errors import ProviderError, UserError
from podway.hosts.blobs import BlobStore
from podway.hosts.logs.text import host_name
from podway.hosts.manifest import tree_names
from podway.hosts.sync import Progress, sync
from podway.hosts.tree import TreeManifest
from podway.launch import Launch, has_setup, runs_image_command
from podway.quantities import format_bytes
from podway.storage.attach import Attachment

Done = TypeVar("Done")

GRACE_S = 10.0  # between SIGTERM and SIGKILL, unless the task says otherwise
PROGRESS_S = 5.0  # between lines about a sync under way
MIRROR_S = 1.0  # between copies of the output of hosts that may vanish
LAST_COPY_S = 10.0  # for what can still be read from a cluster that lost a host
REST_S, LONGEST_REST_S = 1.0, 60.0  # before a job that failed by itself begins again


class Cancelled(Exception):
    """The job was cancelled, or ran out of its time."""


class Gang:
    """Drives one job to its end. `run` returns when the job has ended or is no longer ours to drive."""

    def __init__(
        self,
        *,
        store: Store,
        fleet: Fleet,
        blobs: BlobStore,
        vault: SecretVault,
        archive: Archive,
        owner: str,
        cluster: Cluster,
    ) -> None:
        self.store = store
        self.fleet = fleet
        self.blobs = blobs
        self.vault = vault
        self.archive = archive
        self.owner = owner
        self.cluster = cluster
        self.changed = asyncio.Event()  # set when someone wrote to the job's row
        self.skew_ms: tuple[int, ...] = ()
        self.exits: tuple[Exit, ...] = ()  # of the phase that was last seen to its end
        self.job: Job

    async def run(self, number: int) -> None:
        """From wherever the row says, to the end."""
        job = await asyncio.to_thread(self.store.job, self.cluster.id, number)
        if job is None or job.done:
            return
        self.job = job
        try:
            await self._drive()
        except Cancelled as why:
            await self._end(JobState.CANCELLED, str(why))
        except Stale:
            return  # another server drives it now
        except UserError as error:
            await self._end(JobState.FAILED_DRIVER, str(error))
        except ProviderError as error:
            reason = f"a host could not be reached: {error}"
            if not error.transient or not comes_back(self.job, "interruption"):
                await self._end(JobState.FAILED_DRIVER, reason, hosts_lost=error.transient)
            elif await self.fleet.any_lost():
                await self._come_back("interruption", reason)

    async def _drive(self) -> None:
        if self.job.state in (JobState.PENDING, JobState.RECOVERING):
            await self._refuse_if_cancelled()
            await self._begin()
            crash.point("job.begun")
        if self.job.state is JobState.SETTING_UP:
            await self._refuse_if_cancelled()
            self.skew_ms = await self._unless_cancelled(self.fleet.ensure_agents())
            await self._unless_cancelled(self._sync())
            if self.job.run_setup and has_setup(self.job.task, self.cluster.order):
                failed = await self._phase("setup")
                if failed is not None:
                    await self._fail(JobState.FAILED_SETUP, "setup", failed)
                    return
            crash.point("job.before-run")
            await self._update("is running", transitions.mark_running)
        if self.job.state is JobState.RUNNING:
            has_run = self.job.task.run.strip() or runs_image_command(self.job.task)
            failed = await self._phase("run") if has_run else None
            if failed is None:
                await self._end(JobState.SUCCEEDED, "")
            else:
                await self._fail(JobState.FAILED, "run", failed)
        elif self.job.state is JobState.CANCELLING:
            raise Cancelled(self.job.reason)

    # steps

    async def _begin(self) -> None:
        """The first attempt, or the next one; a job that fails by itself again and again rests in between."""
        again = self.job.state is JobState.RECOVERING
        if again and self.job.attempt.lost_generation is None:
            restarts = self.job.attempt.error_restarts
            until = time.monotonic() + min(LONGEST_REST_S, REST_S * 2.0 ** (restarts - 1))
            while (left := until - time.monotonic()) > 0:
                await asyncio.sleep(min(left, 0.5))
                await self._refuse_if_cancelled()
        text = f"is being set up again (attempt {self.job.attempt.number + 1})" if again else "is being set up"
        now = time.time()
        await self._update(text, lambda job: transitions.begin_attempt(job, now))

    async def _sync(self) -> None:
        crash.point("job.before-sync")
        trees = [tree for tree in self.job.files if tree.kind != "bucket"]
        if trees:
            total = sum(tree.size for tree in trees)
            await self._note(f"Syncing {tree_names(trees)} ({format_bytes(total)}) to {len(self.fleet.hosts)} host(s)")
            links = [session.link for session in self.fleet.sessions]
            for tree in trees:
                manifest = TreeManifest.decode(await asyncio.to_thread(self.blobs.read, tree.manifest))
                async with self._telling(f"Syncing {tree.target}") as progress:
                    report = await sync(links, manifest, tree.target, self.blobs, progress=progress)
                if report.changed_hosts:
                    await self._note(f"Synced {tree.target}: {report}")
        await self._buckets().bring(self.job.files, self.blobs, location=self.cluster.order.region, note=self._note)
        crash.point("job.after-sync")

    @contextlib.asynccontextmanager
    async def _telling(self, what: str) -> AsyncIterator[Callable[[Progress], None]]:
        """While something long is under way, how far it is, every few seconds."""
        latest: list[str] = []

        async def tell() -> None:
            told = ""
            while True:
                await asyncio.sleep(PROGRESS_S)
                if latest and latest[-1] != told:
                    told = latest[-1]
                    await self._note(f"{what}: {told}")

        telling = asyncio.create_task(tell())
        try:
            yield lambda progress: latest.__setitem__(slice(None), [str(progress)])
        finally:
            telling.cancel()

    def _buckets(self) -> Attachment:
        links = [session.link for session in self.fleet.answering()]
        capabilities = self.fleet.row.capabilities
        known = self.job.task.env | self.vault.open(self.job.sealed_secrets)
        return Attachment(self.job.task.file_mounts, links, capabilities=capabilities, credentials=known)

    async def _phase(self, phase: str) -> Exit | None:
        """Start a phase everywhere and see it through; the exit to blame, or None when all is well."""
        launch = self._launch()
        secrets = self.vault.open(self.job.sealed_secrets)
        password = registry_password(launch, secrets)
        pids = [0] * len(self.fleet.sessions)

        async def start(session: HostSession) -> None:
            reply = await session.call(
                "start",
                job=self.job.agent_job_id,
                phase=phase,
                script=launch.script(phase),
                env=launch.env_for(session.host, phase),
                secrets=secrets,
                cwd=launch.cwd,
                interpreter=[self.job.task.shell],
                container=container_fields(launch, session.host, password),
                patience=LOST_AFTER_S,
            )
            pids[session.host.rank] = int(reply.get("pid") or 0)

        starts = [asyncio.create_task(start(session)) for session in self.fleet.sessions]
        await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
        crash.point("job.phase-half-started")
        self.exits = ()
        try:
            await self._unless_cancelled(_all(starts))
        except Cancelled:  # what did start has output to keep; an agent starts nothing more once it hears of the cancel
            await self._mark_started(phase, pids)
            raise
        await self._mark_started(phase, pids)
        crash.point("job.phase-started")
        mirror = asyncio.create_task(self._mirror())
        try:
            return await self._watch(phase)
        finally:
            mirror.cancel()

    async def _mark_started(self, phase: str, pids: list[int]) -> None:
        await self._update(
            f"started {phase} on {len(pids)} host(s)",
            lambda job: transitions.mark_phase_started(job, phase, pids, self.skew_ms),
        )

    async def _mirror(self) -> None:
        """Keep copying the output from hosts that may vanish with it."""
        if self.fleet.row.simulated and self.job.task.recovery is None:
            return
        while True:
            began = time.monotonic()
            await self.archive.copy(self.job, self.fleet)
            await asyncio.sleep(max(MIRROR_S, 2 * (time.monotonic() - began)))

    async def _watch(self, phase: str) -> Exit | None:
        limit = self.job.task.max_duration_s if phase == "run" else None
        deadline = (self.job.attempt.started or time.time()) + limit if limit else None
        latest: dict[int, RankStatus] = {}
        waits = {
            rank: asyncio.create_task(self._status(session, phase)) for rank, session in enumerate(self.fleet.sessions)
        }
        wake = asyncio.create_task(self.changed.wait())
        try:
            while True:
                timeout = 2.0 if deadline is None else max(0.05, min(2.0, deadline - time.time()))
                done, _ = await asyncio.wait(
                    [*waits.values(), wake], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                for rank, asked in list(waits.items()):
                    if asked in done:
                        latest[rank] = asked.result()
                        del waits[rank]
                        if latest[rank].exit is None:
                            waits[rank] = asyncio.create_task(self._status(self.fleet.sessions[rank], phase))
                if wake in done:
                    self.changed.clear()
                    wake = asyncio.create_task(self.changed.wait())
                await self._refuse_if_cancelled()
                if deadline is not None and time.time() >= deadline:
                    raise Cancelled(f"max_duration of {limit} s is over")
                running = [RankStatus(rank=rank, state="running") for rank in waits if rank not in latest]
                verdict = judge([*latest.values(), *running])
                if self.job.task.stop_when == "head-done" and 0 in latest and latest[0].exit and latest[0].exit.ok:
                    verdict, waiting = Verdict(outcome="ok"), False
                else:
                    waiting = bool(waits)
                # A command that bypasses the queue is not a gang: each host finishes it, whatever the others do.
                if verdict.outcome != "wait" and (not waiting or (verdict.outcome == "failed" and self.job.gang)):
                    self.exits = tuple(status.exit for status in latest.values() if status.exit)
                    return verdict.first
        finally:
            for pending in (*waits.values(), wake):
                pending.cancel()

    async def _status(self, session: HostSession, phase: str) -> RankStatus:
        """Wait (on the host) for a rank's phase to end, at most a few seconds; a host lost for long is an exit too."""
        rank, asked = session.host.rank, time.monotonic()
        try:
            reply = await session.call(
                "status", job=self.job.agent_job_id, phase=phase, wait=5.0, patience=LOST_AFTER_S
            )
        except ProviderError:
            if await self.fleet.is_lost(rank, asked):
                return RankStatus(rank=rank, state="lost", exit=Exit(rank=rank, lost=True))
            return RankStatus(rank=rank, state="running")
        self.fleet.silent.pop(rank, None)
        state = reply["state"]
        ended = read_exit(rank, reply) if state in ("exited", "lost") else None
        return RankStatus(rank=rank, state=state, pid=reply.get("pid"), exit=ended)

    async def _fail(self, state: JobState, phase: str, blamed: Exit) -> None:
        """It failed: for good, unless its task comes back from this."""
        reason = await container_problem(self.fleet, self.job.agent_job_id, phase, blamed) or self._blame(phase, blamed)
        if self.job.task.recovery is not None or blamed.killed:
            hosts_lost = await self.fleet.any_lost(self.job.agent_job_id if self.job.task.recovery else "", phase)
            if comes_back(self.job, cause := cause_of(self.job, blamed, hosts_lost=hosts_lost)):
                await self._come_back(cause, reason)
                return
            if hosts_lost and blamed.killed:  # a host that is taken away in an orderly manner ends its processes first
                state, reason = JobState.FAILED_DRIVER, f"its hosts were lost: {reason}"
        await self._end(state, reason, blamed, hosts_lost=state is JobState.FAILED_DRIVER)

    async def _come_back(self, cause: Cause, reason: str) -> None:
        """Keep what was printed, and write that the job is to begin again."""
        if cause == "error":
            await self._stop_all()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.archive.copy(self.job, self.fleet), None if cause == "error" else LAST_COPY_S)
        crash.point("recover.before-save")
        now, lost = time.time(), self.cluster.search.generation if cause == "interruption" else None
        await self._update(
            f"is recovering: {reason}",
            lambda job: transitions.mark_recovering(job, reason, now, lost_generation=lost),
        )
        crash.point("recover.saved")

    async def _end(self, state: JobState, why: str, blamed: Exit | None = None, *, hosts_lost: bool = False) -> None:
        """Stop what is left, keep the output, and only then write the end."""
        if state is JobState.CANCELLED and self.job.state is not JobState.CANCELLING:
            await self._update(why or "is being cancelled", lambda job: transitions.mark_cancelling(job, why))
        # A rank that exits by itself takes its children along: nothing is left of a success in which all did.
        ended_by_itself = state is JobState.SUCCEEDED and len(self.exits) == len(self.fleet.hosts)
        if not ended_by_itself and (self._labels() or self.job.state is JobState.CANCELLING):
            await self._stop_all()
        crash.point("job.ended")
        if self.job.attempt.pids:
            await self._buckets().flush(self._note, succeeded=state is JobState.SUCCEEDED)
        exits = await self._final_exits()
        tail = ""
        if self.job.attempt.pids:
            await self.archive.keep(self.job, self.fleet)
            if blamed is not None:
                tail = await asyncio.to_thread(self.archive.tail, self.job, blamed.rank)
        crash.point("job.before-save")
        now, rank = time.time(), blamed.rank if blamed is not None else None
        await self._update(
            why or "has ended",
            lambda job: transitions.mark_ended(job, state, why, now, exits, rank, hosts_lost=hosts_lost),
            detail={"tail": tail} if tail else {},
        )

    async def _stop_all(self) -> None:
        grace = self.job.task.stop_duration_s
        grace_s = GRACE_S if grace is None else float(grace)
        await stop_job(self.fleet, self.job.agent_job_id, grace_s, is_going=self._is_going, tell=self._note)

    async def _is_going(self) -> bool:
        """Whether the cluster is being stopped or deleted."""
        cluster = await asyncio.to_thread(self.store.cluster, self.cluster.id)
        return cluster is None or cluster.goal != "up"

    async def _final_exits(self) -> tuple[Exit, ...]:
        """How every rank ended, the stopped ones included."""
        phases = self._labels()
        if not phases:
            return self.exits
        known = {end.rank: end for end in self.exits}

        async def ask(session: HostSession) -> Exit:
            rank = session.host.rank
            if rank in known:
                return known[rank]
            if rank in self.fleet.given_up:
                return Exit(rank=rank, lost=True)
            try:
                reply = await session.call("status", job=self.job.agent_job_id, phase=phases[0], wait=0.0, patience=2.0)
            except ProviderError:
                return Exit(rank=rank, lost=True)
            return read_exit(rank, reply)

        return tuple(await asyncio.gather(*(ask(session) for session in self.fleet.sessions)))

    def _labels(self) -> list[str]:
        """The phases this attempt has begun, the latest first."""
        return [phase for phase in ("run", "setup") if self.job.label(phase) in self.job.attempt.pids]

    # the row

    async def _unless_cancelled(self, work: Coroutine[None, None, Done]) -> Done:
        """Do it, and leave it undone as soon as the job is cancelled: a host that does not answer holds nobody up."""
        doing = asyncio.create_task(work)
        try:
            while True:
                wake = asyncio.create_task(self.changed.wait())
                await asyncio.wait([doing, wake], return_when=asyncio.FIRST_COMPLETED)
                wake.cancel()
                if doing.done():
                    return doing.result()
                self.changed.clear()
                await self._refuse_if_cancelled()
        finally:
            doing.cancel()
            await asyncio.wait([doing])

    async def _refuse_if_cancelled(self) -> None:
        fresh = await asyncio.to_thread(self.store.job, self.cluster.id, self.job.number)
        if fresh is None:
            raise Stale("the job is gone")
        self.job = fresh
        if fresh.cancel:
            raise Cancelled(fresh.reason or "cancelled")

    async def _update(self, text: str, change: Callable[[Job], Job], *, detail: dict[str, str] | None = None) -> None:
        """Apply a transition to the row, which others may only ask to cancel or, where the hosts are lost, end (then: Stale)."""
        writing = asyncio.create_task(
            asyncio.to_thread(
                self.store.update_job,
                self.cluster.id,
                self.job.number,
                change,
                owner=self.owner,
                text=text,
                detail=detail,
            )
        )
        try:
            self.job = await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])  # a write is not left behind when the gang is dropped: its row is read next
            raise

    async def _note(self, text: str) -> None:
        event = Event(time=time.time(), cluster_id=self.cluster.id, job=self.job.number, kind="progress", text=text)
        await asyncio.to_thread(self.store.add_event, event)

    def _launch(self) -> Launch:
        return Launch(
            job=self.job.key,
            number=self.job.number,
            cluster=self.cluster.name,
            task=self.job.task,
            order=self.cluster.order,
            hosts=self.fleet.hosts,
            simulated=self.fleet.row.simulated,
            user=self.job.user,
            submitted=self.job.submitted,
            cache_dir=self.fleet.cache_dir,
            attempt=self.job.attempt.number,
        )

    def _blame(self, phase: str, end: Exit) -> str:
        return f"{phase} on {host_name(end.rank)} (rank {end.rank}, {self.fleet.hosts[end.rank].address}) {end}"


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)
