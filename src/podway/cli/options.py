"""Options and arguments that several verbs share, each declared once."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def _complete_clusters(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    from podway.cli.completing import cluster_names  # a shell's TAB needs it, the command itself does not

    return cluster_names(ctx, parameter, typed)


def cluster_argument(function: F) -> F:
    """One cluster, by its name."""
    return click.argument("cluster", shell_complete=_complete_clusters)(function)


def cluster_names_argument(function: F) -> F:
    """Any number of clusters, by name or pattern."""
    return click.argument("names", nargs=-1, metavar="[CLUSTER]...", shell_complete=_complete_clusters)(function)


def every_option(function: F) -> F:
    """All clusters instead of names."""
    return click.option("-a", "--all", "every", is_flag=True, help="All clusters.")(function)


def yes_option(function: F) -> F:
    """No question."""
    return click.option("-y", "--yes", is_flag=True, help="Do not ask.")(function)


def output_option(function: F) -> F:
    """For people or for programs."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="json: one document on stdout, and everything else on stderr.",
    )(function)


def cluster_option(function: F) -> F:
    """The cluster to make or to use."""
    return click.option(
        "-c",
        "--cluster",
        shell_complete=_complete_clusters,
        help="Name of the cluster; without it, a new name is made up.",
    )(function)
