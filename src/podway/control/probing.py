"""Asks one replica, again and again, whether it answers: by its host's agent, so that every kind of host is asked the same way.

Each probe of the service runs at its own interval, sooner while the replica starts. A service without probes is asked for a
connection to its port. What the probes have come to is `summary`; `changed` is called when that is another.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from podway.control.fleet import HostSession
from podway.control.replica_states import ProbeSummary
from podway.errors import ProviderError
from podway.task.environment import fill_secrets
from podway.task.task import Probe

log = logging.getLogger("podway.services")
STARTING_S = 1.0  # between probes of a replica that has not answered yet
MARGIN_S = 15.0  # beyond a probe's own limit, for the way to its host


def with_secrets(probes: tuple[Probe, ...], secrets: Mapping[str, str]) -> tuple[Probe, ...]:
    """The probes of a service as they are sent: its file's secrets stand in headers and SkyPilot's JSON bodies by name."""
    return tuple(
        msgspec.structs.replace(
            one,
            headers={name: fill_secrets(value, secrets) for name, value in one.headers.items()},
            body=None if one.body is None else fill_secrets(one.body, secrets, _in_json),
        )
        for one in probes
    )


def _in_json(value: str) -> str:
    return msgspec.json.encode(value).decode()[1:-1]


class _ProbeRun(msgspec.Struct):
    """One probe and how it went lately."""

    probe: Probe | None
    passes: int = 0
    failures: int = 0
    refused: bool = False
    error: str = ""


class Prober:
    """The probes of one replica, until `close`."""

    def __init__(
        self,
        session: HostSession,
        probes: tuple[Probe, ...],
        *,
        address: str,
        port: int,
        was_ready: bool,
        changed: Callable[[], None],
    ) -> None:
        self._session = session
        self._address, self._port = address, port
        self._changed = changed
        self._runs = [_ProbeRun(probe=one) for one in probes] or [_ProbeRun(probe=None)]
        self._ready = was_ready  # before this server looked after it: it keeps its traffic until a probe fails
        self._tasks = [asyncio.create_task(self._keep(run)) for run in self._runs]

    @property
    def summary(self) -> ProbeSummary:
        """All probes together; the one that fails longest speaks for them."""
        passing = all(run.failures == 0 and run.passes >= _ready_after(run) for run in self._runs)
        worst = max(self._runs, key=lambda run: run.failures)
        return ProbeSummary(passing=passing, failures=worst.failures, refused=worst.refused, error=worst.error)

    async def _keep(self, run: _ProbeRun) -> None:
        while True:
            before = self.summary
            try:
                await self._once(run)
            except Exception:
                log.exception("probing port %s of %s", self._port, self._address)
            after = self.summary
            self._ready = self._ready or after.passing
            if after != before:
                self._changed()
            probe = run.probe or Probe()
            if probe.until_ready and run.failures == 0 and run.passes >= probe.ready_after:
                return
            await asyncio.sleep(probe.interval_s if self._ready else min(STARTING_S, probe.interval_s))

    async def _once(self, run: _ProbeRun) -> None:
        probe = run.probe
        request: dict[str, Any] = {"address": self._address, "port": self._port, "limit_s": 5.0}
        if probe is not None:
            request |= {"path": probe.path, "method": probe.method, "headers": probe.headers, "content": probe.body}
            request["limit_s"] = probe.timeout_s
        try:
            async with asyncio.timeout(request["limit_s"] + MARGIN_S):
                answer = await self._session.call("probe", patience=0.0, **request)
        except (ProviderError, TimeoutError) as error:
            answer = {"error": f"its host cannot be asked: {error or 'no answer'}", "refused": False}
        status = answer.get("status")
        if status is not None and (probe is None or 200 <= int(status) < 300):
            run.passes, run.failures, run.refused, run.error = run.passes + 1, 0, False, ""
            return
        told = str(answer.get("error") or f"{probe.path if probe else ''} answered {status}")
        run.passes, run.failures = 0, run.failures + 1
        run.refused, run.error = bool(answer.get("refused")), told[:300]

    def close(self) -> None:
        """Stop asking."""
        for task in self._tasks:
            task.cancel()
        self._session.link.close()


def _ready_after(run: _ProbeRun) -> int:
    return run.probe.ready_after if run.probe is not None else 1
