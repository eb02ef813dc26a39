"""From a service to one of its replicas: which one answers, and what to do when it does not.

1. A service without a replica holds the request for as long as it says, since its first replica may be starting. It does so too
   while every replica there is refuses: one may be about to be replaced.
2. A replica that fails before anything of its answer went to the client is left for another one. What was sent cannot be taken back,
   so requests that may change something are sent again only when they name a model (asking twice is harmless) or were never sent.
3. With hedging (off by default) such a request also goes to a second replica when the first has not begun to answer in time; the
   first that begins answers, and the other is told that nobody waits.
"""

import asyncio
import time

import msgspec

from podway.gateway import openai, tgi, wire
from podway.gateway.balance import Balancer
from podway.gateway.connection import ClientLeft, Incoming
from podway.gateway.load import LoadMeter
from podway.gateway.metrics import GatewayMetrics
from podway.gateway.relay import Race, Relay, RelayOutcome
from podway.gateway.table import ApiKey, Backend, RoutedService, Routes
from podway.gateway.upstream import ReplicaConnection, ReplicaPool, TunnelDial

ANSWER_S = 900.0  # without a byte from the replica
MOST_HELD = 1000  # requests that wait for first replicas
AGAIN_S = 0.25  # between rounds over replicas that all refuse
_SAFE = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"TRACE"})


class Refused(Exception):
    """The gateway itself answers, with an error."""

    def __init__(self, status: int, message: str, kind: str, code: str | None = None, retry_after: float = 0) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.retry_after = status, message, kind, code, retry_after


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """A request that may go on."""

    service: RoutedService
    key: ApiKey | None
    target: bytes  # as the replica sees it
    body: bytes | None  # whole, or None: it is passed on as it comes
    question: openai.Question | None = None
    beginnings: tuple[bytes, ...] = ()
    translation: tgi.Translation | None = None

    @property
    def tokens(self) -> int:
        """How much work it is, about."""
        return self.question.tokens if self.question else 1

    def may_repeat(self, method: bytes) -> bool:
        """Whether it can be sent a second time."""
        return self.body is not None and (self.question is not None or method in _SAFE)


class Forwarder:
    """Sends requests to replicas, by the table of the moment."""

    def __init__(
        self, metrics: GatewayMetrics, loads: LoadMeter, hedge_s: float | None = None, dial: TunnelDial | None = None
    ) -> None:
        self.routes = Routes()
        self.balancer = Balancer()
        self.pool = ReplicaPool(dial)
        self.held = 0
        self._metrics = metrics
        self._loads = loads
        self._hedge_s = hedge_s
        self._changed = asyncio.Event()

    def update(self, routes: Routes) -> None:
        """Use another table from now on; requests under way end as they began."""
        self.routes = routes
        backends = [one for service in routes.table.services for one in service.backends]
        self.balancer.keep({one.id for one in backends})
        self.pool.keep({one.place for one in backends})
        self._changed.set()
        self._changed = asyncio.Event()

    async def forward(self, request: Incoming, routed: Routed) -> Relay:
        """Have one replica answer the client; `Refused` when none can."""
        name = routed.service.name
        meter = self._loads.of(name, request.begun)
        meter.arrived()
        tried: set[str] = set()
        sent = False
        try:
            with self._metrics.in_flight.labels(name).track_inprogress():
                while True:
                    backend = await self._backend(request, routed, tried)
                    if not sent:
                        sent, now = True, time.monotonic()
                        meter.sent(now - request.begun, now)
                    relay = await self._round(request, routed, backend, tried)
                    if relay is not None:
                        return relay
                    self._metrics.retried(name)
        except Refused as error:
            meter.answered(error.status, None)
            raise
        finally:
            if sent:
                meter.returned(time.monotonic())

    # which replica

    async def _backend(self, request: Incoming, routed: Routed, tried: set[str]) -> Backend:
        """A replica that was not tried yet; waits for one where the service says so."""
        until = request.begun + routed.service.hold_s
        while True:
            service = self.routes.by_name.get(routed.service.name, routed.service)
            backend = self.balancer.choose(service.name, service.backends, routed.beginnings, time.monotonic(), tried)
            if backend is not None:
                tried.add(backend.id)
                return backend
            if time.monotonic() >= until or routed.service.name not in self.routes.by_name:
                break
            await self._hold(request, service, until, AGAIN_S if service.backends else None)
            tried.clear()
        if tried:
            raise Refused(502, "no replica could answer", "server_error", "no_replica", 1)
        raise Refused(503, f"{service.name} has no replica that is ready", "server_error", "no_replica", 10)

    async def _hold(self, request: Incoming, service: RoutedService, until: float, at_most: float | None) -> None:
        """Wait for another table, until a time (or for `at_most` seconds)."""
        if self.held >= MOST_HELD:
            raise Refused(503, "too many requests wait for a first replica", "server_error", "no_replica", 10)
        now = time.monotonic()
        left, meter = until - now, self._loads.of(service.name, now)
        self.held += 1
        meter.held(1)
        try:
            with self._metrics.held.labels(service.name).track_inprogress():
                waits = [asyncio.ensure_future(one.wait()) for one in (self._changed, request.connection.left)]
                try:
                    await asyncio.wait(
                        waits,
                        timeout=left if at_most is None else min(left, at_most),
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    for one in waits:
                        one.cancel()
        finally:
            self.held -= 1
            meter.held(-1)
        if request.connection.left.is_set():
            raise ClientLeft

    # one request on one replica, or two

    async def _round(self, request: Incoming, routed: Routed, backend: Backend, tried: set[str]) -> Relay | None:
        """A try on a replica, and perhaps on a second; None: nothing was sent to the client, and another may be tried."""
        race = Race(request)
        try:
            if self._hedge_s is None or not routed.may_repeat(request.method):
                return await self._attempt(race, routed, backend, tried)
            return await self._hedged(race, routed, backend, tried, self._hedge_s)
        finally:
            race.end()

    async def _hedged(
        self, race: Race, routed: Routed, backend: Backend, tried: set[str], hedge_s: float
    ) -> Relay | None:
        tries = {asyncio.ensure_future(self._attempt(race, routed, backend, tried))}
        try:
            done, _ = await asyncio.wait(tries, timeout=hedge_s)
            service = self.routes.by_name.get(routed.service.name, routed.service)
            if not done and race.winner is None:
                other = self.balancer.choose(service.name, service.backends, (), time.monotonic(), tried)
                if other is not None:
                    tried.add(other.id)
                    self._metrics.hedged(service.name)
                    tries.add(asyncio.ensure_future(self._attempt(race, routed, other, tried)))
            for next_one in asyncio.as_completed(tries):
                relay = await next_one
                if relay is not None:
                    return relay
            return None
        finally:
            for one in tries:
                one.cancel()
            await asyncio.gather(*tries, return_exceptions=True)

    async def _attempt(self, race: Race, routed: Routed, backend: Backend, tried: set[str]) -> Relay | None:
        """One try on one replica."""
        request = race.request
        repeatable = routed.may_repeat(request.method)
        more = any(one.id not in tried for one in routed.service.backends)
        streamed = routed.question is not None and routed.question.stream
        self.balancer.begun(routed.service.name, backend, routed.tokens, routed.beginnings)
        meter = self._loads.of(routed.service.name, time.monotonic())
        meter.with_replica(backend.id, 1)
        try:
            for fresh in (not repeatable, True):  # the replica may have closed a connection that waited
                try:
                    connection, reused = await self.pool.connect(backend, fresh=fresh)
                except (OSError, TimeoutError, ValueError):
                    self._failed(routed, backend)
                    return None
                if race.winner is not None:
                    self.pool.give_back(connection)
                    return None
                usage = openai.UsageReader(streamed) if routed.question is not None else None
                translated = tgi.TgiAnswer(routed.translation) if routed.translation is not None else None
                relay = Relay(
                    race, may_retry=repeatable and more, repeatable=repeatable, usage=usage, translated=translated
                )
                outcome = await self._exchange(request, routed, connection, relay)
                if not (outcome is RelayOutcome.LOST and reused and not connection.answered):
                    break
            return self._judge(outcome, relay, routed, backend)
        finally:
            self.balancer.ended(backend.id, routed.tokens)
            meter.with_replica(backend.id, -1)

    def _failed(self, routed: Routed, backend: Backend) -> None:
        now = time.monotonic()
        self.balancer.failed(backend.id, now)
        self._loads.of(routed.service.name, now).replica_failed(backend.id)

    def _judge(self, outcome: RelayOutcome, relay: Relay, routed: Routed, backend: Backend) -> Relay | None:
        if outcome is RelayOutcome.LEFT:
            return relay
        if outcome in (RelayOutcome.LOST, RelayOutcome.NOT_NOW, RelayOutcome.BROKEN):
            self._failed(routed, backend)
        elif relay.status < 500 and outcome is not RelayOutcome.OUTRUN:
            self.balancer.succeeded(backend.id)
        if outcome is RelayOutcome.LOST and not routed.may_repeat(relay.request.method):
            raise Refused(502, f"the replica broke off: {relay.why}", "server_error", "replica_lost")
        return None if outcome in (RelayOutcome.LOST, RelayOutcome.NOT_NOW, RelayOutcome.OUTRUN) else relay

    async def _exchange(
        self, request: Incoming, routed: Routed, connection: ReplicaConnection, relay: Relay
    ) -> RelayOutcome:
        body = routed.body
        headers = request.headers
        head = wire.request_head(
            request.method,
            routed.target,
            headers if routed.translation is None else routed.translation.request_headers(headers),
            client=request.connection.address,
            scheme=request.connection.scheme,
            length=len(body) if body is not None else request.length,
            authorization=not routed.service.auth,
            upgrade=request.upgrade,
        )
        relay.began(connection)
        if relay.outcome.done():
            return relay.outcome.result()
        connection.send(relay, head + (body or b""), bodiless=request.method == b"HEAD")
        try:
            if body is None and not request.upgrade:
                await self._send_body(request, connection, relay)
            while not relay.outcome.done():
                left = relay.last_byte + ANSWER_S - time.monotonic()
                await asyncio.wait([relay.outcome], timeout=left)
                if not relay.outcome.done() and time.monotonic() >= relay.last_byte + ANSWER_S:
                    connection.abandon()
                    relay.on_lost(f"nothing came for {ANSWER_S:g} s")
            outcome = relay.outcome.result()
            if outcome is RelayOutcome.TUNNELLED:  # under way for as long as both sides hold it
                await request.connection.left.wait()
                connection.abandon()
            return outcome
        except BaseException:
            connection.abandon()
            raise

    async def _send_body(self, request: Incoming, connection: ReplicaConnection, relay: Relay) -> None:
        """A body passed on as it comes; an answer may come before its end."""
        chunked = request.length is None
        while not relay.outcome.done():
            data = await request.part()
            if not data:
                break
            await connection.send_part(wire.chunk(data) if chunked else data)
        if chunked:
            await connection.send_part(wire.LAST_CHUNK)
