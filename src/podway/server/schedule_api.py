"""The types of the API that are about schedules."""

import msgspec


class ScheduleView(msgspec.Struct, frozen=True, kw_only=True):
    """A run that starts by the clock."""

    name: str
    user: str
    project: str | None
    kind: str  # task, service or dev-environment
    cron: list[str]  # in UTC
    next_at: float
    last_at: float | None
    last: str  # what came of the last one: started, skipped or failed; '' before the first
    reason: str
    created: float


class SchedulesReply(msgspec.Struct, frozen=True, kw_only=True):
    """Schedules."""

    schedules: list[ScheduleView]
