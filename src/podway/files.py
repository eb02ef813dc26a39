"""Files that are there whole or not at all, whenever their writer dies.

The host agent has its own copy (`hosts/agent/`): it travels to hosts as one file that imports nothing of Podway.
"""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write beside the path, then rename: a reader sees the old content or the new, never half of it.

    The mode holds from the first byte on, whatever the umask. Two writers at once do not meet: each has a temporary
    name of its own.
    """
    temp_name = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with os.fdopen(os.open(temp_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
        temp_name.replace(path)
    except BaseException:
        temp_name.unlink(missing_ok=True)
        raise
