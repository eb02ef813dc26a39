"""What may reach a screen, whose line it is, and what is hidden."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.hosts.logs.text import display, group_prefix, host_name, is_blank, mask, prefix, ranges
from podway.terminal import RESET, strip_ansi


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("run", 0, 1, 41, "10.0.0.1", ""), "(task, pid=41) "),
        (("run", 0, 1, 41, "10.0.0.1", "train"), "(train, pid=41) "),
        (("setup", 0, 1, 41, "10.0.0.1", "train"), "(setup, pid=41) "),
        (("run", 0, 4, 41, "10.0.0.1", "train"), "(head, rank=0, pid=41) "),
        (("run", 1, 4, 42, "10.0.0.2", "train"), "(worker1, rank=1, pid=42, ip=10.0.0.2) "),
        (("setup", 0, 4, 41, "10.0.0.1", ""), "(setup, head, rank=0, pid=41) "),
        (("setup", 1, 4, 42, "10.0.0.2", ""), "(setup, worker1, rank=1, pid=42, ip=10.0.0.2) "),
        (("run", 5, 8, None, "10.0.0.6", ""), "(worker5, rank=5, pid=-, ip=10.0.0.6) "),
        (("run", 5, 8, 1, "", ""), "(worker5, rank=5, pid=1) "),
    ],
)
def test_prefix(args: tuple[str, int, int, int | None, str, str], expected: str) -> None:
    assert prefix(*args) == expected


def test_group_prefix() -> None:
    assert group_prefix("run", range(64), 64) == "(all 64 hosts) "
    assert group_prefix("setup", range(64), 64) == "(setup, all 64 hosts) "
    assert group_prefix("run", [7, 0, 1, 2, 3, 4, 5], 64) == "(hosts 0-5,7) "
    assert group_prefix("setup", [1, 2, 3], 8) == "(setup, hosts 1-3) "
    assert [host_name(rank) for rank in (0, 1, 12)] == ["head", "worker1", "worker12"]


@given(st.sets(st.integers(0, 300), min_size=1))
def test_ranges_name_exactly_the_ranks(ranks: set[int]) -> None:
    named = set()
    for part in ranges(ranks).split(","):
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == ranks


@pytest.mark.parametrize(
    ("raw", "plain", "coloured"),
    [
        (b"plain", "plain", "plain"),
        (b"\x1b[1;31mred\x1b[0m", "red", "\x1b[1;31mred\x1b[0m" + RESET),
        (b"\x1b[31mopen", "open", "\x1b[31mopen" + RESET),
        (b"a\x1b[2Kb\x1b[10;20Hc\x1b[Ad\x1b[?25le", "abcde", "abcde"),
        (b"\x1b]0;title\x07text", "text", "text"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link", "link"),
        (b"\x1b]never ended", "never ended", "never ended"),
        (b"\x1bPdata\x1b\\x\x1b7y\x1b8z\x1bc\x1b(Bw", "xyzw", "xyzw"),
        (b"cut \x1b[3", "cut ", "cut "),
        (b"cut \x1b", "cut ", "cut "),
        (b"a\x00b\xffc", "a\ufffdb\ufffdc", "a\ufffdb\ufffdc"),
        (b"bell\x07 back\x08 feed\x0c\x0b", "bell back feed", "bell back feed"),
        ("\x9b2J".encode(), "\ufffd2J", "\ufffd2J"),
        (b"tab\tstays", "tab\tstays", "tab\tstays"),
        ("naïve ✓ 漢字".encode(), "naïve ✓ 漢字", "naïve ✓ 漢字"),
    ],
)
def test_display(raw: bytes, plain: str, coloured: str) -> None:
    assert display(raw) == plain
    assert display(raw, colour=True) == coloured


STEERING = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


@given(st.binary())
def test_nothing_that_steers_a_terminal_is_ever_shown(raw: bytes) -> None:
    assert not STEERING.search(display(raw))
    assert not STEERING.search(re.sub(r"\x1b\[[0-9;:]*m", "", display(raw, colour=True)))


@given(st.lists(st.sampled_from(["\x1b", "[", "3", "1", "m", "]", "\x07", "\\", "P", "A", ";", "x", " "])).map("".join))
def test_escape_sequences_go_whole(text: str) -> None:
    assert "\x1b" not in strip_ansi(text)
    shown = display(text.encode(), colour=True)
    assert "\x1b" not in re.sub(r"\x1b\[[0-9;:]*m", "", shown)
    assert shown.endswith(RESET) == ("\x1b" in shown)


def test_blank() -> None:
    assert is_blank(b"") and is_blank(b" \t ") and is_blank(b"\x1b[2K \x1b[0m")
    assert not is_blank(b"\x1b[31m.\x1b[0m")


def test_mask() -> None:
    assert mask("key=hunter2-secret.", ["hunter2-secret"]) == "key=***."
    assert mask("abcabc", ["abcab", "bcabc"]) == "***"  # overlapping ones leave nothing between them
    assert mask("nothing", []) == mask("nothing", ["", " "]) == "nothing"
    assert mask("-----BEGIN KEY-----", ["-----BEGIN KEY-----\nMIIBxyz123\n-----END KEY-----"]) == "***"
    assert mask("pässwörd ü", ["pässwörd"]) == "*** ü"


@given(st.text(), st.lists(st.text(min_size=2), max_size=3))
def test_no_secret_is_left(text: str, secrets: list[str]) -> None:
    shown = mask(text, secrets)
    for secret in secrets:
        if len(secret.strip().encode("utf-8", "surrogatepass")) >= 2 and "*" not in secret:
            assert secret.strip(" \t\n\r\x0b\x0c") not in shown
