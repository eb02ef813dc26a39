"""The functions of the routes about schedules."""

import time

from podway.control.schedule_store import ScheduleRecord
from podway.server.routing import ApiCall
from podway.server.schedule_api import SchedulesReply, ScheduleView


def schedules(call: ApiCall) -> SchedulesReply:
    """Schedules you may see; the one that is due next first."""
    return SchedulesReply(schedules=[_view(one) for one in call.services.schedules.list_for(call.caller)])


def put_schedule(call: ApiCall) -> ScheduleView:
    """Keep a run that starts at the times its task names, or replace the one of that name; its files have been uploaded."""
    return _view(call.services.schedules.put(call.body, call.caller, time.time()))


def delete_schedule(call: ApiCall) -> SchedulesReply:
    """End a schedule; a run that it started goes on."""
    call.services.schedules.delete(call.path["schedule"], call.caller)
    return schedules(call)


def _view(record: ScheduleRecord) -> ScheduleView:
    return ScheduleView(
        name=record.name,
        user=record.user,
        project=record.project,
        kind=record.request.task.kind,
        cron=list(record.request.task.schedule),
        next_at=record.next_at if record.due is None else record.due,
        last_at=record.last_at,
        last=record.last,
        reason=record.reason,
        created=record.created,
    )
