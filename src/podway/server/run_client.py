"""The methods of `Client` that are about training runs and costs: what the page shows of them, for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from podway.server.connection import ServerConnection
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
        from podway.server.page_api import MetricsFrame

        def where() -> str:
            found = query({"follow": "" if follow else "false", "cursor": cursor})
            return f"{_at(cluster)}/jobs/{job}/metrics?{found}"

        for frame in self._connection.frames(where, MetricsFrame, once=not follow):
            cursor = frame.cursor or cursor
            if frame.steps or frame.profile or frame.devices or frame.ended:
                yield frame
            if frame.ended:
                return

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
