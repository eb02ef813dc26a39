"""Node pools that were asked for: a file each, PODWAY_HOME/gke/node-pools/CLUSTER/NAME.json, written before acting.

It says what Kubernetes Engine does not: that a pool was asked for whose answer is still to come, and why one will never be there.
"""

import time
from pathlib import Path
from typing import Any

import msgspec

from podway.decoding import from_json
from podway.files import write_atomically

BUSY_S = 900.0  # another change of the cluster is under way: creation and deletion wait for it


class PoolRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node pool that was asked for."""

    cluster: str
    name: str
    launch: str = ""  # the cluster whose launch made it; '': a person did
    endpoint: str = ""  # of an emulator that it was made in
    asked: float = 0.0  # when
    operation: str = ""  # that makes it, once that is known
    failure: str = ""  # why it will never be there
    ready: float | None = None  # since when it was seen to run


class PoolRecords:
    """Files in PODWAY_HOME/gke/node-pools."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "gke" / "node-pools"

    def all(self) -> list[PoolRecord]:
        """Those that may exist."""
        paths = sorted(self._folder.glob("*/*.json")) if self._folder.is_dir() else []
        return [from_json(path.read_bytes(), PoolRecord) for path in paths]

    def of_launch(self, name: str) -> list[PoolRecord]:
        """Those that were asked for by the launch of a cluster."""
        return [one for one in self.all() if one.launch == name]

    def change(self, record: PoolRecord, **changes: Any) -> PoolRecord:
        """A new value of it, written."""
        new = msgspec.structs.replace(record, **changes)
        self.add(new)
        return new

    def add(self, record: PoolRecord) -> None:
        """Before it is asked for."""
        path = self._path(record)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, msgspec.json.encode(record))

    def is_old(self, record: PoolRecord) -> bool:
        """Whether its creation was asked for long ago, so that the API would show it."""
        try:
            return self._path(record).stat().st_mtime < time.time() - BUSY_S
        except FileNotFoundError:
            return True

    def remove(self, record: PoolRecord) -> None:
        """It is gone."""
        self._path(record).unlink(missing_ok=True)

    def _path(self, record: PoolRecord) -> Path:
        return self._folder / record.cluster.replace("/", "_") / f"{record.name}.json"
