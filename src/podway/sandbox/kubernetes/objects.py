"""The stored objects: by kind, namespace and name, each with a uid and a version that counts changes."""

import copy
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

Fields = dict[str, Any]
Key = tuple[str, str, str]  # kind's path, namespace, name


def now() -> str:
    """As Kubernetes writes times."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Refused(Exception):
    """A request that the API refuses, with the status and reason of its answer."""

    def __init__(self, status: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.details = status, reason, message, details


def merged(base: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict) or not isinstance(base, dict):
        return patch
    found = dict(base)
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key, {} if isinstance(value, dict) else None), value)
    return found


class Objects:
    """Everything that is stored. Values handed out are copies."""

    def __init__(self) -> None:
        self._all: dict[Key, Fields] = {}
        self._version = 0
        self._changed = threading.Condition(threading.RLock())

    @property
    def version(self) -> int:
        """Counts every change."""
        return self._version

    def wait(self, after: int, seconds: float) -> int:
        """Until something changed after that version, at most so long; the version now."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > after, seconds)
            return self._version

    def get(self, kind: str, namespace: str, name: str) -> Fields:
        with self._changed:
            found = self._all.get((kind, namespace, name))
            if found is None:
                raise Refused(404, "NotFound", f'{kind} "{name}" not found', name=name, kind=kind)
            return copy.deepcopy(found)

    def find(self, kind: str, namespace: str | None = None) -> list[Fields]:
        """All of a kind, in the order of their names."""
        with self._changed:
            keys = sorted(key for key in self._all if key[0] == kind and namespace in (None, key[1]))
            return [copy.deepcopy(self._all[key]) for key in keys]

    def create(self, kind: str, namespace: str, body: Fields) -> Fields:
        with self._changed:
            name = body["metadata"]["name"]
            if (kind, namespace, name) in self._all:
                raise Refused(409, "AlreadyExists", f'{kind} "{name}" already exists', name=name, kind=kind)
            made = copy.deepcopy(body)
            made["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
            if namespace:
                made["metadata"]["namespace"] = namespace
            return self._put((kind, namespace, name), made)

    def change(self, kind: str, namespace: str, name: str, how: Callable[[Fields], Fields]) -> Fields:
        """Apply a function to an object; no write where nothing changes."""
        with self._changed:
            old = self.get(kind, namespace, name)
            new = how(copy.deepcopy(old))
            return old if new == old else self._put((kind, namespace, name), new)

    def remove(self, kind: str, namespace: str, name: str) -> None:
        with self._changed:
            if self._all.pop((kind, namespace, name), None) is not None:
                self._version += 1
                self._changed.notify_all()

    def count(self) -> dict[str, int]:
        """How many there are of each kind: what a test finds empty at its end."""
        with self._changed:
            kinds = [key[0] for key in self._all]
            return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    def _put(self, key: Key, value: Fields) -> Fields:
        self._version += 1
        value["metadata"]["resourceVersion"] = str(self._version)
        self._all[key] = value
        self._changed.notify_all()
        return copy.deepcopy(value)
