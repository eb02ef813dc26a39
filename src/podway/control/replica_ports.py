"""Which port a replica listens on, at which address of its host it is asked whether it answers, and where it is best made.

Simulated hosts share one machine's ports. A replica there gets a network of its own where the machine allows that (root); else two
replicas with one fixed port cannot be there at once, and a program that listens on $PODWAY_PORT gets a free one.
"""

import errno
import socket
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from podway.control.choosing import Choice
from podway.control.service_records import Revision
from podway.errors import UserError
from podway.order import Host, Order
from podway.provider_table import row_of
from podway.providers import Provider, SupportsOwnNetwork

DEARER = 1.1  # another zone may cost so much more for the sake of spreading replicas


def port_of(revision: Revision, providers: Iterable[Provider]) -> int:
    """The port of the file; a free one where replicas share a machine's ports and the program lets us choose."""
    port = revision.spec.port
    refusals = [each.refuse_own_network() for each in providers if isinstance(each, SupportsOwnNetwork)]
    if not refusals or refusals[0] is None:
        return port
    if "PODWAY_PORT" in revision.task.run + revision.task.setup:
        return _free_port()
    if _is_taken(port):
        raise UserError(
            f"port {port} is in use on this machine, whose ports all simulated replicas share ({refusals[0]})",
            "let the program listen on $PODWAY_PORT, or run the server as root",
        )
    return port


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def _is_taken(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def probe_address(provider: str, host: Host) -> str:
    """On a host of its own a program may listen on loopback; a simulated one is reached at its own address."""
    return host.address if row_of(provider).simulated else "127.0.0.1"


def spread(choice: Choice, provider: Callable[[str], Provider], zones: Iterable[str | None]) -> Choice:
    """The same candidates, in networks of their own where they can, and those first whose zone has the fewest replicas."""
    there = Counter(zones)

    def own(order: Order) -> Order:
        each = provider(order.provider)
        able = isinstance(each, SupportsOwnNetwork) and each.refuse_own_network() is None
        return msgspec.structs.replace(order, own_network=True) if able else order

    best = tuple(own(order) for order in choice.best)
    first = best[0]

    def like_first(order: Order) -> bool:
        same = (order.provider, order.accelerator_type, order.spot) == (
            first.provider,
            first.accelerator_type,
            first.spot,
        )
        if order.hourly_cost is None or first.hourly_cost is None:
            return same and order.hourly_cost == first.hourly_cost
        return same and order.hourly_cost <= first.hourly_cost * DEARER

    equal = [order for order in best if like_first(order)]
    rest = [order for order in best if not like_first(order)]
    return msgspec.structs.replace(
        choice,
        candidates=tuple(tuple(own(order) for order in group) for group in choice.candidates),
        best=(*sorted(equal, key=lambda order: there[order.zone]), *rest),
    )
