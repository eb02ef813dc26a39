"""The autoscaler: by cases, and by properties that hold for every load."""

import random

import pytest

from podway.control.autoscale import LoadView, autoscale, explain, summarize, wanted_replicas
from podway.control.service_records import LoadSample, ScalingMemory
from podway.gateway.report import LatencySummary, ServiceLoad
from podway.task.task import Scaling

RPS = Scaling(min_replicas=1, max_replicas=8, target_qps=2.0, up_delay_s=60, down_delay_s=120)


def sample(at: float, gateway: str = "g", window_s: float = 5.0, **load: object) -> LoadSample:
    return LoadSample(gateway=gateway, at=at, load=ServiceLoad(service="s", window_s=window_s, **load))  # type: ignore[arg-type]


def test_the_reports_of_all_gateways_are_one_load() -> None:
    seen = [sample(100.0 - 5 * n, arrived=10, in_flight=2.0, waiting=n == 0) for n in range(12)]
    seen += [sample(99.0 - 5 * n, "h", arrived=5, in_flight=1.0) for n in range(12)]
    found = summarize(seen, 100.0, 60.0)
    assert found is not None
    assert found.rps == pytest.approx(3.0) and found.concurrency == pytest.approx(4.0) and found.waiting == 1
    assert summarize(seen, 1000.0, 60.0) is None
    young = summarize([sample(100.0, arrived=10)], 100.0, 60.0)
    assert young is not None and young.rps == pytest.approx(2.0)  # five seconds, not sixty
    times = LatencySummary(count=3, p90=1.5)
    slow = summarize([sample(100.0, ttft=times), sample(99.0)], 100.0, 60.0)
    assert slow is not None and slow.ttft_s == 1.5


@pytest.mark.parametrize(("rps", "wanted"), [(0, 1), (0.1, 1), (2.0, 1), (2.01, 2), (7.9, 4), (100, 8)])
def test_by_requests_per_second(rps: float, wanted: int) -> None:
    assert wanted_replicas(RPS, LoadView(rps=rps), 1) == wanted


def test_other_metrics() -> None:
    busy = Scaling(min_replicas=0, max_replicas=9, metric="concurrency", target=4.0)
    assert wanted_replicas(busy, LoadView(concurrency=9.0), 1) == 3
    assert wanted_replicas(busy, LoadView(waiting=1), 0) == 1 and wanted_replicas(busy, LoadView(), 2) == 0
    slow = Scaling(min_replicas=0, max_replicas=9, metric="ttft", target=1.0)
    late = LoadView(rps=1.0, ttft_s=1.5)
    assert wanted_replicas(slow, late, 2) == 3 and wanted_replicas(slow, LoadView(rps=1.0, ttft_s=9.0), 2) == 4
    assert wanted_replicas(slow, LoadView(rps=1.0, ttft_s=1.05), 2) == 2
    assert wanted_replicas(slow, LoadView(rps=1.0, ttft_s=0.2), 2) == 1 and wanted_replicas(slow, LoadView(), 2) == 0
    queue = Scaling(min_replicas=1, max_replicas=9, metric="queue_time", target=0.5)
    assert wanted_replicas(queue, LoadView(rps=1.0, queue_s=1.0), 3) == 6
    spare = Scaling(min_replicas=0, max_replicas=9, target_qps=1.0, spare_replicas=2)
    assert wanted_replicas(spare, LoadView(rps=3.0), 1) == 5 and wanted_replicas(spare, LoadView(), 1) == 0
    typed = Scaling(min_replicas=1, max_replicas=9, target_qps_by_type={"v6e-8": 4.0, "v5litepod-8": 2.0})
    assert wanted_replicas(typed, LoadView(rps=8.0), 1, ["v6e-8"]) == 2
    assert wanted_replicas(typed, LoadView(rps=6.0), 1, ["v6e-8", "v5litepod-8"]) == 2


def test_a_spike_inside_the_delay_buys_nothing_and_a_lull_takes_nothing() -> None:
    memory = ScalingMemory(target=2)
    for second, rps in enumerate([20.0, 4.0]):  # above, then back
        memory = autoscale(memory, RPS, LoadView(rps=rps), second * 30.0)
    assert memory == ScalingMemory(target=2)
    for second in range(0, 61, 10):
        memory = autoscale(memory, RPS, LoadView(rps=16.0 if second == 20 else 6.0), float(second))
    assert memory.target == 3  # what is wanted when the delay is over, not at the peak
    for second in range(0, 121, 10):
        memory = autoscale(memory, RPS, LoadView(rps=4.0 if second == 50 else 0.0), 1000.0 + second)
    assert memory.target == 2  # what was wanted at some time, not at the end
    for second in range(130, 171, 10):
        assert memory.target == 2
        memory = autoscale(memory, RPS, LoadView(), 1000.0 + second)
    assert (
        memory.target == 2 and autoscale(memory, RPS, LoadView(), 1180.0).target == 1
    )  # 120 s after it was wanted last


def test_from_zero_at_once() -> None:
    zero = Scaling(min_replicas=0, max_replicas=3, target_qps=1.0, up_delay_s=600, down_delay_s=60)
    assert autoscale(ScalingMemory(), zero, LoadView(waiting=1), 0.0).target == 1
    assert autoscale(ScalingMemory(), zero, LoadView(rps=2.5), 0.0).target == 3
    assert autoscale(ScalingMemory(), zero, LoadView(), 0.0).target == 0


def test_without_reports_nothing_is_changed() -> None:
    waiting = ScalingMemory(target=5, falls=((1, 0.0),))
    assert autoscale(waiting, RPS, None, 1000.0) == ScalingMemory(target=5)
    assert autoscale(ScalingMemory(target=99), RPS, None, 0.0).target == 8  # but the range holds


@pytest.mark.parametrize("seed", range(60))
def test_for_every_load(seed: int) -> None:
    """Never outside the range; up never twice within the delay; down to what was wanted within its delay; more load never wants fewer."""
    rng = random.Random(seed)
    low = rng.randrange(4)
    scaling = Scaling(
        min_replicas=low,
        max_replicas=low + rng.randrange(1, 7),
        metric=rng.choice(["rps", "concurrency"]),
        target=rng.random() * 4 + 0.1,
        target_qps=rng.random() * 4 + 0.1,
        up_delay_s=rng.randrange(1, 200),
        down_delay_s=rng.randrange(1, 400),
        spare_replicas=rng.randrange(2),
    )
    memory, now = ScalingMemory(target=low), 0.0
    moved_at, level = -1e9, rng.random() * 10
    history: list[
        tuple[float, int]
    ] = []  # what was wanted at each look since the last that knew nothing or wanted more
    for _ in range(400):
        now += rng.random() * 30
        level = max(0.0, level + rng.gauss(0, 2))
        load = LoadView(rps=level, concurrency=level * 2, waiting=int(rng.random() < 0.05))
        more = LoadView(rps=level * 1.5, concurrency=level * 3, waiting=load.waiting)
        assert wanted_replicas(scaling, more, memory.target) >= wanted_replicas(scaling, load, memory.target)
        blind = rng.random() < 0.02
        wanted = wanted_replicas(scaling, load, memory.target)
        before, memory = memory, autoscale(memory, scaling, None if blind else load, now)
        assert scaling.min_replicas <= memory.target <= scaling.max_replicas
        history = [] if blind or wanted >= before.target else [*history, (now, wanted)]
        if memory.target > before.target:
            assert before.target == 0 or now - moved_at >= scaling.up_delay_s
            moved_at = now
        recent = [count for at, count in history if now - at <= scaling.down_delay_s]
        if history and now - history[0][0] >= scaling.down_delay_s:
            # At most what was wanted at the looks within the delay and the one before it; never less than was wanted since.
            whole = history[len(history) - len(recent) - 1 :] if len(history) > len(recent) else history
            assert max(recent) <= memory.target <= max(count for _, count in whole)
        else:
            assert memory.target >= before.target
        assert memory.above_since is None or not memory.falls


def test_every_move_says_why() -> None:
    rps = Scaling(min_replicas=0, max_replicas=9, target_qps=1.5, down_delay_s=60)
    assert explain(rps, LoadView(rps=4.21, concurrency=1.0), 1, 3) == (
        "wants 3 replicas in place of 1: 4.21 requests/s, target 1.5 for each replica"
    )
    assert explain(rps, LoadView(waiting=1, concurrency=1.0), 0, 1).endswith("1 request waiting")
    assert explain(rps, LoadView(), 2, 0).endswith("wants 0 replicas in place of 2: no requests for 60 s")
    at_once = Scaling(min_replicas=1, max_replicas=9, metric="concurrency", target=8)
    assert "20 requests at once, target 8" in explain(at_once, LoadView(rps=1.0, concurrency=20.0), 1, 3)
    late = Scaling(min_replicas=1, max_replicas=9, metric="ttft", target=0.5)
    assert "TTFT 1.25 s (90th percentile), target 0.5 s" in explain(late, LoadView(rps=1.0, ttft_s=1.25), 1, 2)
    assert explain(late, LoadView(rps=1.0), 12, 9).endswith("the range is 1 to 9")
    assert explain(Scaling(min_replicas=3, max_replicas=3), None, 0, 3).endswith("as set")
