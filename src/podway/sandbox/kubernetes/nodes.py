"""TPU nodes that are pretended: Node objects with GKE's labels and chips, and one node agent for all of them that runs pods as processes.

The agent speaks to the API over HTTP only, so it serves the API of this process and a real one alike. It lists the pods of its nodes,
starts those that are bound (pod_boot.py), ends those that are deleted (SIGTERM, the grace period, SIGKILL), and reports phases, exit
codes and addresses. A node's address is one of 127.0.0.0/8; host names of pods are in an /etc/hosts that all pods share.
"""

import base64
import contextlib
import json
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from podway.catalog.slices import find_slice
from podway.errors import ProviderError, UserError
from podway.providers.gke.api import Conflict, Fields, KubernetesApi, NotFound
from podway.providers.gke.pod_volumes import DRIVER
from podway.sandbox.kubernetes.certificates import self_signed
from podway.sandbox.kubernetes.kubelet import Kubelet
from podway.sandbox.kubernetes.objects import now
from podway.sandbox.kubernetes.pod_directories import directory_of
from podway.sandbox.kubernetes.pod_log import PodLog
from podway.sandbox.kubernetes.running_pod import RunningPod

LOOK_S = 0.1
# What a kubelet of Kubernetes 1.36 tells of itself: an API server that reads it passes WebSockets on as they are. To a node that does not
# declare it, it speaks SPDY, whatever its clients speak.
WEBSOCKETS = "ExtendWebSocketsToKubelet"
ENDED = "termination-log"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class NodePool(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of one slice; without a type, one node without chips."""

    name: str
    accelerator_type: str | None = None
    labels: dict[str, str] = {}
    taints: tuple[Fields, ...] = ()


class Nodes:
    """Makes the Node objects, and runs what is bound to them, until `close`."""

    def __init__(
        self,
        api: KubernetesApi,
        place: Path,
        pools: tuple[NodePool, ...],
        *,
        network: int,
        client_ca: str | None = None,
    ) -> None:
        self.api, self.place = api, place
        self.token = secrets.token_hex(16)
        self.unpullable: set[str] = set()  # images that no registry has
        place.mkdir(parents=True, exist_ok=True)
        self._hosts = place / "hosts"
        self._hosts.write_text("127.0.0.1 localhost\n")
        self._pods: dict[str, RunningPod] = {}  # by uid
        self._names: dict[tuple[str, str], str] = {}
        self._addresses: dict[str, str] = {}
        self._kubelets: list[Kubelet] = []
        self._stop = threading.Event()
        secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        secured.load_cert_chain(*self_signed(place))
        if client_ca:
            secured.verify_mode = ssl.CERT_OPTIONAL
            secured.load_verify_locations(client_ca)
        with contextlib.suppress(Conflict):  # as GKE's addon does: these nodes mount buckets
            modes = {"attachRequired": False, "volumeLifecycleModes": ["Ephemeral"]}
            api.call("POST", "/apis/storage.k8s.io/v1/csidrivers", {"metadata": {"name": DRIVER}, "spec": modes})
        self._secured, self._network = secured, network
        for pool in pools:
            self.add(pool)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, pool: NodePool) -> None:
        """The nodes of one more pool."""
        tpu = find_slice(pool.accelerator_type) if pool.accelerator_type else None
        for index in range(tpu.hosts if tpu else 1):
            number = len(self._kubelets) + 1
            address = f"127.{self._network}.{number // 250}.{number % 250 + 1}"
            name = f"{pool.name}-{index}"
            self._addresses[name] = address
            kubelet = Kubelet(address, self._secured, self.token, self._enter, self._log_of)
            self._kubelets.append(kubelet)
            self._make_node(pool, name, address, kubelet.server_address[1])

    def remove(self, pool: str) -> None:
        """A pool's nodes are gone, and their pods with them."""
        for node in self.api.read_items("/api/v1/nodes", {"labelSelector": f"cloud.google.com/gke-nodepool={pool}"}):
            name = node["metadata"]["name"]
            self.lose(name)
            with contextlib.suppress(NotFound):
                self.api.call("DELETE", f"/api/v1/nodes/{name}")

    def close(self) -> None:
        """Ends every pod and every listener."""
        self._stop.set()
        self._thread.join()
        for kubelet in self._kubelets:
            kubelet.close()
        for pod in self._pods.values():
            pod.process.kill()  # what it forked dies with it (unshare --kill-child)
            pod.process.wait()
        shutil.rmtree(self.place, ignore_errors=True)

    def processes(self) -> int:
        """Pods that run here now."""
        return sum(pod.process.poll() is None for pod in list(self._pods.values()))  # another thread adds to them

    def lose(self, node: str) -> None:
        """The node is preempted: its pods are killed, and marked as the platform's doing."""
        for found in self.api.read_items("/api/v1/pods", {"fieldSelector": f"spec.nodeName={node}"}):
            uid = found["metadata"]["uid"]
            disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
            message = {"message": "Pod was terminated in response to imminent node shutdown."}
            conditions = [*(found["status"].get("conditions") or ()), {**disrupted, **message}]
            self._patch(found, {"conditions": conditions})
            if uid in self._pods:
                self._pods[uid]._signal(signal.SIGKILL)

    def declare(self, features: list[str]) -> None:
        """What all nodes tell the API server of themselves: none is a kubelet before Kubernetes 1.36."""
        for name in self._addresses:
            self._patch_node(name, {"declaredFeatures": features})

    def exec_protocols(self) -> list[str]:
        """In which each `exec` was asked for so far."""
        return [protocol for kubelet in self._kubelets for protocol in kubelet.protocols]

    def _make_node(self, pool: NodePool, name: str, address: str, port: int) -> None:
        tpu = find_slice(pool.accelerator_type) if pool.accelerator_type else None
        labels = {"cloud.google.com/gke-nodepool": pool.name, "kubernetes.io/hostname": name, **pool.labels}
        capacity = {"cpu": "200", "memory": "900Gi", "pods": "15", "ephemeral-storage": "100Gi"}
        taints = list(pool.taints)
        if tpu is not None:
            labels["cloud.google.com/gke-tpu-accelerator"] = tpu.gke_accelerator or ""
            labels["cloud.google.com/gke-tpu-topology"] = tpu.topology_text
            capacity["google.com/tpu"] = str(tpu.chips_per_host)
            taints.append({"key": "google.com/tpu", "value": "present", "effect": "NoSchedule"})
        status = {
            "capacity": capacity,
            "allocatable": capacity,
            "addresses": [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            "conditions": [_condition("Ready", "True", reason="KubeletReady")],
            "declaredFeatures": [WEBSOCKETS],
            "nodeInfo": {"kubeletVersion": "v1.36.4", "architecture": "amd64", "operatingSystem": "linux"},
        }
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": labels},
            "spec": {"taints": taints} if taints else {},
            "status": status,
        }
        self.api.call("POST", "/api/v1/nodes", node)
        self._patch_node(name, status)

    def _patch_node(self, name: str, status: Fields) -> None:
        self.api.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, kind="application/merge-patch+json")

    # the loop

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            with contextlib.suppress(ProviderError, UserError):  # the API is away for a moment
                self._look()

    def _look(self) -> None:
        found = self.api.read_items("/api/v1/pods", {})
        mine = [pod for pod in found if (pod.get("spec") or {}).get("nodeName") in self._addresses]
        self._write_hosts(mine)
        for pod in mine:
            with contextlib.suppress(NotFound):
                self._tend(pod)
        there = {pod["metadata"]["uid"] for pod in mine}
        for uid in [uid for uid in self._pods if uid not in there]:  # removed by force
            gone = self._pods[uid]
            gone.kill_at = gone.kill_at or 0.0
            gone.end()
            if gone.process.poll() is not None:
                self._forget(uid)

    def _tend(self, pod: Fields) -> None:
        uid, status = pod["metadata"]["uid"], pod.get("status") or {}
        running = self._pods.get(uid)
        if pod["metadata"].get("deletionTimestamp"):
            if running is not None and running.process.poll() is None:
                running.end()
                return
            if running is not None:
                self._report_end(pod, running)
                self._forget(uid)
            self._remove(pod)
        elif running is not None:
            if running.process.poll() is not None:
                self._report_end(pod, running)
            elif not running.ready and running.booted():
                self._probe(pod, running)
        elif status.get("phase") in (None, "", "Pending"):
            image = pod["spec"]["containers"][0]["image"]
            if image in self.unpullable:
                waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}": not found'}
                if not status.get("containerStatuses"):
                    self._report(pod, "Pending", {"waiting": waiting}, ready=False)
            else:
                self._start(pod)

    def _start(self, pod: Fields) -> None:
        metadata, spec = pod["metadata"], pod["spec"]
        container, uid = spec["containers"][0], metadata["uid"]
        place = self.place / uid
        place.mkdir(exist_ok=True)
        address = self._addresses[spec["nodeName"]]
        env = self._environment(pod, container, address)
        volumes = {one["name"]: directory_of(self.api, self.place, pod, one) for one in spec.get("volumes") or ()}
        mounts = [
            [str(volumes[one["name"]]), one["mountPath"], bool(one.get("readOnly"))]
            for one in container.get("volumeMounts") or ()
            if one["name"] in volumes
        ]
        run = {
            "root": str(place / "root"),
            "mounts": [
                *mounts,
                [str(self._hosts), "/etc/hosts", False],
                [str(place / ENDED), "/dev/termination-log", False],
            ],
            "hostname": (spec.get("hostname") or metadata["name"])[:63],
            "command": [*(container.get("command") or ()), *(container.get("args") or ())],
            "env": env,
        }
        (place / ENDED).touch()
        (place / "spec.json").write_text(json.dumps(run))
        unshare = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--propagation", "private"]
        process = subprocess.Popen(
            [*unshare, sys.executable, "-m", "podway.sandbox.kubernetes.pod_boot", str(place / "spec.json")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        grace_s = float(spec.get("terminationGracePeriodSeconds", 30))
        self._pods[uid] = RunningPod(place, process, env, grace_s)
        self._names[metadata["namespace"], metadata["name"]] = uid
        self._report(pod, "Running", {"running": {"startedAt": now()}}, ready=False)

    def _probe(self, pod: Fields, running: RunningPod) -> None:
        """Ready once its startup probe succeeds; at once without one."""
        probe = pod["spec"]["containers"][0].get("startupProbe")
        if probe is not None:
            entered = self._enter(pod["metadata"]["namespace"], pod["metadata"]["name"], probe["exec"]["command"])
            if entered is None:
                return
            with entered:
                entered.communicate(timeout=30)
            if entered.returncode:
                return
        running.ready = True
        self._report(pod, "Running", {"running": {"startedAt": now()}}, ready=True)

    def _environment(self, pod: Fields, container: Fields, address: str) -> dict[str, str]:
        metadata, namespace = pod["metadata"], pod["metadata"]["namespace"]
        labels = metadata.get("labels") or {}
        env = {"PATH": f"{Path(sys.executable).parent}:{PATH}", "HOME": "/root", "HOSTNAME": metadata["name"]}
        if container.get("resources", {}).get("limits", {}).get("google.com/tpu"):  # as GKE's device plugin does
            env["TPU_WORKER_ID"] = labels.get("batch.kubernetes.io/job-completion-index", "0")
        for one in container.get("envFrom") or ():
            if "secretRef" in one:
                env |= self._secret(namespace, one["secretRef"]["name"])
        for one in container.get("env") or ():
            env[one["name"]] = self._value(one, pod, address)
        return env

    def _value(self, one: Fields, pod: Fields, address: str) -> str:
        if "valueFrom" not in one:
            return str(one.get("value", ""))
        source = one["valueFrom"]
        if "secretKeyRef" in source:
            secret = self._secret(pod["metadata"]["namespace"], source["secretKeyRef"]["name"])
            return secret[source["secretKeyRef"]["key"]]
        path = source["fieldRef"]["fieldPath"]
        if path in ("status.podIP", "status.hostIP"):
            return address
        if path.startswith("metadata.") and "[" in path:
            kind, _, key = path.removeprefix("metadata.").partition("['")
            return str((pod["metadata"].get(kind) or {}).get(key.removesuffix("']"), ""))
        return str(
            pod["spec"]["nodeName"] if path == "spec.nodeName" else pod["metadata"].get(path.rpartition(".")[2], "")
        )

    def _secret(self, namespace: str, name: str) -> dict[str, str]:
        found = self.api.call("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")
        plain = {key: base64.b64decode(value).decode() for key, value in (found.get("data") or {}).items()}
        return plain | (found.get("stringData") or {})

    def _write_hosts(self, pods: list[Fields]) -> None:
        """In place: pods have this very file as /etc/hosts."""
        lines = ["127.0.0.1 localhost"]
        for pod in pods:
            spec, namespace = pod["spec"], pod["metadata"]["namespace"]
            if spec.get("hostname") and spec.get("subdomain"):
                name = f"{spec['hostname']}.{spec['subdomain']}"
                full = f"{name}.{namespace}.svc.cluster.local"
                lines.append(f"{self._addresses[spec['nodeName']]} {full} {name} {spec['hostname']}")
        text = "\n".join(lines) + "\n"
        if text != self._hosts.read_text():
            self._hosts.write_text(text)

    # what is reported

    def _report_end(self, pod: Fields, running: RunningPod) -> None:
        if running.reported:
            return
        running.reported = True
        code = running.process.returncode
        code = 128 - code if code < 0 else code
        running.log.join()
        said = (running.place / ENDED).read_bytes()[:4096]
        policy = pod["spec"]["containers"][0].get("terminationMessagePolicy")
        if not said and code and policy == "FallbackToLogsOnError":
            said = running.log.path.read_bytes()[-2048:]
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now()}
        with contextlib.suppress(NotFound):
            state = {"terminated": ended | ({"message": said.decode(errors="replace")} if said else {})}
            self._report(pod, "Failed" if code else "Succeeded", state, ready=False)

    def _report(self, pod: Fields, phase: str, state: Fields, *, ready: bool) -> None:
        container = pod["spec"]["containers"][0]
        address = self._addresses[pod["spec"]["nodeName"]]
        kept = [one for one in pod["status"].get("conditions") or () if one["type"] == "DisruptionTarget"]
        fresh = self.api.call("GET", _path(pod))
        kept = [one for one in fresh["status"].get("conditions") or () if one["type"] == "DisruptionTarget"] or kept
        word = "True" if ready else "False"
        kinds = {"PodScheduled": "True", "Initialized": "True", "ContainersReady": word, "Ready": word}
        status: Fields = {
            "phase": phase,
            "conditions": [*kept, *(_condition(kind, value) for kind, value in kinds.items())],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": container["image"],
                    "ready": ready,
                    "restartCount": 0,
                    "state": state,
                }
            ],
        }
        if phase != "Pending":
            status |= {"podIP": address, "podIPs": [{"ip": address}], "hostIP": address, "startTime": now()}
        self._patch(pod, status)

    def _patch(self, pod: Fields, status: Fields) -> None:
        self.api.call("PATCH", f"{_path(pod)}/status", {"status": status}, kind="application/merge-patch+json")

    def _remove(self, pod: Fields) -> None:
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
        with contextlib.suppress(NotFound):
            self.api.call("DELETE", _path(pod), body)

    def _forget(self, uid: str) -> None:
        gone = self._pods.pop(uid)
        gone.process.wait()
        shutil.rmtree(gone.place, ignore_errors=True)

    # what the API server asks for

    def _enter(
        self, namespace: str, name: str, command: list[str], terminal: int | None = None
    ) -> "subprocess.Popen[bytes] | None":
        pod = self._pods.get(self._names.get((namespace, name), ""))
        inner = pod.inner() if pod is not None else None
        if pod is None or inner is None:
            return None
        ends = subprocess.PIPE if terminal is None else terminal
        of_terminal = [] if terminal is None else ["setsid", "--ctty", "--wait"]
        enter = ["nsenter", "--target", str(inner), "--mount", "--pid", "--uts", "--root", "--wd", "--"]
        return subprocess.Popen(
            [*of_terminal, *enter, *command],
            env=pod.env,
            stdin=ends,
            stdout=ends,
            stderr=ends,
            start_new_session=terminal is None,
        )

    def _log_of(self, namespace: str, name: str) -> PodLog | None:
        pod = self._pods.get(self._names.get((namespace, name), ""))
        return None if pod is None else pod.log


def _path(pod: Fields) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _condition(kind: str, status: str, **more: str) -> Fields:
    return {"type": kind, "status": status, "lastTransitionTime": now(), **more}
