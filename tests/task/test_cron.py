"""Cron's five fields, with days of the week from Monday, in UTC."""

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.task.cron import next_time, parse_cron
from podway.task.read import read_task_text


def at(text: str) -> float:
    return datetime.datetime.fromisoformat(f"{text}+00:00").timestamp()


@pytest.mark.parametrize(
    ("cron", "now", "due"),
    [
        ("15 23 * * *", "2026-11-16 13:00", "2026-11-16 23:15"),
        ("15 23 * * *", "2026-11-16 23:15", "2026-11-17 23:15"),
        ("*/20 8-9 * * mon-fri", "2026-11-20 09:40", "2026-11-23 08:00"),
        ("0 0 * * 0", "2026-11-16 00:00", "2026-11-23 00:00"),  # a Monday
        ("0 0 29 feb *", "2026-11-16 00:00", "2028-02-29 00:00"),
        ("0 0 1 * sun", "2026-11-16 00:00", "2026-11-22 00:00"),  # either day, as in cron
        ("5/20 * * * *", "2026-11-16 13:06", "2026-11-16 13:25"),
        ("15,45 10 * 12 *", "2026-11-16 13:00", "2026-12-01 10:15"),
    ],
)
def test_when_it_is_due(cron: str, now: str, due: str) -> None:
    assert parse_cron(cron).after(at(now)) == at(due)


@pytest.mark.parametrize(
    "cron",
    [
        "",
        "* * * *",
        "60 * * * *",
        "* 24 * * *",
        "* * 0 * *",
        "* * * 13 *",
        "* * * * 7",
        "*/0 * * * *",
        "5-1 * * * *",
        "a * * * *",
        "1- * * * *",
        "1,,2 * * * *",
        "0 0 30 feb *",
        "@daily",
        "0 0 * * ½",
    ],
)
def test_what_is_no_cron_is_refused(cron: str) -> None:
    with pytest.raises(ValueError):
        parse_cron(cron)


FIELD = st.one_of(
    st.just("*"), st.integers(1, 28).map(lambda n: f"*/{n}"), st.lists(st.integers(1, 6), min_size=1).map(
        lambda many: ",".join(map(str, many))
    ),
)  # fmt: skip


@given(st.lists(FIELD, min_size=5, max_size=5), st.integers(0, 4_000_000_000))
def test_the_next_time_is_the_first_minute_that_fits(words: list[str], now: int) -> None:
    cron = parse_cron(" ".join(words))
    due = cron.after(now)
    assert due is not None and now < due and due % 60 == 0
    found = datetime.datetime.fromtimestamp(due, datetime.UTC)
    assert found.minute in cron.minutes and found.hour in cron.hours and cron._is_due(found.date())
    earlier = cron.after(due - 60)
    assert earlier == due, "the same minute from just before it"


def test_a_file_with_a_schedule() -> None:
    task = read_task_text('type: task\ncommands: [x]\nschedule: {cron: ["15 23 * * *", "0 8 * * mon"]}\n')
    assert task.schedule == ("15 23 * * *", "0 8 * * mon")
    assert next_time(task.schedule, at("2026-11-22 23:30")) == at("2026-11-23 08:00")
    with pytest.raises(UserError, match="is not a cron expression"):
        read_task_text('type: task\ncommands: [x]\nschedule: {cron: "15 25 * * *"}\n')
