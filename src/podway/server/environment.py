"""This machine's own server has the environment of the command that started it; providers read settings there.

A launch from a shell with other settings must not be done with the old ones. The server writes what its providers read into
`server.json`; before a launch the client compares:

1. a server that somebody started by hand, or a team's, keeps its settings: they are its administrator's;
2. where nothing differs, nothing is done (one small file is read);
3. where a provider's settings differ and it has no cluster, the server is restarted with those of this shell. Jobs and hosts go on
   without a server, and the new one takes them up;
4. where it has clusters, they live by the old settings: a shell that sets others is told so, one that sets none uses those.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from podway.decoding import from_json
from podway.errors import UserError

STOP_TIMEOUT_S = 30.0


class OwnServer(msgspec.Struct, frozen=True):
    """What `server.json` says of a server: whether a command started it, and what its providers read of the environment."""

    pid: int
    started_by_command: bool = False
    environment: dict[str, dict[str, str | None]] = {}  # provider -> variable -> value


def match_environment(place: Path, providers_in_use: Callable[[], Iterable[str]]) -> bool:
    """Have the server of this home run with this process' settings; whether it was restarted for that."""
    if not _differing(_read(place)):
        return False
    used = set(providers_in_use())  # and so it runs: what is read now is of a process that is there
    server = _read(place)
    differing = _differing(server)
    if server is None or not differing:
        return False
    for name in sorted(used & set(differing)):
        variables = [variable for variable in differing[name] if os.environ.get(variable)]
        if variables:
            raise UserError(
                f"clusters of {name} are up with other settings than this shell's ({', '.join(variables)})",
                f"unset {' '.join(variables)}, take those clusters down, or use another PODWAY_HOME",
                status=409,
            )
    if not set(differing) - used:
        return False
    from podway.server.starting import start_server  # rarely needed, and subprocess is slow to import

    _stop(server.pid)
    start_server(place, keep={name: known for name, known in server.environment.items() if name in used})
    return True


def _read(place: Path) -> OwnServer | None:
    try:
        return from_json((place / "server.json").read_bytes(), OwnServer)
    except (OSError, msgspec.MsgspecError):
        return None  # none runs: the next request starts one, with this environment


def _differing(server: OwnServer | None) -> dict[str, list[str]]:
    """By provider, the variables that have another value in this process."""
    if server is None or not server.started_by_command:
        return {}
    found = {
        name: [variable for variable, value in known.items() if os.environ.get(variable) != value]
        for name, known in server.environment.items()
    }
    return {name: variables for name, variables in found.items() if variables}


def _stop(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while _runs(pid):
        if time.monotonic() > deadline:
            raise UserError(f"the server (pid {pid}) does not end", f"end it yourself: kill -9 {pid}")
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """A zombie has ended, though its parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False
