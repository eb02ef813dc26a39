"""JobSet, Kueue and the scheduler, as the real ones behave where Podway can see it.

JobSet: the pods of every slice, Indexed; suspend removes them; a pod that failed with an exit code that its policy does not retry
fails the JobSet, any other failure restarts it all while `maxRestarts` lasts. Kueue: a Workload for each JobSet with a queue's name,
admitted first come first served while the ClusterQueue has quota, evicted when it is made inactive. Scheduler: nodes by selector and
free chips; a slice has a node pool to itself. One thread looks at everything whenever something changed.
"""

import contextlib
import random
import string
import threading
from typing import Any

from podway.sandbox.kubernetes.objects import Fields, Objects, Refused, now

JOBSET, PREFIX = "jobset.sigs.k8s.io", "jobset.sigs.k8s.io/"
INDEX = "batch.kubernetes.io/job-completion-index"
QUEUE = "kueue.x-k8s.io/queue-name"
POOL = "cloud.google.com/gke-nodepool"
TPU = "google.com/tpu"
PAUSE_S = 0.5


class Controllers:
    """The control plane's loops, in one thread."""

    def __init__(self, objects: Objects, *, kueue: bool) -> None:
        self.objects = objects
        self.kueue = kueue
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        seen = -1
        while not self._stop.is_set():
            for jobset in self.objects.find("jobsets"):
                with contextlib.suppress(Refused):  # deleted meanwhile
                    self._jobset(jobset)
            if self.kueue:
                self._admit()
            self._schedule()
            seen = self.objects.wait(seen, PAUSE_S)

    # JobSet

    def _jobset(self, jobset: Fields) -> None:
        namespace, name = jobset["metadata"]["namespace"], jobset["metadata"]["name"]
        pods = self._pods(jobset)
        if jobset["metadata"].get("deletionTimestamp"):
            self._remove(pods)
            workload = self._workload(jobset)
            if not pods:
                if workload is not None:
                    self.objects.remove("workloads", namespace, workload["metadata"]["name"])
                self.objects.remove("jobsets", namespace, name)
                self._collect(jobset)
            return
        if _done(jobset):  # what still runs of a failed one is ended
            self._remove([pod for pod in pods if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")])
            return
        if self.kueue and jobset["metadata"].get("labels", {}).get(QUEUE):
            self._follow_kueue(jobset)
            jobset = self.objects.get("jobsets", namespace, name)
        if jobset["spec"].get("suspend"):
            self._remove(pods)
            return
        attempt = int((jobset.get("status") or {}).get("restarts", 0))
        current = [pod for pod in pods if pod["metadata"]["labels"][f"{PREFIX}restart-attempt"] == str(attempt)]
        self._remove([pod for pod in pods if pod not in current])
        failed = [pod for pod in current if (pod.get("status") or {}).get("phase") == "Failed"]
        deleted = [pod for pod in current if pod["metadata"].get("deletionTimestamp")]
        if failed or deleted:
            self._failed(jobset, failed, attempt)
        elif current and all((pod.get("status") or {}).get("phase") == "Succeeded" for pod in current):
            self._finish(jobset, "Completed", "AllJobsCompleted", "jobset completed successfully")
        elif len(pods) == len(current):  # those of an earlier attempt must be gone first
            self._create_pods(jobset, current, attempt)

    def _collect(self, jobset: Fields) -> None:
        """The garbage collector: what belongs to a JobSet goes with it."""
        uid, namespace = jobset["metadata"]["uid"], jobset["metadata"]["namespace"]
        for plural in ("configmaps", "secrets"):
            for found in self.objects.find(plural, namespace):
                if any(one["uid"] == uid for one in found["metadata"].get("ownerReferences") or ()):
                    self.objects.remove(plural, namespace, found["metadata"]["name"])

    def _failed(self, jobset: Fields, failed: list[Fields], attempt: int) -> None:
        policy = jobset["spec"].get("failurePolicy") or {}
        rules = jobset["spec"]["replicatedJobs"][0]["template"]["spec"].get("podFailurePolicy", {}).get("rules", [])
        final = any(_is_final(pod, rule) for pod in failed for rule in rules)
        name = f"{jobset['metadata']['name']}-slice-0"
        if final and policy.get("rules"):
            message = f"applying FailJobSet failure policy action (first failed job: {name})"
            self._finish(jobset, "Failed", "FailJobSetFailurePolicyAction", message)
        elif attempt >= int(policy.get("maxRestarts", 0)):
            message = f"jobset failed due to reaching max number of restarts (first failed job: {name})"
            self._finish(jobset, "Failed", "ReachedMaxRestarts", message)
        else:
            self._status(jobset, {"restarts": attempt + 1})

    def _create_pods(self, jobset: Fields, present: list[Fields], attempt: int) -> None:
        there = {(pod["metadata"]["labels"][f"{PREFIX}job-index"], pod["metadata"]["labels"][INDEX]) for pod in present}
        for job in jobset["spec"]["replicatedJobs"]:
            for slice_id in range(int(job.get("replicas", 1))):
                for index in range(int(job["template"]["spec"].get("parallelism", 1))):
                    if (str(slice_id), str(index)) not in there:
                        self._create_pod(jobset, job, slice_id, index, attempt)

    def _create_pod(self, jobset: Fields, job: Fields, slice_id: int, index: int, attempt: int) -> None:
        name, template = jobset["metadata"]["name"], job["template"]["spec"]["template"]
        base = f"{name}-{job['name']}-{slice_id}-{index}"
        labels = {
            **(template.get("metadata", {}).get("labels") or {}),
            f"{PREFIX}jobset-name": name,
            f"{PREFIX}replicatedjob-name": job["name"],
            f"{PREFIX}job-index": str(slice_id),
            f"{PREFIX}restart-attempt": str(attempt),
            INDEX: str(index),
            "batch.kubernetes.io/job-name": f"{name}-{job['name']}-{slice_id}",
        }
        annotations = {
            **(template.get("metadata", {}).get("annotations") or {}),
            INDEX: str(index),
            **{key: value for key, value in jobset["metadata"].get("annotations", {}).items() if "exclusive" in key},
        }
        suffix = "".join(random.choices(string.ascii_lowercase + string.digits, k=5))
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{base}-{suffix}", "labels": labels, "annotations": annotations},
            "spec": {**template["spec"], "hostname": base, "subdomain": name},
            "status": {"phase": "Pending"},
        }
        self.objects.create("pods", jobset["metadata"]["namespace"], pod)

    def _pods(self, jobset: Fields) -> list[Fields]:
        name = jobset["metadata"]["name"]
        found = self.objects.find("pods", jobset["metadata"]["namespace"])
        return [pod for pod in found if pod["metadata"].get("labels", {}).get(f"{PREFIX}jobset-name") == name]

    def _remove(self, pods: list[Fields]) -> None:
        for pod in pods:
            namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
            if not (pod.get("spec") or {}).get("nodeName"):
                self.objects.remove("pods", namespace, name)
            elif not pod["metadata"].get("deletionTimestamp"):
                with contextlib.suppress(Refused):
                    self.objects.change("pods", namespace, name, _delete)

    def _finish(self, jobset: Fields, kind: str, reason: str, message: str) -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now()}
        self._status(jobset, {"terminalState": kind, "conditions": [condition]})
        workload = self._workload(jobset)
        if workload is not None:
            done = {"type": "Finished", "status": "True", "reason": "Succeeded", "message": message}
            self._conditions(workload, done)

    def _status(self, jobset: Fields, status: Fields) -> None:
        def change(found: Fields) -> Fields:
            return {**found, "status": {**(found.get("status") or {}), **status}}

        self.objects.change("jobsets", jobset["metadata"]["namespace"], jobset["metadata"]["name"], change)

    # Kueue

    def _workload(self, jobset: Fields) -> Fields | None:
        uid = jobset["metadata"]["uid"]
        for found in self.objects.find("workloads", jobset["metadata"]["namespace"]):
            if any(one["uid"] == uid for one in found["metadata"]["ownerReferences"]):
                return found
        return None

    def _follow_kueue(self, jobset: Fields) -> None:
        """A JobSet with a queue's name runs while its Workload is admitted."""
        namespace, name = jobset["metadata"]["namespace"], jobset["metadata"]["name"]
        workload = self._workload(jobset)
        if workload is None:
            made = {
                "apiVersion": "kueue.x-k8s.io/v1beta2",
                "kind": "Workload",
                "metadata": {
                    "name": f"jobset-{name}-{jobset['metadata']['uid'][:5]}",
                    "ownerReferences": [{"kind": "JobSet", "name": name, "uid": jobset["metadata"]["uid"]}],
                },
                "spec": {"queueName": jobset["metadata"]["labels"][QUEUE], "active": True, "chips": _chips(jobset)},
            }
            workload = self.objects.create("workloads", namespace, made)
        suspended = not _holds(workload, "Admitted")

        def change(found: Fields) -> Fields:
            return {**found, "spec": {**found["spec"], "suspend": suspended}}

        self.objects.change("jobsets", namespace, name, change)

    def _admit(self) -> None:
        waiting = self.objects.find("workloads")
        waiting.sort(key=lambda one: int(one["metadata"]["resourceVersion"]) if not _holds(one, "Admitted") else 0)
        waiting.sort(key=lambda one: one["metadata"]["creationTimestamp"])
        used: dict[str, int] = {}
        for one in waiting:
            if not one["spec"].get("active", True):
                self._conditions(
                    one,
                    {"type": "Admitted", "status": "False", "message": "The workload is deactivated"},
                    {"type": "QuotaReserved", "status": "False", "message": "The workload is deactivated"},
                )
            elif _holds(one, "Admitted") and not _holds(one, "Finished"):
                queue = self._cluster_queue(one)
                used[queue] = used.get(queue, 0) + int(one["spec"]["chips"])
        for one in waiting:
            if one["spec"].get("active", True) and not _holds(one, "Admitted") and not _holds(one, "Finished"):
                self._admit_one(one, used)
        for each in self.objects.find("clusterqueues"):
            self._usage(each, used.get(each["metadata"]["name"], 0))

    def _admit_one(self, workload: Fields, used: dict[str, int]) -> None:
        queue, chips = self._cluster_queue(workload), int(workload["spec"]["chips"])
        if not queue:
            name = workload["spec"]["queueName"]
            message = f"LocalQueue {name} doesn't exist"
            self._conditions(workload, {"type": "QuotaReserved", "status": "False", "message": message})
            return
        flavor, quota = self._quota(queue)
        more = used.get(queue, 0) + chips - quota
        if more > 0:
            why = f"insufficient unused quota for {TPU} in flavor {flavor}, {more} more needed"
            if chips > quota:
                why = (
                    f"insufficient quota for {TPU} in flavor {flavor}, previously considered podsets requests (0) + "
                    f"current podset request ({chips}) > maximum capacity ({quota})"
                )
            message = f"couldn't assign flavors to pod set slice: {why}"
            self._conditions(
                workload, {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": message}
            )
            return
        used[queue] = used.get(queue, 0) + chips
        message = f"Quota reserved in ClusterQueue {queue}"
        self._conditions(
            workload,
            {"type": "QuotaReserved", "status": "True", "reason": "QuotaReserved", "message": message},
            {"type": "Admitted", "status": "True", "reason": "Admitted", "message": "The workload is admitted"},
        )

    def _cluster_queue(self, workload: Fields) -> str:
        try:
            queue = self.objects.get("localqueues", workload["metadata"]["namespace"], workload["spec"]["queueName"])
        except Refused:
            return ""
        return str(queue["spec"]["clusterQueue"])

    def _quota(self, queue: str) -> tuple[str, int]:
        flavor = self.objects.get("clusterqueues", "", queue)["spec"]["resourceGroups"][0]["flavors"][0]
        return flavor["name"], int(next(one["nominalQuota"] for one in flavor["resources"] if one["name"] == TPU))

    def _usage(self, queue: Fields, chips: int) -> None:
        flavor = queue["spec"]["resourceGroups"][0]["flavors"][0]["name"]
        total = [{"name": flavor, "resources": [{"name": TPU, "total": str(chips)}]}]

        def change(found: Fields) -> Fields:
            return {**found, "status": {**(found.get("status") or {}), "flavorsReservation": total}}

        self.objects.change("clusterqueues", "", queue["metadata"]["name"], change)

    def _conditions(self, workload: Fields, *new: Fields) -> None:
        def change(found: Fields) -> Fields:
            status = found.get("status") or {}
            kept = {one["type"]: one for one in status.get("conditions") or ()} | {one["type"]: one for one in new}
            return {**found, "status": {**status, "conditions": list(kept.values())}}

        self.objects.change("workloads", workload["metadata"]["namespace"], workload["metadata"]["name"], change)

    # the scheduler

    def _schedule(self) -> None:
        pods, nodes = self.objects.find("pods"), self.objects.find("nodes")
        free = {node["metadata"]["name"]: int(node["status"]["capacity"].get(TPU, 0)) for node in nodes}
        holders: dict[str, str] = {}  # node pool -> the Job whose slice has it
        for pod in pods:
            at = (pod.get("spec") or {}).get("nodeName")
            if at in free and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
                free[at] -= _asked(pod)
                if _asked(pod):
                    holders[_pool(next(node for node in nodes if node["metadata"]["name"] == at))] = _job(pod)
        for pod in pods:
            if (pod.get("spec") or {}).get("nodeName"):
                continue
            self._place(pod, nodes, free, holders)

    def _place(self, pod: Fields, nodes: list[Fields], free: dict[str, int], holders: dict[str, str]) -> None:
        wanted, chips = pod["spec"].get("nodeSelector") or {}, _asked(pod)
        fitting = [node for node in nodes if wanted.items() <= node["metadata"].get("labels", {}).items()]
        own = [pool for pool, job in holders.items() if job == _job(pod)]
        for node in fitting:
            name, pool = node["metadata"]["name"], _pool(node)
            if free[name] < chips or (
                chips and (holders.get(pool, _job(pod)) != _job(pod) or (own and pool not in own))
            ):
                continue
            free[name] -= chips
            if chips:
                holders[pool] = _job(pod)
            self._change_pod(pod, {"spec": {**pod["spec"], "nodeName": name}})
            return
        others = len(nodes) - len(fitting)
        parts = [f"{others} node(s) didn't match Pod's node affinity/selector"] if others else []
        parts += [f"{len(fitting)} Insufficient {TPU}"] if fitting else []
        message = f"0/{len(nodes)} nodes are available: {', '.join(parts)}."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self._change_pod(pod, {"status": {"phase": "Pending", "conditions": [condition]}})

    def _change_pod(self, pod: Fields, change: Fields) -> None:
        with contextlib.suppress(Refused):
            self.objects.change(
                "pods", pod["metadata"]["namespace"], pod["metadata"]["name"], lambda found: {**found, **change}
            )


def _delete(found: Fields) -> Fields:
    found["metadata"].setdefault("deletionTimestamp", now())
    return found


def _done(jobset: Fields) -> bool:
    return bool((jobset.get("status") or {}).get("terminalState"))


def _is_final(pod: Fields, rule: Fields) -> bool:
    codes = rule.get("onExitCodes") or {}
    for one in (pod.get("status") or {}).get("containerStatuses") or ():
        ended: Any = (one.get("state") or {}).get("terminated")
        if ended and (ended["exitCode"] in codes.get("values", ())) == (codes.get("operator") == "In"):
            return bool(rule["action"] == "FailJob")
    return False


def _chips(jobset: Fields) -> int:
    total = 0
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        limits = spec["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {})
        total += int(job.get("replicas", 1)) * int(spec.get("parallelism", 1)) * int(limits.get(TPU, 0))
    return total


def _asked(pod: Fields) -> int:
    return int(pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get(TPU, 0))


def _job(pod: Fields) -> str:
    return str(pod["metadata"]["labels"].get("batch.kubernetes.io/job-name") or pod["metadata"]["name"])


def _pool(node: Fields) -> str:
    return str(node["metadata"]["labels"].get(POOL) or node["metadata"]["name"])


def _holds(found: Fields, kind: str) -> bool:
    conditions = (found.get("status") or {}).get("conditions") or ()
    return any(one["type"] == kind and one["status"] == "True" for one in conditions)
