"""TPUs on Google Cloud: TPU VMs and pods, queued resources, multislice, legacy TPU Nodes, and CPU hosts.

The cloud is the truth. Everything made there is named by the cluster and its owner and carries both in its description, so that a
server that was killed, or another one, finds it again; what was asked for is written down before it is asked (records.py).

1. `render` turns an order into steps (render.py): a queued resource, a node, a disk, a rule; each one call.
2. `submit` is called until the cluster is ready, and does what is to be done next: make what is missing; delete what another zone gave
   as well; when all nodes are ready, log in and start the agents (hosts.py).
3. `observe` looks (api.py) and judges (state.py). A zone without capacity or quota is `elsewhere`: another may do.
4. `destroy` is called until nothing is left. An answer that was lost is waited for, since what it made may yet appear.
"""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from podway.errors import ProviderError, UserError
from podway.hosts.link import Connect
from podway.order import Host, Order
from podway.providers import CreatedVolume, Observation, Offer, OwnedResource, Request, SelfTeardown, Shell, Step
from podway.providers.gcp.account import Account
from podway.providers.gcp.api import EVERYWHERE, Cloud
from podway.providers.gcp.configured import preferred_place
from podway.providers.gcp.errors import GcpError
from podway.providers.gcp.hosts import Hosts
from podway.providers.gcp.offers import OfferFinder
from podway.providers.gcp.records import ClusterRecords
from podway.providers.gcp.render import RenderContext, is_queued, render
from podway.providers.gcp.resources import (
    KINDS,
    Listing,
    Resource,
    disk_size_gb,
    is_spot,
    kinds_made_by,
    tpu_node_name,
    volume_mounts,
    wanted_of,
    zone_of,
)
from podway.providers.gcp.self_teardown import self_teardown
from podway.providers.gcp.state import WAITING, ClusterRecord, State, condition_of, is_placed, judge, owned_resource
from podway.providers.gcp.volumes import GcpVolumes
from podway.providers.ssh.machine import Unable
from podway.task.task import Resources
from podway.task.volumes import VolumeSpec

PACE_S = 1.0  # between two looks at one cluster, however often a caller asks
SLOWEST_S = 15.0  # between two looks at a queue
BOOT_S = 300.0  # a node that is ready may be this long without an ssh that lets us in
GONE_S = 60.0  # after this time, what should be there and is not seen is not there
SETTLE_S = 20.0  # within this time, what a lost answer was about can still appear


class GcpProvider:
    """See the module docstring; each verb's contract is in `podway.providers.Provider`."""

    name = "gcp"

    def __init__(self, root: Path) -> None:
        self.account = Account(root)
        self.cloud = Cloud(self.account)
        self.hosts = Hosts(self.account, self.cloud)
        self.volumes = GcpVolumes(self.account, self.cloud)
        self.offer_finder = OfferFinder(self.cloud)
        self.records = ClusterRecords(self.account.folder / "clusters")
        self.pace_s, self.settle_s, self.boot_s = PACE_S, SETTLE_S, BOOT_S
        self._looks: dict[str, tuple[float, Listing | None]] = {}

    @property
    def owner(self) -> str:
        """Marks what this Podway makes in the project."""
        return self.account.owner

    def offers(self, resources: Resources, slices: int) -> list[Offer]:
        """The zones that have such slices, with their prices; those that the project is not offered say so."""
        settings = msgspec.structs.replace(self.account.settings, near=preferred_place())
        self.account.check()
        return self.offer_finder.offers(resources, slices, settings)

    def render(self, name: str, order: Order) -> Request:
        """The calls, from the order and the settings."""
        account = self.account
        context = RenderContext(
            project=account.project, owner=account.owner, public_key=account.public_key(), settings=account.settings
        )
        return render(name, order, context)

    async def submit(self, request: Request) -> None:
        """Do what is next: ask for what is missing, delete what is too much, start the agents on what is ready."""
        record = self.records.read(request.name)
        if record is not None and record.ending:
            raise ProviderError(f"what {request.name} was before is still being deleted")
        listing = await self._look(request.name, record, recent=True)
        if record is None or (record.request != request and not listing.resources and record.zone is None):
            record = self.records.begin(request, self.account.settings.endpoint)
        record = await self._note_failed_operations(record, listing)
        state = judge(listing.resources, record)
        if state.surplus:
            await self._delete(state.surplus)
        elif state.condition == "ready" and state.unit is not None:
            everywhere = [step for step in record.request.steps if zone_of(step.target) is None]  # a firewall rule
            await self._place(await self._ask(record, listing, everywhere), state)
        elif state.condition == "creating" and record.zone is None:
            await self._ask(record, listing, record.request.steps)

    async def observe(self, name: str) -> Observation:
        """What is there, and what it amounts to."""
        record = self.records.read(name)
        if record is not None and record.ending:
            return Observation(condition="deleting")
        listing = await self._look(name, record)
        if record is not None and record.zone and not listing.resources:
            # Another server may have moved it: only when it is nowhere, it is gone.
            listing = await self._look(name, None)
            record = None if listing.resources else record
        state = judge(listing.resources, record)
        zone, since = state.unit.zone if state.unit else None, record.seen_ready if record else None
        if state.condition == "ready" and (state.surplus or not is_placed(record, state)):
            told = f": {record.waits_for}" if record is not None and record.waits_for else ""
            waits = "the other zones are being given back" if state.surplus else f"waiting for its hosts{told}"
            return Observation(condition="creating", zone=zone, reason=waits, billed_since=since)
        if state.condition == "absent" and listing.unreachable:
            raise ProviderError(f"Google Cloud does not answer for {', '.join(listing.unreachable)}")
        return Observation(
            condition=state.condition,
            hosts=record.hosts if record is not None and state.condition == "ready" else (),
            reason=state.reason,
            zone=zone,
            elsewhere=state.elsewhere,
            billed_since=since,
        )

    async def stop(self, name: str) -> None:
        """Stop the nodes or machines that run; refused for what the API cannot stop."""
        record = self.records.read(name)
        state = judge((await self._look(name, record)).resources, record)
        if state.unit is None:
            return
        if any(node.queued for node in state.unit.nodes) or any(len(node.addresses) > 1 for node in state.unit.nodes):
            raise UserError(f"cluster {name} cannot be stopped: {_NO_STOP}", f"take it down: podway down {name}")
        if record is not None:
            self.hosts.disconnect(record.hosts)
            record = self.records.change(record, hosts=(), seen_ready=None, halted=True)
        await self._switch(name, record, on=False)

    async def start(self, name: str) -> None:
        """Start the nodes or machines that are stopped; `submit` then starts the agents."""
        record = self.records.read(name)
        if record is not None and record.halted:
            record = self.records.change(record, halted=False, seen_ready=None)
        await self._switch(name, record, on=True)

    async def destroy(self, name: str) -> None:
        """Delete what is there, wherever it is; forget the cluster when nothing is left and nothing can still appear."""
        record = self.records.read(name)
        if record is not None and not record.ending:
            record = self.records.change(record, ending=True)
        listing = await self._look(name, record, everywhere=True)
        if listing.resources:
            self.hosts.forget(resource.number for resource in listing.resources)
            await self._delete(listing.resources)
            return
        if listing.unreachable and (record is None or set(listing.unreachable) & set(record.zones)):
            raise ProviderError(f"Google Cloud does not answer for {', '.join(listing.unreachable)}")
        if record is None:
            return
        unanswered = [when for target, when in record.asked.items() if target not in record.operations]
        if any(time.time() - when < self.settle_s for when in unanswered):
            return
        self.hosts.disconnect(record.hosts)
        self.hosts.forget(host.id.partition(".")[0] for host in record.hosts)
        self.records.drop(name)
        self._looks.pop(name, None)

    async def list_resources(self) -> list[OwnedResource]:
        """Everything in the project that carries Podway's mark."""
        listing = await self.cloud.in_thread(self._look_at_all)
        return [owned_resource(resource) for resource in listing.resources]

    async def purge(self, resource: OwnedResource) -> None:
        """Begin to delete one resource, whoever made it."""
        kind = next((kind for kind in KINDS if kind == resource.kind), None)
        if kind is None:
            raise UserError(
                f"{resource.kind!r} is not a kind of resource on Google Cloud", "see: podway status --refresh"
            )
        await self._delete((Resource(kind=kind, path=resource.name, zone=resource.zone, state=""),))

    def refuse_stop(self, order: Order) -> str | None:
        """The API stops single hosts that were made at once, and nothing else."""
        if is_queued(order) or (order.tpu_vm and order.hosts_per_slice > 1):
            return _NO_STOP
        if order.spot:
            return "a spot machine that is stopped may not come back"
        return None

    def self_teardown(self, name: str, order: Order, *, down: bool) -> SelfTeardown | None:
        """The same calls that `destroy` or `stop` begins with, for the head host to make with its own account."""
        return self_teardown(self.render(name, order), order, down=down, endpoint=self.account.settings.endpoint)

    async def create_volume(self, spec: VolumeSpec) -> CreatedVolume:
        """A persistent disk."""
        return await self.volumes.create(spec)

    async def delete_volume(self, spec: VolumeSpec) -> None:
        """The disk goes."""
        await self.volumes.delete(spec)

    async def ensure_agent(self, host: Host) -> None:
        """Have the agent answer."""
        record = self.records.read(host.cluster)
        await self.hosts.ensure_agent(host, volume_mounts(record.request.steps) if record is not None else ())

    def connect(self, host: Host) -> Connect:
        """Streams to the agent's socket over the host's one connection."""
        return self.hosts.connect(host)

    def connect_port(self, host: Host, port: int) -> Connect:
        """Through the host's one connection: no firewall rule is needed."""
        return self.hosts.connections.connect_port(self.hosts.endpoint(host), port)

    def shell(self, host: Host, env: dict[str, str]) -> Shell:
        """The person's own ssh, into an environment as a job has it."""
        return self.hosts.shell(host, env)

    async def trust(self, host: Host, line: str) -> None:
        """In authorized_keys of the login."""
        await self.hosts.trust(host, line)

    # looking

    async def _look(
        self, name: str, record: ClusterRecord | None, *, everywhere: bool = False, recent: bool = False
    ) -> Listing:
        """What there is of the cluster: in the record's zones and kinds, or in the whole project without a record.

        `recent`: what was seen a moment ago will do, once.
        """
        if record is not None:
            self._check_same_cloud(record)
        at, last = self._looks.get(name, (0.0, None))
        age = time.monotonic() - at
        if last is not None and not everywhere and age < _patience(record, last):
            return last
        if last is not None and recent and age < self.pace_s:
            self._looks[name] = (at, None)
            return last
        if age < self.pace_s:
            await asyncio.sleep(self.pace_s - age)
        zones = (EVERYWHERE,) if everywhere or record is None else record.zones
        kinds = KINDS if record is None else kinds_made_by(record.request.steps)
        try:
            listing = await self.cloud.in_thread(self.cloud.look, kinds, zones)
        except GcpError as error:
            raise error.as_error() from None
        finally:
            self._looks[name] = (time.monotonic(), None)
        whose = (self.owner, name)
        mine = tuple(resource for resource in listing.resources if (resource.owner, resource.cluster) == whose)
        seen = Listing(resources=mine, unreachable=listing.unreachable)
        self._looks[name] = (time.monotonic(), seen)
        return seen

    def _check_same_cloud(self, record: ClusterRecord) -> None:
        """A cluster of another project, or of an emulator, is not gone because it is not seen in this one."""
        here = (self.account.project, self.account.settings.endpoint)
        there = (record.project, here[1] if record.endpoint == "" else record.endpoint)
        if there != here:
            made, ours = (f"{project} at {endpoint or 'Google Cloud'}" for project, endpoint in (there, here))
            raise ProviderError(f"{record.request.name} was made in {made}, and this server is set to {ours}")

    def _look_at_all(self) -> Listing:
        resources: list[Resource] = []
        for kind in KINDS:
            try:
                resources += self.cloud.look((kind,)).resources
                resources += self.cloud.volume_disks() if kind == "disk" else ()
            except GcpError as error:
                # Who may not use Compute Engine has made nothing there.
                if error.kind != "never" or kind in ("queued resource", "node"):
                    raise error.as_error() from None
        return Listing(resources=tuple(resources))

    async def _note_failed_operations(self, record: ClusterRecord, listing: Listing) -> ClusterRecord:
        """Note the zones whose operations failed: a node that could not be made is not seen, only its operation is."""
        seen = {_place_of(resource.path) for resource in listing.resources}
        for step in record.request.steps:
            operation, zone = record.operations.get(step.target), zone_of(step.target)
            if operation is None or zone in record.failures or _place_of(step.target) in seen:
                continue
            try:
                await self.cloud.in_thread(self.cloud.outcome, operation, wanted_of(step), zone)
            except GcpError as error:
                if error.kind == "never":
                    raise error.as_error() from None
                if error.kind == "elsewhere":
                    record = self._note_refusal(record, step, error)
                if error.kind != "absent":  # an operation is forgotten after some days
                    continue
            if zone and time.time() - record.asked.get(step.target, 0.0) > GONE_S:
                gone = f"{wanted_of(step)} in {zone} disappeared before it was ready"
                record = self.records.change(record, failures={**record.failures, zone: gone})
        return record

    # doing

    async def _ask(self, record: ClusterRecord, listing: Listing, steps: Iterable[Step]) -> ClusterRecord:
        """Make the calls whose resources are not there. All are made, also when one cannot be."""
        seen = {_place_of(resource.path): resource for resource in listing.resources}
        error: GcpError | None = None
        for step in steps:
            zone = zone_of(step.target)
            if (
                step.verb == "mount-volume"
                or _place_of(step.target) in seen
                or zone in record.failures
                or step.target in record.operations
            ):
                continue
            if step.verb != "create-disk" and _waits_for_disk(record.request.steps, zone, seen):
                continue
            record = self.records.change(record, asked={**record.asked, step.target: time.time()})
            try:
                operation = await self.cloud.in_thread(self.cloud.perform, step, record.nonce)
            except GcpError as found:
                record = self._note_refusal(record, step, found)
                if found.kind == "exists" and time.time() - record.began > GONE_S:
                    found = GcpError("never", f"{step.target} exists, and is not this cluster's", "use another name")
                elif zone is None and found.kind in ("elsewhere", "absent"):
                    found = GcpError("never", found.what, "leave `ports` out, or see what the project allows")
                error = found if found.kind in ("never", "again") else error
            else:
                record = self.records.change(record, operations={**record.operations, step.target: operation})
        if error is not None:
            raise error.as_error()
        return record

    def _note_refusal(self, record: ClusterRecord, step: Step, error: GcpError) -> ClusterRecord:
        """Write down what came of a step that did not go through; nothing, where it may have gone through."""
        if not error.sure:
            return record
        asked = {target: when for target, when in record.asked.items() if target != step.target}
        zone, failures = zone_of(step.target), record.failures
        if error.kind in ("elsewhere", "absent") and zone is not None:
            failures = {**failures, zone: error.what}
            if error.no_quota:
                self.offer_finder.remember(zone, wanted_of(step), is_spot(step), error.what)
        return self.records.change(record, asked=asked, failures=failures)

    async def _delete(self, resources: Iterable[Resource]) -> None:
        """Begin to delete all of these that is not being deleted; the first thing that went wrong, after all were tried."""
        resources = list(resources)
        carriers = [resource for resource in resources if resource.kind != "disk"]
        queues = {resource.path.rpartition("/")[2] for resource in resources if resource.kind == "queued resource"}
        to_delete = [
            resource
            for resource in resources
            if condition_of(resource) != "deleting"
            and not (resource.kind == "node" and resource.queued.rpartition("/")[2] in queues)  # goes with its queue
            and not (
                resource.kind == "disk" and any(other.zone == resource.zone for other in carriers)
            )  # still attached
        ]
        answers = await asyncio.gather(
            *(self.cloud.in_thread(self.cloud.delete, resource) for resource in to_delete), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, GcpError):
                raise ProviderError(answer.what) from None
            if isinstance(answer, BaseException):
                raise answer

    async def _switch(self, name: str, record: ClusterRecord | None, *, on: bool) -> None:
        """Start what is stopped, or stop what runs; say why the last try of that came to nothing."""
        resources = (await self._look(name, record)).resources
        wanted = "stopped" if on else "ready"
        chosen = [t for t in resources if t.kind in ("node", "tpu node", "instance") and condition_of(t) == wanted]
        try:
            for resource in chosen:
                key = f"{'start' if on else 'stop'} {resource.path}"
                last = record.operations.get(key) if record is not None else None
                if record is not None and last:
                    record = self.records.change(record, operations={**record.operations, key: ""})
                    await self.cloud.in_thread(
                        self.cloud.outcome, last, resource.accelerator_type or resource.id, resource.zone
                    )
                operation = await self.cloud.in_thread(self.cloud.switch, resource, on)
                if record is not None:
                    record = self.records.change(record, operations={**record.operations, key: operation})
        except GcpError as error:
            raise error.as_error() from None

    async def _place(self, record: ClusterRecord, state: State) -> None:
        """Start the agents. A host that has just come up may not let us in yet; that is waiting, not failure."""
        unit = state.unit
        if unit is None or is_placed(record, state):
            return
        since = record.seen_ready
        if since is None:
            since = await self.cloud.in_thread(self.cloud.ready_since, record.operations)
        record = self.records.change(record, seen_ready=since)
        steps = record.request.steps
        try:
            hosts = await self.hosts.place(
                record.request.name, unit.nodes, disk_size_gb(steps), tpu_node_name(steps), volume_mounts(steps)
            )
        except Unable:
            raise  # no waiting makes it another machine
        except (ProviderError, UserError) as error:
            what = error.what if isinstance(error, UserError) else str(error)
            if time.time() - since < self.boot_s:
                self.records.change(record, waits_for=what)
                return
            why = f"the hosts in {unit.zone} are up since {round(time.time() - since)} s and cannot be used: {what}"
            self.records.change(record, failures={**record.failures, unit.zone: why})
            return
        self.records.change(record, hosts=hosts, zone=unit.zone, halted=False, waits_for="")


_NO_STOP = (
    "Google Cloud stops TPUs of one host that were created at once; pods and queued resources can only be deleted"
)


def _place_of(path: str) -> tuple[str, ...]:
    """A path without its project, which the cloud may write by its number."""
    return tuple(path.split("/")[2:])


def _patience(record: ClusterRecord | None, listing: Listing) -> float:
    """How long a look holds good: a queue that has been waited in for minutes is looked at less and less often."""
    waiting = all(resource.state in WAITING for resource in listing.resources if resource.kind == "queued resource")
    if (
        record is None
        or not listing.resources
        or not waiting
        or any(resource.kind == "node" for resource in listing.resources)
    ):
        return 0.0
    waited = time.time() - record.began
    return min(SLOWEST_S, waited / 20) if waited > 60 else 0.0


def _waits_for_disk(steps: Iterable[Step], zone: str | None, seen: dict[tuple[str, ...], Resource]) -> bool:
    disks = [_place_of(step.target) for step in steps if step.verb == "create-disk" and zone_of(step.target) == zone]
    return any(place not in seen or condition_of(seen[place]) != "ready" for place in disks)
