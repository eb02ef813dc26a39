"""Named places where a test may kill this process, to show that nothing is lost or leaked whatever the instant.

`point("name")` does nothing, unless PODWAY_CRASH_AT names it: then the process dies at once by SIGKILL, as it would of a power
cut. POINTS lists every name; a test walks them all, and another holds the list to the calls in the source.
"""

import os
import signal

POINTS = (
    "launch.cluster-row",
    "launch.job-row",
    "provision.before-submit",
    "provision.after-submit",
    "provision.before-up",
    "job.begun",
    "job.before-sync",
    "job.after-sync",
    "job.phase-half-started",
    "job.phase-started",
    "job.before-run",
    "job.ended",
    "job.before-save",
    "job.cancel-sent",
    "cancel.marked",
    "down.marked",
    "down.before-destroy",
    "down.after-destroy",
    "stop.marked",
    "stop.after-stop",
    "failover.marked",
    "again.before-clear",
    "again.after-clear",
    "again.marked",
    "recover.before-save",
    "recover.saved",
    "recover.jobs-marked",
    "recover.marked",
    "service.row",
    "service.decided",
    "service.replica-row",
    "service.before-launch",
    "service.after-launch",
    "service.down-marked",
    "service.before-down",
    "service.after-down",
    "pool.workers-written",
    "pool.worker-launched",
    "pool.job-given",
    "pool.job-queued",
    "pool.down-marked",
    "group.row",
    "group.task-launched",
    "group.release-written",
    "group.half-released",
    "group.cancel-marked",
    "node-pool.before-create",
    "node-pool.after-create",
    "node-pool.before-delete",
    "node-pool.after-delete",
)

_armed = os.environ.get("PODWAY_CRASH_AT", "")


def point(name: str) -> None:
    """Die here if this place was chosen."""
    if _armed and _armed == name:
        os.kill(os.getpid(), signal.SIGKILL)
