"""What this Podway began on Google Cloud: a file for each cluster, PODWAY_HOME/gcp/clusters/NAME.json, written before acting.

It says what the cloud does not: which zones were asked and what they answered, and whether the agents are up. Without it (another
server took over) the cluster is found by its mark in the whole project, and the file is made again.
"""

import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

from podway.decoding import from_json
from podway.files import write_atomically
from podway.providers import Request
from podway.providers.gcp.state import ClusterRecord


class ClusterRecords:
    """The files of one Podway home."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> ClusterRecord | None:
        """What is written of a cluster."""
        try:
            return from_json(self._path(name).read_bytes(), ClusterRecord)
        except FileNotFoundError:
            return None

    def begin(self, request: Request, endpoint: str | None) -> ClusterRecord:
        """A new record, before anything is asked for."""
        began = ClusterRecord(request=request, nonce=secrets.token_hex(8), began=time.time(), endpoint=endpoint)
        return self.write(began)

    def change(self, record: ClusterRecord, **changes: Any) -> ClusterRecord:
        """A new value of it, written."""
        return self.write(msgspec.structs.replace(record, **changes))

    def write(self, record: ClusterRecord) -> ClusterRecord:
        """Whole or not at all."""
        path = self._path(record.request.name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(record))
        return record

    def drop(self, name: str) -> None:
        """Nothing of it is left."""
        self._path(name).unlink(missing_ok=True)

    def all(self) -> list[ClusterRecord]:
        """Every cluster that was begun here."""
        found = [self.read(path.stem) for path in sorted(self._folder.glob("*.json"))]
        return [record for record in found if record is not None]

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"
