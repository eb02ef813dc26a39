"""The loop that makes one service what it is asked to be: observe, decide (pure), write with a guard, act.

What is written always comes before what is done: a replica's row before its launch, its end before its cluster goes. Both actions
are idempotent and named by the replica, so a server killed in between is harmless: the next one reads the row and does it (again).
A replica's row is closed only when nothing is left of its cluster, so nothing that is billed is ever forgotten.
"""

import asyncio
import contextlib
import logging
import time

import msgspec

from podway import crash
from podway.control.autoscale import LoadView, summarize
from podway.control.controller import Parts
from podway.control.decide_groups import decide_service_groups, group_failed, router_address
from podway.control.decide_service import Decision, NewReplica
from podway.control.fleet import HostSession
from podway.control.probing import Prober, with_secrets
from podway.control.records import Cluster, ClusterState, JobState
from podway.control.replica_ports import probe_address
from podway.control.replica_states import ProbeSummary, ReplicaSeen
from podway.control.router_lists import RouterLists
from podway.control.service_records import LoadSample, Replica, ReplicaState, Service, ServiceState
from podway.control.service_verbs import NameTaken, ServiceControl
from podway.control.store import Stale
from podway.control.traffic import SETTLE_S
from podway.errors import ProviderError, UserError

PATIENCE_S = 2.0  # after something that failed
QUIET_S = 20.0  # a gateway that has not reported for so long does not say that a replica is busy

log = logging.getLogger("podway.services")


class ServiceController:
    """Drives one service while this server holds its lease."""

    def __init__(self, parts: Parts, verbs: ServiceControl, service_id: str) -> None:
        self.parts = parts
        self.verbs = verbs
        self.rows = parts.store.services
        self.service_id = service_id
        self.wake = asyncio.Event()
        self.probers: dict[int, tuple[object, Prober]] = {}  # by replica: what they were made for, and they
        self.routers = RouterLists(parts, self.wake.set)

    async def run(self) -> None:
        """Until the service is gone or the lease is lost."""
        try:
            while await self._step():
                pass
        except Stale:
            log.info("service %s is driven by another server", self.service_id)
        finally:
            for number in list(self.probers):
                self._stop_probing(number)
            self.routers.close()

    async def _step(self) -> bool:
        self.wake.clear()
        service = await asyncio.to_thread(self.rows.get, self.service_id)
        if service is None or service.state is ServiceState.GONE:
            return False
        wait = PATIENCE_S
        try:
            replicas = await asyncio.to_thread(self.rows.replicas, service.id)
            wait = await self._drive(service, replicas)
        except Stale:
            await self._check_lease()  # a verb wrote something new: look again
            wait = 0.05
        except (ProviderError, UserError, OSError) as error:
            log.warning("service %s: %s", service.name, error)
        if wait > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), wait)
        return True

    async def _check_lease(self) -> None:
        leases = await asyncio.to_thread(self.rows.leases)
        if not any(key == self.service_id and owner == self.parts.owner for key, owner, _ in leases):
            raise Stale("the lease is lost")

    async def _drive(self, service: Service, replicas: list[Replica]) -> float:
        samples = await asyncio.to_thread(self._samples, service)
        seen = await asyncio.to_thread(self._look, service, replicas, samples)
        now = time.time()
        decision = decide_service_groups(service, replicas, seen, self._load(service, samples, now), now)
        decision = msgspec.structs.replace(decision, replicas=self.routers.noted(decision.replicas))
        await self._write(service, replicas, decision)
        for new in decision.create:
            await self._create(decision.service, new)
        await self._act(decision.service, decision.replicas)
        self._probe(decision.service, decision.replicas, seen)
        self.routers.keep(decision.service, decision.replicas, seen)
        return decision.wait_s

    # observing

    def _samples(self, service: Service) -> list[LoadSample]:
        return self.rows.loads(service.name, time.time() - max(QUIET_S, _window(service)))

    def _load(self, service: Service, samples: list[LoadSample], now: float) -> LoadView | None:
        return summarize(samples, now, _window(service))

    def _look(self, service: Service, replicas: list[Replica], samples: list[LoadSample]) -> dict[int, ReplicaSeen]:
        router = service.spec.router
        # What is under way with a worker is under way with its router as well.
        behind = {one.number for one in replicas if router is not None and one.group != router.name}
        return {one.number: self._look_at(service, one, samples, behind=one.number in behind) for one in replicas}

    def _look_at(self, service: Service, replica: Replica, samples: list[LoadSample], *, behind: bool) -> ReplicaSeen:
        cluster = self.verbs.cluster_of(replica)
        jobs = self.parts.store.jobs(cluster.id) if cluster is not None else []
        job = jobs[0] if jobs else None
        prober = self.probers.get(replica.number)
        return ReplicaSeen(
            cluster=cluster,
            job=job.state if job is not None else None,
            job_reason=job.reason if job is not None else "",
            probe=self.routers.gated(service, replica, prober[1].summary if prober is not None else ProbeSummary()),
            busy=_busy(replica, samples, time.time(), behind) if replica.state is ReplicaState.DRAINING else None,
        )

    # writing

    async def _write(self, service: Service, replicas: list[Replica], decision: Decision) -> None:
        """First the replicas, then the service: what it says of itself is never ahead of them.

        Of the replicas, first those that begin to take traffic: gateways see each write, and must never see too few.
        """
        pairs = zip(replicas, decision.replicas, strict=True)
        for old, new in sorted(pairs, key=lambda pair: pair[1].state is not ReplicaState.READY):
            if new != old:
                await asyncio.to_thread(
                    self.rows.save_replica, new, owner=self.parts.owner, text=_change_text(old, new)
                )
        new_service = decision.service
        if new_service != service:
            texts = [decision.scaled] if decision.scaled else []
            if new_service.state is not service.state:
                texts.append(
                    f"is {new_service.state.value}" + (f": {new_service.reason}" if new_service.reason else "")
                )
            await asyncio.to_thread(self.rows.save, new_service, owner=self.parts.owner, text="; ".join(texts))
        crash.point("service.decided")

    async def _create(self, service: Service, new: NewReplica) -> None:
        revision = service.find_revision(new.revision)
        if revision is None:
            return
        try:
            port = await asyncio.to_thread(self.verbs.port_for, service.provider, revision, new.group)
        except UserError as error:
            what = f"a replica could not be made: {error.what}"
            await asyncio.to_thread(
                lambda: self.rows.update(
                    service.id,
                    lambda row: group_failed(row, new.group, what, time.time()),
                    owner=self.parts.owner,
                    text=what,
                )
            )
            return
        replica = Replica(
            service_id=service.id,
            number=0,
            revision=new.revision,
            group=new.group,
            cluster="",
            spot=new.spot,
            port=port,
            created=time.time(),
        )
        await asyncio.to_thread(
            lambda: self.rows.add_replica(
                replica, name=lambda number: f"{service.name}-{number}", owner=self.parts.owner
            )
        )
        crash.point("service.replica-row")

    # acting

    async def _act(self, service: Service, replicas: tuple[Replica, ...]) -> None:
        for replica in replicas:
            if replica.state is ReplicaState.SHUTTING_DOWN:
                await self._take_down(replica)
            elif replica.state is ReplicaState.PENDING or (
                replica.state is ReplicaState.PROVISIONING and replica.up_since is None
            ):
                told = await self._with_router(service, replica, replicas)
                if told is not None:
                    await self._launch(service, told)

    async def _with_router(self, service: Service, replica: Replica, replicas: tuple[Replica, ...]) -> Replica | None:
        """A worker that is to know where its router is, with that in its row; None until it is known."""
        router = service.spec.router
        if router is None or router.router != "dynamo" or replica.group in ("", router.name):
            return replica
        if replica.router_address is not None:
            return replica
        address = router_address(service, replicas)
        if address is None:
            return None
        told = msgspec.structs.replace(replica, router_address=address)
        return await asyncio.to_thread(self.rows.save_replica, told, owner=self.parts.owner)

    async def _launch(self, service: Service, replica: Replica) -> None:
        """Begin, or finish what a killed server began: a cluster without its job."""
        cluster = await asyncio.to_thread(self.verbs.cluster_of, replica)
        if cluster is not None and await asyncio.to_thread(
            self.parts.store.has_request, cluster.id, replica.request_id
        ):
            return
        try:
            crash.point("service.before-launch")
            await asyncio.to_thread(self.verbs.launch_replica, service, replica)
            crash.point("service.after-launch")
            self.wake.set()
        except NameTaken:
            await self._give_up(replica, f"a cluster {replica.cluster} exists already")
        except UserError as error:
            await self._give_up(replica, error.what)

    async def _give_up(self, replica: Replica, reason: str) -> None:
        """It cannot be launched: nothing of it exists, so it has ended."""
        failed = msgspec.structs.replace(
            replica, state=ReplicaState.SHUTTING_DOWN, cause="failed", reason=f"could not be launched: {reason}"
        )
        await asyncio.to_thread(self.rows.save_replica, failed, owner=self.parts.owner, text=failed.reason)
        await asyncio.to_thread(
            self.rows.update,
            self.service_id,
            lambda row: group_failed(row, replica.group, "", time.time()),
            owner=self.parts.owner,
        )

    async def _take_down(self, replica: Replica) -> None:
        cluster = await asyncio.to_thread(self.verbs.cluster_of, replica)
        if cluster is not None and cluster.live and cluster.goal != "gone":
            crash.point("service.before-down")
            with contextlib.suppress(UserError):  # it went by itself meanwhile
                await asyncio.to_thread(self.verbs.control.down, cluster.name)
            crash.point("service.after-down")

    # probing

    def _probe(self, service: Service, replicas: tuple[Replica, ...], seen: dict[int, ReplicaSeen]) -> None:
        """Ask every replica whose program runs; stop asking those that go."""
        wanted = {
            one.number: one
            for one in replicas
            if one.host is not None
            and one.state in (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.NOT_READY)
            and seen[one.number].job is JobState.RUNNING
        }
        for number in [number for number in self.probers if number not in wanted]:
            self._stop_probing(number)
        for number, replica in wanted.items():
            self._keep_probing(service, replica, seen[number].cluster)

    def _keep_probing(self, service: Service, replica: Replica, cluster: Cluster | None) -> None:
        revision = service.find_revision(replica.revision)
        revision = revision.of_group(replica.group) if revision is not None else None
        if revision is None or cluster is None or replica.host is None or cluster.state is not ClusterState.UP:
            return
        made_for = (replica.host, replica.port, revision.spec.probes)
        known = self.probers.get(replica.number)
        if known is not None and known[0] == made_for:
            return
        self._stop_probing(replica.number)
        provider = self.parts.provider(cluster.order.provider)
        probes = revision.spec.probes
        if revision.sealed_secrets and revision.task.dialect == "skypilot":
            probes = with_secrets(probes, self.parts.vault.open(revision.sealed_secrets))
        prober = Prober(
            HostSession(provider, replica.host),
            probes,
            address=probe_address(provider.name, replica.host),
            port=replica.port,
            was_ready=replica.state is ReplicaState.READY,
            changed=self.wake.set,
        )
        self.probers[replica.number] = (made_for, prober)

    def _stop_probing(self, number: int) -> None:
        known = self.probers.pop(number, None)
        if known is not None:
            known[1].close()


def _window(service: Service) -> float:
    """The time that requests are counted over; the longest, where groups have several."""
    spec = service.spec
    return float(max(one.window_s for one in [spec.scaling, *(group.scaling for group in spec.groups)]))


def _busy(replica: Replica, samples: list[LoadSample], now: float, behind: bool) -> bool | None:
    """Whether a replica that drains still has requests, as all gateways that report say; None where none does.

    `behind` a router any request may be with it.
    """
    since = (replica.drain_since or now) + SETTLE_S
    latest: dict[str, LoadSample] = {}
    for sample in samples:
        latest[sample.gateway] = sample
    heard = [one for one in latest.values() if now - one.at < QUIET_S]
    if not heard:
        return None if now < since else False  # nobody routes to it, as far as anybody knows
    if any(one.at < since for one in heard):
        return True
    if behind:
        return any(sum(one.load.open_requests.values()) for one in heard)
    return any(one.load.open_requests.get(replica.id, 0) for one in heard)


def _change_text(old: Replica, new: Replica) -> str:
    """The event of a change, where it is worth one."""
    if new.state is old.state:
        return ""
    why = f": {new.reason}" if new.reason and new.state not in (ReplicaState.READY,) else ""
    return f"replica {new.number} is {new.state.value}{why}"
