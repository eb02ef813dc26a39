"""The books: everything that was ever made, when, what it would have cost, and whether it is gone.

Each change is a line of JSON appended to a file (or given to any other `write`), so the books outlive the process. Money is by
this machine's clock at the catalog's prices: what a real cloud would ask for the time that resources really stood.
"""

from collections.abc import Callable

import msgspec

from podway.catalog.prices import price_of
from podway.catalog.slices import Slice
from podway.sandbox.jsons import JsonObject
from podway.sandbox.names import stamp
from podway.sandbox.tpu.capacity import SPOT


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One resource's page."""

    kind: str
    name: str
    made: float
    accelerator: str = ""
    tier: str = ""
    hourly_usd: float | None = None
    labels: dict[str, str] = {}
    billed_s: float = 0.0  # up to `since`
    since: float | None = None  # it bills since then
    gone: float | None = None

    def cost(self, now: float) -> float | None:
        """Dollars until now; None where no price is published."""
        if self.hourly_usd is None:
            return None
        return round(
            (self.billed_s + (now - self.since if self.since is not None else 0.0)) / 3600 * self.hourly_usd, 6
        )

    def view(self, now: float) -> JsonObject:
        """For people and tests."""
        return {
            **{key: getattr(self, key) for key in ("kind", "name", "accelerator", "tier", "hourly_usd", "labels")},
            "made": stamp(self.made),
            "gone": None if self.gone is None else stamp(self.gone),
            "bills": self.since is not None,
            "cost_usd": self.cost(now),
        }


class Ledger:
    """All pages; those of living resources by name."""

    def __init__(self, write: Callable[[JsonObject], None] = lambda line: None) -> None:
        self._write = write
        self.living: dict[str, Entry] = {}
        self.closed: list[Entry] = []

    def made(
        self,
        kind: str,
        name: str,
        now: float,
        *,
        slice: Slice | None = None,
        tier: str = "",
        labels: dict[str, str] | None = None,
    ) -> None:
        """A resource begins to exist."""
        zone = name.split("/")[3] if name.count("/") > 3 else None
        entry = Entry(
            kind=kind,
            name=name,
            made=now,
            accelerator=slice.accelerator_type if slice else "",
            tier=tier,
            hourly_usd=price_of(slice, zone, spot=tier == SPOT) if slice else None,
            labels=labels or {},
        )
        self.living[name] = entry
        more = {"kind": kind, "accelerator": entry.accelerator, "tier": tier, "hourly_usd": entry.hourly_usd}
        self._note("made", name, now, **more, labels=entry.labels)

    def started(self, name: str, now: float) -> None:
        """It bills from now on."""
        entry = self.living[name]
        if entry.since is None:
            self.living[name] = msgspec.structs.replace(entry, since=now)
            self._note("bills", name, now)

    def stopped(self, name: str, now: float) -> None:
        """It bills no more."""
        entry = self.living[name]
        if entry.since is not None:
            billed = entry.billed_s + now - entry.since
            self.living[name] = msgspec.structs.replace(entry, since=None, billed_s=billed)
            self._note("rests", name, now, cost_usd=self.living[name].cost(now))

    def gone(self, name: str, now: float) -> None:
        """It is deleted."""
        self.stopped(name, now)
        entry = msgspec.structs.replace(self.living.pop(name), gone=now)
        self.closed.append(entry)
        self._note("gone", name, now, cost_usd=entry.cost(now))

    def view(self, now: float) -> JsonObject:
        """What exists, what bills, what was."""
        everything = [*self.closed, *self.living.values()]
        return {
            "living": [entry.view(now) for entry in self.living.values()],
            "gone": [entry.view(now) for entry in self.closed],
            "hourly_usd": round(sum(one.hourly_usd or 0.0 for one in self.living.values() if one.since is not None), 4),
            "cost_usd": round(sum(one.cost(now) or 0.0 for one in everything), 6),
        }

    def _note(self, event: str, name: str, now: float, **more: object) -> None:
        self._write({"at": stamp(now), "event": event, "name": name, **more})
