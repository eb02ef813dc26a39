"""Where a run leaves its files: a folder, or an address such as gs://bucket/run that they are copied to (no jax).

Checkpoints go to an address by themselves. Metrics, profiles, settings and the exported model are written to a folder of
host 0 first (`TrainConfig.folder`), because a bucket cannot be appended to: `publish` copies what has changed since. At
the start `fetch` brings back what a launch on another host has left, so that metrics go on.

`RunRecord` is the small file `run.json`: when the run was launched, with which settings, and whether it is finished.
"""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from podway.decoding import from_json
from podway.errors import UserError
from podway.files import write_atomically
from podway.train.config import TrainConfig
from podway.train.optional import require_module

METRICS_FILE, RECORD_FILE = "metrics.jsonl", "run.json"
PUBLISH_EVERY_S = 60.0
_CHUNK = 16 << 20
_NOT_IDENTITY = ("logging", "compile", "output")  # sections that may differ in one and the same run


class Output:
    """The files of one run, on the host that writes them."""

    def __init__(self, config: TrainConfig) -> None:
        self.folder, self.address = config.folder, config.output.rstrip("/")
        self.remote = "://" in self.address
        self._sent: dict[Path, tuple[int, int]] = {}
        self._last = time.monotonic()

    def fetch(self) -> None:
        """Bring back the metrics and the record of earlier launches; a copy of another run's is dropped."""
        if not self.remote:
            self.folder.mkdir(parents=True, exist_ok=True)
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for name in (METRICS_FILE, RECORD_FILE):
            there = self._there(name)
            if there.exists():
                (self.folder / name).write_bytes(there.read_bytes())

    def exists(self, name: str) -> bool:
        """Whether the output has this file or folder."""
        return bool(self._there(name).exists())

    def publish(self) -> None:
        """Copy what has changed to the address; the files of a model arrive before its config.json."""
        self._last = time.monotonic()
        if not self.remote:
            return
        files = [path for path in self.folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
        for path in sorted(files, key=lambda path: (path.name == RECORD_FILE, path.name == "config.json", path)):
            facts = path.stat()
            if self._sent.get(path) != (facts.st_size, facts.st_mtime_ns):
                self._copy(path)
                self._sent[path] = (facts.st_size, facts.st_mtime_ns)

    def publish_sometimes(self) -> str | None:
        """`publish` once a minute; what went wrong, if anything did: training goes on, and the next time may succeed."""
        if not self.remote or time.monotonic() - self._last < PUBLISH_EVERY_S:
            return None
        try:
            self.publish()
        except UserError as error:
            return str(error)
        return None

    def _copy(self, path: Path) -> None:
        name = path.relative_to(self.folder).as_posix()
        try:
            with path.open("rb") as source, self._there(name).open("wb") as target:
                shutil.copyfileobj(source, target, _CHUNK)
        except Exception as error:  # each kind of address raises its own
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise UserError(
                f"cannot write {self.address}/{name}: {reason}", "check the bucket and its permissions"
            ) from None

    def _there(self, name: str):  # type: ignore[no-untyped-def]
        if not self.remote:
            return self.folder / name
        if self.address.startswith("gs://"):
            require_module("gcsfs", "gcsfs", f"output={self.address}")
        return require_module("etils.epath", "etils", f"output={self.address}").Path(f"{self.address}/{name}")


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run across its launches."""

    settings: dict[str, object]
    launches: tuple[float, ...] = ()  # seconds since 1970
    finished: int | None = None  # the step after which it was exported and done

    def is_finished(self, config: TrainConfig) -> bool:
        """Whether these very settings have been run to their end."""
        return self.finished == config.schedule.steps and self.settings == identity(config)


def identity(config: TrainConfig) -> dict[str, object]:
    """The settings that make a run what it is."""
    plain: Mapping[str, object] = msgspec.json.decode(msgspec.json.encode(config))
    return {name: value for name, value in plain.items() if name not in _NOT_IDENTITY}


def read_record(folder: Path) -> RunRecord | None:
    """The record in a folder; None where there is none that can be read."""
    try:
        return from_json((folder / RECORD_FILE).read_bytes(), RunRecord)
    except (OSError, msgspec.DecodeError):
        return None


def write_record(folder: Path, record: RunRecord) -> None:
    """Whole or not at all."""
    write_atomically(folder / RECORD_FILE, msgspec.json.encode(record))
