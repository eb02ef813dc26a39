"""The server process: `python -m podway.server.main`.

1. takes the lock of its home, so that there is one local server for it (a second one says so and leaves);
2. opens the store, starts the reconciler, and listens, on loopback unless told otherwise;
3. writes `server.json` (mode 0600: address, token, pid) last, which is what tells a waiting CLI that it is ready;
4. on SIGTERM stops listening and leaves every job and host as it is: they do not need the server to go on.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import fcntl
import getpass
import json
import logging
import logging.handlers
import os
import resource
import secrets
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvicorn

from podway.control.archive import Archive
from podway.control.controller import Parts
from podway.control.driving import Drivers
from podway.control.housekeeping import keep_tidy
from podway.control.orphans import OrphanScanner
from podway.control.reconcile import owner_name
from podway.control.store import open_store, sqlite_url
from podway.control.vault import SecretVault
from podway.errors import UserError
from podway.files import write_atomically
from podway.home import home, unwritable
from podway.hosts.blobs import BlobStore
from podway.hosts.ssh.authority import CertificateAuthority
from podway.provider_table import provider_environment
from podway.providers import HostsHere, ProviderSet
from podway.providers.local.isolation import check_isolation
from podway.server.app import make_app
from podway.server.embedded_gateway import EmbeddedGateway
from podway.server.limits import Limits, TimedConnection, is_loopback
from podway.server.notify import LiveRows, Notifier
from podway.server.pacing import Turns
from podway.server.rehearsals import Rehearsals
from podway.server.routing import Services
from podway.server.sessions import Sessions
from podway.server.tokens import TokenCache
from podway.version import __version__

LOOPBACK = ("127.0.0.1", "::1", "localhost")

log = logging.getLogger("podway.server")
# Three kinds of work in threads of their own, so that none waits for another: answers (database only), requests that may ask a
# cloud, and what the controllers do.
QUICK_THREADS, SLOW_THREADS, BACKGROUND_THREADS = 8, 32, 32
REFUSED = 2  # the exit code of a server that cannot run as it is asked to; 1: another one runs already


def main(argv: list[str] | None = None) -> int:
    """Run until told to stop."""
    options = _options(argv)
    try:
        return _run(options, home())
    except (UserError, OSError) as error:
        refusal = error if isinstance(error, UserError) else unwritable(error)
        if refusal is None:
            raise
        log.error("%s", refusal)
        print(f"Error: {refusal}", file=sys.stderr)
        return REFUSED


def _run(options: argparse.Namespace, place: Path) -> int:
    lock = open(place / "server.lock", "a+")  # noqa: SIM115 - held for the life of the process
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print(f"a Podway server already runs for {place}", file=sys.stderr)
        return 1
    _log_to(place / "server.log", options.foreground)
    faulthandler.enable()  # a fault in native code tells its place in server.out
    # Each host is a socket or two, and a shell gives a program 1,024 files unless it asks for more.
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(most, 65536)), most))
    asyncio.run(_serve(place, options))
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="podway-server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--db", default="")
    parser.add_argument("--tls-cert", default="")
    parser.add_argument("--tls-key", default="")
    parser.add_argument("--foreground", action="store_true")
    parser.add_argument("--allow-local", action="store_true")
    parser.add_argument("--started-by-command", action="store_true")  # which may restart it with other settings
    return parser.parse_args(argv)


async def _serve(place: Path, options: argparse.Namespace) -> None:
    token = secrets.token_urlsafe(32)
    notifier = Notifier(asyncio.get_running_loop())
    database = options.db or os.environ.get("PODWAY_DB", "")
    store = open_store(database or sqlite_url(place / "podway.db"))
    store.written = notifier.publish
    quick = ThreadPoolExecutor(QUICK_THREADS, "quick")
    slow = ThreadPoolExecutor(SLOW_THREADS, "slow")
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(BACKGROUND_THREADS, "background"))
    allow_local = options.allow_local or bool(os.environ.get("PODWAY_ALLOW_LOCAL"))
    if allow_local:
        check_isolation()

    def hosts_here() -> HostsHere:
        """Alone on this machine a person may simulate slices; whoever has a token is not to become the server's user."""
        if allow_local:
            return "isolated"
        return "as-server" if options.host in LOOPBACK and not store.people.tokens() else "off"

    provider = ProviderSet(place, hosts_here=hosts_here)
    blobs, archive = BlobStore(place / "blobs"), Archive(place / "logs")
    vault = SecretVault(place / "secret.key")
    cache = place / "jax-cache"
    parts = Parts(
        store=store,
        blobs=blobs,
        vault=vault,
        archive=archive,
        provider=provider,
        cache_dir=str(cache),
        owner=owner_name(),
        home=place,
    )
    drivers = Drivers(parts, notifier.publish, provider, hosts_here)
    orphans = OrphanScanner(store, provider)
    tokens = TokenCache(store.people, token, getpass.getuser())
    tokens.reload()
    services = Services(
        control=drivers.control,
        service_verbs=drivers.service_verbs,
        schedules=drivers.schedules,
        pools=drivers.pools,
        groups=drivers.groups,
        store=store,
        blobs=blobs,
        archive=archive,
        provider=provider,
        orphans=orphans,
        tokens=tokens,
        notifier=notifier,
        rows=LiveRows(store, notifier, quick, alone=not database),
        turns=Turns(),
        quick=quick,
        slow=slow,
        sessions=Sessions(),
        rehearsals=Rehearsals(),
        authority=CertificateAuthority(place / "ssh" / "authority"),
    )
    app = Limits(make_app(services), place)
    listener = _listen(options.host, options.port)
    server = uvicorn.Server(_config(app, options.tls_cert, options.tls_key))
    tidying = keep_tidy(store, blobs, archive)
    background = [drivers.run(tokens.person), tidying, orphans.keep_scanning(), tokens.keep_fresh()]
    if options.host in LOOPBACK:  # a team's gateways run where its clients reach them
        background.append(EmbeddedGateway(place, lambda: bool(store.services.live())).keep())
    async with _background(*background), _beside_tls(app, bool(options.tls_cert)) as inner:
        _announce(place, options, (inner or listener).getsockname()[1], token)
        _warn_of_clear_text(options.host, bool(options.tls_cert))
        await server.serve(sockets=[listener])


def _config(app: Limits, cert: str = "", key: str = "") -> uvicorn.Config:
    config = uvicorn.Config(
        app, http=TimedConnection, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    if bool(cert) != bool(key):
        raise UserError("a certificate and its key go together", "give both --tls-cert and --tls-key")
    if cert:
        config.ssl_certfile, config.ssl_keyfile = cert, key
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            why = error.strerror if isinstance(error, FileNotFoundError | PermissionError) else str(error)
            raise UserError(f"{cert} and {key} are not a certificate and its key: {why}", "give PEM files") from None
    return config


class _InnerServer(uvicorn.Server):
    """A second one in the same process, which leaves signals to the first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _beside_tls(app: Limits, tls: bool) -> AsyncIterator[socket.socket | None]:
    """A listener in clear on loopback, for as long as the server runs; none where the server itself is in clear."""
    if not tls:
        yield None
        return
    listener = _listen("127.0.0.1", 0)
    inner = _InnerServer(_config(app))
    serving = asyncio.create_task(inner.serve(sockets=[listener]))
    try:
        yield listener
    finally:
        inner.should_exit = True
        await serving


def _warn_of_clear_text(host: str, tls: bool) -> None:
    if not tls and not is_loopback(host):
        warning = f"warning: listening on {host} without TLS: tokens and secrets travel in clear; give --tls-cert and --tls-key"
        log.warning(warning)
        print(warning, file=sys.stderr, flush=True)


@contextlib.asynccontextmanager
async def _background(*work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)  # from here on a client that read server.json is served, if a moment later
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}", "choose another --host or --port"
        ) from None
    listener.set_inheritable(True)
    return listener


def _announce(place: Path, options: argparse.Namespace, port: int, token: str) -> None:
    """Say where it is, once it listens: a CLI that waits for it reads this file, and never half of it."""
    # Over TLS, this machine's own commands take another way in: a certificate names no loopback address.
    host = "127.0.0.1" if options.tls_cert or options.host in ("0.0.0.0", "::") else options.host
    data = {
        "url": f"http://{host}:{port}",
        "token": token,
        "pid": os.getpid(),
        "version": __version__,
        "started_by_command": options.started_by_command,
        "environment": provider_environment(),
    }
    write_atomically(place / "server.json", json.dumps(data).encode(), mode=0o600)


def _log_to(path: Path, foreground: bool) -> None:
    handler: logging.Handler = logging.handlers.RotatingFileHandler(path, maxBytes=4 << 20, backupCount=2)
    if foreground:
        handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
