"""How a person logs in to a host: the command line of `podway ssh`, and what `ssh NAME` is told. Made by the client.

A server says where a host is; it never says what to run here. What comes from it is checked before it becomes words of a command: an
address that begins with a dash would be an option of ssh, and a team's server may be anybody's.

Of this machine's own server, which is the same user, two things more are believed: that a host is a part of this machine, and which
private key opens it. A team's server certifies a key of this machine's own for a few minutes (`certified`, hosts/ssh/authority.py).
"""

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from podway.errors import UserError
from podway.home import home
from podway.hosts.agent.connections import ATTACHED_VARIABLE
from podway.hosts.pod_address import PodAddress, attached_command
from podway.hosts.ssh.config import (
    SshFiles,
    endpoint_options,
    known_hosts_text,
    proxied_alias,
    proxied_options,
    ssh_command,
    write_private,
)
from podway.hosts.ssh.endpoint import Endpoint
from podway.hosts.ssh.keys import key_pair, proxied_host_key
from podway.server.api import NO_CERTIFICATES, CertificateBody, CertificateReply, ShellReply
from podway.server.connection import ServerConnection

WORKDIR = "sky_workdir"
LONGEST_WAY = 4
_NAME = re.compile(r"[A-Za-z0-9_\[][A-Za-z0-9._:@\[\]-]{0,254}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CERTIFICATE = re.compile(r"ssh-ed25519-cert-v01@openssh\.com [A-Za-z0-9+/]{100,8000}={0,2}")
# Of the caller's environment only the terminal's name: the rest (PYTHONPATH, CONDA_*) is not the host's. The outer shell stays, so that
# the host's agent sees by its environment that somebody is there; what is left running inside does not count.
_CLEAN = ("sh", "-c", 'trap : INT; env -i ${TERM+"TERM=$TERM"} "$@"; exit $?', "sh")


class ShellCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What to run here for a shell on a host."""

    argv: list[str]
    env: dict[str, str] = {}  # besides this process' own
    cwd: str | None = None
    by_ssh: bool = False  # `ssh NAME` does the same


class HostLogin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a host is and what a job there has, checked; neither `endpoint` nor `pod`: a simulated host on this machine."""

    home: str
    env: dict[str, str]
    endpoint: Endpoint | None
    known_hosts: tuple[str, ...]
    pod: PodAddress | None = None


def host_login(server: ServerConnection, path: str, *, cluster: str, rank: int) -> HostLogin:
    """Ask the server where a host is, and a team's server for a certificate; `path` is the cluster's in the API."""

    def sign(public_key: str) -> str:
        body = CertificateBody(public_key=public_key, rank=rank)
        return server.call("POST", f"{path}/certificate", CertificateReply, body).certificate

    reply = server.call("GET", f"{path}/shell?rank={rank}", ShellReply)
    login = checked_login(reply, cluster=cluster, own_server=server.is_own)
    return login if server.is_own else certified(login, cluster=cluster, rank=rank, sign=sign)


def checked_login(reply: ShellReply, *, cluster: str, own_server: bool) -> HostLogin:
    """What a server said of a host, as far as it can be believed."""
    variables = {name: value for name, value in reply.env.items() if _VARIABLE.fullmatch(name)} | {"HOME": reply.home}
    if reply.pod is not None:
        return HostLogin(home=reply.home, env=variables, endpoint=None, known_hosts=(), pod=_checked_pod(reply.pod))
    if reply.endpoint is None and not (own_server and (Path(reply.home) / WORKDIR).is_dir()):
        raise UserError(
            f"the hosts of cluster {cluster} are not on this machine",
            "the server simulates them on its own machine; log in there",
        )
    endpoint = None if reply.endpoint is None else _checked(reply.endpoint, own_server)
    return HostLogin(home=reply.home, env=variables, endpoint=endpoint, known_hosts=tuple(reply.known_hosts))


def certified(login: HostLogin, *, cluster: str, rank: int, sign: Callable[[str], str]) -> HostLogin:
    """With a key of this machine that a team's server certified; with the person's own where hosts take no certificates."""
    if login.endpoint is None:
        return login
    files = SshFiles(home())
    key = key_pair(files.folder / "id_ed25519")
    try:
        text = sign(key.public).strip()
    except UserError as error:
        if error.code != NO_CERTIFICATES and error.status != 404:  # 404: a server of an older version
            raise
        return login
    if not _CERTIFICATE.fullmatch(text):
        raise UserError("the server sent a certificate that is none", "is it your team's server?")
    path = files.login(_file_name(cluster), rank).with_suffix(f".{rank}-cert.pub")
    write_private(path, f"{text}\n")
    endpoint = msgspec.structs.replace(login.endpoint, identity_file=str(key.path), certificate_file=str(path))
    return msgspec.structs.replace(login, endpoint=endpoint)


def shell_command(login: HostLogin, command: str | None, *, cluster: str, rank: int = 0) -> ShellCommand:
    """A shell on the host, or one command there."""
    if login.pod is not None:
        return _in_pod(login, login.pod, command)
    if login.endpoint is None:
        return _here(login, command)
    argv = ssh_command(login.endpoint, _write_known_hosts(login, cluster, rank))
    terminal = "-t" if command is None else "-T"
    entering = _entering(login.home, login.env, command)
    return ShellCommand(argv=[argv[0], terminal, *argv[1:], entering], by_ssh=True)


def write_login(login: HostLogin, cluster: str, rank: int) -> None:
    """The file that the entry of a team's host includes."""
    files = SshFiles(home())
    if login.pod is not None:
        key = proxied_host_key(files.folder).public
        login = msgspec.structs.replace(login, known_hosts=(f"{proxied_alias(cluster)} {key}",))
    elif login.endpoint is None:
        raise UserError(f"cluster {cluster} has no sshd", f"use: podway ssh {cluster}")
    known = _write_known_hosts(login, cluster, rank)
    if login.endpoint is None:
        lines = proxied_options(cluster, rank, files.home, known)
    else:
        lines = endpoint_options(login.endpoint, known)
    write_private(files.login(cluster, rank), "".join(f"{line}\n" for line in lines))


def _write_known_hosts(login: HostLogin, cluster: str, rank: int) -> Path:
    path = SshFiles(home()).known_hosts(_file_name(cluster), rank)
    write_private(path, known_hosts_text(login.known_hosts))
    return path


def _file_name(cluster: str) -> str:
    """A name of a file, whatever the cluster is called."""
    return re.sub(r"[^A-Za-z0-9._-]|^[^A-Za-z0-9]", "_", cluster)


def _here(login: HostLogin, command: str | None) -> ShellCommand:
    words = [f"{name}={value}" for name, value in login.env.items()]
    shell = ["-i"] if command is None else ["-c", command]
    attached = {ATTACHED_VARIABLE: login.env.get("PODWAY_HOST_ID", "")}
    return ShellCommand(
        argv=[*_CLEAN, *words, "bash", "--norc", *shell], env=attached, cwd=str(Path(login.home) / WORKDIR)
    )


def _in_pod(login: HostLogin, pod: PodAddress, command: str | None) -> ShellCommand:
    """By the API server, with this person's KUBECONFIG."""
    words = attached_command(_entering(login.home, login.env, command))
    terminal = ["--tty"] if command is None and sys.stdin.isatty() else []
    address = msgspec.json.encode(pod).decode()
    module = "podway.providers.gke.pod_shell"
    return ShellCommand(argv=[sys.executable, "-m", module, address, *terminal, "--", *words], by_ssh=True)


def _checked_pod(pod: PodAddress) -> PodAddress:
    """With names that can only be such."""
    if not _NAME.fullmatch(pod.namespace) or not _NAME.fullmatch(pod.jobset) or min(pod.slice, pod.worker) < 0:
        raise UserError(f"the server sent a pod that is none: {str(pod)[:80]!r}", "is it your team's server?")
    return pod


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
    return msgspec.structs.replace(endpoint, jump=jump, identity_file=key, certificate_file=None)
