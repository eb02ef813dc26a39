"""Tells a cluster's head host its rest rule, and again and again that a server is there.

While it is told, the server enforces autostop. When it has not been told for a while, the head does it by itself, where the
provider has a way for it (`SupportsSelfTeardown`, hosts/agent/rest.py).
"""

import asyncio
import contextlib
import time
from typing import Any

import msgspec

from podway.control.fleet import HostSession
from podway.control.records import Cluster, ClusterState, shell_key
from podway.errors import ProviderError
from podway.providers import Provider, SupportsSelfTeardown

LEAST_SILENCE_S, MOST_SILENCE_S = 30.0, 600.0
IDLE_S = 30.0
TOLD_IN_SILENCE = 3  # so often within the silence that would count


class Heartbeat:
    """For one cluster; `beat` is cheap and called at every turn of its controller."""

    def __init__(self) -> None:
        self._told: dict[str, Any] | str | None = "nothing yet"  # another server may have told it a rule
        self._next = 0.0
        self._task: asyncio.Task[None] | None = None

    def beat(self, provider: Provider, cluster: Cluster) -> float:
        """Tell the head if it is time; how long the controller may rest."""
        if cluster.state is not ClusterState.UP or cluster.goal != "up" or not cluster.hosts:
            return IDLE_S
        rule, now = rest_rule(provider, cluster), time.monotonic()
        pause = silence(cluster) / TOLD_IN_SILENCE if rule is not None else IDLE_S
        if (rule != self._told or (rule is not None and now >= self._next)) and (
            self._task is None or self._task.done()
        ):
            self._told, self._next = rule, now + pause
            self._task = asyncio.create_task(_tell(provider, cluster, rule))
        return pause

    def close(self) -> None:
        """Nothing is told any more."""
        if self._task is not None:
            self._task.cancel()


def silence(cluster: Cluster) -> float:
    """A server counts as gone when it was not heard for as long as the cluster may idle, within reason."""
    idle = cluster.autostop.idle_minutes * 60 if cluster.autostop else MOST_SILENCE_S
    return min(MOST_SILENCE_S, max(LEAST_SILENCE_S, idle))


def rest_rule(provider: Provider, cluster: Cluster) -> dict[str, Any] | None:
    """What the head is told; None where there is no rule, or no way to follow it."""
    rest = cluster.autostop
    if rest is None or not isinstance(provider, SupportsSelfTeardown):
        return None
    way = provider.self_teardown(cluster.name, cluster.order, down=rest.down)
    if way is None:
        return None
    return {
        "idle_s": rest.idle_minutes * 60,
        "silence_s": silence(cluster),
        "shell": shell_key(cluster) if rest.wait_for == "jobs_and_ssh" else "",
        **msgspec.to_builtins(way),
    }


async def _tell(provider: Provider, cluster: Cluster, rule: dict[str, Any] | None) -> None:
    session = HostSession(provider, cluster.hosts[0])
    try:
        with contextlib.suppress(ProviderError):
            await session.call("idle_shutdown", policy=rule, patience=5.0)
    finally:
        session.link.close()
