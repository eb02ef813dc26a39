"""What brings a job back by itself, and for how long. Pure.

An *interruption* takes the hosts (preemption, a lost host, agents silent for long); an *error* is the job's own failure. A
task's `recovery` says which of them it comes back from (SkyPilot's `job_recovery`, dstack's `retry`). After an interruption
the cluster is recreated and the job begins again there with the same number; after an error it begins again on the hosts it
has. `duration_s` limits, as in dstack, how long one waits: since the interruption or error, or for a job that never ran, since
it was submitted.
"""

from typing import Literal

from podway.control.records import Exit, Job, JobState

Cause = Literal["interruption", "error"]


def cause_of(job: Job, blamed: Exit, *, hosts_lost: bool) -> Cause:
    """Why a job failed: a lost host, or an exit code that the task counts as one, is an interruption."""
    codes = job.task.recovery.exit_codes if job.task.recovery else ()
    code = blamed.code if blamed.code is not None else 128 + (blamed.signal or 0)
    return "interruption" if hosts_lost or blamed.lost or code in codes else "error"


def comes_back(job: Job, cause: Cause) -> bool:
    """Whether the job is to begin again after this."""
    recovery = job.task.recovery
    if recovery is None or job.cancel or not job.run_setup or cause not in recovery.events:
        return False
    return cause == "interruption" or job.attempt.error_restarts < recovery.max_restarts_on_errors


def survives_loss(job: Job) -> bool:
    """Whether a job outlives its cluster's hosts: it can recover, or has not begun and brings all it needs."""
    if job.state is JobState.PENDING:
        return job.run_setup and not job.cancel
    return job.state is JobState.RECOVERING or comes_back(job, "interruption")


def needs_new_hosts(job: Job, generation: int) -> bool:
    """True until the cluster has other hosts than those the job lost."""
    return job.state is JobState.RECOVERING and job.attempt.lost_generation == generation


def is_patient(job: Job) -> bool:
    """Whether it waits for capacity: recovering, or told to try again when there is none."""
    recovery = job.task.recovery
    return job.state is JobState.RECOVERING or (recovery is not None and "no-capacity" in recovery.events)


def overdue(job: Job, now: float) -> bool:
    """Whether it has waited for hosts longer than its task allows."""
    recovery = job.task.recovery
    if recovery is None or recovery.duration_s is None:
        return False
    if job.state is JobState.RECOVERING:
        return now - (job.attempt.recovering_since or now) > recovery.duration_s
    return job.state is JobState.PENDING and now - job.submitted > recovery.duration_s
