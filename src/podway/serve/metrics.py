"""What the server counts of itself, and its page for Prometheus. Written by the loop, read by the server (no jax).

Names, labels and meanings are vLLM's, so that dashboards and autoscalers made for it work here; what vLLM does not count has names
that begin with `podway_`. A replica counts without labels; the page adds the model's name and sums over the replicas.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6)
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Number:
    """A counter or a gauge; the values of its label, where it has one, are counted apart."""

    def __init__(
        self, name: str, kind: type[CounterMetricFamily] | type[GaugeMetricFamily], text: str, label: str = ""
    ) -> None:
        self.name, self.kind, self.text, self.label = name, kind, text, label
        self._values: Counter[str] = Counter()

    def inc(self, amount: float = 1, of: str = "") -> None:
        self._values[of] += amount  # type: ignore[assignment]

    def set(self, value: float) -> None:
        self._values[""] = value  # type: ignore[assignment]

    def value(self, of: str = "") -> float:
        return self._values.get(of, 0)

    def add(self, other: "Number") -> None:
        for of, value in list(other._values.items()):
            self._values[of] += value

    def family(self, model: str) -> Family:
        made = self.kind(self.name, self.text, labels=["model_name", *([self.label] if self.label else [])])
        for of, value in list(self._values.items()) or ([] if self.label else [("", 0)]):
            made.add_metric([model, of] if self.label else [model], value)
        return made


class Histogram:
    """How often a value lay below each bound."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self._sum += value * times

    def add(self, other: "Histogram") -> None:
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    def family(self, model: str) -> Family:
        buckets, below = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], list(self._counts), strict=True):
            below += count
            buckets.append((bound, below))
        made = HistogramMetricFamily(self.name, self.text, labels=["model_name"])
        made.add_metric([model], buckets, self._sum)
        return made


class Metrics(Collector):
    """All that the server counts."""

    def __init__(self, model: str = "") -> None:
        counter, gauge = CounterMetricFamily, GaugeMetricFamily
        self._model = model
        self.waiting = Number("vllm:num_requests_waiting", gauge, "Requests in the queue")
        self.running = Number("vllm:num_requests_running", gauge, "Requests in slots")
        self.cache_usage = Number(
            "vllm:kv_cache_usage_perc", gauge, "Share of the cache's pages that requests hold, 0 to 1"
        )
        self.finished = Number("vllm:request_success", counter, "Requests that ended, by reason", "finished_reason")
        self.preemptions = Number("vllm:num_preemptions", counter, "Requests put back for want of pages")
        self.prompt_tokens = Number("vllm:prompt_tokens", counter, "Tokens of prompts computed")
        self.answer_tokens = Number("vllm:generation_tokens", counter, "Tokens generated")
        self.cache_queries = Number("vllm:prefix_cache_queries", counter, "Tokens of prompts looked up in the cache")
        self.cache_hits = Number("vllm:prefix_cache_hits", counter, "Tokens of prompts found in the cache")
        self.queue_seconds = Histogram("vllm:request_queue_time_seconds", "From arrival to a slot")
        self.first_token_seconds = Histogram("vllm:time_to_first_token_seconds", "From arrival to the first token")
        self.token_seconds = Histogram("vllm:inter_token_latency_seconds", "From one token to the next")
        self.prefill_seconds = Histogram("vllm:request_prefill_time_seconds", "From a slot to the first token")
        self.decode_seconds = Histogram("vllm:request_decode_time_seconds", "From the first token to the end")
        self.inference_seconds = Histogram("vllm:request_inference_time_seconds", "From a slot to the end")
        self.mean_token_seconds = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Time of decoding for each token after the first, of a request",
        )
        self.request_seconds = Histogram("vllm:e2e_request_latency_seconds", "From arrival to the end")
        self.request_prompt = Histogram("vllm:request_prompt_tokens", "Tokens of the prompt of a request", _TOKENS)
        self.request_answer = Histogram("vllm:request_generation_tokens", "Tokens of the answer of a request", _TOKENS)
        self.request_limit = Histogram("vllm:request_params_max_tokens", "Tokens that an answer might have", _TOKENS)
        self.step_tokens = Histogram("vllm:iteration_tokens_total", "Tokens of prompts and rows in a step", _TOKENS)
        self.drafts = Number("vllm:spec_decode_num_drafts", counter, "Drafts of speculative decoding")
        self.draft_tokens = Number("vllm:spec_decode_num_draft_tokens", counter, "Tokens in drafts")
        self.accepted_tokens = Number(
            "vllm:spec_decode_num_accepted_tokens", counter, "Tokens of drafts that were taken"
        )
        self.steps = Number("podway_engine_steps", counter, "Steps of the engine, by kind", "kind")

    def _all(self) -> dict[str, Number | Histogram]:
        return {name: one for name, one in vars(self).items() if isinstance(one, Number | Histogram)}

    @staticmethod
    def sum(parts: Sequence["Metrics"], model: str = "") -> "Metrics":
        """Of several replicas together."""
        whole = Metrics(model)
        for part in parts:
            for name, one in whole._all().items():
                one.add(getattr(part, name))
        if parts:
            whole.cache_usage.set(whole.cache_usage.value() / len(parts))
        return whole

    def collect(self) -> Iterator[Family]:
        """For prometheus_client."""
        for one in self._all().values():
            yield one.family(self._model)

    def text(self) -> str:
        """The page that Prometheus reads."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()
