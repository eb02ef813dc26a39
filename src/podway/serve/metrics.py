"""Counters, gauges and histograms, and their text for Prometheus. Written by the loop, read by the server."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Number:
    """A counter or a gauge; labels make one number of each kind."""

    def __init__(self, name: str, kind: str, text: str) -> None:
        self.name, self.kind, self.text = name, kind, text
        self._values: defaultdict[tuple[tuple[str, str], ...], float] = defaultdict(float)

    def inc(self, amount: float = 1, **labels: str) -> None:
        self._values[tuple(labels.items())] += amount

    def set(self, value: float) -> None:
        self._values[()] = value

    def value(self, **labels: str) -> float:
        return self._values.get(tuple(labels.items()), 0.0)

    def add(self, other: "Number") -> None:
        for labels, value in list(other._values.items()):
            self._values[labels] += value

    def lines(self) -> list[str]:
        out = []
        for labels, value in list(self._values.items()) or [((), 0.0)]:
            shown = "{" + ",".join(f'{k}="{v}"' for k, v in labels) + "}" if labels else ""
            out.append(f"{self.name}{shown} {value:g}")
        return out


class Histogram:
    """How often a value lay below each bound."""

    kind = "histogram"

    def __init__(self, name: str, text: str, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def add(self, other: "Histogram") -> None:
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    def lines(self) -> list[str]:
        out, below = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], list(self._counts), strict=True):
            below += count
            out.append(f'{self.name}_bucket{{le="{bound}"}} {below}')
        return [*out, f"{self.name}_sum {self._sum:g}", f"{self.name}_count {below}"]


class Metrics:
    """All that the server tells of itself."""

    def __init__(self) -> None:
        self.waiting = Number("podway_requests_waiting", "gauge", "requests in the queue")
        self.running = Number("podway_requests_running", "gauge", "requests in slots")
        self.finished = Number("podway_requests_total", "counter", "requests that ended, by reason")
        self.preemptions = Number("podway_preemptions_total", "counter", "requests put back for want of pages")
        self.prompt_tokens = Number("podway_prompt_tokens_total", "counter", "tokens of prompts computed")
        self.answer_tokens = Number("podway_answer_tokens_total", "counter", "tokens generated")
        self.steps = Number("podway_steps_total", "counter", "steps of the engine, by kind")
        self.pages_held = Number("podway_pages_held", "gauge", "pages of the cache that requests hold")
        self.pages_free = Number("podway_pages_free", "gauge", "pages that can be taken")
        self.queue_seconds = Histogram("podway_queue_seconds", "from arrival to a slot")
        self.first_token_seconds = Histogram("podway_time_to_first_token_seconds", "from arrival to the first token")
        self.request_seconds = Histogram("podway_request_seconds", "from arrival to the end")

    @staticmethod
    def sum(parts: Sequence["Metrics"]) -> "Metrics":
        """Of several replicas together."""
        whole = Metrics()
        for part in parts:
            for name, one in vars(whole).items():
                one.add(getattr(part, name))
        return whole

    def text(self) -> str:
        """The page that Prometheus reads."""
        out: list[str] = []
        for one in vars(self).values():
            out += [f"# HELP {one.name} {one.text}", f"# TYPE {one.name} {one.kind}", *one.lines()]
        return "\n".join(out) + "\n"
