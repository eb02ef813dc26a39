"""One gateway, until it is told to stop.

The table of routes is a file, or comes from the server (`server_link.py`). SIGTERM ends it gently: `/health` says so first,
connections end after the request they are on, and streams that outlast the drain are cut. SIGHUP puts a new process in its place
(`handover.py`); the old one ends with its last stream. The gateway of this machine's own server also ends when nobody can need it
any more (`lifetime.py`).
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from podway.certificates import TlsKeyPair, pair_facts
from podway.decoding import from_json
from podway.errors import UserError
from podway.gateway.accepting import Acceptor
from podway.gateway.connection import ClientConnection
from podway.gateway.handover import Inherited, listening_socket, start_successor
from podway.gateway.ledger import UsageLedger
from podway.gateway.lifetime import LOOK_S as LIFETIME_LOOK_S
from podway.gateway.lifetime import UNUSED_S, Lifetime
from podway.gateway.proxy import Gateway
from podway.gateway.served_certificates import ServedCertificates
from podway.gateway.server_link import ControlServer, Sealer, ServerLink
from podway.gateway.state_dir import GatewayProcess, say_holder, take_lock, write_info
from podway.gateway.table import RouteTable
from podway.gateway.upstream import TunnelDial

LOOK_S = 0.2  # how soon a new file of routes is seen
LONGEST_DRAIN_S = 3600.0  # of a process that has a successor: nobody waits for it

log = logging.getLogger("podway.gateway")


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one gateway runs."""

    routes: Path | None = None  # None: from the server
    state: Path | None = None  # the directory for the last routes and for usage that the server has not yet
    single: bool = False  # at most one gateway for this directory, which says there where it listens
    host: str = "127.0.0.1"
    port: int = 8080
    url: str = ""  # where clients reach it, if not where it listens
    tls_cert: str | None = None
    tls_key: str | None = None
    drain_s: float = 30.0
    hedge_s: float | None = None
    look_s: float = LIFETIME_LOOK_S  # how often a single gateway looks whether it is still needed
    unused_s: float = UNUSED_S  # how long it stays without a service while the server is away


class RunningGateway:
    """A gateway that listens."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.connections: set[ClientConnection] = set()
        self._acceptor: Acceptor | None = None

    def listen(self, listener: socket.socket, *, always_tls: bool = False) -> None:
        """Begin to accept connections."""
        self._acceptor = Acceptor(
            listener,
            lambda secure: ClientConnection(self.gateway.handle, self.connections, secure=secure),
            self.gateway.certificates.at,
            always=always_tls,
        )

    async def stop(self, drain_s: float) -> None:
        """Take nothing new, end what is under way, and close."""
        self.gateway.ready = False
        acceptor = self._acceptor
        if acceptor is not None:
            acceptor.close()
        for connection in list(self.connections):
            connection.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self.connections or (acceptor is not None and acceptor.busy):
                    await asyncio.sleep(0.02)
        if acceptor is not None:
            acceptor.abort()
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
                    log.warning("%s; the last routes stay in use", error.what)
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


def certificate_names(path: str) -> tuple[str, ...]:
    """The hosts that a certificate is for."""
    return pair_facts(TlsKeyPair(certificate=Path(path).read_text())).names


@contextlib.asynccontextmanager
async def _routed(
    settings: GatewaySettings, server: ControlServer | None, vault: Sealer | None, gateway: Gateway, url: str
) -> AsyncIterator[ServerLink | None]:
    """The gateway has routes, and gets the new ones; from the link to the server, where there is one."""
    if settings.routes is not None:
        gateway.update(read_table(settings.routes))
        work, link = [follow_table(settings.routes, gateway)], None
    else:
        assert server is not None and settings.state is not None  # one of the two
        link = ServerLink(server, gateway, settings.state, url, vault)
        if not await link.learn() and not link.use_kept():
            log.warning("there are no routes yet")
        work = [link.follow_routes(), link.keep_reporting()]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield link
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if link is not None:
            await link.end()


def _listener(settings: GatewaySettings, inherited: Inherited) -> socket.socket:
    if inherited.listener is not None:
        return inherited.listener
    try:
        return listening_socket(settings.host, settings.port)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise UserError(f"cannot listen on {where}: {error.strerror}", "choose another --port") from None


async def _run(
    settings: GatewaySettings,
    server: ControlServer | None,
    dial: TunnelDial | None,
    vault: Sealer | None,
    inherited: Inherited,
    lock: int | None,
) -> None:
    tls = tls_context(settings.tls_cert, settings.tls_key)
    ledger = UsageLedger(f"{socket.gethostname()[:60]}-{secrets.token_hex(6)}", settings.state)
    names = certificate_names(settings.tls_cert) if settings.tls_cert else ()
    gateway = Gateway(hedge_s=settings.hedge_s, ledger=ledger, dial=dial, certificates=ServedCertificates(tls, names))
    running = RunningGateway(gateway)
    stop, replace = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, replace.set)
    listener = _listener(settings, inherited)
    host, port = listener.getsockname()[:2]
    if inherited.listener is None or not inherited.from_systemd:
        host = settings.host
    url = settings.url or f"{'https' if tls else 'http'}://{host}:{port}"
    async with _routed(settings, server, vault, gateway, url) as link:
        running.listen(listener.dup(), always_tls=tls is not None)
        if settings.single and settings.state is not None:
            write_info(settings.state, GatewayProcess(pid=os.getpid(), url=url, port=port))
            if lock is not None:
                say_holder(lock)
        print(f"podway gateway: listening on {host}:{port}", flush=True)
        inherited.tell_ready()
        async with _ending_itself(settings, gateway, link, lock, stop):
            replaced = await _until_told(stop, replace, listener, lock)
        listener.close()
        await running.stop(LONGEST_DRAIN_S if replaced else settings.drain_s)


@contextlib.asynccontextmanager
async def _ending_itself(
    settings: GatewaySettings, gateway: Gateway, link: ServerLink | None, lock: int | None, stop: asyncio.Event
) -> AsyncIterator[None]:
    """Meanwhile a gateway that is the only one of its directory stops when nobody can need it any more."""
    if lock is None or settings.state is None:
        yield
        return
    lifetime = Lifetime(
        folder=settings.state,
        lock=lock,
        services=lambda: len(gateway.routes.table.services),
        away_since=lambda: link.away_since if link is not None else None,
        unused_s=settings.unused_s,
    )

    async def watch() -> None:
        while (reason := lifetime.end_reason(time.monotonic())) is None:
            await asyncio.sleep(settings.look_s)
        log.warning("%s: ending", reason)
        stop.set()

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watching.cancel()


async def _until_told(stop: asyncio.Event, replace: asyncio.Event, listener: socket.socket, lock: int | None) -> bool:
    """Until this process is to end; True when another has its place."""
    while True:
        waits = [asyncio.ensure_future(one.wait()) for one in (stop, replace)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()
        if stop.is_set():
            return False
        replace.clear()
        if await start_successor(listener, lock):
            return True
        log.error("the new process did not start; this one goes on")


def serve(
    settings: GatewaySettings,
    server: ControlServer | None = None,
    dial: TunnelDial | None = None,
    vault: Sealer | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `dial`: how replicas are reached that are not at their addresses. `vault`: for key pairs."""
    logging.basicConfig(stream=sys.stderr, format="podway gateway: %(message)s", level=logging.WARNING)
    with contextlib.suppress(ImportError):
        import uvloop  # a faster event loop, where it is installed

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    inherited = Inherited()
    if settings.state is not None:
        settings.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = inherited.lock
    if settings.single and settings.state is not None and lock is None:
        lock = take_lock(settings.state)
        say_holder(lock)
    asyncio.run(_run(settings, server, dial, vault, inherited, lock))
