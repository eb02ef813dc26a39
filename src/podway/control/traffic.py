"""Which replicas of a service the gateway may send requests to. Pure.

Without groups, or with groups and no router: all that are ready. With a router: the router alone, once it has a ready worker of
every role that its groups have (prefill and decode, or any), since it can answer nothing before that.
"""

from collections.abc import Iterable

from podway.control.service_records import Replica, ReplicaState, Service


def taking_traffic(service: Service, replicas: Iterable[Replica]) -> list[Replica]:
    """Of a service's own replicas, in their order. Those of a group that left the file answer until they go."""
    ready = [one for one in replicas if one.state is ReplicaState.READY]
    roles = {(revision.number, group.name): group for revision in service.revisions for group in revision.spec.groups}

    def takes(replica: Replica) -> bool:
        group = roles.get((replica.revision, replica.group))
        revision = service.find_revision(replica.revision)
        router = revision.spec.router if revision is not None else None
        if router is None or revision is None:
            return True
        if group is None or not group.router:
            return False
        behind = [one for one in ready if one.group != replica.group]
        if group.router == "smg":
            behind = [one for one in behind if one.number in replica.workers]
        known = {found.worker.role for one in behind if (found := roles.get((one.revision, one.group))) is not None}
        return {one.worker.role for one in revision.spec.groups if not one.router} <= known

    return [one for one in ready if takes(one)]
