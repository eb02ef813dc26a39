"""The last lines of a log are found without reading what is before them, over phases and attempts."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.control.archive import Archive
from podway.control.records import Job, JobState, phase_label
from podway.server import feeds
from podway.server.feeds import JobRankFeed, width
from podway.task.task import Recovery, Task
from tests.control.samples import ORDER, cluster, job


class Followed:
    """A job that has ended, with its output in a real archive that counts what is read of it."""

    def __init__(self, place: Path, outputs: dict[str, bytes], attempt: int = 1) -> None:
        self.archive = Counting(place)
        self.services: Any = self
        self.cluster = cluster()
        self.job: Job = job(state=JobState.SUCCEEDED, pids={label: [1] for label in outputs}, attempt=attempt)
        self.keep = True
        folder = self.archive.place(self.job)
        folder.mkdir(parents=True)
        for label, data in outputs.items():
            (folder / f"0.{label}").write_bytes(data)
        self.archive.close(self.job)

    async def changed(self, timeout: float) -> None:
        await asyncio.sleep(timeout)


class Counting(Archive):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.bytes = 0

    def read(self, *args: Any) -> Any:
        data, times = super().read(*args)
        self.bytes += len(data)
        return data, times


def tail(followed: Followed, lines: int) -> bytes:
    """What a reader that begins at the offsets found would read."""
    feed = JobRankFeed(followed, 0)
    offsets = dict(asyncio.run(feed.tail_offsets(lines)))
    place = followed.archive.place(followed.job)
    return b"".join((place / f"0.{label}").read_bytes()[offsets.get(label, 0) :] for label in followed.job.attempt.pids)


def test_little_of_a_long_log_is_read(tmp_path: Path) -> None:
    text = b"".join(b"line %d\n" % n for n in range(500_000))
    followed = Followed(tmp_path, {"setup": b"x\n" * 100_000, "run": text})
    assert tail(followed, 10).splitlines() == [b"line %d" % n for n in range(499_990, 500_000)]
    assert followed.archive.bytes <= feeds.TAIL_WINDOW


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 40), max_size=30), min_size=1, max_size=4),
    st.integers(1, 40),
    st.booleans(),
)
def test_the_last_lines_are_all_there(tmp_path_factory: Any, phases: list[list[int]], lines: int, whole: bool) -> None:
    labels = [phase_label(name, attempt) for attempt in (1, 2) for name in ("setup", "run")][: len(phases)]
    outputs = {
        label: b"".join(b"%s %d %s\n" % (label.encode(), n, b"y" * size) for n, size in enumerate(sizes))
        for label, sizes in zip(labels, phases, strict=True)
    }
    if not whole:  # a last line without its newline
        outputs[labels[-1]] += b"and so on"
    followed = Followed(tmp_path_factory.mktemp("log"), outputs, attempt=2 if len(phases) > 2 else 1)
    before, feeds.TAIL_WINDOW = feeds.TAIL_WINDOW, 16
    try:
        found = tail(followed, lines).splitlines()
    finally:
        feeds.TAIL_WINDOW = before
    every = b"".join(outputs.values()).splitlines()
    assert found[-lines:] == every[-lines:]
    assert len(found) <= lines + 1


def test_a_log_position_counts_the_most_hosts_a_job_may_get() -> None:
    wide = cluster(candidates=((ORDER, msgspec.structs.replace(ORDER, hosts_per_slice=16)),))
    begun = job(pids={"run": [7]})
    assert width(cluster(), job()) == 4
    assert width(wide, job()) == 16
    assert width(wide, begun) == 1
    assert width(wide, msgspec.structs.replace(begun, task=Task(recovery=Recovery()))) == 16
