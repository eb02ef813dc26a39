"""What a launch makes: a cluster that stays, or (one-shot) something that runs its task and ends by itself.

A one-shot run is a cluster whose row says so: it has one job, no agents, and goes when the job has ended. `one_shot_job.py` follows it.
"""

from collections.abc import Sequence

import msgspec

from podway.control.records import Cluster, Job
from podway.control.vault import SecretVault
from podway.errors import UserError
from podway.launch import does_something
from podway.launch_options import LaunchRequest
from podway.order import Order
from podway.providers import Provider, Request, SupportsOneShot, SupportsPullLogin
from podway.task.task import Autostop, Task, environment_secrets

GOES_WITH_ITS_JOB = Autostop(idle_minutes=0.0, down=True, wait_for="jobs")


def render_for(provider: Provider, name: str, order: Order, request: LaunchRequest, user: str) -> Request:
    """Exactly what would be sent."""
    if not request.options.one_shot:
        return provider.render(name, order)
    return _able(provider).render_one_shot(name, order, request.task, user)


async def submit(provider: Provider, cluster: Cluster, jobs: Sequence[Job], vault: SecretVault) -> None:
    """Begin to create the cluster, or go on with it."""
    if not cluster.one_shot:
        request = provider.render(cluster.name, cluster.order)
        await _send_login(provider, cluster, request, jobs, vault)
        await provider.submit(request)
        return
    job, able = jobs[0], _able(provider)
    request = able.render_one_shot(cluster.name, cluster.order, with_setup(job), job.user)
    await _send_login(provider, cluster, request, jobs, vault)
    named = environment_secrets(job.task)
    secrets = {name: value for name, value in vault.open(job.sealed_secrets).items() if name in named}
    await able.submit_one_shot(request, secrets)


async def _send_login(
    provider: Provider, cluster: Cluster, request: Request, jobs: Sequence[Job], vault: SecretVault
) -> None:
    """The login that hosts are pulled with, where they are containers of the task's image; jobs that ended have kept none."""
    if not cluster.order.pull_login or not isinstance(provider, SupportsPullLogin):
        return
    for job in jobs:
        if job.task.registry is not None and job.sealed_secrets:
            password = vault.open(job.sealed_secrets).get(job.task.registry.password_secret, "")
            await provider.keep_login(request, job.task.registry, password)
            return


def with_setup(job: Job) -> Task:
    """Its task, without the setup that is not to run."""
    return job.task if job.run_setup else msgspec.structs.replace(job.task, setup="")


def _able(provider: Provider) -> SupportsOneShot:
    if isinstance(provider, SupportsOneShot):
        return provider
    raise UserError(
        f"{provider.name} has no one-shot runs", "use --infra k8s, or --down to delete the cluster after its job"
    )


def check_makes_cluster(request: LaunchRequest, *, replica: bool) -> None:
    """Refuse what is not one run of a task on a cluster."""
    if request.task.service is not None and not replica:
        raise UserError(
            "this task is a service, which needs more than one run of it",
            "make it with: podway apply -f FILE, or Client.apply_service",
        )
    if not request.options.one_shot:
        return
    if not does_something(request.task):
        raise UserError("--one-shot: there is nothing to run", "give the task `run`, or leave --one-shot out")
    if request.options.autostop is not None:
        raise UserError("a one-shot run ends with its task", "leave out --down and --idle-minutes-to-autostop")


def check_reuse(cluster: Cluster, request: LaunchRequest, *, sent_before: bool) -> None:
    """A run is no cluster to launch on, and a cluster cannot become a run."""
    if cluster.one_shot and sent_before and request.options.one_shot:
        return
    if cluster.one_shot or request.options.one_shot:
        kind = "a one-shot run" if cluster.one_shot else "a cluster"
        raise UserError(
            f"the name {cluster.name!r} is taken by {kind}",
            "use another name (-c), or wait until it has ended" if cluster.one_shot else "use another name (-c)",
            status=409,
        )


def check_lasting(cluster: Cluster) -> Cluster:
    """The cluster, unless it is a run that ends by itself."""
    if cluster.one_shot:
        raise UserError(
            f"{cluster.name} is a one-shot run: it does its task and ends",
            f"end it with: podway cancel {cluster.name}",
            status=409,
        )
    return cluster
