"""Clusters of Kubernetes Engine and their node pools: what exists, what is under way, and what it would cost.

A cluster here is a name that node pools belong to; no Kubernetes runs behind it. A node pool is checked as the real API checks it (a
machine type that has the topology, as many nodes as the topology takes), is made and deleted by operations, and stays in state ERROR
where its operation failed, as it does there: whoever made it has to delete it.
"""

from typing import Any

import msgspec

from podway.catalog.slices import Slice, all_slices
from podway.sandbox.agenda import Agenda
from podway.sandbox.jsons import JsonObject
from podway.sandbox.ledger import Ledger
from podway.sandbox.names import check_id, check_labels, stamp
from podway.sandbox.status import ApiError, already_exists, invalid, not_found, out_of_order
from podway.sandbox.tpu.capacity import SPOT

MADE_S, DELETED_S = 240.0, 120.0  # of the cloud's time


class PoolOperation(msgspec.Struct, frozen=True, kw_only=True):
    """One of them, as the API shows it once it is under way."""

    name: str
    kind: str
    target: str
    began: float
    ended: float | None = None
    error: JsonObject | None = None

    def view(self) -> JsonObject:
        """The API's Operation."""
        found: JsonObject = {
            "name": self.name.rpartition("/")[2],
            "operationType": self.kind,
            "status": "RUNNING" if self.ended is None else "DONE",
            "targetLink": f"https://container.googleapis.com/v1/{self.target}",
            "location": self.name.split("/")[3],
            "startTime": stamp(self.began),
        }
        if self.ended is not None:
            found["endTime"] = stamp(self.ended)
        if self.error is not None:
            found |= {"error": self.error, "statusMessage": self.error["message"]}
        return found


class NodePools:
    """All of them, by their full names."""

    def __init__(self, agenda: Agenda, ledger: Ledger) -> None:
        self._agenda, self._ledger = agenda, ledger
        self._clusters: set[str] = set()
        self._pools: dict[str, JsonObject] = {}
        self._operations: dict[str, PoolOperation] = {}

    def has_operation(self, name: str) -> bool:
        """Whether it is one of these."""
        return name in self._operations

    def operation(self, name: str) -> JsonObject:
        """By name."""
        if name not in self._operations:
            raise not_found(name)
        return self._operations[name].view()

    def create_cluster(self, parent: str, body: JsonObject, now: float) -> JsonObject:
        """It is there at once."""
        cluster: Any = body.get("cluster") or {}
        name = f"{parent}/clusters/{check_id('cluster.name', str(cluster.get('name') or ''))}"
        if name in self._clusters:
            raise already_exists(name)
        self._clusters.add(name)
        return self._begin("CREATE_CLUSTER", name, now, ended=True).view()

    def list(self, cluster: str) -> JsonObject:
        """Of one cluster."""
        self._check_cluster(cluster)
        start = f"{cluster}/nodePools/"
        return {"nodePools": [pool for name, pool in sorted(self._pools.items()) if name.startswith(start)]}

    def get(self, name: str) -> JsonObject:
        """By name."""
        self._check_cluster(name.partition("/nodePools/")[0])
        if name not in self._pools:
            raise not_found(name)
        return self._pools[name]

    def create(self, cluster: str, pool: JsonObject, now: float, failure: ApiError | None) -> JsonObject:
        """Begin to make one."""
        self._check_cluster(cluster)
        name = f"{cluster}/nodePools/{check_id('node_pool.name', str(pool.get('name') or ''))}"
        if name in self._pools:
            raise already_exists(name)
        config: Any = pool.get("config") or {}
        check_labels(config.get("resourceLabels"))
        slice = _slice_of(pool)
        self._pools[name] = {**pool, "status": "PROVISIONING", "selfLink": name}
        tier = SPOT if config.get("spot") else "flex-start" if config.get("flexStart") else "on-demand"
        self._ledger.made("node pool", name, now, slice=slice, tier=tier, labels=config.get("resourceLabels"))
        operation = self._begin("CREATE_NODE_POOL", name, now)
        self._agenda.after(now, MADE_S, lambda due: self._made(operation.name, failure, due))
        return operation.view()

    def delete(self, name: str, now: float) -> JsonObject:
        """Begin to delete one."""
        pool = self.get(name)
        if pool["status"] == "STOPPING":
            raise out_of_order(f"Node pool {name} is being deleted.")
        self._pools[name] = {**pool, "status": "STOPPING"}
        operation = self._begin("DELETE_NODE_POOL", name, now)
        self._agenda.after(now, DELETED_S, lambda due: self._deleted(operation.name, due))
        return operation.view()

    def _check_cluster(self, name: str) -> None:
        if name not in self._clusters:
            raise not_found(name)

    def _begin(self, kind: str, target: str, now: float, *, ended: bool = False) -> PoolOperation:
        place = target.partition("/clusters/")[0]
        name = f"{place}/operations/operation-{int(now * 1000)}-gke-{len(self._operations)}"
        made = PoolOperation(name=name, kind=kind, target=target, began=now, ended=now if ended else None)
        self._operations[name] = made
        return made

    def _end(self, name: str, now: float, error: ApiError | None = None) -> str:
        told = error.as_rpc() if error else None
        self._operations[name] = msgspec.structs.replace(self._operations[name], ended=now, error=told)
        return self._operations[name].target

    def _made(self, operation: str, failure: ApiError | None, now: float) -> None:
        name = self._end(operation, now, failure)
        pool = self._pools.get(name)
        if pool is None or pool["status"] != "PROVISIONING":
            return
        self._pools[name] = {**pool, "status": "ERROR" if failure else "RUNNING"}
        if failure is None and int(pool.get("initialNodeCount") or 0):
            self._ledger.started(name, now)

    def _deleted(self, operation: str, now: float) -> None:
        name = self._end(operation, now)
        if self._pools.pop(name, None) is not None:
            self._ledger.gone(name, now)


def _slice_of(pool: JsonObject) -> Slice | None:
    """What the machines are; refused where they cannot be that."""
    config: Any = pool.get("config") or {}
    placement: Any = pool.get("placementPolicy") or {}
    machine, topology = str(config.get("machineType") or ""), placement.get("tpuTopology")
    known = [one for one in all_slices() if one.gke_machine_type == machine]
    if not known:
        if topology:
            raise invalid(f"Machine type '{machine}' does not support TPU topologies.")
        return None
    fitting = [one for one in known if (one.topology_text == topology if topology else one.hosts == 1)]
    if not fitting and not placement.get("policyName"):
        raise invalid(f"TPU topology '{topology or 'none'}' is not supported for machine type '{machine}'.")
    slice = fitting[0] if fitting else None
    count = int(pool.get("initialNodeCount") or 0)
    grows = bool((pool.get("autoscaling") or {}).get("enabled"))
    if slice is not None and slice.hosts > 1 and count != slice.hosts and not (grows and count == 0):
        raise invalid(f"Node count must be {slice.hosts} for TPU topology '{topology}', and is {count}.")
    return slice
