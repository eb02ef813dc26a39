"""Changes of clusters and jobs, as pure functions."""

from podway.control import provisioning, transitions
from podway.control.records import ClusterState
from podway.providers import Observation
from tests.control.samples import cluster


def test_what_the_cloud_bills_before_the_hosts_can_be_used_counts() -> None:
    """Also of a place that never came up; and a stretch begins once."""
    creating = cluster(state=ClusterState.INIT)
    assert transitions.open_billing(creating, None) == creating
    billed = transitions.open_billing(creating, 1000.0)
    assert billed.billing.up_since == 1000.0
    assert transitions.open_billing(billed, 1005.0) == billed
    _, up = provisioning.up(billed, Observation(condition="ready", billed_since=1005.0), 1060.0)
    assert up.billing.up_since == 1000.0 and up.active_at == 1060.0
    assert transitions.close_billing(up, 1100.0).billed_s == 100.0
    _, told_late = provisioning.up(creating, Observation(condition="ready", billed_since=1005.0), 1060.0)
    assert told_late.billing.up_since == 1005.0
    _, not_told = provisioning.up(creating, Observation(condition="ready"), 1060.0)
    assert not_told.billing.up_since == 1060.0
