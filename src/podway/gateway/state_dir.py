"""What stands in the directory of a gateway that is the only one there: who runs, and where it listens.

The lock tells whether one runs, whoever started it: a process and its successor hold it together, and it is free when both are gone.
"""

import fcntl
import os
from pathlib import Path

import msgspec

from podway.decoding import from_json
from podway.errors import UserError
from podway.files import write_atomically

_LOCK, _INFO = "gateway.lock", "gateway.json"


class GatewayProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway of a directory, as it says."""

    pid: int
    url: str
    port: int


def take_lock(folder: Path) -> int:
    """The lock, held while the descriptor is open in any process."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise UserError(f"a gateway already runs for {folder}", "it needs no second one") from None
    return descriptor


def lock_is_ours(folder: Path, lock: int) -> bool:
    """Whether the lock of the directory is still this one; False once it was deleted, with its directory or alone."""
    try:
        there = (folder / _LOCK).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # a disk that does not answer says nothing
    return os.path.samestat(there, os.fstat(lock))


def say_holder(lock: int) -> None:
    """Write into the lock which process has it: what the one before said of itself counts no more."""
    os.pwrite(lock, b"%-20d" % os.getpid(), 0)


def write_info(folder: Path, info: GatewayProcess) -> None:
    """Say where it listens."""
    write_atomically(folder / _INFO, msgspec.json.encode(info), mode=0o600)


def read_info(folder: Path) -> GatewayProcess | None:
    """What the gateway that runs there, or ran there last, said."""
    try:
        return from_json((folder / _INFO).read_bytes(), GatewayProcess)
    except (OSError, msgspec.DecodeError):
        return None


def running_gateway(folder: Path) -> GatewayProcess | None:
    """The gateway that runs there now, once it listens."""
    if not (folder / _LOCK).exists():
        return None
    try:
        os.close(take_lock(folder))
        return None
    except UserError:
        info, holder = read_info(folder), (folder / _LOCK).read_text().strip()
        return info if info is not None and holder == str(info.pid) else None
    except OSError:
        return None
