"""One gateway, until it is told to stop.

The table of routes is a file: whoever changes it writes a new one in its place. SIGTERM ends it gently: `/health` says so first,
connections end after the request they are on, and streams that outlast the drain are cut.
"""

import asyncio
import contextlib
import signal
import ssl
import sys
from pathlib import Path

import msgspec

from podway.decoding import from_json
from podway.errors import UserError
from podway.gateway.connection import ClientConnection
from podway.gateway.proxy import Gateway
from podway.gateway.table import RouteTable

LOOK_S = 0.2  # how soon a new table is seen


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one gateway runs."""

    routes: Path
    host: str = "127.0.0.1"
    port: int = 8080
    tls_cert: str | None = None
    tls_key: str | None = None
    drain_s: float = 30.0
    hedge_s: float | None = None


class RunningGateway:
    """A gateway that listens."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Begin to listen; the port (that the system chose, for 0)."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ClientConnection(self.gateway.handle, self.connections, secure=tls is not None),
            host,
            port,
            ssl=tls,
            backlog=1024,
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, drain_s: float) -> None:
        """Take nothing new, end what is under way, and close."""
        self.gateway.ready = False
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self.connections:
                    await asyncio.sleep(0.02)
        for connection in list(self.connections):
            connection.abort()
        self.gateway.forwarder.pool.close()


def read_table(path: Path) -> RouteTable:
    """The table of a file."""
    try:
        return from_json(path.read_bytes(), RouteTable)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}", "give a file of routes with --routes") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: not a table of routes: {error}", "see docs/gateway.md for its form") from None


async def follow_table(path: Path, gateway: Gateway) -> None:
    """Use each new table that is put in place of the file; a broken one is reported, and the last one stays."""
    last: tuple[int, int, int] | None = None
    while True:
        with contextlib.suppress(OSError):
            stat = path.stat()
            mark = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if mark != last:
                last = mark
                try:
                    gateway.update(read_table(path))
                except UserError as error:
                    print(f"podway gateway: {error.what}; the last routes stay in use", file=sys.stderr, flush=True)
        await asyncio.sleep(LOOK_S)


def tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """For https; None without a certificate."""
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"{certificate}: cannot be used for TLS: {error}", "give PEM files that fit together") from None
    return context


async def _run(settings: GatewaySettings) -> None:
    gateway = Gateway(hedge_s=settings.hedge_s)
    gateway.update(read_table(settings.routes))
    running = RunningGateway(gateway)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        port = await running.listen(settings.host, settings.port, tls_context(settings.tls_cert, settings.tls_key))
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise UserError(f"cannot listen on {where}: {error.strerror}", "choose another --port") from None
    print(f"podway gateway: listening on {settings.host}:{port}", flush=True)
    following = asyncio.ensure_future(follow_table(settings.routes, gateway))
    await stop.wait()
    following.cancel()
    await running.stop(settings.drain_s)


def serve(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    with contextlib.suppress(ImportError):
        import uvloop  # a faster event loop, where it is installed

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(_run(settings))
