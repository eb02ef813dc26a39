"""Quotas as Service Usage tells them: which slices they hold back, and that nothing is held back for want of knowing."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.catalog.slices import all_slices, find_slice
from podway.providers.gcp.quota import MetricItem, Quota, read_quotas, too_little

EAST, WEST = "us-east5-b", "us-west4-a"


def metric(name: str, *limits: tuple[str, dict[str, int]]) -> MetricItem:
    """As the API writes it: {'': default, place: limit}; a limit of 0 is left out, as Google leaves it out."""
    shown = []
    for by, amounts in limits:
        buckets = [
            {**({"effectiveLimit": str(amount)} if amount else {}), **({"dimensions": {by: place}} if place else {})}
            for place, amount in amounts.items()
        ]
        shown.append({"unit": f"1/{{project}}/{{{by}}}", "quotaBuckets": buckets})
    item = {"metric": f"tpu.googleapis.com/{name}", "consumerQuotaLimits": shown}
    return msgspec.convert(item, MetricItem, strict=False)


def said(quotas: tuple[Quota, ...], name: str, slices: int = 1, spot: bool = False, zone: str = EAST) -> str:
    return too_little(quotas, find_slice(name), slices, spot, zone)


@pytest.mark.parametrize(
    ("name", "generation", "spot"),
    [
        ("tpu-v6e", "v6e", False),
        ("tpu-v6e-preemptible", "v6e", True),
        ("tpu-v5s-litepod", "v5e", False),
        ("tpu-v5s-litepod-serving-preemptible", "v5e", True),
        ("tpu-v5s-preemptible-litepod", "v5e", True),
        ("tpu-v5p", "v5p", False),
        ("tpu-v4s-preemptible-pod", "v4", True),
        ("tpu-v4", "v4", False),
        ("tpu-v2-pod", "v2", False),
        ("tpu-v3-preemptible", "v3", True),
        ("tpu-7x", "tpu7x", False),
        ("tpu7x-preemptible", "tpu7x", True),
    ],
)
def test_a_metrics_name_says_what_it_counts(name: str, generation: str, spot: bool) -> None:
    (found,) = read_quotas([metric(name)])
    assert (found.metric, found.generation, found.spot) == (name, generation, spot)


@pytest.mark.parametrize("name", ["qps/create", "default", "tpu-v9z", "queued-resources", "tpu-v60e", "v2alpha1/tpus"])
def test_other_metrics_hold_nothing_back(name: str) -> None:
    assert read_quotas([metric(name, ("zone", {"": 0}))]) == ()


def test_the_zones_own_limit_goes_before_the_default() -> None:
    quotas = read_quotas([metric("tpu-v6e", ("zone", {"": 256, EAST: 0, WEST: 8}))])
    assert said(quotas, "v6e-16") == "quota tpu-v6e is 0, and v6e-16 takes 16"
    assert said(quotas, "v6e-16", zone="us-east1-d") == ""
    assert said(quotas, "v6e-8", zone=WEST) == ""
    assert said(quotas, "v6e-8", 2, zone=WEST) == "quota tpu-v6e is 8, and 2 x v6e-8 takes 16"
    assert said(quotas, "v6e-16", spot=True) == ""  # a tariff of which nothing is known


def test_a_limit_of_the_region_holds_too() -> None:
    quotas = read_quotas([metric("tpu-v6e-preemptible", ("zone", {"": 64}), ("region", {"": -1, "us-east5": 0}))])
    assert "is 0" in said(quotas, "v6e-8", spot=True)
    assert said(quotas, "v6e-8", spot=True, zone=WEST) == ""


def test_cores_are_counted_where_the_name_counts_cores() -> None:
    quotas = read_quotas([metric("tpu-v5p", ("zone", {"": 128}))])
    assert said(quotas, "v5p-128") == "" and "takes 256" in said(quotas, "v5p-256")


def test_what_one_of_several_quotas_allows_is_tried() -> None:
    """A small v5e slice may be counted against serving or training: the cloud knows."""
    training, serving = metric("tpu-v5s-litepod", ("zone", {"": 512})), metric("tpu-v5s-litepod-serving", ("zone", {}))
    assert said(read_quotas([training, serving]), "v5litepod-8") == ""
    none = metric("tpu-v5s-litepod-serving", ("zone", {"": 4}))
    both = read_quotas([metric("tpu-v5s-litepod", ("zone", {"": 0})), none])
    assert said(both, "v5litepod-8") == "quota tpu-v5s-litepod-serving is 4, and v5litepod-8 takes 8"


@given(
    tpu=st.sampled_from(all_slices()),
    slices=st.integers(1, 64),
    limits=st.dictionaries(st.sampled_from(["", EAST, WEST]), st.integers(-1, 100_000)),
)
def test_more_is_never_allowed_where_less_is_not(tpu: Any, slices: int, limits: dict[str, int]) -> None:
    names = {"v5e": "v5s-litepod", "tpu7x": "7x"}
    quotas = read_quotas([metric(f"tpu-{names.get(tpu.generation, tpu.generation)}", ("zone", limits))])
    assert len(quotas) == 1
    less, more = (too_little(quotas, tpu, number, False, EAST) for number in (slices, slices + 1))
    limit = limits.get(EAST, limits.get("", -1))
    assert bool(less) == (0 <= limit < tpu.count * slices)
    assert not less or more
