"""Keeps the list of workers that a router (SGLang's model gateway, `smg`) has as the service has them.

The router is asked at its own API, through the agent of its host: `GET /workers` lists them by URL, `POST /workers` adds one,
`DELETE /workers/ID` removes one. Both answer before they are done, so a worker counts only once the router lists it; and a router
that was restarted, and lists none, is told all of them again. What it must know of a worker is asked of the worker itself where
that can tell (SGLang's `/server_info`); else it is what the worker's commands say.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from podway.control.fleet import HostSession
from podway.decoding import from_json
from podway.errors import ProviderError
from podway.task.task import RoutedWorker

log = logging.getLogger("podway.services")
SOON_S, SELDOM_S = 0.5, 5.0  # between two looks at a router: while its list is to change, and otherwise
ANSWER_S = 10.0
MOST_BODY = 1 << 20
_INFO_PATHS = ("/server_info", "/get_server_info")  # the second is that of SGLang before 0.5.6


class WorkerTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that a router is to have."""

    number: int  # of its replica
    url: str  # where the router reaches it
    worker: RoutedWorker


class _ListedWorker(msgspec.Struct, frozen=True):
    url: str
    id: str = ""
    worker_type: str = ""


class _WorkerList(msgspec.Struct, frozen=True):
    workers: list[_ListedWorker]


class _ServerInfo(msgspec.Struct, frozen=True):
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: int | None = None


class RouterWorkers:
    """The workers of one router, until `close`."""

    def __init__(self, router: "HostPort", changed: Callable[[], None]) -> None:
        self._router = router
        self._changed = changed
        self._wanted: dict[int, WorkerTarget] = {}
        self._hosts: dict[int, HostPort] = {}  # how a wanted worker is asked about itself
        self._kick = asyncio.Event()
        self.listed: tuple[int, ...] | None = None  # replicas that the router has on its list; None: not asked yet
        self.roles: dict[int, str] = {}  # of those it lists, by its word, or by their commands where it says nothing
        self.error = ""
        self._task = asyncio.create_task(self._keep())

    def want(self, wanted: Mapping[int, WorkerTarget], ask: Callable[[int], "HostPort"]) -> None:
        """The workers it is to have from now on; `ask` opens the way to one of them."""
        if self._wanted == wanted:
            return
        for number in [one for one in self._hosts if one not in wanted]:
            self._hosts.pop(number).close()
        for number in wanted:
            if number not in self._hosts:
                self._hosts[number] = ask(number)
        self._wanted = dict(wanted)
        self._kick.set()

    @property
    def complete(self) -> bool:
        """Whether the router lists all that it is to have."""
        return self.listed is not None and set(self.listed) >= set(self._wanted)

    async def _keep(self) -> None:
        while True:
            self._kick.clear()
            before = (self.listed, self.roles, self.error)
            settled = False
            try:
                settled = await self._once()
                self.error = ""
            except (ProviderError, TimeoutError, msgspec.DecodeError, ValueError) as error:
                self.error = f"its list of workers cannot be kept: {error or 'no answer'}"[:300]
            except Exception:
                log.exception("keeping the workers of a router")
            if (self.listed, self.roles, self.error) != before:
                self._changed()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._kick.wait(), SELDOM_S if settled else SOON_S)

    async def _once(self) -> bool:
        """Look once, and ask for what is missing; whether nothing was."""
        wanted = dict(self._wanted)
        there = {one.url.rstrip("/"): one for one in await self._list()}
        found = {number: there[one.url] for number, one in sorted(wanted.items()) if one.url in there}
        self.listed = tuple(found)
        self.roles = {number: one.worker_type or wanted[number].worker.role for number, one in found.items()}
        missing = [one for one in wanted.values() if one.url not in there]
        urls = {one.url for one in wanted.values()}
        surplus = [one for url, one in there.items() if url not in urls]
        for target in missing:
            await self._add(target)
        for one in surplus:
            status, body = await self._router.ask("DELETE", f"/workers/{quote(one.id or one.url, safe='')}")
            if status not in (200, 202, 204, 404):
                raise ValueError(f"DELETE /workers answered {status}: {body[:200]}")
        return not missing and not surplus

    async def _list(self) -> list[_ListedWorker]:
        status, body = await self._router.ask("GET", "/workers")
        if status != 200:
            raise ValueError(f"GET /workers answered {status}: is it the router that the file says?")
        return from_json(body, _WorkerList).workers

    async def _add(self, target: WorkerTarget) -> None:
        told = payload(target, await self._described(target))
        status, body = await self._router.ask("POST", "/workers", msgspec.json.encode(told).decode())
        if status not in (200, 201, 202, 409):  # 409: it is being added already
            raise ValueError(f"POST /workers answered {status}: {body[:200]}")

    async def _described(self, target: WorkerTarget) -> RoutedWorker:
        """What the worker says of itself."""
        host = self._hosts.get(target.number)
        if target.worker.protocol != "http" or host is None:
            return target.worker
        for path in _INFO_PATHS:
            try:
                status, body = await host.ask("GET", path)
                if status == 200:
                    return told_by(from_json(body, _ServerInfo), target.worker)
            except (ProviderError, TimeoutError, msgspec.DecodeError, ValueError):
                continue
        return target.worker

    def close(self) -> None:
        """Leave the router alone; it keeps its list."""
        self._task.cancel()
        self._router.close()
        for host in self._hosts.values():
            host.close()


class HostPort:
    """A program that listens on a host, asked through the host's agent."""

    def __init__(self, session: HostSession, address: str, port: int) -> None:
        self._session, self._address, self._port = session, address, port

    async def ask(self, method: str, path: str, body: str = "") -> tuple[int, str]:
        """The status and body of its answer."""
        request: dict[str, Any] = {"address": self._address, "port": self._port, "limit_s": ANSWER_S}
        request |= {"method": method, "path": path, "content": body, "keep": MOST_BODY}
        if body:
            request["headers"] = {"Content-Type": "application/json"}
        async with asyncio.timeout(ANSWER_S + 15.0):
            answer = await self._session.call("probe", patience=0.0, **request)
        if answer.get("status") is None:
            raise ValueError(str(answer.get("error") or "no answer"))
        return int(answer["status"]), str(answer.get("body") or "")

    def close(self) -> None:
        """Drop the connection to the agent."""
        self._session.link.close()


def told_by(info: _ServerInfo, known: RoutedWorker) -> RoutedWorker:
    """A worker by its own words, and by its commands where it says nothing."""
    if info.disaggregation_mode not in ("prefill", "decode"):
        return known
    port = info.disaggregation_bootstrap_port or known.bootstrap_port
    return msgspec.structs.replace(
        known,
        role=info.disaggregation_mode,
        bootstrap_port=port if info.disaggregation_mode == "prefill" else None,
    )


def payload(target: WorkerTarget, worker: RoutedWorker) -> dict[str, Any]:
    """What a router is told of a worker."""
    told: dict[str, Any] = {"url": target.url, "worker_type": worker.role, "connection_mode": worker.protocol}
    named = {
        "runtime_type": worker.engine,
        "bootstrap_port": worker.bootstrap_port,
        "kv_connector": worker.kv_connector,
        "kv_role": worker.kv_role,
    }
    return told | {name: value for name, value in named.items() if value is not None}
