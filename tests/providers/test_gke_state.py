"""What Kubernetes' objects say of a cluster: conditions, hosts, and one sentence for why it waits."""

from typing import Any

import pytest

from podway.providers import Observation
from podway.providers.gke.manifests import JOB_INDEX, NAME, POD_INDEX
from podway.providers.gke.state import STOPPED, Seen, observation, queue_place

Fields = dict[str, Any]


def jobset(**more: Any) -> Fields:
    job = {"replicas": 2, "template": {"spec": {"parallelism": 2}}}
    annotations = {NAME: "Demo"} | more.pop("annotations", {})
    return {
        "metadata": {"name": "demo-1", "annotations": annotations, **more.pop("metadata", {})},
        "spec": {"replicatedJobs": [job]},
        **more,
    }


def pod(rank: int, phase: str = "Running", *, node: str | None = "n", **status: Any) -> Fields:
    ready = {"type": "Ready", "status": "True" if phase == "Running" else "False"}
    return {
        "metadata": {"name": f"demo-1-slice-{rank}", "labels": {JOB_INDEX: str(rank // 2), POD_INDEX: str(rank % 2)}},
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": phase, "podIP": f"10.0.0.{rank}", "conditions": [ready], **status},
    }


def see(**more: Any) -> Observation:
    found = {"jobset": jobset(), **more}
    return observation(Seen(**found), "me", "/home")


ALL = tuple(pod(rank) for rank in (3, 1, 0, 2))


def test_a_ready_cluster_has_its_hosts_in_the_order_of_their_ranks() -> None:
    seen = see(pods=ALL)
    assert seen.condition == "ready"
    assert [(h.cluster, h.rank, h.slice, h.worker, h.address, h.id) for h in seen.hosts] == [
        ("Demo", rank, rank // 2, rank % 2, f"10.0.0.{rank}", f"me/Demo-{rank}") for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("seen", "condition"),
    [
        ({"jobset": None}, "absent"),
        ({"jobset": None, "pods": ALL[:1]}, "deleting"),
        ({"jobset": None, "leftovers": True}, "deleting"),
        ({"jobset": jobset(metadata={"deletionTimestamp": "now"}), "pods": ALL}, "deleting"),
        ({"jobset": jobset(annotations={STOPPED: "true"}), "pods": ALL}, "stopping"),
        ({"jobset": jobset(annotations={STOPPED: "true"})}, "stopped"),
        ({"pods": ALL[:3]}, "creating"),
        ({"pods": (*ALL[:3], ALL[0])}, "creating"),  # two pods for one rank while one is replaced
        ({"jobset": jobset(status={"conditions": [{"type": "Failed", "status": "True"}]})}, "failed"),
        ({"jobset": jobset(status={"conditions": [{"type": "Failed", "status": "False"}]}), "pods": ALL}, "ready"),
    ],
)
def test_conditions(seen: Fields, condition: str) -> None:
    assert see(**seen).condition == condition


def test_a_pod_that_failed_is_named_with_its_code() -> None:
    ended = {"terminated": {"exitCode": 127, "message": "python3 does not run\nin this image", "finishedAt": "1"}}
    late = {"terminated": {"exitCode": 137, "finishedAt": "2"}}
    pods = (
        pod(0, "Failed", containerStatuses=[{"state": late}]),
        pod(1, "Failed", containerStatuses=[{"state": ended}]),
    )
    seen = see(pods=pods)
    assert seen.condition == "failed"
    assert seen.reason == "pod demo-1-slice-1 ended with exit code 127: python3 does not run in this image"


def test_a_pod_that_the_platform_took_is_preempted() -> None:
    taken = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempting"}
    lost = pod(0, "Failed")
    lost["status"]["conditions"].append(taken)
    seen = see(pods=(lost, *ALL[:3]))
    assert (seen.condition, seen.reason) == ("preempted", "pod demo-1-slice-0: preempting")


def workload(*conditions: Fields, **status: Any) -> Fields:
    return {"spec": {"queueName": "q"}, "status": {"conditions": list(conditions), **status}}


def unscheduled(message: str) -> Fields:
    found = pod(0, "Pending", node=None)
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    found["status"]["conditions"] = [scheduled]
    return found


def event(reason: str, message: str, name: str = "demo-1-slice-0") -> Fields:
    return {"reason": reason, "message": message, "involvedObject": {"name": name}}


QUOTA = "couldn't assign flavors: insufficient unused quota for google.com/tpu in flavor v6e-4x4, 32 more needed"
PULL = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling"}}


def queued(name: str, minute: int, priority: int, **spec: Any) -> Fields:
    """A Workload that waits for quota."""
    return {
        "metadata": {"name": name, "creationTimestamp": f"2026-01-01T00:{minute:02}:00Z"},
        "spec": {"queueName": "q", "priority": priority, **spec},
        "status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": QUOTA}]},
    }


def test_the_place_in_a_queue_counts_those_alone_that_wait_in_it() -> None:
    mine = queued("me", 5, 1)
    runs = queued("runs", 1, 1) | {"status": {"conditions": [{"type": "QuotaReserved", "status": "True"}]}}
    over = queued("over", 1, 1) | {"status": {"conditions": [{"type": "Finished", "status": "True"}]}}
    stopped, other = queued("stopped", 1, 1, active=False), queued("other", 1, 1, queueName="else")
    assert queue_place(mine, (mine, runs, over, stopped, other)) == (1, 1)
    assert queue_place(mine, (queued("later", 6, 1), mine, queued("small", 1, 0), queued("before", 4, 1))) == (2, 4)
    assert queue_place(mine, ()) == (1, 1)  # nothing was read


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (
            {"workload": workload({"type": "QuotaReserved", "status": "False", "message": QUOTA})},
            f"queue q: {QUOTA}",
        ),
        ({"workload": workload()}, "queue q: Kueue has not looked at it yet"),
        (
            {
                "workload": queued("me", 2, 0),
                "workloads": (queued("me", 2, 0), queued("first", 1, 0), queued("big", 3, 9)),
            },
            f"queue q, place 3 of 3: {QUOTA}",
        ),
        (  # JobSet lets no other pod of a slice be made before the first has a node: that one says why
            {
                "pods": (unscheduled("0/8 nodes are available"),),
                "events": (event("FailedCreate", "follower pod node selector not found", "demo-1-slice-0"),),
            },
            "no node fits 1 of its pods: 0/8 nodes are available",
        ),
        (
            {
                "workload": workload(
                    {"type": "QuotaReserved", "status": "True"},
                    admissionChecks=[{"name": "dws", "state": "Pending", "message": "Waiting for resources"}],
                )
            },
            "queue q: it waits for the admission check dws: Waiting for resources",
        ),
        ({}, "JobSet's controller has made no pods yet"),
        (
            {"events": (event("FailedCreate", 'pods "x" is forbidden: exceeded quota', "demo-1-slice-0"),)},
            'pods cannot be made: pods "x" is forbidden: exceeded quota',
        ),
        (
            {"pods": (pod(0, "Pending", containerStatuses=[{"image": "i:1", "state": PULL}]), *ALL[:3])},
            "the image i:1 cannot be pulled: Back-off pulling",
        ),
        (
            {"pods": (unscheduled("0/8 nodes are available"), *ALL[:3])},
            "no node fits 1 of its pods: 0/8 nodes are available",
        ),
        (
            {
                "pods": (unscheduled("0/8"), *ALL[:3]),
                "events": (event("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 max node group size reached"),),
            },
            "the node pool is at its maximum size: pod didn't trigger scale-up: 1 max node group size reached",
        ),
        (
            {"pods": (unscheduled("0/8"), *ALL[:3]), "events": (event("TriggeredScaleUp", "pod triggered: 0->4"),)},
            "nodes are being made: pod triggered: 0->4",
        ),
        ({"pods": (pod(0, "Pending"), *ALL[1:])}, "3 of 4 pods are ready"),
    ],
)
def test_why_it_waits_is_one_sentence(seen: Fields, said: str) -> None:
    found = see(**seen)
    assert (found.condition, found.reason) == ("creating", said)


def test_an_image_that_never_comes_is_a_failure() -> None:
    never = {"waiting": {"reason": "InvalidImageName", "message": "couldn't parse image name"}}
    found = see(pods=(pod(0, "Pending", containerStatuses=[{"image": "::", "state": never}]), *ALL[1:]))
    assert (found.condition, found.reason) == ("failed", "pod demo-1-slice-0: couldn't parse image name")
