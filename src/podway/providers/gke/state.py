"""What Kubernetes' objects say of a cluster, as an `Observation`. Pure.

`Seen` holds what was read: the JobSet, its pods, Kueue's Workload and the latest events. The condition comes from the JobSet and the
pods; why it waits, in one sentence, from whatever says most: Kueue's quota and admission checks first, then images that cannot be
pulled, volumes that cannot be mounted, the scheduler's and the autoscaler's word on pods without a node, and the events of Jobs that
could make no pods.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from podway.order import Host
from podway.providers import Condition, Observation
from podway.providers.gke.manifests import JOB_INDEX, NAME, POD_INDEX, QUEUE, SLICE

Fields = dict[str, Any]

STOPPED = "podway.dev/stopped"  # an annotation: Kueue suspends JobSets too, and starts them by itself
_PULL = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
_NEVER = {"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"}
_AT_MAXIMUM = re.compile(
    r"max (node group|node ?pool|cluster \w+) (size|limit) reached|max(imum)? node ?pool size", re.I
)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of one cluster."""

    jobset: Fields | None
    pods: tuple[Fields, ...] = ()
    workload: Fields | None = None
    workloads: tuple[Fields, ...] = ()  # of the whole namespace: who is before it in the queue
    events: tuple[Fields, ...] = ()
    leftovers: bool = False  # something else of it is still there: its ConfigMap


def observation(seen: Seen, owner: str, home: str) -> Observation:
    """The condition of the cluster, its hosts where all are ready, and else why not."""
    jobset = seen.jobset
    if jobset is None:
        return Observation(condition="deleting" if seen.pods or seen.leftovers else "absent")
    if jobset["metadata"].get("deletionTimestamp"):
        return Observation(condition="deleting")
    ended = ended_condition(jobset)
    if ended is not None:
        return _lost(seen, str(ended.get("message") or ended["type"]))
    if (jobset["metadata"].get("annotations") or {}).get(STOPPED):
        return Observation(condition="stopping" if seen.pods else "stopped")
    broken = [pod for pod in seen.pods if (pod.get("status") or {}).get("phase") == "Failed"]
    if broken:  # the JobSet will say so in a moment
        return _lost(seen, "")
    wanted = hosts_wanted(jobset)
    ready = {rank_of(pod, jobset): pod for pod in seen.pods if is_ready(pod)}
    if len(ready) < wanted or set(ready) != set(range(wanted)):
        return waiting_observation(seen, wanted, len(ready))
    hosts = tuple(_host(ready[rank], jobset, rank, owner, home) for rank in range(wanted))
    return Observation(condition="ready", hosts=hosts)


def waiting_observation(seen: Seen, wanted: int, ready: int) -> Observation:
    """Of pods that are not all there yet: they come, or no waiting helps."""
    never = _never(seen.pods)
    if never:
        return Observation(condition="failed", reason=never)
    return Observation(condition="creating", reason=why_waiting(seen, wanted, ready))


def hosts_wanted(jobset: Fields) -> int:
    """Pods of a JobSet when all are there."""
    return sum(
        int(job.get("replicas", 1)) * int(job["template"]["spec"].get("parallelism", 1))
        for job in jobset["spec"]["replicatedJobs"]
    )


def rank_of(pod: Fields, jobset: Fields) -> int:
    """Counts hosts over all slices."""
    labels = pod["metadata"].get("labels") or {}
    per_slice = int(jobset["spec"]["replicatedJobs"][0]["template"]["spec"].get("parallelism", 1))
    return int(labels.get(JOB_INDEX, 0)) * per_slice + worker_of(pod)


def worker_of(pod: Fields) -> int:
    """The host's number in its slice."""
    metadata = pod["metadata"]
    found = (metadata.get("labels") or {}).get(POD_INDEX) or (metadata.get("annotations") or {}).get(POD_INDEX) or 0
    return int(found)


def is_ready(pod: Fields) -> bool:
    """Whether its container runs, and it is not on its way out."""
    status = pod.get("status") or {}
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in status.get("conditions") or ())
    gone = pod["metadata"].get("deletionTimestamp")
    return bool(status.get("phase") == "Running" and ready and status.get("podIP") and not gone)


def _host(pod: Fields, jobset: Fields, rank: int, owner: str, home: str) -> Host:
    cluster = (jobset["metadata"].get("annotations") or {}).get(NAME) or jobset["metadata"]["name"]
    labels = pod["metadata"].get("labels") or {}
    return Host(
        cluster=cluster,
        rank=rank,
        slice=int(labels.get(JOB_INDEX, 0)),
        worker=worker_of(pod),
        address=pod["status"]["podIP"],
        home=home,
        id=f"{owner}/{cluster}-{rank}",
    )


def ended_condition(jobset: Fields) -> Fields | None:
    """The condition that ended it, of type Failed or Completed; None while it goes on."""
    for one in (jobset.get("status") or {}).get("conditions") or ():
        if one.get("type") in ("Failed", "Completed") and one.get("status") == "True":
            found: Fields = one
            return found
    return None


def _lost(seen: Seen, message: str) -> Observation:
    """Preempted where the platform took a host; failed where its own process ended."""
    for pod in seen.pods:
        for one in (pod.get("status") or {}).get("conditions") or ():
            if one.get("type") == "DisruptionTarget" and one.get("status") == "True":
                why = one.get("message") or one.get("reason") or "disrupted"
                return Observation(condition="preempted", reason=f"pod {pod['metadata']['name']}: {why}")
    return Observation(condition="failed", reason=blame(seen.pods) or message or "a pod failed")


def blame(pods: Sequence[Fields]) -> str:
    """Which pod ended first by itself, with its exit code; '' where none tells."""
    ends = []
    for pod in pods:
        for one in (pod.get("status") or {}).get("containerStatuses") or ():
            ended = (one.get("state") or {}).get("terminated")
            if ended and ended.get("exitCode"):
                ends.append((ended.get("finishedAt") or "", pod["metadata"]["name"], ended))
    if not ends:
        texts = [
            (pod.get("status") or {}).get("message")
            for pod in pods
            if (pod.get("status") or {}).get("phase") == "Failed"
        ]
        return next((f"a pod failed: {text}" for text in texts if text), "")
    _, name, ended = min(ends, key=lambda end: end[:2])
    why = ended.get("message") or (ended.get("reason") if ended.get("reason") != "Error" else "")
    return f"pod {name} ended with exit code {ended['exitCode']}" + (f": {_one_line(str(why))}" if why else "")


# why it waits


def why_waiting(seen: Seen, wanted: int, ready: int) -> str:
    """One sentence."""
    return (
        _kueue(seen.workload, seen.workloads)
        or _images(seen.pods)
        or _mounts(seen)
        or _unschedulable(seen)  # before `_no_pods`: JobSet refuses a slice's other pods until the first has a node
        or _no_pods(seen, wanted)
        or f"{ready} of {wanted} pods are ready"
    )


def waits_for_admission(seen: Seen) -> bool:
    """Whether Kueue has yet to let it run."""
    labels = (seen.jobset or {}).get("metadata", {}).get("labels") or {}
    return QUEUE in labels and (seen.workload is None or bool(_kueue(seen.workload)))


def _kueue(workload: Fields | None, workloads: Sequence[Fields] = ()) -> str:
    if workload is None:
        return ""
    status, conditions = workload.get("status") or {}, _conditions(workload)
    if (conditions.get("Admitted") or {}).get("status") == "True":
        return ""
    queue = (workload.get("spec") or {}).get("queueName", "")
    for check in status.get("admissionChecks") or ():
        if check.get("state") in ("Pending", "Retry", "Rejected"):
            state = {"Pending": "waits for", "Retry": "tries again", "Rejected": "was rejected by"}[check["state"]]
            said = f": {_one_line(check['message'])}" if check.get("message") else ""
            return f"queue {queue}: it {state} the admission check {check['name']}{said}"
    reserved = conditions.get("QuotaReserved")
    place, pending = queue_place(workload, workloads)
    queue = f"{queue}, place {place} of {pending}" if pending > 1 else queue
    if reserved is None:
        return f"queue {queue}: Kueue has not looked at it yet"
    if reserved.get("status") == "True":
        return f"queue {queue}: it has quota and is being admitted"
    evicted = conditions.get("Evicted")
    if evicted is not None and evicted.get("status") == "True" and not reserved.get("message"):
        return f"queue {queue}: it was evicted: {_one_line(evicted.get('message', ''))}"
    return f"queue {queue}: {_one_line(reserved.get('message') or 'it waits for quota')}"


def queue_place(workload: Fields, workloads: Sequence[Fields]) -> tuple[int, int]:
    """Its place among those that wait for quota in the same queue of the namespace, and how many they are: by priority, then by age, as
    Kueue takes them. Those of other namespaces that share the quota are not seen."""
    queue = (workload.get("spec") or {}).get("queueName")
    waiting = sorted(
        (one for one in workloads if (one.get("spec") or {}).get("queueName") == queue and _waits_for_quota(one)),
        key=lambda one: (
            -int(one["spec"].get("priority") or 0),
            str(one["metadata"].get("creationTimestamp") or ""),
            str(one["metadata"].get("name") or ""),
        ),
    )
    names = [one["metadata"].get("name") for one in waiting]
    own = (workload.get("metadata") or {}).get("name")
    return (names.index(own) + 1, len(names)) if own in names else (1, 1)


def _waits_for_quota(workload: Fields) -> bool:
    conditions = _conditions(workload)
    settled = any((conditions.get(kind) or {}).get("status") == "True" for kind in ("QuotaReserved", "Finished"))
    return not settled and (workload.get("spec") or {}).get("active") is not False


def _conditions(workload: Fields) -> dict[str, Fields]:
    return {one["type"]: one for one in (workload.get("status") or {}).get("conditions") or ()}


def _no_pods(seen: Seen, wanted: int) -> str:
    if len(seen.pods) >= wanted:
        return ""
    for event in reversed(seen.events):
        if event.get("reason") in ("FailedCreate", "JobCreationFailed"):
            return f"pods cannot be made: {_one_line(event.get('message', ''))}"
    if seen.pods:
        return ""
    return "JobSet's controller has made no pods yet"


def _images(pods: Sequence[Fields]) -> str:
    for pod in pods:
        for one in (pod.get("status") or {}).get("containerStatuses") or ():
            waiting = (one.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") in _PULL:
                said = _one_line(waiting.get("message") or waiting["reason"])
                return f"the image {one.get('image')} cannot be pulled: {said}"
            if waiting.get("reason") in _NEVER:
                return f"pod {pod['metadata']['name']}: {_one_line(waiting.get('message') or waiting['reason'])}"
    return ""


def _mounts(seen: Seen) -> str:
    """What a node says of a volume that it cannot give a pod, as long as that has not started."""
    waiting = {
        pod["metadata"]["name"]
        for pod in seen.pods
        if (pod.get("spec") or {}).get("nodeName") and (pod.get("status") or {}).get("phase") in (None, "Pending")
    }
    for event in reversed(seen.events):
        about = (event.get("involvedObject") or {}).get("name")
        if about in waiting and event.get("reason") in ("FailedMount", "FailedAttachVolume"):
            return f"a volume of pod {about} cannot be mounted: {_one_line(event.get('message', ''))}"
    return ""


def _never(pods: Sequence[Fields]) -> str:
    """What no waiting mends."""
    for pod in pods:
        for one in (pod.get("status") or {}).get("containerStatuses") or ():
            waiting = (one.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") in _NEVER:
                return f"pod {pod['metadata']['name']}: {_one_line(waiting.get('message') or waiting['reason'])}"
    return ""


def _unschedulable(seen: Seen) -> str:
    homeless = [pod for pod in seen.pods if not (pod.get("spec") or {}).get("nodeName")]
    if not homeless:
        return ""
    names = {pod["metadata"]["name"] for pod in homeless}
    for event in reversed(seen.events):
        about = (event.get("involvedObject") or {}).get("name")
        if about in names and event.get("reason") in ("NotTriggerScaleUp", "TriggeredScaleUp", "FailedScaleUp"):
            said = _one_line(event.get("message", ""))
            if event["reason"] == "TriggeredScaleUp":
                return f"nodes are being made: {said}"
            if _AT_MAXIMUM.search(said):
                return f"the node pool is at its maximum size: {said}"
            return f"no node pool can grow for it: {said}"
    for pod in homeless:
        for one in (pod.get("status") or {}).get("conditions") or ():
            if one.get("type") == "PodScheduled" and one.get("status") == "False":
                return f"no node fits {len(homeless)} of its pods: {_one_line(one.get('message') or one.get('reason', ''))}"
    return f"{len(homeless)} of its pods have no node yet"


def _one_line(text: str) -> str:
    return " ".join(str(text).split())[:300]


def condition_of(jobset: Fields, pods: Sequence[Fields]) -> Condition:
    """The condition alone, for a list of many."""
    seen = Seen(jobset=jobset, pods=tuple(pods))
    return observation(seen, "", "").condition


__all__ = [
    "SLICE",
    "STOPPED",
    "Seen",
    "blame",
    "condition_of",
    "observation",
    "rank_of",
    "waits_for_admission",
    "why_waiting",
    "worker_of",
]
