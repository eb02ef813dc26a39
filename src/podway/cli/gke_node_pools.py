"""`podway gke node-pool`: node pools of TPU slices in a GKE cluster, made, listed and deleted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from podway.cli.confirmation import proceed_asked
from podway.cli.options import CommandGroup, output_option, yes_option
from podway.cli.screen import Screen
from podway.cli.tables import table
from podway.errors import UserError
from podway.extras import require
from podway.home import home
from podway.quantities import format_count

if TYPE_CHECKING:
    from podway.providers.gke.container_api import ContainerApi
    from podway.providers.gke.node_pools import NodePoolView

HEADERS = ("NAME", "TYPE", "TOPOLOGY", "NODES", "CAPACITY", "STATUS", "CLUSTER", "OWNER")
MOST_POOLS = 256


def cluster_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Which GKE cluster."""
    return click.option(
        "--cluster",
        help="projects/PROJECT/locations/LOCATION/clusters/NAME, or a context of KUBECONFIG.  [default: the current context]",
    )(function)


@click.group(name="node-pool", cls=CommandGroup)
def node_pool() -> None:
    """Make, list and delete node pools of TPU slices in a GKE cluster."""


@node_pool.command()
@click.argument("type")
@click.option("--topology", help="Of the slice, where its type has several, such as 2x4.")
@click.option(
    "--count",
    type=click.IntRange(1, MOST_POOLS),
    metavar="N",
    default=1,
    show_default=True,
    help="Number of slices: each is a node pool of its own.",
)
@click.option("--name", help="The pools are called NAME-0, NAME-1 and so on.  [default: podway-TYPE]")
@click.option("--spot", is_flag=True, help="Spot capacity.")
@click.option("--reservation", help="Capacity of this reservation.")
@click.option("--flex-start", is_flag=True, help="Flex start: nodes come when a pod waits for them, and go again.")
@click.option("--queued", is_flag=True, help="Flex start by queued provisioning: all nodes of a slice come at once.")
@click.option("--placement-policy", metavar="POLICY", help="A workload policy, which tpu7x slices need.")
@click.option("--zone", help="Of the nodes, in a cluster of a region.")
@click.option("--service-account", metavar="ACCOUNT", help="Of the nodes.")
@click.option("-d", "--detach", is_flag=True, help="Return once the pools are requested.")
@click.option("--dryrun", is_flag=True, help="Print what would be sent as JSON, and change nothing.")
@cluster_option
@yes_option
def create(
    type: str, count: int, name: str | None, detach: bool, dryrun: bool, cluster: str | None, yes: bool, **asked: Any
) -> None:
    """Make node pools for slices of TYPE, such as v6e-16.

    One pool is one slice. Pools carry Podway's labels; a pool that cannot be made is deleted again.
    """
    from podway.providers.gke.clusters import Clusters
    from podway.providers.gke.node_pools import NodePoolOrder, free_names, slice_of
    from podway.providers.gke.node_pools import node_pool as render

    order = NodePoolOrder(accelerator_type=type, **asked)
    tpu, tier = slice_of(order), order.tier
    stem, owner = name or f"podway-{tpu.accelerator_type}", Clusters(home()).owner
    if dryrun:
        bodies = [render(one, owner, order) for one in free_names(stem, count, set())]
        sys.stdout.write(json.dumps(bodies, indent=2) + "\n")
        return
    api, where = _open(), _cluster(cluster)
    bodies = [render(one, owner, order) for one in free_names(stem, count, api.taken(where))]
    names = [body["name"] for body in bodies]
    size = f"{format_count(tpu.hosts, 'node')} of {tpu.gke_machine_type} each, {tier}"
    proceed_asked(f"Making {', '.join(names)} ({tpu.accelerator_type}, {size}) in {where}.", yes=yes)
    with Screen() as screen:
        begun = [(one["name"], api.create(where, one, screen.wait)) for one in bodies]
        for pool, operation in begun:
            if detach:
                screen.done(f"Node pool {pool} is requested; see: podway gke node-pool list")
                continue
            screen.wait(f"Making node pool {pool}")
            api.wait_made(where, pool, operation, screen.wait)
            screen.done(f"Node pool {pool} is there.")


@node_pool.command(name="list")
@cluster_option
@output_option
def list_pools(cluster: str | None, output: str) -> None:
    """Show the node pools that Podway made.

    Those of the current context's cluster, and of every other cluster in which this Podway made one.
    """
    api = _open()
    found = _pools(api, _clusters(api, cluster))
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    elif not found:
        click.echo("No node pools of Podway's.")
    else:
        rows = [
            (
                one.name,
                one.accelerator_type,
                one.topology or "-",
                one.nodes,
                one.tier,
                one.status,
                one.cluster,
                one.owner,
            )
            for one in found
        ]
        click.echo(table(HEADERS, rows, drop=("OWNER", "CLUSTER", "TOPOLOGY")))


@node_pool.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("-d", "--detach", is_flag=True, help="Return once the deletion has begun.")
@cluster_option
@yes_option
def delete(names: tuple[str, ...], detach: bool, cluster: str | None, yes: bool) -> None:
    """Delete node pools that Podway made, with their nodes and whatever runs there."""
    api = _open()
    known: dict[str, list[NodePoolView]] = {}
    for one in _pools(api, _clusters(api, cluster)):
        known.setdefault(one.name, []).append(one)
    chosen = [_chosen(name, known) for name in dict.fromkeys(names)]
    proceed_asked(
        f"Deleting {format_count(len(chosen), 'node pool')} and whatever runs there: {', '.join(one.name for one in chosen)}.",
        yes=yes,
    )
    with Screen() as screen:
        begun = [(one, api.delete(one.cluster, one.name, screen.wait)) for one in chosen if one.status != "STOPPING"]
        for one, operation in begun:
            if operation is not None and not detach:
                screen.wait(f"Deleting node pool {one.name}")
                api.wait_gone(one.cluster, one.name, operation)
            screen.done(f"Node pool {one.name} is {'being deleted' if detach and operation else 'deleted'}.")


def _open() -> ContainerApi:
    require("gke", "podway gke node-pool")
    from podway.providers.gke.container_api import ContainerApi

    return ContainerApi(home())


def _cluster(named: str | None) -> str:
    from podway.providers.gke.kubeconfig import find_context
    from podway.providers.gke.node_pools import cluster_of

    return cluster_of(named or find_context(None).name)


def _clusters(api: ContainerApi, named: str | None) -> list[str]:
    """The one that is named; else those that have pools of ours, and the current context's where it is on GKE."""
    if named:
        return [_cluster(named)]
    found = [record.cluster for record in api.records.all()]
    try:
        found.append(_cluster(None))
    except UserError:
        if not found:
            raise
    return sorted(set(found))


def _pools(api: ContainerApi, clusters: list[str]) -> list[NodePoolView]:
    found = []
    for cluster in clusters:
        pools = api.pools(cluster)
        api.forget_absent(cluster, {one.name for one in pools})
        found += pools
    return found


def _chosen(name: str, known: dict[str, list[NodePoolView]]) -> NodePoolView:
    fitting = known.get(name, [])
    if not fitting:
        there = f"use one of: {', '.join(sorted(known)[:10])}" if known else "see: podway gke node-pool list"
        raise UserError(f"Podway made no node pool {name}", there)
    if len(fitting) > 1:
        raise UserError(f"several clusters have a node pool {name}", "name one of them: --cluster CLUSTER")
    return fitting[0]
