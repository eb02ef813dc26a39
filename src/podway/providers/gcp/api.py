"""The calls: the official Cloud TPU clients, and what Compute Engine and Service Usage are asked over an authorized session.

What there is comes as a plain `Resource` and an error as a `GcpError` (errors.py), whichever client told it. All of it blocks; the
provider calls it by `in_thread`. Nothing is retried here, since the caller looks again anyway. With PODWAY_GCP_ENDPOINT the same calls
go to an emulator.

TPU VMs and queued resources are version 2 of the API, over REST. Best-effort capacity is in v2alpha1 only, and legacy TPU Nodes
are v1; of both the official client speaks gRPC alone.
"""

import asyncio
import functools
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import Literal, ParamSpec, Protocol, TypedDict, TypeVar

import grpc
import msgspec
import requests
from google.api_core.exceptions import from_http_response
from google.api_core.operation import Operation
from google.auth.transport.requests import AuthorizedSession
from google.cloud import tpu_v1, tpu_v2, tpu_v2alpha1
from google.protobuf.json_format import ParseError

from podway.decoding import from_plain
from podway.providers import Step
from podway.providers.gcp.account import Account
from podway.providers.gcp.emulator import open_channel
from podway.providers.gcp.errors import GcpError, explain, failed_operation
from podway.providers.gcp.project_check import check_project
from podway.providers.gcp.quota import SERVICE, MetricItem, Quota, read_quotas
from podway.providers.gcp.resources import (
    ComputeItem,
    Kind,
    Listing,
    Resource,
    from_disk,
    from_firewall,
    from_instance,
    from_node,
    from_queued_resource,
    from_tpu_node,
    from_volume_disk,
    wanted_of,
    zone_of,
)


class _CallOptions(TypedDict):
    retry: None
    timeout: float


THREADS = 16
CALL_S = 30.0
ASK_S = 8.0  # for what can be done without
COMPUTE = "https://compute.googleapis.com"
SERVICE_USAGE = "https://serviceusage.googleapis.com"
EVERYWHERE = "-"  # the API's word for all zones
_ONCE = _CallOptions(retry=None, timeout=CALL_S)

Answer = TypeVar("Answer")
Parameters = ParamSpec("Parameters")
Message = TypeVar("Message", tpu_v1.Node, tpu_v2.Node, tpu_v2.QueuedResource, tpu_v2alpha1.QueuedResource)


class _ErrorItem(msgspec.Struct, frozen=True):
    code: str = ""
    message: str = ""


class _Errors(msgspec.Struct, frozen=True):
    errors: tuple[_ErrorItem, ...] = ()


class _Operation(msgspec.Struct, frozen=True, rename="camel"):
    """An operation of Compute Engine."""

    self_link: str = ""
    error: _Errors = _Errors()


class _ItemList(msgspec.Struct, frozen=True):
    instances: tuple[ComputeItem, ...] = ()
    disks: tuple[ComputeItem, ...] = ()


class _Page(msgspec.Struct, frozen=True, rename="camel"):
    """A list of one place; `_AllPlaces` is one of all of them, by place."""

    items: tuple[ComputeItem, ...] = ()
    next_page_token: str = ""


class _AllPlaces(msgspec.Struct, frozen=True, rename="camel"):
    items: dict[str, _ItemList] = {}
    next_page_token: str = ""


class _Metrics(msgspec.Struct, frozen=True, rename="camel"):
    metrics: tuple[MetricItem, ...] = ()
    next_page_token: str = ""


class _WithUnreachable(Protocol):
    """A page of any of the clients' lists."""

    @property
    def unreachable(self) -> Sequence[str]: ...


class Cloud:
    """One project, as this account sees it."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._threads = ThreadPoolExecutor(THREADS, "gcp")

    async def in_thread(
        self, work: Callable[Parameters, Answer], *arguments: Parameters.args, **named: Parameters.kwargs
    ) -> Answer:
        """Do it in a thread of the cloud's own: one that does not answer holds up nothing else of the server."""
        call = functools.partial(work, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    # looking

    def look(self, kinds: Iterable[Kind], zones: tuple[str, ...] = (EVERYWHERE,)) -> Listing:
        """Everything of these kinds in these zones that carries Podway's mark."""
        resources: list[Resource] = []
        unreachable: set[str] = set()
        for kind in kinds:
            for zone in zones if kind != "firewall rule" else ("",):
                seen = self._list(kind, zone)
                resources += seen.resources
                unreachable |= set(seen.unreachable)
        return Listing(resources=tuple(resources), unreachable=tuple(sorted(unreachable)))

    def _list(self, kind: Kind, zone: str) -> Listing:
        match kind:
            case "queued resource":
                queues = self._pages(lambda parent: self._v2.list_queued_resources(parent=parent, **_ONCE).pages, zone)
                found = [from_queued_resource(item) for page in queues for item in page.queued_resources]
                return _listing(found, queues)
            case "node":
                nodes = self._pages(lambda parent: self._v2.list_nodes(parent=parent, **_ONCE).pages, zone)
                found = [from_node(item) for page in nodes for item in page.nodes if "V1" not in item.api_version.name]
                return _listing(found, nodes)
            case "tpu node":
                old = self._pages(lambda parent: self._v1.list_nodes(parent=parent, **_ONCE).pages, zone)
                found = [from_tpu_node(item) for page in old for item in page.nodes if item.api_version.name == "V1"]
                return _listing(found, old)
            case "instance":
                return _listing([from_instance(item) for item in self._call(lambda: self._items("instances", zone))])
            case "disk":
                return _listing([from_disk(item) for item in self._call(lambda: self._items("disks", zone))])
            case "firewall rule":
                return _listing([from_firewall(item) for item in self._call(lambda: self._items("firewalls", ""))])

    def _pages(self, pages: Callable[[str], Iterable[Answer]], zone: str) -> list[Answer]:
        parent = f"projects/{self._account.project}/locations/{zone}"
        where = None if zone == EVERYWHERE else zone
        return self._call(lambda: list(pages(parent)), zone=where)

    def volume_disks(self) -> list[Resource]:
        """The disks of volumes, in every zone."""
        items = self._call(lambda: self._items("disks", EVERYWHERE))
        return [found for found in map(from_volume_disk, items) if found is not None]

    def disk(self, path: str) -> ComputeItem:
        """A disk of Compute Engine, whoever made it."""
        return self._call(lambda: self._compute(ComputeItem, "GET", f"v1/{path}"), zone=zone_of(path))

    def check_project(self) -> None:
        """A UserError where nothing can be done in the project; silence where that is not known."""
        try:
            check_project(self._account)
        except GcpError as error:
            if error.kind == "never":
                raise error.as_error() from None

    def has_type(self, zone: str, accelerator_type: str) -> bool:
        """Whether the project is offered this accelerator type in the zone."""
        name = f"projects/{self._account.project}/locations/{zone}/acceleratorTypes/{accelerator_type}"
        try:
            self._call(lambda: self._v2.get_accelerator_type(name=name, retry=None, timeout=ASK_S), zone=zone)
        except GcpError as error:
            if error.kind == "absent":
                return False
            raise
        return True

    def quotas(self) -> tuple[Quota, ...]:
        """What the project may hold of each TPU, and where."""
        url = f"{self._account.settings.endpoint or SERVICE_USAGE}/v1beta1/projects/{self._account.project}"
        url = f"{url}/services/{SERVICE}/consumerQuotaMetrics"
        found: list[MetricItem] = []
        token: str | None = ""
        while token is not None:
            params = {"pageSize": "1000", "view": "BASIC", "pageToken": token}
            page = self._call(functools.partial(self._rest, _Metrics, "GET", url, params=params, seconds=ASK_S))
            found += page.metrics
            token = page.next_page_token or None
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
            done = self._call(lambda: self._compute(_Operation, "GET", operation.partition("/compute/")[2]))
            if done.error.errors:
                text = f"{done.error.errors[0].code}: {done.error.errors[0].message}"
                code = 8 if re.search("QUOTA|RESOURCE_POOL|STOCKOUT", text) else 3
                raise failed_operation(code, text, wanted, zone)
            return
        found = self._call(lambda: self._v2.get_operation({"name": operation}, retry=None, timeout=CALL_S))
        if found.done and found.HasField("error"):
            raise failed_operation(found.error.code, found.error.message, wanted, zone)

    def ready_since(self, operations: Mapping[str, str]) -> float:
        """Since when nodes that are READY now are so, on average: the ends of what made or last started them; now, if not told."""
        started = [name for key, name in operations.items() if key.startswith("start ") and name]
        made = [name for key, name in operations.items() if "/nodes/" in key and " " not in key]
        ends = [self._ended(name) for name in started or made if name and "/compute/" not in name]
        known = [end for end in ends if end is not None]
        return fmean(known) if known else time.time()

    def _ended(self, operation: str) -> float | None:
        """When an operation on a node ended well."""
        try:
            found = self._call(lambda: self._v2.get_operation({"name": operation}, retry=None, timeout=CALL_S))
        except GcpError:
            return None
        told = tpu_v2.OperationMetadata.pb(tpu_v2.OperationMetadata())  # of v1, the same fields
        if not found.done or found.HasField("error") or not told.ParseFromString(found.metadata.value):
            return None
        return float(told.end_time.ToNanoseconds()) / 1e9 or None

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
                case "create-queued-resource":
                    queued = tpu_v2.CreateQueuedResourceRequest(
                        parent=parent,
                        queued_resource_id=name,
                        queued_resource=_proto(tpu_v2.QueuedResource, step.body),
                        request_id=request_id,
                    )
                    return _operation(self._v2.create_queued_resource(request=queued, **_ONCE))
                case "create-queued-resource-v2alpha1":
                    best_effort = tpu_v2alpha1.CreateQueuedResourceRequest(
                        parent=parent,
                        queued_resource_id=name,
                        queued_resource=_proto(tpu_v2alpha1.QueuedResource, step.body),
                        request_id=request_id,
                    )
                    return _operation(self._v2alpha1.create_queued_resource(request=best_effort, **_ONCE))
                case "create-node":
                    node = _proto(tpu_v2.Node, step.body)
                    return _operation(self._v2.create_node(parent=parent, node_id=name, node=node, **_ONCE))
                case "create-tpu-node":
                    old = _proto(tpu_v1.Node, step.body)
                    return _operation(self._v1.create_node(parent=parent, node_id=name, node=old, **_ONCE))
                case _:
                    path = f"v1/{parent}/{collection}"
                    answer = self._compute(_Operation, "POST", path, body=step.body, params={"requestId": request_id})
                    return _compute_path(answer.self_link)

        return self._call(make, wanted=wanted, zone=zone)

    def delete(self, resource: Resource) -> None:
        """Begin to delete it; silence when it is gone."""
        try:
            self._call(lambda: self._delete(resource), wanted=resource.id, zone=resource.zone)
        except GcpError as error:
            if error.kind != "absent":
                raise

    def _delete(self, resource: Resource) -> None:
        match resource.kind:
            case "queued resource":
                request = tpu_v2.DeleteQueuedResourceRequest(name=resource.path, force=True)
                self._v2.delete_queued_resource(request=request, **_ONCE)
            case "node":
                self._v2.delete_node(name=resource.path, **_ONCE)
            case "tpu node":
                self._v1.delete_node(name=resource.path, **_ONCE)
            case _:
                self._compute(_Operation, "DELETE", f"v1/{resource.path}")

    def switch(self, resource: Resource, on: bool) -> str:
        """Begin to start or stop a node or an instance; the name of the operation."""
        return self._call(
            lambda: self._switch(resource, on), wanted=resource.accelerator_type or resource.id, zone=resource.zone
        )

    def _switch(self, resource: Resource, on: bool) -> str:
        if resource.kind == "instance":
            answer = self._compute(_Operation, "POST", f"v1/{resource.path}/{'start' if on else 'stop'}")
            return _compute_path(answer.self_link)
        client = self._v1 if resource.kind == "tpu node" else self._v2
        request = {"name": resource.path}
        return _operation(client.start_node(request, **_ONCE) if on else client.stop_node(request, **_ONCE))

    # the clients

    def _call(self, make: Callable[[], Answer], *, wanted: str = "it", zone: str | None = None) -> Answer:
        try:
            return make()
        except Exception as error:
            raise explain(error, wanted, zone) from None

    @functools.cached_property
    def _v2(self) -> tpu_v2.TpuClient:
        endpoint = self._account.settings.endpoint
        options = {"api_endpoint": endpoint} if endpoint else {}
        return tpu_v2.TpuClient(transport="rest", credentials=self._account.credentials(), client_options=options)

    @functools.cached_property
    def _v2alpha1(self) -> tpu_v2alpha1.TpuClient:
        channel = self._emulator_channel()
        if channel is None:
            return tpu_v2alpha1.TpuClient(credentials=self._account.credentials())
        return tpu_v2alpha1.TpuClient(transport=tpu_v2alpha1.TpuClient.get_transport_class("grpc")(channel=channel))

    @functools.cached_property
    def _v1(self) -> tpu_v1.TpuClient:
        channel = self._emulator_channel()
        if channel is None:
            return tpu_v1.TpuClient(credentials=self._account.credentials())
        return tpu_v1.TpuClient(transport=tpu_v1.TpuClient.get_transport_class("grpc")(channel=channel))

    def _emulator_channel(self) -> grpc.Channel | None:
        """To the emulator, where one is set: these two versions are spoken over gRPC alone."""
        address = self._account.settings.grpc
        return open_channel(address, self._account.credentials()) if address else None

    @functools.cached_property
    def _session(self) -> requests.Session:
        return AuthorizedSession(self._account.credentials())  # type: ignore[no-untyped-call]

    def _compute(
        self,
        kind: type[Answer],
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        params: dict[str, str] | None = None,
    ) -> Answer:
        """One call of Compute Engine; `path` begins with its version."""
        url = f"{self._account.settings.endpoint or COMPUTE}/compute/{path}"
        return self._rest(kind, method, url, body, params)

    def _rest(
        self,
        kind: type[Answer],
        method: str,
        url: str,
        body: Mapping[str, object] | None = None,
        params: dict[str, str] | None = None,
        seconds: float = CALL_S,
    ) -> Answer:
        """One call; its answer, as far as it is read. Numbers may come as text, as Google's JSON has them."""
        answer = self._session.request(
            method,
            url,
            data=msgspec.json.encode(body) if body is not None else None,
            headers={"Content-Type": "application/json"},
            params=params,
            timeout=seconds,
        )
        if answer.status_code >= 400:
            raise from_http_response(answer)  # type: ignore[no-untyped-call]
        try:
            return from_plain(msgspec.json.decode(answer.content or b"{}"), kind, strict=False)
        except msgspec.MsgspecError as error:  # a proxy in between, most likely
            raise GcpError("again", f"Google Cloud answered what cannot be read: {error}", sure=False) from None

    def _items(self, collection: Literal["instances", "disks", "firewalls"], zone: str) -> list[ComputeItem]:
        """All pages of a list that may hold something of ours, over one zone, all zones, or none."""
        project = f"v1/projects/{self._account.project}"
        where = {"": "global", EVERYWHERE: "aggregated"}.get(zone, f"zones/{zone}")
        params: dict[str, str] = {"filter": "labels.podway-owner:*"} if zone else {}
        path = f"{project}/{where}/{collection}"
        found: list[ComputeItem] = []
        token = "start"
        while token:
            if zone == EVERYWHERE:
                everywhere = self._compute(_AllPlaces, "GET", path, params=params)
                parts = everywhere.items.values()
                found += [item for part in parts for item in (part.disks if collection == "disks" else part.instances)]
                token = everywhere.next_page_token
            else:
                page = self._compute(_Page, "GET", path, params=params)
                found += page.items
                token = page.next_page_token
            params = {**params, "pageToken": token}
        return found


def _listing(found: Iterable[Resource | None], pages: Iterable[_WithUnreachable] = ()) -> Listing:
    """What of it is Podway's, and the zones that the pages say did not answer."""
    unreachable = tuple(name.rpartition("/")[2] for page in pages for name in page.unreachable)
    return Listing(resources=tuple(resource for resource in found if resource is not None), unreachable=unreachable)


def _proto(kind: type[Message], body: Mapping[str, object]) -> Message:
    """The client's own message from JSON: a field it does not know is our mistake, seen here."""
    try:
        message: Message = kind.from_json(msgspec.json.encode(body).decode())
        return message
    except ParseError as error:
        raise GcpError("never", f"{kind.__name__} cannot be sent: {error}", "this is a bug of Podway") from None


def _operation(made: Operation) -> str:
    return str(made.operation.name)


def _compute_path(link: str) -> str:
    return "/compute/" + link.partition("/compute/")[2] if "/compute/" in link else ""
