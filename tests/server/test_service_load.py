"""What gateways saw of a service, as a chart shows it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.control.service_records import LoadSample
from podway.gateway.report import LatencySummary, ServiceLoad
from podway.server.service_load import MOST_POINTS, load_points


def sample(at: float, gateway: str = "g1", **fields: object) -> LoadSample:
    return LoadSample(gateway=gateway, at=at, load=ServiceLoad(service="s", window_s=5.0, **fields))  # type: ignore[arg-type]


def test_gateways_add_up_and_the_slowest_is_told() -> None:
    fast = LatencySummary(count=3, mean=0.1, p50=0.1, p90=0.2, p99=0.3)
    slow = LatencySummary(count=1, mean=0.5, p50=0.5, p90=0.9, p99=2.0)
    seen = [
        sample(104.0, arrived=30, in_flight=2.0, waiting=1, ttft=fast),
        sample(104.5, "g2", arrived=10, in_flight=1.0, ttft=slow, tpot=fast),
    ]
    (point,) = load_points(seen, 100.0, 120.0)
    assert point.rps == pytest.approx(8.0) and point.in_flight == pytest.approx(3.0) and point.waiting == 1
    assert point.ttft is not None and (point.ttft.p50, point.ttft.p90, point.ttft.p99) == pytest.approx((0.2, 0.9, 2.0))
    assert point.queue is None and point.tpot is not None and point.tpot.p99 == pytest.approx(0.3)


@given(st.lists(st.floats(0, 5000), max_size=300))
def test_points_are_few_in_order_and_lose_nothing(times: list[float]) -> None:
    found = load_points([sample(at, arrived=1) for at in times], 1000.0, 4000.0)
    assert len(found) <= MOST_POINTS + 1
    assert [point.at for point in found] == sorted(point.at for point in found)
    assert (sum(point.rps for point in found) > 0) == any(1000.0 <= at <= 4001.0 for at in times)
