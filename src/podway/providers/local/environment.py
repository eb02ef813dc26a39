"""The environment that a simulated host's agent, and so every job on it, starts with."""

import os
from pathlib import Path

from podway.hosts.agent.container_spec import VARIABLES as CONTAINER_VARIABLES
from podway.hosts.agent.records import CONFINED
from podway.order import Host
from podway.providers.local.isolation import make_folders, make_home
from podway.providers.local.python_environment import VENV, make_tools, make_venv, search_path

WORKDIR = "sky_workdir"
_TEMPORARY = ".podway/tmp"
# LD_LIBRARY_PATH, because the Python that runs all this may need it. Whatever else the caller has set (PYTHONPATH, CONDA_*,
# PIP_*) describes the caller's environment, and would lead a host's programs back into it.
_KEPT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", *CONTAINER_VARIABLES)
_OWN_USERS = ("TMPDIR", "USER")


def furnish_home(host: Host, user: int | None) -> dict[str, str]:
    """Make what the host's home lacks, for that user or (None) for our own; the environment of its agent."""
    home = Path(host.home)
    if user is None:
        (home / WORKDIR).mkdir(parents=True, exist_ok=True)
        return host_environment(host)
    make_folders(home.parent)
    make_home(home, user, _furnish)
    own = {"USER": "podway", "LOGNAME": "podway", "TMPDIR": str(home / _TEMPORARY)}  # the number has no name of its own
    return {**_environment(host, home / VENV), **own}


def host_environment(host: Host) -> dict[str, str]:
    """What the agent starts with. The host's home must be there; its Python environment is made if it is not."""
    own = {key: os.environ[key] for key in _OWN_USERS if key in os.environ}
    return {**_environment(host, make_venv(Path(host.home))), **own}


def _furnish(home: Path) -> None:
    make_venv(home)
    for folder in (WORKDIR, _TEMPORARY):
        (home / folder).mkdir(parents=True)


def _environment(host: Host, venv: Path) -> dict[str, str]:
    tools = make_tools(Path(host.home).parent / "tools")
    kept = {key: os.environ[key] for key in _KEPT if key in os.environ}
    own = {"PATH": search_path(venv, tools), "VIRTUAL_ENV": str(venv), "PODWAY_HOST_ID": host.id}
    return {**kept, **own, CONFINED: "1"}
