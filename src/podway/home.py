"""Where Podway keeps its things on this machine: one directory, private to its user."""

import os
from pathlib import Path


def home() -> Path:
    """PODWAY_HOME, or ~/.podway; made with mode 0700."""
    place = Path(os.environ.get("PODWAY_HOME") or Path.home() / ".podway")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place
