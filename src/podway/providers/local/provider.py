"""Slices simulated on this machine: every host a process tree of its own, with its own home and loopback address.

A cluster is a directory under the provider's root, and that directory is all the state there is:

    NAME/request.json     what was asked for; there from the first instant, so an interrupted submit is seen and finished
    NAME/subnet           N: host i has the address 127.N.(i // 250).(i % 250 + 1); or one in a network of their own (networks.py)
    NAME/tools/           the commands of Podway's environment, for the hosts (python_environment.py)
    NAME/ready            all agents answered once; written last
    NAME/stopped          the hosts are stopped, their homes kept
    NAME/host-I/          the home of host I, with the agent's state in .podway
    NAME/user             of an isolated cluster: the user id of its hosts, whose homes are elsewhere (isolation.py)

The path is the one real hosts take: the same agent file, the same links, the same sync. Only `submit` differs, which starts
agents here instead of asking a cloud for machines. Processes of a host carry its id in their environment, so that `destroy`
finds every one of them, whatever it did to hide.
"""

import asyncio
import hashlib
import os
import shutil
import threading
from pathlib import Path

import msgspec

from podway.catalog.prices import price_of
from podway.catalog.slices import find_slice
from podway.decoding import from_json
from podway.errors import ProviderError, UserError
from podway.files import write_atomically
from podway.hosts.bundle import bundle
from podway.hosts.link import (
    AgentLink,
    Connect,
    connect_local,
    connect_tcp,
    kill_local_host,
    needs_start,
    start_local_agent,
)
from podway.order import Host, Order
from podway.providers import CreatedVolume, Observation, Offer, OwnedResource, Request, Shell, Step
from podway.providers.local import networks
from podway.providers.local.environment import furnish_home, host_environment
from podway.providers.local.images import remove_containers
from podway.providers.local.isolation import HostUser, check_isolation, choose_user, homes_root, kill_user
from podway.providers.local.subnets import claim_subnet, host_address, release_subnet, subnet_of
from podway.task.task import Resources
from podway.task.volumes import VolumeSpec

GOING = "going"  # a file that says that the hosts are being ended, for a stop or for good: nothing is started on them
MOST_HOSTS = 128  # each host is a Python process; a laptop carries this many, and a 64-host pod is the usual rehearsal


def open_provider(root: Path) -> "LocalProvider":
    """The provider with its clusters under `root`."""
    return LocalProvider(root)


class HostStep(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a step: one host, its place in the slice, and its chips."""

    slice: int
    worker: int
    chips: int
    accelerator: str | None
    topology: str | None
    isolated: bool = False


class LocalProvider:
    """See the module docstring; each verb's contract is in `podway.providers.Provider`."""

    name = "local"

    def __init__(self, root: Path) -> None:
        self.root = root / "local"
        self._networks = threading.Lock()
        self.owner = hashlib.sha256(str(self.root.resolve()).encode()).hexdigest()[:8]

    def offers(self, resources: Resources, slices: int) -> list[Offer]:
        """One offer: here, for nothing; the note says what the real slice would cost."""
        wanted = resources.accelerator
        if wanted is None:
            return [Offer(provider=self.name, accelerator_type=None, slices=slices, zone="here", hourly_cost=0.0)]
        tpu = find_slice(wanted.type, wanted.topology)
        if tpu.hosts * slices > MOST_HOSTS:
            return []
        price = price_of(tpu, None, resources.spot == "yes")
        note = "simulated" + (f"; the real slice costs ${price * slices:.2f}/h" if price is not None else "")
        return [
            Offer(
                provider=self.name,
                accelerator_type=tpu.accelerator_type,
                topology=tpu.topology_text,
                slices=slices,
                zone="here",
                hourly_cost=0.0,
                note=note,
            )
        ]

    def render(self, name: str, order: Order) -> Request:
        """One step for each host: an agent with its home and chips."""
        if order.hosts > MOST_HOSTS:
            raise UserError(
                f"{order.slices} x {order.accelerator_type} has {order.hosts} hosts; a simulation has at most {MOST_HOSTS}",
                "choose a smaller slice, or a real provider with --infra gcp",
            )
        steps = tuple(
            Step(
                verb="start-host",
                target=f"{name}/host-{rank}",
                body={
                    "slice": rank // order.hosts_per_slice,
                    "worker": rank % order.hosts_per_slice,
                    "chips": order.chips_per_host,
                    "accelerator": order.accelerator_type,
                    "topology": order.topology,
                    **({"isolated": True} if order.isolated else {}),
                },
            )
            for rank in range(order.hosts)
        )
        if order.own_network:
            steps = (Step(verb="make-network", target=name, body={"hosts": order.hosts}), *steps)
        return Request(provider=self.name, name=name, steps=steps)

    async def submit(self, request: Request) -> None:
        """Lay down the directory, then start every agent that does not run yet."""
        place = self.root / request.name
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (place / "request.json").exists():
            write_atomically(place / "request.json", msgspec.json.encode(request))
        claim_subnet(place)
        if _host_steps(request)[0].isolated and self._user(request.name) is None:
            check_isolation()
            taken = [user.number for other in self.root.iterdir() if (user := self._user(other.name)) is not None]
            homes = homes_root() / self.owner / request.name
            write_atomically(place / "user", msgspec.json.encode(HostUser(number=choose_user(taken), homes=str(homes))))
        await self._start_agents(request.name)

    async def observe(self, name: str) -> Observation:
        """From the directory alone: a cluster without its ready marker is still being created."""
        place = self.root / name
        if not (place / "request.json").exists():
            return Observation(condition="deleting" if place.exists() else "absent")
        if (place / "stopped").exists():
            return Observation(condition="stopped")
        if not (place / "ready").exists():
            return Observation(condition="creating")
        return Observation(condition="ready", hosts=self._hosts(name))

    async def stop(self, name: str) -> None:
        """End every process of every host; homes stay."""
        place = self.root / name
        if not (place / "request.json").exists() or (place / "stopped").exists():
            return
        write_atomically(place / GOING, b"")  # before the kill: see _start_agent
        await self._kill(name)
        write_atomically(place / "stopped", b"")
        (place / GOING).unlink(missing_ok=True)

    async def start(self, name: str) -> None:
        """Start the agents again over the homes that were kept."""
        place = self.root / name
        if (place / "request.json").exists():
            (place / "ready").unlink(missing_ok=True)
            (place / "stopped").unlink(missing_ok=True)
            (place / GOING).unlink(missing_ok=True)  # of a stop that broke off
            await self._start_agents(name)

    async def destroy(self, name: str) -> None:
        """Kill every process, then remove every file, the request last of all so that a crash is seen and resumed."""
        place = self.root / name
        if not place.exists():
            return
        if (place / "request.json").exists():
            write_atomically(place / GOING, b"")  # before the kill: see _start_agent
            await self._kill(name)
            await asyncio.to_thread(remove_containers, self._hosts(name))
        for child in sorted(place.iterdir()):
            if child.name not in ("request.json", "subnet", "user", GOING):
                await asyncio.to_thread(_remove, child)
        user = self._user(name)
        if user is not None:
            await asyncio.to_thread(_remove, Path(user.homes))
        request = place / "request.json"
        if (place / "subnet").exists() and request.exists() and _own_network(from_json(request.read_bytes(), Request)):
            await asyncio.to_thread(networks.remove, subnet_of(place))
        release_subnet(place)
        await asyncio.to_thread(_remove, place)

    async def list_resources(self) -> list[OwnedResource]:
        """Every directory of a cluster, with or without its request."""
        places = [place for place in self.root.iterdir() if place.is_dir()] if self.root.is_dir() else []
        return [await self._owned(place) for place in sorted(places)]

    async def purge(self, resource: OwnedResource) -> None:
        """The whole cluster goes."""
        await self.destroy(resource.cluster)

    async def _owned(self, place: Path) -> OwnedResource:
        request = place / "request.json"
        asked = _host_steps(from_json(request.read_bytes(), Request))[0] if request.exists() else None
        return OwnedResource(
            cluster=place.name,
            owner=self.owner,
            kind="simulated slice",
            name=place.name,
            zone="here",
            condition=(await self.observe(place.name)).condition,
            accelerator_type=asked.accelerator if asked else None,
            created=(request if request.exists() else place).stat().st_mtime,
            hourly_cost=0.0,
        )

    def refuse_stop(self, order: Order) -> str | None:
        """A simulated cluster can always be stopped."""
        return None

    async def create_volume(self, spec: VolumeSpec) -> CreatedVolume:
        """A directory beside the clusters, which none of them deletes."""
        if spec.disk_id is not None:
            raise UserError("simulated hosts have no disks to register", "leave volume_id out: a directory is made")
        place = self._volume(spec)
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        return CreatedVolume(disk=str(place), directory=str(place))

    async def delete_volume(self, spec: VolumeSpec) -> None:
        """The directory and what is in it."""
        place = self._volume(spec)
        if place.exists():
            await asyncio.to_thread(_remove, place)

    def _volume(self, spec: VolumeSpec) -> Path:
        return self.root.parent / "volumes" / spec.name

    async def ensure_agent(self, host: Host) -> None:
        """Start the agent over the home if it does not run, as a machine that came back would; an idle older one gives way."""
        link = AgentLink(self.connect(host))
        try:
            if await needs_start(link):
                await self._start_agent(host)
        finally:
            link.close()

    def connect(self, host: Host) -> Connect:
        """The agent's Unix socket."""
        return connect_local(Path(host.home), self._number(host.cluster))

    def connect_port(self, host: Host, port: int) -> Connect:
        """On the host's own address, or where a program listens on the loopback that all simulated hosts share."""
        return connect_tcp((host.address, "127.0.0.1"), port)

    def shell(self, host: Host, env: dict[str, str]) -> Shell:
        """A shell on this machine that sees what a job on that host sees."""
        if self._user(host.cluster) is not None:
            raise UserError(
                f"the hosts of cluster {host.cluster} are simulated on the server's machine, as a user of their own",
                f"run commands there: podway run {host.cluster} COMMAND",
                status=409,
            )
        prompt = {"PS1": f"[{host.id.split('/')[-1]}] \\w $ "}
        whole = {**host_environment(host), **env, **prompt}
        whole.pop("PODWAY_RENDEZVOUS", None)  # the other hosts run no part of it: JAX must not wait for them
        return Shell(home=host.home, env=whole)

    def _hosts(self, name: str) -> tuple[Host, ...]:
        place, homes = self.root / name, self._homes(name)
        request = from_json((place / "request.json").read_bytes(), Request)
        own = _own_network(request)
        number = subnet_of(place)
        return tuple(
            Host(
                cluster=name,
                rank=rank,
                slice=step.slice,
                worker=step.worker,
                address=networks.address_in(number, rank) if own else host_address(place, rank),
                home=str(homes / f"host-{rank}"),
                id=f"{self.owner}/{name}-{rank}",
            )
            for rank, step in enumerate(_host_steps(request))
        )

    async def _start_agents(self, name: str) -> None:
        hosts = self._hosts(name)
        # As many at once as make sense on a laptop: each start is a Python process that imports for a few ms.
        gate = asyncio.Semaphore(2 * (os.cpu_count() or 2))

        async def start(host: Host) -> None:
            async with gate:
                await self.ensure_agent(host)

        await asyncio.gather(*(start(host) for host in hosts))
        write_atomically(self.root / name / "ready", b"")

    async def _start_agent(self, host: Host) -> None:
        home, user = Path(host.home), self._number(host.cluster)
        if not self._is_wanted(host.cluster):
            raise ProviderError(f"the host {host.id} is gone")
        try:
            environment = await asyncio.to_thread(furnish_home, host, user)
            network = await asyncio.to_thread(self._network, host.cluster)
            bundle = self._bundle(host, user)
            await start_local_agent(bundle, home, host.address, environment, user=user, network=network)
        finally:
            if not self._is_wanted(host.cluster):
                # Deleted meanwhile, and perhaps after its processes were looked for: nothing of this start may stay.
                await kill_local_host(host.id)
                if not (self.root / host.cluster / "request.json").exists():
                    await asyncio.to_thread(shutil.rmtree, self.root / host.cluster, ignore_errors=True)

    def _is_wanted(self, name: str) -> bool:
        place = self.root / name
        ended = any((place / mark).exists() for mark in (GOING, "stopped"))
        return (place / "request.json").exists() and not ended

    def _network(self, name: str) -> str | None:
        """The cluster's own network, made now if it is not there: one does not survive a restart of the machine."""
        place = self.root / name
        request = from_json((place / "request.json").read_bytes(), Request)
        if not _own_network(request):
            return None
        with self._networks:
            networks.make(subnet_of(place), len(_host_steps(request)))
        return networks.path_of(subnet_of(place))

    def refuse_own_network(self) -> str | None:
        """Why no cluster here can have a network of its own, or None."""
        return networks.refusal()

    def _homes(self, name: str) -> Path:
        """Where the homes of the cluster's hosts are."""
        user = self._user(name)
        return self.root / name if user is None else Path(user.homes)

    def _user(self, name: str) -> HostUser | None:
        """Whose an isolated cluster's hosts are; None where they are our own user's."""
        try:
            return from_json((self.root / name / "user").read_bytes(), HostUser)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _number(self, name: str) -> int | None:
        user = self._user(name)
        return None if user is None else user.number

    def _bundle(self, host: Host, user: int | None) -> Path:
        """The agent's one file, named by its content: a new version never changes under a running agent."""
        packed = bundle()
        place = self.root if user is None else Path(host.home).parent
        path = place / f"agent-{packed.sha256[:16]}.pyz"
        if not path.exists():
            packed.write(path)
            path.chmod(0o600 if user is None else 0o644)
        return path

    async def _kill(self, name: str) -> None:
        left = await kill_local_host(*(host.id for host in self._hosts(name)))
        if left:
            raise ProviderError(f"processes of {name} are still alive: {left}")
        user = self._number(name)
        if user is not None:
            await asyncio.to_thread(kill_user, user)


def _host_steps(request: Request) -> list[HostStep]:
    return [step.read(HostStep) for step in request.steps if step.verb == "start-host"]


def _own_network(request: Request) -> bool:
    return any(step.verb == "make-network" for step in request.steps)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # Root needs no other modes, and must not follow the links that a job may put in the way of a path.
        shutil.rmtree(path, onerror=None if os.geteuid() == 0 else _make_writable_and_retry)
    else:
        path.unlink(missing_ok=True)


def _make_writable_and_retry(function: object, path: str, _info: object) -> None:
    """A job may leave read-only directories behind; they are still ours to delete."""
    parent = Path(path).parent
    parent.chmod(0o700)
    if Path(path).is_dir() and not Path(path).is_symlink():
        Path(path).chmod(0o700)
        shutil.rmtree(path, ignore_errors=True)
    else:
        Path(path).unlink(missing_ok=True)
