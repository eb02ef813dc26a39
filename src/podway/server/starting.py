"""Starting this machine's own server: once, detached, ready when this returns."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import msgspec

from podway.errors import UserError
from podway.home import unwritable

START_TIMEOUT_S = 30.0  # for another command's server that has begun a moment ago
BUSY_TIMEOUT_S = 120.0  # for one that is alive: it takes a second or two, except where a machine has far too much to do


def start_server(place: Path, keep: Mapping[str, Mapping[str, str | None]] | None = None) -> None:
    """Start this machine's server and wait until it is ready; two at once start one.

    `keep`: variables of providers (by provider) that stay as they were, whatever this process has.
    """
    before = _stamp(place)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" or value}
    for variables in (keep or {}).values():
        for name, value in variables.items():
            environment.pop(name, None)
            environment |= {name: value} if value is not None else {}
    with _open(place / "server.out") as out:
        said_before = out.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "podway.server.main", "--started-by-command"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd="/",
            env=environment,
        )
    started = time.monotonic()
    while time.monotonic() < started + (BUSY_TIMEOUT_S if child.poll() is None else START_TIMEOUT_S):
        if _stamp(place) not in (None, before):
            return
        if child.poll() not in (None, 0, 1):
            break
        if child.poll() == 1 and _stamp(place) is not None and _answers(place):
            return  # another command started it a moment ago
        time.sleep(0.02)
    if child.poll() is None:
        what = f"the Podway server has not answered within {BUSY_TIMEOUT_S:g} s, and is still starting"
        raise UserError(what, f"this machine is busy: try again in a while; {place / 'server.log'} says how far it is")
    raise _why_not(place, said_before)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("ab")
    except OSError as error:
        raise unwritable(error) or error from None


def _why_not(place: Path, said_before: int) -> UserError:
    """What the server itself said, where it was a sentence for people."""
    with contextlib.suppress(OSError), open(place / "server.out", "rb") as out:
        out.seek(said_before)
        lines = out.read(1 << 16).decode(errors="replace").splitlines()
        for line, hint in pairwise([*lines, ""]):
            if line.startswith("Error: "):
                return UserError(f"the Podway server did not start: {line.removeprefix('Error: ')}", hint.strip())
    with contextlib.suppress(OSError):
        if os.statvfs(place).f_bavail == 0 and (
            full := unwritable(OSError(errno.ENOSPC, "No space left on device", str(place)))
        ):
            return full  # the server could not write why
    return UserError("the Podway server did not start", f"see why in {place / 'server.log'} and {place / 'server.out'}")


def _stamp(place: Path) -> tuple[int, int] | None:
    try:
        found = (place / "server.json").stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino


def _answers(place: Path) -> bool:
    try:
        address = msgspec.json.decode((place / "server.json").read_bytes())["url"].rpartition("//")[2].partition(":")
        with socket.create_connection((address[0], int(address[2])), timeout=1):
            return True
    except (OSError, msgspec.DecodeError, KeyError, ValueError):
        return False
