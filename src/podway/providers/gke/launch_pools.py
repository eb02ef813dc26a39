"""The node pools that launches make: asked for once, watched, deleted with their cluster, and never forgotten.

A pool's record is written before it is asked for (pool_records.py), and its labels say whose it is, so that it is found with and
without the record. The official client is imported only where there is something to ask.

    ensure      ask for those that are missing, where the cluster has not enough of them already
    with_pools  what is said of a launch whose pools are being made, or cannot be
    remove      delete them, until none is left and none can still appear
    owned       every pool that a launch made, for the scan for orphans
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from podway.errors import ProviderError, UserError
from podway.extras import require
from podway.providers import Condition, Observation, OwnedResource
from podway.providers.gke.node_pools import LAUNCH_LABEL, OWNER_LABEL, Body, NodePoolView
from podway.providers.gke.pool_records import PoolRecord, PoolRecords
from podway.providers.gke.pool_render import PoolPlan, fits, hourly_price

if TYPE_CHECKING:
    from podway.providers.gke.container_api import ContainerApi

NODE_POOL_KIND = "node pool"
SETTLE_S = 20.0  # within this time, what a lost answer was about can still appear
_CONDITIONS: dict[str, Condition] = {"PROVISIONING": "creating", "ERROR": "failed", "STOPPING": "deleting"}


class LaunchPools:
    """See the module docstring. `cluster` is the full name of a GKE cluster, '' where a launch makes no pools."""

    def __init__(self, root: Path, owner: Callable[[], str]) -> None:
        self._root, self._owner = root, owner
        self._api: ContainerApi | None = None
        self._making = asyncio.Lock()  # two launches at once would both see room for the last pool
        self.records = PoolRecords(root)
        self.settle_s = SETTLE_S

    async def ensure(self, name: str, cluster: str, bodies: Sequence[Body], most: int | None) -> None:
        """Ask for those that are not there yet; none where others' pools are enough for all slices."""
        async with self._making:
            await asyncio.to_thread(self._ensure, name, cluster, bodies, most)

    async def with_pools(self, name: str, cluster: str, seen: Observation) -> Observation:
        """The observation of a launch that may have pools of its own."""
        if not cluster:
            return seen
        if seen.condition in ("creating", "ready"):
            return await asyncio.to_thread(self._observed, name, cluster, seen)
        if seen.condition in ("absent", "stopped") and await asyncio.to_thread(self._left, name, cluster):
            return Observation(condition="deleting" if seen.condition == "absent" else "stopping")
        return seen

    async def remove(self, name: str, cluster: str) -> bool:
        """Begin to delete what is there; whether nothing is left."""
        return await asyncio.to_thread(self._remove, name, cluster)

    async def owned(self, clusters: Iterable[str]) -> list[OwnedResource]:
        """In these GKE clusters, and in those that records name."""
        everywhere = {*clusters, *(one.cluster for one in self.records.all() if one.launch)}
        return await asyncio.to_thread(self._owned, everywhere) if everywhere else []

    async def purge(self, resource: OwnedResource) -> None:
        """Begin to delete one, whoever made it."""
        cluster, _, name = resource.name.partition("/nodePools/")
        await asyncio.to_thread(lambda: self._open().begin_delete(cluster, name))

    def count_fitting(self, plan: PoolPlan) -> int:
        """Pools of others that hold such slices, with or without nodes now. For whoever is in a thread."""
        return sum(fits(pool, plan.bodies[0]) for pool in self._open().bodies(plan.cluster))

    # in a thread

    def _open(self) -> "ContainerApi":
        if self._api is None:
            require("gke", "node pools of launches")
            from podway.providers.gke.container_api import ContainerApi

            self._api = ContainerApi(self._root)
        return self._api

    def _ensure(self, name: str, cluster: str, bodies: Sequence[Body], most: int | None) -> None:
        api = self._open()
        there = {str(pool["name"]): pool for pool in api.bodies(cluster)}
        missing = [body for body in bodies if body["name"] not in there]
        records = self.records.of_launch(name)
        for body in bodies:
            if body["name"] in there and _mark(there[body["name"]]) != _mark(body):
                raise UserError(f"node pool {body['name']} of {cluster} is not this cluster's", "use another name")
        enough = sum(fits(pool, bodies[0]) for pool in there.values()) >= len(bodies)
        begun = bool(records) or len(missing) < len(bodies)
        if any(one.failure for one in records) or (enough and not begun):
            return
        made = [pool for pool in there.values() if _mark(pool)[0] == _mark(bodies[0])[0] and _mark(pool)[1]]
        if most is not None and missing and len(made) + len(missing) > most:
            raise ProviderError(
                f"{len(made)} node pools of launches are in {cluster}, and node_pools.most of gke.yaml is {most}"
            )
        for body in missing:
            if not api.begin_create(cluster, body, name):
                raise ProviderError(f"node pool {body['name']} waits for another change of the cluster {cluster}")

    def _observed(self, name: str, cluster: str, seen: Observation) -> Observation:
        records = self.records.of_launch(name)
        if not records:
            return seen
        if seen.condition == "creating":
            own = self._own(name, cluster)
            records = [self._looked(record, own.get(record.name)) for record in records]
            if failures := [one.failure for one in records if one.failure]:
                why = f"a node pool could not be made: {failures[0]}"
                return Observation(condition="failed", reason=why, elsewhere=True)
            if coming := [one for one in records if one.ready is None]:
                what = f"node pool {coming[0].name} is being made in {cluster}"
                seen = msgspec.structs.replace(seen, reason=what)
        since = [one.ready for one in records if one.ready is not None]
        return msgspec.structs.replace(seen, billed_since=min(since)) if since else seen

    def _looked(self, record: PoolRecord, pool: NodePoolView | None) -> PoolRecord:
        """The record with what has become of its pool."""
        if record.failure:
            return record
        if pool is None or pool.status == "ERROR":
            failure = self._open().failure_of(record) if record.operation else ""
            if pool is not None:
                failure = failure or "Kubernetes Engine does not say why"
            return self.records.change(record, failure=failure) if failure else record
        if record.ready is None and pool.status not in _CONDITIONS:
            return self.records.change(record, ready=time.time())
        return record

    def _own(self, name: str, cluster: str) -> dict[str, NodePoolView]:
        """Its pools, by their names: those that say so, and those that its records name."""
        known = {one.name for one in self.records.of_launch(name)}
        pools, owner = self._open().pools(cluster), self._owner()
        return {one.name: one for one in pools if one.launch == name and (one.name in known or one.owner == owner)}

    def _left(self, name: str, cluster: str) -> bool:
        return bool(self.records.of_launch(name)) or bool(self._own(name, cluster))

    def _remove(self, name: str, cluster: str) -> bool:
        from podway.providers.gke.container_api import NoGkeCluster

        api, records = self._open(), self.records.of_launch(name)
        elsewhere = [one.endpoint or "Google Cloud" for one in records if one.endpoint != api.endpoint]
        if elsewhere:
            raise ProviderError(
                f"the node pools of {name} were made at {elsewhere[0]}, and this server is set to another"
            )
        try:
            own = self._own(name, cluster)
        except NoGkeCluster:
            own = {}  # its pools went with it
        for pool in own.values():
            if pool.status != "STOPPING":
                api.begin_delete(cluster, pool.name)
        for record in records:
            answered = record.operation or record.failure or time.time() - record.asked > self.settle_s
            if record.name not in own and answered:
                self.records.remove(record)
        return not own and not self.records.of_launch(name)

    def _owned(self, clusters: Iterable[str]) -> list[OwnedResource]:
        from podway.providers.gke.container_api import NoGkeCluster

        found: list[NodePoolView] = []
        for cluster in sorted(clusters):
            with contextlib.suppress(NoGkeCluster):
                found += self._open().pools(cluster)
        return [_resource(one) for one in found if one.launch]


def _mark(pool: Body) -> tuple[str, str]:
    """Whose it is: the owner, and the name of the launch's objects."""
    labels = (pool.get("config") or {}).get("resourceLabels") or {}
    return str(labels.get(OWNER_LABEL, "")), str(labels.get(LAUNCH_LABEL, ""))


def _resource(pool: NodePoolView) -> OwnedResource:
    place = pool.cluster.split("/")[3]
    cost = None
    if pool.nodes:  # else it grows from zero, and may have none
        with contextlib.suppress(UserError):
            cost = hourly_price(pool.accelerator_type, pool.topology or None, place, spot=pool.tier == "spot")
    return OwnedResource(
        cluster=pool.launch,
        owner=pool.owner,
        kind=NODE_POOL_KIND,
        name=pool.path,
        zone=place,
        condition=_CONDITIONS.get(pool.status, "ready"),
        accelerator_type=pool.accelerator_type,
        hourly_cost=cost,
    )
