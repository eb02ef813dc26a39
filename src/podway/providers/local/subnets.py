"""Loopback networks: each cluster has a /16 of 127.0.0.0/8, claimed over every Podway home of this user on this machine.

A claim is a symbolic link `N -> the cluster's directory`: making one is atomic, and one that points nowhere is free again.
"""

import hashlib
import os
import tempfile
from pathlib import Path

from podway.errors import UserError
from podway.files import write_atomically

SUBNETS = range(16, 250)


def subnet_of(place: Path) -> int:
    """The number that the cluster has claimed."""
    return int((place / "subnet").read_text())


def host_address(place: Path, rank: int) -> str:
    """The loopback address of one host of the cluster."""
    return f"127.{subnet_of(place)}.{rank // 250}.{rank % 250 + 1}"


def _registry() -> Path:
    """The folder of claims."""
    place = Path(tempfile.gettempdir()) / f"podway-subnets-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.is_symlink() or place.stat().st_uid != os.getuid():  # /tmp is everybody's
        raise UserError(f"{place} is another user's", "remove it, or set TMPDIR to a directory of your own")
    return place


def claim_subnet(place: Path) -> None:
    """Take a free network for the cluster, once."""
    if (place / "subnet").exists():
        return
    registry = _registry()
    start = int(hashlib.sha256(str(place).encode()).hexdigest(), 16) % len(SUBNETS)
    for step in range(len(SUBNETS)):
        number = SUBNETS[(start + step) % len(SUBNETS)]
        claim = registry / str(number)
        if claim.is_symlink() and not claim.exists():
            claim.unlink(missing_ok=True)  # its cluster is gone
        try:
            claim.symlink_to(place.resolve())
        except FileExistsError:
            if claim.resolve() != place.resolve():
                continue
        write_atomically(place / "subnet", str(number).encode())
        return
    raise UserError("all simulated networks of this machine are taken", "take a cluster down: podway down NAME")


def release_subnet(place: Path) -> None:
    """Give the cluster's network back."""
    if (place / "subnet").exists():
        claim = _registry() / (place / "subnet").read_text()
        if claim.is_symlink() and claim.resolve() == place.resolve():
            claim.unlink(missing_ok=True)
