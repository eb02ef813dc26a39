"""What the gateway counts, in Prometheus's form."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class GatewayMetrics:
    """One set for one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        of = self._registry
        by_service = ["service"]
        self._requests = Counter(
            "podway_gateway_requests", "Requests answered, by status.", ["service", "status"], registry=of
        )
        self.in_flight = Gauge(
            "podway_gateway_in_flight", "Requests that a replica is answering.", by_service, registry=of
        )
        self.held = Gauge("podway_gateway_held", "Requests that wait for a first replica.", by_service, registry=of)
        self._retries = Counter("podway_gateway_retries", "Requests sent to another replica.", by_service, registry=of)
        self._hedges = Counter(
            "podway_gateway_hedges", "Requests sent to a second replica at once.", by_service, registry=of
        )
        self._first_byte = Histogram(
            "podway_gateway_first_byte_seconds",
            "From the request to the first byte of the answer's body.",
            by_service,
            buckets=_SECONDS,
            registry=of,
        )
        self._token = Histogram(
            "podway_gateway_token_seconds",
            "Between two tokens of a streamed answer, on average over the answer.",
            by_service,
            buckets=_TOKEN_SECONDS,
            registry=of,
        )
        self._duration = Histogram(
            "podway_gateway_duration_seconds",
            "From the request to the end of the answer.",
            by_service,
            buckets=_SECONDS,
            registry=of,
        )
        self._tokens = Counter(
            "podway_gateway_tokens", "Tokens, by what they were.", ["service", "user", "kind"], registry=of
        )

    def answered(
        self, service: str, status: int, duration_s: float, first_byte_s: float | None, token_s: float | None
    ) -> None:
        """A request is over."""
        self._requests.labels(service, str(status)).inc()
        self._duration.labels(service).observe(duration_s)
        if first_byte_s is not None:
            self._first_byte.labels(service).observe(first_byte_s)
        if token_s is not None:
            self._token.labels(service).observe(token_s)

    def retried(self, service: str) -> None:
        """A request goes to another replica."""
        self._retries.labels(service).inc()

    def hedged(self, service: str) -> None:
        """A request goes to a second replica as well."""
        self._hedges.labels(service).inc()

    def used(self, service: str, user: str, prompt: int, completion: int) -> None:
        """Tokens of an answer."""
        self._tokens.labels(service, user, "prompt").inc(prompt)
        self._tokens.labels(service, user, "completion").inc(completion)

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)
