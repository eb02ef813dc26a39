"""Ending a job on all hosts: SIGTERM, the grace, SIGKILL, until every agent says that nothing of it is left.

A host that does not answer is waited for as long as it may come back (LOST_AFTER_S): its chips must be free before the next job.
Where the cluster itself is going, nobody waits for that: after SILENT_S such a host is given up, since the cloud that deletes it is
what ends the job there. Who waits is told which hosts do not answer.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from podway import crash
from podway.control.fleet import LOST_AFTER_S, Fleet, HostSession
from podway.errors import ProviderError
from podway.hosts.logs.text import host_name

WAIT_S = 2.0  # one call; a host that answers does so at least this often
SILENT_S = 8.0  # without an answer, from a host that is to be deleted
TELL_S = 2.0
LOOK_S = 0.5


async def stop_job(
    fleet: Fleet,
    agent_job_id: str,
    grace_s: float,
    *,
    is_going: Callable[[], Awaitable[bool]],
    tell: Callable[[str], Awaitable[None]],
) -> None:
    """Returns when nothing of the job is left on any host that answers; what does not is in `fleet.given_up`."""
    began = time.monotonic()
    heard = dict.fromkeys(range(len(fleet.sessions)), began)

    async def stop(rank: int, session: HostSession) -> None:
        while True:
            try:
                reply = await session.call(
                    "cancel", job=agent_job_id, grace=grace_s, wait=WAIT_S, patience=LOST_AFTER_S
                )
            except ProviderError:
                return  # nothing answers there; the provider's destroy is what ends it
            heard[rank] = time.monotonic()
            if reply.get("gone"):
                return

    stops = {rank: asyncio.create_task(stop(rank, session)) for rank, session in enumerate(fleet.sessions)}
    await asyncio.sleep(0)
    crash.point("job.cancel-sent")
    told: set[int] = set()
    try:
        while pending := {rank: task for rank, task in stops.items() if not task.done()}:
            await asyncio.wait(pending.values(), timeout=LOOK_S)
            now = time.monotonic()
            silent = {rank for rank, task in stops.items() if not task.done() and now - heard[rank] > WAIT_S + TELL_S}
            if not silent or not await is_going():
                continue
            if silent - told:
                told |= silent
                await tell(f"Waiting for {_names(fleet, silent)}, up to {SILENT_S:g} s: no answer")
            for rank in silent:
                if now - heard[rank] > SILENT_S:
                    fleet.given_up.add(rank)
                    stops[rank].cancel()
    finally:
        for task in stops.values():
            task.cancel()
        await asyncio.gather(*stops.values(), return_exceptions=True)
    if fleet.given_up:
        await tell(f"Not waiting for {_names(fleet, fleet.given_up)} any longer: no answer")


def _names(fleet: Fleet, ranks: set[int]) -> str:
    """`worker2 (10.0.0.3)`; of many, a few."""
    chosen = sorted(ranks)
    named = [f"{host_name(rank)} ({fleet.hosts[rank].address})" for rank in chosen[:3]]
    return ", ".join(named) + (f" and {len(chosen) - 3} more" if len(chosen) > 3 else "")
