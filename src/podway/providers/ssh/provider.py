"""Machines a person has, over ssh: a pool's file lists them (ssh_pool.py), Podway claims them, runs its agent, and leaves.

On this machine a cluster is a directory, PODWAY_HOME/ssh/clusters/NAME:

    request.json     what was asked for: how many slices, of which candidates; there first, so an interrupted submit is seen
    inventory.yaml   a copy of the inventory, where the machines come from one: `down` works without the original
    touched.json     the machines on which something may have been made; written before it is
    placed.json      the machines that were claimed, in rank order
    ready            all agents answered once; written last

On a machine there is a lease (hosts/ssh/remote.py): one cluster at a time has it, so that two people never use the same
chips unnoticed. The agent's home is the login's own home (or the pool's `home`), so `~` in a task is what a person expects there.
`submit` takes the first slices whose machines are all free, all at once: a machine that is taken costs a look at the next slice.
A machine that cannot be reached for a while is still ours: its jobs go on, and so does the cluster.
"""

import asyncio
import contextlib
import shlex
import shutil
import time
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from podway.catalog.slices import find_slice
from podway.decoding import from_json
from podway.errors import ProviderError, UserError
from podway.files import write_atomically
from podway.hosts.link import Connect
from podway.hosts.ssh.connections import SshConnections
from podway.order import Host, Order
from podway.providers import CreatedVolume, Observation, Offer, OwnedResource, Request, Shell, Step
from podway.providers.owner import owner_of
from podway.providers.ssh.machine import Claimed, Held, MachineWork, Unable, who_am_i
from podway.providers.ssh.pool import Machine, Pool, PoolSlice, read_inventory, read_pool
from podway.task.task import Resources
from podway.task.volumes import VolumeSpec

LOOK_EVERY_S = 30.0  # how often a ready cluster's leases are looked at
LOOK_S = 8.0
DELETE_S = 300.0  # for a volume of many files
VOLUMES = "podway-volumes"  # below the home of a machine: what volumes hold outlives clusters


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A claimed machine and the host it became."""

    machine: str
    host: Host


def open_provider(root: Path) -> "SshProvider":
    """The provider with its pools and clusters under `root`/ssh."""
    return SshProvider(root)


Kept = TypeVar("Kept")


class ClaimStep(msgspec.Struct, frozen=True, kw_only=True):
    """The body of the first step: how many slices of which kind, and the machines of each one that may be taken."""

    slices: int
    accelerator: str | None
    topology: str | None
    candidates: list[list[str]]


class SshProvider:
    """See the module docstring; each verb's contract is in `podway.providers.Provider`."""

    name = "ssh"

    def __init__(self, root: Path) -> None:
        self.folder = root / "ssh"
        self.clusters = self.folder / "clusters"
        self.connections = SshConnections(self.folder / "known_hosts")
        self.work = MachineWork(self.connections)
        self._pools: dict[Path, tuple[int, Pool]] = {}
        self._looks: dict[str, tuple[float, Observation | None]] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}

    def offers(self, resources: Resources, slices: int) -> list[Offer]:
        """One offer where the pool has enough such slices, taken or not; whether they are free is seen when they are claimed."""
        pool = read_pool(self.folder, resources.placement.region)
        wanted = resources.accelerator
        tpu = find_slice(wanted.type, wanted.topology) if wanted is not None else None
        kind = (tpu.accelerator_type, tpu.topology_text) if tpu else (None, None)
        there = len(pool.of_kind(*kind))
        if there < slices:
            return []
        return [
            Offer(
                provider=self.name,
                accelerator_type=kind[0],
                topology=kind[1],
                slices=slices,
                region=pool.ref,
                zone=pool.name,  # the one word a pool has, wherever people look for it
                hourly_cost=0.0,
                note=f"your own machines: {there} such in the pool",
            )
        ]

    def render(self, name: str, order: Order) -> Request:
        """Which machines may be taken, in which order, and what is done on each. Reads the pool's file, and nothing else."""
        pool = read_pool(self.folder, order.region)
        candidates = pool.of_kind(order.accelerator_type, order.topology)
        kind = order.accelerator_type or "CPU host"
        if len(candidates) < order.slices:
            raise UserError(
                f"pool {pool.name} has {len(candidates)} x {kind}, and {order.slices} are asked for",
                f"list more machines in {pool.path}, or ask for fewer slices",
            )
        claim = Step(
            verb="claim-slices",
            target=f"ssh/{pool.ref}",
            body=msgspec.structs.asdict(
                ClaimStep(
                    slices=order.slices,
                    accelerator=order.accelerator_type,
                    topology=order.topology,
                    candidates=[[_shown(machine) for machine in part.machines] for part in candidates],
                )
            ),
        )
        agent = Step(
            verb="start-agent",
            target="each of these hosts",
            body={
                "copies": {"agent.pyz": "~/.podway/agent-HASH.pyz"},
                "runs": "python3 agent.pyz serve --home HOME --daemon",
                "chips": order.chips_per_host,
            },
        )
        return Request(provider=self.name, name=name, steps=(claim, agent))

    async def submit(self, request: Request) -> None:
        """Claim what is free of the candidates, then have the agent run on every machine of it."""
        place = self.clusters / request.name
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (place / "request.json").exists():
            ref = _pool_of(request)
            if ref.startswith("/"):
                write_atomically(place / "inventory.yaml", read_pool(self.folder, ref).path.read_bytes())
            write_atomically(place / "request.json", msgspec.json.encode(request))
        claims = {} if (place / "placed.json").exists() else await self._claim_slices(request)
        placed = self._placed(request.name)
        await _all([self._start_agent(one.host, claims.get(one.host.id)) for one in placed])
        write_atomically(place / "ready", b"")
        self._looks.pop(request.name, None)

    async def observe(self, name: str) -> Observation:
        """What the directory says; and, each half minute, whether the machines still carry this cluster's lease."""
        place = self.clusters / name
        if not (place / "request.json").exists():
            return Observation(condition="deleting" if place.exists() else "absent")
        if not (place / "ready").exists():
            return Observation(condition="creating")
        at, answer = self._looks.get(name, (0.0, None))
        if time.monotonic() - at > LOOK_EVERY_S:
            looking = self._looking.get(name)
            if looking is None or looking.done() or looking.get_loop() is not asyncio.get_running_loop():
                looking = self._looking[name] = asyncio.create_task(self._look(name))
            if at == 0.0:  # a server that has just started knows nothing yet
                await asyncio.shield(looking)
                answer = self._looks[name][1]
        hosts = tuple(one.host for one in self._placed(name))
        return answer or Observation(condition="ready", hosts=hosts)

    async def destroy(self, name: str) -> None:
        """On every machine end what runs and remove what was made; the directory here last, so that a crash is resumed."""
        place = self.clusters / name
        if not place.exists():
            return
        touched = _read(place / "touched.json", dict[str, str]) or {}
        if touched:
            pool = self._pool(name)
            # A machine that is no longer listed is its owner's affair: that is how one that died is let go.
            listed = [(pool.machine(machine), host_id) for machine, host_id in touched.items()]
            present = [(machine, host_id) for machine, host_id in listed if machine is not None]
            lease = self._lease(name)
            try:
                await _all([self.work.remove(machine, host_id, lease) for machine, host_id in present])
            except (ProviderError, UserError) as error:
                what = error.what if isinstance(error, UserError) else str(error)
                raise ProviderError(f"{what}; if that machine is gone for good, remove it from {pool.path}") from None
            for machine, _ in present:
                self.connections.drop(machine.endpoint)
        (place / "request.json").unlink(missing_ok=True)
        shutil.rmtree(place)
        self._stop_looking(name)

    async def list_resources(self) -> list[OwnedResource]:
        """Every cluster that has a directory here: what was claimed, or may have been."""
        places = sorted(self.clusters.iterdir()) if self.clusters.is_dir() else []
        return [await self._owned(place) for place in places if place.is_dir()]

    async def purge(self, resource: OwnedResource) -> None:
        """The whole cluster goes: its machines are given back together."""
        await self.destroy(resource.cluster)

    async def _owned(self, place: Path) -> OwnedResource:
        request = _read(place / "request.json", Request)
        return OwnedResource(
            cluster=place.name,
            owner=self.owner,
            kind="claimed machines",
            name=place.name,
            zone=_pool_of(request) if request else None,
            condition=(await self.observe(place.name)).condition,
            accelerator_type=request.steps[0].read(ClaimStep).accelerator if request else None,
            created=place.stat().st_mtime,
            hourly_cost=0.0,
        )

    async def create_volume(self, spec: VolumeSpec) -> CreatedVolume:
        """A directory on every machine of the pool, made where it is first used."""
        if spec.disk_id is not None:
            raise UserError("machines over ssh have no disks to register", "leave volume_id out: a directory is made")
        pool = read_pool(self.folder, spec.placement.region)
        return CreatedVolume(disk=spec.name, directory=f"~/{VOLUMES}/{spec.name}", region=pool.ref)

    async def delete_volume(self, spec: VolumeSpec) -> None:
        """The directory on every machine that the pool lists."""
        machines = [one for part in read_pool(self.folder, spec.placement.region).slices for one in part.machines]
        await _all([self._delete_directory(machine, f"{VOLUMES}/{spec.name}") for machine in machines])

    async def _delete_directory(self, machine: Machine, path: str) -> None:
        home = machine.home.removeprefix("~").lstrip("/") if machine.home.startswith("~") else machine.home
        home = f'"$HOME"/{shlex.quote(home or ".")}' if machine.home.startswith("~") else shlex.quote(home)
        done = await self.connections.run(machine.endpoint, f"rm -rf -- {home}/{shlex.quote(path)}", timeout=DELETE_S)
        if done.code:
            said = done.err.strip().splitlines()
            raise ProviderError(f"{path} on {machine.name} cannot be deleted: {said[-1] if said else done.code}")

    async def ensure_agent(self, host: Host) -> None:
        """Have the agent answer: it may have been killed, or the machine restarted."""
        await self.work.ensure_agent(self.connect(host), lambda: self._start_agent(host))

    def connect(self, host: Host) -> Connect:
        """Streams to the agent's socket over the machine's one connection."""
        return self.work.connect(self._machine(host), host.home)

    def connect_port(self, host: Host, port: int) -> Connect:
        """Through the machine's one connection."""
        return self.connections.connect_port(self._machine(host).endpoint, port)

    def shell(self, host: Host, env: dict[str, str]) -> Shell:
        """The person's own ssh, with the pinned keys, into an environment as a job has it."""
        return self.work.shell(self._machine(host), host.home, env)

    async def trust(self, host: Host, line: str) -> None:
        """In authorized_keys of the login, until the machine is given back."""
        await self.work.trust(self._machine(host), host.id, line)

    # claiming

    async def _claim_slices(self, request: Request) -> dict[str, Claimed]:
        """Take slices in the pool's order until there are enough; say who has the others when there are not."""
        place = self.clusters / request.name
        claim = request.steps[0].read(ClaimStep)
        wanted = claim.slices
        pool = self._pool(request.name)
        taken: list[list[tuple[Machine, Claimed]]] = []
        problems: list[Exception] = []
        for part in pool.of_kind(claim.accelerator, claim.topology):
            try:
                taken.append(await self._claim_slice(request.name, part, sum(map(len, taken))))
            except (UserError, ProviderError, Held) as error:
                problems.append(error)
            if len(taken) == wanted:
                break
        if len(taken) < wanted:
            raise _no_room(pool, wanted, problems)
        placed = [
            Placed(machine=machine.name, host=_host(request.name, claimed, rank, which, worker))
            for which, part_taken in enumerate(taken)
            for worker, (machine, claimed) in enumerate(part_taken)
            for rank in [sum(map(len, taken[:which])) + worker]
        ]
        write_atomically(place / "placed.json", msgspec.json.encode(placed))
        return {claimed.id: claimed for part_taken in taken for _, claimed in part_taken}

    async def _claim_slice(self, name: str, part: PoolSlice, first_rank: int) -> list[tuple[Machine, Claimed]]:
        """All machines of one slice, or none of them."""
        await _all([self.connections.connection(machine.endpoint) for machine in part.machines])
        place, lease = self.clusters / name, self._lease(name)
        ids = {m.name: f"{lease['owner']}/{name}-{first_rank + i}" for i, m in enumerate(part.machines)}
        touched = _read(place / "touched.json", dict[str, str]) or {}
        write_atomically(place / "touched.json", msgspec.json.encode({**touched, **ids}))
        work = [self.work.claim(machine, ids[machine.name], lease) for machine in part.machines]
        answers = await asyncio.gather(*work, return_exceptions=True)
        wrong = [answer for answer in answers if isinstance(answer, BaseException)]
        if not wrong:
            return [(m, a) for m, a in zip(part.machines, answers, strict=True) if isinstance(a, Claimed)]
        for machine, answer in zip(part.machines, answers, strict=True):
            # What cannot be removed now stays in touched.json, and goes with `destroy`.
            with contextlib.suppress(ProviderError, UserError):
                if not isinstance(answer, Held | Unable):
                    await self.work.remove(machine, ids[machine.name], lease)
                del ids[machine.name]
        write_atomically(place / "touched.json", msgspec.json.encode({**touched, **ids}))
        raise wrong[0]

    async def _start_agent(self, host: Host, claimed: Claimed | None = None) -> None:
        """Start it; claim first unless that was just done: a machine may have restarted, and its lease gone."""
        machine = self._machine(host)
        try:
            claimed = claimed or await self.work.claim(machine, host.id, self._lease(host.cluster))
        except Held as held:
            raise UserError(str(held), f"take the cluster down: podway down {host.cluster}") from None
        await self.work.start(machine, host, claimed, self.connect(host))

    # looking

    async def _look(self, name: str) -> None:
        """Read every machine's lease. One that another has now means that the cluster is no more."""
        placed = self._placed(name)
        owner = self._lease(name)
        answers = await asyncio.gather(*(self._look_at(one, owner) for one in placed), return_exceptions=True)
        lost = [answer for answer in answers if isinstance(answer, Held)]
        seen = Observation(condition="failed", reason=str(lost[0])) if lost else None
        self._looks[name] = (time.monotonic(), seen)

    def _stop_looking(self, name: str) -> None:
        """So that what is seen late is not taken for the next cluster of that name."""
        looking = self._looking.pop(name, None)
        if looking is not None and looking.get_loop() is asyncio.get_running_loop():
            looking.cancel()
        self._looks.pop(name, None)

    async def _look_at(self, one: Placed, lease: dict[str, str]) -> None:
        with contextlib.suppress(ProviderError, UserError, TimeoutError):  # not to be reached is not to be gone
            async with asyncio.timeout(LOOK_S):
                await self.work.check(self._machine(one.host), one.host.id, lease)

    # the directory

    def _pool(self, name: str) -> Pool:
        request = _read(self.clusters / name / "request.json", Request)
        if request is None:
            raise UserError(f"there is no ssh cluster {name!r}", "see: podway status", status=404)
        ref = _pool_of(request)
        path = Path(ref) if ref.startswith("/") else self.folder / f"{ref}.yaml"
        kept = self.clusters / name / "inventory.yaml"
        if not path.exists() and kept.exists():
            path = kept
        stamp = path.stat().st_mtime_ns if path.exists() else 0
        if path not in self._pools or self._pools[path][0] != stamp:  # asked for once for each host
            self._pools[path] = (stamp, read_inventory(path, ref) if path == kept else read_pool(self.folder, ref))
        return self._pools[path][1]

    def _placed(self, name: str) -> list[Placed]:
        found = _read(self.clusters / name / "placed.json", list[Placed]) or []
        # Podway 0.1.0 wrote hosts that do not name their cluster.
        return [Placed(machine=one.machine, host=msgspec.structs.replace(one.host, cluster=name)) for one in found]

    def _machine(self, host: Host) -> Machine:
        pool = self._pool(host.cluster)
        name = next((one.machine for one in self._placed(host.cluster) if one.host.id == host.id), "")
        machine = pool.machine(name)
        if machine is None:
            raise UserError(
                f"{pool.path} no longer lists {name or host.address}", "list it again, or take the cluster down"
            )
        return machine

    @property
    def owner(self) -> str:
        """This Podway's name on the machines it claims; made when it is first asked for."""
        return owner_of(self.folder)

    def _lease(self, cluster: str) -> dict[str, str]:
        """Who holds a machine, for those who find it taken."""
        return {"owner": self.owner, "cluster": cluster, "who": who_am_i()}


def _pool_of(request: Request) -> str:
    return request.steps[0].target.removeprefix("ssh/")


def _host(cluster: str, claimed: Claimed, rank: int, which: int, worker: int) -> Host:
    return Host(
        cluster=cluster,
        rank=rank,
        slice=which,
        worker=worker,
        address=claimed.address,
        external_address=claimed.reached_at,
        home=claimed.home,
        id=claimed.id,
    )


def _shown(machine: Machine) -> str:
    """A machine as the request lists it: its name, who logs in where, by way of whom."""
    at = machine.endpoint
    user = f"{at.user}@" if at.user else ""
    by = f" via {at.jump}" if at.jump else ""
    named = "" if machine.name == at.known_as else f"{machine.name}: "
    return f"{named}{user}{at.known_as}{by}"


def _no_room(pool: Pool, wanted: int, problems: Sequence[Exception]) -> Exception:
    """Why a cluster cannot be made: first what is broken, then who has the machines."""
    broken = [error for error in problems if not isinstance(error, Held)]
    if broken:
        first = broken[0]
        return (
            first
            if isinstance(first, UserError)
            else UserError(str(first), f"see that it is up, or correct {pool.path}")
        )
    return UserError(str(problems[0]), "wait until it is given back, or list more machines", status=409)


async def _all(work: Iterable[Awaitable[object]]) -> None:
    """Do all of it at once and to the end; then the first thing that went wrong."""
    for answer in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer


def _read(path: Path, kind: type[Kept]) -> Kept | None:
    try:
        return from_json(path.read_bytes(), kind)
    except FileNotFoundError:
        return None
