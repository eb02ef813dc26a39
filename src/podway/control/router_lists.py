"""The routers of one service, each with the list of its workers: what the service's controller keeps beside the probes.

A worker is put on the list while it is ready and taken off as soon as it is not to get new requests; the last one of its role stays
until the gateways know that they are to hold requests. A router that starts is ready only when it lists all workers that are; which of
them it lists, and for what, is written to its row, for the table of routes.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from podway.control.controller import Parts
from podway.control.fleet import HostSession
from podway.control.records import JobState
from podway.control.replica_ports import probe_address
from podway.control.replica_states import ProbeSummary, ReplicaSeen
from podway.control.router_workers import HostPort, RouterWorkers, WorkerTarget
from podway.control.service_records import Replica, ReplicaState, Service
from podway.control.traffic import SETTLE_S, router_type
from podway.order import Host

ASKED = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.NOT_READY)


class RouterLists:
    """By the number of the router's replica."""

    def __init__(self, parts: Parts, changed: Callable[[], None]) -> None:
        self._parts = parts
        self._changed = changed
        self._lists: dict[int, RouterWorkers] = {}

    def keep(self, service: Service, replicas: Sequence[Replica], seen: dict[int, ReplicaSeen]) -> None:
        """Every router that runs is to list the workers that are ready."""
        routers = {
            one.number: one
            for one in replicas
            if router_type(service, one) == "smg" and one.state in ASKED and seen[one.number].job is JobState.RUNNING
        }
        for number in [number for number in self._lists if number not in routers]:
            self._lists.pop(number).close()
        wanted = _targets(service, [one for one in replicas if one.state is ReplicaState.READY])
        leaving = _targets(service, [one for one in replicas if _just_asked_to_leave(one) and seen[one.number].cluster])
        ways = {one.number: one for one in replicas}

        def way(number: int) -> HostPort:
            return self._way(ways[number], seen[number])

        for number, router in routers.items():
            if number not in self._lists and router.host is not None:
                self._lists[number] = RouterWorkers(way(number), self._changed)
            if number in self._lists:
                kept = self._lists[number]
                last = last_of_role(leaving, kept.roles) if router.state is ReplicaState.READY else {}
                kept.want(wanted | last, way)

    def _way(self, replica: Replica, seen: ReplicaSeen) -> HostPort:
        assert replica.host is not None and seen.cluster is not None  # a program that runs has both
        provider = self._parts.provider(seen.cluster.order.provider)
        address = probe_address(provider.name, replica.host)
        return HostPort(HostSession(provider, replica.host), address, replica.port)

    def gated(self, service: Service, replica: Replica, probe: ProbeSummary) -> ProbeSummary:
        """The probes of a router that is not ready pass only when it lists all its workers."""
        if not probe.passing or replica.state is ReplicaState.READY or router_type(service, replica) != "smg":
            return probe
        kept = self._lists.get(replica.number)
        if kept is not None and kept.complete:
            return probe
        why = kept.error if kept is not None else ""
        return msgspec.structs.replace(probe, passing=False, error=why or "it does not list all its workers yet")

    def noted(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        """With the workers that each router lists now."""
        return tuple(self._noted(one) for one in replicas)

    def _noted(self, replica: Replica) -> Replica:
        kept = self._lists.get(replica.number)
        if kept is None or kept.listed is None or replica.state not in ASKED:
            return replica
        reason = replica.reason
        if replica.state is ReplicaState.READY:
            reason = kept.error
        return msgspec.structs.replace(replica, workers=kept.listed, worker_roles=kept.roles, reason=reason)

    def close(self) -> None:
        """Stop looking; the routers keep their lists."""
        for one in self._lists.values():
            one.close()
        self._lists.clear()


def _just_asked_to_leave(replica: Replica) -> bool:
    return replica.state is ReplicaState.DRAINING and time.time() - (replica.drain_since or 0.0) < SETTLE_S


def last_of_role(leaving: Mapping[int, WorkerTarget], roles: Mapping[int, str]) -> dict[int, WorkerTarget]:
    """Of the workers that leave, those without which a router would list none for a part of its requests. `roles` of all it lists."""
    staying = {role for number, role in roles.items() if number not in leaving}
    return {number: one for number, one in leaving.items() if number in roles and roles[number] not in staying}


def _targets(service: Service, replicas: Sequence[Replica]) -> dict[int, WorkerTarget]:
    return {one.number: target for one in replicas if (target := _target(service, one)) is not None}


def _target(service: Service, replica: Replica) -> WorkerTarget | None:
    """What a router is told of a replica; None for one that is not a worker of its."""
    revision = service.find_revision(replica.revision)
    group = revision.spec.find_group(replica.group) if revision is not None else None
    if group is None or group.router or replica.host is None:
        return None
    url = f"{group.worker.protocol}://{_host_text(replica.host)}:{replica.port}"
    return WorkerTarget(number=replica.number, url=url, worker=group.worker)


def _host_text(host: Host) -> str:
    return f"[{host.address}]" if ":" in host.address else host.address
