"""The application over a real store and the real local provider, without its controllers: for what HTTP answers."""

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starlette.testclient import TestClient

from podway.control.archive import Archive
from podway.control.job_groups import GroupControl
from podway.control.orphans import OrphanScanner
from podway.control.pools import PoolControl
from podway.control.schedules import ScheduleControl
from podway.control.service_verbs import ServiceControl
from podway.control.store import open_store, sqlite_url
from podway.control.vault import SecretVault
from podway.control.verbs import Control
from podway.hosts.blobs import BlobStore
from podway.hosts.ssh.authority import CertificateAuthority
from podway.providers import open_provider
from podway.server.app import make_app
from podway.server.notify import LiveRows, Notifier
from podway.server.pacing import Turns
from podway.server.rehearsals import Rehearsals
from podway.server.routing import Services
from podway.server.sessions import Sessions
from podway.server.tokens import TokenCache


@contextlib.contextmanager
def server_in(place: Path, token: str) -> Iterator[TestClient]:
    store = open_store(sqlite_url(place / "p.db"))
    provider = open_provider("local", place)
    control = Control(
        store=store,
        vault=SecretVault(place / "key"),
        provider=lambda name: open_provider(name, place),
        wake=lambda _: None,
    )
    notifier = Notifier(asyncio.new_event_loop())
    with ThreadPoolExecutor(4) as quick, ThreadPoolExecutor(4) as slow:
        services = Services(
            control=control,
            service_verbs=ServiceControl(control),
            schedules=ScheduleControl(ServiceControl(control)),
            pools=PoolControl(control),
            groups=GroupControl(control),
            store=store,
            blobs=BlobStore(place / "blobs"),
            archive=Archive(place / "logs"),
            provider=lambda name: provider,
            orphans=OrphanScanner(store, lambda name: provider),
            tokens=TokenCache(store.people, token, "ann"),
            notifier=notifier,
            rows=LiveRows(store, notifier, quick, alone=True),
            turns=Turns(),
            quick=quick,
            slow=slow,
            sessions=Sessions(),
            rehearsals=Rehearsals(),
            authority=CertificateAuthority(place / "ssh" / "authority"),
        )
        with TestClient(make_app(services), raise_server_exceptions=False) as client:
            notifier._loop.close()
            notifier._loop = client.portal.call(_running_loop)  # type: ignore[union-attr]
            store.written = notifier.publish
            yield client
    store.engine.dispose()


async def _running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()
