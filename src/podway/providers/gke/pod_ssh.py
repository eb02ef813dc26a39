"""An ssh server for one pod, on the standard input and output of the command that a person's ssh started.

1. `ssh NAME` runs `podway ssh-proxy NAME RANK` (its ProxyCommand) and speaks ssh with it, on the person's own machine. It asks for no
   key: what it can do in the pod is what the caller's KUBECONFIG allows.
2. A shell or a command is an `exec` of the API server's, with the home and the environment that a job on that host has. Nothing is
   needed in the image but what Podway's agent needs: bash and python3. With a terminal it gets SIGHUP when the connection ends.
3. scp, sftp and editors are served by the agent's own SFTP server; rsync and an older scp are commands, which the image must have.
4. A forwarded port (-L, -D) leads to what the pod itself reaches at that address. -R is refused: nothing here listens in a pod.
"""

import asyncio
import contextlib
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import asyncssh
import msgspec
from asyncssh.stream import SSHTCPStreamSession, SSHUNIXStreamSession

from podway.errors import ProviderError, UserError
from podway.hosts.pod_address import PodAddress, attached_command
from podway.hosts.ssh.keys import proxied_host_key
from podway.hosts.ssh.stdio_server import HERE, KEPT, READ_SIZE, plain_text, serve_stdio
from podway.providers.gke.api import KubernetesApi
from podway.providers.gke.kubeconfig import find_context
from podway.providers.gke.manifests import CONTAINER
from podway.providers.gke.pod_ports import ACCEPTED, relay_words
from podway.providers.gke.pod_shell import RESIZE, STOPPED, exit_code, find_pod
from podway.providers.gke.render import AGENT_FILE
from podway.providers.gke.streams import ERROR, STDERR, STDIN, STDOUT, PodSession, open_session

_REFUSALS = (UserError, ProviderError, OSError, TimeoutError)


class SshPod(msgspec.Struct, frozen=True, kw_only=True):
    """What a session in it needs."""

    api: KubernetesApi
    namespace: str
    name: str
    home: str
    env: Mapping[str, str]

    async def open(self, words: list[str], *, terminal: bool = False) -> PodSession:
        """Start a process there."""
        return await open_session(self.api, self.namespace, self.name, CONTAINER, words, terminal=terminal)


def run(address: PodAddress, home: str, env: Mapping[str, str], folder: Path) -> None:
    """Serve the pod at this address; the key that is shown is in `folder`."""
    api = KubernetesApi(find_context(address.context))
    pod = SshPod(api=api, namespace=address.namespace, name=find_pod(api, address), home=home, env=env)
    asyncio.run(serve_stdio(lambda: _PodServer(pod), proxied_host_key(folder)))


class _PodServer(asyncssh.SSHServer):
    """Lets in the user who started the command, and forwards ports."""

    def __init__(self, pod: SshPod) -> None:
        self._pod = pod
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn

    def session_requested(self) -> Any:
        assert self._connection is not None  # made before anything is requested on it
        return self._connection.create_server_channel(encoding=None), _SshSession(self._pod)

    def begin_auth(self, username: str) -> bool:
        return False

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> Any:
        return self._forward("127.0.0.1" if dest_host in HERE else dest_host, dest_port, SSHTCPStreamSession)

    def unix_connection_requested(self, dest_path: str) -> Any:
        return self._forward(dest_path, None, SSHUNIXStreamSession)

    async def _forward(self, address: str, port: int | None, kind: Callable[..., Any]) -> Any:
        """A channel to what the pod reaches there, once it takes the connection."""
        where = f"{address}:{port}" if port else address
        try:
            session = await self._pod.open(relay_words(address, port))
        except _REFUSALS as error:
            raise _not_opened(f"{where}: {_said(error)}") from None
        first = await session.read()
        while first is not None and first[0] not in (STDOUT, ERROR):
            first = await session.read()
        if first is None or first[0] == ERROR:
            session.close()
            raise _not_opened(f"nothing listens at {where} of the pod")
        early = first[1].removeprefix(ACCEPTED)

        async def pass_on(reader: Any, writer: Any) -> None:
            writer.write(early)
            await _join(session, reader, writer)

        return kind(pass_on)


def _not_opened(why: str) -> asyncssh.ChannelOpenError:
    return asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, why)


async def _join(session: PodSession, reader: Any, writer: Any) -> None:
    """Pass bytes both ways until the pod's side has ended."""

    async def send() -> None:
        with contextlib.suppress(asyncssh.Error, OSError):
            while data := await reader.read(READ_SIZE):
                session.write(STDIN, data)
                await session.drain()
            session.end_input()

    sending = asyncio.create_task(send())
    try:
        with contextlib.suppress(asyncssh.Error, OSError):
            while (message := await session.read()) is not None and message[0] != ERROR:
                if message[0] == STDOUT:
                    writer.write(message[1])
                    await writer.drain()
    finally:
        sending.cancel()
        session.close()
        writer.close()


class _SshSession(asyncssh.SSHServerSession[bytes]):
    """A shell, a command or sftp in the pod; its exit code is the client's.

    Not a process of asyncssh's, which serves sftp by itself, from this machine's files.
    """

    def __init__(self, pod: SshPod) -> None:
        self._pod = pod
        self._input: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._session: PodSession | None = None
        self._work: asyncio.Task[None] | None = None

    def connection_made(self, chan: "asyncssh.SSHServerChannel[bytes]") -> None:
        self._channel = chan

    def connection_lost(self, exc: Exception | None) -> None:
        if self._work is not None:
            self._work.cancel()

    def pty_requested(self, term_type: str, term_size: tuple[int, int, int, int], term_modes: Any) -> bool:
        return True

    def shell_requested(self) -> bool:
        return True

    def exec_requested(self, command: str) -> bool:
        return True

    def subsystem_requested(self, subsystem: str) -> bool:
        return subsystem == "sftp"

    def session_started(self) -> None:
        self._work = asyncio.create_task(self._run())

    def data_received(self, data: bytes, datatype: Any) -> None:
        self._channel.pause_reading()  # until the pod has it
        self._input.put_nowait(data)

    def eof_received(self) -> bool:
        self._input.put_nowait(None)
        return True

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:
        if self._session is not None:
            _resize(self._session, width, height)

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    async def _run(self) -> None:
        terminal = self._channel.get_terminal_type() is not None
        try:
            session = await self._pod.open(attached_command(self._command()), terminal=terminal)
        except _REFUSALS as error:
            self._channel.write_stderr(f"podway: {_said(error)}\n".encode())
            self._channel.exit(STOPPED)
            return
        self._session = session
        if terminal:
            columns, rows, _, _ = self._channel.get_terminal_size()
            _resize(session, columns, rows)
        feeding = asyncio.create_task(self._feed(session))
        try:
            self._channel.exit(await self._show(session))
        finally:
            feeding.cancel()
            session.close()

    def _command(self) -> str:
        """For the shell of the pod: in its home, with the environment of a job there."""
        pod, channel = self._pod, self._channel
        begin = f"cd {shlex.quote(pod.home)} && exec"
        if channel.get_subsystem() is not None:
            return f"{begin} env HOME={shlex.quote(pod.home)} python3 -S -E {AGENT_FILE} sftp"
        asked = {plain_text(name): plain_text(value) for name, value in channel.get_environment().items()}
        env = {name: value for name, value in asked.items() if name in KEPT or name.startswith("LC_")}
        env |= {**pod.env, "HOME": pod.home, "SHELL": "/bin/bash"}
        if kind := channel.get_terminal_type():
            env["TERM"] = plain_text(kind)
        command = channel.get_command()
        words = ["env", *(f"{name}={value}" for name, value in sorted(env.items())), "bash"]
        words += ["-l"] if command is None else ["-c", plain_text(command)]
        return f"{begin} {shlex.join(words)}"

    async def _feed(self, session: PodSession) -> None:
        """From the client to the pod."""
        with contextlib.suppress(OSError):
            while (data := await self._input.get()) is not None:
                session.write(STDIN, data)
                await session.drain()
                if self._input.empty():
                    self._channel.resume_reading()
            session.end_input()

    async def _show(self, session: PodSession) -> int:
        """From the pod to the client; the exit code."""
        while (message := await session.read()) is not None:
            channel, data = message
            if channel == ERROR:
                return exit_code(data)
            if channel in (STDOUT, STDERR):
                write = self._channel.write if channel == STDOUT else self._channel.write_stderr
                write(data)
                await self._may_write.wait()
        self._channel.write_stderr(b"podway: the connection to the pod is lost\n")
        return STOPPED


def _resize(session: PodSession, columns: int, rows: int) -> None:
    with contextlib.suppress(OSError):
        session.write(RESIZE, json.dumps({"Width": columns, "Height": rows}).encode())


def _said(error: Exception) -> str:
    return error.what if isinstance(error, UserError) else str(error)
