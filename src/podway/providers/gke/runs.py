"""One-shot runs: what a JobSet and its pods say of one, and the Secrets that go with it. Pure.

JobSet restarts a run by itself: `restarts` counts it, and the pods of the latest attempt carry that number. A run has begun when
every pod of it has; from then on it counts as ready, also while JobSet replaces its pods and when all have ended. The pods of the
attempt before are there until JobSet has deleted them, and so is what they printed.
"""

import base64
import json
from collections.abc import Mapping
from datetime import datetime

from podway.images.login import login_key
from podway.order import Host
from podway.providers import Observation, RunObservation, RunRank
from podway.providers.gke.manifests import NAME, ONE_SHOT, RESTART_ATTEMPT, SLICE, Manifest, pull_secret_name
from podway.providers.gke.one_shot import IN_SETUP
from podway.providers.gke.state import (
    Fields,
    Seen,
    ended_condition,
    hosts_wanted,
    rank_of,
    waiting_observation,
    why_waiting,
)
from podway.task.task import Registry

_BEGUN = ("Running", "Succeeded", "Failed")


def is_one_shot(jobset: Fields) -> bool:
    """Whether it runs a task and ends."""
    return bool((jobset["metadata"].get("annotations") or {}).get(ONE_SHOT))


def one_shot_observation(seen: Seen, owner: str, home: str) -> Observation:
    """As that of a cluster."""
    jobset = seen.jobset
    if jobset is None:
        return Observation(condition="deleting" if seen.pods or seen.leftovers else "absent")
    if jobset["metadata"].get("deletionTimestamp"):
        return Observation(condition="deleting")
    wanted, begun = hosts_wanted(jobset), _begun(seen, jobset)
    if not (ended_condition(jobset) or _restarts(jobset) or len(begun) == wanted):
        return waiting_observation(seen, wanted, len(begun))
    return Observation(condition="ready", hosts=_hosts(jobset, wanted, owner, home))


def run_observation(seen: Seen) -> RunObservation:
    """How far it is."""
    jobset = seen.jobset
    if jobset is None:
        return RunObservation(state="deleting" if seen.pods else "absent")
    if jobset["metadata"].get("deletionTimestamp"):
        return RunObservation(state="deleting", ranks=_ranks(seen, jobset))
    restarts = _restarts(jobset)
    ranks, earlier = _ranks(seen, jobset), _ranks(seen, jobset, restarts - 1) if restarts else ()
    ended = ended_condition(jobset)
    if ended is not None:
        reason = str(ended.get("message") or "")
        return RunObservation(
            state="succeeded" if ended["type"] == "Completed" else "failed",
            reason=reason,
            restarts=restarts,
            ranks=ranks,
            earlier=earlier,
        )
    wanted = hosts_wanted(jobset)
    if len(ranks) < wanted:
        reason = why_waiting(seen, wanted, len(ranks))
        return RunObservation(state="waiting", reason=reason, restarts=restarts, ranks=ranks, earlier=earlier)
    return RunObservation(state="running", restarts=restarts, ranks=ranks, earlier=earlier)


def secret_of(jobset: Manifest, secrets: Mapping[str, str]) -> Manifest:
    """The Secret that the run's pods take their environment from."""
    return _secret(jobset, jobset["metadata"]["name"], "Opaque", secrets)


def pull_secret_of(jobset: Manifest, registry: Registry, password: str) -> Manifest:
    """The Secret that the pods' image is pulled with, as `kubectl create secret docker-registry` makes it."""
    server = login_key(registry.server, _pod_spec(jobset)["containers"][0]["image"])
    both = base64.b64encode(f"{registry.username}:{password}".encode()).decode()
    entry = {"username": registry.username, "password": password, "auth": both}
    config = {"auths": {server: entry}}
    name = pull_secret_name(jobset["metadata"]["name"])
    return _secret(jobset, name, "kubernetes.io/dockerconfigjson", {".dockerconfigjson": json.dumps(config)})


def has_pull_secret(jobset: Manifest) -> bool:
    """Whether its pods pull their image with a login of the task's own."""
    own = pull_secret_name(jobset["metadata"]["name"])
    return any(one["name"] == own for one in _pod_spec(jobset).get("imagePullSecrets") or ())


def _pod_spec(jobset: Manifest) -> Manifest:
    spec: Manifest = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return spec


def _secret(jobset: Manifest, name: str, kind: str, values: Mapping[str, str]) -> Manifest:
    metadata = jobset["metadata"]
    kept = {key: metadata[key] for key in ("namespace", "labels")}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, **kept, "annotations": {NAME: metadata["annotations"][NAME]}},
        "type": kind,
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in values.items()},
    }


def belongs_to(jobset: Fields) -> Manifest:
    """A patch that has Kubernetes delete an object together with the JobSet, whoever deletes that."""
    owner = {
        "apiVersion": jobset["apiVersion"],
        "kind": "JobSet",
        "name": jobset["metadata"]["name"],
        "uid": jobset["metadata"]["uid"],
    }
    return {"metadata": {"ownerReferences": [owner]}}


def _restarts(jobset: Fields) -> int:
    return int((jobset.get("status") or {}).get("restarts") or 0)


def _begun(seen: Seen, jobset: Fields, restart: int | None = None) -> list[Fields]:
    """The pods of an attempt, by default the latest, that have started, or ended."""
    latest = str(_restarts(jobset))
    wanted = latest if restart is None else str(restart)
    return [
        pod
        for pod in seen.pods
        if (pod["metadata"].get("labels") or {}).get(RESTART_ATTEMPT, latest) == wanted
        and (pod.get("status") or {}).get("phase") in _BEGUN
    ]


def _ranks(seen: Seen, jobset: Fields, restart: int | None = None) -> tuple[RunRank, ...]:
    found = []
    for pod in _begun(seen, jobset, restart):
        ended: Fields = {}
        for one in (pod.get("status") or {}).get("containerStatuses") or ():
            ended = (one.get("state") or {}).get("terminated") or ended
        until = ended.get("finishedAt")
        found.append(
            RunRank(
                rank=rank_of(pod, jobset),
                source=pod["metadata"]["name"],
                code=ended.get("exitCode"),
                ended=datetime.fromisoformat(until.replace("Z", "+00:00")).timestamp() if until else None,
                phase="setup" if str(ended.get("message")).strip() == IN_SETUP else "run",
            )
        )
    return tuple(sorted(found, key=lambda one: one.rank))


def _hosts(jobset: Fields, wanted: int, owner: str, home: str) -> tuple[Host, ...]:
    """By the names that JobSet gives the pods: their addresses change when it restarts them."""
    name = jobset["metadata"]["name"]
    cluster = (jobset["metadata"].get("annotations") or {}).get(NAME) or name
    per_slice = int(jobset["spec"]["replicatedJobs"][0]["template"]["spec"].get("parallelism", 1))
    return tuple(
        Host(
            cluster=cluster,
            rank=rank,
            slice=rank // per_slice,
            worker=rank % per_slice,
            address=f"{name}-{SLICE}-{rank // per_slice}-{rank % per_slice}",
            home=home,
            id=f"{owner}/{cluster}-{rank}",
        )
        for rank in range(wanted)
    )
