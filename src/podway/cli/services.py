"""`podway services`: existing services and their replicas."""

import time
from collections.abc import Sequence

import click
import msgspec

from podway.cli.options import output_option
from podway.cli.tables import table
from podway.errors import UserError
from podway.quantities import format_ago
from podway.server.client import Client
from podway.server.service_api import ReplicaGroupView, ServiceView

HEADERS = ("NAME", "MODEL", "STATUS", "REPLICAS", "REVISION", "URL", "CREATED")
REPLICA_HEADERS = ("REPLICA", "REVISION", "STATUS", "INFRA", "RESOURCES", "ADDRESS", "CREATED", "REASON")
GROUP_HEADERS = ("GROUP", "STATUS", "REPLICAS", "ROUTER", "REASON")


@click.command(name="services")
@click.option("-v", "--verbose", is_flag=True, help="Also show each replica.")
@output_option
def command(verbose: bool, output: str) -> None:
    """Show services."""
    show(Client().services(), output, verbose=verbose)


def existing_services(client: Client) -> list[ServiceView]:
    """For commands about clusters that know services too: a server of an older Podway has none."""
    try:
        return client.services()
    except UserError as error:
        if error.status != 404:
            raise
        return []


def show(found: Sequence[ServiceView], output: str, *, verbose: bool) -> None:
    """As a table or as JSON."""
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    if not found:
        click.echo("No existing services.")
        return
    now = time.time()
    click.echo(
        table(
            HEADERS,
            [_row(one, now) for one in found],
            right=("REVISION",),
            drop=("CREATED", "MODEL", "REVISION", "URL"),
        )
    )
    for one in found if verbose else ():
        click.echo("")
        click.echo(replicas_page(one, now))


def _row(one: ServiceView, now: float) -> tuple[object, ...]:
    ready = sum(replica.state == "READY" for replica in one.replicas)
    revision = str(one.revision) if one.canary is None else f"{one.revision}, {one.canary} ({one.canary_share:.0%})"
    return (one.name, one.model, one.state, _count(ready, one), revision, one.url, format_ago(one.created, now))


def _count(ready: int, part: ServiceView | ReplicaGroupView) -> str:
    wanted = str(part.target_replicas)
    if part.min_replicas != part.max_replicas:
        wanted += f" ({part.min_replicas}..{part.max_replicas})"
    return f"{ready}/{wanted}"


def _groups_table(one: ServiceView) -> str:
    rows = [
        (group.name, group.state, _count(group.ready_replicas, group), group.router, group.reason or None)
        for group in one.groups
    ]
    return table(GROUP_HEADERS, rows, drop=("ROUTER",))


def replicas_page(one: ServiceView, now: float) -> str:
    """The replicas of a service, after its groups if it has any."""
    lines = [f"Service {one.name}: {one.reason}"] if one.reason else [f"Service {one.name}:"]
    lines += [_groups_table(one), ""] if one.groups else []
    rows = [
        (
            replica.number,
            *((replica.group,) if one.groups else ()),
            replica.revision,
            replica.state,
            replica.infra or None,
            replica.resources or None,
            replica.address,
            format_ago(replica.created, now),
            replica.reason or None,
        )
        for replica in one.replicas
    ]
    lines.append(
        table(
            (REPLICA_HEADERS[0], *(("GROUP",) if one.groups else ()), *REPLICA_HEADERS[1:]),
            rows,
            right=("REPLICA", "REVISION"),
            drop=("CREATED", "RESOURCES", "INFRA", "ADDRESS", "REVISION"),
        )
        if rows
        else "No replicas."
    )
    return "\n".join(lines)
