"""Node pools by the official client of Kubernetes Engine, over REST; with PODWAY_GCP_ENDPOINT the same calls go to the sandbox.

A pool's record is written before it is asked for and removed when it is gone, so that `podway gke node-pool list` knows every cluster
that may hold one. A pool whose creation failed is deleted: Kubernetes Engine keeps it, with whatever nodes it has.

Commands wait for what they begin (`create`, `wait_made`); a server begins it and looks again later (`begin_create`, `begin_delete`).
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from google.api_core import exceptions
from google.cloud import container_v1
from google.protobuf.json_format import ParseError

from podway import crash
from podway.errors import ProviderError, UserError
from podway.providers.gcp.account import Account
from podway.providers.gcp.errors import GcpError, explain, failed_operation
from podway.providers.gke.node_pools import Body, NodePoolView, view
from podway.providers.gke.pool_records import BUSY_S, PoolRecord, PoolRecords

CALL_S = 30.0
POLL_S = 5.0
Answer = TypeVar("Answer")


class NoGkeCluster(UserError):
    """There is no such cluster, and so nothing in it."""


class ContainerApi:
    """The calls, as the account of the Podway home."""

    def __init__(self, root: Path) -> None:
        account = Account(root)
        self.endpoint = account.settings.endpoint or ""
        options = {"api_endpoint": self.endpoint} if self.endpoint else {}
        try:
            credentials = account.credentials()
        except GcpError as error:
            raise error.as_error() from None
        self._client = container_v1.ClusterManagerClient(
            transport="rest", credentials=credentials, client_options=options
        )
        self.records = PoolRecords(root)

    def taken(self, cluster: str) -> set[str]:
        """The names of all pools, whoever made them."""
        return {str(pool.name) for pool in self._list(cluster)}

    def pools(self, cluster: str) -> list[NodePoolView]:
        """Those with Podway's labels."""
        return [one for pool in self.bodies(cluster) if (one := view(cluster, pool)) is not None]

    def bodies(self, cluster: str) -> list[Body]:
        """All pools, as the API's JSON has them."""
        found = [container_v1.NodePool.to_json(pool, use_integers_for_enums=False) for pool in self._list(cluster)]
        return [msgspec.json.decode(text) for text in found]

    def begin_create(self, cluster: str, body: Body, launch: str) -> bool:
        """Ask for a pool, of which a record is written before; False: the cluster is busy, so ask again later."""
        name = body["name"]
        record = PoolRecord(cluster=cluster, name=name, launch=launch, endpoint=self.endpoint, asked=time.time())
        request = container_v1.CreateNodePoolRequest(parent=cluster, node_pool=_message(body))
        self.records.add(record)
        crash.point("node-pool.before-create")
        try:
            made = self._client.create_node_pool(request=request, retry=None, timeout=CALL_S)
        except Exception as error:
            told = explain(error, name, None)
            if told.sure and (_is_busy(error) or told.kind in ("never", "again")):
                self.records.remove(record)
            if _is_busy(error):
                return False
            if told.kind in ("elsewhere", "absent"):
                self.records.change(record, failure=told.what)
                return True
            if told.kind == "exists":  # an answer was lost
                return True
            raise told.as_error() from None
        crash.point("node-pool.after-create")
        self.records.change(record, operation=_operation_name(cluster, made))
        return True

    def begin_delete(self, cluster: str, name: str) -> None:
        """Ask for a pool to be deleted; nothing where it is gone, or the cluster is busy: whoever looks again asks again."""
        crash.point("node-pool.before-delete")
        try:
            self._client.delete_node_pool(name=f"{cluster}/nodePools/{name}", retry=None, timeout=CALL_S)
        except Exception as error:
            told = explain(error, name, None)
            if told.kind != "absent" and not _is_busy(error):
                raise told.as_error() from None
        crash.point("node-pool.after-delete")

    def failure_of(self, record: PoolRecord) -> str:
        """Why the operation that makes it failed; '': it did not, or nobody knows any more."""
        try:
            done = self._call(
                lambda: self._client.get_operation(name=record.operation, retry=None, timeout=CALL_S), record.name
            )
        except GcpError as error:
            if error.kind == "absent":  # forgotten after some days
                return ""
            raise error.as_error() from None
        return failed_operation(done.error.code, done.error.message, record.name, None).what if done.error.code else ""

    def create(self, cluster: str, body: Body, on_wait: Callable[[str], None]) -> str:
        """Begin to make it; the name of the operation."""
        request = container_v1.CreateNodePoolRequest(parent=cluster, node_pool=_message(body))
        self.records.add(PoolRecord(cluster=cluster, name=body["name"]))
        try:
            made = self._when_free(
                lambda: self._client.create_node_pool(request=request, retry=None, timeout=CALL_S),
                body["name"],
                on_wait,
            )
        except GcpError as error:
            if error.sure:
                self.records.remove(PoolRecord(cluster=cluster, name=body["name"]))
            raise error.as_error() from None
        return _operation_name(cluster, made)

    def delete(self, cluster: str, name: str, on_wait: Callable[[str], None]) -> str | None:
        """Begin to delete it; the name of the operation, None where it is gone."""
        try:
            made = self._when_free(
                lambda: self._client.delete_node_pool(name=f"{cluster}/nodePools/{name}", retry=None, timeout=CALL_S),
                name,
                on_wait,
            )
        except GcpError as error:
            if error.kind == "absent":
                self.records.remove(PoolRecord(cluster=cluster, name=name))
                return None
            raise error.as_error() from None
        return _operation_name(cluster, made)

    def wait_made(self, cluster: str, name: str, operation: str, on_wait: Callable[[str], None]) -> None:
        """Until it is there. One that failed is deleted, and why is raised."""
        try:
            self._wait(operation, name)
        except GcpError as error:
            deletion = self.delete(cluster, name, on_wait)
            if deletion is not None:
                self.wait_gone(cluster, name, deletion)
            hint = error.hint or "nothing is left of it; try another zone, or another way to get capacity"
            raise UserError(f"node pool {name} could not be made: {error.what}", hint) from None

    def wait_gone(self, cluster: str, name: str, operation: str) -> None:
        """Until nothing is left of it."""
        try:
            self._wait(operation, name)
        except GcpError as error:
            raise error.as_error() from None
        self.records.remove(PoolRecord(cluster=cluster, name=name))

    def forget_absent(self, cluster: str, there: set[str]) -> None:
        """Records of pools that somebody else deleted go."""
        for record in self.records.all():
            gone = record.cluster == cluster and record.name not in there and not record.launch
            if gone and self.records.is_old(record):
                self.records.remove(record)

    def _list(self, cluster: str) -> Iterator[container_v1.NodePool]:
        try:
            found = self._call(
                lambda: self._client.list_node_pools(parent=cluster, retry=None, timeout=CALL_S), f"cluster {cluster}"
            )
        except GcpError as error:
            if error.kind == "absent":
                raise NoGkeCluster(
                    f"there is no GKE cluster {cluster}", "see: gcloud container clusters list"
                ) from None
            raise error.as_error() from None
        return iter(found.node_pools)

    def _wait(self, operation: str, wanted: str) -> None:
        while True:
            done = self._call(
                lambda: self._client.get_operation(name=operation, retry=None, timeout=CALL_S), wanted, patient=True
            )
            if done.status == container_v1.Operation.Status.DONE:
                if done.error.code:
                    raise failed_operation(done.error.code, done.error.message, wanted, None)
                return
            time.sleep(POLL_S)

    def _when_free(self, make: Callable[[], Answer], wanted: str, on_wait: Callable[[str], None]) -> Answer:
        """Other changes of the same cluster come first: the API refuses until they are done."""
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                return make()
            except Exception as error:
                if not _is_busy(error) or time.monotonic() > deadline:
                    raise explain(error, wanted, None) from None
                on_wait(f"{wanted} waits for another change of the cluster")
                time.sleep(POLL_S)

    def _call(self, make: Callable[[], Answer], wanted: str, *, patient: bool = False) -> Answer:
        """`patient`: what is under way goes on, so a lost connection is no end of waiting."""
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                return make()
            except Exception as error:
                told = explain(error, wanted, None)
                if not patient or told.kind != "again" or time.monotonic() > deadline:
                    raise told from None
                time.sleep(POLL_S)


def _operation_name(cluster: str, operation: container_v1.Operation) -> str:
    return f"{cluster.partition('/clusters/')[0]}/operations/{operation.name}"


def _message(body: Body) -> container_v1.NodePool:
    try:
        made: container_v1.NodePool = container_v1.NodePool.from_json(msgspec.json.encode(body).decode())
        return made
    except ParseError as error:
        raise ProviderError(f"NodePool cannot be sent: {error}", transient=False) from None


def _is_busy(error: Exception) -> bool:
    """Whether another change of the cluster comes first: the name of the status, which the body of the answer has."""
    if not isinstance(error, exceptions.GoogleAPICallError):
        return False
    try:
        return str(error.response.json()["error"]["status"]) == "FAILED_PRECONDITION"
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
