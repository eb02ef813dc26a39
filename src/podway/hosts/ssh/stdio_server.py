"""An ssh server for one simulated host, on the standard input and output of the command that a person's ssh started.

1. `ssh NAME` runs `podway ssh-proxy NAME RANK` (its ProxyCommand) and speaks ssh with it. No port and no socket is open to anybody:
   whoever can start the command is the user whose host it is, so it asks for no key.
2. A shell or a command has the home and the environment that a job on that host has, in a session of its own. With a terminal it gets
   SIGHUP when the connection ends; without one it goes on, as under sshd, so that an editor's server can be left running.
3. scp and sftp are served here; rsync and an older scp are commands.
4. A forwarded port leads to the host's own address first, and then to what the client named: hosts share this machine's loopback.
"""

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import socket
import struct
import termios
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import asyncssh
import msgspec

from podway.hosts.ssh.keys import KeyPair, proxied_host_key

READ_SIZE = 256 << 10
HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "")
KEPT = ("LANG", "TERM", "COLORTERM")  # of what a client sends, and LC_*
LAST_OUTPUT_S = 1.0


class SimulatedHost(msgspec.Struct, frozen=True, kw_only=True):
    """What a session on it needs."""

    home: str
    env: Mapping[str, str]
    address: str  # its own loopback address


def run(home: str, env: Mapping[str, str], folder: Path) -> None:
    """Serve the host with this home and environment; the key that it shows is in `folder`."""
    host = SimulatedHost(home=home, env=env, address=env["PODWAY_HOST_IP"])
    asyncio.run(serve(host, proxied_host_key(folder)))


async def serve(host: SimulatedHost, key: KeyPair) -> None:
    """Serve one client on stdin and stdout, until either end closes."""
    os.chdir(host.home)  # relative paths of sftp begin here
    run = {"process_factory": lambda process: _run(process, host), "sftp_factory": _Sftp}
    await serve_stdio(lambda: _Server(host), key, **run)


async def serve_stdio(server: Callable[[], asyncssh.SSHServer], key: KeyPair, **options: Any) -> None:
    """Speak ssh with one client on stdin and stdout; `options` are asyncssh's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    serving = _serve(theirs, server, key, options)
    work = [asyncio.create_task(one) for one in (_from_stdin(ours), _to_stdout(ours), serving)]
    with contextlib.suppress(asyncssh.Error, OSError):
        done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*done)


async def _serve(
    client: socket.socket, server: Callable[[], asyncssh.SSHServer], key: KeyPair, options: Mapping[str, Any]
) -> None:
    connection = await asyncssh.run_server(  # returns when the client has logged in
        client,
        server_factory=server,
        server_host_keys=[str(key.path)],
        **options,
        encoding=None,
        line_editor=False,
        agent_forwarding=False,
        x11_forwarding=False,
        compression_algs=["none"],  # both ends are on this machine
        gss_host=None,
        login_timeout=60,
    )
    await connection.wait_closed()


async def _from_stdin(there: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ_SIZE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb", 0))
    with contextlib.suppress(OSError):
        while data := await reader.read(READ_SIZE):
            await loop.sock_sendall(there, data)
        there.shutdown(socket.SHUT_WR)


async def _to_stdout(there: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(os.dup(1), "wb", 0))
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(there, READ_SIZE):
            writer.write(data)
            await writer.drain()


class _Sftp(asyncssh.SFTPServer):
    """Ends with an exit status, without which scp counts as failed."""

    def exit(self) -> None:
        self.channel.exit(0)


class _Server(asyncssh.SSHServer):
    """Lets in the user who started the command, and forwards ports."""

    def __init__(self, host: SimulatedHost) -> None:
        self._host = host
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn

    def begin_auth(self, username: str) -> bool:
        return False

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> Any:
        return self._forward(dest_host, dest_port)

    async def _forward(self, host: str, port: int) -> Any:
        assert self._connection is not None  # made before anything is requested on it
        if host in HERE:
            with contextlib.suppress(asyncssh.ChannelOpenError):
                return await self._connection.forward_connection(self._host.address, port)
        return await self._connection.forward_connection(host or "127.0.0.1", port)

    def server_requested(self, listen_host: str, listen_port: int) -> bool:
        return listen_host in HERE

    def unix_connection_requested(self, dest_path: str) -> bool:
        return True

    def unix_server_requested(self, listen_path: str) -> bool:
        return True


async def _run(process: "asyncssh.SSHServerProcess[bytes]", host: SimulatedHost) -> None:
    """A shell, or the command that was sent, to its end; its exit code is the client's."""
    command = process.command
    asked = {plain_text(name): plain_text(value) for name, value in process.env.items()}
    env = {name: value for name, value in asked.items() if name in KEPT or name.startswith("LC_")}
    env |= {**host.env, "HOME": host.home, "SHELL": "/bin/bash"}
    if process.term_type:
        env["TERM"] = plain_text(process.term_type)
    words = ["bash", *_start_up(host), "-i"] if command is None else ["bash", "-c", plain_text(command)]
    run = _with_terminal if process.term_type else _with_pipes
    code = await run(process, words, env)
    if code < 0:
        process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
    else:
        process.exit(code)


def _start_up(host: SimulatedHost) -> list[str]:
    """Of the start-up files only the host's own: those of this machine would set another PATH and prompt."""
    own = Path(host.home) / ".bashrc"
    return ["--rcfile", str(own)] if own.exists() else ["--norc"]


async def _with_pipes(process: "asyncssh.SSHServerProcess[bytes]", words: list[str], env: dict[str, str]) -> int:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *words, env=env, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, limit=READ_SIZE
    )
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    feeding = asyncio.create_task(_feed(process, child.stdin, child.pid, None))
    # As under sshd, the session lasts until all who have its output have closed it.
    await asyncio.gather(_drain(child.stdout, process.stdout), _drain(child.stderr, process.stderr))
    code = await child.wait()
    feeding.cancel()
    return code


async def _with_terminal(process: "asyncssh.SSHServerProcess[bytes]", words: list[str], env: dict[str, str]) -> int:
    master, slave = pty.openpty()
    _resize(master, process.term_size)

    def control_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    child = await asyncio.create_subprocess_exec(
        *words,
        env={**env, "SSH_TTY": os.ttyname(slave)},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=control_terminal,
    )
    os.close(slave)
    reader, writer = await _streams(master)
    feeding = asyncio.create_task(_feed(process, writer, child.pid, master))
    draining = asyncio.create_task(_drain(reader, process.stdout))
    code = await child.wait()
    # What the child left running may hold the terminal open; the child's own output is there already.
    await asyncio.wait([draining], timeout=LAST_OUTPUT_S)
    feeding.cancel()
    draining.cancel()
    return code


class _TerminalProtocol(asyncio.StreamReaderProtocol):
    """Reads a terminal to its end, which comes as an error; a reader that has an error gives nothing of what came before it."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(None)


async def _streams(terminal: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ_SIZE)
    await loop.connect_read_pipe(lambda: _TerminalProtocol(reader), os.fdopen(terminal, "rb", buffering=0))
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(os.dup(terminal), "wb", buffering=0)
    )
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)


async def _feed(
    process: "asyncssh.SSHServerProcess[bytes]", writer: asyncio.StreamWriter, pid: int, terminal: int | None
) -> None:
    """From the client to the child. Not asyncssh's own redirection, which loses data where one of them is slow (2.24)."""
    with contextlib.suppress(asyncssh.Error, OSError):
        while True:
            try:
                data = await process.stdin.read(READ_SIZE)
            except asyncssh.TerminalSizeChanged as change:
                if terminal is not None:
                    _resize(terminal, change.term_size)
                continue
            except (asyncssh.SignalReceived, asyncssh.BreakReceived) as sent:
                name = f"SIG{sent.signal}" if isinstance(sent, asyncssh.SignalReceived) else "SIGINT"
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, getattr(signal, name, signal.SIGINT))
                continue
            if not data:
                break
            writer.write(data)
            await writer.drain()
    if terminal is None:
        writer.close()


async def _drain(reader: asyncio.StreamReader, writer: "asyncssh.SSHWriter[bytes]") -> None:
    """From the child to the client."""
    with contextlib.suppress(asyncssh.Error, OSError):
        while data := await reader.read(READ_SIZE):
            writer.write(data)
            await writer.drain()


def _resize(terminal: int, size: tuple[int, int, int, int]) -> None:
    columns, rows, width, height = size
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, width, height))


def plain_text(value: str | bytes) -> str:
    """What a client sent, as text."""
    return value if isinstance(value, str) else os.fsdecode(value)
