"""What a person can ask for. Each verb checks, writes what is wanted into the store, and wakes the cluster's controller.

Nothing here waits for a host or a cloud: intent is persisted before anything is done, so that whatever happens next, what was
begun is known. The controllers in `reconcile.py` do the doing.
"""

import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from podway import crash
from podway.control import transitions
from podway.control.access import (
    Caller,
    Right,
    check_cancel,
    check_inventory,
    check_project,
    check_taken,
    require,
    right_on,
)
from podway.control.agreement import Preview, agreement, check_agreed
from podway.control.autostop_policy import autostop_of
from podway.control.capability_check import check_targets, no_image_for, remarks
from podway.control.choosing import Choice, check_fit, choose, with_orders
from podway.control.failover import take
from podway.control.one_shot import check_lasting, check_makes_cluster, check_reuse, render_for
from podway.control.provisioning import begin_attempt
from podway.control.queueing import new_job, whole_tasks, with_pipeline
from podway.control.records import CapacitySearch, Cluster, ClusterState, Event, Job, JobState, default_name
from podway.control.store import AlreadyEnded, Stale, Store
from podway.control.vault import SecretVault
from podway.control.volumes import VolumeControl
from podway.errors import UserError
from podway.hosts.manifest import FileTree
from podway.launch import does_something
from podway.launch_options import LaunchRequest
from podway.provider_table import row_of, simulated_names
from podway.providers import HostsHere, Offer, Provider, refuse_stop
from podway.task.task import Autostop, Task, job_secrets

JOB_NUMBER = re.compile(r"[0-9]{1,9}")  # more does not fit the column
NAME = re.compile(r"^[A-Za-z]([A-Za-z0-9._-]{0,60}[A-Za-z0-9])?$")
Prefer = Callable[[Choice], Choice]


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """Which cluster and job came of it."""

    cluster: str
    cluster_id: str
    job: int | None
    created: bool
    then: tuple[int, ...] = ()  # the jobs of the tasks that follow
    notes: tuple[str, ...] = ()  # what the task asks for that has no effect there


class Control:
    """The verbs over one store."""

    def __init__(
        self,
        *,
        store: Store,
        vault: SecretVault,
        provider: Callable[[str], Provider],
        wake: Callable[[str], None],
        usual: Callable[[], Sequence[str]] = simulated_names,
        hosts_here: Callable[[], HostsHere] = lambda: "as-server",
    ) -> None:
        self.store = store
        self.vault = vault
        self.provider = provider
        self.wake = wake
        self.usual = usual  # the providers to ask where a task names none
        self.hosts_here = hosts_here  # how hosts may be made on this machine
        self.volumes = VolumeControl(store, provider, hosts_here)

    # launching

    def preview(self, request: LaunchRequest, caller: Caller) -> Preview:
        """The plan and the exact request, without doing anything."""
        name = self._name(request.options.cluster, caller.user)
        check_project(caller, request.options.project)
        check_inventory(caller, request.task)
        request = self.volumes.attach(request, caller)
        known, tasks = self.store.find(name), whole_tasks(request)
        offers: tuple[Offer, ...] = ()
        if known is not None:
            check_taken(known, caller)
            check_reuse(known, request, sent_before=False)
            for task, _ in tasks:
                check_fit(known, task)
            order = known.order
        else:
            choice = self._choose(request)
            offers, (order, _) = choice.offers, take(choice.best)
        return Preview(
            cluster=name,
            offers=offers,
            order=order,
            request=render_for(self.provider(order.provider), name, order, request, caller.user),
            exists=known is not None,
            digest=agreement(order, exists=known is not None),
            notes=self._judge(request, order.provider, setup=request.options.setup),
        )

    def launch(
        self, request: LaunchRequest, caller: Caller, prefer: Prefer | None = None, *, held: bool = False
    ) -> Launched:
        """Make the cluster (or take the one of that name), and queue the task on it. `prefer`: a replica's, where it is best made.
        `held`: the job waits for those of its group."""
        check_makes_cluster(request, replica=prefer is not None)
        request = self.volumes.attach(request, caller)
        tasks = whole_tasks(request)
        name = self._name(request.options.cluster, caller.user)
        check_project(caller, request.options.project)
        check_inventory(caller, request.task)
        cluster = self.store.find(name)
        created = cluster is None
        if cluster is None:
            if request.task.reuse_only:
                raise UserError(
                    f"there is no cluster {name!r}, and the task says creation_policy: reuse",
                    "name a cluster that is up with -c, or leave creation_policy out",
                    status=409,
                )
            cluster = self._create(name, request, caller, prefer)
        autostop = autostop_of(request, self.provider(cluster.order.provider), cluster.order)
        if not created:
            check_taken(cluster, caller)
            self._check_isolated(cluster)
            check_reuse(cluster, request, sent_before=self._sent_before(cluster, request))
            if autostop is not None and autostop != cluster.autostop:
                require(cluster, caller, Right.MANAGE)
            if not self._sent_before(cluster, request):
                check_agreed(request, cluster.order, exists=True)
            self._judge(request, cluster.order.provider)
            for task, _ in tasks:
                check_fit(cluster, task)
            cluster = self._bring_up(cluster)
        crash.point("launch.cluster-row")
        number = None
        if request.then or request.files or does_something(request.task):
            setup = request.options.setup
            sent = request.request_id
            number = self._queue(cluster, tasks, caller.user, setup=setup, request_id=sent, held=held).number
        crash.point("launch.job-row")
        if autostop is not None and autostop != cluster.autostop:
            # After the job: an idle cluster with a short autostop would otherwise be gone before its job came.
            text = "" if cluster.one_shot else "autostop set"
            cluster = self._change(cluster, text, lambda row: transitions.set_autostop(row, autostop))
        self.wake(cluster.id)
        then = () if number is None else tuple(range(number + 1, number + len(tasks)))
        return Launched(cluster=name, cluster_id=cluster.id, job=number, created=created, then=then)

    def execute(
        self, name: str, task: Task, files: tuple[FileTree, ...], caller: Caller, request_id: str | None = None
    ) -> Launched:
        """Queue a task on a cluster that is up: no setup."""
        task, user = self.volumes.attach_task(task, caller), caller.user
        cluster = self._find_up(name)
        check_fit(cluster, task)
        notes = self._judge(LaunchRequest(task=task, files=files), cluster.order.provider, setup=False)
        job = self._queue(cluster, [(task, files)], user, setup=False, request_id=request_id)
        self.wake(cluster.id)
        return Launched(cluster=name, cluster_id=cluster.id, job=job.number, created=False, notes=notes)

    def run_everywhere(self, name: str, command: str, user: str, request_id: str | None = None) -> Launched:
        """A command on every host at once, bypassing the queue: it does not wait for the chips and does not hold them."""
        cluster = self._find_up(name)
        job = self._queue(
            cluster, [(Task(name="run", run=command), ())], user, setup=False, gang=False, request_id=request_id
        )
        self.wake(cluster.id)
        return Launched(cluster=name, cluster_id=cluster.id, job=job.number, created=False)

    def check_launch(self, request: LaunchRequest, name: str, caller: Caller) -> Choice:
        """Where a new cluster of that name may be made; refuses what cannot be, before anything is written."""
        request = self.volumes.attach(request, caller)
        choice = self._choose(request)
        for provider in dict.fromkeys(one.provider for one in choice.best):
            self._judge(request, provider)
        order, _ = take(choice.best)
        render_for(self.provider(order.provider), name, order, request, "")
        return choice

    # ending

    def cancel(self, name: str, caller: Caller, numbers: tuple[int, ...] = (), *, every: bool = False) -> list[int]:
        """Cancel these jobs, or all, or the latest that has not ended."""
        cluster = self.find_cluster(name, live=True)
        open_jobs = self.store.jobs(cluster.id, open_only=True)
        for number in numbers:
            self.find_job(cluster, str(number))
        chosen = [job for job in open_jobs if every or job.number in numbers]
        if not numbers and not every:
            chosen = open_jobs[-1:]
        chosen = with_pipeline(open_jobs, chosen)
        for job in chosen:
            check_cancel(cluster, job, caller)
        for job in chosen:
            self._request_cancel(job)
        crash.point("cancel.marked")
        self.wake(cluster.id)
        return [job.number for job in chosen]

    def stop(self, name: str) -> Cluster:
        """Stop the hosts, keep their disks."""
        cluster = check_lasting(self.find_cluster(name, live=True))
        refusal = refuse_stop(self.provider(cluster.order.provider), cluster.order)
        if refusal:
            raise UserError(
                f"cluster {name} cannot be stopped: {refusal}", f"take it down instead: podway down {name}", status=409
            )
        if cluster.goal == "gone":
            raise UserError(f"cluster {name} is being taken down", "wait until it is gone", status=409)
        if cluster.goal != "stopped":
            cluster = self._change(cluster, "is stopping", transitions.request_stop)
            crash.point("stop.marked")
            self.wake(cluster.id)
        return cluster

    def start(self, name: str) -> Cluster:
        """Start a stopped cluster."""
        cluster = self._bring_up(self.find_cluster(name, live=True))
        self.wake(cluster.id)
        return cluster

    def down(self, name: str) -> Cluster:
        """Delete the cluster and everything it made."""
        cluster = self.find_cluster(name, live=True)
        if cluster.goal != "gone":
            cluster = self._change(cluster, "is being taken down", transitions.request_down)
            crash.point("down.marked")
        self.wake(cluster.id)
        return cluster

    def set_autostop(self, name: str, autostop: Autostop | None) -> Cluster:
        """Set or clear it; the idle time counts from now."""
        cluster = check_lasting(self.find_cluster(name, live=True))
        text = "autostop off" if autostop is None else f"autostop after {autostop.idle_minutes:g} idle min"
        if autostop is not None and not autostop.down:
            refusal = refuse_stop(self.provider(cluster.order.provider), cluster.order)
            if refusal:
                raise UserError(f"cluster {name} cannot be stopped: {refusal}", "use autostop with --down", status=409)
        now = time.time()
        cluster = self._change(cluster, text, lambda row: transitions.set_autostop(row, autostop, now))
        self.wake(cluster.id)
        return cluster

    def _name(self, name: str | None, user: str) -> str:
        if name is None:
            return default_name(user)
        if not NAME.match(name):
            raise UserError(
                f"{name!r} cannot be a cluster name",
                "use letters, digits, '.', '_' and '-', starting with a letter, at most 62 characters",
            )
        return name

    # finding

    def find_for(self, caller: Caller, name: str, needed: Right) -> Cluster:
        """The cluster of that name, for a caller who has this right on it; for whoever may not know of it there is none."""
        cluster = self.store.find(name) or self.store.find(name, gone=True)
        if cluster is None or right_on(cluster, caller) is None:
            names = ", ".join(c.name for c in self.store.live_clusters() if right_on(c, caller) is not None)
            hint = f"existing clusters: {names[:200]}" if names else "there are none; create one with: podway launch"
            raise UserError(f"there is no cluster {name!r}", hint, status=404)
        require(cluster, caller, needed)
        return cluster

    def share(self, name: str, user: str, right: Literal["view", "use"] | None) -> Cluster:
        """Let a person view or use a cluster, or (None) no longer."""
        text = f"is no longer shared with {user}" if right is None else f"is shared with {user} ({right})"
        return self._change(
            self.find_cluster(name, live=True), text, lambda row: transitions.set_grant(row, user, right)
        )

    def find_cluster(self, name: str, *, live: bool = False) -> Cluster:
        """The cluster of that name: the live one, or (unless `live`) the latest that had it."""
        cluster = self.store.find(name) or (None if live else self.store.find(name, gone=True))
        if cluster is None:
            raise UserError(f"there is no cluster {name!r}", "see: podway status", status=404)
        return cluster

    def find_job(self, cluster: Cluster, number: str) -> Job:
        """One of a cluster's jobs by number, or its `latest`: a job, or a command of `podway run` where there is no job."""
        name = cluster.name
        if number == "latest":
            jobs = self.store.jobs(cluster.id)
            if not jobs:
                raise UserError(f"cluster {name} has no jobs", f"submit one: podway exec {name} FILE", status=404)
            return next((job for job in reversed(jobs) if job.gang), jobs[-1])
        job = self.store.job(cluster.id, int(number)) if JOB_NUMBER.fullmatch(number) else None
        if job is None:
            raise UserError(f"cluster {name} has no job {number}", f"see: podway queue {name}", status=404)
        return job

    # the inside

    def _sent_before(self, cluster: Cluster, request: LaunchRequest) -> bool:
        """Whether this very request created the cluster or its job: its response was lost, and it comes again."""
        if request.request_id is None:
            return False
        return cluster.request_id == request.request_id or self.store.has_request(cluster.id, request.request_id)

    def _choose(self, request: LaunchRequest) -> Choice:
        found = choose(
            request.task,
            self.provider,
            self.store.tries(),
            only=request.options.provider,
            usual=self.usual(),
            isolate=self.hosts_here() == "isolated",
            valid_until_s=request.options.valid_until_s,
        )
        return with_orders(found, lambda order: self.volumes.of_order(request, order))

    def _create(self, name: str, request: LaunchRequest, caller: Caller, prefer: Prefer | None) -> Cluster:
        choice = self.check_launch(request, name, caller)
        choice = prefer(choice) if prefer is not None else choice
        order, left = take(choice.best)
        check_agreed(request, order, exists=False)
        self.volumes.check_free(order)
        now = time.time()
        cluster = Cluster(
            id=secrets.token_hex(6),
            name=name,
            user=caller.user,
            state=ClusterState.INIT,
            goal="up",
            order=order,
            created=now,
            request_id=request.request_id,
            one_shot=request.options.one_shot,
            project=request.options.project,
            active_at=now,
            search=CapacitySearch(
                candidates=choice.candidates,
                left=left,
                untried=choice.untried,
                retry=request.options.retry_until_up,
                generation=1,
            ),
        )
        cluster = begin_attempt(cluster, now)
        try:
            self.store.add_cluster(cluster)
        except Stale:
            raise UserError(
                f"a cluster {name} was made at the same moment", "run the command again", status=409
            ) from None
        return cluster

    def _judge(self, request: LaunchRequest, name: str, *, setup: bool = True) -> tuple[str, ...]:
        """Refuse what the provider must not ignore; what it may, as notes. What a one-shot run can do, its rendering tells."""
        if request.options.one_shot:
            return ()
        row, notes = row_of(name), list[str]()
        for task, files in whole_tasks(request):
            no_image = no_image_for(task, row)
            found = remarks(task, row.capabilities, simulated=row.simulated, setup=setup, no_image=no_image)
            if found.refusal is not None:
                raise found.refusal
            check_targets(files, simulated=row.simulated)
            notes += found.notes
        return tuple(dict.fromkeys(notes))

    def _check_isolated(self, cluster: Cluster) -> None:
        """Nothing more runs as the server's own user once people have tokens."""
        order = cluster.order
        if row_of(order.provider).on_server and not order.isolated and self.hosts_here() != "as-server":
            raise UserError(
                f"cluster {cluster.name} is from before this server had users: its jobs would run as the server's own",
                f"take it down: podway down {cluster.name}",
                status=403,
            )

    def _find_up(self, name: str) -> Cluster:
        """A cluster that jobs may be queued on."""
        cluster = check_lasting(self.find_cluster(name, live=True))
        if cluster.goal != "up":
            raise UserError(
                f"cluster {name} is {cluster.state.value}", f"start it first: podway start {name}", status=409
            )
        self._check_isolated(cluster)
        return cluster

    def _bring_up(self, cluster: Cluster) -> Cluster:
        if cluster.goal == "gone":
            raise UserError(
                f"cluster {cluster.name} is being taken down", "wait until it is gone, or use another name", status=409
            )
        if cluster.goal == "stopped":
            return self._change(cluster, "is starting", transitions.request_start)
        return cluster

    def _queue(
        self,
        cluster: Cluster,
        tasks: Sequence[tuple[Task, tuple[FileTree, ...]]],
        user: str,
        *,
        setup: bool,
        gang: bool = True,
        held: bool = False,
        request_id: str | None = None,
    ) -> Job:
        """One job for each task, each after the one before; the first of them."""
        now = time.time()

        def job(task: Task, files: tuple[FileTree, ...]) -> Job:
            sealed = self.vault.seal(job_secrets(task))
            return new_job(cluster, task, files, user, now, sealed_secrets=sealed, setup=setup, gang=gang, held=held)

        first, *then = [job(task, files) for task, files in tasks]
        event = Event(time=now, cluster_id=cluster.id, text="submitted", detail={"state": JobState.PENDING.value})
        try:
            return self.store.add_job(first, request_id=request_id, event=event, then=then)
        except Stale:
            raise UserError(f"cluster {cluster.name} is gone", "launch it again", status=409) from None

    def _request_cancel(self, job: Job) -> None:
        try:
            self.store.update_job(
                job.cluster_id, job.number, lambda row: transitions.request_cancel(row, "cancelled by the user")
            )
        except AlreadyEnded:
            return
        except Stale:
            raise UserError(f"job {job.number} keeps changing", "cancel it again", status=409) from None

    def _change(self, cluster: Cluster, text: str, change: Callable[[Cluster], Cluster]) -> Cluster:
        try:
            return self.store.update(cluster.id, change, text=text)
        except Stale:
            raise UserError(f"cluster {cluster.name} is gone", "launch it again", status=409) from None
