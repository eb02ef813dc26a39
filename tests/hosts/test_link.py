"""The control side's link to a real agent: pooling, reconnecting, errors, starting and killing a simulated host."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import time
import uuid
import zipfile

import pytest
from agent_host import Host, alive, until

from podway.errors import ProviderError
from podway.hosts import link
from podway.hosts.agent import processes, wire
from podway.hosts.bundle import bundle


@pytest.fixture
def host(tmp_path):
    with Host(tmp_path) as host:
        yield host


class Counted:
    """A local opener that counts the connections it makes."""

    def __init__(self, host: Host) -> None:
        self._open = link.connect_local(host.home)
        self.count = 0

    async def __call__(self):
        self.count += 1
        return await self._open()


def test_calls_in_turn_share_a_connection(host):
    async def main():
        opener = Counted(host)
        agent = link.AgentLink(opener, address="127.1.0.1")
        for _ in range(5):
            assert (await agent.call("hello")).fields["pid"] == host.pid
        assert opener.count == 1 and agent.address == "127.1.0.1"
        agent.close()

    asyncio.run(main())


def test_a_long_poll_holds_up_no_other_call(host):
    async def main():
        agent = link.AgentLink(link.connect_local(host.home))
        await agent.call("start", job="job", phase="run", script="mkfifo gate; read < gate; echo hi")
        poll = asyncio.create_task(agent.call("follow", job="job", phase="run", offset=0, wait=20))
        for _ in range(20):
            await agent.call("status", job="job", phase="run")
        assert not poll.done()
        until((host.home / "gate").is_fifo)
        (host.home / "gate").write_text("go\n")
        assert (await poll).body == b"hi\n"
        agent.close()

    asyncio.run(main())


def test_many_calls_at_once(host):
    async def main():
        agent = link.AgentLink(link.connect_local(host.home))
        bodies = [os.urandom(300_000) for _ in range(8)]
        replies = await asyncio.gather(*(agent.call("what", body=body) for body in bodies), return_exceptions=True)
        assert all(isinstance(reply, link.AgentRefused) and reply.code == "unknown-op" for reply in replies)
        assert len(agent._idle) == link.IDLE_CONNECTIONS
        agent.close()

    asyncio.run(main())


def test_a_restarted_agent_is_found_again(host):
    async def main():
        agent = link.AgentLink(link.connect_local(host.home))
        await asyncio.gather(*(agent.call("hello") for _ in range(3)))
        host.restart()
        assert (await agent.call("hello")).fields["pid"] == host.pid
        host.restart()
        with pytest.raises(ProviderError) as lost:
            await agent.call("hello", retry=False)
        assert lost.value.transient
        agent.close()

    asyncio.run(main())


def test_a_dead_agent_is_a_transient_error(host):
    async def main():
        agent = link.AgentLink(link.connect_local(host.home))
        await agent.call("hello")
        host.kill_agent()
        for _ in range(2):
            with pytest.raises(ProviderError, match="no connection") as lost:
                await agent.call("hello")
            assert lost.value.transient and not isinstance(lost.value, link.AgentRefused)
        host.start_agent()
        agent.close()

    asyncio.run(main())


def test_an_agent_that_dies_in_a_long_poll(host):
    async def main():
        agent = link.AgentLink(link.connect_local(host.home))
        await agent.call("start", job="job", phase="run", script="sleep 60")
        poll = asyncio.create_task(agent.call("follow", job="job", phase="run", offset=0, wait=30))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        host.kill_agent()
        with pytest.raises(ProviderError):
            await poll
        assert time.monotonic() - began < 25
        agent.close()

    asyncio.run(main())


def test_a_call_that_takes_too_long_or_is_cancelled_spoils_no_connection(host):
    async def main():
        agent = link.AgentLink(link.connect_local(host.home))
        await agent.call("start", job="job", phase="run", script="sleep 60")
        with pytest.raises(ProviderError, match=r"within 0\.1 s"):
            await agent.call("follow", job="job", phase="run", offset=0, wait=5, timeout=0.1)
        task = asyncio.create_task(agent.call("follow", job="job", phase="run", offset=0, wait=5))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await agent.call("hello")).fields["pid"] == host.pid
        agent.close()

    asyncio.run(main())


def test_refusals_are_not_worth_a_retry(host):
    async def main():
        agent = link.AgentLink(link.connect_local(host.home))
        with pytest.raises(link.AgentRefused, match="job must be") as refused:
            await agent.call("start", job="../x", phase="run", script="")
        assert refused.value.code == "bad-request" and not refused.value.transient
        agent.close()

    asyncio.run(main())


@pytest.mark.parametrize("answer", [b"rubbish\n", b'{"ok": true, "size": 10}\nabc', b"", b"[]\n"])
def test_a_peer_that_is_no_agent(tmp_path, answer):
    async def main():
        async def serve(reader, writer):
            await reader.readline()
            writer.write(answer)
            writer.close()

        (tmp_path / wire.STATE).mkdir()
        server = await asyncio.start_unix_server(serve, tmp_path / wire.STATE / wire.SOCKET)
        async with server:
            agent = link.AgentLink(link.connect_local(tmp_path))
            with pytest.raises(ProviderError) as lost:
                await agent.call("hello")
            assert lost.value.transient
            agent.close()

    asyncio.run(main())


def test_start_and_kill_a_simulated_host(tmp_path):
    async def main():
        host_id = uuid.uuid4().hex
        bundle().write(tmp_path / "agent.pyz")
        env = {**os.environ, processes.HOST_ID_VARIABLE: host_id}
        start = [tmp_path / "agent.pyz", tmp_path / "home", "127.1.0.2", env]
        try:
            first, second = await asyncio.gather(link.start_local_agent(*start), link.start_local_agent(*start))
            assert first == second and alive(first)
            agent = link.AgentLink(link.connect_local(tmp_path / "home"))
            hello = (await agent.call("hello")).fields
            assert (hello["pid"], hello["address"], hello["version"]) == (first, "127.1.0.2", bundle().sha256)
            await agent.call(
                "start", job="job", phase="run", script="trap '' TERM; (env -i setsid sleep 60 &); sleep 60"
            )
            agent.close()
        finally:
            assert await link.kill_local_host(host_id) == []
        assert not alive(first)
        until(lambda: not processes.with_variable(processes.snapshot(), processes.HOST_ID_VARIABLE, host_id))

    asyncio.run(main())


def test_an_agent_of_another_version_gives_way_and_its_jobs_go_on(tmp_path):
    old = tmp_path / "old.pyz"
    with zipfile.ZipFile(io.BytesIO(bundle().data)) as archive, zipfile.ZipFile(old, "w") as changed:
        for name in archive.namelist():
            changed.writestr(name, archive.read(name).replace(bundle().sha256.encode(), b"an-older-version"))

    async def main():
        host_id = uuid.uuid4().hex
        bundle().write(tmp_path / "agent.pyz")
        env = {**os.environ, processes.HOST_ID_VARIABLE: host_id}
        agent = link.AgentLink(link.connect_local(tmp_path / "home"))
        try:
            first = await link._start_daemon(old, tmp_path / "home", "", env)
            assert (await agent.call("hello")).fields["version"] == "an-older-version"
            await agent.call("start", job="job", phase="run", script="sleep 0.5; echo went on")
            second = await link.start_local_agent(tmp_path / "agent.pyz", tmp_path / "home", "", env)
            assert second != first and (await agent.call("hello")).fields["version"] == bundle().sha256
            assert (await agent.call("follow", job="job", phase="run", offset=0, wait=10)).body == b"went on\n"
        finally:
            agent.close()
            assert await link.kill_local_host(host_id, "and-another-that-is-not-there") == []

    asyncio.run(main())


def test_an_idle_agent_of_another_version_needs_a_start_and_a_busy_one_does_not(tmp_path):
    old = tmp_path / "old.pyz"
    with zipfile.ZipFile(io.BytesIO(bundle().data)) as archive, zipfile.ZipFile(old, "w") as changed:
        for name in archive.namelist():
            changed.writestr(name, archive.read(name).replace(bundle().sha256.encode(), b"an-older-version"))

    async def main():
        host_id = uuid.uuid4().hex
        bundle().write(tmp_path / "agent.pyz")
        env = {**os.environ, processes.HOST_ID_VARIABLE: host_id}
        agent = link.AgentLink(link.connect_local(tmp_path / "home"))
        try:
            assert await link.needs_start(agent)  # there is none
            await link._start_daemon(old, tmp_path / "home", "", env)
            assert await link.needs_start(agent)
            await agent.call(
                "start", job="job", phase="run", script=f"until [ -e {tmp_path}/gate ]; do sleep 0.05; done"
            )
            assert not await link.needs_start(agent)
            (tmp_path / "gate").touch()
            assert (await agent.call("status", job="job", phase="run", wait=60)).fields["state"] == "exited"
            assert await link.needs_start(agent)
            await link.start_local_agent(tmp_path / "agent.pyz", tmp_path / "home", "", env)
            assert not await link.needs_start(agent)
        finally:
            agent.close()
            assert await link.kill_local_host(host_id) == []

    asyncio.run(main())


def test_an_agent_that_cannot_start_says_why(tmp_path):
    bundle().write(tmp_path / "agent.pyz")
    (tmp_path / "home").write_text("not a directory")
    with pytest.raises(ProviderError, match="did not start"):
        asyncio.run(link.start_local_agent(tmp_path / "agent.pyz", tmp_path / "home", "", dict(os.environ)))


def test_a_home_of_another_user_is_reached_only_at_that_users_agent(host):
    """Whoever owns a home may put a link to another one's state in it."""

    async def hello(user):
        agent = link.AgentLink(link.connect_local(host.home, user))
        try:
            return str((await agent.call("hello")).fields["home"])
        finally:
            agent.close()

    assert asyncio.run(hello(os.getuid())) == str(host.home)
    with pytest.raises(ProviderError, match="is not the agent of that home"):
        asyncio.run(hello(os.getuid() + 1))


@pytest.mark.parametrize("answer", [b'{"ok":true,"size":1099511627776}\n', b"{" * (wire.MAX_LINE + 2)])
def test_a_host_cannot_fill_the_servers_memory(answer):
    """Whoever owns a host may put another program in the agent's place."""

    async def main():
        async def serve(reader, writer):
            await reader.readline()
            writer.write(answer)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        agent = link.AgentLink(lambda: asyncio.open_connection("127.0.0.1", port))
        with pytest.raises(ProviderError, match="nonsense"):
            await agent.call("hello", timeout=60)
        agent.close()
        server.close()

    asyncio.run(main())
