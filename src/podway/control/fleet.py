"""The hosts of one cluster, reachable: a session for each, which keeps trying while a host may come back."""

import asyncio
import time
from typing import Any

from podway.control.records import Cluster
from podway.errors import ProviderError
from podway.hosts.link import AgentLink
from podway.order import Host
from podway.providers import Provider

RETRY_S = 0.5


class HostSession:
    """One host: its facts, and calls to its agent that outlive a restart of the agent."""

    def __init__(self, provider: Provider, host: Host) -> None:
        self.provider = provider
        self.host = host
        self.link = AgentLink(provider.opener(host), address=host.address)

    async def call(self, op: str, *, body: bytes = b"", patience: float = 10.0, **fields: Any) -> dict[str, Any]:
        """Call the agent; when it is gone, have the provider bring it back, for as long as `patience`."""
        deadline = time.monotonic() + patience
        while True:
            try:
                timeout = 30.0 + float(fields.get("wait", 0.0))
                return (await self.link.call(op, body=body, timeout=timeout, **fields)).fields
            except ProviderError as error:
                if not error.transient or time.monotonic() >= deadline:
                    raise
            try:
                await self.provider.reach(self.host)
            except ProviderError:
                await asyncio.sleep(RETRY_S)


class Fleet:
    """All hosts of a cluster, in rank order."""

    def __init__(self, provider: Provider, cluster: Cluster, cache_dir: str = "") -> None:
        self.provider = provider
        self.hosts = cluster.hosts
        self.sessions = [HostSession(provider, host) for host in cluster.hosts]
        self.cache_dir = cache_dir

    async def reach(self) -> None:
        """Every host's agent runs and answers."""
        await asyncio.gather(*(session.call("hello") for session in self.sessions))

    def close(self) -> None:
        """Drop the connections; the agents go on."""
        for session in self.sessions:
            session.link.close()
