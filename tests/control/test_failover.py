"""Where to try next: by price and past success, all zones of a queue at once, each place once a round, nothing forgotten."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from podway.control import provisioning, transitions
from podway.control.failover import (
    BACKOFF_S,
    HALF_LIFE_S,
    LONGEST_BACKOFF_S,
    PlaceRecord,
    after_loss,
    backoff,
    place_of,
    ranked,
    settled,
    take,
)
from podway.control.records import Billing, Cluster, ClusterState, Exit, JobState
from podway.control.recovery import cause_of, comes_back
from podway.order import Order
from podway.providers import Observation
from podway.task.task import Recovery, Task
from tests.control.samples import ORDER, cluster, hosts, job


def order(zone: str, price: float | None = 10.0, **changes: Any) -> Order:
    region = zone.rsplit("-", 1)[0]
    return msgspec.structs.replace(ORDER, provider="gcp", zone=zone, region=region, hourly_cost=price, **changes)


A, B, C = order("us-east5-a"), order("us-east5-b"), order("us-west1-c")
ORDERS = st.builds(
    order,
    zone=st.sampled_from(["us-east5-a", "us-east5-b", "us-west1-c", "eu-west4-a"]),
    price=st.one_of(st.none(), st.floats(0.1, 100)),
    queued=st.sampled_from([None, True]),
    spot=st.booleans(),
)


class TestRanking:
    def test_the_cheapest_is_first_and_an_unknown_price_last(self) -> None:
        cheap, dear, odd = order("a-a1-a", 5.0), order("a-a1-b", 9.0), order("a-a1-c", None)
        assert ranked([[odd, dear, cheap]], {}, 0.0) == (cheap, dear, odd)

    def test_of_two_alike_the_one_that_had_some_is_first(self) -> None:
        tries = {place_of(A): PlaceRecord().plus(False, 0.0), place_of(B): PlaceRecord().plus(True, 0.0)}
        assert ranked([[A, C, B]], tries, 1.0) == (B, C, A)

    def test_a_place_that_never_has_any_costs_more_than_its_price(self) -> None:
        cheap = order("a-a1-a", 10.0)
        record = PlaceRecord()
        for _ in range(8):
            record = record.plus(False, 0.0)
        dear = order("a-a1-b", 30.0)
        assert ranked([[cheap, dear]], {place_of(cheap): record}, 0.0)[0] == dear
        assert ranked([[cheap, dear]], {place_of(cheap): record}, 10 * HALF_LIFE_S)[0] == cheap  # it is forgotten

    def test_the_task_s_own_order_of_alternatives_stands(self) -> None:
        first, second = order("a-a1-a", 99.0), order("a-a1-b", 1.0)
        assert ranked([[first], [second]], {}, 0.0) == (first, second)

    @given(st.lists(st.lists(ORDERS, max_size=4), max_size=3), st.lists(st.booleans(), max_size=10))
    def test_nothing_is_lost_or_doubled(self, groups: list[list[Order]], past: list[bool]) -> None:
        record = PlaceRecord()
        for n, good in enumerate(past):
            record = record.plus(good, float(n))
        assert 0.0 < record.chance(100.0) < 1.0
        tries = {place_of(one): record for group in groups for one in group[:1]}
        found = list(ranked(groups, tries, 1000.0))
        for group in groups:
            part, found = found[: len(group)], found[len(group) :]
            assert sorted(map(repr, part)) == sorted(map(repr, group))


class TestTaking:
    def test_one_after_another(self) -> None:
        assert take((A, B, C)) == (A, (B, C))

    def test_a_queue_is_joined_in_every_zone_of_its_kind_at_once(self) -> None:
        queued = [msgspec.structs.replace(one, queued=True) for one in (A, B, C)]
        other = order("us-east5-a", accelerator_type="v5p-8", queued=True)
        taken, left = take((*queued[:2], other, queued[2]))
        assert taken.zones == ("us-east5-a", "us-east5-b", "us-west1-c") and taken.zone == "us-east5-a"
        assert left == (other,)

    @given(st.lists(ORDERS, min_size=1, max_size=8))
    def test_a_round_ends_and_tries_every_place_once(self, orders: list[Order]) -> None:
        left: tuple[Order, ...] = tuple(orders)
        tried: list[tuple[Any, ...]] = []
        while left:
            taken, left = take(left)
            tried += [(taken.spot, taken.queued, zone) for zone in taken.zones or (taken.zone,)]
        assert {(o.spot, o.queued, o.zone) for o in orders} == set(tried)

    def test_the_zone_that_gave_the_hosts_is_the_one_that_is_paid_for(self) -> None:
        queued = [order(zone, price, queued=True) for zone, price in (("us-east5-a", 10.0), ("us-west1-c", 14.0))]
        taken, _ = take(queued)
        came = settled(taken, "us-west1-c", [queued])
        assert (came.zone, came.region, came.hourly_cost, came.zones) == ("us-west1-c", "us-west1", 14.0, taken.zones)
        assert settled(taken, None, [queued]) == taken


class TestAfterLoss:
    here = cluster(order=A)

    def test_the_same_zone_first_then_the_region(self) -> None:
        assert after_loss(self.here, False, (C, B, A)) == (A, B, C)

    def test_the_next_region_first(self) -> None:
        assert after_loss(self.here, True, (A, B, C)) == (C, B, A)


def test_rest_grows_and_is_bounded() -> None:
    assert [backoff(n) for n in range(3)] == [BACKOFF_S, 2 * BACKOFF_S, 4 * BACKOFF_S]
    assert backoff(1000) == LONGEST_BACKOFF_S


class TestRows:
    """provisioning.py: a whole life, from row to row."""

    def begin(self, **changes: Any) -> Cluster:
        search = {"left": (B,), "candidates": ((A, B),), "generation": 1, "untried": ("v6e-16 in x: no quota",)}
        return provisioning.begin_attempt(cluster(order=A, **search | changes), 0.0)

    def test_the_next_place_then_the_end(self) -> None:
        text, here = provisioning.failed(self.begin(), [], "no capacity", {}, 1.0)
        assert "Could not get v6e-16 in us-east5-a: no capacity" in text and "us-east5-b" in text
        assert here is not None and here.search.clearing
        here = provisioning.take_next(here, {}, 2.0)
        search = here.search
        assert (here.order, search.left, search.clearing, search.generation) == (B, (), False, 2)
        why, nothing = provisioning.failed(here, [], "quota is 0", {}, 3.0)
        assert nothing is None
        assert why == (
            "v6e-16 in us-east5-a: no capacity; v6e-16 in us-east5-b: quota is 0; not tried, v6e-16 in x: no quota"
        )

    def test_a_patient_one_rests_and_goes_round(self) -> None:
        for here in (self.begin(left=(), retry=True), self.begin(left=(), recovering=True)):
            text, waiting = provisioning.failed(here, [], "no capacity", {}, 100.0)
            assert waiting is not None and "again in 5 s" in text
            assert (waiting.search.not_before, waiting.search.left) == (105.0, (A, B))
        waits = job(task=Task(recovery=Recovery()))
        assert provisioning.failed(self.begin(left=()), [waits], "none", {}, 0.0)[1]

    def test_each_interval_is_billed_at_its_own_price(self) -> None:
        _, here = provisioning.up(self.begin(), Observation(condition="ready", hosts=hosts()), 100.0)
        assert (here.state, here.billing.up_since) == (ClusterState.UP, 100.0)
        _, again = provisioning.up(here, Observation(condition="ready", hosts=hosts(3)), 200.0)
        assert again.billing.up_since == 100.0  # a host came back: it was billed all along
        back = job(state=JobState.RUNNING, task=Task(recovery=Recovery(strategy="failover")))
        _, here = provisioning.lost(here, [back], "preempted", {}, 3700.0)
        assert (here.state, here.search.recovering, here.hosts) == (ClusterState.INIT, True, ())
        assert here.search.left[0] == A and here.search.attempts[-1].outcome == "lost"
        here = provisioning.take_next(here, {}, 3700.0)
        assert here.billing == Billing(billed_s=3600.0, spent=10.0)
        dear = msgspec.structs.replace(here, order=order("us-east5-b", 20.0))
        _, dear = provisioning.up(dear, Observation(condition="ready", hosts=hosts()), 4000.0)
        assert transitions.close_billing(dear, 4000.0 + 1800).spent == 20.0
        assert not dear.search.recovering


class TestCauses:
    def test_limits_and_codes(self) -> None:
        task = Task(recovery=Recovery(events=("interruption", "error"), max_restarts_on_errors=1, exit_codes=(33, 139)))
        running = job(task=task, state=JobState.RUNNING)
        assert cause_of(running, Exit(rank=0, code=1), hosts_lost=False) == "error"
        assert cause_of(running, Exit(rank=0, code=1), hosts_lost=True) == "interruption"
        assert cause_of(running, Exit(rank=0, lost=True), hosts_lost=False) == "interruption"
        assert cause_of(running, Exit(rank=0, code=33), hosts_lost=False) == "interruption"
        assert cause_of(running, Exit(rank=0, signal=11), hosts_lost=False) == "interruption"
        assert comes_back(running, "error")
        tired = job(task=task, state=JobState.RUNNING, error_restarts=1)
        assert not comes_back(tired, "error") and comes_back(tired, "interruption")
        assert not comes_back(msgspec.structs.replace(running, cancel=True), "interruption")
        assert not comes_back(msgspec.structs.replace(running, run_setup=False), "interruption")
