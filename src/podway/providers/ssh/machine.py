"""One machine of a pool: claim it, start the agent on it, remove all of it; each one round trip over its connection.

The doing on the machine is `podway.hosts.ssh.remote`, sent there and run by its python3. Here is the asking: what to send, and
how each thing that can be wrong with a machine becomes one line a person can act on.
"""

import asyncio
import getpass
import hashlib
import json
import platform
import shlex
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from functools import cache

import msgspec

from podway.decoding import from_json
from podway.errors import ProviderError, UserError
from podway.hosts.bundle import bundle
from podway.hosts.link import AgentLink, Connect, needs_start
from podway.hosts.ssh import remote
from podway.hosts.ssh.connections import SshConnections
from podway.hosts.ssh.endpoint import Endpoint
from podway.order import Host
from podway.providers import Shell
from podway.providers.ssh.pool import Machine

REPLACE_S = 20.0
# What a shell says when there is no such command, and when there is one that cannot be run (POSIX).
NOT_FOUND, CANNOT_RUN = 127, 126


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine said when it was claimed."""

    id: str
    home: str
    address: str  # the one its peers reach
    reached_at: str
    has_agent: bool


class _MachineReply(msgspec.Struct, frozen=True):
    """What the program that is sent to a machine (hosts/ssh/remote.py) answers to one of its operations."""

    error: str | None = None
    code: str = ""
    stale: str | None = None
    held: dict[str, object] | None = None  # the lease file: whatever another one wrote into it
    address: str = ""
    home: str = ""
    agent: bool = False
    need: str = ""


class Held(Exception):
    """The machine is another's now; the text says whose."""


class Unable(UserError):
    """The machine cannot run what is sent to it: nothing was done there."""


class MachineWork:
    """What is done on machines, over the process' connections."""

    def __init__(self, connections: SshConnections) -> None:
        self._connections = connections
        self._program = remote.program()
        self.digest = hashlib.sha256(bundle().data).hexdigest()

    async def claim(self, machine: Machine, host_id: str, lease: dict[str, str]) -> Claimed:
        """Take the machine's lease; `Held` when another has it."""
        fields = {**await self._whose(machine, lease), "id": host_id}
        reply = await self._ask(machine, "claim", fields)
        if reply.stale is not None:
            await self.remove(machine, reply.stale, lease)
            reply = await self._ask(machine, "claim", fields)
        if reply.stale is not None:
            raise ProviderError(f"{place_of(machine)}: what an earlier cluster left there cannot be removed")
        if reply.held is not None:
            raise Held(_held(machine, reply.held))
        address = machine.internal_address or reply.address or machine.endpoint.address
        return Claimed(
            id=host_id,
            home=reply.home,
            address=address,
            reached_at=machine.endpoint.address,
            has_agent=reply.agent,
        )

    async def start(self, machine: Machine, host: Host, claimed: Claimed, connect: Connect) -> None:
        """Have this version's agent run there; an older one gives way, and its jobs go on."""
        fields = {
            "lease_path": await self._lease_path(machine.endpoint),
            "home": host.home,
            "id": host.id,
            "agent": self.digest,
            "address": host.address,
        }
        body = b"" if claimed.has_agent else packed_agent()
        link = AgentLink(connect)
        until = time.monotonic() + REPLACE_S
        try:
            while True:
                await self._ask(machine, "start", fields, body)
                if (await link.call("hello")).fields["version"] == bundle().sha256:
                    return
                await link.call("shutdown", keep_jobs=True)
                if time.monotonic() > until:
                    raise ProviderError(f"the agent of {place_of(machine)} is of another version and does not give way")
                await asyncio.sleep(0.05)
        finally:
            link.close()

    async def ensure_agent(self, connect: Connect, start: Callable[[], Awaitable[object]]) -> None:
        """Have an agent answer at the other end of `connect`, by `start` where none does, or an idle one of another version."""
        try:
            link = AgentLink(connect)
            try:
                if await needs_start(link):
                    await start()
            finally:
                link.close()
        except UserError as error:
            raise ProviderError(error.what) from None  # in the middle of a job it may pass, and the job lives on

    def connect(self, machine: Machine, home: str) -> Connect:
        """Streams to the agent of that home, over the machine's one connection."""
        agent = remote.agent_path(home, self.digest)
        relay = shlex.join(["python3", "-S", "-E", agent, "call", "--home", home])
        return self._connections.connect(machine.endpoint, remote.socket_path(home), relay)

    def shell(self, machine: Machine, home: str, env: dict[str, str]) -> Shell:
        """By the person's own ssh, with the pinned keys, into an environment as a job has it."""
        known = self._connections.pins.lines_of(machine.endpoint)
        return Shell(home=home, env=env, endpoint=machine.endpoint, known_hosts=tuple(known))

    async def trust(self, machine: Machine, host_id: str, line: str) -> None:
        """Have a line in authorized_keys there, until the machine is given back."""
        path = await self._lease_path(machine.endpoint)
        await self._ask(machine, "trust", {"lease_path": path, "id": host_id, "line": line})

    async def remove(self, machine: Machine, host_id: str, lease: dict[str, str]) -> None:
        """End every process of the host, remove what was made, give the lease back."""
        fields = {**await self._whose(machine, lease), "id": host_id}
        reply = await self._ask(machine, "remove", fields)
        if reply.need:  # its copy is gone or of another version, and with it the code that finds processes
            await self._ask(machine, "remove", fields, packed_agent())

    async def check(self, machine: Machine, host_id: str, lease: dict[str, str]) -> None:
        """`Held` if another has the machine's lease. Ours is kept fresh, since /tmp is cleaned by age; one that is gone anyway
        is taken again."""
        path = shlex.quote(await self._lease_path(machine.endpoint))
        command = f"touch -c {path} 2>/dev/null; cat {path}"
        found = await self._connections.run(machine.endpoint, command, timeout=10.0)
        if found.code:
            await self.claim(machine, host_id, lease)
            return
        try:
            holder = from_json(found.out, dict[str, object])
        except msgspec.MsgspecError:
            return
        if (holder.get("owner"), holder.get("cluster")) != (lease["owner"], lease["cluster"]):
            raise Held(_held(machine, holder))

    async def _whose(self, machine: Machine, lease: dict[str, str]) -> dict[str, object]:
        dated = {**lease, "since": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}
        path = await self._lease_path(machine.endpoint)
        return {"lease": dated, "lease_path": path, "home": machine.home, "agent": self.digest}

    async def _lease_path(self, endpoint: Endpoint) -> str:
        key = self._connections.host_key(await self._connections.connection(endpoint))
        return f"/tmp/podway-lease-{key[:16]}"

    async def _ask(self, machine: Machine, op: str, fields: Mapping[str, object], body: bytes = b"") -> _MachineReply:
        line = json.dumps({**fields, "op": op, "size": len(body)}).encode("ascii") + b"\n"
        command = remote.command(len(self._program))
        done = await self._connections.run(machine.endpoint, command, data=self._program + line + body)
        for text in reversed(done.out.decode(errors="replace").splitlines()):
            if text.startswith(remote.REPLY):
                reply = from_json(text.removeprefix(remote.REPLY), _MachineReply)
                if reply.error is not None:
                    raise _refused(machine, reply)
                return reply
        if done.code in (NOT_FOUND, CANNOT_RUN, remote.OLD_PYTHON):
            what = "a python3 older than 3.8" if done.code == remote.OLD_PYTHON else "no python3 that runs"
            raise Unable(f"{place_of(machine)} has {what}", "install Python 3.8 or newer on the machine")
        said = (done.err or done.out.decode(errors="replace")).strip().splitlines()
        raise ProviderError(f"{place_of(machine)}: {said[-1] if said else f'python3 exited with {done.code}'}")


@cache
def packed_agent() -> bytes:
    """The agent's file as it travels: a third of its size, which counts when hundreds of machines share an uplink."""
    return zlib.compress(bundle().data)


def who_am_i() -> str:
    """This Podway in a person's words."""
    return f"{getpass.getuser()}@{platform.node()}"


def place_of(machine: Machine) -> str:
    """A machine in a sentence."""
    at = str(machine.endpoint)
    return machine.name if machine.name == machine.endpoint.known_as else f"{machine.name} ({at})"


def _held(machine: Machine, holder: Mapping[str, object]) -> str:
    who = str(holder.get("who") or "someone")[:80]
    cluster = f" for cluster {str(holder['cluster'])[:64]}" if holder.get("cluster") else ""
    since = f" since {str(holder['since'])[:32]}" if holder.get("since") else ""
    return f"{place_of(machine)} is taken by {who}{cluster}{since}"


def _refused(machine: Machine, reply: _MachineReply) -> Exception:
    """What the machine said, as one line with its cure."""
    where, what = place_of(machine), reply.error
    match reply.code:
        case "no-space":
            return UserError(f"the disk of {where} is full: {what}", "free some space there, then launch again")
        case "shared-home":
            return UserError(
                f"{where} has the same home directory as another host of the pool (a network file system?)",
                "give each host a `home` on a disk of its own in the pool's file",
            )
        case "io" | "home":
            return UserError(f"{where}: {what}", "correct it on the machine, or give the host another `home`")
        case _:
            return ProviderError(f"{where}: {what}")
