"""A slice type -> the node pool that holds it, as Kubernetes Engine's API takes it; and back. Pure; golden-tested.

A node pool is one slice: the nodes of several hosts share its ring of chips, so there is one pool for each slice (Google, "Plan TPUs in
GKE"). Labels of the resource mark it as Podway's, with its owner and type; nothing else is ever deleted.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from podway.catalog.slices import Slice, find_slice
from podway.errors import UserError
from podway.providers.gke.settings import GKE_CLUSTER

Body = dict[str, Any]
Tier = Literal["on-demand", "spot", "reservation", "flex-start", "queued"]

OWNER_LABEL, TYPE_LABEL, LAUNCH_LABEL = "podway-owner", "podway-slice", "podway-cluster"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
PODS_PER_NODE = 15  # a TPU node runs one pod of a job; addresses are reserved for so many
LONGEST_NAME = 40
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_CONTEXT = re.compile(r"gke_(?P<project>[^_]+)_(?P<location>[^_]+)_(?P<cluster>[^_]+)")


class NodePoolOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for."""

    accelerator_type: str
    topology: str | None = None
    spot: bool = False
    reservation: str | None = None
    flex_start: bool = False
    queued: bool = False
    placement_policy: str | None = None
    zone: str | None = None  # of a regional cluster: where its nodes are
    service_account: str | None = None

    @property
    def tier(self) -> Tier:
        """How the capacity is got; refused where two ways are named."""
        ways: dict[Tier, bool] = {
            "spot": self.spot,
            "reservation": self.reservation is not None,
            "flex-start": self.flex_start,
            "queued": self.queued,
        }
        named = [way for way, asked in ways.items() if asked]
        if len(named) > 1:
            raise UserError(f"{' and '.join(named)} exclude each other", "name one way to get capacity")
        return named[0] if named else "on-demand"


class NodePoolView(msgspec.Struct, frozen=True, kw_only=True):
    """A node pool with Podway's labels."""

    name: str
    cluster: str
    owner: str
    accelerator_type: str
    topology: str
    nodes: int
    tier: str
    status: str
    launch: str = ""  # the cluster whose launch made it; '': a person did

    @property
    def path(self) -> str:
        """Its full name."""
        return f"{self.cluster}/nodePools/{self.name}"


def cluster_of(context: str) -> str:
    """The cluster that a context names as `gcloud container clusters get-credentials` writes it, or its full name."""
    if GKE_CLUSTER.fullmatch(context):
        return context
    found = _CONTEXT.fullmatch(context)
    if found is None:
        raise UserError(
            f"context {context} does not say which GKE cluster it is",
            "name it: --cluster projects/PROJECT/locations/LOCATION/clusters/NAME",
        )
    return f"projects/{found['project']}/locations/{found['location']}/clusters/{found['cluster']}"


def slice_of(order: NodePoolOrder) -> Slice:
    """The slice; refused where GKE has no machine for it."""
    tpu = find_slice(order.accelerator_type, order.topology)
    if tpu.gke_machine_type is None:
        raise UserError(f"GKE has no machine type for {tpu.accelerator_type}", "see: podway tpus")
    if tpu.generation == "tpu7x" and not tpu.single_host and not order.placement_policy:
        raise UserError(
            f"a node pool of {tpu.accelerator_type} needs a workload policy",
            "make one (gcloud compute resource-policies create workload-policy), and name it: --placement-policy NAME",
        )
    return tpu


def check_name(name: str) -> str:
    """A name that a node pool may have."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot be the name of a node pool",
            f"use lowercase letters, digits and '-', a letter first, at most {LONGEST_NAME} characters",
        )
    return name


def free_names(stem: str, count: int, taken: set[str]) -> list[str]:
    """`STEM-0` and so on, those that nobody has."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        name = check_name(f"{stem}-{number}")
        if name not in taken:
            found.append(name)
        number += 1
    return found


def node_pool(name: str, owner: str, order: NodePoolOrder) -> Body:
    """What is sent."""
    tpu, tier = slice_of(order), order.tier
    grows = tier in ("flex-start", "queued")  # from no node at all, when a job asks for them
    config: Body = {
        "machineType": tpu.gke_machine_type,
        "oauthScopes": [SCOPE],
        "resourceLabels": {OWNER_LABEL: owner, TYPE_LABEL: tpu.accelerator_type},
        "labels": {"podway.dev/owner": owner},
        "workloadMetadataConfig": {"mode": "GKE_METADATA"},  # the gcsfuse driver and workload identity need it
        "gvnic": {"enabled": True},
    }
    if order.service_account:
        config["serviceAccount"] = order.service_account
    if tier == "spot":
        config["spot"] = True
    if grows:
        config |= {"flexStart": True, "reservationAffinity": {"consumeReservationType": "NO_RESERVATION"}}
    if order.reservation:
        key = "compute.googleapis.com/reservation-name"
        affinity = {"consumeReservationType": "SPECIFIC_RESERVATION", "key": key, "values": [order.reservation]}
        config["reservationAffinity"] = affinity
    body: Body = {
        "name": check_name(name),
        "initialNodeCount": 0 if grows else tpu.hosts,
        "config": config,
        "maxPodsConstraint": {"maxPodsPerNode": str(PODS_PER_NODE)},
        "management": {"autoUpgrade": True, "autoRepair": not grows},
    }
    if order.zone:
        body["locations"] = [order.zone]
    if grows:
        body["autoscaling"] = {
            "enabled": True,
            "minNodeCount": 0,
            "maxNodeCount": tpu.hosts,
            "locationPolicy": "ANY",
        }
    if tier == "queued":
        body["queuedProvisioning"] = {"enabled": True}
    if placement := _placement(tpu, order):
        body["placementPolicy"] = placement
    return body


def _placement(tpu: Slice, order: NodePoolOrder) -> Body:
    if order.placement_policy:
        return {"policyName": order.placement_policy}  # it names the topology
    return {} if tpu.single_host else {"type": "COMPACT", "tpuTopology": tpu.topology_text}


def view(cluster: str, pool: Mapping[str, Any]) -> NodePoolView | None:
    """What the API tells of a pool; None for one that is not Podway's."""
    config = pool.get("config") or {}
    labels = config.get("resourceLabels") or {}
    if OWNER_LABEL not in labels:
        return None
    tier = "queued" if (pool.get("queuedProvisioning") or {}).get("enabled") else "on-demand"
    if tier == "on-demand" and config.get("flexStart"):
        tier = "flex-start"
    if config.get("spot"):
        tier = "spot"
    values = (config.get("reservationAffinity") or {}).get("values") or []
    return NodePoolView(
        name=str(pool.get("name", "")),
        cluster=cluster,
        owner=str(labels[OWNER_LABEL]),
        accelerator_type=str(labels.get(TYPE_LABEL, "")),
        topology=str((pool.get("placementPolicy") or {}).get("tpuTopology") or ""),
        nodes=int(pool.get("initialNodeCount") or 0),
        tier=f"reservation {values[0]}" if values else tier,
        status=str(pool.get("status", "")),
        launch=str((config.get("metadata") or {}).get(LAUNCH_LABEL, "")) if LAUNCH_LABEL in labels else "",
    )
