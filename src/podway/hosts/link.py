"""The control side's end of a connection to a host agent.

Flow: 1. a `Connect` function opens a byte stream to the agent (a unix socket here; ssh elsewhere). 2. `AgentLink.call` sends one
request and reads its reply (the format: agent/wire.py). 3. Connections are pooled, so that a long poll blocks no other
call and a quick call costs no connect. 4. A pooled connection may have died unseen; since every operation of the agent
is idempotent, the call is then made once more on a fresh one. What still fails is a `ProviderError(transient=True)`.

Also here: how an agent is started on this machine, and how all of a simulated host is killed for sure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from podway.errors import ProviderError
from podway.hosts.agent import processes, wire
from podway.hosts.bundle import bundle

READ_SIZE = 256 << 10
MAX_REPLY = 64 << 20  # the digests of two million files; whoever owns a host may answer what they like
IDLE_CONNECTIONS = 4
START_TIMEOUT_S = 20.0


class Reader(Protocol):
    """The part of asyncio's and asyncssh's readers used here."""

    async def read(self, n: int = -1) -> bytes: ...


class Writer(Protocol):
    """The part of asyncio's and asyncssh's writers used here."""

    def write(self, data: bytes) -> None: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...


Connect = Callable[[], Awaitable[tuple[Reader, Writer]]]


def connect_tcp(addresses: Sequence[str], port: int) -> Connect:
    """Streams to a port of this machine or its network: the first address where something listens."""

    async def connect() -> tuple[Reader, Writer]:
        for address in addresses[:-1]:
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(address, port)
        return await asyncio.open_connection(addresses[-1], port)

    return connect


class AgentReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent answered: the fields of its line, and the bytes after it."""

    fields: dict[str, Any]
    body: bytes


class AgentRefused(ProviderError):
    """The agent understood and said no; `code` tells programs why. Asking again will not help."""

    def __init__(self, what: str, *, code: str) -> None:
        super().__init__(what, transient=False)
        self.code = code


class _Connection:
    """One stream, one request at a time."""

    def __init__(self, reader: Reader, writer: Writer) -> None:
        self._reader = reader
        self._writer = writer
        self._buffer = bytearray()

    async def exchange(self, line: bytes, body: bytes) -> AgentReply:
        self._writer.write(line)
        if body:
            self._writer.write(body)
        await self._writer.drain()
        fields, size = wire.decode(await self._line())
        if size > MAX_REPLY:
            raise wire.WireError(f"the reply has {size} bytes")
        return AgentReply(fields=fields, body=await self._exactly(size))

    async def _fill(self) -> None:
        data = await self._reader.read(READ_SIZE)
        if not data:
            raise ConnectionResetError("the agent closed the connection")
        self._buffer += data

    async def _line(self) -> bytes:
        seen = 0
        while (end := self._buffer.find(b"\n", seen)) < 0:
            seen = len(self._buffer)
            if seen > wire.MAX_LINE:
                raise wire.WireError("the reply's line is too long")
            await self._fill()
        line = bytes(self._buffer[: end + 1])
        del self._buffer[: end + 1]
        return line

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._fill()
        body = bytes(self._buffer[:size])
        del self._buffer[:size]
        return body

    def close(self) -> None:
        self._writer.close()


class AgentLink:
    """Calls to one host's agent, over as many connections as there are calls at once."""

    def __init__(self, connect: Connect, *, address: str = "") -> None:
        self._connect = connect
        self._idle: list[_Connection] = []
        self.address = address

    async def call(
        self, op: str, *, body: bytes = b"", timeout: float | None = None, retry: bool = True, **fields: Any
    ) -> AgentReply:
        """Ask the agent to do `op`. Without `timeout`: 30 s, plus the `wait` the request itself asks for."""
        limit = 30.0 + float(fields.get("wait") or 0) if timeout is None else timeout
        line = wire.encode({"op": op, **fields}, len(body))
        try:
            async with asyncio.timeout(limit):
                reply = await self._exchange(line, body, retry)
        except TimeoutError:
            raise ProviderError(f"{op}: the host agent did not answer within {limit:g} s") from None
        except wire.WireError as error:
            raise ProviderError(f"{op}: the host agent answered nonsense ({error})") from None
        except OSError as error:
            raise ProviderError(f"{op}: no connection to the host agent ({error})") from None
        if not reply.fields.get("ok"):
            what = str(reply.fields.get("error") or "refused")
            raise AgentRefused(f"{op}: {what}", code=str(reply.fields.get("code") or ""))
        return reply

    async def _exchange(self, line: bytes, body: bytes, retry: bool) -> AgentReply:
        if self._idle:
            try:
                return await self._on(self._idle.pop(), line, body)
            except (OSError, wire.WireError):
                self.close()  # its idle sisters are as old as it was
                if not retry:
                    raise
        return await self._on(_Connection(*await self._connect()), line, body)

    async def _on(self, connection: _Connection, line: bytes, body: bytes) -> AgentReply:
        kept = False
        try:
            reply = await connection.exchange(line, body)
            kept = len(self._idle) < IDLE_CONNECTIONS
            if kept:
                self._idle.append(connection)
            return reply
        finally:
            if not kept:  # also after a cancelled or failed exchange: what is on the wire is then unknown
                connection.close()

    def close(self) -> None:
        """Drop the pooled connections; a later call opens a new one."""
        while self._idle:
            self._idle.pop().close()


async def needs_start(link: AgentLink, *, timeout: float = 5.0) -> bool:
    """Whether an agent has to be started: none answers, or an idle one of another version does, which is replaced."""
    try:
        version = (await link.call("hello", timeout=timeout)).fields.get("version")
        if version == bundle().sha256:
            return False
        phases = (await link.call("jobs", timeout=timeout)).fields.get("jobs") or []
        return all(phase.get("state") in ("exited", "lost") for phase in phases)
    except AgentRefused:
        return False  # it is busy, or of a version that knows no such question: leave it
    except ProviderError:
        return True


def connect_local(home: Path, user: int | None = None) -> Connect:
    """How to connect to the agent whose home is the directory `home` of this machine.

    `user`: whose home it is, where that is not this process' own user. Who owns a home may put a link to another one in it: what
    listens must be a process of the same user.
    """

    async def connect() -> tuple[Reader, Writer]:
        # A socket's path may have 108 bytes at most (unix(7)); through the directory's descriptor any home will do.
        directory = os.open(home / wire.STATE, os.O_PATH | os.O_DIRECTORY)
        try:
            reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{directory}/{wire.SOCKET}")
        finally:
            os.close(directory)
        if user is not None and _listener(writer.get_extra_info("socket")) != user:
            writer.close()
            raise PermissionError(f"what listens in {home} is not the agent of that home")
        return reader, writer

    return connect


def _listener(connection: socket.socket) -> int:
    """The user who listens at the other end of a Unix socket."""
    _, user, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


async def start_local_agent(
    bundle_path: Path,
    home: Path,
    address: str,
    env: Mapping[str, str],
    *,
    user: int | None = None,
    network: str | None = None,
) -> int:
    """Start the agent of a simulated host, unless it runs already; its pid, once it answers.

    An agent of another version is replaced; its jobs go on. `env` is the whole environment of the agent and should hold
    PODWAY_HOST_ID, the mark `kill_local_host` looks for. `user`: the user id to run as, with a group of the same number; `network`:
    the file of the network namespace to run in.
    """
    link = AgentLink(connect_local(home, user))
    until = time.monotonic() + START_TIMEOUT_S
    try:
        while True:
            pid = await _start_daemon(bundle_path, home, address, env, user, network)
            if (await link.call("hello")).fields["version"] == bundle().sha256:
                return pid
            await link.call("shutdown", keep_jobs=True)
            if time.monotonic() > until:
                raise ProviderError(f"the agent of {home} is of another version and does not give way")
            await asyncio.sleep(0.02)
    finally:
        link.close()


async def _start_daemon(
    bundle_path: Path,
    home: Path,
    address: str,
    env: Mapping[str, str],
    user: int | None = None,
    network: str | None = None,
) -> int:
    """The pid of the agent that serves `home`, started now or before."""
    enter: list[str] = []
    if network is not None:  # only root enters a network, so the change of user comes after it
        become = [] if user is None else ["--setuid", str(user), "--setgid", str(user)]
        enter, user = ["nsenter", f"--net={network}", *become, "--"], None
    command = [*enter, sys.executable, "-S", "-E", str(bundle_path), "serve", "--home", str(home)]
    process = await asyncio.create_subprocess_exec(
        *[*command, "--address", address, "--daemon"],
        env=dict(env),
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        start_new_session=user is not None
        or network is not None,  # another user's process must not have this one's terminal
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise ProviderError(f"the agent of {home} did not start within {START_TIMEOUT_S:g} s") from None
    if process.returncode:
        said = err.decode(errors="replace").strip().splitlines()
        raise ProviderError(f"the agent of {home} did not start: {said[-1] if said else process.returncode}")
    return int(out)


async def kill_local_host(*host_ids: str, timeout: float = 10.0) -> list[int]:
    """SIGKILL everything of simulated hosts: agents, runners, jobs. Answers what still lives after `timeout` seconds.

    The mark is PODWAY_HOST_ID in a process' environment; descendants of the marked belong to them too.
    """
    return await asyncio.to_thread(processes.kill_hosts, host_ids, timeout)
