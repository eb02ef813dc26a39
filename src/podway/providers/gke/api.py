"""The Kubernetes API of one context: requests that answer mappings, and what went wrong in one sentence.

Plain HTTP of the standard library, since the provider uses a dozen calls: the official Python client takes longer to import than a
whole launch may, and adds 40 MB. Calls block, so they run in threads; each takes a connection of the pool, and one that died unseen
is replaced once where the call may be made twice.

A refusal is sorted here: what a person can mend (no rights, not installed, not valid) is a `UserError`; what may pass (no connection,
too many requests, an error of the server) is a `ProviderError`; `NotFound` and `Conflict` are for the caller.
"""

import asyncio
import http.client
import json
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from podway.errors import ProviderError, UserError
from podway.providers.gke.kubeconfig import Credentials, KubeContext, credentials, tls

Fields = dict[str, Any]

CALL_S = 30.0
POOL = 8
MOST_ANSWER = 256 << 20
_RENEW_S = 60.0  # credentials are renewed this long before they expire
FORBIDDEN = "forbidden"  # the code of a refusal for want of rights
_MERGE = "application/merge-patch+json"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=1, application/json"
INSTALL_JOBSET = "install it: podway gke prepare (which shows what it does first)"


class NotFound(ProviderError):
    """There is no such object."""


class NoJobSet(UserError):
    """JobSet is not installed."""


class Conflict(ProviderError):
    """It is there already, or was changed meanwhile."""


class KubernetesApi:
    """Calls to one cluster, as the user of its context."""

    def __init__(self, context: KubeContext) -> None:
        self.context = context
        parts = urlsplit(context.server)
        self.host = parts.hostname or "localhost"
        self.secure = parts.scheme == "https"
        self.port = parts.port or (443 if self.secure else 80)
        self.prefix = parts.path.rstrip("/")
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._carried: tuple[Credentials, ssl.SSLContext | None] | None = None

    async def get(self, path: str, **query: str) -> Fields:
        return await asyncio.to_thread(self.call, "GET", path, query=query)

    async def exists(self, path: str) -> bool:
        """Whether the object is there: its data, which may be a megabyte, is not sent."""
        try:
            await asyncio.to_thread(self.call, "GET", path, accept=_METADATA)
        except NotFound:
            return False
        return True

    async def items(self, path: str, **query: str) -> list[Fields]:
        """Every object there, page by page."""
        return await asyncio.to_thread(self.read_items, path, query)

    async def create(self, path: str, body: Mapping[str, Any]) -> Fields:
        return await asyncio.to_thread(self.call, "POST", path, body)

    async def patch(self, path: str, body: Mapping[str, Any]) -> Fields:
        """Merge `body` into the object."""
        return await asyncio.to_thread(self.call, "PATCH", path, body, kind=_MERGE)

    async def delete(self, path: str, *, grace_s: int | None = None) -> None:
        """Begin to delete it, with everything that belongs to it; silence when it is gone."""
        body: Fields = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            await asyncio.to_thread(self.call, "DELETE", path, body)
        except NotFound:
            return

    def read_items(self, path: str, query: Mapping[str, str], timeout: float = CALL_S) -> list[Fields]:
        """`items`, for a thread."""
        found: list[Fields] = []
        asked = {"limit": "500", **query}
        while True:
            answer = self.call("GET", path, query=asked, timeout=timeout)
            found += answer.get("items") or []
            more = (answer.get("metadata") or {}).get("continue")
            if not more:
                return found
            asked = {**asked, "continue": more}

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        kind: str = "application/json",
        timeout: float = CALL_S,
        accept: str = "",
    ) -> Fields:
        """One request; its answer."""
        status, data = self._exchange(method, path, body, query or {}, kind, timeout, accept)
        if status == 401:  # the token may have been taken back before it expired: once more with a fresh one
            self._forget()
            status, data = self._exchange(method, path, body, query or {}, kind, timeout, accept)
        if status < 300:
            return _decoded(data)
        if status == 403 and not self._is_ready(timeout):
            raise ProviderError(f"the API server of context {self.context.name} is starting")
        raise refusal(self.context.name, status, _decoded(data), path)

    def _is_ready(self, timeout: float) -> bool:
        """Whether its refusals count: an API server that has just started refuses everybody until it has read who may do what."""
        return self._exchange("GET", "/readyz", None, {}, "application/json", timeout)[0] == 200

    def text(self, path: str, query: Mapping[str, str], timeout: float = CALL_S) -> bytes:
        """The bytes of an answer that is not JSON: a pod's log."""
        status, data = self._exchange("GET", path, None, query, "application/json", timeout)
        if status < 300:
            return data
        raise refusal(self.context.name, status, _decoded(data), path)

    def carried(self) -> tuple[Credentials, ssl.SSLContext | None]:
        """Credentials that are still good, and how the connection is secured with them."""
        with self._lock:
            known = self._carried
            if known is None or (known[0].expires is not None and known[0].expires - _RENEW_S < time.time()):
                fresh = credentials(self.context)
                try:
                    known = self._carried = (fresh, tls(self.context, fresh))
                except (ssl.SSLError, ValueError) as error:
                    raise UserError(
                        f"the certificates of context {self.context.name} cannot be used: {error}",
                        "get its credentials again; for GKE: gcloud container clusters get-credentials NAME",
                    ) from None
            return known

    def headers(self) -> dict[str, str]:
        """What every request carries."""
        authorization = self.carried()[0].authorization
        head = {"Accept": "application/json", "User-Agent": "podway"}
        return head | ({"Authorization": authorization} if authorization else {})

    def _exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str],
        kind: str,
        timeout: float,
        accept: str = "",
    ) -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        target = self.prefix + quote(path) + (f"?{urlencode(query)}" if query else "")
        head = self.headers() | ({"Content-Type": kind} if data is not None else {})
        head |= {"Accept": accept} if accept else {}
        while True:
            connection, fresh = self._connection(timeout)
            try:
                connection.request(method, target, data, head)
                answer = connection.getresponse()
                read = answer.read(MOST_ANSWER)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not fresh and isinstance(error, OSError | http.client.RemoteDisconnected):
                    continue  # it had died in the pool; every call here may be made twice
                raise ProviderError(f"the cluster of context {self.context.name} cannot be reached: {error}") from None
            self._give(connection, answer.will_close)
            return answer.status, read

    def _connection(self, timeout: float) -> tuple[http.client.HTTPConnection, bool]:
        secured = self.carried()[1]
        with self._lock:
            if self._idle:
                kept = self._idle.pop()
                if kept.sock is not None:
                    kept.sock.settimeout(timeout)
                return kept, False
        if secured is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=timeout), True
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=secured), True

    def _give(self, connection: http.client.HTTPConnection, closing: bool) -> None:
        with self._lock:
            if not closing and len(self._idle) < POOL:
                self._idle.append(connection)
                return
        connection.close()

    def _forget(self) -> None:
        with self._lock:
            self._carried = None
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _decoded(data: bytes) -> Fields:
    try:
        found = json.loads(data)
    except ValueError:
        return {"message": data.decode(errors="replace").strip()}
    return found if isinstance(found, dict) else {}


def refusal(context: str, status: int, body: Fields, path: str) -> Exception:
    """What a status says, as the exception to raise."""
    message = " ".join(str(body.get("message") or body.get("reason") or f"status {status}").split())[:500]
    if status == 404:
        # An object's name is in the answer; a kind that nobody installed is a path that leads nowhere.
        if "jobset.x-k8s.io" in path and not (body.get("details") or {}).get("name"):
            return NoJobSet(f"JobSet is not installed in the cluster of context {context}", INSTALL_JOBSET)
        return NotFound(message, transient=False)
    if status == 409:
        return Conflict(message)
    if status == 401:
        return UserError(
            f"the cluster of context {context} does not accept your credentials",
            "log in again; for GKE: gcloud auth login",
        )
    if status == 403 and body.get("reason") == "Forbidden" and "exceeded quota" not in message:
        return UserError(
            f"context {context}: {message}",
            "ask for these rights: docs/kubernetes.md lists the least that are needed",
            code=FORBIDDEN,
        )
    if status in (400, 403, 413, 422):
        return UserError(f"the cluster of context {context} refuses it: {message}", "change what it names")
    return ProviderError(f"the cluster of context {context} answered {status}: {message}")
