"""Replicas on hosts that are reached through ssh: one connection to each host, held by the gateway, a channel for each of its own.

The server says in the table of routes how to log in (`ssh_route`): where sshd is, with which key, and which host key was pinned. A
gateway of the same home has that key. It keeps its connections itself, so that a restart of the server cuts no stream.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from podway.decoding import from_json
from podway.errors import ProviderError, UserError
from podway.hosts.ssh.endpoint import Endpoint
from podway.order import Host
from podway.providers import Provider, SupportsShell

if TYPE_CHECKING:
    from podway.hosts.ssh.connections import SshConnections


class SshRoute(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a gateway logs in to a host."""

    endpoint: Endpoint
    known_hosts: tuple[str, ...] = ()


def ssh_route(provider: Provider, host: Host) -> str:
    """As it stands in the table; empty where hosts are reached at their addresses."""
    shell = provider.shell(host, {}) if isinstance(provider, SupportsShell) else None
    if shell is None or shell.endpoint is None:
        return ""
    return msgspec.json.encode(SshRoute(endpoint=shell.endpoint, known_hosts=shell.known_hosts)).decode()


class SshDialer:
    """The ssh connections of one gateway; a `TunnelDial`."""

    def __init__(self, folder: Path) -> None:
        self._known_hosts = folder / "known_hosts"
        self._connections: SshConnections | None = None

    async def __call__(self, route: str, port: int, protocol: asyncio.Protocol) -> None:
        """Open a channel to a port of the host's loopback."""
        import asyncssh  # of an extra: only gateways with such replicas need it

        from podway.hosts.ssh.connections import SshConnections

        if self._connections is None:
            self._connections = SshConnections(self._known_hosts)
        try:
            wanted = from_json(route, SshRoute)
            self._pin(wanted)
            connection = await self._connections.connection(wanted.endpoint)
            await connection.create_connection(lambda: _session(protocol), "127.0.0.1", port)
        except (asyncssh.Error, UserError, ProviderError, msgspec.DecodeError) as error:
            raise ConnectionError(str(error)) from None

    def _pin(self, wanted: SshRoute) -> None:
        """The host keys that the server has pinned are those that count here."""
        try:
            known = self._known_hosts.read_text().splitlines()
        except FileNotFoundError:
            known = []
        if missing := [line for line in wanted.known_hosts if line not in known]:
            names = {line.partition(" ")[0] for line in missing}
            kept = [line for line in known if line.partition(" ")[0] not in names]
            self._known_hosts.write_text("".join(f"{line}\n" for line in (*kept, *missing)))


def _session(protocol: asyncio.Protocol) -> Any:
    import asyncssh

    class ChannelSession(asyncssh.SSHTCPSession[bytes]):
        """A channel, as a protocol of asyncio's sees its transport."""

        def connection_made(self, chan: Any) -> None:
            protocol.connection_made(chan)

        def data_received(self, data: bytes, datatype: int | None) -> None:
            protocol.data_received(data)

        def eof_received(self) -> bool:
            return False  # the replica has closed: so do we

        def connection_lost(self, exc: Exception | None) -> None:
            protocol.connection_lost(exc)

        def pause_writing(self) -> None:
            protocol.pause_writing()

        def resume_writing(self) -> None:
            protocol.resume_writing()

    return ChannelSession()
