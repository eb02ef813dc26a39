"""The hosts of one cluster, reachable: a session for each, which keeps trying while a host may come back."""

import asyncio
import time
from typing import Any

from podway.control.records import Cluster, Exit
from podway.errors import ProviderError
from podway.hosts.bundle import bundle
from podway.hosts.link import AgentLink
from podway.order import Host
from podway.provider_table import row_of
from podway.providers import Provider

RETRY_S = 0.5
SKEW_S = 0.05  # clocks that agree so well are left alone
LOST_AFTER_S = 60.0  # an agent that cannot be reached for so long has lost its rank, if others can
ANSWER_S, ASKED = 5.0, 8
ALL_SILENT_S = 300.0  # no host can be reached: more likely it is our own network, for a while


class HostSession:
    """One host: its facts, and calls to its agent that outlive a restart of the agent."""

    def __init__(self, provider: Provider, host: Host) -> None:
        self.provider = provider
        self.host = host
        self.link = AgentLink(provider.connect(host), address=host.address)

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
                await self.provider.ensure_agent(self.host)
            except ProviderError:
                await asyncio.sleep(RETRY_S)

    async def ensure_agent(self) -> None:
        """Have an agent answer; an idle one of another version, which outlived an upgrade, is replaced."""
        if (await self.call("hello")).get("version") != bundle().sha256:
            await self.provider.ensure_agent(self.host)


class Fleet:
    """All hosts of a cluster, in rank order."""

    def __init__(self, provider: Provider, cluster: Cluster, cache_dir: str = "") -> None:
        self.provider = provider
        self.row = row_of(provider.name)
        self.cluster = cluster.name
        self.hosts = cluster.hosts
        self.sessions = [HostSession(provider, host) for host in cluster.hosts]
        self.cache_dir = cache_dir
        self.silent: dict[int, float] = {}  # rank -> since when its agent does not answer
        self.given_up: set[int] = set()  # ranks that did not answer and are not waited for: the cluster is going

    def answering(self) -> list[HostSession]:
        """The sessions with hosts that are not given up."""
        return [session for session in self.sessions if session.host.rank not in self.given_up]

    async def ensure_agents(self) -> tuple[int, ...]:
        """Every host's agent runs and answers; by rank, what is to be added to its clock (ms) to agree with ours."""

        async def ensured(session: HostSession) -> int:
            await session.ensure_agent()
            return await _skew_ms(session)

        return tuple(await asyncio.gather(*(ensured(session) for session in self.sessions)))

    async def is_lost(self, rank: int, since: float) -> bool:
        """Whether the silence of a host means that it is gone, and not that we are cut off. `since`: when it was asked in vain."""
        since = self.silent.setdefault(rank, since)
        try:
            seen = await self.provider.observe(self.cluster)
        except ProviderError:
            return False
        if seen.condition != "ready":
            return True
        silent_s = time.monotonic() - since
        if silent_s < LOST_AFTER_S:
            await asyncio.sleep(RETRY_S)  # it refused at once, and may do so again
            return False
        if await self._other_answers(rank):  # and now this one? The way to all of them may have come back just now
            return not await self._answers(self.sessions[rank])
        return silent_s > ALL_SILENT_S

    async def _answers(self, session: HostSession) -> bool:
        try:
            await session.call("hello", patience=ANSWER_S)
        except ProviderError:
            return False
        return True

    async def _other_answers(self, rank: int) -> bool:
        """Whether any other host is heard now; a few are enough to tell."""
        others = [
            session for session in self.sessions if session.host.rank != rank and session.host.rank not in self.silent
        ]
        asked = [session.link.call("hello", timeout=ANSWER_S) for session in others[:ASKED]]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return any(not isinstance(answer, BaseException) for answer in answers)

    async def any_lost(self, job: str = "", phase: str = "") -> bool:
        """Whether a job may have failed because a host is gone: its peers often notice before the cloud or we do. With the agents' name
        of the job, for one that can recover, a host that answers again, but has lost its part of the job, counts too."""
        try:
            seen = await self.provider.observe(self.cluster)
        except ProviderError:
            return False
        if seen.condition != "ready":
            return True
        # An agent that has just been brought back takes a moment to clean up, and says "running" until then.
        question: dict[str, Any] = {"job": job, "phase": phase, "wait": 3.0} if job else {}
        asked = (session.call("status" if job else "hello", patience=10.0, **question) for session in self.sessions)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return any(
            isinstance(one, ProviderError) or (isinstance(one, dict) and one.get("state") == "lost") for one in answers
        )

    def close(self) -> None:
        """Drop the connections; the agents go on."""
        for session in self.sessions:
            session.link.close()


async def _skew_ms(session: HostSession) -> int:
    """How far a host's clock is behind ours, as far as the time the question takes lets us know."""
    asked = time.time()
    then = float((await session.call("hello")).get("time") or asked)
    took = time.time() - asked
    skew = asked + took / 2 - then
    return round(skew * 1000) if abs(skew) > max(SKEW_S, took) else 0


def read_exit(rank: int, reply: dict[str, Any]) -> Exit:
    """How a rank's phase ended, as its agent answers to `status`."""
    return Exit(
        rank=rank,
        code=reply.get("code"),
        signal=reply.get("signal"),
        lost=reply["state"] == "lost",
        pid=reply.get("pid"),
        cpu_s=float(reply.get("cpu_s") or 0.0),
        max_rss=int(reply.get("max_rss") or 0),
    )
