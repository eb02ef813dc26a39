"""The log of real jobs on real agents, one of which is killed and comes back while it is followed."""

import asyncio
from pathlib import Path

from agent_host import Host

from podway.hosts.link import AgentLink, connect_local
from podway.hosts.logs.follow import Chunk, Cursor, Options, Renderer, follow

SCRIPT = r"""
echo starting
printf 'load 10%%\rload 50%%\rload 100%%\n'
printf 'raw \xff\x00 \033[31mred\033[0m \033[2J\n'
for step in 1 2 3 4 5 6; do echo "step $step"; echo "item RANK at $step"; sleep 0.2; done
printf 'no newline'
"""


class AgentFeed:
    """One rank's output from its agent."""

    def __init__(self, rank: int, host: Host) -> None:
        self.rank = rank
        self.phases = ("setup", "run")
        self.link = AgentLink(connect_local(host.home))

    async def read(self, phase: str, offset: int, wait: float, limit: int) -> Chunk:
        reply = await self.link.call("follow", job="job", phase=phase, offset=offset, wait=wait, limit=limit)
        found = reply.fields
        return Chunk(data=reply.body, times=found["times"], next=found["next"], ended=found["end"], pid=found["pid"])


def printed(rank: int, lines: list[str]) -> list[str]:
    """What a rank printed, by what was shown."""
    mine = (f"rank={rank},", "(all 2 hosts)")
    return [line.split(") ", 1)[1] for line in lines if any(mark in line for mark in mine) and "setup" not in line]


EXPECTED = ["starting", "load 100%", "raw \ufffd\ufffd red "]


def expected(rank: int) -> list[str]:
    steps = [text for step in range(1, 7) for text in (f"step {step}", f"item {rank} at {step}")]
    return [*EXPECTED, *steps, "no newline"]


def test_a_killed_agent_and_a_killed_reader_lose_and_repeat_nothing(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    with Host(tmp_path / "0") as first, Host(tmp_path / "1") as second:
        hosts = [first, second]
        for host in hosts:
            host.start("echo setting up", phase="setup")
        for rank, host in enumerate(hosts):
            host.start(SCRIPT.replace("RANK", str(rank)))
        lines: list[str] = []
        cursors: list[str] = []

        async def watch(cursor: Cursor | None, stop: bool) -> None:
            renderer = Renderer(Options(), ["127.0.0.1", "127.0.0.2"], cursor=cursor)
            feeds = [AgentFeed(rank, host) for rank, host in enumerate(hosts)]

            async def emit(some: list[str]) -> None:
                lines.extend(some)
                cursors.append(renderer.cursor.encode())

            task = asyncio.create_task(follow(feeds, renderer, emit))
            try:
                if stop:
                    while not any("step 2" in line for line in lines):
                        await asyncio.sleep(0.01)
                    task.cancel()
                else:
                    await asyncio.to_thread(second.restart)
                    assert await asyncio.wait_for(task, 30) == {}
                await asyncio.gather(task, return_exceptions=True)
            finally:
                for feed in feeds:
                    feed.link.close()

        asyncio.run(watch(None, stop=True))
        asyncio.run(watch(Cursor.decode(cursors[-1], 2), stop=False))
        for rank in (0, 1):
            assert printed(rank, lines) == expected(rank)
        # Alike or not is a matter of timing here; that it is shown once for each host is not.
        setup = [line for line in lines if "(setup" in line]
        assert all(line.endswith(") setting up") for line in setup)
        assert len(setup) == 2 or setup == ["(setup, all 2 hosts) setting up"]
        pid = hosts[1].call("status", job="job", phase="run")["pid"]
        assert f"(worker1, rank=1, pid={pid}, ip=127.0.0.2) item 1 at 1" in lines
