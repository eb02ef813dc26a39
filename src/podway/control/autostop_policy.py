"""Which autostop policy a launch sets: that of its options, or of its task, or of a dev environment's inactivity."""

from podway.control.one_shot import GOES_WITH_ITS_JOB
from podway.launch_options import LaunchRequest
from podway.order import Order
from podway.providers import Provider, refuse_stop
from podway.task.task import Autostop


def autostop_of(request: LaunchRequest, provider: Provider, order: Order) -> Autostop | None:
    """A dev environment ends when no job ran and nobody was logged in for as long as it says: it is stopped, or deleted where its hosts
    cannot be stopped."""
    task, chosen = request.task, request.options.autostop
    if request.options.one_shot:
        return GOES_WITH_ITS_JOB
    if chosen is not None or task.dev is None:
        return chosen or task.autostop
    if task.dev.inactivity_s is None:
        return None
    down = refuse_stop(provider, order) is not None
    return Autostop(idle_minutes=task.dev.inactivity_s / 60, down=down, wait_for="jobs_and_ssh")
