"""`podway gke`: prepare a Kubernetes cluster for TPU tasks, and make node pools there (gke_node_pools.py)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from podway.cli.confirmation import proceed_asked
from podway.cli.gke_node_pools import node_pool
from podway.cli.options import CommandGroup, yes_option
from podway.cli.screen import Screen
from podway.home import home
from podway.quantities import format_count

if TYPE_CHECKING:
    from podway.providers.gke.prepare.changes import Part, Preparation

MOST_DIFF = 40  # lines of one object


@click.group(name="gke", cls=CommandGroup)
def command() -> None:
    """Prepare a Kubernetes cluster for TPU tasks, and make node pools there."""


command.add_command(node_pool)


@command.command()
@click.option("--context", help="A context of KUBECONFIG.  [default: the current one]")
@click.option(
    "--from",
    "files",
    multiple=True,
    metavar="FILE",
    type=click.Path(),
    help="Install JobSet or Kueue from this manifests.yaml instead of downloading it; may be repeated.",
)
@click.option(
    "--quota",
    "quotas",
    multiple=True,
    metavar="TYPE=CHIPS",
    help="Quota of a slice type, such as v6e-16=64; may be repeated.  [default: the chips of the nodes that are there]",
)
@click.option("--kueue/--no-kueue", default=True, help="Whether to install Kueue and make queues.  [default: kueue]")
@click.option("--dryrun", is_flag=True, help="Print the objects as YAML on stdout, and change nothing.")
@yes_option
def prepare(
    context: str | None, files: tuple[str, ...], quotas: tuple[str, ...], kueue: bool, dryrun: bool, yes: bool
) -> None:
    """Install what TPU tasks need in a cluster, after showing it.

    JobSet and Kueue, a queue with the chips of the cluster's TPU nodes as its quota, priority classes, and an account with the least
    rights. What others installed is left as it is; a second run finds nothing to do.
    """
    from podway.providers.gke.api import KubernetesApi
    from podway.providers.gke.kubeconfig import find_context
    from podway.providers.gke.prepare.changes import PrepareOptions, check_rights, find_changes
    from podway.providers.gke.settings import read_settings

    settings, found = read_settings(home()), find_context(context)
    api = KubernetesApi(found)
    namespace = settings.namespace or found.namespace
    with Screen(err=dryrun) as screen:
        screen.wait(f"Looking at the cluster of context {found.name}")
        options = PrepareOptions(files=files, quotas=quotas, kueue=kueue)
        preparation = find_changes(api, settings, namespace, options)
        screen.wait("")
        _show(screen, preparation)
        if dryrun:
            _print(preparation)
            return
        if not preparation.changes:
            screen.line(f"Nothing to do: the cluster of context {found.name} is prepared.")
            return
        check_rights(api, preparation.changes)
    proceed_asked(
        f"{format_count(len(preparation.changes), 'change')} to the cluster of context {found.name}.", yes=yes
    )
    with Screen() as screen:
        _apply(screen, api, preparation)
        screen.done(f"The cluster of context {found.name} is prepared.")
        if kueue and settings.queue is None and any(one.title == "LocalQueue podway" for one in preparation.changes):
            screen.line(f"To have launches wait in the queue, add to {home() / 'gke.yaml'}:\n  queue: podway")


def _show(screen: Screen, preparation: Preparation) -> None:
    for note in preparation.notes:
        screen.line(f"· {note}")
    for part in preparation.parts:
        screen.line(part.title)
        for line in _released(part) if part.release else _listed(screen, part):
            screen.line(f"  {line}")


def _released(part: Part) -> list[str]:
    """A release has a hundred objects: their kinds are counted, and --dryrun prints them."""
    counts: dict[str, int] = {}
    for change in part.changes[:-1]:
        counts[change.body["kind"]] = counts.get(change.body["kind"], 0) + 1
    words = [f"{count} {kind}" for kind, count in counts.items()]
    return [f"+ {', '.join(words)}"] if words else ["+ wait for its controller"]


def _listed(screen: Screen, part: Part) -> list[str]:
    lines = []
    for change in part.changes:
        mark = screen.paint("+", "green") if change.action == "create" else screen.paint("~", "yellow")
        lines.append(f"{mark} {change.title}")
        lines += [f"    {line}" for line in change.diff[:MOST_DIFF]]
        if len(change.diff) > MOST_DIFF:
            lines.append(f"    … {len(change.diff) - MOST_DIFF} more lines")
    return lines


def _print(preparation: Preparation) -> None:
    from podway.cli.manifests import objects_as_yaml

    sys.stdout.write(objects_as_yaml([change.body for change in preparation.changes]))


def _apply(screen: Screen, api: object, preparation: Preparation) -> None:
    from podway.providers.gke.api import KubernetesApi
    from podway.providers.gke.prepare.applying import apply_part

    assert isinstance(api, KubernetesApi)
    for part in preparation.parts:
        screen.step(part.title)
        for change in apply_part(api, part):
            screen.wait(f"{change.title}: applied; {_next(part)}")
        screen.wait("")


def _next(part: Part) -> str:
    return f"waiting for the controller of {part.release.name}" if part.release else "applying"
