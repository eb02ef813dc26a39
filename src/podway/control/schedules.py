"""Runs that start by the clock: kept in the database, started by whichever server sees first that one is due.

A schedule is a launch request, its secrets sealed, and the time when it is due next. A due one is claimed by a guarded write that
names the time it is due for and puts the next look a little ahead; the launch carries a request id made of that time, so that one that is
repeated (the server was killed in between) is one run. A run that has not ended when the next is due is left alone, and that one is
skipped. What was missed while no server ran is started once. Each start is checked as if its owner asked for it now: whose tokens were
revoked, or who left the project, starts nothing more.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from podway.control.access import Caller, Right, allows, check_inventory, check_project, require, right_on
from podway.control.schedule_store import ScheduleRecord
from podway.control.service_verbs import ServiceControl
from podway.control.verbs import NAME
from podway.errors import ProviderError, UserError
from podway.launch_options import LaunchRequest
from podway.task.cron import next_time
from podway.task.task import without_secrets

LOOK_S = 2.0
AGAIN_S = 60.0  # a claim that came to nothing is taken up after this long
log = logging.getLogger("podway.schedules")
Person = Callable[[str], Caller | None]  # who somebody is now; None: nobody who may launch


class ScheduleControl:
    """The verbs of schedules, and the starting of what is due."""

    def __init__(self, service_verbs: ServiceControl) -> None:
        self._services = service_verbs
        self._control = service_verbs.control
        self.rows = self._control.store.schedules

    def put(self, request: LaunchRequest, caller: Caller, now: float) -> ScheduleRecord:
        """Keep a run that starts by the clock, or replace the one of its name."""
        name = request.options.cluster or request.task.name or ""
        if not NAME.match(name) or not request.task.schedule:
            raise UserError("a schedule needs a name and times", "add `name:` and `schedule:` to the file")
        check_project(caller, request.options.project)
        check_inventory(caller, request.task)
        known = self.rows.get(name)
        if known is not None:
            self._require(known, caller)
        once = _once(request, name, "")
        self._control.check_launch(once, name, caller)
        record = ScheduleRecord(
            name=name,
            user=caller.user if known is None else known.user,
            project=request.options.project,
            request=msgspec.structs.replace(once, task=without_secrets(request.task)),
            sealed_secrets=self._control.vault.seal(request.task.secrets),
            created=now,
            next_at=next_time(request.task.schedule, now),
        )
        self.rows.put(record)
        return record

    def list_for(self, caller: Caller) -> list[ScheduleRecord]:
        """Those the caller may know of."""
        return [one for one in self.rows.all() if right_on(one, caller) is not None]

    def delete(self, name: str, caller: Caller) -> None:
        """End a schedule. A run that it started goes on."""
        found = self.rows.get(name)
        if found is None or right_on(found, caller) is None:
            raise UserError(f"there is no schedule {name!r}", "see: podway schedule list", status=404)
        self._require(found, caller)
        self.rows.delete(name)

    def _require(self, known: ScheduleRecord, caller: Caller) -> None:
        if right_on(known, caller) is None:
            raise UserError(f"the name {known.name!r} is taken", "use another name", status=409)
        require(known, caller, Right.MANAGE)

    def start_due(self, now: float, person: Person) -> int:
        """Start what is due; how many."""
        started = 0
        for found in self.rows.all(due_before=now):
            due = found.due if found.due is not None else found.next_at
            claimed = self.rows.save(msgspec.structs.replace(found, due=due, next_at=now + AGAIN_S))
            if claimed is None:  # another server has it
                continue
            result, reason = self._start(claimed, due, person)
            started += result == "started"
            ended = msgspec.structs.replace(
                claimed,
                due=None,
                next_at=next_time(claimed.request.task.schedule, now),
                last_at=due,
                last=result,
                reason=reason,
            )
            self.rows.save(ended)
            log.info("schedule %s: %s %s", claimed.name, result, reason)
        return started

    def _start(
        self, record: ScheduleRecord, due: float, person: Person
    ) -> tuple[Literal["started", "skipped", "failed"], str]:
        request_id = f"schedule-{record.name}-{due:.0f}"
        request = _once(record.request, record.name, request_id)
        secrets = self._control.vault.open(record.sealed_secrets)
        request = msgspec.structs.replace(request, task=msgspec.structs.replace(request.task, secrets=secrets))
        caller = person(record.user)
        if caller is None:
            return "failed", f"{record.user} has no valid token that may launch"
        store = self._control.store
        try:
            check_project(caller, record.project)
            check_inventory(caller, request.task)
            if request.task.service is not None:
                self._services.apply(request, caller)
                return "started", ""
            cluster = store.find(record.name)
            own = cluster is not None and allows(cluster, caller, Right.USE)
            if own and cluster is not None and not store.has_request(cluster.id, request_id):
                before = [job for job in store.jobs(cluster.id, open_only=True) if job.gang]
                if before:
                    return "skipped", f"job {before[0].number}, the run before it, has not ended"
            self._control.launch(request, caller)
        except UserError as error:
            return "failed", f"{error.what}; {error.hint}"
        except ProviderError as error:
            return "failed", str(error)
        return "started", ""

    async def run(self, person: Person) -> None:
        """For as long as the server runs."""
        while True:
            try:
                await asyncio.to_thread(self.start_due, time.time(), person)
            except Exception:
                log.exception("schedules")
            await asyncio.sleep(LOOK_S)


def _once(request: LaunchRequest, name: str, request_id: str) -> LaunchRequest:
    """The request of one run."""
    return msgspec.structs.replace(
        request,
        task=msgspec.structs.replace(request.task, schedule=()),
        options=msgspec.structs.replace(request.options, cluster=name),
        request_id=request_id or None,
        agreed=None,
    )
