"""What a launch makes: a cluster that stays, or (one-shot) something that runs the task and ends by itself."""

from podway.errors import UserError
from podway.launch_options import LaunchRequest
from podway.order import Order
from podway.providers import Provider, Request, SupportsOneShot


def render_for(provider: Provider, name: str, order: Order, request: LaunchRequest, user: str) -> Request:
    """Exactly what would be sent."""
    if not request.options.one_shot:
        return provider.render(name, order)
    if not isinstance(provider, SupportsOneShot):
        raise UserError(
            f"{provider.name} has no one-shot runs", "use --infra k8s, or --down to delete the cluster after its job"
        )
    return provider.render_one_shot(name, order, request.task, user)


def check_makes_cluster(request: LaunchRequest, *, replica: bool) -> None:
    """Refuse what is not one run of a task on a cluster."""
    if request.task.service is not None and not replica:
        raise UserError(
            "this task is a service, which needs more than one run of it",
            "make it with: podway apply -f FILE, or Client.apply_service",
        )
    if request.options.one_shot:
        raise UserError(
            "a one-shot run is only rendered in this version, not sent",
            "send it yourself: podway launch --one-shot --dryrun ... | kubectl apply -f -",
        )
