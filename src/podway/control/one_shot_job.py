"""One job that runs by itself: a one-shot run. What `Gang` is to a job on a cluster's hosts, `OneShotJob` is to it.

Nothing is started or judged here: the place does that (JobSet), restarts included. This follows it, in its row and its output, from
wherever the row says to the end; the output is whole in the archive before the end is written. Cancelling deletes the run, and the
job counts as cancelled when nothing of it is left: only then are its chips free.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

from podway import crash
from podway.control import transitions
from podway.control.archive import Archive
from podway.control.records import Cluster, Event, Exit, Job, JobState
from podway.control.run_output import RunOutput
from podway.control.store import Stale, Store
from podway.control.vault import SecretVault
from podway.errors import ProviderError, UserError
from podway.hosts.logs.text import host_name
from podway.providers import Provider, RunObservation, RunRank, SupportsOneShot

LOOK_S = 1.0
LAST_OUTPUT_S = 60.0  # for what the pods of an ended run still have to say
FIRST_PROCESS = 1  # of a container, as it numbers them


class OneShotJob:
    """Drives one job to its end. `run` returns when the job has ended, or is no longer ours to drive."""

    def __init__(
        self, *, store: Store, provider: Provider, vault: SecretVault, archive: Archive, owner: str, cluster: Cluster
    ) -> None:
        assert isinstance(provider, SupportsOneShot)
        self.store = store
        self.provider: SupportsOneShot = provider
        self.destroy = provider.destroy
        self.vault = vault
        self.archive = archive
        self.owner = owner
        self.cluster = cluster
        self.changed = asyncio.Event()  # set when someone wrote to the job's row
        self.ranks: dict[int, RunRank] = {}  # of this attempt, the latest that was seen of each
        self._waits = ""  # why its pods are not there, as it was last told
        self.output: RunOutput
        self.job: Job

    async def run(self, number: int) -> None:
        """From wherever the row says, to the end."""
        job = await asyncio.to_thread(self.store.job, self.cluster.id, number)
        if job is None or job.done:
            return
        self.job = job
        secrets = self.vault.open(job.sealed_secrets)
        self.output = RunOutput(self.provider, self.cluster.name, self.archive, secrets)
        with contextlib.suppress(Stale):  # another server drives it now
            await self._follow()

    def close(self) -> None:
        """Follow it no further; it goes on."""
        if hasattr(self, "output"):
            self.output.close()

    async def _follow(self) -> None:
        while True:
            self.changed.clear()
            fresh = await asyncio.to_thread(self.store.job, self.cluster.id, self.job.number)
            if fresh is None or fresh.done:
                return
            self.job = fresh
            try:
                if await self._step():
                    return
            except (ProviderError, UserError, OSError):  # the cluster's controller meets the same, and tells it
                await asyncio.sleep(LOOK_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), LOOK_S)

    async def _step(self) -> bool:
        """Look once; whether nothing more is to be done here."""
        seen = await self.provider.observe_run(self.cluster.name)
        if self.job.cancel:
            await self._cancel(seen)
            return True
        if seen.state in ("absent", "deleting"):
            return True  # somebody deleted it: the cluster's controller sees that too
        await self._note(seen)
        if seen.state in ("succeeded", "failed"):
            await self._end(seen)
            return True
        return False

    async def _note(self, seen: RunObservation) -> None:
        """The row says which attempt runs, and its output is read."""
        attempt, now = seen.restarts + 1, time.time()
        if self.job.state is JobState.PENDING or attempt > self.job.attempt.number:
            text = "is running" if attempt == 1 else f"is running again (attempt {attempt})"
            self.ranks = {}
            await self._update(text, lambda job: _begin(job, attempt, self.cluster.order.hosts, now))
        if attempt == self.job.attempt.number:
            self.ranks |= {one.rank: one for one in seen.ranks}
            self.output.follow(self.job, seen)
        reason = seen.reason if seen.state == "waiting" else ""
        if reason and reason != self._waits:
            await asyncio.to_thread(self.store.add_event, self._progress(f"Waiting: {reason}"))
        self._waits = reason

    def _progress(self, text: str) -> Event:
        return Event(time=time.time(), cluster_id=self.cluster.id, job=self.job.number, kind="progress", text=text)

    async def _cancel(self, seen: RunObservation) -> None:
        reason = self.job.reason or "cancelled"
        if self.job.state is not JobState.CANCELLING:
            await self._update(reason, lambda job: transitions.mark_cancelling(job, reason))
        while seen.state != "absent":
            if self.job.attempt.pids:
                self.output.follow(self.job, seen)
                self.ranks |= {one.rank: one for one in seen.ranks}
            await self.destroy(self.cluster.name)
            seen = await self.provider.observe_run(self.cluster.name)
            if seen.state != "absent":
                await asyncio.sleep(LOOK_S / 2)
        await self._close_output()
        await self._write_end(JobState.CANCELLED, reason, None)

    async def _end(self, seen: RunObservation) -> None:
        await self._close_output()
        crash.point("job.ended")
        if seen.state == "succeeded":
            await self._write_end(JobState.SUCCEEDED, "", None)
            return
        blamed = first_failure(list(self.ranks.values()))
        reason = seen.reason or "it failed"
        if blamed is not None:
            host = self.cluster.hosts[blamed.rank].address if blamed.rank < len(self.cluster.hosts) else "?"
            reason = f"{blamed.phase} on {host_name(blamed.rank)} (rank {blamed.rank}, {host}) {exit_of(blamed)}"
        in_setup = blamed is not None and blamed.phase == "setup"
        await self._write_end(JobState.FAILED_SETUP if in_setup else JobState.FAILED, reason, blamed)

    async def _close_output(self) -> None:
        await self.output.finish(LAST_OUTPUT_S)
        self.output.close()
        await asyncio.to_thread(self.archive.close, self.job)

    async def _write_end(self, state: JobState, reason: str, blamed: RunRank | None) -> None:
        now, rank = time.time(), None if blamed is None else blamed.rank
        exits = tuple(exit_of(self.ranks[number]) for number in sorted(self.ranks))
        tail = "" if rank is None else await asyncio.to_thread(self.archive.tail, self.job, rank)
        await self._update(
            reason or "has ended",
            lambda job: transitions.mark_ended(job, state, reason, now, exits, rank),
            detail={"tail": tail} if tail else {},
        )

    async def _update(self, text: str, change: Callable[[Job], Job], *, detail: dict[str, str] | None = None) -> None:
        self.job = await asyncio.to_thread(
            self.store.update_job,
            self.cluster.id,
            self.job.number,
            change,
            owner=self.owner,
            text=text,
            detail=detail,
        )


def _begin(job: Job, attempt: int, hosts: int, now: float) -> Job:
    """It runs, for the n-th time: setup and run are one phase there."""
    while job.state is JobState.PENDING or job.attempt.number < attempt:
        if job.state is not JobState.PENDING:
            job = transitions.mark_recovering(job, "it is restarted", now, lost_generation=None)
        job = transitions.mark_running(transitions.begin_attempt(job, now))
        job = transitions.mark_phase_started(job, "run", [FIRST_PROCESS] * hosts, ())
    return job


def first_failure(ranks: list[RunRank]) -> RunRank | None:
    """Which rank failed the run: of those that ended with a code of their own the first, else the first that was killed."""
    failed = [one for one in ranks if one.code]
    return min(failed, key=lambda one: ((one.code or 0) > 128, one.ended or 0.0, one.rank), default=None)


def exit_of(one: RunRank) -> Exit:
    """As it is kept; a rank that was deleted before it was seen to end is lost."""
    if one.code is None:
        return Exit(rank=one.rank, lost=True)
    return Exit(rank=one.rank, signal=one.code - 128) if one.code > 128 else Exit(rank=one.rank, code=one.code)
