"""Connections to machines over ssh: one for each machine, with as many streams on it as are wanted.

1. `SshConnections.connection` answers the open connection to an `Endpoint`, or makes it; a machine behind a jump host is
   reached through the jump host's own one. Keep-alives notice a dead connection within about 15 s; the next call makes a
   new one.
2. The host key is pinned when a machine is first seen, in a known_hosts file that `ssh` itself can read. A key that is not
   the pinned one is refused.
3. `connect` gives `AgentLink` its streams: to the agent's socket on the machine, or, where sshd forwards no sockets, through
   the agent's own relay. `run` is one command with input and output.

What a person has to put right (key, name, pinned host key) is a `UserError`; what may pass is a transient `ProviderError`.
"""

import asyncio
import base64
import contextlib
import fcntl
import logging
import os
import shlex
import socket
import weakref
from pathlib import Path
from typing import Any

import asyncssh
import msgspec
from asyncssh.public_key import get_default_public_key_algs

from podway.errors import ProviderError, UserError
from podway.hosts.agent import wire
from podway.hosts.agent.connections import CONTROL_VARIABLE
from podway.hosts.link import READ_SIZE, Connect, Reader, Writer
from podway.hosts.ssh.endpoint import Endpoint

CONNECT_S = 10.0
LOGIN_S = 20.0
KEEPALIVE_S = 5.0
KEEPALIVES = 3
HANDSHAKES = 64  # at once: one process logs in to hundreds of machines, and each handshake is a few ms of its CPU
LONGEST_SOCKET_PATH = 107  # unix(7): 108 bytes with the final NUL
MOST_NOISE = 64 << 10

# Else every channel of every connection is a line of the server's log.
logging.getLogger("asyncssh").setLevel(logging.WARNING)


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """How a command on a machine ended."""

    code: int
    out: bytes
    err: str


class Pins:
    """The host keys seen first, in a file of OpenSSH's format."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines_of(self, endpoint: Endpoint) -> list[str]:
        """The lines that hold the keys of a machine, and of those on the way to it."""
        names = {one.known_as for one in endpoint.way()}
        try:
            lines = self.path.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line for line in lines if names & set(line.partition(" ")[0].split(","))]

    def of(self, endpoint: Endpoint) -> tuple[asyncssh.SSHKey, int] | None:
        """The pinned key and its line, if there is one."""
        try:
            lines = self.path.read_text().splitlines()
        except FileNotFoundError:
            return None
        for number, line in enumerate(lines, 1):
            name, _, key = line.strip().partition(" ")
            if name == endpoint.known_as:
                with contextlib.suppress(asyncssh.KeyImportError):
                    return asyncssh.import_public_key(key), number
        return None

    def pin(self, endpoint: Endpoint, key: asyncssh.SSHKey) -> asyncssh.SSHKey:
        """Pin the key unless another one was pinned a moment before; the one that is pinned now."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.path, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            known = self.of(endpoint)
            if known is None:
                file.write(f"{endpoint.known_as} {key.export_public_key('openssh').decode().strip()}\n")
                return key
        return known[0]

    def forget(self, prefixes: tuple[str, ...]) -> None:
        """Remove the pins of machines that are no more: those whose names begin so."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            kept = [line for line in file if not line.startswith(prefixes)]
            file.seek(0)
            file.writelines(kept)
            file.truncate()


class _Gatekeeper(asyncssh.SSHClient):
    """Decides about a host key that is not the pinned one: the first is pinned, any other refused."""

    def __init__(self, endpoint: Endpoint, pins: Pins) -> None:
        self._endpoint = endpoint
        self._pins = pins
        self.refused: asyncssh.SSHKey | None = None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        if self._pins.of(self._endpoint) is None and self._pins.pin(self._endpoint, key) == key:
            return True
        self.refused = key
        return False


class _Slot:
    """One machine's connection, and the lock of who makes it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.connection: asyncssh.SSHClientConnection | None = None
        self.relayed = False  # this sshd forwards no sockets


class SshConnections:
    """The connections of one process. Each event loop has its own, since none can be used from another."""

    def __init__(self, known_hosts: Path) -> None:
        self.pins = Pins(known_hosts)
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Endpoint, _Slot]] = (
            weakref.WeakKeyDictionary()
        )
        self._gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def _slot(self, endpoint: Endpoint) -> _Slot:
        slots = self._loops.setdefault(asyncio.get_running_loop(), {})
        return slots.setdefault(endpoint, _Slot())

    async def connection(self, endpoint: Endpoint) -> asyncssh.SSHClientConnection:
        """The open connection to a machine, made now if there is none."""
        slot = self._slot(endpoint)
        if slot.connection is not None and not slot.connection.is_closed():
            return slot.connection
        jump = await self.connection(endpoint.jump) if endpoint.jump is not None else None
        async with slot.lock:
            if slot.connection is None or slot.connection.is_closed():
                gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(HANDSHAKES))
                async with gate:
                    slot.connection = await self._connect(endpoint, jump)
            return slot.connection

    def drop(self, endpoint: Endpoint) -> None:
        """Close the connection; a later call makes a new one."""
        slot = self._slot(endpoint)
        if slot.connection is not None:
            slot.connection.abort()
            slot.connection = None

    async def _connect(
        self, endpoint: Endpoint, jump: asyncssh.SSHClientConnection | None
    ) -> asyncssh.SSHClientConnection:
        gatekeeper = _Gatekeeper(endpoint, self.pins)
        pinned = self.pins.of(endpoint)
        options: dict[str, Any] = {"username": endpoint.user} if endpoint.user else {}
        keys = _identity(endpoint)
        if keys is not None:
            options["client_keys"] = keys
        try:
            async with asyncio.timeout(CONNECT_S + LOGIN_S):
                return await asyncssh.connect(
                    endpoint.address,
                    endpoint.port,
                    tunnel=jump,
                    client_factory=lambda: gatekeeper,
                    known_hosts=lambda host, addr, port: ([pinned[0]] if pinned else [], [], []),
                    server_host_key_algs=_host_key_kinds(pinned[0] if pinned else None),
                    preferred_auth="publickey",
                    compression_algs=["none"],  # files are sent once, and CPU is what one process for hundreds lacks
                    connect_timeout=CONNECT_S,
                    login_timeout=LOGIN_S,
                    keepalive_interval=KEEPALIVE_S,
                    keepalive_count_max=KEEPALIVES,
                    **options,
                )
        except (asyncssh.Error, OSError, ValueError) as error:
            raise self._explain(endpoint, error, gatekeeper) from None

    def _explain(self, endpoint: Endpoint, error: Exception, gatekeeper: _Gatekeeper) -> Exception:
        """The same, as a person can act on it."""
        pinned = self.pins.of(endpoint)
        refused = gatekeeper.refused
        if pinned is not None and refused is not None:
            was, now = pinned[0].get_fingerprint(), refused.get_fingerprint()
            return UserError(
                f"the host key of {endpoint} has changed: {was} was pinned, and now it shows {now}",
                f"if the machine was reinstalled, remove line {pinned[1]} of {self.pins.path}; if not, do not trust it",
            )
        if isinstance(error, asyncssh.PermissionDenied):
            who = f"{endpoint.user}@{endpoint}" if endpoint.user else str(endpoint)
            key = endpoint.identity_file or "your default keys or ssh agent"
            return UserError(
                f"{who} refused the login with {key}",
                "check `user` and `identity_file` in the pool's file, and authorized_keys on the machine",
            )
        if isinstance(error, socket.gaierror):
            return UserError(
                f"no machine is called {endpoint.address} ({error.strerror})", "correct its address in the pool's file"
            )
        if isinstance(error, ValueError):  # what asyncssh raises for a key or an option it cannot use
            return UserError(f"cannot log in to {endpoint}: {error}", "check your key and your ~/.ssh/config")
        return ProviderError(f"{endpoint} cannot be reached: {_said(error)}")

    async def run(self, endpoint: Endpoint, command: str, *, data: bytes = b"", timeout: float = 60.0) -> Finished:
        """Run one command there, with `data` as its input."""
        connection = await self.connection(endpoint)
        try:
            async with asyncio.timeout(timeout):
                process = await connection.create_process(_marked(command), encoding=None)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may end without reading: exit 127
                    process.stdin.write(data)
                    process.stdin.write_eof()
                done = await process.wait()
        except TimeoutError:
            raise ProviderError(f"{endpoint} did not answer within {timeout:g} s") from None
        except (asyncssh.Error, OSError) as error:
            raise ProviderError(f"the connection to {endpoint} broke: {_said(error)}") from None
        out, err = (piece if isinstance(piece, bytes) else b"" for piece in (done.stdout, done.stderr))
        code = done.returncode if done.returncode is not None else -1
        return Finished(code=code, out=out, err=err.decode(errors="replace").strip())

    def host_key(self, connection: asyncssh.SSHClientConnection) -> str:
        """The machine's name for itself: hex of its host key."""
        key = connection.get_server_host_key()
        assert key is not None  # a connection that is open has shown one
        return base64.b64decode(key.get_fingerprint().removeprefix("SHA256:") + "=").hex()

    def connect(self, endpoint: Endpoint, socket_path: str, relay: str) -> Connect:
        """Streams to the agent whose socket is at `socket_path` there; `relay` is the command that leads to it too."""

        async def connect() -> tuple[Reader, Writer]:
            slot = self._slot(endpoint)
            try:
                connection = await self.connection(endpoint)
                if not slot.relayed and len(os.fsencode(socket_path)) <= LONGEST_SOCKET_PATH:
                    # A refusal means no agent or no forwarding: sshd does not say which. The relay will.
                    with contextlib.suppress(asyncssh.ChannelOpenError):
                        reader, writer = await connection.open_unix_connection(socket_path)
                        return _SshReader(reader), _SshWriter(writer)
                process = await connection.create_process(_marked(relay), encoding=None)
                streams = _SshReader(process.stdout), _SshWriter(process.stdin)
                await _greet(*streams)
                slot.relayed = True
                return streams
            except asyncssh.Error as error:
                raise ConnectionError(_said(error)) from None
            except UserError as error:
                # In the middle of a job it may pass (a home being mounted, a key being rolled over); the job lives on.
                raise ProviderError(error.what) from None

        return connect

    def connect_port(self, endpoint: Endpoint, port: int) -> Connect:
        """Streams to a port of the machine's own loopback, through its sshd."""

        async def connect() -> tuple[Reader, Writer]:
            try:
                connection = await self.connection(endpoint)
                reader, writer = await connection.open_connection("127.0.0.1", port)
            except asyncssh.Error as error:
                raise ConnectionError(_said(error)) from None
            except UserError as error:
                raise ProviderError(error.what) from None
            return _SshReader(reader), _SshWriter(writer)

        return connect


def _marked(command: str) -> str:
    """The command with a mark by which the agent tells Podway's own sessions from a person's; any login shell takes it."""
    return f"env {CONTROL_VARIABLE}=1 sh -c {shlex.quote(command)}"


async def _greet(reader: "_SshReader", writer: "_SshWriter") -> None:
    """Make sure that an agent is at the other end of a relay, which answers for a missing one by itself.

    What a login prints before is passed over.
    """
    writer.write(wire.encode({"op": "hello"}))
    await writer.drain()
    text, answer = b"", None
    while answer is None and len(text) < MOST_NOISE and (data := await reader.read(READ_SIZE)):
        text += data
        answer = next((line for line in text.splitlines(keepends=True) if line.startswith(b"{")), None)
        if answer is not None and not answer.endswith(b"\n"):
            answer = None
    with contextlib.suppress(wire.WireError):
        if answer is not None and wire.decode(answer)[0].get("ok"):
            return
    writer.close()
    raise ConnectionRefusedError("no agent answers there")


class _SshReader:
    """asyncssh's reader, failing as asyncio's does."""

    def __init__(self, reader: asyncssh.SSHReader[bytes]) -> None:
        self._reader = reader

    async def read(self, n: int = -1) -> bytes:
        try:
            return await self._reader.read(n)
        except asyncssh.Error as error:
            raise ConnectionResetError(_said(error)) from None


class _SshWriter:
    """asyncssh's writer, failing as asyncio's does."""

    def __init__(self, writer: asyncssh.SSHWriter[bytes]) -> None:
        self._writer = writer

    def write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
        except asyncssh.Error as error:
            raise ConnectionResetError(_said(error)) from None

    async def drain(self) -> None:
        try:
            await self._writer.drain()
        except asyncssh.Error as error:
            raise ConnectionResetError(_said(error)) from None

    def close(self) -> None:
        with contextlib.suppress(asyncssh.Error, OSError):
            self._writer.close()


def _identity(endpoint: Endpoint) -> list[asyncssh.SSHKey] | None:
    """The key to log in with; None: those that ssh would try by itself, an agent's among them."""
    if endpoint.identity_file is None:
        return None
    path = Path(endpoint.identity_file).expanduser()
    try:
        return [asyncssh.read_private_key(path)]
    except OSError as error:
        raise UserError(
            f"the key {path} for {endpoint} cannot be read: {error.strerror}",
            "correct `identity_file` in the pool's file",
        ) from None
    except asyncssh.KeyEncryptionError:
        if os.environ.get("SSH_AUTH_SOCK"):
            return None  # the agent has it, or the login is refused with a line that says so
        raise UserError(
            f"the key {path} for {endpoint} has a passphrase, and no ssh agent runs",
            "start ssh-agent, run ssh-add, and restart the server: podway server stop",
        ) from None
    except asyncssh.KeyImportError as error:
        raise UserError(f"{path} is not a private key: {error}", "give the private key, not its .pub") from None


def _host_key_kinds(pinned: asyncssh.SSHKey | None) -> list[str]:
    """The pinned kind first, or a machine with keys of several kinds might show another; then all others, so that a machine that
    has lost the pinned one is told from one that cannot be reached. Before there is a pin, the kind OpenSSH likes best."""
    first = [kind.decode() for kind in pinned.sig_algorithms] if pinned is not None else ["ssh-ed25519"]
    usual = [kind.decode() for kind in get_default_public_key_algs()]
    return first + [kind for kind in usual if kind not in first]


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)  # asyncio puts the address in its own words here
    return (str(error) or type(error).__name__).splitlines()[0]
