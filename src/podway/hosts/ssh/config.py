"""`ssh NAME` and `ssh NAME-worker3`: files for OpenSSH's own client, and the one line that makes it read them.

    PODWAY_HOME/ssh/config        includes all of hosts/; what a person's own ssh config includes, by their consent
    PODWAY_HOME/ssh/hosts/NAME    the hosts of one cluster, head first under the bare name
    PODWAY_HOME/ssh/known/NAME    their host keys, as Podway pinned them: a person's ssh asks nothing and refuses what Podway refuses

A cluster has a file of its own, written whole or not at all, so that launches at the same time do not meet; what a writer that was
killed leaves behind has a name that ssh does not include. A host has one of three kinds of entry: the address of its sshd; a command
that serves a simulated host or a pod (`podway ssh-proxy`); or, where a team's server looks after it, a command that first fetches where
it is and a certificate for a few minutes (`podway ssh-login`).
"""

import os
import pwd
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from podway.files import write_atomically
from podway.hosts.ssh.endpoint import Endpoint

HEADER = "# Written by Podway when clusters come and go; changes made here are lost.\n"
USER_CONFIG_VARIABLE = "PODWAY_SSH_CONFIG"
MOST_INCLUDES = 16  # readconf.c: as deep as ssh itself follows them
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HOST_LINE = re.compile(r"\s*host(?:\s+|\s*=\s*)(.*)", re.IGNORECASE)
_INCLUDE_LINE = re.compile(r"\s*include(?:\s+|\s*=\s*)(.*)", re.IGNORECASE)


class SshFiles(msgspec.Struct, frozen=True):
    """Where a Podway home keeps what OpenSSH reads."""

    home: Path

    @property
    def folder(self) -> Path:
        """All of it; pools' files and keys are in it too."""
        return self.home / "ssh"

    @property
    def config(self) -> Path:
        """What a person's ssh config includes."""
        return self.folder / "config"

    def entry(self, cluster: str) -> Path:
        """The hosts of one cluster."""
        return self.folder / "hosts" / _checked_name(cluster)

    def known_hosts(self, cluster: str, rank: int | None = None) -> Path:
        """Their host keys; with `rank`, those that a team's server sent for one host."""
        return self.folder / "known" / (_checked_name(cluster) + ("" if rank is None else f".{rank}"))

    def login(self, cluster: str, rank: int) -> Path:
        """Where one host is, as a team's server said it last."""
        return self.folder / "logins" / f"{_checked_name(cluster)}.{rank}"

    def write_entry(self, cluster: str, text: str, known_hosts: Sequence[str] = ()) -> None:
        """The files of a cluster, for their owner only; host keys first, so that no entry is without."""
        write_private(self.known_hosts(cluster), known_hosts_text(known_hosts))
        write_private(self.config, f"{HEADER}{include_line(self.folder / 'hosts' / '*')}\n")
        write_private(self.entry(cluster), HEADER + text)

    def remove_entry(self, cluster: str) -> None:
        """The cluster is no more, or its hosts are off."""
        for path in (self.entry(cluster), self.known_hosts(cluster)):
            path.unlink(missing_ok=True)
        ranked = re.compile(re.escape(cluster) + r"\.[0-9]+(-cert\.pub)?")
        for folder in (self.folder / "known", self.folder / "logins"):
            for path in folder.iterdir() if folder.is_dir() else ():
                if ranked.fullmatch(path.name):
                    path.unlink(missing_ok=True)


def known_hosts_text(lines: Iterable[str]) -> str:
    """A file of host keys."""
    return "".join(f"{line}\n" for line in lines if line.isprintable())


def ssh_options(endpoint: Endpoint, known_hosts: Path) -> list[tuple[str, str]]:
    """What OpenSSH has to be told to reach a machine as Podway does."""
    options = [("HostName", endpoint.address), ("Port", str(endpoint.port))]
    if endpoint.user:
        options.append(("User", endpoint.user))
    if endpoint.identity_file:
        key = Path(endpoint.identity_file).expanduser()
        options += [("IdentityFile", _quoted(key)), ("IdentitiesOnly", "yes")]
    if endpoint.certificate_file:
        options.append(("CertificateFile", _quoted(Path(endpoint.certificate_file))))
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


def endpoint_options(endpoint: Endpoint, known_hosts: Path) -> list[str]:
    """Lines of an entry for a host with an sshd."""
    return [f"{key} {value}" for key, value in ssh_options(endpoint, known_hosts)]


def proxied_options(
    cluster: str, rank: int, home: Path, known_hosts: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Lines of an entry for a host without sshd: a command is its sshd, and whoever may run that needs no key.

    `variables`: of the command's environment. One of them tells the agent of a simulated host that somebody is connected.
    """
    command = [*_podway(home, variables), "ssh-proxy", cluster, str(rank)]
    return [
        f"HostName {cluster}-worker{rank}",
        f"ProxyCommand {shlex.join(command).replace('%', '%%')}",
        f"HostKeyAlias {proxied_alias(cluster)}",
        f"UserKnownHostsFile {_quoted(known_hosts)}",
        "GlobalKnownHostsFile none",
        "StrictHostKeyChecking yes",
    ]


def proxied_alias(cluster: str) -> str:
    """The name of such a cluster's hosts in a known_hosts file."""
    return f"podway-proxied-{cluster}"


def host_names(cluster: str, rank: int, taken: frozenset[str]) -> list[str]:
    """What a host is called, without names that the person's own ssh config gives to other machines."""
    names = [cluster, f"{cluster}-worker0"] if rank == 0 else [f"{cluster}-worker{rank}"]
    return [name for name in names if name.lower() not in taken]


def entry_text(cluster: str, hosts: Sequence[Sequence[str]], taken: frozenset[str]) -> str:
    """A block for each host (its lines are given), in the order of ranks."""
    blocks = []
    for rank, lines in enumerate(hosts):
        names = host_names(cluster, rank, taken)
        if names:
            blocks.append("\n".join([f"Host {' '.join(names)}", *(f"    {line}" for line in lines)]) + "\n")
    return "\n".join(blocks)


def team_entry_text(cluster: str, count: int, files: SshFiles, taken: frozenset[str]) -> str:
    """Hosts of a team's server: a command fetches where each is before ssh reads it."""
    blocks = []
    for rank in range(count):
        names = host_names(cluster, rank, taken)
        command = shlex.join([*_podway(files.home), "ssh-login", cluster, str(rank)]).replace("%", "%%")
        if names and '"' not in command:  # ssh_config(5) has no way to write one inside a quoted word
            match = f'Match originalhost {",".join(names)} exec "{command}"'
            blocks.append(f"{match}\n    {include_line(files.login(cluster, rank))}\n")
    return "\n".join(blocks)


def user_config() -> Path:
    """The person's own ssh config, where ssh itself looks for it: in the home of the user, whatever HOME says."""
    return Path(os.environ.get(USER_CONFIG_VARIABLE) or Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh" / "config")


def include_line(path: Path) -> str:
    """The line that has an ssh config read `path`."""
    # Some versions of ssh expand percent signs here and some do not; all take a wildcard for it.
    text = str(path).replace("%", "?")
    return f'Include "{text}"' if " " in text else f"Include {text}"


def is_included(path: Path, config: Path) -> bool:
    """Whether an ssh config has that line."""
    return include_line(path) in (line.strip() for line in _read(config).splitlines())


def include(path: Path, config: Path) -> bool:
    """Have the person's own ssh config read `path`, by a first line; whether it had to be added.

    First, because an Include after a Host line would belong to that host alone.
    """
    if is_included(path, config):
        return False
    text = _read(config)
    config.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = config.resolve()  # people keep it in a repository and link to it
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
    whole = f"{include_line(path)}\n\n{text}" if text else f"{include_line(path)}\n"
    write_atomically(target, whole.encode(errors="surrogateescape"), mode=mode)
    return True


def names_taken(config: Path, own: Path) -> frozenset[str]:
    """The machines an ssh config names by Host lines, files that it includes among them, ours (`own`) left out."""
    found: set[str] = set()
    todo, seen = [(config, 0)], set[Path]()
    while todo:
        path, depth = todo.pop()
        if path in seen or depth > MOST_INCLUDES or path == own:
            continue
        seen.add(path)
        for line in _read(path).splitlines():
            if host := _HOST_LINE.fullmatch(line):
                found |= {word.strip('"').lower() for word in host[1].split() if not set(word) & set("*?!#")}
            elif more := _INCLUDE_LINE.fullmatch(line):
                todo += [(one, depth + 1) for word in _split(more[1]) for one in _matching(word, config.parent)]
    return frozenset(found)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return []


def _matching(pattern: str, base: Path) -> list[Path]:
    path = Path(pattern).expanduser()
    path = path if path.is_absolute() else base / path
    try:
        return sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    except (ValueError, OSError, NotImplementedError):
        return []


def _podway(home: Path, more: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """This Podway's command line, wherever it is called; -P: a folder called podway in the current directory is not it."""
    variables = {"PODWAY_HOME": str(home), **more}
    words = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *words, sys.executable, "-P", "-m", "podway.cli.main"]


def _checked_name(cluster: str) -> str:
    """A name that may come from a team's server, as part of a path and of a line."""
    if not _NAME.fullmatch(cluster) or len(cluster) > 80:
        raise ValueError(f"{cluster!r:.100} cannot be a name in an ssh config")
    return cluster


def write_private(path: Path, text: str) -> None:
    """Whole or not at all, for its owner only, as ssh wants it; nothing where nothing changes."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _read(path) != text or not path.exists():
        write_atomically(path, text.encode(), mode=0o600)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""


def _quoted(path: Path) -> str:
    """As ssh_config(5) reads it: in quotes where there is a space; a percent sign stands for itself when doubled."""
    text = str(path).replace("%", "%%")
    return f'"{text}"' if " " in text else text
