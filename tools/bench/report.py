"""`docs/benchmarks.md`, written by the benchmark commands and never by hand: each owns one section between its markers."""

import os
import platform
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PAGE = Path("docs/benchmarks.md")
HEAD = """# Benchmarks

Written by the `make bench…` commands; each section names the machine and the moment it was measured on.
"""


def end_cleanly() -> None:
    """A benchmark that is told to end (SIGTERM) ends as if it were interrupted: what it has started goes with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def machine() -> str:
    """The machine in words."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} x {model}, {memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, load {load:.1f}"
    )


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def write_section(name: str, text: str, page: Path = PAGE) -> None:
    """Replace this command's section, or add it at the end."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    block = f"{begin}\n{text.strip()}\n{end}"
    old = page.read_text() if page.exists() else HEAD
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.S)
    new = pattern.sub(lambda _: block, old) if pattern.search(old) else f"{old.rstrip()}\n\n{block}\n"
    page.write_text(new)
