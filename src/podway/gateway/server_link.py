"""A gateway and its server: routes come by a long poll, loads and usage go back every few seconds.

The last table is kept in a file, so that a gateway that starts while the server is away serves what it served before; the server's
absence is told once, not every second. Nothing here ever ends the gateway: a table or an answer that makes no sense is reported and
left out.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol

import msgspec

from podway.certificates import TlsKeyPair
from podway.decoding import from_json
from podway.errors import UserError
from podway.files import write_atomically
from podway.gateway.ledger import UsageLedger, leftovers
from podway.gateway.proxy import Gateway
from podway.gateway.report import GatewayReport
from podway.gateway.table import RouteTable

WAIT_S = 20.0  # of one long poll
REPORT_S = 3.0
PAUSE_S = (0.2, 5.0)  # between tries while the server is away: the first, and the longest
LAST_REPORT_S = 5.0  # when the gateway ends

log = logging.getLogger("podway.gateway")


class ControlServer(Protocol):
    """What a gateway asks of the server."""

    async def gateway_routes(self, after: int | None = None, wait: float = 0.0) -> RouteTable:
        """The table of routes: once it is another than version `after`, or as it is after `wait` seconds."""

    async def gateway_report(self, report: GatewayReport) -> bool:
        """False for a report that the server had already."""


class ServerLink:
    """Keeps one gateway's routes up to date, and tells the server what it saw."""

    def __init__(
        self, server: ControlServer, gateway: Gateway, folder: Path, url: str = "", vault: "Sealer | None" = None
    ) -> None:
        """`vault` seals the key pairs of endpoints beside the kept table; without it they are not kept."""
        self.url = url
        self._vault = vault
        self._pairs = folder / "certificates.sealed"
        self._server = server
        self._gateway = gateway
        self._folder = folder
        self._kept = folder / "routes.json"
        self.away_since: float | None = None  # by time.monotonic; None: the server answered last time
        self._disk_full = False

    def use_kept(self) -> bool:
        """Use the table of the last time, if there is one."""
        try:
            self._gateway.update(self._with_pairs(from_json(self._kept.read_bytes(), RouteTable)))
        except FileNotFoundError:
            return False
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s: cannot be used: %s", self._kept, error)
            return False
        return True

    async def learn(self) -> bool:
        """Ask once, without waiting; whether the server answered."""
        return await self._learn(None, 0.0) is not None

    async def follow_routes(self) -> None:
        """For as long as the gateway runs."""
        version, pause = self._gateway.routes.table.version, PAUSE_S[0]
        while True:
            found = await self._learn(version, WAIT_S)
            if found is None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSE_S[1])
            else:
                # A server that answers at once with what we have would otherwise be asked in a tight loop.
                await asyncio.sleep(0.0 if found != version else 0.1)
                version, pause = found, PAUSE_S[0]

    async def _learn(self, after: int | None, wait: float) -> int | None:
        try:
            table = await self._server.gateway_routes(after, wait)
        except (UserError, OSError, msgspec.DecodeError) as error:
            self._told_away(error)
            return None
        if self.away_since is not None:
            self.away_since = None
            log.warning("the server is back")
        if table != self._gateway.routes.table:
            self._gateway.update(table)
            self._keep(table)
        return table.version

    def _told_away(self, error: Exception) -> None:
        if self.away_since is None:
            self.away_since = time.monotonic()
            what = error.what if isinstance(error, UserError) else str(error)
            log.warning("routes cannot be learned: %s; the last ones stay in use", what)

    def _keep(self, table: RouteTable) -> None:
        pairs = {one.name: msgspec.json.encode(one.tls).decode() for one in table.services if one.tls is not None}
        bare = _with_tls(table, {})

        def write() -> None:
            if pairs and self._vault is not None:
                write_atomically(self._pairs, self._vault.seal(pairs), mode=0o600)
            else:
                self._pairs.unlink(missing_ok=True)
            write_atomically(self._kept, msgspec.json.encode(bare), mode=0o600)

        self._guarded(write)

    def _with_pairs(self, table: RouteTable) -> RouteTable:
        """The kept table with the pairs that were sealed beside it; an endpoint without its pair takes no requests."""
        if self._vault is None or not self._pairs.exists():
            return table
        try:
            opened = self._vault.open(self._pairs.read_bytes())
            return _with_tls(table, {name: from_json(text.encode(), TlsKeyPair) for name, text in opened.items()})
        except (UserError, OSError, msgspec.DecodeError):
            log.warning("%s: cannot be opened; endpoints with a certificate wait for the server", self._pairs)
            return table

    def _guarded(self, write: "Write") -> None:
        """A full disk is told once, and the gateway goes on with what is in memory."""
        try:
            write()
            self._disk_full = False
        except OSError as error:
            if not self._disk_full:
                self._disk_full = True
                log.warning("%s: cannot be written: %s; it is in memory alone", self._folder, error.strerror)

    # reports

    async def keep_reporting(self) -> None:
        """For as long as the gateway runs."""
        old = leftovers(self._folder)
        while True:
            await asyncio.sleep(REPORT_S)
            await self.report()
            if self.away_since is None:
                old = [ledger for ledger in old if not await self._hand_in(ledger)]

    async def report(self) -> bool:
        """Once: what was seen and used since the last time."""
        gateway, ledger = self._gateway, self._gateway.ledger
        report = ledger.next_report()
        self._guarded(ledger.save)  # its number must not be used for another report
        known = {service.name for service in gateway.routes.table.services}
        loads = gateway.loads.take(time.monotonic(), known)
        return await self._send(ledger, msgspec.structs.replace(report, services=loads, url=self.url))

    async def _send(self, ledger: UsageLedger, report: GatewayReport) -> bool:
        try:
            await self._server.gateway_report(report)
        except (UserError, OSError, msgspec.DecodeError) as error:
            if isinstance(error, UserError) and error.status in (400, 413):
                log.error("the server refuses a report, which is dropped: %s", error.what)
                ledger.acknowledge()
            self._guarded(ledger.save)
            return False
        ledger.acknowledge()
        self._guarded(ledger.save)
        return True

    async def _hand_in(self, ledger: UsageLedger) -> bool:
        """What a process that is gone left; True when the server has all of it."""
        while not ledger.empty:
            if not await self._send(ledger, ledger.next_report()):
                return False
        ledger.close()
        return True

    async def end(self) -> None:
        """The last report; what the server does not take stays for the next gateway."""
        try:
            async with asyncio.timeout(LAST_REPORT_S):
                while await self.report() and not self._gateway.ledger.empty:
                    pass
        except TimeoutError:
            pass
        self._guarded(self._gateway.ledger.save)
        self._gateway.ledger.close()


def _with_tls(table: RouteTable, pairs: dict[str, TlsKeyPair]) -> RouteTable:
    """With these pairs, by service; a service whose pair is not among them has an empty one."""
    services = (
        one if one.tls is None else msgspec.structs.replace(one, tls=pairs.get(one.name, TlsKeyPair()))
        for one in table.services
    )
    return msgspec.structs.replace(table, services=tuple(services))


class Sealer(Protocol):
    """Encrypts what is kept on disk."""

    def seal(self, values: dict[str, str]) -> bytes:
        """Encrypted."""

    def open(self, sealed: bytes) -> dict[str, str]:
        """The values back."""


class Write(Protocol):
    """Something that writes a file."""

    def __call__(self) -> object:
        """Do it."""
