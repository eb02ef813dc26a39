"""Whether container images can be used on simulated hosts: the rights and the runtime that hosts/agent/enter.py needs are here."""

import subprocess
import time
from pathlib import Path

from podway.hosts.agent import container
from podway.hosts.agent.container_spec import IN_USE
from podway.hosts.agent.wire import STATE
from podway.order import Host

_REMEMBERED_S = 60.0
_known: list[tuple[float, str]] = []


def why_no_images() -> str:
    """Why not, in a few words, or ''; asked again after a while, since people install what is missing."""
    if not _known or time.monotonic() - _known[-1][0] > _REMEMBERED_S:
        _known[:] = [(time.monotonic(), _look())]
    return _known[-1][1]


def _look() -> str:
    as_root = container.as_root()
    try:
        container.find_runtime(as_root)
        if as_root and _fails([*as_root, "true"]) is not None:
            return "it needs root, and this user may not run sudo without a password"
        why = _fails([*as_root, "unshare", "-m", "true"])
    except container.NoContainer as error:
        return str(error)
    return "" if why is None else f"this machine allows no mount namespace: {why}"


def _fails(command: list[str]) -> str | None:
    """What a command says that fails, or None."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stderr.strip() if done.returncode else None


def remove_containers(hosts: tuple[Host, ...]) -> None:
    """Remove what jobs with an image left of these hosts, if there was any."""
    used = [host.id for host in hosts if (Path(host.home) / STATE / IN_USE).exists()]
    if used:
        container.remove(used, container.as_root())
