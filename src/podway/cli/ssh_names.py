"""`ssh NAME` after a launch: the one line in a person's own ssh config, which is theirs to allow.

It is asked for once, at a terminal. A no is kept in PODWAY_HOME/ssh/not-included (remove that file to be asked again). Where nobody can be
asked, the line is shown and nothing is written. The entries themselves are Podway's own files (hosts/ssh/config.py): for this machine's own
server that server writes them; for a team's server they are written here.
"""

import sys
from pathlib import Path

import click

from podway.cli.screen import Screen
from podway.errors import UserError
from podway.home import home
from podway.hosts.ssh.config import (
    SshFiles,
    host_names,
    include,
    include_line,
    is_included,
    names_taken,
    team_entry_text,
    user_config,
)
from podway.server.api import ClusterView
from podway.server.client import Client

DECLINED = "not-included"


def offer_ssh_name(client: Client, screen: Screen, cluster: ClusterView, *, ask: bool) -> str:
    """Have `ssh NAME` work, with consent; the command that opens a shell on the first host."""
    files, config = SshFiles(home()), user_config()
    if not client.own_server:
        write_team_entry(cluster)
    fallback = f"podway ssh {cluster.name}"
    try:
        if not is_included(files.config, config):
            if (files.folder / DECLINED).exists():
                return fallback
            if not (ask and sys.stdin.isatty() and screen.stream.isatty()):
                screen.line(f"For `ssh {cluster.name}`, begin {_shown(config)} with:  {include_line(files.config)}")
                return fallback
            if not _allowed(screen, cluster.name, files, config):
                return fallback
        return f"ssh {_name_of(screen, cluster.name, files, config)}"
    except OSError as error:
        screen.line(f"Note: {config} cannot be changed ({error.strerror}); use: {fallback}")
        return fallback


def ssh_is_set_up() -> bool:
    """Whether the person's ssh reads our entries."""
    return is_included(SshFiles(home()).config, user_config())


def write_team_entry(cluster: ClusterView) -> None:
    """The entry of a cluster that a team's server looks after."""
    files = SshFiles(home())
    taken = names_taken(user_config(), files.config)
    try:
        files.write_entry(cluster.name, team_entry_text(cluster.name, len(cluster.hosts), files, taken))
    except ValueError as error:  # whatever a server calls it
        raise UserError(str(error), f"use: podway ssh {cluster.name}") from None


def _allowed(screen: Screen, name: str, files: SshFiles, config: Path) -> bool:
    screen.wait("")
    question = f"Add one line to {_shown(config)}, so that `ssh {name}`, scp and editors reach your clusters?"
    if click.confirm(question, default=True, err=True):
        include(files.config, config)
        return True
    files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (files.folder / DECLINED).write_text(f"No line is added to {config}. Remove this file to be asked again.\n")
    return False


def _shown(config: Path) -> str:
    usual = Path.home() / ".ssh" / "config"
    return "~/.ssh/config" if config == usual else str(config)


def _name_of(screen: Screen, name: str, files: SshFiles, config: Path) -> str:
    """What the first host is called for ssh: not by a name that the person gave another machine."""
    names = host_names(name, 0, names_taken(config, files.config))
    if name not in names:
        screen.line(f"Note: {config} has a Host {name} already, which `ssh {name}` goes on reaching.")
    return names[0] if names else f"-F {files.config} {name}"
