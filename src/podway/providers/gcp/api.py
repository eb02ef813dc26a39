"""The calls: the official Cloud TPU clients, and what Compute Engine and Service Usage are asked over an authorized session.

What there is comes as a plain `Thing` and an error as a `Trouble` (gcp_errors.py), whichever client told it. All of it blocks; the
provider calls it by `aside`. Nothing is retried here, since whoever calls looks again anyway. With PODWAY_GCP_ENDPOINT the same calls
go to an emulator.

TPU VMs and queued resources are version 2 of the API, over REST. Best-effort capacity is in v2alpha1 only, and legacy TPU Nodes
are v1; of both the official client speaks gRPC alone.
"""

import asyncio
import functools
import re
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import msgspec
import requests
from google.api_core.exceptions import from_http_response
from google.auth.transport.requests import AuthorizedSession
from google.cloud import tpu_v1, tpu_v2, tpu_v2alpha1
from google.protobuf.json_format import ParseError

from podway.providers import Step
from podway.providers.gcp.errors import Trouble, explain, failed_operation
from podway.providers.gcp.quota import SERVICE, Quota, read_quotas
from podway.providers.gcp.resources import (
    Kind,
    Sight,
    Thing,
    from_disk,
    from_firewall,
    from_instance,
    from_node,
    from_queued_resource,
    from_tpu_node,
    wanted_of,
    zone_of,
)
from podway.providers.gcp.settings import Account

THREADS = 16
CALL_S = 30.0
ASK_S = 8.0  # for what can be done without
COMPUTE = "https://compute.googleapis.com"
SERVICE_USAGE = "https://serviceusage.googleapis.com"
EVERYWHERE = "-"  # the API's word for all zones

Answer = TypeVar("Answer")


class Cloud:
    """One project, as this account sees it."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._threads = ThreadPoolExecutor(THREADS, "gcp")

    async def aside(self, work: Callable[..., Answer], *arguments: Any) -> Answer:
        """Do it in a thread of the cloud's own: one that does not answer holds up nothing else of the server."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    # looking

    def look(self, kinds: Iterable[Kind], zones: tuple[str, ...] = (EVERYWHERE,)) -> Sight:
        """Everything of these kinds in these zones that carries Podway's mark."""
        things: list[Thing] = []
        blind: set[str] = set()
        for kind in kinds:
            for zone in zones if kind != "firewall rule" else ("",):
                seen = self._list(kind, zone)
                things += seen.things
                blind |= set(seen.blind)
        return Sight(things=tuple(things), blind=tuple(sorted(blind)))

    def _list(self, kind: Kind, zone: str) -> Sight:
        pages: list[Any] = []
        match kind:
            case "queued resource":
                pages = self._pages(self._v2.list_queued_resources, zone)
                found = [from_queued_resource(item) for page in pages for item in page.queued_resources]
            case "node":
                pages = self._pages(self._v2.list_nodes, zone)
                found = [from_node(item) for page in pages for item in page.nodes if "V1" not in item.api_version.name]
            case "tpu node":
                pages = self._pages(self._v1.list_nodes, zone)
                found = [from_tpu_node(item) for page in pages for item in page.nodes if item.api_version.name == "V1"]
            case "instance":
                found = [from_instance(item) for item in self._call(lambda: self._items("instances", zone))]
            case "disk":
                found = [from_disk(item) for item in self._call(lambda: self._items("disks", zone))]
            case "firewall rule":
                found = [from_firewall(item) for item in self._call(lambda: self._items("firewalls", ""))]
        blind = tuple(str(name).rpartition("/")[2] for page in pages for name in page.unreachable)
        return Sight(things=tuple(thing for thing in found if thing is not None), blind=blind)

    def _pages(self, listing: Callable[..., Any], zone: str) -> list[Any]:
        parent = f"projects/{self._account.project}/locations/{zone}"
        where = None if zone == EVERYWHERE else zone
        return self._call(lambda: list(listing(parent=parent, retry=None, timeout=CALL_S).pages), zone=where)

    def has_type(self, zone: str, accelerator_type: str) -> bool:
        """Whether the project is offered this accelerator type in the zone."""
        name = f"projects/{self._account.project}/locations/{zone}/acceleratorTypes/{accelerator_type}"
        try:
            self._call(lambda: self._v2.get_accelerator_type(name=name, retry=None, timeout=ASK_S), zone=zone)
        except Trouble as trouble:
            if trouble.kind == "absent":
                return False
            raise
        return True

    def quotas(self) -> tuple[Quota, ...]:
        """What the project may hold of each TPU, and where."""
        url = f"{self._account.settings.endpoint or SERVICE_USAGE}/v1beta1/projects/{self._account.project}"
        url = f"{url}/services/{SERVICE}/consumerQuotaMetrics"
        found: list[dict[str, Any]] = []
        token: str | None = ""
        while token is not None:
            params = {"pageSize": "1000", "view": "BASIC", "pageToken": token}
            page = self._call(functools.partial(self._rest, "GET", url, params=params, seconds=ASK_S))
            found += page.get("metrics", [])
            token = page.get("nextPageToken") or None
        return read_quotas(found)

    def guest_attributes(self, path: str) -> list[dict[str, str]]:
        """What each worker of a node says of itself: its ssh host keys among it, as `hostkeys/ssh-ed25519`."""
        request = {"name": path}
        answer = self._call(lambda: self._v2.get_guest_attributes(request=request, retry=None, timeout=ASK_S))
        return [
            {f"{item.namespace}/{item.key}": item.value for item in worker.query_value.items}
            for worker in answer.guest_attributes
        ]

    def outcome(self, operation: str, wanted: str, zone: str | None) -> None:
        """Raise what an operation failed with; return while it goes on or when it went well."""
        if "/compute/" in operation:
            done = self._call(lambda: self._compute("GET", operation.partition("/compute/")[2]))
            errors = done.get("error", {}).get("errors", [])
            if errors:
                text = f"{errors[0].get('code', '')}: {errors[0].get('message', '')}"
                code = 8 if re.search("QUOTA|RESOURCE_POOL|STOCKOUT", text) else 3
                raise failed_operation(code, text, wanted, zone)
            return
        found = self._call(lambda: self._v2.get_operation({"name": operation}, retry=None, timeout=CALL_S))
        if found.done and found.HasField("error"):
            raise failed_operation(found.error.code, found.error.message, wanted, zone)

    # doing

    def perform(self, step: Step, nonce: str) -> str:
        """Make one step's call; the name of the operation that it began. `nonce` makes a call that is repeated one call."""
        parent, _, name = step.target.rpartition("/")
        parent, _, collection = parent.rpartition("/")
        wanted = wanted_of(step)
        zone = zone_of(step.target)
        request_id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{nonce}/{step.target}"))

        def make() -> str:
            match step.verb:
                case "create-queued-resource" | "create-queued-resource-v2alpha1":
                    alpha = step.verb.endswith("v2alpha1")
                    library: Any = tpu_v2alpha1 if alpha else tpu_v2
                    request = library.CreateQueuedResourceRequest(
                        parent=parent,
                        queued_resource_id=name,
                        queued_resource=_proto(library.QueuedResource, step.body),
                        request_id=request_id,
                    )
                    client: Any = self._v2alpha1 if alpha else self._v2
                    return _operation(client.create_queued_resource(request=request, retry=None, timeout=CALL_S))
                case "create-node":
                    node = _proto(tpu_v2.Node, step.body)
                    made = self._v2.create_node(parent=parent, node_id=name, node=node, retry=None, timeout=CALL_S)
                    return _operation(made)
                case "create-tpu-node":
                    node = _proto(tpu_v1.Node, step.body)
                    made = self._v1.create_node(parent=parent, node_id=name, node=node, retry=None, timeout=CALL_S)
                    return _operation(made)
                case _:
                    answer = self._compute(
                        "POST", f"v1/{parent}/{collection}", body=step.body, params={"requestId": request_id}
                    )
                    return _compute_path(answer.get("selfLink", ""))

        return self._call(make, wanted=wanted, zone=zone)

    def delete(self, thing: Thing) -> None:
        """Begin to delete it; silence when it is gone."""
        try:
            self._call(lambda: self._delete(thing), wanted=thing.id, zone=thing.zone)
        except Trouble as trouble:
            if trouble.kind != "absent":
                raise

    def _delete(self, thing: Thing) -> None:
        match thing.kind:
            case "queued resource":
                request = tpu_v2.DeleteQueuedResourceRequest(name=thing.path, force=True)
                self._v2.delete_queued_resource(request=request, retry=None, timeout=CALL_S)
            case "node":
                self._v2.delete_node(name=thing.path, retry=None, timeout=CALL_S)
            case "tpu node":
                self._v1.delete_node(name=thing.path, retry=None, timeout=CALL_S)
            case _:
                self._compute("DELETE", f"v1/{thing.path}")

    def switch(self, thing: Thing, on: bool) -> str:
        """Begin to start or stop a node or an instance; the name of the operation."""
        return self._call(lambda: self._switch(thing, on), wanted=thing.accelerator_type or thing.id, zone=thing.zone)

    def _switch(self, thing: Thing, on: bool) -> str:
        if thing.kind == "instance":
            answer = self._compute("POST", f"v1/{thing.path}/{'start' if on else 'stop'}")
            return _compute_path(answer.get("selfLink", ""))
        client = self._v1 if thing.kind == "tpu node" else self._v2
        call = client.start_node if on else client.stop_node
        return _operation(call(request={"name": thing.path}, retry=None, timeout=CALL_S))

    # the clients

    def _call(self, make: Callable[[], Answer], *, wanted: str = "it", zone: str | None = None) -> Answer:
        try:
            return make()
        except Exception as error:
            raise explain(error, wanted, zone) from None

    @functools.cached_property
    def _v2(self) -> Any:
        endpoint = self._account.settings.endpoint
        options = {"api_endpoint": endpoint} if endpoint else {}
        return tpu_v2.TpuClient(transport="rest", credentials=self._account.credentials(), client_options=options)

    @functools.cached_property
    def _v2alpha1(self) -> Any:
        return self._over_grpc(tpu_v2alpha1.TpuClient)

    @functools.cached_property
    def _v1(self) -> Any:
        return self._over_grpc(tpu_v1.TpuClient)

    def _over_grpc(self, client: Any) -> Any:
        address = self._account.settings.grpc
        if not address:
            return client(credentials=self._account.credentials())
        transport = client.get_transport_class("grpc")
        return client(transport=transport(channel=grpc.insecure_channel(address)))

    @functools.cached_property
    def _session(self) -> requests.Session:
        return AuthorizedSession(self._account.credentials())  # type: ignore[no-untyped-call]

    def _compute(
        self, method: str, path: str, body: dict[str, Any] | None = None, params: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """One call of Compute Engine; `path` begins with its version."""
        return self._rest(method, f"{self._account.settings.endpoint or COMPUTE}/compute/{path}", body, params)

    def _rest(
        self,
        method: str,
        url: str,
        body: dict[str, Any] | None = None,
        params: dict[str, str] | None = None,
        seconds: float = CALL_S,
    ) -> dict[str, Any]:
        answer = self._session.request(method, url, json=body, params=params, timeout=seconds)
        if answer.status_code >= 400:
            raise from_http_response(answer)  # type: ignore[no-untyped-call]
        found: dict[str, Any] = answer.json() if answer.content else {}
        return found

    def _items(self, collection: str, zone: str) -> list[dict[str, Any]]:
        """All pages of a list that may hold something of ours, over one zone, all zones, or none."""
        project = f"v1/projects/{self._account.project}"
        where = {"": "global", EVERYWHERE: "aggregated"}.get(zone, f"zones/{zone}")
        params: dict[str, str] = {"filter": "labels.podway-owner:*"} if zone else {}
        found: list[dict[str, Any]] = []
        more = True
        while more:
            page = self._compute("GET", f"{project}/{where}/{collection}", params=params)
            items = page.get("items", [])
            parts = items.values() if isinstance(items, dict) else [{collection: items}]
            found += [item for part in parts for item in part.get(collection, [])]
            more = bool(page.get("nextPageToken"))
            params = {**params, "pageToken": page.get("nextPageToken", "")}
        return found


def _proto(kind: Any, body: dict[str, Any]) -> Any:
    """The client's own message from JSON: a field it does not know is our mistake, seen here."""
    try:
        return kind.from_json(msgspec.json.encode(body).decode())
    except ParseError as error:
        raise Trouble("never", f"{kind.__name__} cannot be sent: {error}", "this is a bug of Podway") from None


def _operation(made: Any) -> str:
    return str(made.operation.name)


def _compute_path(link: str) -> str:
    return "/compute/" + link.partition("/compute/")[2] if "/compute/" in link else ""
