"""The commands of the manual, as tests run them.

A ```bash block of a page is typed as it stands, in the order of the page, in one shell. A comment before it may say otherwise:

    <!-- not run: it needs a Google Cloud project -->     not typed, for the reason given
    <!-- after: the service is ready: podway services | grep READY -->   typed once the command after the last colon succeeds

A ```text block right behind it is what it prints. Each of its lines must appear, in this order, with nothing between them unless
a line `…` stands there; `…` inside a line stands for anything. How a job's line is prefixed is not compared.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?:<!-- (?P<word>not run|after): (?P<note>.*?) -->\n)?^```bash\n(?P<code>.*?)^```\n(?:\n?^```text\n(?P<shown>.*?)^```$)?",
    re.M | re.S,
)


class Block(NamedTuple):
    """One ```bash block, with the line of the page it begins on."""

    line: int
    code: str
    shown: str  # what the page says it prints; empty: nothing is said
    not_run: str  # why it is not typed; empty: it is
    after: str  # a command that succeeds when it may be typed

    @property
    def commands(self) -> list[str]:
        """One command each, continued lines and here-documents together."""
        found: list[str] = []
        ends = ""
        for line in self.code.splitlines():
            if found and (ends or found[-1].endswith("\\")):
                found[-1] += "\n" + line
                ends = "" if ends and line.strip() == ends else ends
            elif line.strip() and not line.lstrip().startswith("#"):
                found.append(line)
            here = re.search(r"<<-?'?(\w+)'?", line)
            ends = here[1] if here else ends
        return found


def blocks(page: Path) -> list[Block]:
    """Every ```bash block of a page, in order."""
    text = page.read_text()
    assert text.count("```bash\n") == len(BLOCK.findall(text)), f"{page.name}: a block does not end as it should"
    return [_block(text, match) for match in BLOCK.finditer(text)]


def _block(text: str, match: "re.Match[str]") -> Block:
    note = (match["note"] or "").strip()
    return Block(
        line=text.count("\n", 0, match.start("code")),
        code=match["code"],
        shown=match["shown"] or "",
        not_run=note if match["word"] == "not run" else "",
        after=note.rpartition(": ")[2] if match["word"] == "after" else "",
    )


def missing(shown: str, printed: str) -> str | None:
    """The first line that a page shows and a command did not print where it should; None: all are there."""
    lines = [line for line in map(_loose, printed.splitlines()) if line]
    at, gap = 0, True
    for expected in filter(None, map(_loose, shown.splitlines())):
        if expected == "…":
            gap = True
            continue
        pattern = re.compile(".*".join(map(re.escape, _message(expected).split("…"))))
        places = range(at, len(lines) if gap else min(_next(lines, at, expected) + 1, len(lines)))
        found = next((place for place in places if pattern.fullmatch(_message(lines[place]))), None)
        if found is None:
            return expected
        at, gap = found + 1, False
    return None


def _loose(line: str) -> str:
    """A line without how wide its columns are: other rows of a table, and the time of day, change that."""
    return re.sub(r"\s+", " ", line.strip())


LOG_LINE = re.compile(r"\(.*?\) ")


def _message(line: str) -> str:
    """A job's line without the hosts it came from: on a busy machine one of them is late, and its line stands apart."""
    return LOG_LINE.sub("", line, count=1) if LOG_LINE.match(line) else line


def _next(lines: list[str], at: int, expected: str) -> int:
    """Where the line behind must be: here, or behind log lines of hosts that were late and what is told while one waits."""
    while (
        at < len(lines) and not LOG_LINE.match(expected) and (LOG_LINE.match(lines[at]) or lines[at].startswith("├── "))
    ):
        at += 1
    return len(lines) if LOG_LINE.match(expected) else at


def user_pages() -> Iterator[Path]:
    """Where a person is told what to type."""
    yield ROOT / "README.md"
    for name in NAMES:
        yield ROOT / "docs" / f"{name}.md"


# In the order of the manual.
NAMES = (
    *("install", "first-slice", "gcp", "kubernetes", "ssh", "training", "finetune-llama", "serving", "services", "gateway"),
    *("plan", "page", "dev-environments", "pools", "recovery", "volumes", "team-server", "for-skypilot-users", "for-dstack-users"),
    *("for-xpk-users", "troubleshooting", "faq", "task-files", "sandbox", "simulated-slices"),
)  # fmt: skip
