"""Which replicas of a service the gateway may send requests to. Pure.

Without groups, or with groups and no router: all that are ready. With a router: the router alone, once it has a ready worker of
every role that its groups have (prefill and decode, or any), since it can answer nothing before that. A worker gets requests once
its router lists it.
"""

from collections.abc import Iterable, Sequence

from podway.control.service_records import Replica, ReplicaState, Service
from podway.task.task import ReplicaGroup

SETTLE_S = 3.0  # until every gateway has learnt that a replica takes no new requests


def taking_traffic(service: Service, replicas: Iterable[Replica]) -> list[Replica]:
    """Of a service's own replicas, in their order. Those of a group that left the file answer until they go."""
    ready = [one for one in replicas if one.state is ReplicaState.READY]
    groups = {(revision.number, group.name): group for revision in service.revisions for group in revision.spec.groups}

    def takes(replica: Replica) -> bool:
        group = groups.get((replica.revision, replica.group))
        revision = service.find_revision(replica.revision)
        router = revision.spec.router if revision is not None else None
        if router is None or revision is None:
            return True
        if group is None or not group.router:
            return False
        behind = [one for one in ready if one.group != replica.group and (one.revision, one.group) in groups]
        if group.router == "smg":
            behind = [one for one in behind if one.number in replica.workers]
        known = {one.group: worker_role(replica, one.number, groups[one.revision, one.group]) for one in behind}
        needed = {known.get(one.name, one.worker.role) for one in revision.spec.groups if not one.router}
        return needed <= set(known.values())

    return [one for one in ready if takes(one)]


def worker_role(router: Replica, number: int, group: ReplicaGroup) -> str:
    """What a worker does of a request: as its router has it, who asked the worker; else as its commands say."""
    return router.worker_roles.get(number) or group.worker.role


def router_type(service: Service, replica: Replica) -> str | None:
    """Of a replica that is a router; None for any other."""
    revision = service.find_revision(replica.revision)
    group = revision.spec.find_group(replica.group) if revision is not None else None
    return group.router if group is not None else None


def without_requests(service: Service, replicas: Sequence[Replica]) -> set[int]:
    """Workers that a ready router does not list (yet), by number: they answer nothing of what it is asked."""
    routers = [one for one in replicas if one.state is ReplicaState.READY and router_type(service, one) == "smg"]
    return {one.number for one in replicas if any(one.number not in router.workers for router in routers)} - {
        one.number for one in routers
    }
