"""What people used, until the server has it: in memory, and in a file that a gateway killed at any moment leaves behind.

Each gateway process has an id and counts its reports. A report that was sent and not acknowledged is sent again with its number, and
the server counts it once; what is used meanwhile waits for the next. The file holds both. A gateway that starts takes over the files
of processes that are gone (their lock is free) and sends what they left, each under its own id and number.
"""

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from podway.decoding import from_json
from podway.files import write_atomically
from podway.gateway.report import GatewayReport, ModelUsage

UsageKey = tuple[str, str, str, str]  # day, user, service, model


class LedgerFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds."""

    gateway: str
    sequence: int
    sent: tuple[ModelUsage, ...] = ()  # in the report of this number, which may or may not have arrived
    waiting: tuple[ModelUsage, ...] = ()


class UsageLedger:
    """The usage that one gateway process has counted. `folder` None: it is kept in memory alone."""

    def __init__(self, gateway: str, folder: Path | None = None) -> None:
        self.gateway = gateway
        self.sequence = 0
        self._sent: dict[UsageKey, tuple[int, int, int]] = {}
        self._waiting: dict[UsageKey, tuple[int, int, int]] = {}
        self._path = folder / f"usage-{gateway}.json" if folder is not None else None
        self._lock = _locked(self._path) if self._path is not None else None
        self._written: bytes | None = None

    def add(self, day: str, user: str, service: str, model: str, *, prompt: int, completion: int) -> None:
        """One request."""
        key = (day, user, service, model)
        requests, prompts, completions = self._waiting.get(key, (0, 0, 0))
        self._waiting[key] = (requests + 1, prompts + prompt, completions + completion)

    def unreported(self, day: str, user: str) -> int:
        """Tokens of a person that the server does not know of, or has not acknowledged."""
        parts = (*self._sent.items(), *self._waiting.items())
        return sum(prompt + completion for key, (_, prompt, completion) in parts if key[:2] == (day, user))

    def next_report(self) -> GatewayReport:
        """The report to send now: the last one again while it is not acknowledged."""
        if not self._sent:
            self._sent, self._waiting = self._waiting, {}
            self.sequence += 1
        return GatewayReport(gateway=self.gateway, sequence=self.sequence, usage=_rows(self._sent))

    def acknowledge(self) -> None:
        """The server has the last report."""
        self._sent = {}

    @property
    def empty(self) -> bool:
        """Nothing is left to report."""
        return not self._sent and not self._waiting

    def save(self) -> None:
        """Into the file; OSError when that cannot be."""
        if self._path is None:
            return
        content = LedgerFile(
            gateway=self.gateway, sequence=self.sequence, sent=_rows(self._sent), waiting=_rows(self._waiting)
        )
        data = msgspec.json.encode(content)
        if data != self._written:
            write_atomically(self._path, data, mode=0o600)
            self._written = data

    def close(self) -> None:
        """The process ends: an empty file goes with it, and any other is for the next gateway."""
        if self._path is not None and self.empty:
            self._path.unlink(missing_ok=True)
            _lock_path(self._path).unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def leftovers(folder: Path) -> list[UsageLedger]:
    """The ledgers of processes that are gone, now of this one."""
    found = []
    for lock_path in folder.glob("usage-*.lock"):
        path = lock_path.with_suffix(".json")
        if not path.exists():
            with contextlib.suppress(OSError):  # else its process lives
                os.close(_locked(path))
                lock_path.unlink(missing_ok=True)
    for path in sorted(folder.glob("usage-*.json")):
        try:
            lock = _locked(path)
        except OSError:
            continue  # its process lives
        try:
            content = from_json(path.read_bytes(), LedgerFile)
        except (OSError, msgspec.DecodeError):
            os.close(lock)
            continue
        ledger = UsageLedger(content.gateway)
        ledger._path, ledger._lock = path, lock
        ledger.sequence = content.sequence
        ledger._sent, ledger._waiting = _counts(content.sent), _counts(content.waiting)
        found.append(ledger)
    return found


def _lock_path(path: Path) -> Path:
    return path.with_suffix(".lock")


def _locked(path: Path) -> int:
    """The lock beside a ledger's file, held while the descriptor is open."""
    descriptor = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _rows(counts: dict[UsageKey, tuple[int, int, int]]) -> tuple[ModelUsage, ...]:
    return tuple(
        ModelUsage(
            day=day,
            user=user,
            service=service,
            model=model,
            requests=requests,
            prompt_tokens=prompt,
            completion_tokens=completion,
        )
        for (day, user, service, model), (requests, prompt, completion) in counts.items()
    )


def _counts(rows: tuple[ModelUsage, ...]) -> dict[UsageKey, tuple[int, int, int]]:
    return {
        (one.day, one.user, one.service, one.model): (one.requests, one.prompt_tokens, one.completion_tokens)
        for one in rows
    }
