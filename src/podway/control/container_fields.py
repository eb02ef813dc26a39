"""What an agent is told of a job's image, and what it says when there is no container to be had."""

import msgspec

from podway.control.fleet import Fleet
from podway.control.records import Exit
from podway.errors import ProviderError
from podway.hosts.logs.text import display, host_name
from podway.launch import Launch
from podway.order import Host

FAILED = 125  # the exit code of hosts/agent/enter.py where the container itself could not be had
_SAID = "podway: "  # how its sentence begins in the output
_LONGEST = 2048


def registry_password(launch: Launch, secrets: dict[str, str]) -> str:
    """Taken out of `secrets`: no job has business with it."""
    registry = launch.task.registry
    return secrets.pop(registry.password_secret, "") if registry is not None else ""


def container_fields(launch: Launch, host: Host, password: str) -> dict[str, object] | None:
    """The `container` of a host's start request, if there is one."""
    container, registry = launch.container_on(host), launch.task.registry
    if container is None:
        return None
    told: dict[str, object] = msgspec.to_builtins(container)
    if registry is not None:
        told["registry"] = {"server": registry.server, "username": registry.username, "password": password}
    return told


async def container_problem(fleet: Fleet, agent_job_id: str, phase: str, blamed: Exit) -> str:
    """The sentence a phase ended with for want of its container; '' where that is not what it ended of."""
    if blamed.code != FAILED:
        return ""
    session = fleet.sessions[blamed.rank]
    try:
        status = await session.call("status", job=agent_job_id, phase=phase, wait=0.0)
        offset = max(0, int(status["output_size"]) - _LONGEST)
        reply = await session.link.call("follow", job=agent_job_id, phase=phase, offset=offset, limit=_LONGEST)
    except ProviderError:
        return ""
    last = display((reply.body.rstrip(b"\n").splitlines() or [b""])[-1])
    where = f"{host_name(session.host.rank)} ({session.host.address})"
    return f"{where}: {last.removeprefix(_SAID)}" if last.startswith(_SAID) else ""
