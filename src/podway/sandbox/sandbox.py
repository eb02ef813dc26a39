"""The sandbox at work: the world, a clock that moves it, machines that follow it, and faults on the way in.

1. A request comes over HTTP (`web`) or gRPC (`rpc`) and passes `guarded`, where a fault may be injected.
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
from typing import TypeVar

import msgspec
from starlette.types import ASGIApp

from podway.sandbox.access import Access
from podway.sandbox.compute.routes import compute_route
from podway.sandbox.container.routes import container_route
from podway.sandbox.faults import Call, Faults
from podway.sandbox.hosts.guests import DiskRequest, users_of
from podway.sandbox.hosts.inside import Listeners, listen_inside
from podway.sandbox.hosts.machines import Machines
from podway.sandbox.hosts.metadata import Metadata, metadata_tree
from podway.sandbox.hosts.netns import METADATA_ADDRESS
from podway.sandbox.jsons import JsonObject
from podway.sandbox.names import stamp
from podway.sandbox.projects import Projects
from podway.sandbox.status import ApiError
from podway.sandbox.storage.api import Storage
from podway.sandbox.storage.buckets import Buckets
from podway.sandbox.tpu.api import TpuApi
from podway.sandbox.tpu.nodes import MachineAction
from podway.sandbox.tpu.routes import about_of, id_of, project_of, zone_of
from podway.sandbox.world import World

T = TypeVar("T")
LONGEST_SLEEP_S = 3600.0
LAST_ACTIONS_S = 20.0


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
        self.projects = Projects(project)
        self._orders: dict[int, asyncio.Lock] = {}  # the actions of one node are done one after the other
        self._tasks: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()
        self._closing = False
        self._doors: tuple[Listeners, ASGIApp, int] | None = None

    def _write(self, line: JsonObject) -> None:
        self._books.write(msgspec.json.encode(line) + b"\n")
        self._books.flush()

    async def guarded(self, call: Call, do: Callable[[ApiError | None], Awaitable[T]]) -> T:
        """Answer a request, unless a fault is injected."""
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

    async def tpu(self, version: str, method: str, fields: JsonObject) -> JsonObject:
        """A method of the Cloud TPU API."""
        call = Call(service="tpu", method=method, zone=zone_of(fields), name=id_of(fields))

        async def do(failure: ApiError | None) -> JsonObject:
            if project := project_of(fields):
                self.projects.check("tpu", project, method, about_of(fields))
            try:
                return self.api.call(version, method, fields, time.time(), failure)
            finally:
                self.settle()

        return await self.guarded(call, do)

    async def compute(self, method: str, path: str, query: dict[str, str], body: object) -> JsonObject:
        """A method of Compute Engine."""
        self.world.advance(time.time())
        call, act = compute_route(self.world.compute, self.world.disk_users, method, path, query, body)

        async def do(failure: ApiError | None) -> JsonObject:
            self.projects.check("compute", path.removeprefix("/compute/v1/").split("/")[1], call.method)
            try:
                return act(time.time(), failure)
            finally:
                self.settle()

        return await self.guarded(call, do)

    async def container(self, method: str, path: str, body: object) -> JsonObject:
        """A method of Kubernetes Engine."""
        self.world.advance(time.time())
        call, act = container_route(self.world.node_pools, method, path, body)

        async def do(failure: ApiError | None) -> JsonObject:
            name = path.strip("/").partition("/")[2]
            self.projects.check("container", name.split("/")[1], call.method, name)
            try:
                return act(time.time(), failure)
            finally:
                self.settle()

        return await self.guarded(call, do)

    async def tpu_over_grpc(self, version: str, method: str, fields: JsonObject) -> JsonObject:
        """The same, for a wire on which a lost connection is a status too."""
        try:
            return await self.tpu(version, method, fields)
        except Dropped:
            raise ApiError("UNAVAILABLE", "Socket closed") from None

    def settle(self) -> None:
        """After a change: what machines are to do is begun, and the clock looks when it is due next."""
        for action in [] if self._closing else self.world.take_actions():
            task = asyncio.create_task(self._do(action))
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
            if self.world.nodes.actions or self.world.compute.actions:
                self.settle()

    async def _do(self, action: MachineAction) -> None:
        async with self._orders.setdefault(action.number, asyncio.Lock()):
            try:
                await self._do_now(action)
            except Exception as error:
                # Whatever a machine does wrong, the cloud goes on, and shows it as a failure of its own.
                print(f"{action.what} of {action.node} failed: {error!r}", file=sys.stderr, flush=True)
                if action.what in ("boot", "reboot"):
                    self.world.nodes.hosts_failed(action.node, action.number, f"{action.what}: {error}", time.time())
        if action.operation:
            self.world.nodes.updated(action.operation, time.time())
        if action.what == "remove":
            self._orders.pop(action.number, None)
        self.settle()

    async def _do_now(self, action: MachineAction) -> None:
        names = self._host_names(action)
        if action.what in ("boot", "reboot") and names:
            if action.what == "reboot":
                await asyncio.to_thread(self.machines.reboot, action.number, action.workers)
            hosts = await asyncio.to_thread(self.machines.boot, action.number, names)
            await self._attach(action)
            await self._let_in(action)
            await self._listen_inside(action)
            await self._start_script(action)
            self.world.nodes.hosts_up(action.node, action.number, hosts, time.time())
            self.world.compute.hosts_up(action.node, action.number, hosts[0], time.time())
        elif action.what == "keys":
            await self._attach(action)
            await self._let_in(action)
        elif action.what == "all-keys":
            nodes = [(one.name, one.number) for one in self.world.nodes.all.values() if one.up]
            for name, number in [*nodes, *self.world.compute.running()]:
                await self._let_in(MachineAction(what="keys", node=name, number=number))
        elif action.what == "halt":
            await asyncio.to_thread(self.machines.halt, action.number)
        elif action.what == "wipe":
            await asyncio.to_thread(self.machines.wipe, action.number)
        elif action.what == "remove":
            if self._doors is not None:
                self._doors[0].close(action.number)
            self.access.revoke(action.number)
            await asyncio.to_thread(self.machines.remove, action.number)

    def _host_names(self, action: MachineAction) -> list[str]:
        """What the machines are called; none where what they belonged to is gone by now."""
        node = self.world.nodes.all.get(action.node)
        if node is not None and node.number == action.number:
            return [f"t1v-n-{action.number % 0xFFFFFFFF:08x}-w-{worker}" for worker in range(node.slice.hosts)]
        return (
            [action.node.rpartition("/")[2]]
            if self.world.compute.keys_of(action.node, action.number) is not None
            else []
        )

    def _own_metadata(self, action: MachineAction) -> dict[str, str] | None:
        """The metadata of what the machines belong to; None where it is gone by now."""
        node = self.world.nodes.all.get(action.node)
        if node is not None and node.number == action.number:
            return dict(node.spec.get("metadata") or {})
        return self.world.compute.keys_of(action.node, action.number)

    async def _let_in(self, action: MachineAction) -> None:
        """What a guest agent does: who may log in, by the metadata of the project and of the machine's own."""
        mine = self._own_metadata(action)
        if mine is None:
            return
        project = self.world.compute.metadata.get(action.node.split("/")[1], {})
        blocked = mine.get("block-project-ssh-keys", "").upper() == "TRUE"
        users = users_of(*([] if blocked else [project]), mine)
        await asyncio.to_thread(self.machines.let_in, action.number, users)

    async def _attach(self, action: MachineAction) -> None:
        """The data disks that a node names."""
        node = self.world.nodes.all.get(action.node)
        if node is not None and node.number == action.number:
            requests = [
                DiskRequest(
                    number=int(disk["id"]),
                    size_gb=int(disk["sizeGb"]),
                    read_only=one.get("mode") == "READ_ONLY_MANY",
                )
                for one, disk in self.world.disks_of(node.spec)
            ]
            await asyncio.to_thread(self.machines.attach, action.number, requests)

    async def _start_script(self, action: MachineAction) -> None:
        """The other thing a guest agent does: the startup script, at each boot."""
        script = (self._own_metadata(action) or {}).get("startup-script")
        if script:
            await asyncio.to_thread(self.machines.start_script, action.number, script)

    def open_inside(self, listeners: Listeners, app: ASGIApp, port: int) -> None:
        """From now on machines find this sandbox at 127.0.0.1:PORT, as people outside do."""
        self._doors = (listeners, app, port)

    async def _listen_inside(self, action: MachineAction) -> None:
        if self._doors is None or self._doors[0].has(action.number):
            return
        listeners, app, port = self._doors
        addresses = [("127.0.0.1", port), (METADATA_ADDRESS, 80)]
        for worker, namespace in enumerate(self.machines.namespaces(action.number)):
            api, metadata = await asyncio.to_thread(listen_inside, namespace, addresses)
            await listeners.serve(action.number, api, app)
            await listeners.serve(action.number, metadata, Metadata(functools.partial(self._tree, action, worker)))

    def _tree(self, action: MachineAction, worker: int) -> JsonObject:
        project = self.world.compute.metadata.get(action.node.split("/")[1], {})
        node = self.world.nodes.all.get(action.node)
        if node is None or node.number != action.number or not node.hosts:
            return {"instance": {"attributes": self._own_metadata(action) or {}}, "project": {"attributes": project}}
        return metadata_tree(node, worker, project, self.access.host_token(action.number, worker))

    async def close(self) -> None:
        """Let what is under way end (a machine half made is hard to find again), then end the machines."""
        self._closing = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_ACTIONS_S)
        if self._doors is not None:
            self._doors[0].close_all()
        await asyncio.to_thread(self.machines.close)
        self._write({"at": stamp(time.time()), "event": "ended", "living": sorted(self.world.ledger.living)})
        self._books.close()
        shutil.rmtree(self.state / "objects", ignore_errors=True)
