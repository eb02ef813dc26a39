"""Job groups: tasks that run together, each on a cluster of its own.

1. The group is written with all its tasks; then a cluster is launched for each, its job held back.
2. When every host of the group is up, that is written; then the addresses are put into the tasks and all jobs are released. If one is
   not available, the group is cancelled: nothing of it has run, and the clusters go.
3. From then on each job is on its own: one that fails does not end the others. When all primary jobs have ended, the others are
   cancelled, each after its delay. A cluster goes with its job.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from podway import crash
from podway.control.access import Caller, Right, check_inventory, check_project, require, right_on
from podway.control.group_store import GroupMember, GroupRecord
from podway.control.records import ENDED, ClusterState, Job
from podway.control.schedules import Person
from podway.control.store import AlreadyEnded, Stale
from podway.control.transitions import request_cancel
from podway.control.verbs import NAME, Control
from podway.errors import ProviderError, UserError
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.task.job_groups import GroupTask, with_addresses
from podway.task.task import Autostop, without_secrets

LOOK_S = 1.0
KEPT_S = 7 * 24 * 3600.0  # an ended group is shown this long
MOST_TASKS = 50
_TRIES = 50
log = logging.getLogger("podway.groups")
replace = msgspec.structs.replace


class GroupControl:
    """The verbs of job groups, and what drives them."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._store = control.store
        self.rows = control.store.groups

    # verbs

    def launch(self, name: str, tasks: tuple[tuple[GroupTask, LaunchRequest], ...], caller: Caller) -> GroupRecord:
        """Write the group; its clusters are launched after. `tasks`: each with the launch of its cluster. Of the same name there may
        be one that has ended, which this takes the place of, or the same: the answer to its launch was lost."""
        if not 1 <= len(tasks) <= MOST_TASKS:
            raise UserError(f"a job group of {len(tasks)} tasks is not possible", f"at most {MOST_TASKS}")
        known = self.rows.get(name)
        if known is not None and right_on(known, caller) is None:
            raise UserError(f"the name {name!r} is taken", "use another name", status=409)
        if known is not None:
            require(known, caller, Right.MANAGE)
            if known.request_id is not None and known.request_id == tasks[0][1].request_id:
                return known
        members = tuple(self._member(name, one, request, caller) for one, request in tasks)
        if len({one.name for one in members}) != len(members) or not any(one.primary for one in members):
            raise UserError("every task of a job group has a name of its own, and one is primary", "name them")
        project = tasks[0][1].options.project
        record = GroupRecord(
            name=name,
            user=caller.user,
            project=project,
            members=members,
            created=time.time(),
            request_id=tasks[0][1].request_id,
        )
        if not self.rows.put(record):
            raise UserError(
                f"job group {name} has not ended", f"cancel it first: podway group cancel {name}", status=409
            )
        crash.point("group.row")
        return record

    def _member(self, group: str, one: GroupTask, request: LaunchRequest, caller: Caller) -> GroupMember:
        task = one.task
        cluster = f"{group}-{task.name}"
        if not task.name or not NAME.match(cluster) or task.kind != "task":
            raise UserError(f"{cluster!r} cannot be the name of a cluster", "use letters, digits and '-'")
        if self._store.find(cluster) is not None:
            raise UserError(f"there is a cluster {cluster} already", f"take it down: podway down {cluster}", status=409)
        check_project(caller, request.options.project)
        check_inventory(caller, task)
        # A cluster goes with its job: it was made for it.
        options = LaunchOptions(
            cluster=cluster,
            project=request.options.project,
            provider=request.options.provider,
            autostop=Autostop(idle_minutes=0.0, down=True),
            retry_until_up=request.options.retry_until_up,
        )
        kept = LaunchRequest(task=replace(task, schedule=(), pools=()), options=options, files=request.files)
        self._control.check_launch(kept, cluster, caller)
        return GroupMember(
            name=task.name,
            request=replace(kept, task=without_secrets(kept.task)),
            sealed_secrets=self._control.vault.seal(task.secrets),
            primary=one.primary,
            delay_s=one.delay_s,
            cluster=cluster,
        )

    def cancel(self, name: str, caller: Caller) -> None:
        """Cancel every job of a group."""
        self.find_for(name, caller, Right.MANAGE)
        for _ in range(_TRIES):
            row = self.rows.get(name)
            if row is None or row.ended is not None:
                return
            if self.rows.save(replace(row, cancel=True, reason="cancelled by the user")) is not None:
                crash.point("group.cancel-marked")
                return
        raise UserError(f"job group {name} keeps changing", "run the command again", status=409)

    def list_for(self, caller: Caller) -> list[GroupRecord]:
        """Those the caller may know of."""
        return [one for one in self.rows.all() if right_on(one, caller) is not None]

    def find_for(self, name: str, caller: Caller, needed: Right) -> GroupRecord:
        """The group of that name; for whoever may not know of it there is none."""
        found = self.rows.get(name)
        if found is None or right_on(found, caller) is None:
            names = ", ".join(one.name for one in self.list_for(caller))[:200]
            raise UserError(
                f"there is no job group {name!r}", f"existing ones: {names}" if names else "there are none", status=404
            )
        require(found, caller, needed)
        return found

    def job_of(self, member: GroupMember) -> Job | None:
        """The job of a member, once it was queued."""
        if member.cluster_id is None or member.job is None:
            return None
        return self._store.job(member.cluster_id, member.job)

    # driving

    async def run(self, person: Person) -> None:
        """For as long as the server runs."""
        while True:
            try:
                await asyncio.to_thread(self.look, time.time(), person)
            except Exception:
                log.exception("job groups")
            await asyncio.sleep(LOOK_S)

    def look(self, now: float, person: Person) -> None:
        """Once at every group."""
        for group in self.rows.all():
            if group.ended is not None:
                if now - group.ended > KEPT_S:
                    self.rows.delete(group.name)
                continue
            try:
                self._drive(group, now, person)
            except (UserError, ProviderError, Stale) as error:  # looked at again
                log.warning("job group %s: %s", group.name, error)
            except Exception:  # the others are looked at all the same
                log.exception("job group %s", group.name)

    def _drive(self, group: GroupRecord, now: float, person: Person) -> None:
        if not group.cancel and any(one.cluster_id is None for one in group.members):
            launched = self._launch(group, person)
            if launched is None:
                return
            group = launched
        jobs = {one.name: self.job_of(one) for one in group.members}
        over = {name for name, job in jobs.items() if job is None or job.state in ENDED}
        if group.cancel:
            self._drive_cancelled(group, over, now)
        elif not group.released:
            self._drive_starting(group, jobs, over)
        else:
            self._release(group, jobs)
            self._drive_running(group, over, now)

    def _drive_cancelled(self, group: GroupRecord, over: set[str], now: float) -> None:
        self._cancel(group, lambda one: True, group.reason)
        if not group.released:
            self._take_down(group)
        if len(over) == len(group.members):
            self.rows.save(replace(group, ended=now))

    def _drive_starting(self, group: GroupRecord, jobs: dict[str, Job | None], over: set[str]) -> None:
        """Nothing has run yet: a job that has ended is one whose hosts are not available."""
        lost = next((one.name for one in group.members if one.name in over), None)
        if lost is not None:
            why = job.reason if (job := jobs[lost]) is not None else "it is gone"
            self.rows.save(replace(group, cancel=True, reason=f"{lost}: {why}"))
        elif self._all_up(group) and (written := self.rows.save(replace(group, released=True))) is not None:
            crash.point("group.release-written")
            self._release(written, jobs)

    def _drive_running(self, group: GroupRecord, over: set[str], now: float) -> None:
        primary = {one.name for one in group.members if one.primary}
        if len(over) == len(group.members):
            self.rows.save(replace(group, ended=now))
        elif primary <= over and group.primary_ended is None:
            self.rows.save(replace(group, primary_ended=now))
        elif group.primary_ended is not None:
            since = now - group.primary_ended
            self._cancel(group, lambda one: not one.primary and since >= one.delay_s, "the primary tasks have ended")

    def _launch(self, group: GroupRecord, person: Person) -> GroupRecord | None:
        """Launch what was not yet; None where the group changed or was given up."""
        members: list[GroupMember] = []
        for one in group.members:
            if one.cluster_id is None:
                try:
                    one = self._launch_member(group, one, person)
                except (UserError, ProviderError) as error:
                    why = f"{error.what}; {error.hint}" if isinstance(error, UserError) else str(error)
                    left = (*members, *group.members[len(members) :])
                    self.rows.save(replace(group, members=left, cancel=True, reason=f"{one.name}: {why}"))
                    return None
            members.append(one)
        return self.rows.save(replace(group, members=tuple(members)))

    def _launch_member(self, group: GroupRecord, one: GroupMember, person: Person) -> GroupMember:
        caller = person(group.user)
        if caller is None:
            raise UserError(f"{group.user} has no valid token that may launch", "an administrator makes one")
        secrets = self._control.vault.open(one.sealed_secrets)
        request_id, taken = _launch_id(group, one), self._store.find(one.cluster)
        if taken is not None and taken.request_id != request_id:
            raise UserError(f"there is a cluster {one.cluster} already", f"take it down: podway down {one.cluster}")
        request = replace(one.request, task=replace(one.request.task, secrets=secrets), request_id=request_id)
        made = self._control.launch(request, caller, held=True)
        crash.point("group.task-launched")
        return replace(one, cluster_id=made.cluster_id, job=made.job)

    def _all_up(self, group: GroupRecord) -> bool:
        clusters = (self._store.cluster(one.cluster_id or "") for one in group.members)
        return all(one is not None and one.state is ClusterState.UP for one in clusters)

    def _release(self, group: GroupRecord, jobs: dict[str, Job | None]) -> None:
        """Let all jobs run that are held still. A cluster that went with its job meanwhile keeps its addresses in its row."""
        if not any(job is not None and job.held for job in jobs.values()):
            return
        clusters = {one.name: self._store.cluster(one.cluster_id or "") for one in group.members}
        addresses = {name: [host.address for host in found.hosts] for name, found in clusters.items() if found}

        def released(row: Job) -> Job:
            return replace(row, held=False, task=with_addresses(row.task, group.name, addresses))

        for job in (job for job in jobs.values() if job is not None and job.held):
            with contextlib.suppress(AlreadyEnded):
                self._store.update_job(job.cluster_id, job.number, released)
            self._control.wake(job.cluster_id)
            crash.point("group.half-released")

    def _take_down(self, group: GroupRecord) -> None:
        """Nothing of it has run: what was launched goes, also what a server killed in between launched without writing so."""
        for one in group.members:
            made = self._store.find(one.cluster)
            if made is not None and made.request_id == _launch_id(group, one) and made.goal != "gone":
                self._control.down(made.name)

    def _cancel(self, group: GroupRecord, chosen: Callable[[GroupMember], bool], reason: str) -> None:
        for one in group.members:
            job = self.job_of(one)
            if not chosen(one) or job is None or job.state in ENDED or job.cancel:
                continue
            with contextlib.suppress(AlreadyEnded):
                self._store.update_job(job.cluster_id, job.number, lambda row: request_cancel(row, reason))
            self._control.wake(job.cluster_id)


def _launch_id(group: GroupRecord, one: GroupMember) -> str:
    """Of the launch of a task's cluster: twice is once."""
    return f"group-{group.name}-{group.created:.6f}-{one.name}"
