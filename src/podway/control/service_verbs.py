"""What a person can ask of services. As in `verbs.py`: check, write what is wanted, wake the controller; nothing here waits.

`launch_replica` is the one verb that only a service's controller calls: a replica is a launch like any other, under a name and a
request id of its own, so that asking twice for it is one cluster and one job.
"""

import re
import secrets
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from podway import crash
from podway.control import service_changes
from podway.control.access import Caller, Right, check_inventory, check_project, require, right_on
from podway.control.agreement import Preview
from podway.control.endpoint_certificates import check_names, seal_pair, take_pair
from podway.control.records import Cluster
from podway.control.replica_ports import port_of, spread
from podway.control.service_changes import ChangeKind, Difference
from podway.control.service_records import Replica, Revision, ScalingMemory, Service
from podway.control.store import Stale
from podway.control.verbs import Control
from podway.errors import UserError
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.provider_table import row_of
from podway.task.task import Task, group_tasks, takes_chips, without_secrets

NAME = re.compile(r"^[A-Za-z]([A-Za-z0-9-]{0,38}[A-Za-z0-9])?$")
MOST_REPLICAS = 1000
ROUTER_ADDRESS = "DSTACK_ROUTER_INTERNAL_IP"  # as dstack calls it in the environment of a worker


class NameTaken(Exception):
    """A cluster of a replica's name is somebody else's."""


class ServicePreview(msgspec.Struct, frozen=True, kw_only=True):
    """What `apply` would do to a service."""

    name: str
    kind: ChangeKind
    differences: tuple[Difference, ...] = ()
    launch: Preview | None = None  # of one replica, where new ones would be made
    groups: dict[str, Preview] = {}  # the same for each group, of a service that has them


class ServiceControl:
    """The verbs of services, over those of clusters."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.store = control.store
        self.rows = control.store.services

    # applying

    def preview(self, request: LaunchRequest, caller: Caller) -> ServicePreview:
        """The difference to what there is, and where replicas would be made; nothing is done."""
        name = check_service(request)
        request, _ = take_pair(request)
        check_project(caller, request.options.project)
        known = self.rows.find(name)
        kind, found = ("create", []) if known is None else self._compare(known, request, caller)
        launch, groups = None, dict[str, Preview]()
        if kind in ("create", "roll"):
            placed = msgspec.structs.replace(request.options, cluster=f"{name}-0")
            if request.task.service is not None and request.task.service.groups:
                groups = self._preview_groups(known, request, found, placed, caller)
                launch = next(iter(groups.values()), None)
            else:
                launch = self.control.preview(msgspec.structs.replace(request, options=placed), caller)
        return ServicePreview(name=name, kind=kind, differences=tuple(found), launch=launch, groups=groups)

    def _preview_groups(
        self,
        known: Service | None,
        request: LaunchRequest,
        found: list[Difference],
        options: LaunchOptions,
        caller: Caller,
    ) -> dict[str, Preview]:
        """One replica of each group that would get new ones."""
        same = service_changes.unchanged_groups(known.current, request.task, found) if known is not None else {}
        placed = options if known is None else _placed_with(options, known)
        parts, provider = self._parts(msgspec.structs.replace(request, options=placed), caller)
        placed = msgspec.structs.replace(placed, provider=provider)
        return {
            group: self.control.preview(msgspec.structs.replace(part, options=placed), caller)
            for group, part in parts.items()
            if group not in same
        }

    def _parts(self, request: LaunchRequest, caller: Caller) -> tuple[dict[str, LaunchRequest], str | None]:
        """The request of one replica of each group, checked, and the provider of all of them: groups reach each other there."""
        tasks = group_tasks(request.task)
        parts = {group: msgspec.structs.replace(request, task=task) for group, task in tasks.items()}
        provider = request.options.provider
        # What has chips says where; hosts without are in more places.
        with_chips = sorted(parts, key=lambda one: not takes_chips(parts[one].task))
        for group in with_chips:
            part = parts[group]
            options = msgspec.structs.replace(part.options, provider=provider)
            choice = self.control.check_launch(msgspec.structs.replace(part, options=options), "replica-0", caller)
            if group and provider is None:
                provider = choice.best[0].provider
        return parts, provider

    def _compare(self, known: Service, request: LaunchRequest, caller: Caller) -> tuple[ChangeKind, list[Difference]]:
        self._check_taken(known, caller)
        latest = known.find_revision(known.canary) if known.canary is not None else None
        old = latest or known.current
        opened = self.control.vault.open(old.sealed_secrets)
        changed = bool(request.task.secrets) and opened != request.task.secrets
        found = service_changes.differences(old, request.task, request.files, changed)
        return service_changes.kind_of(found), found

    def apply(
        self, request: LaunchRequest, caller: Caller, canary_share: float | None = None
    ) -> tuple[Service, ChangeKind]:
        """Make the service, or bring the one of that name to what the task says."""
        name = check_service(request)
        request, pair = take_pair(request)
        certificate = request.task.service.tls if request.task.service is not None else None
        sealed = seal_pair(self.control.vault, pair)
        check_project(caller, request.options.project)
        check_inventory(caller, request.task)
        check_names(name, certificate, self.rows.live())
        if canary_share is not None and not 0 < canary_share < 1:
            raise UserError("a canary has a share of the traffic", "give one between 1% and 99%")
        known = self.rows.find(name)
        if known is None:
            if canary_share is not None:
                raise UserError(f"there is no service {name!r} to try a canary of", "apply it without --canary first")
            return self._create(name, request, caller, sealed), "create"
        if request.request_id is not None and known.request_id == request.request_id:
            return known, "none"
        if known.goal == "gone":
            raise UserError(f"service {name} is being taken down", "wait until it is gone", status=409)
        kind, found = self._compare(known, request, caller)
        if kind == "none":
            return self._change(known, "applied again", lambda row: service_changes.retarget(row)), kind
        if kind == "in-place" and canary_share is None:
            kept = without_secrets(request.task)

            def in_place(row: Service) -> Service:
                return service_changes.set_certificate(service_changes.update_in_place(row, kept), certificate, sealed)

            return self._change(known, "updated in place", in_place), kind
        if canary_share is not None and ((request.task.service and request.task.service.groups) or known.spec.groups):
            raise UserError("a service with groups of replicas has no canary", "apply it without --canary", status=409)
        same = service_changes.unchanged_groups(known.current, request.task, found)
        self._parts(msgspec.structs.replace(request, options=_placed_with(request.options, known)), caller)
        revision = msgspec.structs.replace(self._revision(request, caller), since=same)
        text = "is updated" if canary_share is None else f"tries a canary with {canary_share:.0%} of the traffic"

        def change(row: Service) -> Service:
            new = service_changes.add_revision(row, revision, canary_share)
            new = service_changes.set_certificate(new, certificate, sealed)
            return msgspec.structs.replace(new, request_id=request.request_id)

        return self._change(known, text, change), "roll"

    def _create(self, name: str, request: LaunchRequest, caller: Caller, sealed_tls: bytes) -> Service:
        _, provider = self._parts(request, caller)
        revision = self._revision(request, caller)
        for group in group_tasks(request.task):
            self.port_for(provider, revision, group)
        service = Service(
            id=secrets.token_hex(6),
            name=name,
            user=caller.user,
            project=request.options.project,
            created=time.time(),
            provider=provider,
            revisions=(revision,),
            memory=ScalingMemory(target=revision.spec.scaling.min_replicas),
            sealed_tls=sealed_tls,
            request_id=request.request_id,
        )
        try:
            self.rows.add(service, "created")
        except Stale:
            raise UserError(f"a service {name} was made at the same moment", "run it again", status=409) from None
        crash.point("service.row")
        self.control.wake(service.id)
        return service

    def _revision(self, request: LaunchRequest, caller: Caller) -> Revision:
        return Revision(
            number=1,
            task=without_secrets(request.task),
            files=request.files,
            sealed_secrets=self.control.vault.seal(request.task.secrets),
            created=time.time(),
            user=caller.user,
        )

    # changing

    def scale(self, name: str, low: int, high: int, group: str = "") -> Service:
        """Another range of replicas; `group`: of which, in a service with groups."""
        if not 0 <= low <= high <= MOST_REPLICAS:
            raise UserError(
                f"{low}..{high} is not a range of replicas", f"give 0 to {MOST_REPLICAS}, such as 3 or 1..4"
            )
        what = f"group {group} is scaled" if group else "scaled"
        text = f"{what} to {low}" if low == high else f"{what} to {low}..{high}"
        return self._change(self.find(name, live=True), text, lambda row: service_changes.scale(row, low, high, group))

    def promote(self, name: str) -> Service:
        """The canary becomes what all replicas run."""

        def change(row: Service) -> Service:
            if row.canary is None:
                raise UserError(f"service {name} has no canary", "update it with --canary first", status=409)
            return service_changes.roll_to(row, row.canary)

        return self._change(self.find(name, live=True), "the canary is promoted", change)

    def set_share(self, name: str, share: float) -> Service:
        """Another part of the traffic for the canary."""
        if not 0 < share < 1:
            raise UserError("a canary has a share of the traffic", "give one between 1% and 99%")
        text = f"the canary has {share:.0%} of the traffic"
        return self._change(self.find(name, live=True), text, lambda row: service_changes.set_share(row, share))

    def rollback(self, name: str, number: int | None = None) -> Service:
        """Back to a revision; without a number, from the canary, or else to the one before."""

        def change(row: Service) -> Service:
            if number is not None:
                return service_changes.roll_to(row, number)
            if row.canary is not None:
                return service_changes.roll_to(row, row.revision)
            before = [one.number for one in row.revisions if one.number < row.revision]
            if not before:
                raise UserError(
                    f"service {name} has no earlier revision", f"see: podway service status {name}", status=409
                )
            return service_changes.roll_to(row, max(before))

        return self._change(
            self.find(name, live=True), "rolls back" if number is None else f"rolls to revision {number}", change
        )

    def share(self, name: str, user: str, right: Literal["view", "use"] | None) -> Service:
        """Let a person view or use a service, or (None) no longer; gateways learn of it with the routes."""
        text = f"is no longer shared with {user}" if right is None else f"is shared with {user} ({right})"
        service = self.find(name, live=True)
        return self._change(service, text, lambda row: service_changes.set_grant(row, user, right))

    def down(self, name: str) -> Service:
        """End the service and delete all its replicas."""
        service = self.find(name, live=True)
        if service.goal != "gone":
            service = self._change(service, "is being taken down", service_changes.request_down)
            crash.point("service.down-marked")
        self.control.wake(service.id)
        return service

    def _change(self, service: Service, text: str, change: Callable[[Service], Service]) -> Service:
        def guarded(row: Service) -> Service:
            if row.goal == "gone" and change is not service_changes.request_down:
                raise UserError(f"service {row.name} is being taken down", "wait until it is gone", status=409)
            return change(row)

        try:
            changed = self.rows.update(service.id, guarded, text=text)
        except Stale:
            raise UserError(f"service {service.name} is gone", "apply it again", status=409) from None
        self.control.wake(service.id)
        return changed

    # finding

    def find_for(self, caller: Caller, name: str, needed: Right) -> Service:
        """The service of that name, for a caller who has this right on it; for whoever may not know of it there is none."""
        service = self.rows.find(name) or self.rows.find(name, gone=True)
        if service is None or right_on(service, caller) is None:
            names = ", ".join(one.name for one in self.rows.live() if right_on(one, caller) is not None)
            hint = (
                f"existing services: {names[:200]}" if names else "there are none; make one with: podway apply -f FILE"
            )
            raise UserError(f"there is no service {name!r}", hint, status=404)
        require(service, caller, needed)
        return service

    def find(self, name: str, *, live: bool = False) -> Service:
        """The service of that name: the live one, or (unless `live`) the latest that had it."""
        service = self.rows.find(name) or (None if live else self.rows.find(name, gone=True))
        if service is None:
            raise UserError(f"there is no service {name!r}", "see: podway services", status=404)
        return service

    def _check_taken(self, known: Service, caller: Caller) -> None:
        if right_on(known, caller) is None:
            raise UserError(f"the name {known.name!r} is taken", "use another name", status=409)
        require(known, caller, Right.MANAGE)

    # replicas

    def find_replica(self, name: str, number: int | None) -> Replica:
        """A replica by number, or the newest that takes traffic, or the newest."""
        service = self.find(name)
        every = self.rows.replicas(service.id, open_only=False)
        if number is not None:
            found = next((one for one in every if one.number == number), None)
            if found is None:
                raise UserError(
                    f"service {name} has no replica {number}", f"see: podway service status {name}", status=404
                )
            return found
        best = [one for one in every if one.state == "READY"] or [one for one in every if not one.done] or every
        if not best:
            raise UserError(f"service {name} has no replica yet", "wait for one", status=404)
        return best[-1]

    def cluster_of(self, replica: Replica) -> Cluster | None:
        """The replica's cluster, alive or gone; None before its launch."""
        if replica.cluster_id is not None:
            return self.store.cluster(replica.cluster_id)
        found = self.store.find(replica.cluster) or self.store.find(replica.cluster, gone=True)
        return found if found is not None and found.request_id == replica.request_id else None

    def port_for(self, provider: str | None, revision: Revision, group: str = "") -> int:
        """The port that a new replica is to listen on; refused where it could not."""
        revision = revision.of_group(group) or revision
        named = {provider} if provider else {one.placement.provider for one in revision.task.resources}
        names = list(self.control.usual()) if None in named else [name for name in named if name is not None]
        if not all(row_of(name).simulated for name in names):
            return revision.spec.port  # a real host's ports are its own, and a simulated one is not taken beside it
        return port_of(revision, [self.control.provider(name) for name in names])

    def launch_replica(self, service: Service, replica: Replica) -> Cluster:
        """Its cluster and job, made now or before."""
        known = self.cluster_of(replica)
        if known is not None and (not known.live or known.goal != "up"):
            return known
        other = self.store.find(replica.cluster)
        if known is None and other is not None:
            raise NameTaken(replica.cluster)
        revision = service.find_revision(replica.revision)
        if revision is None:
            raise UserError(f"revision {replica.revision} of {service.name} is forgotten", "apply it again")
        task = replica_task(service, replica, revision, self.control.vault.open(revision.sealed_secrets))
        request = LaunchRequest(
            task=task,
            options=LaunchOptions(
                cluster=replica.cluster, provider=service.provider, project=service.project, retry_until_up=True
            ),
            files=revision.files,
            request_id=replica.request_id,
        )
        projects = {service.project: "member"} if service.project else {}
        caller = Caller(user=service.user, projects=projects, internal=True)  # type: ignore[arg-type]
        zones = [self._zone_of(one) for one in self.rows.replicas(service.id) if one.number != replica.number]
        launched = self.control.launch(request, caller, lambda choice: spread(choice, self.control.provider, zones))
        found = self.store.cluster(launched.cluster_id)
        assert found is not None
        return found

    def _zone_of(self, replica: Replica) -> str | None:
        """Where it is or is asked for: replicas that are made together are to be spread as well."""
        cluster = self.cluster_of(replica)
        return cluster.order.zone if cluster is not None else None


def replica_task(service: Service, replica: Replica, revision: Revision, opened: dict[str, str]) -> Task:
    """What a replica runs: the revision's task, told which replica it is. The service replaces it, so it recovers nothing itself."""
    part = revision.of_group(replica.group)
    if part is None:
        raise UserError(f"revision {replica.revision} has no group {replica.group!r}", "apply the service again")
    task = part.task
    env = {
        **task.env,
        "PODWAY_SERVICE": service.name,
        **({"PODWAY_GROUP": replica.group} if replica.group else {}),
        **({ROUTER_ADDRESS: replica.router_address} if replica.router_address else {}),
        "PODWAY_REPLICA": str(replica.number),
        "PODWAY_REVISION": str(replica.revision),
        "PODWAY_PORT": str(replica.port),
        "SKYPILOT_SERVE_REPLICA_ID": str(replica.number),
    }
    resources = task.resources
    if replica.spot is not None:
        kind = "yes" if replica.spot else "no"
        resources = tuple(msgspec.structs.replace(one, spot=kind) for one in resources)
    return msgspec.structs.replace(
        task, env=env, secrets=opened, resources=resources, recovery=None, autostop=None, reuse_only=False
    )


def _placed_with(options: LaunchOptions, service: Service) -> LaunchOptions:
    """A new revision's replicas are made where the service is."""
    return msgspec.structs.replace(options, provider=options.provider or service.provider)


def check_service(request: LaunchRequest) -> str:
    """The name of the service that a request is about."""
    name = request.options.cluster or request.task.name
    if request.task.service is None:
        raise UserError("this task is not a service", "launch it: podway launch FILE")
    if not name:
        raise UserError("the service has no name", "add `name:` to its file, or give one with --name")
    if not NAME.match(name):
        raise UserError(
            f"{name!r} cannot be a service name",
            "use letters, digits and '-', starting with a letter, at most 40 characters",
        )
    return name
