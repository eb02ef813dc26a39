"""A simulation of continuous batching: requests that come at random, a batch that they join and leave, steps that cost what
`engine_costs` says. It gives the throughput and the percentiles of TTFT and TPOT for a load (pure; the same seed, the same answer).

1. Requests arrive as a Poisson process. Lengths vary around the load's (uniform from half to one and a half times), unless fixed.
2. A request waits until a slot and enough cache for its whole length are free, first come first served.
3. A step gives every running request a token and takes up to `chunk` tokens of prompts that are not read yet, oldest first. A
   request's first token comes with the step that reads the last of its prompt.
4. The first fifth of the requests warms up and is not counted.
"""

from random import Random
from typing import NamedTuple

from podway.plan.engine_costs import Engine

REQUESTS = 250  # of a simulation
MOST_STEPS = 20_000


class Simulated(NamedTuple):
    """What requests saw: seconds at percentiles (50, 90, 99), tokens a second, requests that ran at once."""

    ttft: tuple[float, float, float]
    tpot: tuple[float, float, float]
    output_tokens_per_second: float
    batch: float


class _SimulatedRequest:
    __slots__ = ("arrived", "done", "ended", "first", "left", "output", "prompt")

    def __init__(self, arrived: float, prompt: int, output: int) -> None:
        self.arrived, self.prompt, self.output = arrived, prompt, output
        self.left = prompt  # tokens of it that are not read yet
        self.done = 0  # tokens it has been given
        self.first = self.ended = 0.0


def simulate(
    engine: Engine, *, rate: float, prompt: int, output: int, slots: int, kv_tokens: int, chunk: int, share: float = 1.0,
    seed: int = 1, requests: int = REQUESTS, fixed: bool = False,
) -> Simulated:  # fmt: skip
    """`share`: the part of its length that a request keeps in cache (windowed layers forget)."""
    random = Random(seed)
    waiting = _arrivals(random, rate, prompt, output, requests, fixed=fixed)
    running: list[_SimulatedRequest] = []
    ended: list[_SimulatedRequest] = []
    clock = busy = held = 0.0
    given = 0
    for _ in range(MOST_STEPS):
        while waiting and waiting[0].arrived <= clock and len(running) < slots:
            need = (waiting[0].prompt + waiting[0].output) * share
            if held + need > kv_tokens and running:
                break
            held += need
            running.append(waiting.pop(0))
        if not running:
            if not waiting:
                break
            clock = waiting[0].arrived
            continue
        before = {id(one) for one in running if one.done}
        until = waiting[0].arrived - clock if waiting and len(running) < slots else float("inf")
        seconds, tokens = _step(engine, running, chunk, share, until)
        clock += seconds
        busy += seconds * len(running)
        given += tokens
        for one in running:
            if one.done and id(one) not in before:
                one.first = clock
        for one in [one for one in running if one.done >= one.output]:
            one.ended = clock
            held -= (one.prompt + one.output) * share
            running.remove(one)
            ended.append(one)
    return _summary(ended, clock, busy, given, requests)


def _arrivals(
    random: Random, rate: float, prompt: int, output: int, requests: int, *, fixed: bool
) -> list[_SimulatedRequest]:
    now, found = 0.0, []
    for _ in range(requests):
        now += random.expovariate(rate)
        vary = (1.0, 1.0) if fixed else (random.uniform(0.5, 1.5), random.uniform(0.5, 1.5))
        found.append(_SimulatedRequest(now, max(1, round(prompt * vary[0])), max(1, round(output * vary[1]))))
    return found


def _step(
    engine: Engine, running: list[_SimulatedRequest], chunk: int, share: float, until: float
) -> tuple[float, int]:
    """One step, or as many alike as end before `until` and before a request ends: seconds, and tokens given."""
    decoding = [one for one in running if not one.left]
    context = sum(one.prompt + one.done for one in decoding) * share
    read, length, given = 0, 1, len(decoding)
    for one in running:
        taken = min(one.left, chunk - read)
        if taken:
            one.left -= taken
            read += taken
            length = max(length, one.prompt)
            if not one.left:
                one.done, given = 1, given + 1
    turns = 1
    if len(decoding) == len(running):
        alone = engine.seconds(len(decoding), context)
        turns = max(1, min(min(one.output - one.done for one in decoding), int(min(until / alone, 1e6))))
        context += turns / 2 * len(decoding) * share
        given = turns * len(decoding)
    for one in decoding:
        one.done += turns
    return turns * engine.seconds(len(decoding), context, read, length), given


def _summary(ended: list[_SimulatedRequest], clock: float, busy: float, given: int, requests: int) -> Simulated:
    counted = sorted(ended, key=lambda one: one.arrived)[requests // 5 :] or ended
    return Simulated(
        ttft=_percentiles(sorted(one.first - one.arrived for one in counted)),
        tpot=_percentiles(sorted((one.ended - one.first) / max(1, one.output - 1) for one in counted)),
        output_tokens_per_second=given / clock if clock else 0.0,
        batch=busy / clock if clock else 0.0,
    )


def _percentiles(values: list[float]) -> tuple[float, float, float]:
    if not values:
        return (float("inf"),) * 3
    at = [min(len(values) - 1, int(part * len(values))) for part in (0.50, 0.90, 0.99)]
    return values[at[0]], values[at[1]], values[at[2]]
