"""The command line of `podway ssh`, made by the client. A server says where a host is; it never says what to run here.

What comes from a server is checked before it becomes words of a command: an address that begins with a dash would be an option of
ssh, and a team's server may be anybody's. Of this machine's own server, which is the same user, two things more are believed: that
a host is a part of this machine, and which private key opens it. Against a team's server the person's own keys are used.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import msgspec

from podway.errors import UserError
from podway.files import write_atomically
from podway.home import home
from podway.hosts.ssh.config import ssh_command
from podway.hosts.ssh.endpoint import Endpoint
from podway.server.api import ShellReply

WORKDIR = "sky_workdir"
LONGEST_WAY = 4
_NAME = re.compile(r"[A-Za-z0-9_\[][A-Za-z0-9._:@\[\]-]{0,254}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Of the caller's environment only the terminal's name: the rest (PYTHONPATH, CONDA_*) is not the host's.
_CLEAN = ("sh", "-c", 'exec env -i ${TERM+"TERM=$TERM"} "$@"', "sh")


class ShellCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What to run here for a shell on a host."""

    argv: list[str]
    env: dict[str, str] = {}  # besides this process' own
    cwd: str | None = None


def shell_command(reply: ShellReply, command: str | None, *, cluster: str, own_server: bool) -> ShellCommand:
    """A shell on the host, or one command there."""
    variables = {name: value for name, value in reply.env.items() if _VARIABLE.fullmatch(name)} | {"HOME": reply.home}
    if reply.endpoint is None:
        return _here(reply.home, variables, command, cluster, own_server)
    endpoint = _checked(reply.endpoint, own_server)
    known_hosts = home() / "known_hosts" / re.sub(r"[^A-Za-z0-9._-]", "_", cluster)
    known_hosts.parent.mkdir(mode=0o700, exist_ok=True)
    lines = [line for line in reply.known_hosts if line.isprintable()]
    write_atomically(known_hosts, "".join(f"{line}\n" for line in lines).encode(), mode=0o600)
    argv = ssh_command(endpoint, known_hosts)
    terminal = "-t" if command is None else "-T"
    return ShellCommand(argv=[argv[0], terminal, *argv[1:], _entering(reply.home, variables, command)])


def _here(
    place: str, variables: Mapping[str, str], command: str | None, cluster: str, own_server: bool
) -> ShellCommand:
    workdir = Path(place) / WORKDIR
    if not own_server or not workdir.is_dir():
        raise UserError(
            f"the hosts of cluster {cluster} are not on this machine",
            "the server simulates them on its own machine; log in there",
        )
    words = [f"{name}={value}" for name, value in variables.items()]
    shell = ["-i"] if command is None else ["-c", command]
    return ShellCommand(argv=[*_CLEAN, *words, "bash", "--norc", *shell], cwd=str(workdir))


def _entering(place: str, variables: Mapping[str, str], command: str | None) -> str:
    """For the login shell of the host."""
    words = ["env", *(f"{name}={value}" for name, value in sorted(variables.items())), "bash", "-l"]
    entered = f"cd {shlex.quote(f'{place}/{WORKDIR}')} 2>/dev/null; exec {shlex.join(words)}"
    return entered if command is None else f"{entered} -c {shlex.quote(command)}"


def _checked(endpoint: Endpoint, own_server: bool) -> Endpoint:
    """The endpoint, with names and numbers that can only be such; private keys only by the word of our own server."""
    way = endpoint.way()
    for one in way:
        words = [one.address, one.known_as, *([one.user] if one.user else [])]
        if len(way) > LONGEST_WAY or not 0 < one.port < 65536 or not all(_NAME.fullmatch(word) for word in words):
            raise UserError(f"the server sent an address that is none: {str(one)[:80]!r}", "is it your team's server?")
    jump = _checked(endpoint.jump, own_server) if endpoint.jump else None
    key = endpoint.identity_file if own_server else None
    return msgspec.structs.replace(endpoint, jump=jump, identity_file=key)
