"""Where Podway keeps its things on this machine: one directory, private to its user."""

import errno
import os
import stat
from pathlib import Path

from podway.errors import UserError

_HINT = "make room there, or set PODWAY_HOME to a directory of your own on another disk"
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})


def home() -> Path:
    """PODWAY_HOME, or ~/.podway; made with mode 0700, and given that mode where others could read it."""
    place = Path(os.environ.get("PODWAY_HOME") or Path.home() / ".podway")
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.stat()
    except OSError as error:
        raise UserError(f"{place} cannot be Podway's home: {error.strerror}", _HINT) from None
    if found.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise UserError(f"{place} cannot be Podway's home: it is another user's", _HINT)
    if stat.S_IMODE(found.st_mode) & 0o077 and found.st_uid == os.geteuid():
        try:
            place.chmod(0o700)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise UserError(
                    f"{place} can be read by others, and not made private: {error.strerror}", _HINT
                ) from None
    return place


def unwritable(error: OSError) -> UserError | None:
    """What a full disk or a directory that cannot be written means to a person; None for other errors."""
    if error.errno not in _UNWRITABLE:
        return None
    where = error.filename.decode(errors="replace") if isinstance(error.filename, bytes) else error.filename
    return UserError(f"{where or 'a file'} cannot be written: {error.strerror}", _HINT, status=507)
