"""Compute Engine as far as TPUs need it: the project and its metadata, VMs (hosts of legacy TPU Nodes), disks, firewalls.

Resources are kept as the JSON they are shown as, by the path that Google gives them (`projects/P/zones/Z/disks/D`). What
changes them is an operation, done when its time has come; a VM is RUNNING when its machine is up as well.
"""

import re

import msgspec

from podway.sandbox.agenda import Agenda
from podway.sandbox.filters import read_filter
from podway.sandbox.jsons import JsonObject
from podway.sandbox.ledger import Ledger
from podway.sandbox.names import check_labels, project_number, stamp
from podway.sandbox.status import ApiError, invalid, out_of_order
from podway.sandbox.tpu.nodes import Host, MachineAction
from podway.sandbox.tpu.shapes import zones

ROOT = "https://www.googleapis.com/compute/v1"
QUICK_S, VM_S = 4.0, 25.0  # seconds of the cloud: choices of this sandbox
FIRST_NUMBER = 7_000_000_000_000_000_000  # ids of VMs never meet those of nodes
# collection -> kind, and where it lives
COLLECTIONS = {
    "instances": ("instance", "zones"),
    "disks": ("disk", "zones"),
    "firewalls": ("firewall", "global"),
    "networks": ("network", "global"),
    "subnetworks": ("subnetwork", "regions"),
}
_REASONS = {
    "NOT_FOUND": "notFound",
    "ALREADY_EXISTS": "alreadyExists",
    "INVALID_ARGUMENT": "invalid",
    "PERMISSION_DENIED": "forbidden",
    "RESOURCE_EXHAUSTED": "quotaExceeded",
    "FAILED_PRECONDITION": "resourceNotReady",
}
_NAME = re.compile(r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")  # Google's documented pattern for Compute Engine names


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """A change under way."""

    path: str
    kind: str
    target: str
    begun: float
    ended: float | None = None
    error: ApiError | None = None

    def view(self) -> JsonObject:
        """As Compute Engine shows it."""
        shown: JsonObject = {
            "kind": "compute#operation",
            "name": self.path.rpartition("/")[2],
            "operationType": self.kind,
            "targetLink": f"{ROOT}/{self.target}",
            "selfLink": f"{ROOT}/{self.path}",
            "insertTime": stamp(self.begun),
            "status": "RUNNING" if self.ended is None else "DONE",
            "progress": 0 if self.ended is None else 100,
        }
        scope = self.path.split("/")[2]
        if scope != "global":
            shown["zone" if scope == "zones" else "region"] = f"{ROOT}/{self.path.rpartition('/operations/')[0]}"
        if self.error is not None:
            shown["error"] = {"errors": [{"code": self.error.status, "message": self.error.message}]}
            shown |= {"httpErrorStatusCode": self.error.http_code, "httpErrorMessage": self.error.status}
        return shown


class Compute:
    """All resources of Compute Engine, and what is asked of them."""

    def __init__(self, agenda: Agenda, ledger: Ledger) -> None:
        self._agenda, self._ledger = agenda, ledger
        self.resources: dict[str, JsonObject] = {}
        self.metadata: dict[str, dict[str, str]] = {}  # project -> its common metadata
        self.actions: list[MachineAction] = []
        self._operations: dict[str, Operation] = {}
        self._made = 0

    # What is asked.

    def project(self, project: str) -> JsonObject:
        """The project with its metadata, where ssh keys for all machines are."""
        items = [{"key": key, "value": value} for key, value in self.metadata.get(project, {}).items()]
        metadata = {"kind": "compute#metadata", "fingerprint": "AAAAAAAAAAA=", "items": items}
        return {
            "kind": "compute#project",
            "id": project_number(project),
            "name": project,
            "commonInstanceMetadata": metadata,
            "defaultServiceAccount": f"{project_number(project)}-compute@developer.gserviceaccount.com",
            "selfLink": f"{ROOT}/projects/{project}",
        }

    def set_metadata(self, project: str, body: JsonObject, now: float) -> JsonObject:
        """Replace the project's metadata."""
        self.metadata[project] = {item["key"]: item.get("value", "") for item in body.get("items") or []}
        self.actions.append(MachineAction(what="all-keys", node="", number=0))
        return self._begin(f"projects/{project}/global", "setMetadata", f"projects/{project}", now).view()

    def place(self, project: str, kind: str, name: str) -> JsonObject:
        """A zone or a region."""
        known = zones() if kind == "zones" else sorted({zone.rpartition("-")[0] for zone in zones()})
        path = f"projects/{project}/{kind}/{name}"
        if name not in known:
            raise _missing(path)
        shown = {"kind": f"compute#{kind[:-1]}", "name": name, "status": "UP", "selfLink": f"{ROOT}/{path}"}
        if kind == "zones":
            return {**shown, "region": f"{ROOT}/projects/{project}/regions/{name.rpartition('-')[0]}"}
        mine = [zone for zone in zones() if zone.startswith(f"{name}-")]
        usage = sum(1 for path in self.resources if f"/zones/{name}-" in path and "/instances/" in path)
        quotas = [{"metric": "INSTANCES", "limit": 6000.0, "usage": float(usage)}]
        return {**shown, "zones": [f"{ROOT}/projects/{project}/zones/{zone}" for zone in mine], "quotas": quotas}

    def places(self, project: str, kind: str) -> JsonObject:
        """All zones or regions."""
        known = zones() if kind == "zones" else sorted({zone.rpartition("-")[0] for zone in zones()})
        return {"kind": f"compute#{kind[:-1]}List", "items": [self.place(project, kind, name) for name in known]}

    def get(self, path: str) -> JsonObject:
        """One resource."""
        found = self.resources.get(path) or self._default(path)
        if found is None:
            raise _missing(path)
        return found

    def list_of(self, parent: str, collection: str, query: dict[str, str]) -> JsonObject:
        """Those of one place."""
        passes = read_filter(query.get("filter", ""))
        start = f"{parent}/{collection}/"
        found = [item for path, item in sorted(self.resources.items()) if path.startswith(start)]
        if collection in ("networks", "subnetworks"):
            default = self._default(f"{start}default")
            found = [*([default] if default else []), *found]
        shown = [item for item in found if passes(item)]
        page = _page(shown, query)
        return {"kind": f"compute#{COLLECTIONS[collection][0]}List", "id": start, **page}

    def aggregated(self, project: str, collection: str, query: dict[str, str]) -> JsonObject:
        """Those of all places, by place."""
        passes = read_filter(query.get("filter", ""))
        items: dict[str, JsonObject] = {}
        for path, item in sorted(self.resources.items()):
            parts = path.split("/")
            if parts[1] == project and parts[-2] == collection and passes(item):
                items.setdefault("/".join(parts[2:4]), {collection: []})[collection].append(item)
        return {"kind": f"compute#{COLLECTIONS[collection][0]}AggregatedList", "items": items}

    def insert(
        self, parent: str, collection: str, body: JsonObject, now: float, failure: ApiError | None = None
    ) -> JsonObject:
        """Make one."""
        name = str(body.get("name") or "")
        if not _NAME.match(name):
            raise invalid(
                f"Invalid value for field 'resource.name': '{name}'. Must be a match of regex '{_NAME.pattern}'"
            )
        check_labels(body.get("labels"))
        path = f"{parent}/{collection}/{name}"
        if path in self.resources:
            raise ApiError("ALREADY_EXISTS", f"The resource '{path}' already exists")
        kind, home = COLLECTIONS[collection]
        if home == "zones" and parent.split("/")[3] not in zones():
            raise _missing(parent)
        self._made += 1
        made = {
            **body,
            "kind": f"compute#{kind}",
            "id": str(FIRST_NUMBER + self._made),
            "creationTimestamp": stamp(now),
        }
        made["selfLink"] = f"{ROOT}/{path}"
        if home != "global":
            made[home[:-1]] = f"{ROOT}/{parent}"
        operation = self._begin(parent, "insert", path, now, VM_S if collection == "instances" else QUICK_S, failure)
        if failure is None:
            self._add(path, collection, made, now)
        return operation.view()

    def _add(self, path: str, collection: str, made: JsonObject, now: float) -> None:
        if collection == "disks":
            made |= {"status": "READY", "sizeGb": str(made.get("sizeGb") or 10)}
        if collection == "instances":
            made |= {"status": "PROVISIONING"}
            self._add_boot_disks(path, made, now)
            self.actions.append(MachineAction(what="boot", node=path, number=int(made["id"])))
        self.resources[path] = made
        self._ledger.made(COLLECTIONS[collection][0], path, now, labels=made.get("labels"))
        if collection in ("instances", "disks"):
            self._ledger.started(path, now)

    def _add_boot_disks(self, path: str, made: JsonObject, now: float) -> None:
        """Disks described with the VM are made with it."""
        parent, name = path.split("/instances/")
        for index, disk in enumerate(made.get("disks") or []):
            if disk.get("source") or disk.get("type") == "SCRATCH":
                continue
            request = disk.get("initializeParams") or {}
            disk_name = request.get("diskName") or (name if index == 0 else f"{name}-{index}")
            disk["source"] = f"{ROOT}/{parent}/disks/{disk_name}"
            if f"{parent}/disks/{disk_name}" not in self.resources:
                body = {"name": disk_name, "sizeGb": request.get("diskSizeGb"), "labels": request.get("labels") or {}}
                self.insert(parent, "disks", body, now)

    def delete(self, path: str, now: float, failure: ApiError | None, users: list[str]) -> JsonObject:
        """Delete one; `users` are TPU nodes that hold it."""
        self.get(path)
        collection = path.split("/")[-2]
        holders = users + [other for other, item in self.resources.items() if self._holds(item, path)]
        if collection == "disks" and holders:
            raise out_of_order(f"The disk resource '{path}' is already being used by '{holders[0]}'")
        if path not in self.resources:
            raise out_of_order(f"The resource '{path}' is the project's own and stays.")
        seconds = VM_S if collection == "instances" else QUICK_S
        operation = self._begin(path.rsplit("/", 2)[0], "delete", path, now, seconds, failure)
        if failure is None:
            self._remove(path, now)
        return operation.view()

    def _remove(self, path: str, now: float) -> None:
        gone = self.resources.pop(path)
        self._ledger.gone(path, now)
        if "/disks/" in path:
            self.actions.append(MachineAction(what="wipe", node=path, number=int(gone["id"])))
        if "/instances/" in path:
            self.actions += [MachineAction(what=what, node=path, number=int(gone["id"])) for what in ("halt", "remove")]
            for disk in gone.get("disks") or []:
                source = str(disk.get("source", "")).partition("/compute/v1/")[2]
                if disk.get("autoDelete") and source in self.resources:
                    self._remove(source, now)

    def power(self, path: str, on: bool, now: float, failure: ApiError | None) -> JsonObject:
        """Stop or start a VM."""
        found = self.get(path)
        wanted = "TERMINATED" if on else "RUNNING"
        if found["status"] != wanted:
            raise out_of_order(f"The VM '{path}' is {found['status']}, not {wanted}.")
        operation = self._begin(path.rsplit("/", 2)[0], "start" if on else "stop", path, now, VM_S, failure)
        if failure is None:
            self.resources[path] = {**found, "status": "STAGING" if on else "TERMINATED"}
            self.actions.append(MachineAction(what="boot" if on else "halt", node=path, number=int(found["id"])))
        return operation.view()

    def set_instance_metadata(self, path: str, body: JsonObject, now: float) -> JsonObject:
        """Replace a VM's metadata."""
        self.resources[path] = {**self.get(path), "metadata": body}
        self.actions.append(MachineAction(what="keys", node=path, number=int(self.resources[path]["id"])))
        return self._begin(path.rsplit("/", 2)[0], "setMetadata", path, now).view()

    def patch(self, path: str, body: JsonObject, now: float, failure: ApiError | None) -> JsonObject:
        """Change what the body names."""
        found = self.get(path)
        if failure is None:
            self.resources[path] = {**found, **body}
        return self._begin(path.rsplit("/", 2)[0], "patch", path, now, QUICK_S, failure).view()

    def operation(self, path: str) -> JsonObject:
        """How a change is getting on."""
        if path not in self._operations:
            raise _missing(path)
        return self._operations[path].view()

    # What happens.

    def hosts_up(self, path: str, number: int, host: Host, now: float) -> None:
        """A VM's machine is up."""
        found = self.resources.get(path)
        if found is None or int(found["id"]) != number:
            return
        inside = {"name": "nic0", "network": f"{ROOT}/{path.split('/zones/')[0]}/global/networks/default"}
        access = [{"name": "External NAT", "type": "ONE_TO_ONE_NAT", "natIP": host.external}]
        asked = (found.get("networkInterfaces") or [{}])[0]
        nic = {**inside, **asked, "networkIP": host.address}
        nic["accessConfigs"] = access if asked.get("accessConfigs") else []
        self.resources[path] = {**found, "status": "RUNNING", "networkInterfaces": [nic]}

    def running(self) -> list[tuple[str, int]]:
        """The VMs whose machines are up, by path and number."""
        return [(path, int(one["id"])) for path, one in self.resources.items() if one.get("status") == "RUNNING"]

    def keys_of(self, path: str, number: int) -> dict[str, str] | None:
        """A VM's own metadata; None when it is gone."""
        found = self.resources.get(path)
        if found is None or int(found["id"]) != number:
            return None
        return {item["key"]: item.get("value", "") for item in (found.get("metadata") or {}).get("items") or []}

    def _begin(
        self, parent: str, kind: str, target: str, now: float, seconds: float = QUICK_S, failure: ApiError | None = None
    ) -> Operation:
        self._made += 1
        path = f"{parent}/operations/operation-{int(now * 1000)}-{self._made}"
        begun = Operation(path=path, kind=kind, target=target, begun=now)
        self._operations[path] = begun

        def end(due: float) -> None:
            self._operations[path] = msgspec.structs.replace(begun, ended=due, error=failure)

        self._agenda.after(now, seconds, end)
        return begun

    def _holds(self, item: JsonObject, disk: str) -> bool:
        return any(str(one.get("source", "")).endswith(disk) for one in item.get("disks") or [])

    def _default(self, path: str) -> JsonObject | None:
        """The network and subnetworks that every project has."""
        parts = path.split("/")
        if parts[-1] != "default" or parts[-2] not in ("networks", "subnetworks"):
            return None
        kind = COLLECTIONS[parts[-2]][0]
        shown = {"kind": f"compute#{kind}", "name": "default", "id": "1", "selfLink": f"{ROOT}/{path}"}
        return (
            {**shown, "autoCreateSubnetworks": True} if kind == "network" else {**shown, "ipCidrRange": "10.213.0.0/16"}
        )


def compute_error(error: ApiError) -> JsonObject:
    """As Compute Engine writes errors: with a reason of its own for each."""
    reason = _REASONS.get(error.status, "backendError")
    if "already being used by" in error.message:
        reason = "resourceInUseByAnotherResource"
    one = {"message": error.message, "domain": "global", "reason": reason}
    return {"error": {"code": error.http_code, "message": error.message, "errors": [one], "status": error.status}}


def _missing(path: str) -> ApiError:
    return ApiError("NOT_FOUND", f"The resource '{path}' was not found")


def _page(items: list[JsonObject], query: dict[str, str]) -> JsonObject:
    start, size = int(query.get("pageToken") or 0), int(query.get("maxResults") or 500)
    more = {"nextPageToken": str(start + size)} if start + size < len(items) else {}
    return {"items": items[start : start + size], **more}
