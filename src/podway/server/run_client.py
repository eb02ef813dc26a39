"""The methods of `Client` that are about training runs and costs: what the page shows of them, for programs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from podway.errors import UserError
from podway.server.connection import RECONNECT_S, ClientClosed, NoServer, ServerConnection
from podway.server.urls import query, quote

if TYPE_CHECKING:
    from podway.server import page_api


class RunCalls:
    """A base of `Client`: see there."""

    _connection: ServerConnection

    def runs(self, past: float | None = None) -> list[page_api.RunView]:
        """Jobs that train, the latest first; with `past`, also those of deleted clusters created since then."""
        from podway.server.page_api import RunsReply  # few commands need it

        return self._connection.call("GET", f"/v1/runs?{query({'past': past})}", RunsReply).runs

    def metrics(
        self, cluster: str, job: int, *, follow: bool = True, cursor: str = ""
    ) -> Iterator[page_api.MetricsFrame]:
        """A training run's steps as they come, to its end, across restarts of the server; `cursor`: of an earlier frame, to go on."""
        from podway.decoding import json_decoder
        from podway.server.page_api import MetricsFrame

        decoder, path = json_decoder(MetricsFrame), f"{_at(cluster)}/jobs/{job}/metrics"
        broken_since: float | None = None
        while True:
            found = query({"follow": "" if follow else "false", "cursor": cursor})
            try:
                with self._connection.opened("GET", f"{path}?{found}") as response:
                    while line := response.readline():
                        broken_since, frame = None, decoder.decode(line)
                        cursor = frame.cursor or cursor
                        if frame.steps or frame.profile or frame.devices or frame.ended:
                            yield frame
                        if frame.ended:
                            return
                if not follow:
                    return
            except ClientClosed:
                return
            except (OSError, msgspec.DecodeError, NoServer) as error:
                broken_since = broken_since or time.monotonic()
                if time.monotonic() - broken_since > RECONNECT_S:
                    raise UserError(f"the Podway server does not answer: {error}", "run the command again") from None
            time.sleep(0.2)

    def planned(self, cluster: str, job: int) -> page_api.PlannedReply:
        """What the planner says of the step that a job trains."""
        from podway.server.page_api import PlannedReply

        return self._connection.call("GET", f"{_at(cluster)}/jobs/{job}/planned", PlannedReply)

    def costs(self, past: float | None = None) -> page_api.CostsReply:
        """What clusters cost, and what of it idled; with `past`, also those deleted since then."""
        from podway.server.page_api import CostsReply

        return self._connection.call("GET", f"/v1/costs?{query({'past': past})}", CostsReply)


def _at(cluster: str) -> str:
    return f"/v1/clusters/{quote(cluster)}"
