"""What a person agrees to before a launch, and the refusal of anything else."""

import hashlib

import msgspec

from podway.control.provisioning import describe
from podway.errors import UserError
from podway.launch_options import LaunchRequest
from podway.order import Order
from podway.providers import Offer, Request


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What a launch would do: the offers considered, the order chosen, and the request that would be sent."""

    cluster: str
    offers: tuple[Offer, ...]
    order: Order
    request: Request
    exists: bool
    digest: str
    notes: tuple[str, ...] = ()  # what the task asks for that has no effect there


def agreement(order: Order, *, exists: bool) -> str:
    """A digest of what a person agrees to: this order, to be created or reused."""
    return hashlib.sha256(msgspec.json.encode((exists, order))).hexdigest()[:32]


def check_agreed(request: LaunchRequest, order: Order, *, exists: bool) -> None:
    """Refuse to do something else than what was shown."""
    if request.agreed in (None, agreement(order, exists=exists)):
        return
    now = f"the existing cluster {request.options.cluster}, " if exists else ""
    raise UserError(
        f"the offer has changed since it was shown: it is now {now}{describe(order)}",
        "run the command again to see all offers",
        status=409,
        code="offer_changed",
    )
