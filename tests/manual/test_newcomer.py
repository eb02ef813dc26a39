"""A newcomer in a real terminal, 60 and 120 columns wide: every command of the README and of the first pages, in order.

What is on the screen after each command is compared with tests/golden/newcomer, without what changes from run to run (times, process
ids, addresses, paths, the width of columns). `make test-newcomer` runs it; PODWAY_UPDATE_GOLDEN=1 records the screens.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from tools.docs.terminal import Terminal

from tests.conftest import SLOWEST, processes_of, wait_until
from tests.manual.pages import ROOT, blocks
from tests.manual.shell import environment, working_directory

GOLDEN = ROOT / "tests" / "golden" / "newcomer"
FIRST_PAGES = {name: ROOT / name for name in ("README.md", "docs/install.md", "docs/first-slice.md", "docs/gcp.md")}
SLOW = ("tiny-train",)  # typed by make test-manual
CHANGES = (
    (r"\d+ (secs?|mins?|hours?) ago|just now|a moment ago", "AGO"),
    (r"pid=\d+", "pid=N"),
    (r"\b(127|10|198|192)\.\d+\.\d+\.\d+(:\d+)?", "IP"),
    (r"127\.0\.0\.1:\d+|localhost:\d+", "IP:PORT"),
    (r"\b\d+m \d+s\b|\b\d+h \d+m\b", "N"),
    (r"\b\d+(\.\d+)? ?(s|ms|us|KiB|MiB|B)\b", "N"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?Z?", "TIME"),
    (r"\$0\.\d+", "$N"),
    (r"\b[0-9a-f]{8,}\b", "HASH"),
)  # fmt: skip


def settled(text: str, place: Path) -> str:
    """A screen without what is different in every run."""
    text = text.replace(str(place), "~")
    if text.startswith("$ podway plan"):
        text = "\n".join(text.splitlines()[:3])  # the rest is the planner's, whose tests know its figures
    for pattern, word in CHANGES:
        text = re.sub(pattern, word, text)
    lines: list[str] = []
    for line in text.splitlines():
        # One host may be late, and its line stand apart: of a job's lines the first rank's counts.
        line = re.sub(
            r"^\((all \d+ hosts|hosts [\d,-]+|head|[\w-]+), ?(figures of rank 0|rank=0, pid=N)?\)", "(hosts)", line
        )
        line = re.sub(r"^\((all \d+ hosts|hosts [\d,-]+)\)", "(hosts)", line)
        if line.startswith("├── Waiting: "):  # how long, and for what, differs
            continue
        if not re.match(r"^\(worker\d+, rank=\d+", line) or "--rank" in text.splitlines()[0]:
            lines.append(re.sub(r" +", " ", line.rstrip()))
    return "\n".join(lines)


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.parametrize("columns", [60, 120])
def test_every_screen_is_as_recorded(tmp_path: Path, columns: int) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed (tools/system-packages installs it for root)")
    if os.geteuid() != 0:
        pytest.skip("the sandbox's hosts are machines of their own for root only")
    (tmp_path / ".ssh").mkdir()
    env = {**environment(tmp_path), "LANG": "C.UTF-8"}
    terminal = Terminal(tmp_path, working_directory(tmp_path), env, columns)
    try:
        for name, page in FIRST_PAGES.items():
            screens = []
            for block in blocks(page):
                for command in () if block.not_run or any(word in block.code for word in SLOW) else block.commands:
                    code = terminal.type(command, SLOWEST * 300)
                    assert code == 0, f"{name}: `{command}` exits with {code}:\n{terminal.screen()}"
                    assert "Traceback" not in terminal.screen()
                    no_row_wraps(command, terminal)
                    screens.append(settled(terminal.screen(joined=True), tmp_path))
            compare(GOLDEN / f"{page.stem.lower()}-{columns}.txt", "\n\n".join(screens) + "\n")
    finally:
        for command in ("podway down --all --yes", "podway server stop", "podway sandbox down || true"):
            terminal.type(command, SLOWEST * 120)
        terminal.close()
    wait_until(lambda: not processes_of(tmp_path / ".podway"), 60, "the end of all processes")


def no_row_wraps(command: str, terminal: Terminal) -> None:
    """A table fits the terminal: the rows under a heading in capitals stand on one line each."""
    wrapped = set(terminal.screen(joined=True).splitlines()) - set(terminal.screen().splitlines())
    headings = [line for line in wrapped if re.fullmatch(r"[A-Z][A-Z $/()%0-9]+", line) and "  " in line]
    assert headings == [], f"`{command}` is too wide:\n" + "\n".join(headings)


def compare(path: Path, screens: str) -> None:
    if os.environ.get("PODWAY_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(screens)
    assert screens == path.read_text(), f"{path.name} shows something else (PODWAY_UPDATE_GOLDEN=1 records it)"
