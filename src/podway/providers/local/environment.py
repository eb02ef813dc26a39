"""The environment that a simulated host's agent, and so every job on it, starts with."""

import os
import sys
from pathlib import Path

from podway.order import Host


def host_environment(host: Host) -> dict[str, str]:
    """What the agent starts with. The interpreter that runs Podway comes first on the path: a simulated host has what it has."""
    kept = {
        key: os.environ[key] for key in ("LANG", "LC_ALL", "TMPDIR", "USER", "LD_LIBRARY_PATH") if key in os.environ
    }
    here = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    return {"PATH": f"{here}{os.pathsep}{path}", "PODWAY_HOST_ID": host.id, **kept}
