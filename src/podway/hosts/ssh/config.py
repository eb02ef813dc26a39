"""`ssh NAME` and `ssh NAME-worker3`: a file for OpenSSH's own client, and the one line that makes it read it.

The file lists every host of every ssh cluster, head first under the bare name, and is rewritten whenever a cluster is created or
deleted. Host keys are those Podway pinned, so that a person's ssh asks nothing and refuses what Podway refuses.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from podway.files import write_atomically
from podway.hosts.ssh.endpoint import Endpoint

HEADER = "# Written by Podway when clusters come and go; changes made here are lost.\n"


def ssh_options(endpoint: Endpoint, known_hosts: Path) -> list[tuple[str, str]]:
    """What OpenSSH has to be told to reach a machine as Podway does."""
    options = [("HostName", endpoint.address), ("Port", str(endpoint.port))]
    if endpoint.user:
        options.append(("User", endpoint.user))
    if endpoint.identity_file:
        key = Path(endpoint.identity_file).expanduser()
        options += [("IdentityFile", _quoted(key)), ("IdentitiesOnly", "yes")]
    if endpoint.jump is not None:
        # Not ProxyJump, which would not use the pinned keys for the jump host.
        options.append(("ProxyCommand", shlex.join([*ssh_command(endpoint.jump, known_hosts), "-W", "[%h]:%p"])))
    # The alias, because the pin is under the name in the pool's file, whatever an ssh config makes of that name.
    pinned = [("HostKeyAlias", endpoint.known_as), ("UserKnownHostsFile", _quoted(known_hosts))]
    return [*options, *pinned, ("StrictHostKeyChecking", "yes")]


def ssh_command(endpoint: Endpoint, known_hosts: Path) -> list[str]:
    """The ssh command line that reaches a machine, ready for more words."""
    options = [word for name, value in ssh_options(endpoint, known_hosts)[1:] for word in ("-o", f"{name}={value}")]
    return ["ssh", *options, endpoint.address]


def config_text(clusters: Mapping[str, Sequence[Endpoint]], known_hosts: Path) -> str:
    """The file: a block for each host, in the order of names and ranks."""
    blocks = [HEADER]
    for cluster, endpoints in sorted(clusters.items()):
        for rank, endpoint in enumerate(endpoints):
            names = f"{cluster} {cluster}-worker0" if rank == 0 else f"{cluster}-worker{rank}"
            lines = [f"Host {names}", *(f"    {key} {value}" for key, value in ssh_options(endpoint, known_hosts))]
            blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def write_config(path: Path, text: str) -> None:
    """Whole or not at all, for its owner only, as ssh wants it."""
    write_atomically(path, text.encode(), mode=0o600)


def include(path: Path, user_config: Path) -> bool:
    """Have the person's own ssh config read `path`, by a first line; whether it had to be added.

    First, because an Include after a Host line would belong to that host alone.
    """
    line = f"Include {_quoted(path)}\n"
    try:
        text = user_config.read_text()
    except FileNotFoundError:
        text = ""
    if line in text.splitlines(keepends=True):
        return False
    user_config.parent.mkdir(mode=0o700, exist_ok=True)
    target = user_config.resolve()  # people keep it in a repository and link to it
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
    write_atomically(target, (line + ("\n" if text else "") + text).encode(), mode=mode)
    return True


def _quoted(path: Path) -> str:
    """As ssh_config(5) reads it: in quotes where there is a space; a percent sign stands for itself when doubled."""
    text = str(path).replace("%", "%%")
    return f'"{text}"' if " " in text else text
