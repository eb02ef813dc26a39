"""What a head host on Google Cloud asks for, to end its own cluster while no server looks after it. Pure.

The host's service account makes the calls, with a token from the metadata server (Google, "Authenticate workloads using service
accounts"); it needs the role TPU Admin, and Compute Instance Admin where the host is a virtual machine. What the call for the
head itself does comes last. Disks and firewall rules go when a server is back and sees that the nodes are gone.
"""

from podway.order import Order
from podway.providers import HttpCall, Request, SelfTeardown, Step

TOKEN_URL = "http://169.254.169.254/computeMetadata/v1/instance/service-accounts/default/token"
TPU, COMPUTE = "https://tpu.googleapis.com", "https://compute.googleapis.com"
# The verbs of render.py that make machines, in the order in which they are ended, and how each is deleted and stopped.
DELETE = {
    "create-queued-resource": "/v2/{target}?force=true",
    "create-queued-resource-v2alpha1": "/v2alpha1/{target}?force=true",
    "create-node": "/v2/{target}",
    "create-tpu-node": "/v1/{target}",
    "create-instance": "/compute/v1/{target}",
}
STOP = {
    "create-node": "/v2/{target}:stop",
    "create-tpu-node": "/v1/{target}:stop",
    "create-instance": "/compute/v1/{target}/stop",
}


def self_teardown(request: Request, order: Order, *, down: bool, endpoint: str | None = None) -> SelfTeardown | None:
    """The calls; None where the API cannot stop what there is."""
    paths = DELETE if down else STOP
    made = [step for step in request.steps if step.verb in DELETE and _is_here(step, order)]
    if not made or any(step.verb not in paths for step in made):
        return None
    made.sort(key=lambda step: list(DELETE).index(step.verb))
    calls = tuple(
        HttpCall(
            method="DELETE" if down else "POST", url=_base(step, endpoint) + paths[step.verb].format(target=step.target)
        )
        for step in made
    )
    return SelfTeardown(token_url=TOKEN_URL, calls=calls)


def _is_here(step: Step, order: Order) -> bool:
    """Of several zones that were asked, the others have been given back."""
    return order.zone is None or f"/{order.zone}/" in step.target


def _base(step: Step, endpoint: str | None) -> str:
    return endpoint or (COMPUTE if step.verb == "create-instance" else TPU)
