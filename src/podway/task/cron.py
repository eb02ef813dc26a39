"""When a schedule is due: cron's five fields, in UTC, as dstack writes them (days of the week are counted from Monday, 0).

As in cron, a day is due by the day of the month or by that of the week where both are restricted.
"""

import calendar
import datetime
import re

import msgspec

from podway.task.fields import Layers

_MONTHS = {name.lower(): number for number, name in enumerate(calendar.month_abbr) if name}
_DAYS = {name.lower(): number for number, name in enumerate(calendar.day_abbr)}
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of the month", 1, 31, {}),
    ("month", 1, 12, _MONTHS),
    ("day of the week", 0, 6, _DAYS),
)
_PART = re.compile(r"(\*|(\w{1,9})(?:-(\w{1,9}))?)(?:/([0-9]{1,3}))?")
_MOST_DAYS = 366 * 8 + 2  # the 29th of February may be this far away


class Cron(msgspec.Struct, frozen=True):
    """The values of each field; `any_day`, `any_weekday`: the field is not restricted."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_day: bool
    any_weekday: bool

    def after(self, time: float) -> float | None:
        """The first due minute after a time; None where there is none (the 30th of February)."""
        start = datetime.datetime.fromtimestamp(time, datetime.UTC).replace(second=0, microsecond=0)
        start += datetime.timedelta(minutes=1)
        for ahead in range(_MOST_DAYS):
            day = start.date() + datetime.timedelta(days=ahead)
            if not self._is_due(day):
                continue
            for hour in sorted(self.hours):
                for minute in sorted(self.minutes):
                    found = datetime.datetime(day.year, day.month, day.day, hour, minute, tzinfo=datetime.UTC)
                    if found >= start:
                        return found.timestamp()
        return None

    def _is_due(self, day: datetime.date) -> bool:
        if day.month not in self.months:
            return False
        of_month, of_week = day.day in self.days, day.weekday() in self.weekdays
        return of_month or of_week if not self.any_day and not self.any_weekday else of_month and of_week


def parse_cron(text: str) -> Cron:
    """A ValueError says what is wrong."""
    words = text.lower().split()
    if len(words) != len(_FIELDS):
        raise ValueError(f"{len(words)} fields where there are 5: minute, hour, day, month, day of the week")
    values = [_values(word, *row) for word, row in zip(words, _FIELDS, strict=True)]
    minutes, hours, days, months, weekdays = values
    cron = Cron(
        minutes, hours, days, months, weekdays, any_day=words[2].startswith("*"), any_weekday=words[4].startswith("*")
    )
    if cron.after(0.0) is None:
        raise ValueError("no day is ever due")
    return cron


def _values(word: str, what: str, low: int, high: int, names: dict[str, int]) -> frozenset[int]:
    found: set[int] = set()
    for part in word.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"`{part}` is not a {what}")
        first, last, step = match[2], match[3], int(match[4] or 1)
        begin = low if first is None else _number(first, what, names)
        end = high if first is None or (match[4] and last is None) else _number(last or first, what, names)
        if not low <= begin <= end <= high or step == 0:
            raise ValueError(f"`{part}` is not a {what} from {low} to {high}")
        found.update(range(begin, end + 1, step))
    return frozenset(found)


def _number(word: str, what: str, names: dict[str, int]) -> int:
    if word in names:
        return names[word]
    if not word.isascii() or not word.isdigit():
        raise ValueError(f"`{word}` is not a {what}")
    return int(word)


def read_schedule(run: Layers) -> tuple[str, ...]:
    """The cron expressions of a run's `schedule`; none without one."""
    field = run.get("schedule")
    if field is None:
        return ()
    cron = field.get("cron")
    assert cron is not None  # the shape requires it
    items = cron.items() if cron.is_list else [cron]
    for item in items:
        try:
            parse_cron(item.words())
        except ValueError as error:
            raise item.error(f"{item.found} is not a cron expression: {error}", 'write "15 23 * * *", in UTC') from None
    return tuple(item.words() for item in items)


def next_time(expressions: tuple[str, ...], time: float) -> float:
    """When the first of them is due after a time."""
    due = [found for one in expressions if (found := parse_cron(one).after(time)) is not None]
    return min(due)
