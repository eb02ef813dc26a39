"""What a cluster's own nodes do with the releases that `podway gke prepare` installs: they run the controllers of their Deployments.

The nodes here are pretended and have no images, so the programs are run as processes of this machine: with the configuration of the
release's ConfigMap but for ports and certificates, and with the rights of the release's ServiceAccount and none else. Webhooks that name
a Service name the process instead, and the Deployment is said to be available.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import yaml
from tools.bench.own_kubernetes import Fields, OwnKubernetes

from podway.errors import ProviderError
from podway.providers.gke.api import NotFound
from podway.providers.gke.prepare.releases import RELEASES, Release

MERGE = "application/merge-patch+json"
LOOK_S = 0.2
CONFIGURATION = "controller_manager_config.yaml"


@contextlib.contextmanager
def released_controllers(own: OwnKubernetes) -> Iterator[None]:
    """Runs the controller of each release once all of it is applied, until the end of the block."""
    stop, running = threading.Event(), list[str]()

    def watch() -> None:  # until the end: a process dies with the thread that started it
        while not stop.wait(LOOK_S):
            for release in RELEASES:
                if release.name not in running and _run(own, release):
                    running.append(release.name)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _run(own: OwnKubernetes, release: Release) -> bool:
    name, place = release.name.lower(), f"namespaces/{release.namespace}"
    deployment_path = f"/apis/apps/v1/{place}/deployments/{release.deployment}"
    objects = [one for one in yaml.safe_load_all((own.built / "releases" / f"{name}.yaml").read_text()) if one]
    try:
        deployment = own.admin.call("GET", deployment_path)
        hooks = [own.admin.call("GET", path) for path in map(_hook_path, objects) if path]
        told = own.admin.call("GET", f"/api/v1/{place}/configmaps/{name}-manager-config")
    except (NotFound, ProviderError):
        return False  # not all of it is applied yet
    account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    own.identities[name] = own.account_kubeconfig(release.namespace, account)
    own.start_controller(name, yaml.safe_load(told["data"][CONFIGURATION]))
    for hook in hooks:
        for one in hook["webhooks"]:
            one["clientConfig"] = own.reached_at(name, one["clientConfig"]["service"]["path"])
        own.admin.call("PUT", _hook_path(hook), hook)
    for one in objects:
        if one["kind"] == "CustomResourceDefinition" and (one["spec"].get("conversion") or {}).get("webhook"):
            _convert(own, name, one)
    available = {"type": "Available", "status": "True", "reason": "MinimumReplicasAvailable"}
    own.admin.call("PATCH", f"{deployment_path}/status", {"status": {"conditions": [available]}}, kind=MERGE)
    return True


def _hook_path(one: Fields) -> str:
    kind: Any = one["kind"]
    if not str(kind).endswith("WebhookConfiguration"):
        return ""
    return f"/apis/admissionregistration.k8s.io/v1/{kind.lower()}s/{one['metadata']['name']}"


def _convert(own: OwnKubernetes, name: str, definition: Fields) -> None:
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition['metadata']['name']}"
    client = own.reached_at(name, "/convert") | {"service": None}
    own.admin.call("PATCH", path, {"spec": {"conversion": {"webhook": {"clientConfig": client}}}}, kind=MERGE)
