"""The sandbox's own commands, under /sandbox: look at the books, cause faults, take capacity and machines away.

GET  /sandbox                what this sandbox is
GET  /sandbox/ledger         what exists and bills now, and all history
GET  /sandbox/faults         the rules in force; POST adds one (see faults.Rule), DELETE /sandbox/faults[/ID] lifts
POST /sandbox/preempt        {"node": N | "queued": Q, "zone"?}
POST /sandbox/maintenance    {"node": N, "workers"?: [0]}
POST /sandbox/partition      {"node": N, "workers"?: [0], "on"?: true}    cut off, or back with "on": false
POST /sandbox/hosts          {"node": N, "workers"?: [0], "action": "kill-sshd"|"start-sshd"|"lose"}
POST /sandbox/stock          {"zone"?, "generation"?, "tier"?, "chips": n | null}
POST /sandbox/quota          {"zone"?, "quota"?, "limit": n | null}
POST /sandbox/reservations   {"zone", "name", "generation", "chips"}
POST /sandbox/projects       {"name", "access"?: false}    another project; one that the caller may not use
POST /sandbox/permissions    {"bucket"?, "deny": ["storage.objects.get"]}    what the caller may not do; [] gives all back
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection

import msgspec

from podway.catalog.generations import GENERATIONS
from podway.decoding import from_plain
from podway.sandbox.faults import Rule
from podway.sandbox.jsons import JsonObject
from podway.sandbox.names import check_id
from podway.sandbox.sandbox import Sandbox
from podway.sandbox.status import ApiError, invalid, not_found, out_of_order
from podway.sandbox.storage.buckets import PERMISSIONS
from podway.sandbox.tpu.capacity import BEST_EFFORT, ON_DEMAND, SPOT
from podway.sandbox.tpu.nodes import Node
from podway.sandbox.tpu.shapes import zones


class Commands:
    """Each command by its method and path."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._table: dict[tuple[str, str], Callable[[JsonObject], Awaitable[JsonObject]]] = {
            ("GET", ""): self._about,
            ("GET", "ledger"): self._ledger,
            ("GET", "faults"): self._list_faults,
            ("POST", "faults"): self._add_fault,
            ("DELETE", "faults"): self._lift_faults,
            ("POST", "preempt"): self._preempt,
            ("POST", "maintenance"): self._maintain,
            ("POST", "partition"): self._partition,
            ("POST", "hosts"): self._inject,
            ("POST", "stock"): self._stock,
            ("POST", "quota"): self._quota,
            ("POST", "reservations"): self._reserve,
            ("POST", "projects"): self._add_project,
            ("POST", "permissions"): self._permit,
        }

    async def run(self, method: str, path: str, query: dict[str, str], body: object) -> JsonObject:
        """Do a command."""
        if body is not None and not isinstance(body, dict):
            raise invalid("The body must be an object.")
        name, _, rest = path.removeprefix("/sandbox").strip("/").partition("/")
        if (method, name) not in self._table:
            raise ApiError("NOT_FOUND", f"There is no command {method} {path}.")
        self._sandbox.world.advance(time.time())
        try:
            return await self._table[method, name]({**query, **(body or {}), **({"id": rest} if rest else {})})
        finally:
            self._sandbox.settle()

    async def _about(self, asked: JsonObject) -> JsonObject:
        world, sandbox = self._sandbox.world, self._sandbox
        return {
            "project": sandbox.project,
            "machines": sandbox.machines.kind,
            "speed": world.agenda.speed,
            "nodes": {name: node.state for name, node in world.nodes.all.items()},
            "queued": {name: queued.state for name, queued in world.queue.all.items()},
            "stock": [dict(zip(("zone", "generation", "tier"), key, strict=True)) | {"chips": chips}
                      for key, chips in world.capacity.stocks.items()],
            "quota": [{"zone": zone, "quota": name, "limit": limit}
                      for (zone, name), limit in world.capacity.quotas.items()],
        }  # fmt: skip

    async def _ledger(self, asked: JsonObject) -> JsonObject:
        return self._sandbox.world.ledger.view(time.time())

    async def _list_faults(self, asked: JsonObject) -> JsonObject:
        return {"faults": self._sandbox.faults.view()}

    async def _add_fault(self, asked: JsonObject) -> JsonObject:
        try:
            rule = from_plain(asked, Rule)
        except msgspec.ValidationError as error:
            raise invalid(f"This is not a fault: {error}") from None
        return {"id": self._sandbox.faults.add(rule)}

    async def _lift_faults(self, asked: JsonObject) -> JsonObject:
        self._sandbox.faults.remove(asked.get("id"))
        return {}

    async def _preempt(self, asked: JsonObject) -> JsonObject:
        nodes = self._sandbox.world.nodes
        chosen = [
            node for node in nodes.all.values() if node.queued and node.queued.endswith(f"/{asked.get('queued')}")
        ]
        if not asked.get("queued"):
            chosen = [self._node(asked)]
        if not chosen:
            raise not_found(str(asked["queued"]))
        for node in chosen:
            nodes.preempt(node.name, time.time())
        return {"preempted": [node.name for node in chosen]}

    async def _maintain(self, asked: JsonObject) -> JsonObject:
        node = self._node(asked)
        workers = tuple(int(worker) for worker in asked.get("workers") or ())
        return self._sandbox.world.nodes.maintain("v2alpha1", node.name, workers, time.time()).view()

    async def _partition(self, asked: JsonObject) -> JsonObject:
        return await self._each(asked, "cut-off" if asked.get("on", True) else "reconnect")

    async def _inject(self, asked: JsonObject) -> JsonObject:
        action = asked.get("action")
        if action not in ("kill-sshd", "start-sshd", "lose"):
            raise invalid(f"There is no action {action!r}: kill-sshd, start-sshd, lose.")
        return await self._each(asked, action)

    async def _each(self, asked: JsonObject, action: str) -> JsonObject:
        node = self._node(asked)
        workers = asked.get("workers")
        chosen = range(node.slice.hosts) if workers is None else [int(worker) for worker in workers]
        if not node.up or any(worker not in range(node.slice.hosts) for worker in chosen):
            raise out_of_order(f"'{node.name}' is {node.state} with {node.slice.hosts} workers.")
        for worker in chosen:
            try:
                await asyncio.to_thread(self._sandbox.machines.inject, node.number, worker, action)
            except RuntimeError as error:
                raise out_of_order(str(error)) from None
        return {"node": node.name, "workers": list(chosen), "action": action}

    async def _stock(self, asked: JsonObject) -> JsonObject:
        zone, generation, tier = (_choice(asked, key, known) for key, known in _STOCK.items())
        self._sandbox.world.capacity.set_stock(zone, generation, tier, _count(asked, "chips"))
        return {}

    async def _quota(self, asked: JsonObject) -> JsonObject:
        zone = _choice(asked, "zone", zones())
        self._sandbox.world.capacity.set_quota(zone, str(asked.get("quota") or "*"), _count(asked, "limit"))
        return {}

    async def _reserve(self, asked: JsonObject) -> JsonObject:
        zone, generation = _choice(asked, "zone", zones()), _choice(asked, "generation", GENERATIONS)
        chips = _count(asked, "chips")
        if "*" in (zone, generation) or chips is None or not asked.get("name"):
            raise invalid("A reservation needs zone, generation, name and chips.")
        check_id("name", str(asked["name"]))
        project = str(asked.get("project") or self._sandbox.project)
        made = self._sandbox.world.capacity.reserve(project, zone, str(asked["name"]), generation, chips, time.time())
        return {"name": made.name}

    async def _add_project(self, asked: JsonObject) -> JsonObject:
        name = check_id("name", str(asked.get("name") or ""))
        self._sandbox.projects.known[name] = bool(asked.get("access", True))
        return {"name": name}

    async def _permit(self, asked: JsonObject) -> JsonObject:
        deny = asked.get("deny")
        if not isinstance(deny, list) or not set(deny) <= set(PERMISSIONS.values()):
            raise invalid(f"deny is a list of {', '.join(sorted(set(PERMISSIONS.values())))}.")
        self._sandbox.storage.buckets.denied[str(asked.get("bucket") or "*")] = set(deny)
        return {}

    def _node(self, asked: JsonObject) -> Node:
        """The node meant: by its full name, or by its id where that is enough."""
        wanted, zone = str(asked.get("node") or ""), asked.get("zone")
        found = [
            node
            for node in self._sandbox.world.nodes.all.values()
            if node.name == wanted or (node.place[2] == wanted and zone in (None, node.place[1]))
        ]
        if not found:
            raise not_found(wanted)
        if len(found) > 1:
            raise invalid(f"There are {len(found)} nodes called {wanted}; give the zone.")
        return found[0]


_STOCK = {"zone": zones(), "generation": tuple(GENERATIONS), "tier": (SPOT, ON_DEMAND, BEST_EFFORT)}


def _choice(asked: JsonObject, key: str, known: Collection[str]) -> str:
    value = str(asked.get(key) or "*")
    if value != "*" and value not in known:
        raise invalid(f"There is no {key} {value}; they are {', '.join(known)}.")
    return value


def _count(asked: JsonObject, key: str) -> int | None:
    value = asked.get(key)
    if value is not None and (not isinstance(value, int) or value < 0):
        raise invalid(f"{key} must be a number that is not negative, or null for no limit.")
    return value
