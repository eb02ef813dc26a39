"""Long-running operations: begun by a request, ended by the cloud, asked for until they are done.

An operation may be bound to fail when it begins (a fault on command): the caller that ends it then ends it with that error, and takes back
what it did.
"""

import msgspec

from podway.sandbox.jsons import JsonObject
from podway.sandbox.names import parent_of, split_name, stamp
from podway.sandbox.status import ApiError, not_found


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One of them."""

    name: str
    version: str  # of the API it was begun through: v1, v2, v2alpha1
    verb: str
    target: str
    created: float
    failure: ApiError | None = None
    ended: float | None = None
    response: JsonObject | None = None
    error: JsonObject | None = None
    cancel_requested: bool = False

    def view(self) -> JsonObject:
        """As the API shows it."""
        metadata: JsonObject = {
            "@type": f"type.googleapis.com/google.cloud.tpu.{self.version}.OperationMetadata",
            "createTime": stamp(self.created),
            "target": self.target,
            "verb": self.verb,
            "cancelRequested": self.cancel_requested,
            "apiVersion": self.version,
        }
        if self.ended is None:
            return {"name": self.name, "metadata": metadata, "done": False}
        metadata["endTime"] = stamp(self.ended)
        outcome = {"error": self.error} if self.error is not None else {"response": self.response}
        return {"name": self.name, "metadata": metadata, "done": True, **outcome}


class Operations:
    """All of them, by name."""

    def __init__(self) -> None:
        self._all: dict[str, Operation] = {}
        self._made = 0

    def start(self, *, version: str, verb: str, target: str, now: float, failure: ApiError | None = None) -> Operation:
        """Begin one."""
        self._made += 1
        project, zone = target.split("/")[1], target.split("/")[3]
        name = f"{parent_of(project, zone)}/operations/operation-{int(now * 1000)}-{self._made}"
        made = Operation(name=name, version=version, verb=verb, target=target, created=now, failure=failure)
        self._all[name] = made
        return made

    def finish(
        self, name: str, now: float, *, response: JsonObject | None = None, error: ApiError | None = None
    ) -> None:
        """End one, once; what was deleted meanwhile stays away."""
        found = self._all.get(name)
        if found is None or found.ended is not None:
            return
        empty = {"@type": "type.googleapis.com/google.protobuf.Empty"}
        self._all[name] = msgspec.structs.replace(
            found,
            ended=now,
            response=None if error else response if response is not None else empty,
            error=error.as_rpc() if error else None,
        )

    def get(self, name: str) -> Operation:
        """By name."""
        split_name(name, "operations")
        if name not in self._all:
            raise not_found(name)
        return self._all[name]

    def failure_of(self, name: str) -> ApiError | None:
        """The error that an operation has to end with, if any; its record may be deleted by now."""
        found = self._all.get(name)
        return found.failure if found else None

    def target_of(self, name: str) -> str:
        """What it is about; nothing when its record is deleted."""
        found = self._all.get(name)
        return found.target if found else ""

    def version_of(self, name: str) -> str | None:
        """The API it was begun through, unless its record is deleted."""
        found = self._all.get(name)
        return found.version if found else None

    def all(self) -> list[Operation]:
        """In the order they were begun."""
        return list(self._all.values())

    def cancel(self, name: str) -> None:
        """Note the request. As on Cloud TPU, nothing says that it is granted."""
        self._all[name] = msgspec.structs.replace(self.get(name), cancel_requested=True)

    def delete(self, name: str) -> None:
        """Forget the record; what it does goes on."""
        self.get(name)
        del self._all[name]
