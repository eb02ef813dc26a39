"""The manual's commands, typed as they stand: on simulated slices, and on the sandbox where they are about Google Cloud.

`make test` types the first page that a newcomer follows; `make test-manual` all of them.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.manual.pages import ROOT, Block, blocks, missing, user_pages
from tests.manual.shell import Shell

PAGES = {page.stem: page for page in user_pages()}


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    typed = Shell(tmp_path)
    yield typed
    typed.close()


def follow(shell: Shell, page: Path, skip: tuple[str, ...] = ()) -> None:
    """Type every block of a page and compare what is printed with what the page shows."""
    for block in blocks(page):
        if not block.not_run and not any(word in block.code for word in skip):
            follow_block(shell, page, block)


def follow_block(shell: Shell, page: Path, block: Block) -> None:
    where = f"{page.name}:{block.line}"
    if block.after:
        shell.type(f"until {block.after} >/dev/null 2>&1; do sleep 0.2; done")
    printed = ""
    for command in block.commands:
        done = shell.type(command)
        printed += done.text
        assert done.code == 0, f"{where}: `{command}` exits with {done.code}:\n{done.text}"
        assert "Traceback" not in done.text, f"{where}: {done.text}"
    absent = missing(block.shown, printed)
    assert absent is None, f"{where} shows\n  {absent}\nwhich is not printed there:\n{printed}"


def test_what_is_not_typed_has_a_reason() -> None:
    for page in PAGES.values():
        for block in blocks(page):
            assert block.commands, f"{page.name}:{block.line} has no command"
            assert not block.not_run or len(block.not_run) > 12, f"{page.name}:{block.line}: say why it is not run"


@pytest.mark.parametrize(
    ("shown", "printed", "absent"),
    [
        ("a\nb", "x\na\nb\ny", None),
        ("a\nb", "a\nx\nb", "b"),
        ("a\n…\nb", "a\nx\nb", None),
        ("pid=… done", "pid=17 done", None),
        ("A  B", "A      B", None),
        ("b\n…\na", "a\nb", "a"),
        ("a", "", "a"),
        ("start\n(all 4 hosts) rank 0\nend", "start\n(hosts 0-2) rank 0\n(worker3, rank=3) rank 3\nend", None),
        ("start\n(all 4 hosts) rank 0\nend", "start\n(worker3, rank=3) rank 3\n(hosts 0-2) rank 0\nend", None),
        ("(all 4 hosts) rank 0\nend", "(all 4 hosts) rank 0\nsomething\nend", "end"),
        ("submitted\nstarted", "submitted\n├── Waiting: for its hosts\nstarted", None),
    ],
)
def test_what_a_page_shows_is_looked_for(shown: str, printed: str, absent: str | None) -> None:
    assert missing(shown, printed) == absent


def test_messages_of_the_troubleshooting_page_are_those_in_the_source() -> None:
    """The longest run of plain words of each message; names and numbers are filled in."""
    source = "".join(path.read_text() for path in (ROOT / "src" / "podway").rglob("*.py"))
    source = re.sub(r"\s+", " ", re.sub(r"[\"']\s*\n\s*f?[\"']", "", source))
    rows = [line.split("|")[1] for line in PAGES["troubleshooting"].read_text().splitlines() if line.startswith("| ")]
    for message in (message for row in rows for message in re.findall("`([^`]+)`", row)):
        runs = re.findall(r"(?:(?<=\s)|^)(?:[a-z']+,? ){2,}[a-z']+(?=\s|$)", message)
        if runs:
            assert max(runs, key=len) in source, message


@pytest.mark.e2e
def test_the_first_page_does_what_it_says(shell: Shell) -> None:
    follow(shell, PAGES["first-slice"], skip=("tiny-train", "jax-devices"))


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.parametrize("name", PAGES)
def test_every_page_does_what_it_says(shell: Shell, name: str) -> None:
    follow(shell, PAGES[name])
