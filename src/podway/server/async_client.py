"""`AsyncClient`: the methods of `Client` for asyncio programs.

There is one implementation: each method here runs the method of the same name in a thread, on a connection of its own. Cancelling
the call closes that connection, which ends the thread; so does leaving an `async for` early. A thread for each open call keeps a
long wait from holding up the others, as a pool would.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, Self, TypeVar

from podway.server.client import Client
from podway.server.connection import RETRY_S, ClientClosed

P = ParamSpec("P")
T = TypeVar("T")


def _call(method: Callable[Concatenate[Client, P], T]) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    @functools.wraps(method)
    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        client, loop = self._fork(), asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(outcome: Callable[[], None]) -> None:
            if not done.done():  # cancelled meanwhile
                outcome()

        def work() -> None:
            try:
                result = method(client, *args, **kwargs)
                outcome = functools.partial(done.set_result, result)
            except BaseException as error:
                outcome = functools.partial(done.set_exception, error)
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, outcome)

        threading.Thread(target=work, name=f"podway-{method.__name__}", daemon=True).start()
        try:
            return await done
        finally:
            self._release(client)

    return call


def _stream(
    method: Callable[Concatenate[Client, P], Iterator[T]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    @functools.wraps(method)
    async def iterate(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        client, loop, end = self._fork(), asyncio.get_running_loop(), object()
        items = method(client, *args, **kwargs)
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"podway-{method.__name__}")
        try:
            while (item := await loop.run_in_executor(thread, next, items, end)) is not end:
                yield item  # type: ignore[misc]
        finally:
            self._release(client)
            thread.shutdown(wait=False)

    return iterate


class AsyncClient:
    """The methods of `Client`, to be awaited. Cancelling a call ends it at once, and never the job."""

    def __init__(self, url: str | None = None, token: str | None = None, *, retry_s: float = RETRY_S) -> None:
        self._client = Client(url, token, retry_s=retry_s)
        self._open: set[Client] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the calls and streams that are open. Jobs go on."""
        self._closed = True
        for client in list(self._open):
            client.close()

    @property
    def own_server(self) -> bool:
        """Whether the server is this machine's own, of the same user, and not a team's."""
        return self._client.own_server

    def _fork(self) -> Client:
        if self._closed:
            raise ClientClosed
        client = self._client.fork()
        self._open.add(client)
        return client

    def _release(self, client: Client) -> None:
        self._open.discard(client)
        client.close()

    request = _call(Client.request)
    preview = _call(Client.preview)
    launch = _call(Client.launch)
    submit = _call(Client.submit)
    exec = _call(Client.exec)
    run = _call(Client.run)

    jobs = _call(Client.jobs)
    job = _call(Client.job)
    latest = _call(Client.latest)
    wait = _call(Client.wait)
    cancel = _call(Client.cancel)
    usage = _call(Client.usage)

    logs = _stream(Client.logs)
    watch = _stream(Client.watch)
    output = _stream(Client.output)

    runs = _call(Client.runs)
    metrics = _stream(Client.metrics)
    planned = _call(Client.planned)
    costs = _call(Client.costs)

    clusters = _call(Client.clusters)
    overview = _call(Client.overview)
    cluster = _call(Client.cluster)
    wait_until = _call(Client.wait_until)
    stop = _call(Client.stop)
    start = _call(Client.start)
    down = _call(Client.down)
    autostop = _call(Client.autostop)
    events = _call(Client.events)
    shell = _call(Client.shell)
    host_login = _call(Client.host_login)
    orphans = _call(Client.orphans)
    purge = _call(Client.purge)

    preview_service = _call(Client.preview_service)
    apply_service = _call(Client.apply_service)
    services = _call(Client.services)
    service = _call(Client.service)
    scale_service = _call(Client.scale_service)
    set_canary = _call(Client.set_canary)
    rollback_service = _call(Client.rollback_service)
    share_service = _call(Client.share_service)
    end_service = _call(Client.end_service)
    service_events = _call(Client.service_events)
    service_load = _call(Client.service_load)

    gateway_routes = _call(Client.gateway_routes)
    gateway_report = _call(Client.gateway_report)
    usage_by_day = _call(Client.usage_by_day)
    make_gateway_key = _call(Client.make_gateway_key)
    gateway_keys = _call(Client.gateway_keys)
    volumes = _call(Client.volumes)
    create_volume = _call(Client.create_volume)
    delete_volume = _call(Client.delete_volume)
    schedules = _call(Client.schedules)
    put_schedule = _call(Client.put_schedule)
    delete_schedule = _call(Client.delete_schedule)
    groups = _call(Client.groups)
    group = _call(Client.group)
    launch_group = _call(Client.launch_group)
    cancel_group = _call(Client.cancel_group)
    pools = _call(Client.pools)
    pool = _call(Client.pool)
    apply_pool = _call(Client.apply_pool)
    submit_to_pool = _call(Client.submit_to_pool)
    cancel_pool_jobs = _call(Client.cancel_pool_jobs)
    end_pool = _call(Client.end_pool)
    delete_gateway_key = _call(Client.delete_gateway_key)

    info = _call(Client.info)
    page_link = _call(Client.page_link)
    make_token = _call(Client.make_token)
    tokens = _call(Client.tokens)
    members = _call(Client.members)
    set_member = _call(Client.set_member)
    share = _call(Client.share)
    audit = _call(Client.audit)
    revoke_token = _call(Client.revoke_token)
    revoke = _call(Client.revoke)
    plan = _call(Client.plan)
    rehearse = _call(Client.rehearse)
    missing = _call(Client.missing)
    content_blocks = _call(Client.content_blocks)
    upload = _call(Client.upload)
