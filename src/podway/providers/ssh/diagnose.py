"""Machines of your own for `podway doctor`: the pools, and whether the sshd of each machine answers."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from podway.errors import UserError
from podway.providers.diagnosis import Finding
from podway.providers.ssh.pool import Machine, pool_names, read_pool

CONNECT_S = 3.0
THREADS = 32


def diagnose(root: Path) -> Iterator[Finding]:
    """Each pool as soon as it is known. Nobody logs in."""
    folder = root / "ssh"
    names = pool_names(folder)
    if not names:
        note = f"none; list machines of your own in {folder / 'NAME.yaml'}, or launch with --inventory FILE"
        yield Finding(what="pools", ok=True, note=note)
    for name in names:
        yield _pool(folder, name)


def _pool(folder: Path, name: str) -> Finding:
    what = f"pool {name}"
    try:
        machines = [machine for part in read_pool(folder, name).slices for machine in part.machines]
    except UserError as error:
        return Finding(what=what, ok=False, note=error.what, fix=error.hint)
    for machine in machines:
        key = machine.endpoint.identity_file
        if key and not Path(key).expanduser().is_file():
            return Finding(what=what, ok=False, note=f"{machine.name}: no key at {key}", fix="correct identity_file")
    with ThreadPoolExecutor(THREADS) as threads:
        silent = [why for why in threads.map(_why_silent, machines) if why]
    if silent:
        more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
        fix = "check its address and port, and that its sshd runs"
        return Finding(what=what, ok=False, note=f"{silent[0]}{more}", fix=fix)
    return Finding(
        what=what, ok=True, note=f"{len(machines)} machines answer" if len(machines) > 1 else "1 machine answers"
    )


def _why_silent(machine: Machine) -> str:
    """Why the sshd of a machine (of the first on the way there) does not answer; empty where it does."""
    first = machine.endpoint.way()[-1]
    try:
        with socket.create_connection((first.address, first.port), CONNECT_S) as connection:
            connection.settimeout(CONNECT_S)
            greeting = connection.recv(64)
    except OSError as error:
        return f"{machine.name} ({first}): {error.strerror or error}"
    return "" if greeting.startswith(b"SSH-") else f"{machine.name} ({first}): what answers there is not ssh"
