"""From a request to a service: who asks, what they may do, and which service is meant; `forward.py` then finds a replica.

1. `/v1/models` is answered here. A request of the OpenAI API names a model, and that names a service; every service also has its
   own path, `/services/NAME/…`, and host names.
2. The caller's key, its limits and its budget are checked before anything is sent on.
3. A model whose server speaks TGI's API gets the request translated, and so does the answer (`tgi.py`).
4. What it took is counted when the answer is over: for metrics, for budgets, and by user, service and day.
"""

import time
from collections.abc import Callable

from podway.gateway import openai, table, tgi
from podway.gateway.balance import prefixes
from podway.gateway.connection import Incoming, TooLarge
from podway.gateway.forward import Forwarder, Refused, Routed
from podway.gateway.ledger import UsageLedger
from podway.gateway.limits import Budgets, RateLimiter, seconds_to_midnight
from podway.gateway.load import LoadMeter
from podway.gateway.metrics import GatewayMetrics
from podway.gateway.relay import Relay
from podway.gateway.served_certificates import ServedCertificates
from podway.gateway.table import ApiKey, RoutedService, Routes, RouteTable
from podway.gateway.upstream import TunnelDial

LARGEST_QUESTION = 32 << 20  # of a request that names a model: it is read whole to find the name
KEPT_TO_RETRY = 1 << 20  # of any other request
_SERVICES = b"/services/"


class Gateway:
    """Everything between clients and replicas."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        hedge_s: float | None = None,
        ledger: UsageLedger | None = None,
        dial: TunnelDial | None = None,
        certificates: ServedCertificates | None = None,
    ) -> None:
        self.metrics = GatewayMetrics()
        self.loads = LoadMeter()
        self.ledger = ledger or UsageLedger("-")
        self.forwarder = Forwarder(self.metrics, self.loads, hedge_s, dial)
        self.budgets = Budgets()
        self.certificates = certificates or ServedCertificates()
        self.ready = True
        self.has_routes = False
        self._buckets = RateLimiter()
        self._clock = clock

    @property
    def routes(self) -> Routes:
        """The table in use."""
        return self.forwarder.routes

    def update(self, new: RouteTable) -> None:
        """Use another table from now on; requests under way end as they began."""
        self.certificates.update(new.services)
        self.forwarder.update(Routes(new))
        self.has_routes = True
        now = self._clock()
        if new.day == _day(now):
            for user, tokens in new.spent.items():
                self.budgets.at_least(user, tokens + self.ledger.unreported(new.day, user), now)

    async def handle(self, request: Incoming) -> None:
        """Answer one request."""
        try:
            if await self._own(request):
                return
            routed = await self._route(request)
            self._account(request, routed, await self.forwarder.forward(request, routed))
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
            text = b"stopping\n" if not self.ready else b"ok\n" if self.has_routes else b"no routes yet\n"
            connection.answer(200 if text == b"ok\n" else 503, text, request, kind=b"text/plain")
        elif path == b"/metrics":
            self._admit_to_metrics(request)
            connection.answer(200, self.metrics.text(), request, kind=b"text/plain; version=0.0.4; charset=utf-8")
        elif path == b"/v1/models":
            key = self._key(request)
            models = openai.model_list(list(self.routes.models(key)))
            connection.answer(200, models, request)
        elif path.startswith(b"/v1/models/"):
            name = path.removeprefix(b"/v1/models/").decode("utf-8", "replace")
            service = self._service_of_model(name)
            self._admit(service, self._key(request), request, path)
            connection.answer(200, openai.one_model(service), request)
        else:
            return False
        return True

    # who, and which service

    def _admit_to_metrics(self, request: Incoming) -> None:
        """They name users: for administrators, and for programs of this machine that no proxy speaks for."""
        key = self._key(request)
        local = request.connection.is_local and request.header(b"x-forwarded-for") is None
        if not local and (key is None or not key.admin):
            raise Refused(403, "metrics need an administrator's key", "invalid_request_error", "metrics_forbidden")

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
        target = target if target.startswith(b"/") else b"/" + target
        self._admit(service, key, request, target)
        small = request.length is not None and request.length <= KEPT_TO_RETRY and not request.upgrade
        body = await request.body(KEPT_TO_RETRY) if small else None
        return Routed(service=service, key=key, target=target, body=body)

    async def _to_model(self, request: Incoming, key: ApiKey | None) -> Routed:
        if key is None and not any(not one.auth for one in self.routes.by_model.values()):
            raise _no_key()  # before a large body is read
        body = await request.body(LARGEST_QUESTION)
        question = openai.read_question(body)
        if isinstance(question, str):
            raise Refused(400, question, "invalid_request_error", "invalid_body")
        service = self._service_of_model(question.model)
        target = service.model_prefix.encode().rstrip(b"/") + request.target.removeprefix(b"/v1")
        self._admit(service, key, request, target)
        translation = None
        if service.format == "tgi" and service.chat_template:
            try:
                translation = tgi.translate(service, request.path, body)
            except tgi.NotTranslatable as error:
                raise Refused(400, str(error), "invalid_request_error", "invalid_body") from None
            target, body = translation.target, translation.body
        beginnings = tuple(prefixes(question.beginning)) if len(service.backends) > 1 else ()
        return Routed(
            service=service,
            key=key,
            target=target,
            body=body,
            question=question,
            beginnings=beginnings,
            translation=translation,
        )

    def _service_of_model(self, name: str) -> RoutedService:
        service = self.routes.by_model.get(name)
        if service is None:
            raise Refused(404, f"the model {name!r} does not exist", "invalid_request_error", "model_not_found")
        return service

    def _admit(self, service: RoutedService, key: ApiKey | None, request: Incoming, target: bytes) -> None:
        """Refuse who may not, and who asks for too much; `target`: the path as the service sees it."""
        if service.tls is not None and request.connection.scheme != b"https":
            raise Refused(403, "this service takes https only", "invalid_request_error", "https_required")
        why = table.refusal(service, key)
        if why == "no-key":
            raise _no_key()
        if why is not None:
            raise Refused(403, "this key may not use this service", "invalid_request_error", "service_forbidden")
        now, steady = self._clock(), time.monotonic()
        if key is not None and key.requests_per_minute:
            rate = key.requests_per_minute / 60
            self._take(("key", key.user), rate, max(1.0, key.requests_per_minute / 6), steady)
        if (
            key is not None
            and key.tokens_per_day is not None
            and not self.budgets.left(key.user, key.tokens_per_day, now)
        ):
            wait = seconds_to_midnight(now)
            raise Refused(429, "today's budget of tokens is used up", "insufficient_quota", "budget_exceeded", wait)
        limit = table.limit_for(service, target)
        if limit is not None:
            value = request.header(limit.header.lower().encode()) if limit.header else None
            who = value.decode("latin-1") if value is not None else request.connection.address
            self._take((service.name, limit.prefix, who), limit.rps, 1.0 + limit.burst, steady)

    def _take(self, name: tuple[str, ...], rate: float, size: float, now: float) -> None:
        wait = self._buckets.take(name, rate, size, now)
        if wait:
            raise Refused(429, "too many requests", "rate_limit_error", "rate_limit_exceeded", min(wait, 3600.0))

    def _account(self, request: Incoming, routed: Routed, relay: Relay) -> None:
        now = time.monotonic()
        first = None if relay.first_byte is None else relay.first_byte - request.begun
        name, status = routed.service.name, relay.status or 499
        self.metrics.answered(name, status, now - request.begun, first, relay.token_s)
        self.loads.of(name, now).answered(status, first, relay.token_s)
        if routed.question is None or relay.status >= 400:
            return
        used = relay.usage(routed.question)
        if used is None:
            return
        user = routed.key.user if routed.key else "-"
        self.metrics.used(name, user, used.prompt, used.completion)
        self.budgets.spend(user, used.prompt + used.completion, self._clock())
        self.ledger.add(
            _day(self._clock()), user, name, routed.question.model, prompt=used.prompt, completion=used.completion
        )


def _day(now: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(now))


def _no_key() -> Refused:
    return Refused(401, "a valid API key is required", "invalid_request_error", "invalid_api_key")
