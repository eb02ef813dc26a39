"""`make bench-page`: the web page against its budgets, in a headless Chromium. Writes docs/benchmarks.md.

A server of its own has a simulated cluster with 10,000 ended jobs, a job that prints as fast as a log is followed, and nothing else.
Bytes are those of the page's files as they travel, compressed. First paint is what the browser says (`first-contentful-paint`), with
an empty cache, of ten loads. Frames are counted by `requestAnimationFrame` in the page while it scrolls, or while a log streams in.
Memory is the JavaScript heap after a garbage collection, while lines come: an hour of 100 lines a second is 360,000 lines.
"""

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from playwright.sync_api import sync_playwright
from tests.browser.conftest import CHROMIUM
from tests.browser.screen import CHROMIUM_OPTIONS, Screen, Site
from tools.bench import report

from podway.control import tables
from podway.control.records import Job, JobAttempt, JobOutcome, JobState
from podway.control.store import Store, open_store, sqlite_url
from podway.server.page import read_files
from podway.task.task import Task

JOBS, LOADS, LINES = 10_000, 10, 360_000
LONGEST_S = 240.0  # for the log: what came by then is reported
FRAMES = """(seconds) => new Promise((done) => {
  const gaps = []; let last = performance.now(); const end = last + 1000 * seconds;
  const frame = (now) => { gaps.push(now - last); last = now; now < end ? requestAnimationFrame(frame) : done(gaps.slice(1)); };
  requestAnimationFrame(frame);
})"""
SCROLL = """(selector) => { const box = document.querySelector(selector); let at = 0;
  const step = () => { at += 400; box.scrollTop = at % (box.scrollHeight - box.clientHeight); requestAnimationFrame(step); };
  requestAnimationFrame(step); }"""
PRINT = f"""
name: printer
resources: {{accelerators: tpu-v6e-1, infra: local}}
run: |
  python3 -c '
  import sys
  for number in range({LINES}):
      print("line", number, "of a log that goes on for a while, with a loss of", 1 / (1 + number))
  '
"""


@contextlib.contextmanager
def site_in(home: Path) -> Iterator[Site]:
    """With a cluster that ran 10,000 jobs and one that prints."""
    site = Site(home)
    try:
        site.podway("launch", "-y", "-c", "many", "--infra", "local", "--tpus", "v6e-4", "true")
        store = open_store(sqlite_url(home / "podway.db"))
        cluster = store.find("many")
        assert cluster is not None
        now = time.time()
        jobs = [
            Job(
                cluster_id=cluster.id,
                number=number,
                name=f"job-{number}",
                user="tester",
                submitted=now,
                task=Task(run="true"),
                state=JobState.SUCCEEDED,
                attempt=JobAttempt(started=now),
                outcome=JobOutcome(ended=now),
            )
            for number in range(2, JOBS + 1)
        ]
        add_all(store, jobs)
        store.engine.dispose()
        site.launch("printer", PRINT, detach=True)
        yield site
    finally:
        site.podway("down", "-y", "--all", check=False)
        site.podway("server", "stop", check=False)


def add_all(store: Store, jobs: list[Job]) -> None:
    """Ended jobs, in one transaction: a person's history, which nobody looks after any more."""
    rows = [
        {
            "cluster_id": job.cluster_id,
            "number": job.number,
            "state": job.state,
            "open": False,
            "version": 0,
            "body": msgspec.json.encode(job),
        }
        for job in jobs
    ]
    with store.engine.begin() as db:
        db.execute(sa.insert(tables.jobs), rows)


def first_paints(site: Site, browser: Any) -> list[float]:
    """Milliseconds until something is on the screen, each time with an empty cache."""
    found = []
    for _ in range(LOADS):
        screen = Screen(site, browser)
        screen.page.reload()
        screen.page.wait_for_selector(".figures")
        entries = screen.page.evaluate(
            "performance.getEntriesByName('first-contentful-paint').map((one) => one.startTime)"
        )
        found += entries
        screen.context.close()
    return found


def frames_of(page: Any, seconds: float = 5.0) -> list[float]:
    return [float(gap) for gap in page.evaluate(FRAMES, seconds)]


def heap(page: Any) -> float:
    """MiB of JavaScript that is in use."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.enable")
    session.send("HeapProfiler.collectGarbage")
    used = session.send("Runtime.getHeapUsage")["usedSize"]
    session.detach()
    return float(used) / 2**20


def stream(site: Site, browser: Any) -> tuple[list[float], list[tuple[int, float]]]:
    """Frames while a log streams in, and the heap by the number of lines."""
    screen = Screen(site, browser)
    page = screen.page
    page.wait_for_selector(".figures")
    sizes = [(0, heap(page))]
    screen.go("/clusters/printer/jobs/1")
    page.wait_for_selector(".line")
    gaps = frames_of(page, 8.0)
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        lines = int(page.inner_text(".logs .tabular").split()[0].replace(",", ""))
        sizes.append((lines, heap(page)))
        if lines >= LINES:
            break
        page.wait_for_timeout(1000)
    screen.context.close()
    return gaps, sizes


def smooth(gaps: list[float]) -> str:
    ordered = sorted(gaps)
    return f"{1000 / statistics.median(ordered):.0f} a second, 99 % within {ordered[int(0.99 * (len(ordered) - 1))]:.0f} ms"


def main() -> int:
    """Measure, print and write."""
    sent = sum(len(one.compressed) for one in read_files().values()) / 1000
    with tempfile.TemporaryDirectory() as folder, site_in(Path(folder)) as site, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS)
        gaps, sizes = stream(site, browser)
        paints = first_paints(site, browser)
        screen = Screen(site, browser)
        screen.go("/clusters/many")
        screen.page.click("text=Show older ones too")
        screen.page.wait_for_selector(f"table[aria-rowcount='{JOBS}']")
        screen.page.evaluate(SCROLL, ".table.long")
        scrolled = frames_of(screen.page)
        elements = screen.page.evaluate("document.querySelectorAll('.table.long tr').length")
        browser.close()
    lines, used = sizes[-1]
    each = (used - sizes[0][1]) * 2**20 / max(1, lines - sizes[0][0])
    paint = f"{statistics.median(paints) / 1000:.2f} s (most {max(paints) / 1000:.2f} s)"
    rows = [
        ("all files of the page, compressed", f"{sent:.0f} kB", "less than 300 kB"),
        (f"first paint on loopback, median of {LOADS}", paint, "less than 0.5 s"),
        (f"scrolling {JOBS:,} jobs ({elements} rows are elements)", smooth(scrolled), "60 a second"),
        ("frames while a log streams in", smooth(gaps), "60 a second"),
        (f"memory of the page with {lines:,} lines", f"{used:.0f} MiB: {each:.0f} bytes a line", "the text itself"),
    ]
    text = report.table(["what", "measured", "budget"], rows)
    head = f"## The page (`make bench-page`)\n\nMachine: {report.machine()}. Headless Chromium without a GPU, beside the server."
    tail = "The log keeps its latest 1,000,000 lines: beyond them memory stays as it is."
    report.write_section("page", f"{head}\n\n{text}\n\n{tail}")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
