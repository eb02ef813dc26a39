"""The sandbox at work: the world, a clock that moves it, machines that follow it, and faults on the way in.

1. A request comes over HTTP (`web`) or gRPC (`rpc`) and passes `guarded`, where a fault may befall it.
2. The API changes the world; what the world wants done to machines is done in threads, in order for each node.
3. A task sleeps until something is due, and advances the world.
"""

import asyncio
import contextlib
import functools
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from podway.sandbox.access import Access
from podway.sandbox.compute.routes import compute_route
from podway.sandbox.faults import Call, Faults
from podway.sandbox.hosts.guests import DiskWish, users_of
from podway.sandbox.hosts.inside import Listeners, listen_inside
from podway.sandbox.hosts.machines import Machines
from podway.sandbox.hosts.metadata import Metadata, metadata_tree
from podway.sandbox.hosts.netns import METADATA_ADDRESS
from podway.sandbox.names import stamp
from podway.sandbox.status import ApiError
from podway.sandbox.storage.api import Storage
from podway.sandbox.storage.buckets import Buckets
from podway.sandbox.tpu.api import TpuApi
from podway.sandbox.tpu.nodes import Deed
from podway.sandbox.tpu.routes import id_of, zone_of
from podway.sandbox.world import World

T = TypeVar("T")
LONGEST_SLEEP_S = 3600.0
LAST_DEEDS_S = 20.0


class Dropped(Exception):
    """The connection is to be closed without an answer."""


class Sandbox:
    """Everything behind the wires."""

    def __init__(self, state: Path, machines: Machines, *, project: str, speed: float) -> None:
        self.state, self.machines, self.project = state, machines, project
        self._books = open(state / "ledger.jsonl", "ab")  # noqa: SIM115 - for the life of the process
        self.world = World(speed, self._write)
        self.api = TpuApi(self.world)
        self.storage = Storage(Buckets(state / "objects", self.world.ledger))
        self.faults = Faults()
        self.access = Access()
        self._orders: dict[int, asyncio.Lock] = {}  # the deeds of one node are done one after the other
        self._tasks: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()
        self._closing = False
        self._doors: tuple[Listeners, Any, int] | None = None

    def _write(self, line: dict[str, Any]) -> None:
        self._books.write(msgspec.json.encode(line) + b"\n")
        self._books.flush()

    async def guarded(self, call: Call, do: Callable[[ApiError | None], Awaitable[T]]) -> T:
        """Answer a request, unless a fault befalls it."""
        rule = self.faults.pick(call)
        if rule is None:
            return await do(None)
        if rule.kind == "error":
            raise rule.error()
        if rule.kind == "drop":
            raise Dropped
        if rule.kind == "delay":
            await asyncio.sleep(rule.seconds)
        done = await do(rule.error() if rule.kind == "lro" else None)
        if rule.kind == "lost":
            raise Dropped
        if rule.kind == "slow":
            await asyncio.sleep(rule.seconds)
        return done

    async def tpu(self, version: str, method: str, fields: dict[str, Any]) -> dict[str, Any]:
        """A method of the Cloud TPU API."""
        call = Call(service="tpu", method=method, zone=zone_of(fields), name=id_of(fields))

        async def do(doom: ApiError | None) -> dict[str, Any]:
            try:
                return self.api.call(version, method, fields, time.time(), doom)
            finally:
                self.settle()

        return await self.guarded(call, do)

    async def compute(self, method: str, path: str, query: dict[str, str], body: Any) -> dict[str, Any]:
        """A method of Compute Engine."""
        self.world.advance(time.time())
        call, act = compute_route(self.world.compute, self.world.disk_users, method, path, query, body)

        async def do(doom: ApiError | None) -> dict[str, Any]:
            try:
                return act(time.time(), doom)
            finally:
                self.settle()

        return await self.guarded(call, do)

    async def tpu_over_grpc(self, version: str, method: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The same, for a wire on which a lost connection is a status too."""
        try:
            return await self.tpu(version, method, fields)
        except Dropped:
            raise ApiError("UNAVAILABLE", "Socket closed") from None

    def settle(self) -> None:
        """After a change: what machines are to do is begun, and the clock looks when it is due next."""
        for deed in [] if self._closing else self.world.take_deeds():
            task = asyncio.create_task(self._do(deed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._moved.set()

    async def run_clock(self) -> None:
        """Move the world whenever something is due."""
        while True:
            self._moved.clear()
            due = self.world.agenda.next_due()
            wait = LONGEST_SLEEP_S if due is None else max(0.0, due - time.time())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._moved.wait(), wait)
            self.world.advance(time.time())
            if self.world.nodes.deeds or self.world.compute.deeds:
                self.settle()

    async def _do(self, deed: Deed) -> None:
        async with self._orders.setdefault(deed.number, asyncio.Lock()):
            try:
                await self._do_now(deed)
            except Exception as error:
                # Whatever a machine does wrong, the cloud goes on, and shows it as a failure of its own.
                print(f"{deed.what} of {deed.node} failed: {error!r}", file=sys.stderr, flush=True)
                if deed.what in ("boot", "reboot"):
                    self.world.nodes.hosts_failed(deed.node, deed.number, f"{deed.what}: {error}", time.time())
        if deed.operation:
            self.world.nodes.updated(deed.operation, time.time())
        if deed.what == "remove":
            self._orders.pop(deed.number, None)
        self.settle()

    async def _do_now(self, deed: Deed) -> None:
        names = self._host_names(deed)
        if deed.what in ("boot", "reboot") and names:
            if deed.what == "reboot":
                await asyncio.to_thread(self.machines.reboot, deed.number, deed.workers)
            hosts = await asyncio.to_thread(self.machines.boot, deed.number, names)
            await self._attach(deed)
            await self._let_in(deed)
            await self._listen_inside(deed)
            await self._start_script(deed)
            self.world.nodes.hosts_up(deed.node, deed.number, hosts, time.time())
            self.world.compute.hosts_up(deed.node, deed.number, hosts[0], time.time())
        elif deed.what == "keys":
            await self._attach(deed)
            await self._let_in(deed)
        elif deed.what == "all-keys":
            nodes = [(one.name, one.number) for one in self.world.nodes.all.values() if one.up]
            for name, number in [*nodes, *self.world.compute.running()]:
                await self._let_in(Deed(what="keys", node=name, number=number))
        elif deed.what == "halt":
            await asyncio.to_thread(self.machines.halt, deed.number)
        elif deed.what == "wipe":
            await asyncio.to_thread(self.machines.wipe, deed.number)
        elif deed.what == "remove":
            if self._doors is not None:
                self._doors[0].close(deed.number)
            self.access.revoke(deed.number)
            await asyncio.to_thread(self.machines.remove, deed.number)

    def _host_names(self, deed: Deed) -> list[str]:
        """What the machines are called; none where what they belonged to is gone by now."""
        node = self.world.nodes.all.get(deed.node)
        if node is not None and node.number == deed.number:
            return [f"t1v-n-{deed.number % 0xFFFFFFFF:08x}-w-{worker}" for worker in range(node.slice.hosts)]
        return [deed.node.rpartition("/")[2]] if self.world.compute.keys_of(deed.node, deed.number) is not None else []

    def _own_metadata(self, deed: Deed) -> dict[str, str] | None:
        """The metadata of what the machines belong to; None where it is gone by now."""
        node = self.world.nodes.all.get(deed.node)
        if node is not None and node.number == deed.number:
            return dict(node.spec.get("metadata") or {})
        return self.world.compute.keys_of(deed.node, deed.number)

    async def _let_in(self, deed: Deed) -> None:
        """What a guest agent does: who may log in, by the metadata of the project and of the machine's own."""
        mine = self._own_metadata(deed)
        if mine is None:
            return
        project = self.world.compute.metadata.get(deed.node.split("/")[1], {})
        blocked = mine.get("block-project-ssh-keys", "").upper() == "TRUE"
        users = users_of(*([] if blocked else [project]), mine)
        await asyncio.to_thread(self.machines.let_in, deed.number, users)

    async def _attach(self, deed: Deed) -> None:
        """The data disks that a node names."""
        node = self.world.nodes.all.get(deed.node)
        if node is not None and node.number == deed.number:
            wishes = [
                DiskWish(
                    number=int(disk["id"]),
                    size_gb=int(disk["sizeGb"]),
                    read_only=one.get("mode") == "READ_ONLY_MANY",
                )
                for one, disk in self.world.disks_of(node.spec)
            ]
            await asyncio.to_thread(self.machines.attach, deed.number, wishes)

    async def _start_script(self, deed: Deed) -> None:
        """The other thing a guest agent does: the startup script, at each boot."""
        script = (self._own_metadata(deed) or {}).get("startup-script")
        if script:
            await asyncio.to_thread(self.machines.start_script, deed.number, script)

    def open_inside(self, listeners: Listeners, app: Any, port: int) -> None:
        """From now on machines find this sandbox at 127.0.0.1:PORT, as people outside do."""
        self._doors = (listeners, app, port)

    async def _listen_inside(self, deed: Deed) -> None:
        if self._doors is None or self._doors[0].has(deed.number):
            return
        listeners, app, port = self._doors
        addresses = [("127.0.0.1", port), (METADATA_ADDRESS, 80)]
        for worker, namespace in enumerate(self.machines.namespaces(deed.number)):
            api, metadata = await asyncio.to_thread(listen_inside, namespace, addresses)
            await listeners.serve(deed.number, api, app)
            await listeners.serve(deed.number, metadata, Metadata(functools.partial(self._tree, deed, worker)))

    def _tree(self, deed: Deed, worker: int) -> dict[str, Any]:
        project = self.world.compute.metadata.get(deed.node.split("/")[1], {})
        node = self.world.nodes.all.get(deed.node)
        if node is None or node.number != deed.number or not node.hosts:
            return {"instance": {"attributes": self._own_metadata(deed) or {}}, "project": {"attributes": project}}
        return metadata_tree(node, worker, project, self.access.host_token(deed.number, worker))

    async def close(self) -> None:
        """Let what is under way end (a machine half made is hard to find again), then end the machines."""
        self._closing = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_DEEDS_S)
        if self._doors is not None:
            self._doors[0].close_all()
        await asyncio.to_thread(self.machines.close)
        self._write({"at": stamp(time.time()), "event": "ended", "living": sorted(self.world.ledger.living)})
        self._books.close()
        shutil.rmtree(self.state / "objects", ignore_errors=True)
