"""What the server keeps of the output of hosts that it does not trust."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from podway.control import archive as archives
from podway.control.archive import Archive
from podway.control.fleet import Fleet
from podway.hosts.agent import wire
from podway.hosts.link import AgentLink
from podway.providers.local.provider import LocalProvider
from tests.control.samples import cluster, hosts, job

LINE = b"more and more\n"


async def copied(place: Path, times: Any = None) -> Archive:
    """The archive after a copy from an agent that always has something more to say, with these times of it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            asked, _ = wire.decode(line)
            body = LINE * 1000
            end = asked["offset"] + len(body)
            told = [[end - 5, 7], [end, 8]] if times is None else times
            writer.write(wire.encode({"ok": True, "times": told, "next": end}, len(body)) + body)
            await writer.drain()
        writer.close()
        over.set()

    over = asyncio.Event()
    server = await asyncio.start_unix_server(serve, place / "agent.sock")
    fleet = Fleet(LocalProvider(place), cluster(hosts=hosts()[:1]))
    fleet.sessions[0].link = AgentLink(lambda: asyncio.open_unix_connection(place / "agent.sock"))
    found = Archive(place / "logs")
    async with asyncio.timeout(60):
        await found.keep(ran(), fleet)
        await found.copy(ran(), fleet)  # and again: nothing is added
        fleet.close()
        await over.wait()
    server.close()
    return found


def ran() -> Any:
    plain = job()
    return msgspec.structs.replace(plain, attempt=msgspec.structs.replace(plain.attempt, pids={"run": [1]}))


def test_output_without_end_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MOST_KEPT", 100 << 10)
    found = asyncio.run(copied(tmp_path))
    data, times = found.read(ran(), 0, "run", 101_000)
    assert data.endswith(b"podway: this output is longer than 100.0 KiB: the rest of it was not kept.\n")
    assert found.size(ran(), 0, "run") == 101_000 + len(data) == times[-1][0] < 102_600
    assert (found.place(ran()) / "0.run.times").stat().st_size < 1000
    assert "the rest of it was not kept" in found.tail(ran(), 0)


@pytest.mark.parametrize(
    "times",
    [[], 7, [["x", 1]], [[1]], [[-1, 1]], [[10**30, 1]], [[5, 1]], [[14_000, 1], [13_000, 1]], [[14_000, 1 << 70]]],
    ids=str,
)
def test_times_that_are_nonsense_are_not_kept(tmp_path: Path, times: Any) -> None:
    found = asyncio.run(copied(tmp_path, times))
    assert found.size(ran(), 0, "run") == 0 and found.complete(ran())


def test_output_that_is_appended_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Bytes whose times were not written any more come again; how many lines there are of the last second is known."""
    archive, one = Archive(tmp_path), ran()
    assert archive.latest(one, 0, "run") == (0, 0)
    assert archive.append(one, 0, "run", [(b"a\n", 5_000_000_000), (b"b\n", 6_000_000_001), (b"c\n", 6_900_000_000)])
    with (archive.place(one) / "0.run").open("ab") as file:
        file.write(b"half a li")
    with (archive.place(one) / "0.run.times").open("ab") as file:
        file.write(b"half")
    assert archive.latest(one, 0, "run") == (6, 2)
    assert archive.append(one, 0, "run", [(b"d\n", 7_000_000_000)])
    data, times = archive.read(one, 0, "run", 0)
    assert data == b"a\nb\nc\nd\n" and times[-1] == (8, 7_000_000_000) and len(times) == 4
