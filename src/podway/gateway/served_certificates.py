"""Which certificate a client gets: that of the host name it asks for (SNI), else that of the address it came to, else the oldest.

The gateway's own (--tls-cert), where it has one, goes before those of services. Contexts are made once for each pair and kept; a
connection ends as it began, and the next one gets the new pair.
"""

import logging
import ssl
from collections.abc import Iterable

from podway.certificates import CertificateFacts, TlsKeyPair, covers, pair_facts, server_context
from podway.errors import UserError
from podway.gateway.table import RoutedService

log = logging.getLogger("podway.gateway")


class ServedCertificates:
    """The certificates of one gateway."""

    def __init__(self, own: ssl.SSLContext | None = None, names: tuple[str, ...] = ()) -> None:
        """`own`: the gateway's, and what it is for."""
        self._own = own
        self._own_names = names
        self._made: dict[TlsKeyPair, tuple[CertificateFacts, ssl.SSLContext] | None] = {}
        self._used: list[tuple[CertificateFacts, ssl.SSLContext]] = []
        if own is not None:
            own.sni_callback = self._choose

    def update(self, services: Iterable[RoutedService]) -> None:
        """Use the pairs of these services from now on; one that cannot be used is told once, and left out."""
        made: dict[TlsKeyPair, tuple[CertificateFacts, ssl.SSLContext] | None] = {}
        for service in sorted(services, key=lambda one: (one.created, one.name)):
            if service.tls is not None and service.tls.key and service.tls not in made:
                known = service.tls in self._made
                made[service.tls] = self._made[service.tls] if known else self._load(service.name, service.tls)
        self._made = made
        self._used = [one for one in made.values() if one is not None]

    def _load(self, name: str, pair: TlsKeyPair) -> tuple[CertificateFacts, ssl.SSLContext] | None:
        try:
            facts, context = pair_facts(pair), server_context(pair)
        except (UserError, OSError, ValueError, TypeError) as error:
            why = error.what if isinstance(error, UserError) else type(error).__name__
            log.warning("service %s: its certificate cannot be used: %s", name, why)
            return None
        context.sni_callback = self._choose
        return facts, context

    def at(self, address: str) -> ssl.SSLContext | None:
        """For a connection to this address of the gateway, before it names a host; None: there is no certificate at all."""
        if self._own is not None:
            return self._own
        fitting = (context for facts, context in self._used if covers(facts.names, address))
        return next(fitting, self._used[0][1] if self._used else None)

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        if name is None or (self._own is not None and covers(self._own_names, name)):
            return
        found = next((context for facts, context in self._used if covers(facts.names, name)), None)
        if found is not None:
            connection.context = found
