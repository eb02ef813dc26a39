"""A network of its own for a simulated cluster: so that two replicas of one service can listen on the same port of one machine.

All hosts of the cluster are in one network namespace, joined to this machine by a pair of virtual interfaces:

    this machine  10.214.N.1  pwl-N  <->  eth0 in the namespace pwl-N: 10.214.N.2 for host 0, 10.214.N.3 for host 1, ...

N is the cluster's subnet number, claimed over all Podway homes (subnets.py), so nothing of that name can be anybody else's: what is
found under it was left by a cluster that is gone, and is removed. Where iptables or nft is there, connections to the outside go out
under this machine's address; else only this machine is reached. It takes root, and the kernel's leave; `refusal` says what is missing.
"""

import contextlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Literal

from podway.errors import ProviderError

NETWORK = "10.214"  # inside 10.0.0.0/8 and rarely anyone's
MOST_HOSTS = 250
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


@cache
def refusal() -> str | None:
    """Why no cluster can have a network of its own here; None: it can."""
    if os.environ.get("PODWAY_SHARED_NETWORK"):
        return "PODWAY_SHARED_NETWORK is set"
    if os.geteuid() != 0:
        return "only root can make networks"
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        return "the programs ip and nsenter (iproute2, util-linux) are missing"
    name = f"pwl-try{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=20)
    if tried.returncode:
        return f"networks cannot be made here: {tried.stderr.strip()}"
    tried = subprocess.run(["nsenter", f"--net=/run/netns/{name}", "true"], capture_output=True, text=True, timeout=20)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
    return f"networks cannot be entered here: {tried.stderr.strip()}" if tried.returncode else None


def address_in(number: int, rank: int) -> str:
    """Of one host."""
    return f"{NETWORK}.{number}.{rank + 2}"


def path_of(number: int) -> str:
    """The file that stands for the network."""
    return f"/run/netns/{_name(number)}"


def make(number: int, hosts: int) -> None:
    """The network of a cluster, unless it is there."""
    name = _name(number)
    if hosts > MOST_HOSTS:
        raise ProviderError(f"a network holds {MOST_HOSTS} hosts")
    if Path(f"/run/netns/{name}").exists() and Path(f"/sys/class/net/{name}").exists():
        return
    remove(number)
    _ip(["netns", "add", name])
    _ip(["link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name])
    _ip(["addr", "add", f"{NETWORK}.{number}.1/24", "dev", name])
    _ip(["-n", name, "link", "set", "lo", "up"])
    for rank in range(hosts):
        _ip(["-n", name, "addr", "add", f"{address_in(number, rank)}/24", "dev", "eth0"])
    _ip(["-n", name, "link", "set", "eth0", "up"])
    _ip(["link", "set", name, "up"])
    _ip(["-n", name, "route", "add", "default", "via", f"{NETWORK}.{number}.1"])
    _allow_outside(number)


def remove(number: int) -> None:
    """All of it; silence when there is nothing."""
    name = _name(number)
    if Path(f"/sys/class/net/{name}").exists():
        _run(["ip", "link", "del", name])
        _masquerade(number, "-D")
    if Path(f"/run/netns/{name}").exists():
        _run(["ip", "netns", "del", name])


def _name(number: int) -> str:
    return f"pwl-{number}"


def _allow_outside(number: int) -> None:
    """Let connections out under this machine's address, where there is a program that can say so."""
    if _masquerade(number, "-I"):
        with contextlib.suppress(OSError):
            _FORWARD.write_text("1")


def _masquerade(number: int, verb: Literal["-I", "-D"]) -> bool:
    net, name = f"{NETWORK}.{number}.0/24", _name(number)
    if shutil.which("iptables"):
        rules = (
            f"-t nat {verb} POSTROUTING -s {net} ! -d {NETWORK}.0.0/16 -j MASQUERADE",
            # Docker, among others, has the machine forward nothing that is not allowed by name.
            f"{verb} FORWARD -i {name} -j ACCEPT",
            f"{verb} FORWARD -o {name} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        )
        done = [_run(["iptables", "-w", "5", *rule.split()]) for rule in rules]  # each, whatever became of another
        return all(done)
    if shutil.which("nft"):
        table = f"podway_{number}"
        if verb == "-D":
            return _run(["nft", "delete", "table", "ip", table])
        chain = "{ type nat hook postrouting priority 100 ; }"
        out = f"ip saddr {net} ip daddr != {NETWORK}.0.0/16 masquerade"
        return all(
            _run(["nft", *command.split()])
            for command in (
                f"add table ip {table}",
                f"add chain ip {table} out {chain}",
                f"add rule ip {table} out {out}",
            )
        )
    return False


def _run(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, timeout=30).returncode == 0


def _ip(arguments: list[str]) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise ProviderError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
