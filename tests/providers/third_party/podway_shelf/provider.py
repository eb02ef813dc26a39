"""Hosts on a shelf: each one a directory here with an agent of its own, at an address of the loopback network."""

import asyncio
import os
import shutil
from pathlib import Path

import msgspec

from podway.catalog.slices import find_slice
from podway.errors import ProviderError
from podway.files import write_atomically
from podway.hosts.bundle import bundle
from podway.hosts.link import Connect, connect_local, kill_local_host, start_local_agent
from podway.order import Host, Order
from podway.providers import Observation, Offer, Request, Step
from podway.task.task import Resources


def open_provider(root: Path) -> "ShelfProvider":
    return ShelfProvider(root / "shelf")


class ShelfProvider:
    name = "shelf"

    def __init__(self, root: Path) -> None:
        self.root = root

    def offers(self, resources: Resources, slices: int) -> list[Offer]:
        wanted = resources.accelerator
        kind = find_slice(wanted.type, wanted.topology).accelerator_type if wanted else None
        return [Offer(provider=self.name, accelerator_type=kind, slices=slices, zone="shelf", hourly_cost=0.5)]

    def render(self, name: str, order: Order) -> Request:
        body = {"hosts_per_slice": order.hosts_per_slice}
        return Request(
            provider=self.name,
            name=name,
            steps=tuple(Step(verb="place-host", target=f"{name}/{i}", body=body) for i in range(order.hosts)),
        )

    async def submit(self, request: Request) -> None:
        place = self.root / request.name
        if not (place / "hosts.json").exists():
            place.mkdir(parents=True, exist_ok=True)
            each = request.steps[0].body["hosts_per_slice"]
            net = f"127.{os.getpid() % 200 + 20}.{len(list(self.root.iterdir()))}"
            write_atomically(place / "hosts.json", msgspec.json.encode([
                Host(rank=i, slice=i // each, worker=i % each, address=f"{net}.{i + 1}", home=str(place / f"home-{i}"),
                     id=f"{place}/{i}") for i in range(len(request.steps))
            ]))  # fmt: skip
        await asyncio.gather(*(self.ensure_agent(host) for host in self._hosts(request.name)))

    async def observe(self, name: str) -> Observation:
        hosts = self._hosts(name)
        return Observation(condition="ready" if hosts else "absent", hosts=hosts)

    async def destroy(self, name: str) -> None:
        if await kill_local_host(*(host.id for host in self._hosts(name))):
            raise ProviderError(f"processes of {name} are still alive")
        shutil.rmtree(self.root / name, ignore_errors=True)

    async def ensure_agent(self, host: Host) -> None:
        home, agent = Path(host.home), self.root / "agent.pyz"
        (home / "sky_workdir").mkdir(parents=True, exist_ok=True)
        bundle().write(agent)
        await start_local_agent(agent, home, host.address, {"PATH": os.defpath, "PODWAY_HOST_ID": host.id})

    def connect(self, host: Host) -> Connect:
        return connect_local(Path(host.home))

    def _hosts(self, name: str) -> tuple[Host, ...]:
        path = self.root / name / "hosts.json"
        return msgspec.json.decode(path.read_bytes(), type=tuple[Host, ...]) if path.exists() else ()
