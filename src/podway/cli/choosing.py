"""Clusters by name, by pattern (`exp-*`), or all of them; and doing one thing to each of them."""

import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import click

from podway.cli.error_lines import show_error
from podway.cli.screen import MORE, Screen
from podway.errors import UserError
from podway.server.api import ClusterView
from podway.server.client import Client

_POLL_S = (0.05, 0.5)  # soon at first, then seldom
_QUIET_S = 2.0  # nobody wants to know what they hardly wait for


class Selection(NamedTuple):
    """The clusters that were meant, in their own order, and a mistake for each pattern that matches none."""

    clusters: list[ClusterView]
    mistakes: list[UserError]


def select(clusters: Sequence[ClusterView], patterns: Sequence[str]) -> Selection:
    """Those whose name matches one of the patterns."""
    names = ", ".join(cluster.name for cluster in clusters[:8])
    hint = f"existing clusters: {names}" if names else "there are none; create one with: podway launch"
    mistakes = [
        UserError(f"there is no cluster {pattern!r}", hint)
        for pattern in patterns
        if not any(fnmatchcase(cluster.name, pattern) for cluster in clusters)
    ]
    found = [cluster for cluster in clusters if any(fnmatchcase(cluster.name, pattern) for pattern in patterns)]
    return Selection(found, mistakes)


def matching(clusters: Sequence[ClusterView], patterns: Sequence[str]) -> list[ClusterView]:
    """For commands that only show: a pattern that matches none ends them."""
    found = select(clusters, patterns)
    if found.mistakes:
        raise found.mistakes[0]
    return found.clusters


def chosen(client: Client, names: Sequence[str], *, every: bool) -> Selection:
    """The clusters a command is about; no names, or both names and --all, is a usage error. All wrong is an error."""
    if bool(names) == every:
        raise click.UsageError(
            "Give the names of clusters, or --all." if not names else "Give names or --all, not both."
        )
    clusters = client.clusters()
    found = Selection(clusters, []) if every else select(clusters, names)
    if not found.clusters:
        raise_all(found.mistakes)
    return found


def raise_all(failures: Sequence[UserError]) -> None:
    """The first is raised, the others are told before it; no error at all is fine."""
    for other in failures[1:]:
        show_error(other.what, other.hint)
    if failures:
        raise failures[0]


def for_each(
    chosen: Selection, act: Callable[[str], ClusterView], client: Client, goal: str, doing: str, done: str
) -> None:
    """Do it on all clusters at once, then wait until each is in the state `goal`. A failure does not stop the others."""
    failures = list(chosen.mistakes)
    asked: list[tuple[ClusterView, int]] = []
    for cluster in chosen.clusters:
        try:
            before = last_event(client, cluster.name)
            now = act(cluster.name)
            # Somebody asked for it before: why it has not been done yet is told once more.
            asked.append((now, error_before(client, cluster.name, before) if now.goal == cluster.goal else before))
        except UserError as error:
            failures.append(error)
    with Screen() as screen:
        for cluster, before in asked:
            screen.wait(f"{doing} {cluster.name}")
            try:
                until(client, cluster, goal, screen, doing, before)
                screen.done(f"Cluster {cluster.name} {done.format(name=cluster.name)}.")
            except UserError as error:
                failures.append(error)
    raise_all(failures)


def last_event(client: Client, name: str) -> int:
    """The id of the latest event of a cluster."""
    return max((event.id for event in client.events(name)), default=0)


def error_before(client: Client, name: str, last: int) -> int:
    """`last`, or where that event is an error, what comes before it."""
    latest = [event for event in client.events(name) if event.id == last]
    return last - 1 if latest and latest[0].kind == "error" else last


def until(client: Client, asked: ClusterView, goal: str, screen: Screen, doing: str, told: int) -> None:
    """Return when the cluster is in the state `goal`, or has been replaced by another.

    Of the events after `told`, errors are shown, and where it takes long what is waited for.
    """
    pause, most = _POLL_S
    quiet_until, under_way = time.monotonic() + _QUIET_S, list[str]()
    while True:
        cluster = client.cluster(asked.name)
        if cluster.id != asked.id or cluster.state == goal:
            return
        if cluster.state == "GONE" or cluster.goal != asked.goal:
            why = cluster.reason or "another command changed it"
            raise UserError(f"cluster {cluster.name} is {cluster.state}: {why}", f"see: podway status {cluster.name}")
        for event in client.events(asked.name, after=told):
            told = event.id
            if event.kind == "error" and event.job is None:
                screen.line(f"{MORE} {cluster.name}: {event.text} (retrying; after Ctrl-C the server goes on)")
            elif event.kind == "progress":
                under_way = [*(under_way if time.monotonic() > quiet_until else ()), event.text]
                screen.wait(f"{doing} {cluster.name}: {event.text}")
            elif event.detail.get("state") == "INIT":
                screen.line(
                    f"{MORE} {cluster.name} {event.text}" if event.text[:1].islower() else f"{MORE} {event.text}"
                )
        if time.monotonic() > quiet_until:
            while under_way:
                screen.line(f"{MORE} {cluster.name}: {under_way.pop(0)}")
        time.sleep(pause)
        pause = min(most, pause * 1.5)
