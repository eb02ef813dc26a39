"""What this Podway calls itself towards the outside, so that it knows its own resources among those of others."""

import contextlib
import secrets
from pathlib import Path


def owner_of(folder: Path) -> str:
    """The name kept in `folder`; made when it is first asked for."""
    path = folder / "owner"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), open(path, "x") as file:
            file.write(secrets.token_hex(8))
    return path.read_text()
