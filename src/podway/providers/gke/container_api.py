"""Node pools by the official client of Kubernetes Engine, over REST; with PODWAY_GCP_ENDPOINT the same calls go to the sandbox.

A pool's record is written before it is asked for and removed when it is gone, so that `podway gke node-pool list` knows every cluster
that may hold one. A pool whose creation failed is deleted: Kubernetes Engine keeps it, with whatever nodes it has.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from google.api_core import exceptions
from google.cloud import container_v1
from google.protobuf.json_format import ParseError

from podway.decoding import from_json
from podway.errors import ProviderError, UserError
from podway.files import write_atomically
from podway.providers.gcp.account import Account
from podway.providers.gcp.errors import GcpError, explain, failed_operation
from podway.providers.gke.node_pools import Body, NodePoolView, view

CALL_S = 30.0
POLL_S = 5.0
BUSY_S = 900.0  # another change of the cluster is under way: creation and deletion wait for it
Answer = TypeVar("Answer")


class PoolRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node pool that was asked for."""

    cluster: str
    name: str


class PoolRecords:
    """Files in PODWAY_HOME/gke/node-pools."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "gke" / "node-pools"

    def all(self) -> list[PoolRecord]:
        """Those that may exist."""
        paths = sorted(self._folder.glob("*/*.json")) if self._folder.is_dir() else []
        return [from_json(path.read_bytes(), PoolRecord) for path in paths]

    def add(self, record: PoolRecord) -> None:
        """Before it is asked for."""
        path = self._path(record)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, msgspec.json.encode(record))

    def is_old(self, record: PoolRecord) -> bool:
        """Whether its creation was asked for long ago, so that the API would show it."""
        try:
            return self._path(record).stat().st_mtime < time.time() - BUSY_S
        except FileNotFoundError:
            return True

    def remove(self, record: PoolRecord) -> None:
        """It is gone."""
        self._path(record).unlink(missing_ok=True)

    def _path(self, record: PoolRecord) -> Path:
        return self._folder / record.cluster.replace("/", "_") / f"{record.name}.json"


class ContainerApi:
    """The calls, as the account of the Podway home."""

    def __init__(self, root: Path) -> None:
        account = Account(root)
        endpoint = account.settings.endpoint
        options = {"api_endpoint": endpoint} if endpoint else {}
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
        found = [container_v1.NodePool.to_json(pool, use_integers_for_enums=False) for pool in self._list(cluster)]
        return [one for text in found if (one := view(cluster, msgspec.json.decode(text))) is not None]

    def create(self, cluster: str, body: Body, on_wait: Callable[[str], None]) -> str:
        """Begin to make it; the name of the operation."""
        try:
            pool = container_v1.NodePool.from_json(msgspec.json.encode(body).decode())
        except ParseError as error:
            raise ProviderError(f"NodePool cannot be sent: {error}", transient=False) from None
        request = container_v1.CreateNodePoolRequest(parent=cluster, node_pool=pool)
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
            if record.cluster == cluster and record.name not in there and self.records.is_old(record):
                self.records.remove(record)

    def _list(self, cluster: str) -> Iterator[container_v1.NodePool]:
        try:
            found = self._call(
                lambda: self._client.list_node_pools(parent=cluster, retry=None, timeout=CALL_S), f"cluster {cluster}"
            )
        except GcpError as error:
            if error.kind == "absent":
                raise UserError(f"there is no GKE cluster {cluster}", "see: gcloud container clusters list") from None
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
            except exceptions.GoogleAPICallError as error:
                if _status(error) != "FAILED_PRECONDITION" or time.monotonic() > deadline:
                    raise explain(error, wanted, None) from None
                on_wait(f"{wanted} waits for another change of the cluster")
                time.sleep(POLL_S)
            except Exception as error:
                raise explain(error, wanted, None) from None

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


def _status(error: exceptions.GoogleAPICallError) -> str:
    """The name of the status, which the body of the answer has."""
    try:
        return str(error.response.json()["error"]["status"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return ""
