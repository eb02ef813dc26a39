"""From a request to a replica: who asks, which service is meant, which replica answers, and what to do when it does not.

1. `/v1/models` is answered here. A request of the OpenAI API names a model, and that names a service; every service also has its
   own path, `/services/NAME/…`, and host names.
2. The caller's key, its limits and its budget are checked before anything is sent on.
3. A service without a replica holds the request for as long as it says, since its first replica may be starting.
4. A replica that fails before the first byte of its answer is left for another one. What was sent cannot be taken back, so requests
   that may change something are sent again only when they name a model (asking twice is harmless) or were never sent.
"""

import asyncio
import time
from collections.abc import Callable

import msgspec

from podway.gateway import openai, table, wire
from podway.gateway.balance import Balancer, prefixes
from podway.gateway.connection import ClientLeft, Incoming, TooLarge
from podway.gateway.limits import Budgets, RateLimiter, seconds_to_midnight
from podway.gateway.metrics import GatewayMetrics
from podway.gateway.relay import Relay, RelayOutcome
from podway.gateway.table import ApiKey, Backend, RoutedService, Routes, RouteTable
from podway.gateway.upstream import ReplicaConnection, ReplicaPool

LARGEST_QUESTION = 32 << 20  # of a request that names a model: it is read whole to find the name
KEPT_TO_RETRY = 1 << 20  # of any other request
ANSWER_S = 900.0  # without a byte from the replica
MOST_HELD = 1000  # requests that wait for first replicas
_SAFE = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"TRACE"})
_SERVICES = b"/services/"


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

    @property
    def tokens(self) -> int:
        """How much work it is, about."""
        return self.question.tokens if self.question else 1

    def may_repeat(self, method: bytes) -> bool:
        """Whether it can be sent a second time."""
        return self.body is not None and (self.question is not None or method in _SAFE)


class Gateway:
    """Everything between clients and replicas."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.routes = Routes()
        self.balancer = Balancer()
        self.pool = ReplicaPool()
        self.metrics = GatewayMetrics()
        self.budgets = Budgets()
        self.usage: dict[tuple[str, str, str], list[int]] = {}  # (user, service, day) -> requests, prompt, completion
        self.ready = True
        self._buckets = RateLimiter()
        self._clock = clock
        self._held = 0
        self._changed = asyncio.Event()

    def update(self, new: RouteTable) -> None:
        """Use another table from now on; requests under way end as they began."""
        self.routes = Routes(new)
        backends = [one for service in new.services for one in service.backends]
        self.balancer.keep({one.id for one in backends})
        self.pool.keep({one.address for one in backends})
        self._changed.set()
        self._changed = asyncio.Event()

    async def handle(self, request: Incoming) -> None:
        """Answer one request."""
        try:
            if await self._own(request):
                return
            routed = await self._route(request)
            await self._forward(request, routed)
        except Refused as error:
            after = ((b"retry-after", b"%d" % max(1, round(error.retry_after))),) if error.retry_after else ()
            body = openai.error_body(error.message, error.kind, error.code)
            request.connection.answer(error.status, body, request, extra=after)
        except TooLarge:
            body = openai.error_body("the body is too large", "invalid_request_error", "body_too_large")
            request.connection.answer(413, body, request)

    async def _own(self, request: Incoming) -> bool:
        """What the gateway answers itself."""
        path = request.path
        connection = request.connection
        if path == b"/health":
            status = 200 if self.ready else 503
            connection.answer(status, b"ok\n" if self.ready else b"stopping\n", request, kind=b"text/plain")
        elif path == b"/metrics":
            connection.answer(200, self.metrics.text(), request, kind=b"text/plain; version=0.0.4; charset=utf-8")
        elif path == b"/v1/models":
            key = self._key(request)
            models = openai.model_list(list(self.routes.models(key)))
            connection.answer(200, models, request)
        elif path.startswith(b"/v1/models/"):
            name = path.removeprefix(b"/v1/models/").decode("utf-8", "replace")
            service = self._service_of_model(name)
            self._admit(service, self._key(request), request)
            connection.answer(200, openai.one_model(service), request)
        else:
            return False
        return True

    # who, and which service

    def _key(self, request: Incoming) -> ApiKey | None:
        text = (request.header(b"authorization") or b"").decode("latin-1")
        scheme, _, token = text.partition(" ")
        if scheme.lower() != "bearer":
            token = (request.header(b"x-api-key") or b"").decode("latin-1")
        return self.routes.key(token.strip()) if token else None

    async def _route(self, request: Incoming) -> Routed:
        key, path = self._key(request), request.path
        host = (request.header(b"host") or b"").rpartition(b":")[0] or request.header(b"host") or b""
        by_host = self.routes.by_host.get(host.decode("latin-1").lower())
        if by_host is not None:
            return await self._to_service(request, by_host, key, request.target)
        if path.startswith(_SERVICES):
            name, slash, rest = request.target.removeprefix(_SERVICES).partition(b"/")
            service = self.routes.by_name.get(name.partition(b"?")[0].decode("utf-8", "replace"))
            if service is None:
                raise Refused(404, "there is no such service", "invalid_request_error", "service_not_found")
            return await self._to_service(
                request, service, key, slash + rest if service.strip_prefix else request.target
            )
        if path in openai.PATHS and request.method == b"POST":
            return await self._to_model(request, key)
        raise Refused(404, "there is nothing at this path", "invalid_request_error", "not_found")

    async def _to_service(self, request: Incoming, service: RoutedService, key: ApiKey | None, target: bytes) -> Routed:
        self._admit(service, key, request)
        small = request.length is not None and request.length <= KEPT_TO_RETRY and not request.upgrade
        body = await request.body(KEPT_TO_RETRY) if small else None
        return Routed(service=service, key=key, target=target if target.startswith(b"/") else b"/" + target, body=body)

    async def _to_model(self, request: Incoming, key: ApiKey | None) -> Routed:
        if key is None and not any(not one.auth for one in self.routes.by_model.values()):
            raise _no_key()  # before a large body is read
        body = await request.body(LARGEST_QUESTION)
        question = openai.read_question(body)
        if isinstance(question, str):
            raise Refused(400, question, "invalid_request_error", "invalid_body")
        service = self._service_of_model(question.model)
        self._admit(service, key, request)
        target = service.model_prefix.encode().rstrip(b"/") + request.target.removeprefix(b"/v1")
        beginnings = tuple(prefixes(question.beginning)) if len(service.backends) > 1 else ()
        return Routed(service=service, key=key, target=target, body=body, question=question, beginnings=beginnings)

    def _service_of_model(self, name: str) -> RoutedService:
        service = self.routes.by_model.get(name)
        if service is None:
            raise Refused(404, f"the model {name!r} does not exist", "invalid_request_error", "model_not_found")
        return service

    def _admit(self, service: RoutedService, key: ApiKey | None, request: Incoming) -> None:
        """Refuse who may not, and who asks for too much."""
        why = table.refusal(service, key)
        if why == "no-key":
            raise _no_key()
        if why is not None:
            raise Refused(403, "this key may not use this service", "invalid_request_error", "service_forbidden")
        now = self._clock()
        if key is not None and key.requests_per_minute:
            rate = key.requests_per_minute / 60
            self._take(("key", key.user), rate, max(1.0, key.requests_per_minute / 6), now)
        if (
            key is not None
            and key.tokens_per_day is not None
            and not self.budgets.left(key.user, key.tokens_per_day, now)
        ):
            wait = seconds_to_midnight(now)
            raise Refused(429, "today's budget of tokens is used up", "insufficient_quota", "budget_exceeded", wait)
        for number, limit in enumerate(service.limits):
            if request.path.startswith(limit.prefix.encode()):
                value = request.header(limit.header.lower().encode()) if limit.header else None
                who = value.decode("latin-1") if value is not None else request.connection.address
                self._take((service.name, str(number), who), limit.rps, 1.0 + limit.burst, now)

    def _take(self, name: tuple[str, ...], rate: float, size: float, now: float) -> None:
        wait = self._buckets.take(name, rate, size, now)
        if wait:
            raise Refused(429, "too many requests", "rate_limit_error", "rate_limit_exceeded", min(wait, 3600.0))

    # to a replica

    async def _forward(self, request: Incoming, routed: Routed) -> None:
        name = routed.service.name
        tried: set[str] = set()
        in_flight = self.metrics.in_flight.labels(name)
        in_flight.inc()
        try:
            while True:
                backend = await self._backend(request, routed, tried)
                tried.add(backend.id)
                relay = await self._attempt(request, routed, backend, tried)
                if relay is not None:
                    self._account(request, routed, relay)
                    return
                self.metrics.retried(name)
        finally:
            in_flight.dec()

    async def _backend(self, request: Incoming, routed: Routed, tried: set[str]) -> Backend:
        """A replica that was not tried yet; waits for a first one where the service says so."""
        service = self.routes.by_name.get(routed.service.name, routed.service)
        if not service.backends and not tried:
            service = await self._hold(request, service)
        backend = self.balancer.choose(service.name, service.backends, routed.beginnings, self._clock(), tried)
        if backend is not None:
            return backend
        if tried:
            raise Refused(502, "no replica could answer", "server_error", "no_replica", 1)
        raise Refused(503, f"{service.name} has no replica that is ready", "server_error", "no_replica", 10)

    async def _hold(self, request: Incoming, service: RoutedService) -> RoutedService:
        until = time.monotonic() + service.hold_s
        if service.hold_s and self._held >= MOST_HELD:
            raise Refused(503, "too many requests wait for a first replica", "server_error", "no_replica", 10)
        self._held += 1
        held = self.metrics.held.labels(service.name)
        held.inc()
        try:
            while not service.backends and (left := until - time.monotonic()) > 0:
                waits = [asyncio.ensure_future(one.wait()) for one in (self._changed, request.connection.left)]
                await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for one in waits:
                    one.cancel()
                if request.connection.left.is_set():
                    raise ClientLeft
                service = self.routes.by_name.get(service.name, msgspec.structs.replace(service, hold_s=0.0))
                if not service.hold_s:
                    break
        finally:
            self._held -= 1
            held.dec()
        return service

    async def _attempt(self, request: Incoming, routed: Routed, backend: Backend, tried: set[str]) -> Relay | None:
        """One try on one replica; None: nothing was sent to the client, and another one may be tried."""
        repeatable = routed.may_repeat(request.method)
        more = any(one.id not in tried for one in routed.service.backends)
        streamed = routed.question is not None and routed.question.stream
        usage = openai.UsageReader(streamed) if routed.question is not None else None
        self.balancer.begun(routed.service.name, backend, routed.tokens, routed.beginnings)
        try:
            for fresh in (
                not repeatable,
                True,
            ):  # a connection that waited may have been closed by the replica meanwhile
                try:
                    connection, reused = await self.pool.connect(backend.address, fresh=fresh)
                except (OSError, TimeoutError):
                    self.balancer.failed(backend.id, self._clock())
                    return None
                relay = Relay(request, may_retry=repeatable and more, usage=usage)
                outcome = await self._exchange(request, routed, connection, relay)
                if not (outcome is RelayOutcome.LOST and reused and not connection.answered):
                    break
            return self._judge(outcome, relay, backend, repeatable)
        finally:
            self.balancer.ended(backend.id, routed.tokens)

    def _judge(self, outcome: RelayOutcome, relay: Relay, backend: Backend, repeatable: bool) -> Relay | None:
        if outcome is RelayOutcome.LEFT:
            return relay
        if outcome in (RelayOutcome.LOST, RelayOutcome.NOT_NOW, RelayOutcome.BROKEN):
            self.balancer.failed(backend.id, self._clock())
        elif relay.status < 500:
            self.balancer.succeeded(backend.id)
        if outcome is RelayOutcome.LOST and not repeatable:
            raise Refused(502, f"the replica broke off: {relay.why}", "server_error", "replica_lost")
        return None if outcome in (RelayOutcome.LOST, RelayOutcome.NOT_NOW) else relay

    async def _exchange(
        self, request: Incoming, routed: Routed, connection: ReplicaConnection, relay: Relay
    ) -> RelayOutcome:
        body = routed.body
        head = wire.request_head(
            request.method,
            routed.target,
            request.headers,
            client=request.connection.address,
            scheme=request.connection.scheme,
            length=len(body) if body is not None else request.length,
            authorization=not routed.service.auth,
            upgrade=request.upgrade,
        )
        relay.began(connection)
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
            return relay.outcome.result()
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
            await connection.write(wire.chunk(data) if chunked else data)
        if chunked:
            await connection.write(wire.LAST_CHUNK)

    def _account(self, request: Incoming, routed: Routed, relay: Relay) -> None:
        now = time.monotonic()
        first = None if relay.first_byte is None else relay.first_byte - request.begun
        name = routed.service.name
        self.metrics.answered(name, relay.status or 499, first, now - request.begun)
        if relay.usage is None or routed.question is None or relay.status >= 400:
            return
        used = relay.usage.usage(routed.question)
        user = routed.key.user if routed.key else "-"
        self.metrics.used(name, user, used.prompt, used.completion)
        self.budgets.spend(user, used.prompt + used.completion, self._clock())
        day = time.strftime("%Y-%m-%d", time.gmtime(self._clock()))
        row = self.usage.setdefault((user, name, day), [0, 0, 0])
        for index, amount in enumerate((1, used.prompt, used.completion)):
            row[index] += amount


def _no_key() -> Refused:
    return Refused(401, "a valid API key is required", "invalid_request_error", "invalid_api_key")
