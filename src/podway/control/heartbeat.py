"""Tells a cluster's head host its idle-shutdown policy, and again and again that a server is there.

While it is told, the server enforces autostop. When it has not been told for a while, the head does it by itself, where the
provider has a way for it (`SupportsSelfTeardown`, hosts/agent/idle_shutdown.py).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from podway.control.fleet import HostSession
from podway.control.records import Cluster, ClusterState, shell_key
from podway.errors import ProviderError
from podway.providers import Provider, SupportsSelfTeardown
from podway.task.task import Autostop

LEAST_SILENCE_S, MOST_SILENCE_S = 30.0, 600.0
IDLE_S = 30.0
RETRY_S = 2.0  # until the head has confirmed
SENT_IN_SILENCE = 3  # so often within the silence that would count


class Heartbeat:
    """For one cluster; `beat` is cheap and called at every turn of its controller. `confirmed` is told what the head has."""

    def __init__(self, confirmed: Callable[[Autostop | None], Awaitable[None]]) -> None:
        self._confirmed = confirmed
        self._sent: dict[str, Any] | str | None = "nothing yet"  # another server may have sent a policy
        self._next = 0.0
        self._task: asyncio.Task[None] | None = None

    def beat(self, provider: Provider, cluster: Cluster) -> float:
        """Tell the head if it is time; how long the controller may sleep."""
        if cluster.state is not ClusterState.UP or cluster.goal != "up" or not cluster.hosts:
            return IDLE_S
        policy, now = shutdown_policy(provider, cluster), time.monotonic()
        pause = silence(cluster) / SENT_IN_SILENCE if policy is not None else IDLE_S
        unconfirmed = policy is not None and not cluster.autostop_armed
        due = policy != self._sent or (policy is not None and now >= self._next)
        if due and (self._task is None or self._task.done()):
            self._next = now + pause
            self._task = asyncio.create_task(self._tell(provider, cluster, policy))
        return RETRY_S if unconfirmed else pause

    async def _tell(self, provider: Provider, cluster: Cluster, policy: dict[str, Any] | None) -> None:
        if await _send(provider, cluster, policy):
            self._sent = policy
            await self._confirmed(cluster.autostop if policy is not None else None)

    def close(self) -> None:
        """Nothing is told any more."""
        if self._task is not None:
            self._task.cancel()


def silence(cluster: Cluster) -> float:
    """A server counts as gone when it was not heard for as long as the cluster may idle, within reason."""
    idle = cluster.autostop.idle_minutes * 60 if cluster.autostop else MOST_SILENCE_S
    return min(MOST_SILENCE_S, max(LEAST_SILENCE_S, idle))


def shutdown_policy(provider: Provider, cluster: Cluster) -> dict[str, Any] | None:
    """What the head is told; None where there is no policy, or no way to follow it."""
    autostop = cluster.autostop
    if autostop is None or not isinstance(provider, SupportsSelfTeardown):
        return None
    way = provider.self_teardown(cluster.name, cluster.order, down=autostop.down)
    if way is None:
        return None
    return {
        "idle_s": autostop.idle_minutes * 60,
        "silence_s": silence(cluster),
        "shell": shell_key(cluster) if autostop.wait_for == "jobs_and_ssh" else "",
        **msgspec.to_builtins(way),
    }


async def _send(provider: Provider, cluster: Cluster, policy: dict[str, Any] | None) -> bool:
    """Whether the head host has it."""
    session = HostSession(provider, cluster.hosts[0])
    try:
        await session.call("idle_shutdown", policy=policy, patience=5.0)
        return True
    except ProviderError:
        return False
    finally:
        session.link.close()
