"""The environment that a simulated host's agent, and so every job on it, starts with."""

import os
from pathlib import Path

from podway.hosts.agent.records import CONFINED
from podway.order import Host
from podway.providers.local.python_environment import make_tools, make_venv, search_path

# LD_LIBRARY_PATH, because the Python that runs all this may need it. Whatever else the caller has set (PYTHONPATH, CONDA_*,
# PIP_*) describes the caller's environment, and would lead a host's programs back into it.
_KEPT = ("LANG", "LC_ALL", "TMPDIR", "USER", "LD_LIBRARY_PATH")


def host_environment(host: Host) -> dict[str, str]:
    """What the agent starts with. The host's home must be there; its Python environment is made if it is not."""
    home = Path(host.home)
    venv = make_venv(home)
    tools = make_tools(home.parent / "tools")
    kept = {key: os.environ[key] for key in _KEPT if key in os.environ}
    own = {"PATH": search_path(venv, tools), "VIRTUAL_ENV": str(venv), "PODWAY_HOST_ID": host.id}
    return {**kept, **own, CONFINED: "1"}
