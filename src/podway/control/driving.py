"""Everything that one server drives: clusters and services, each kind by a `Reconciler`, and the verbs that wake them."""

import asyncio
from collections.abc import Callable

from podway.control.controller import Controller, Parts
from podway.control.job_groups import GroupControl
from podway.control.pool_driver import PoolDriver
from podway.control.pools import PoolControl
from podway.control.reconcile import Reconciler
from podway.control.schedules import Person, ScheduleControl
from podway.control.service_controller import ServiceController
from podway.control.service_store import ROUTES
from podway.control.service_verbs import ServiceControl
from podway.control.verbs import Control
from podway.providers import HostsHere, ProviderSet


class Drivers:
    """`control` and `service_verbs` are what people ask; `run` does what they asked for."""

    def __init__(
        self,
        parts: Parts,
        publish: Callable[[str], None],
        providers: ProviderSet,
        hosts_here: Callable[[], HostsHere],
    ) -> None:
        self._publish = publish
        self.control = Control(
            store=parts.store,
            vault=parts.vault,
            provider=providers.for_people,
            wake=self._wake,
            usual=providers.usual,
            hosts_here=hosts_here,
        )
        self.service_verbs = ServiceControl(self.control)
        self.schedules = ScheduleControl(self.service_verbs)
        self.pools = PoolControl(self.control)
        self.groups = GroupControl(self.control)
        self._pool_driver = PoolDriver(self.pools, parts.owner)
        store = parts.store
        self._reconcilers = (
            Reconciler(store, parts.owner, lambda key: Controller(parts, key), publish, store.clusters_with_events),
            Reconciler(
                store.services,
                parts.owner,
                lambda key: ServiceController(parts, self.service_verbs, key),
                self._publish_service,
            ),
        )

    def _wake(self, key: str) -> None:
        for each in self._reconcilers:
            each.wake(key)

    def _publish_service(self, key: str) -> None:
        self._publish(key)
        self._publish(ROUTES)

    async def run(self, person: Person) -> None:
        """For as long as the server runs."""
        by_clock = (self.schedules.run(person), self._pool_driver.run(person), self.groups.run(person))
        await asyncio.gather(*(each.run() for each in self._reconcilers), *by_clock)
