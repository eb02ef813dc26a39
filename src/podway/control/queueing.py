"""The rows of the jobs that a launch or exec queues, and what the tasks of a pipeline must have in common. Pure."""

from podway.control.records import Cluster, Job, JobState
from podway.errors import UserError
from podway.hosts.manifest import FileTree
from podway.launch_options import LaunchRequest
from podway.task.task import Accelerator, Task, takes_chips, without_secrets


def new_job(
    cluster: Cluster,
    task: Task,
    files: tuple[FileTree, ...],
    user: str,
    now: float,
    *,
    sealed_secrets: bytes,
    setup: bool,
    gang: bool = True,
    held: bool = False,
) -> Job:
    """A job that waits; the store gives it its number."""
    return Job(
        cluster_id=cluster.id,
        number=0,
        name=task.name,
        user=user,
        state=JobState.PENDING,
        task=without_secrets(task),
        files=files,
        sealed_secrets=sealed_secrets,
        run_setup=setup,
        exclusive=takes_chips(task),
        gang=gang,
        held=held,
        submitted=now,
    )


def whole_tasks(request: LaunchRequest) -> tuple[tuple[Task, tuple[FileTree, ...]], ...]:
    """Every task of a launch with its files, in the order they run; refused where they cannot share a cluster.

    The readers give all tasks of a file the same resources (`task/pipelines.py`); a program may send others.
    """
    first = request.task
    if first.schedule or any(step.task.schedule for step in request.then):
        raise UserError(
            "the task starts by a schedule",
            "podway apply -f FILE keeps it; to run it now, remove `schedule`",
            status=409,
        )
    for step in request.then:
        if step.task.kind != "task" or first.kind != "task":
            raise UserError("a service or dev environment cannot be part of a pipeline", "launch it by itself")
        if _slices(step.task) != _slices(first):
            raise UserError(
                f"the task {step.task.name or '(without a name)'} asks for other resources than the one before it",
                "the tasks of a pipeline share one cluster: give them the same resources and number of slices",
            )
    if request.then and request.options.one_shot:
        raise UserError("a one-shot run is one task", "render each task of the file by itself")
    return ((first, request.files), *((step.task, step.files) for step in request.then))


def _slices(task: Task) -> tuple[int, frozenset[Accelerator | None]]:
    return task.slices, frozenset(one.accelerator for one in task.resources)


def with_pipeline(jobs: list[Job], chosen: list[Job]) -> list[Job]:
    """The chosen jobs and the open ones that follow them, which end with them."""
    numbers = {job.number for job in chosen}
    for job in sorted(jobs, key=lambda one: one.number):
        if job.after in numbers:
            numbers.add(job.number)
    return [job for job in jobs if job.number in numbers]
