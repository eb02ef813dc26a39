"""What both kinds of hosts have in common: how to log in, what can be done to them, their sshd's settings and keys."""

import subprocess
from pathlib import Path
from typing import Protocol

import msgspec

SSHD = Path("/usr/sbin/sshd")
SSHD_NAMES = (
    "sshd",
    "sshd-session",
    "sshd-auth",
)  # of its processes: from OpenSSH 9.8 and 10 on, sessions have names of their own


class SshHost(msgspec.Struct, frozen=True, kw_only=True):
    """One machine: how to log in, and where its user is at home."""

    name: str
    address: str
    port: int
    user: str
    home: str  # as the host itself calls it


class HostSet(Protocol):
    """Some machines that are alike, and the faults they can be given."""

    hosts: tuple[SshHost, ...]
    key: Path
    separate: bool  # each has a network and a file system of its own

    def kill_sshd(self, index: int) -> None:
        """sshd and every session of it die; what they started lives on."""

    def start_sshd(self, index: int) -> None:
        """sshd is back, with the same host key."""

    def cut_off(self, index: int) -> None:
        """No packet gets through."""

    def reconnect(self, index: int) -> None:
        """Packets get through again."""

    def files(self, index: int) -> Path:
        """The machine's file system as it sees it itself, from here."""

    def run(self, index: int, command: str) -> str:
        """What a shell command prints on the machine, not by way of ssh."""

    def processes(self, index: int) -> list[str]:
        """The command lines of all processes there, sshd and the machine's own init left out."""

    def close(self) -> None:
        """End and remove everything."""


def make_key(path: Path) -> Path:
    """An ed25519 key pair without a passphrase."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "podway", "-f", str(path)], check=True)
    return path


def sshd_config(*, address: str, port: int, host_key: Path | str, authorized: Path | str) -> str:
    """An sshd that lets in one key, quickly."""
    lines = {
        "ListenAddress": address,
        "Port": str(port),
        "HostKey": str(host_key),
        "AuthorizedKeysFile": str(authorized),
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "UsePAM": "no",
        "UseDNS": "no",
        "StrictModes": "no",
        "PrintMotd": "no",
        "PrintLastLog": "no",
        "PidFile": "none",
        "KexAlgorithms": "curve25519-sha256",  # the post-quantum default costs 0.14 s of CPU for each login
        "MaxStartups": "100:30:200",
        "Subsystem": "sftp internal-sftp",
    }
    return "".join(f"{name} {value}\n" for name, value in lines.items())


def why_no_hosts() -> str | None:
    """Why hosts cannot be made here, or None when they can."""
    if not SSHD.exists():
        return "sshd is not installed (tools/system-packages installs it for root)"
    return None


def pool_text(made: HostSet, *accelerators: str | None, more: str = "") -> str:
    """A pool's file that lists the hosts, each with the accelerator at its place in `accelerators` (the last for the rest)."""
    lines = [f"user: {made.hosts[0].user}", f"identity_file: {made.key}", "hosts:"]
    for index, host in enumerate(made.hosts):
        fields = {"address": host.address, "port": str(host.port)}
        accelerator = accelerators[min(index, len(accelerators) - 1)] if accelerators else None
        if accelerator:
            fields["accelerator"] = accelerator
        lines.append("  - {" + ", ".join(f"{key}: {value}" for key, value in fields.items()) + "}")
    return "\n".join([*lines, more]) + "\n"
