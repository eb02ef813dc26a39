"""The pretended cloud as one value that changes: resources, what is due, and the books. No threads, no clock, no network.

Whoever runs it calls `advance` with the time, asks and commands through the parts, and carries out the `MachineAction`s that come of it.
"""

from collections.abc import Callable

from podway.sandbox.agenda import Agenda
from podway.sandbox.compute.resources import Compute
from podway.sandbox.container.node_pools import NodePools
from podway.sandbox.jsons import JsonObject
from podway.sandbox.ledger import Ledger
from podway.sandbox.status import invalid
from podway.sandbox.tpu.capacity import Capacity
from podway.sandbox.tpu.nodes import MachineAction, Nodes
from podway.sandbox.tpu.operations import Operations
from podway.sandbox.tpu.queue import Queue


class World:
    """All parts, joined."""

    def __init__(self, speed: float = 1.0, write: Callable[[JsonObject], None] = lambda line: None) -> None:
        self.agenda = Agenda(speed)
        self.capacity = Capacity()
        self.operations = Operations()
        self.ledger = Ledger(write)
        self.nodes = Nodes(self.agenda, self.operations, self.capacity, self.ledger)
        self.queue = Queue(self.agenda, self.operations, self.capacity, self.ledger, self.nodes)
        self.compute = Compute(self.agenda, self.ledger)
        self.node_pools = NodePools(self.agenda, self.ledger)

    def advance(self, now: float) -> None:
        """Let everything happen that is due, and those who wait look again."""
        self.agenda.run(now)
        self.queue.look(now)

    def take_actions(self) -> list[MachineAction]:
        """What is to be done to machines, in order; each is handed out once."""
        actions = [*self.nodes.actions, *self.compute.actions]
        self.nodes.actions.clear()
        self.compute.actions.clear()
        return actions

    def disk_users(self, disk: str) -> list[str]:
        """The nodes that a disk is attached to."""
        return [
            node.name
            for node in self.nodes.all.values()
            if any(str(one.get("sourceDisk", "")).endswith(disk) for one in node.spec.get("dataDisks") or [])
        ]

    def check_disks(self, spec: JsonObject) -> None:
        """The disks of a new node must be there, and those it writes to must be nobody else's."""
        for one, disk in self.disks_of(spec):
            path = str(disk["selfLink"]).partition("/compute/v1/")[2]
            users = [user for user in self.disk_users(path) if user != spec.get("name")]
            if users and one.get("mode") != "READ_ONLY_MANY":
                raise invalid(f"The disk resource '{path}' is already being used by '{users[0]}'")

    def disks_of(self, spec: JsonObject) -> list[tuple[JsonObject, JsonObject]]:
        """The disks that a node's spec names, each with how it is to be attached; all of them must be there."""
        found = []
        for one in spec.get("dataDisks") or []:
            source = str(one.get("sourceDisk", ""))
            found.append((one, self.compute.get(source.partition("/compute/v1/")[2] or source)))
        return found
