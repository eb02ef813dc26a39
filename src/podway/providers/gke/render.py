"""Order -> the objects of a cluster: a ConfigMap with the agent, and a JobSet whose pods run it and stay. Pure; golden-tested.

The agent is the same file that every other host runs. Its bytes are not in the request: `AGENT` stands for them, and `with_agent` puts
them in when the request is sent.

The container's own process is a small shell script. It starts the agent again should it end (a newer Podway replaces it so), and when
the pod is told to end (SIGTERM: the node is drained for maintenance, or preempted) it tells every process of the jobs so, and lets
them write their checkpoints for as long as the pod's grace period lasts. It waits for those alone that were there then: a server that
asks how the host is starts new ones until the end.
"""

import base64
import gzip
from typing import Any

from podway.hosts.bundle import bundle
from podway.order import Order
from podway.providers import Request, Step
from podway.providers.gke.manifests import (
    GRACE_S,
    POD_INDEX,
    Container,
    JobSetContext,
    Manifest,
    Restarts,
    image_of,
    jobset,
    metadata,
    object_name,
)
from podway.providers.gke.pod_volumes import pod_volumes

AGENT = "the agent, packed by gzip"
HOME = "/podway/home"
AGENT_FILE = f"{HOME}/.podway/agent.pyz"
FOLDER = "/podway/agent"  # where the ConfigMap is seen
PACKED = "agent.pyz.gz"

START = f"""\
serving=
trap ending TERM
agent="$HOME/.podway/agent.pyz"
mkdir -p -m 700 "$HOME/.podway" "$HOME/sky_workdir"
[ -e "$agent" ] || python3 -c 'import gzip, sys; sys.stdout.buffer.write(gzip.open(sys.argv[1]).read())' \
{FOLDER}/{PACKED} > "$agent" || {{ echo "python3 does not run in this image" >&2; exit 127; }}
others() {{ for p in /proc/[0-9]*; do p=${{p#/proc/}}; [ "$p" = 1 ] || [ "$p" = "$serving" ] || echo "$p"; done; }}
ending() {{
  trap '' TERM
  told=$(others)
  for p in $told; do kill -TERM "$p" 2>/dev/null; done
  while for p in $told; do kill -0 "$p" 2>/dev/null && [ "$(cut -d' ' -f3 "/proc/$p/stat" 2>/dev/null)" != Z ] && break; done
  do sleep 0.2; done
  [ -z "$serving" ] || kill -TERM "$serving" 2>/dev/null
  exit 143
}}
while :; do
  python3 -S -E "$agent" serve --home "$HOME" --address "$PODWAY_POD_IP" &
  serving=$!
  wait "$serving"
  sleep 0.5
done
"""


def render(context: JobSetContext, name: str, order: Order) -> Request:
    """What is sent for a cluster, in this order."""
    return request_of(context, name, [_agent(context, name), _jobset(context, name, order)])


def request_of(context: JobSetContext, name: str, manifests: list[Manifest]) -> Request:
    """The request that creates these objects."""
    steps = tuple(
        Step(verb="create", target=f"{context.context}/{context.namespace}/{kind_path(body)}", body=body)
        for body in manifests
    )
    return Request(provider="gke", name=name, steps=steps)


def kind_path(manifest: Manifest) -> str:
    """`jobsets/NAME`: the kind as the API's paths have it."""
    return f"{str(manifest['kind']).lower()}s/{manifest['metadata']['name']}"


def with_agent(manifest: Manifest) -> Manifest:
    """The ConfigMap with the agent's bytes; any other object as it is."""
    data: dict[str, Any] = manifest.get("binaryData") or {}
    if data.get(PACKED) != AGENT:
        return manifest
    packed = gzip.compress(bundle().data, mtime=0)
    return {**manifest, "binaryData": {PACKED: base64.b64encode(packed).decode()}}


def _agent(context: JobSetContext, name: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(context, name),
        "binaryData": {PACKED: AGENT},
    }


def _jobset(context: JobSetContext, name: str, order: Order) -> Manifest:
    seen = pod_volumes(context, order, HOME)
    container = Container(
        image=image_of(context, order),
        command=("bash", "-c", START),
        started=("test", "-S", f"{HOME}/.podway/agent.sock"),
        env=(
            {"name": "HOME", "value": HOME},
            {"name": "PODWAY_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PODWAY_HOST_ID", "value": f"{context.owner}/{name}"},
        ),
        mounts=({"name": "agent", "mountPath": FOLDER}, {"name": "home", "mountPath": HOME}, *seen.mounts),
        volumes=(
            {"name": "agent", "configMap": {"name": object_name(context.owner, name)}},
            {"name": "home", "emptyDir": _home(order)},
            *seen.volumes,
        ),
        annotations=seen.annotations,
        grace_s=GRACE_S if order.grace_s is None else order.grace_s,
    )
    # No restarts of its own: what comes after a lost host is decided by the task's `recovery`, as with every provider.
    return jobset(context, name, order, container, Restarts())


def _home(order: Order) -> Manifest:
    return {"sizeLimit": f"{order.disk_gb}Gi"} if order.disk_gb else {}


__all__ = ["AGENT", "HOME", "POD_INDEX", "render", "request_of", "with_agent"]
