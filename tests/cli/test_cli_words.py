"""Numbers and words as people read and type them."""

import re
import shlex
import subprocess

from hypothesis import given, settings
from hypothesis import strategies as st

from podway.cli.quoting import command_text
from podway.cli.words import ago, count, duration, size

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def test_durations() -> None:
    shown = [duration(seconds) for seconds in (0, 45.9, 60, 125, 3600, 7500, 86399, 90000, -3)]
    assert shown == ["0s", "45s", "1m", "2m 5s", "1h", "2h 5m", "23h 59m", "1d 1h", "0s"]
    assert duration(None) is None


@given(st.floats(0, 1e9))
def test_a_duration_is_true_to_its_second_unit(seconds: float) -> None:
    text = duration(seconds) or ""
    parts = re.findall(r"(\d+)([dhms])", text)
    assert " ".join(a + b for a, b in parts) == text
    told = sum(int(number) * UNITS[unit] for number, unit in parts)
    resolution = {"d": 3600, "h": 60, "m": 1, "s": 1}[parts[0][1]]
    assert told <= seconds < told + resolution


def test_ages() -> None:
    now = 1e9
    shown = [ago(now - s, now) for s in (-100, 0, 4, 12, 60, 185, 3600, 7300, 86400, 300000)]
    assert shown[:3] == ["just now"] * 3
    assert shown[3:] == [
        "12 secs ago",
        "1 min ago",
        "3 mins ago",
        "1 hr ago",
        "2 hrs ago",
        "1 day ago",
        "3 days ago",
    ]
    assert ago(None, now) is None


@given(st.floats(-1e9, 1e12), st.floats(0, 1e12))
def test_every_age_can_be_told(then: float, now: float) -> None:
    assert re.fullmatch(r"just now|[\d,]+ (sec|min|hr|day)s? ago", ago(then, now) or "")


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536, 5 << 20, 3 << 30, 7 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
        "7.0 TiB",
    ]


def test_counts() -> None:
    assert [count(n, "host") for n in (0, 1, 2, 1000)] == ["0 hosts", "1 host", "2 hosts", "1,000 hosts"]


def test_one_word_is_bash_as_it_is() -> None:
    assert command_text(["echo $A && ls 'x y'"]) == "echo $A && ls 'x y'"


def test_shell_words_between_others_keep_their_meaning() -> None:
    assert command_text(["echo", "$A", "&&", "ls", "*.py"]) == "echo $A && ls *.py"


@given(st.lists(st.text("ab \t\n'\"\\", max_size=6), min_size=2))
def test_a_quoted_word_stays_one_word(words: list[str]) -> None:
    # A backslash outside quotes is bash's own; only words that need quoting for their spaces or quotes are touched.
    plain = [word for word in words if "\\" not in word or any(c in word for c in " \t\n'\"")]
    assert shlex.split(command_text([*plain, "x", "y"])) == [*plain, "x", "y"]


@settings(max_examples=20)
@given(st.lists(st.text("ab 'é\"", min_size=0, max_size=5), min_size=2, max_size=5))
def test_bash_agrees(words: list[str]) -> None:
    text = command_text(["printf", "%s\\n", *words])
    done = subprocess.run(
        ["bash", "-c", text.replace("%s\\n", "'%s\\n'", 1)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "".join(f"{word}\n" for word in words)
