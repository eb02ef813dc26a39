"""A Kubernetes of our own for tests and benchmarks: the real servers that `tools/kubernetes/build` compiles, with nodes that are pretended.

etcd, kube-apiserver, kube-controller-manager, kube-scheduler and the controllers of JobSet and Kueue are processes of this machine on
ports that are free, with their data in one directory; all end with the block. Both controllers have their CRDs, their admission
webhooks and Kueue the conversion between its versions. One certificate, signed by an authority made for the run, serves all of them
and is the administrator's. Podway itself is the user `podway`, by a token, with the rights that docs/kubernetes.md writes down.

Nodes are `podway.sandbox.kubernetes.nodes`: Node objects with GKE's labels and chips, whose pods are processes of this machine.
"""

import base64
import contextlib
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from tools.bench.free_ports import free_port

from podway.errors import ProviderError, UserError
from podway.providers.gke.api import Conflict, KubernetesApi, NotFound
from podway.providers.gke.kubeconfig import KubeContext
from podway.providers.gke.manifests import MANAGED_BY, PODWAY
from podway.sandbox.kubernetes.certificates import signed
from podway.sandbox.kubernetes.nodes import NodePool, Nodes

ROOT = Path(__file__).parent.parent.parent
CONTEXT, NAMESPACE, USER = "real", "default", "podway"
FLAVOR, CLUSTER_QUEUE, QUEUE = "v6e", "cluster-queue", "multislice-queue"
PORTS = ("etcd", "etcd-peer", "kube-apiserver", "jobset", "kueue", "jobset-health", "kueue-health")
STARTED_S = 120.0
# The order in which they are started; the first four are one program.
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
CONTROLLERS = ("jobset", "kueue")
# Kueue reads the certificate of its metrics from this path alone, whether or not it serves any.
KUEUE_METRICS = "kueue/metrics/certs"

# Every kind of object that a launch leads to, in a namespace that nobody else uses.
LEDGER = (
    ("/apis/jobset.x-k8s.io/v1alpha2", "jobsets"),
    ("/apis/batch/v1", "jobs"),
    ("/apis/kueue.x-k8s.io/v1beta2", "workloads"),
    ("/api/v1", "pods"),
    ("/api/v1", "services"),
    ("/api/v1", "configmaps"),
    ("/api/v1", "secrets"),
)

Fields = dict[str, Any]


def build() -> Path:
    """Where the servers are, compiled if need be."""
    done = subprocess.run([str(ROOT / "tools" / "kubernetes" / "build")], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


class OwnKubernetes:
    """The processes, the objects that make them one cluster, and its nodes."""

    def __init__(self, built: Path, place: Path) -> None:
        self.built, self.place = built, place
        self.ports = {name: free_port() for name in PORTS}
        self.url = f"https://127.0.0.1:{self.ports['kube-apiserver']}"
        self.token = secrets.token_hex(16)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.nodes: Nodes | None = None
        (place / "certs").mkdir()
        self.ca = signed(place / "certs", "tls")
        self.admin = KubernetesApi(
            KubeContext(
                name=CONTEXT,
                server=self.url,
                ca=self.ca.read_bytes(),
                certificate=(place / "certs" / "tls.crt").read_bytes(),
                key=(place / "certs" / "tls.key").read_bytes(),
            )
        )
        self.kubeconfig = self._write_kubeconfig("kubeconfig", {"token": self.token})
        self.identities: dict[str, Path] = {}  # the kubeconfig of a controller that is not the administrator
        certificate = {
            name: str(place / "certs" / f"tls.{end}")
            for name, end in (("client-certificate", "crt"), ("client-key", "key"))
        }
        self.admin_kubeconfig = self._write_kubeconfig("admin", certificate)
        (place / "tokens").write_text(f"{self.token},{USER},{USER}\n")

    # processes

    def start(self, name: str) -> None:
        """One server; returns at once."""
        with open(self.place / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._command(name)],  # whatever becomes of this process
                cwd=self.place,
                env={
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "HOME": str(self.place),
                    "KUBECONFIG": str(self.identities.get(name, self.admin_kubeconfig)),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """kill -9."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def restart(self, name: str) -> None:
        """Killed, and started again as a machine's service manager does."""
        self.kill(name)
        self.start(name)
        self.wait_for(name)

    def wait_for(self, name: str) -> None:
        """Until it answers."""
        path = {"kube-apiserver": "/readyz"}.get(name)
        until = time.monotonic() + STARTED_S
        while time.monotonic() < until:
            if self.processes[name].poll() is not None:
                break
            with contextlib.suppress(ProviderError, UserError, OSError):
                if path is not None:
                    self.admin.text(path, {}, 5)
                elif name in self.ports:
                    _touch(self.ports[name])
                return
            time.sleep(0.1)
        said = (self.place / f"{name}.log").read_text(errors="replace").splitlines()[-15:]
        raise RuntimeError("\n".join([f"{name} did not start:", *said]))

    def close(self) -> None:
        """The nodes first, so that pods end in peace; then every server, the storage last."""
        if self.nodes is not None:
            self.nodes.close()
        for name in reversed(list(self.processes)):
            self.kill(name)

    def _command(self, name: str) -> list[str]:
        if name in CONTROL_PLANE:
            return [str(self.built / "servers"), name, *_words(getattr(self, f"_{name.replace('-', '_')}")())]
        command = [str(self.built / name), "--config", str(self.place / f"{name}.yaml")]
        if name == "kueue":
            command += [
                "--feature-gates=VisibilityOnDemand=false"
            ]  # its port is fixed: two of us could not run at once
            etc = self.place / "etc"
            return [
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                f'mount --bind {etc} /etc && exec "$@"',
                "sh",
                *command,
            ]
        return command

    def _etcd(self) -> Fields:
        certs = self.place / "certs"
        here, peer = f"https://127.0.0.1:{self.ports['etcd']}", f"https://127.0.0.1:{self.ports['etcd-peer']}"
        flags: Fields = {
            "data-dir": self.place / "etcd",
            "listen-client-urls": here,
            "advertise-client-urls": here,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "unsafe-no-fsync": "true",
            "log-level": "warn",
        }
        for kind in ("", "peer-"):
            flags |= {
                f"{kind}cert-file": certs / "tls.crt",
                f"{kind}key-file": certs / "tls.key",
                f"{kind}trusted-ca-file": self.ca,
                f"{kind}client-cert-auth": "true",
            }
        return flags

    def _kube_apiserver(self) -> Fields:
        certificate, key = self.place / "certs" / "tls.crt", self.place / "certs" / "tls.key"
        return {
            "etcd-servers": f"https://127.0.0.1:{self.ports['etcd']}",
            "etcd-cafile": self.ca,
            "etcd-certfile": certificate,
            "etcd-keyfile": key,
            "bind-address": "127.0.0.1",
            "secure-port": self.ports["kube-apiserver"],
            "advertise-address": "192.0.2.1",  # nobody asks for it; a loopback address is refused
            "endpoint-reconciler-type": "none",
            "service-cluster-ip-range": "10.96.0.0/16",
            "tls-cert-file": certificate,
            "tls-private-key-file": key,
            "client-ca-file": self.ca,
            "token-auth-file": self.place / "tokens",
            "authorization-mode": "RBAC",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": certificate,
            "service-account-signing-key-file": key,
            "kubelet-client-certificate": certificate,
            "kubelet-client-key": key,
            "kubelet-preferred-address-types": "InternalIP",
            "allow-privileged": "true",
            "profiling": "false",
        }

    def _kube_controller_manager(self) -> Fields:
        return {
            "kubeconfig": self.admin_kubeconfig,
            "leader-elect": "false",
            "secure-port": "0",
            "service-account-private-key-file": self.place / "certs" / "tls.key",
            "root-ca-file": self.ca,
            # An endpoint may not be in the loopback network, where the nodes are; pods find each other by their /etc/hosts.
            # No node has the images of controllers: who runs one says himself that its Deployment is available.
            "controllers": "*,-deployment-controller,-endpoints-controller,-endpointslice-controller,"
            "-endpointslice-mirroring-controller",
            # The nodes send no heartbeats: on a machine that is busy enough they would come too late.
            "node-monitor-grace-period": "24h",
        }

    def _kube_scheduler(self) -> Fields:
        return {"kubeconfig": self.admin_kubeconfig, "leader-elect": "false", "secure-port": "0"}

    # what makes them a cluster

    def install(self, name: str) -> None:
        """A controller's CRDs, its configuration and its process, then its webhooks."""
        released = _documents(self.built / "releases" / f"{name}.yaml")
        converted = {one["metadata"]["name"] for one in released if "conversion" in one.get("spec", {})}
        for body in _documents(self.built / "crds" / f"{name}.yaml"):
            versions = [one["name"] for one in body["spec"]["versions"] if one["served"]]
            if body["metadata"]["name"] in converted:  # the other kinds are alike in all versions
                webhook = {"clientConfig": self.reached_at(name, "/convert"), "conversionReviewVersions": ["v1"]}
                body["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
            self.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body)
            for version in versions:
                self._wait_served(body["spec"]["group"], version, body["spec"]["names"]["plural"])
        self.start_controller(
            name, {"integrations": {"frameworks": ["jobset.x-k8s.io/jobset"]}} if name == "kueue" else {}
        )
        for body in _documents(self.built / "webhooks" / f"{name}.yaml"):
            body["metadata"]["name"] = f"{name}-{body['metadata']['name']}"
            body["webhooks"] = [one for one in body["webhooks"] if _is_served(name, one)]
            for one in body["webhooks"]:
                one["clientConfig"] = self.reached_at(name, one["clientConfig"]["service"]["path"])
                if one["rules"][0]["resources"] == ["pods"]:  # those of JobSets alone, as its own installation has it
                    one["objectSelector"] = {
                        "matchExpressions": [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]
                    }
            self.create(f"/apis/admissionregistration.k8s.io/v1/{body['kind'].lower()}s", body)

    def start_controller(self, name: str, configuration: Fields) -> None:
        """Its process with this configuration, at the ports and with the certificate that it has here; until it answers."""
        (self.place / f"{name}.yaml").write_text(yaml.safe_dump(configuration | self._configuration(name)))
        if name == "kueue":
            metrics = self.place / "etc" / KUEUE_METRICS
            metrics.mkdir(parents=True)
            for end in ("crt", "key"):
                shutil.copy(self.place / "certs" / f"tls.{end}", metrics / f"tls.{end}")
        self.start(name)
        self.wait_for(name)

    def reached_at(self, name: str, path: str) -> Fields:
        """How the API server reaches a webhook of a controller: no Service leads to a process of this machine."""
        trusted = base64.b64encode(self.ca.read_bytes()).decode()
        return {"url": f"https://127.0.0.1:{self.ports[name]}{path}", "caBundle": trusted}

    def _wait_served(self, group: str, version: str, plural: str) -> None:
        """A controller that starts before all of its kinds are announced ends, or tries again only after a while."""
        until = time.monotonic() + STARTED_S
        while time.monotonic() < until:
            with contextlib.suppress(ProviderError, UserError):
                kinds = self.admin.call("GET", f"/apis/{group}/{version}")["resources"]
                if any(one["name"] == plural for one in kinds):
                    return
            time.sleep(0.1)
        raise RuntimeError(f"{plural}.{group} is not served")

    def _configuration(self, name: str) -> Fields:
        version = {"jobset": "config.jobset.x-k8s.io/v1alpha1", "kueue": "config.kueue.x-k8s.io/v1beta2"}[name]
        return {
            "apiVersion": version,
            "kind": "Configuration",
            "internalCertManagement": {"enable": False},
            "leaderElection": {"leaderElect": False},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{self.ports[f'{name}-health']}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": "127.0.0.1", "port": self.ports[name], "certDir": str(self.place / "certs")},
        }

    def create(self, path: str, body: Fields) -> None:
        """Once more while what it is asked for is not served yet: a CRD that was just made, a webhook that just began."""
        until = time.monotonic() + STARTED_S
        while True:
            try:
                self.admin.call("POST", path, body)
                return
            except Conflict:
                return
            except (ProviderError, UserError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    def pods(self) -> list[Fields]:
        """Every pod there is."""
        return self.admin.read_items("/api/v1/pods", {})

    def left(self) -> dict[str, int]:
        """How many objects of each kind there are that a launch makes: none at the end of a test."""
        return count_left(self.admin, NAMESPACE)

    def grant(self) -> None:
        """The user `podway` has the Role that docs/kubernetes.md writes down, and nothing else."""
        text = (ROOT / "docs" / "kubernetes.md").read_text()
        start = text.index("apiVersion: rbac")
        role = yaml.safe_load(text[start : text.index("```", start)])
        base = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
        self.create(f"{base}/roles", role)
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]}
        subject = {"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"}
        self.create(
            f"{base}/rolebindings", {"metadata": {"name": "podway"}, "roleRef": reference, "subjects": [subject]}
        )

    def set_quota(self, chips: int) -> None:
        """A LocalQueue whose ClusterQueue has so many chips."""
        resources = [{"name": "google.com/tpu", "nominalQuota": str(chips)}]
        groups = [{"coveredResources": ["google.com/tpu"], "flavors": [{"name": FLAVOR, "resources": resources}]}]
        base = "/apis/kueue.x-k8s.io/v1beta2"
        labels = {"cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice"}
        for path, kind, name, spec in (
            ("resourceflavors", "ResourceFlavor", FLAVOR, {"nodeLabels": labels}),
            ("clusterqueues", "ClusterQueue", CLUSTER_QUEUE, {"namespaceSelector": {}, "resourceGroups": groups}),
            (f"namespaces/{NAMESPACE}/localqueues", "LocalQueue", QUEUE, {"clusterQueue": CLUSTER_QUEUE}),
        ):
            body = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}, "spec": spec}
            self.create(f"{base}/{path}", body)

    def add_nodes(self, pools: tuple[NodePool, ...], network: int) -> None:
        """Nodes with addresses 127.NETWORK.x.y."""
        self.nodes = Nodes(self.admin, self.place / "nodes", pools, network=network, client_ca=str(self.ca))

    def account_kubeconfig(self, namespace: str, account: str) -> Path:
        """Of a ServiceAccount, as a pod that runs under it has it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        token = self.admin.call("POST", path, {"spec": {"expirationSeconds": 36000}})["status"]["token"]
        return self._write_kubeconfig(f"{namespace}.{account}", {"token": token}, namespace)

    def _write_kubeconfig(self, name: str, user: Fields, namespace: str = NAMESPACE) -> Path:
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": CONTEXT,
            "clusters": [{"name": CONTEXT, "cluster": {"server": self.url, "certificate-authority": str(self.ca)}}],
            "users": [{"name": CONTEXT, "user": user}],
            "contexts": [{"name": CONTEXT, "context": {"cluster": CONTEXT, "user": CONTEXT, "namespace": namespace}}],
        }
        path = self.place / name
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(document))
        return path


def count_left(api: KubernetesApi, namespace: str) -> dict[str, int]:
    """What Podway made in a namespace, and what JobSet and Kueue made of it; kinds without any are left out."""
    found = {}
    for group, kind in LEDGER:
        with contextlib.suppress(NotFound, UserError):  # not installed
            selector = {"labelSelector": f"{MANAGED_BY}={PODWAY}"} if kind in ("configmaps", "secrets") else {}
            items = api.read_items(f"{group}/namespaces/{namespace}/{kind}", selector)
            found[kind] = sum(one["metadata"]["name"] != "kubernetes" for one in items)
    return {kind: count for kind, count in found.items() if count}


def _words(flags: Fields) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def _documents(path: Path) -> list[Fields]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def _is_served(name: str, webhook: Fields) -> bool:
    """Kueue registers webhooks for its own kinds and for those of the frameworks that it is told to manage."""
    groups = {group for rule in webhook["rules"] for group in rule["apiGroups"]}
    return name != "kueue" or groups <= {"kueue.x-k8s.io", "jobset.x-k8s.io"}


def _touch(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), 5).close()


@contextlib.contextmanager
def own_kubernetes(
    built: Path,
    pools: tuple[NodePool, ...] = (),
    *,
    installed: tuple[str, ...] = CONTROLLERS,
    quota: int | None = None,
    network: int = 95,
) -> Iterator[OwnKubernetes]:
    """A cluster for as long as the block lasts."""
    place = Path(tempfile.mkdtemp(prefix="podway-kubernetes-"))
    own = OwnKubernetes(built, place)
    try:
        for name in CONTROL_PLANE:
            own.start(name)
            own.wait_for(name)
        own.grant()
        for name in installed:
            own.install(name)
        if quota is not None:
            own.set_quota(quota)
        if pools:
            own.add_nodes(pools, network)
        yield own
    finally:
        own.close()
        shutil.rmtree(place, ignore_errors=True)
