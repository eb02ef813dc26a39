"""Failover, recovery, orphans and deletion on the emulated Google Cloud, with real hosts: what the cloud does is what is looked at."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podway.errors import UserError
from podway.sandbox.running import Running, running_sandbox
from podway.server.api import ClusterView
from podway.task.task import Accelerator, Autostop, Placement, Recovery, Resources, Task
from tests.conftest import wait_until
from tests.e2e.harness import Podway

REGION = "us-east5"
ZONES = ("us-east5-a", "us-east5-b", "us-east5-c")


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_sandbox(tmp_path_factory.mktemp("sandbox")) as running:
        yield running


@pytest.fixture
def cloud(sandbox: Running) -> Iterator[Running]:
    """The sandbox with every stock full and no fault, and nothing alive in it afterwards."""
    yield sandbox
    reset(sandbox)
    wait_until(lambda: living(sandbox) == [], 60, "an empty cloud")


def reset(cloud: Running) -> None:
    cloud.command("DELETE", "faults")
    for body in (
        {"generation": "v6e", "chips": None},
        *({"zone": z, "generation": "v6e", "chips": None} for z in ZONES),
    ):
        cloud.command("POST", "stock", body)


def stock_out(cloud: Running, *zones: str) -> None:
    for zone in zones:
        cloud.command("POST", "stock", {"zone": zone, "generation": "v6e", "chips": 0})


def living(cloud: Running) -> list[dict[str, Any]]:
    return list(cloud.command("GET", "ledger")["living"])


def start(pod: Podway, cloud: Running, tmp_path: Path, crash_at: str = "") -> None:
    # The zone that gcloud is set to comes first; here the order of the alphabet.
    pod.start(crash_at, **{**cloud.environment(tmp_path), "CLOUDSDK_COMPUTE_ZONE": ZONES[0]})


def wanted(run: str, *, tpu: str = "v6e-8", spot: bool = False, **more: Any) -> Task:
    resources = Resources(
        accelerator=Accelerator(type=tpu, queued=more.pop("queued", None)),
        placement=Placement(provider="gcp", region=REGION),
        spot="yes" if spot else "no",
    )
    return Task(run=run, resources=(resources,), **more)


def tried(view: ClusterView) -> list[tuple[str | None, str]]:
    return [(attempt.zone, attempt.outcome) for attempt in view.attempts]


def test_zones_without_capacity_are_passed_by(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    start(pod, cloud, tmp_path)
    stock_out(cloud, "us-east5-a", "us-east5-b")
    pod.client.launch(wanted("echo through"), cluster="c")
    assert pod.finished("c", 1, 90) == "SUCCEEDED"
    view = pod.client.cluster("c")
    assert tried(view) == [("us-east5-a", "failed"), ("us-east5-b", "failed"), ("us-east5-c", "up")]
    assert view.order.zone == "us-east5-c" and "no capacity" in view.attempts[0].reason.lower()
    assert any("Trying v6e-8 in us-east5-b" in event.text for event in pod.client.events("c"))
    assert {one["name"].split("/")[3] for one in living(cloud)} == {"us-east5-c"}
    pod.client.down("c")
    wait_until(lambda: pod.client.cluster("c").state == "GONE", 60)
    # What was learnt is used: the next launch begins where there was some.
    pod.client.launch(wanted("echo again"), cluster="d")
    wait_until(lambda: pod.client.cluster("d").state == "UP", 60)
    assert tried(pod.client.cluster("d")) == [("us-east5-c", "up")]
    pod.client.down("d")
    wait_until(lambda: pod.client.cluster("d").state == "GONE", 60)


def test_a_quota_that_is_too_small_is_said_before_anything_is_asked_for(
    pod: Podway, cloud: Running, tmp_path: Path
) -> None:
    start(pod, cloud, tmp_path)
    cloud.command("POST", "quota", {"limit": 8})
    try:
        with pytest.raises(UserError) as said:
            pod.client.launch(wanted("echo never", tpu="v6e-16"), cluster="c")
    finally:
        cloud.command("POST", "quota", {"limit": None})
    assert f"v6e-16 in {', '.join(ZONES)}: quota tpu-v6e is 8, and v6e-16 takes 16" in str(said.value)
    assert pod.client.clusters() == [] and living(cloud) == []


@pytest.mark.soak
def test_when_nothing_is_left_each_zone_is_named(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    start(pod, cloud, tmp_path)
    stock_out(cloud, *ZONES)
    pod.client.launch(wanted("echo never"), cluster="c")
    assert pod.finished("c", 1, 90) == "FAILED_NO_RESOURCE"
    reason = pod.client.job("c", 1).reason
    assert all(f"v6e-8 in {zone}: " in reason for zone in ZONES), reason
    wait_until(lambda: pod.client.cluster("c").state == "GONE", 60)
    assert pod.client.cluster("c").cost == 0.0


@pytest.mark.soak
def test_retry_until_up_goes_round_again(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    start(pod, cloud, tmp_path)
    stock_out(cloud, *ZONES)
    pod.client.launch(wanted("echo at last"), cluster="c", retry_until_up=True)
    wait_until(lambda: any("again in 5 s" in event.text for event in pod.client.events("c")), 60, "a whole round")
    reset(cloud)
    assert pod.finished("c", 1, 90) == "SUCCEEDED"
    assert len(pod.client.cluster("c").attempts) == 4
    pod.client.down("c")
    wait_until(lambda: pod.client.cluster("c").state == "GONE", 60)


@pytest.mark.soak
def test_a_launch_that_waits_can_be_cancelled_and_taken_down(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    start(pod, cloud, tmp_path)
    stock_out(cloud, *ZONES)
    pod.client.launch(wanted("echo never"), cluster="c", retry_until_up=True)
    wait_until(lambda: any("again in 5 s" in event.text for event in pod.client.events("c")), 60, "a whole round")
    pod.client.cancel("c")
    assert pod.finished("c", 1, 20) == "CANCELLED"
    pod.client.down("c")
    wait_until(lambda: pod.client.cluster("c").state == "GONE", 60)


@pytest.mark.long
def test_several_zones_are_queued_in_at_once(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    start(pod, cloud, tmp_path)
    stock_out(cloud, "us-east5-a", "us-east5-c")
    pod.client.launch(wanted("echo through", queued=True), cluster="c", valid_until_s=3600.0)
    assert pod.finished("c", 1, 90) == "SUCCEEDED"
    view = pod.client.cluster("c")
    assert (view.order.zone, view.order.zones) == ("us-east5-b", ZONES)
    wait_until(lambda: {one["name"].split("/")[3] for one in living(cloud)} == {"us-east5-b"}, 30, "the others' end")
    pod.client.down("c")
    wait_until(lambda: pod.client.cluster("c").state == "GONE", 60)


def test_a_preempted_job_recovers_elsewhere(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    start(pod, cloud, tmp_path)
    # The first attempt does not end by itself, however long its loss takes to be noticed.
    run = "for i in 1 2 3 4; do echo $PODWAY_ATTEMPT step $i; done; [ $PODWAY_ATTEMPT = 2 ] || sleep 1000"
    pod.client.launch(wanted(run, spot=True, recovery=Recovery()), cluster="c")
    wait_until(lambda: "1 step 3" in pod.log_text("c", 1, follow=False), 90, "output")
    first = pod.client.cluster("c").order.zone
    wait_until(lambda: any(pod.home.glob("logs/*/1/0.run")), 20, "a copy of the output")
    node = next(one for one in living(cloud) if one["kind"] == "node")
    stock_out(cloud, first or "")  # before the loss, or the same zone may be had again first
    cloud.command("POST", "preempt", {"node": node["name"]})
    assert pod.finished("c", 1, 120) == "SUCCEEDED"
    text = pod.log_text("c", 1)
    assert "1 step 1" in text and "2 step 4" in text
    view = pod.client.cluster("c")
    assert view.order.zone != first and view.attempts[0].outcome == "lost"
    assert (view.cost or 0) > 0 and view.billed_s > 0
    pod.client.down("c")
    wait_until(lambda: pod.client.cluster("c").state == "GONE", 60)
    closed = pod.client.cluster("c")
    assert closed.cost is not None and closed.cost >= (view.cost or 0)


@pytest.mark.soak
def test_a_host_that_is_cut_off_is_an_interruption(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    """The cloud says that all is well, and three of four hosts answer: after a minute the fourth counts as lost."""
    start(pod, cloud, tmp_path)
    run = "[ $PODWAY_ATTEMPT = 2 ] && echo made anew && exit; echo begun; sleep 1000"
    pod.client.launch(wanted(run, tpu="v6e-16", recovery=Recovery(strategy="failover")), cluster="c")
    wait_until(lambda: pod.log_text("c", 1, follow=False).count("begun") == 4, 90, "output of all hosts")
    node = next(one for one in living(cloud) if one["kind"] == "node")
    cloud.command("POST", "partition", {"node": node["name"], "workers": [2]})
    assert pod.finished("c", 1, 240) == "SUCCEEDED"
    view = pod.client.cluster("c")
    assert [attempt.outcome for attempt in view.attempts] == ["lost", "up"]
    assert view.attempts[0].zone == view.attempts[1].zone  # FAILOVER: the same zone first
    text = pod.log_text("c", 1)
    assert text.count("made anew") == 4 and text.count("begun") == 4
    pod.client.down("c")
    wait_until(lambda: pod.client.cluster("c").state == "GONE", 60)


def test_what_no_row_knows_is_found_and_purged(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    start(pod, cloud, tmp_path)
    pod.client.launch(wanted("echo through"), cluster="c")
    assert pod.finished("c", 1, 90) == "SUCCEEDED"
    assert pod.client.orphans().orphans == []
    pod.kill_server()
    for file in pod.home.glob("podway.db*"):
        file.unlink()  # all that Podway knew is lost
    start(pod, cloud, tmp_path)
    found = pod.client.orphans()
    assert found.orphans and {one.cluster for one in found.orphans} == {"c"} and found.unreachable == {}
    assert pod.client.overview().orphans == len(found.orphans)
    assert pod.client.purge().orphans == []
    assert living(cloud) == []


@pytest.mark.long
def test_a_deletion_that_fails_is_told_and_goes_on(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    start(pod, cloud, tmp_path)
    pod.client.launch(wanted("echo through"), cluster="c")
    assert pod.finished("c", 1, 90) == "SUCCEEDED"
    fault = {"kind": "error", "service": "tpu", "method": "Delete*", "status": "PERMISSION_DENIED", "message": "no, no"}
    cloud.command("POST", "faults", fault)
    pod.client.down("c")
    told = lambda: [event.text for event in pod.client.events("c") if event.kind == "error"]  # noqa: E731
    wait_until(lambda: any("no, no" in text for text in told()), 30, "the provider's error")
    assert pod.client.cluster("c").state == "TERMINATING" and living(cloud)
    cloud.command("DELETE", "faults")
    wait_until(lambda: pod.client.cluster("c").state == "GONE", 60)


@pytest.mark.parametrize("spot", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["queued", "node"])
def test_the_head_takes_an_idle_cluster_down_when_the_server_is_gone(
    pod: Podway, cloud: Running, tmp_path: Path, spot: bool
) -> None:
    start(pod, cloud, tmp_path)
    pod.client.launch(wanted("echo through", spot=spot), cluster="c", autostop=Autostop(idle_minutes=0.3, down=True))
    assert pod.finished("c", 1, 90) == "SUCCEEDED"
    # From the moment that the promise is shown it holds, without the server.
    wait_until(lambda: pod.client.cluster("c").autostop_armed, 60, "the head host's promise")
    pod.kill_server()
    made = living(cloud)
    assert made
    wait_until(lambda: living(cloud) == [], 90, "the end of the cluster by its own hand")
    start(pod, cloud, tmp_path)
    wait_until(lambda: pod.client.clusters() == [], 60, "the end of its row")
    if not spot:  # spot hosts that are gone may as well have been preempted
        assert "head host" in pod.client.cluster("c").reason


@pytest.mark.soak
@pytest.mark.parametrize("point", ["failover.marked", "again.before-clear", "again.after-clear", "again.marked"])
def test_killed_while_failing_over(pod: Podway, cloud: Running, tmp_path: Path, point: str) -> None:
    start(pod, cloud, tmp_path, crash_at=point)
    stock_out(cloud, "us-east5-a")
    pod.client.launch(wanted("echo through"), cluster="c")
    wait_until(lambda: pod.child.poll() is not None, 60, "the crash")
    start(pod, cloud, tmp_path)
    assert pod.finished("c", 1, 90) == "SUCCEEDED"
    assert tried(pod.client.cluster("c"))[-1] == ("us-east5-b", "up")
    pod.client.down("c")
    wait_until(lambda: pod.client.cluster("c").state == "GONE", 60)
