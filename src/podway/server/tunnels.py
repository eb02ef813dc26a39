"""How a gateway reaches replicas whose addresses it cannot reach from where it runs: through sshd, or by the provider's own way in.

The server says in the table of routes what a gateway of the same home needs: how to log in (`ssh_dial.py`), or which host of which
provider it is; for a pod of Kubernetes its port is then asked through the API server. The gateway holds these connections itself, so
that a restart of the server cuts no stream.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec

from podway.decoding import from_json
from podway.errors import ProviderError, UserError
from podway.hosts.link import Reader, Writer
from podway.order import Host
from podway.provider_table import row_of
from podway.providers import Provider, ProviderSet, SupportsPorts
from podway.server.ssh_dial import SshDialer, ssh_route

READ = 64 << 10
MOST_UNSENT = 256 << 10


class HostRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A host whose ports its provider reaches."""

    provider: str
    host: Host


def tunnel_route(provider: Provider, host: Host) -> str:
    """As it stands in the table; empty where hosts are reached at their addresses."""
    route = ssh_route(provider, host)
    if route or row_of(provider.name).simulated or not isinstance(provider, SupportsPorts):
        return route
    return msgspec.json.encode(HostRoute(provider=provider.name, host=host)).decode()


class TunnelDialer:
    """The tunnels of one gateway; a `TunnelDial`."""

    def __init__(self, home: Path) -> None:
        self._ssh = SshDialer(home / "gateway")
        self._providers = ProviderSet(home)

    async def __call__(self, route: str, port: int, protocol: asyncio.Protocol) -> None:
        """Connect the protocol to a port of the host."""
        try:
            wanted = from_json(route, HostRoute)
        except msgspec.DecodeError:
            await self._ssh(route, port, protocol)
            return
        try:
            provider = self._providers(wanted.provider)
            if not isinstance(provider, SupportsPorts):
                raise ConnectionError(f"{wanted.provider} opens no ports")
            reader, writer = await provider.connect_port(wanted.host, port)()
        except (UserError, ProviderError) as error:
            raise ConnectionError(str(error)) from None
        StreamTransport(reader, writer, protocol)


class StreamTransport(asyncio.Transport):
    """Streams, as a protocol of asyncio's sees its transport."""

    def __init__(self, reader: Reader, writer: Writer, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._reader, self._writer, self._protocol = reader, writer, protocol
        self._unsent, self._paused, self._closing = bytearray(), False, False
        self._to_send, self._may_read = asyncio.Event(), asyncio.Event()
        self._may_read.set()
        protocol.connection_made(self)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._send())]

    def write(self, data: Any) -> None:
        self._unsent += data
        self._to_send.set()
        if len(self._unsent) > MOST_UNSENT and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Once everything is sent."""
        self._closing = True
        self._to_send.set()
        if not self._unsent:
            self.abort()

    def abort(self) -> None:
        self._end(None)

    async def _receive(self) -> None:
        try:
            while data := await self._reader.read(READ):
                await self._may_read.wait()
                self._protocol.data_received(data)
            self._end(None)
        except OSError as error:
            self._end(error)

    async def _send(self) -> None:
        try:
            while True:
                await self._to_send.wait()
                self._to_send.clear()
                data, self._unsent = bytes(self._unsent), bytearray()
                self._writer.write(data)
                await self._writer.drain()
                if self._paused and len(self._unsent) <= MOST_UNSENT:
                    self._paused = False
                    self._protocol.resume_writing()
                if self._closing and not self._unsent:
                    self._end(None)
        except OSError as error:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._writer.close()
        for task in tasks:
            task.cancel()
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, error)
