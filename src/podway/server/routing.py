"""What a route of the API is, and what its function is given.

A `Route` says everything about one route: method, path, function, the types of body, query and reply, and who may call it. The
server mounts it, the OpenAPI document is made from it, and the tests walk it; nothing is said about a route anywhere else.

Functions come in three kinds. A plain function runs in the threads that answer requests and must be quick: it reads or writes the
database and nothing else. With `slow`, it may ask a cloud, and runs in threads of its own. A coroutine function runs on the loop,
and waits there for as long as it likes.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from podway.control.access import RIGHTS, Access, Caller, allows, check_role
from podway.control.archive import Archive
from podway.control.job_groups import GroupControl
from podway.control.orphans import OrphanScanner
from podway.control.pools import PoolControl
from podway.control.records import Cluster, Job
from podway.control.schedules import ScheduleControl
from podway.control.service_records import Service
from podway.control.service_verbs import ServiceControl
from podway.control.store import Store
from podway.control.verbs import JOB_NUMBER, Control
from podway.errors import UserError
from podway.hosts.blobs import BlobStore
from podway.hosts.ssh.authority import CertificateAuthority
from podway.providers import Provider
from podway.server.notify import LiveRows, Notifier
from podway.server.pacing import Turns
from podway.server.rehearsals import Rehearsals
from podway.server.sessions import Sessions
from podway.server.tokens import TokenCache

T = TypeVar("T")
LARGEST = 1e12


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """What the functions work with."""

    control: Control
    service_verbs: ServiceControl
    schedules: ScheduleControl
    pools: PoolControl
    groups: GroupControl
    store: Store
    blobs: BlobStore
    archive: Archive
    provider: Callable[[str], Provider]
    orphans: OrphanScanner
    tokens: TokenCache
    notifier: Notifier
    rows: LiveRows
    turns: Turns
    quick: Executor
    slow: Executor
    sessions: Sessions
    rehearsals: Rehearsals
    authority: CertificateAuthority


class ApiCall(msgspec.Struct, frozen=True, kw_only=True):
    """One request, decoded; `request` is for those that stream."""

    services: Services
    caller: Caller
    path: dict[str, str]
    query: dict[str, Any] = {}
    body: Any = None
    request: Request | None = None
    cluster: Cluster | None = None  # of the path, where the caller's right on it was looked up
    service: Service | None = None  # likewise

    def find_cluster(self) -> Cluster:
        """The cluster of the path: the live one of that name, or the latest that had it."""
        return self.cluster or self.services.control.find_cluster(self.path["cluster"])

    def find_job(self) -> tuple[Cluster, Job]:
        """The cluster and the job of the path."""
        cluster = self.find_cluster()
        return cluster, self.services.control.find_job(cluster, self.path["job"])

    async def read_job(self) -> tuple[Cluster, Job]:
        """As `find_job`, for functions that run on the loop."""
        rows, number = self.services.rows, self.path["job"]
        if rows.alone and self.cluster is not None and JOB_NUMBER.fullmatch(number):
            job = await rows.job(self.cluster.id, int(number))
            if job is not None:
                return self.cluster, job
        return await self.in_thread(self.find_job)

    def find_service(self) -> Service:
        """The service of the path: the live one of that name, or the latest that had it."""
        return self.service or self.services.service_verbs.find(self.path["service"])

    async def in_thread(self, function: Callable[[], T]) -> T:
        """A quick read, for functions that run on the loop."""
        return await asyncio.get_running_loop().run_in_executor(self.services.quick, function)


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """A body or reply that is not one JSON document: its media type, and the type of each line where it has lines."""

    media_type: str
    lines: type | None = None


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    method: str
    path: str
    function: Callable[[ApiCall], Any]
    summary: str
    reply: type | Stream
    body: type | Stream | None = None
    query: dict[str, type] = {}
    access: Access
    slow: bool = False
    audited: bool = False  # a change that is worth knowing who made it

    async def authorise(self, call: ApiCall) -> ApiCall:
        """Refuse a caller who may not do this; the table says who may, and nothing else does."""
        check_role(call.caller, self.access)
        if self.access not in RIGHTS:
            return call
        needed = RIGHTS[self.access]
        if "service" in call.path:
            verbs, which = call.services.service_verbs, call.path["service"]
            service = await call.in_thread(lambda: verbs.find_for(call.caller, which, needed))
            return msgspec.structs.replace(call, service=service)
        control, rows, name = call.services.control, call.services.rows, call.path["cluster"]
        known = await rows.live_cluster(name) if rows.alone else None
        if known is None or not allows(known, call.caller, needed):  # which also says it to who may not
            known = await call.in_thread(lambda: control.find_for(call.caller, name, needed))
            rows.learn(known)
        return msgspec.structs.replace(call, cluster=known)

    async def run(self, call: ApiCall) -> Any:
        """The function's result, from where it is to run."""
        if inspect.iscoroutinefunction(self.function):
            work: Awaitable[Any] = self.function(call)
            return await work
        executor = call.services.slow if self.slow else call.services.quick
        return await asyncio.get_running_loop().run_in_executor(executor, self.function, call)


def read_query(route: Route, given: dict[str, str]) -> dict[str, Any]:
    """The parameters the route knows, as their types; others are ignored, as is one without a value."""
    return {name: _value(name, given[name], kind) for name, kind in route.query.items() if given.get(name)}


def _value(name: str, text: str, kind: type) -> Any:
    if kind is str:
        return text
    if kind is bool:
        if text not in ("true", "false", "1", "0"):
            raise UserError(f"{name}={text!r} is not true or false", f"give {name}=true or {name}=false")
        return text in ("true", "1")
    if kind is int:
        if not (text.isascii() and text.isdigit()) or len(text) > 12:
            raise UserError(f"{name}={text!r} is not a whole number", f"give {name} as digits")
        return int(text)
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not abs(number) < LARGEST:
        raise UserError(f"{name}={text!r} is not a number", f"give {name} as a plain number")
    return number


__all__ = ["ApiCall", "Caller", "Response", "Route", "Services", "Stream", "read_query"]
