"""What Podway does on a machine besides talking to its agent: claim it, start the agent, remove every trace.

This file is not imported there but sent: `python3` on the machine reads it from its input, then one JSON line that says what
to do, then perhaps the agent's own file, packed; it answers one JSON line. So it is one file, standard library only, Python >= 3.8,
and nothing secret is ever in an argument. On this side `program()` is the text to send and `command` what to run.

    claim    take the machine's lease (a file in /tmp, there or not there in one step), see what it has
    start    put the agent's file in place unless it is there, start it as a daemon
    trust    let in whoever has a certificate of an authority, by a line of authorized_keys
    remove   end every process that carries the host's mark, remove the files Podway made, give the lease back

The lease is named by the machine's ssh host key, so that it is one for the machine, whoever logs in and by whatever address.
"""

# It runs on any Python >= 3.8, and starts faster without pathlib:
# ruff: noqa: PTH101, PTH103, PTH104, PTH106, PTH108, PTH111, PTH112, PTH114, PTH116, PTH117, PTH118, PTH120, PTH208
from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Fields = dict[str, Any]

STATE = ".podway"
WORKDIR = "sky_workdir"
OWNER = "ssh-owner.json"
REPLY = "PODWAY-REPLY "
OLD_PYTHON = 98  # what `command` exits with where python3 cannot run the program
# What the agent keeps below STATE; anything else there is not ours (a person's own Podway may live in the same folder).
AGENT_FILES = (
    *("agent.lock", "agent.pid", "agent.log", "agent.sock", "bell", "jobs", "incoming", "manifests", "applied"),
    *("mounts", "idle_shutdown.json", "containers", "uv"),
)
CONTAINERS_USED = "containers"  # in the agent's state: jobs had images (hosts/agent/container_spec.py)
AGENT_PREFIXES = ("agent-", "trash.", "python-")
START_S = 30.0
KILL_S = 15.0
ALONE_S = 45.0


class MachineRefused(Exception):
    """What cannot be done here, and a word for programs."""

    def __init__(self, what: str, code: str) -> None:
        super().__init__(what)
        self.code = code


def program() -> bytes:
    """This file, to be sent."""
    with open(__file__, "rb") as file:
        return file.read()


def command(size: int) -> str:
    """The shell command that runs a program of `size` bytes from its input; any login shell takes it."""
    check = f"sys.version_info < (3, 8) and sys.exit({OLD_PYTHON})"
    run = f'exec(compile(sys.stdin.buffer.read({size}), "podway", "exec"))'
    return f"python3 -I -S -c 'import sys; {check}; {run}'"


def socket_path(home: str) -> str:
    """Where the agent of a home listens."""
    return f"{home}/{STATE}/agent.sock"


def agent_path(home: str, digest: str) -> str:
    """The agent's file, named by its content: a new version never changes under a running agent."""
    return f"{home}/{STATE}/agent-{digest[:16]}.pyz"


def claim(request: Fields) -> Fields:
    """{lease, lease_path, home, id, agent} -> {home, address, python, agent}; or {held} by whom; or {stale}: an
    earlier cluster that no longer runs left its files, and must be removed first."""
    held = _take(request["lease_path"], request["lease"])
    if held is not None:
        return {"held": held}
    home = _home(request)
    state = os.path.join(home, STATE)
    known = _read(os.path.join(state, OWNER))
    if known is not None and not _same(known, request["lease"]):
        if not _agent_lives(state):
            return {"stale": known.get("id", "")}
        os.unlink(request["lease_path"])  # it was lost (a cleaner of /tmp), but the machine is in use
        return {"held": known}
    made = [path for path in (home, os.path.join(home, WORKDIR)) if not os.path.isdir(path)]
    os.makedirs(state, 0o700, exist_ok=True)
    os.chmod(state, 0o700)
    _take(os.path.join(state, OWNER), dict(request["lease"], id=request["id"], made=made))
    if (_read(os.path.join(state, OWNER)) or {}).get("id") != request["id"]:
        raise MachineRefused("another host of the cluster has this home", "shared-home")
    os.makedirs(os.path.join(home, WORKDIR), exist_ok=True)
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "home": home,
        "address": connection[2] if len(connection) == 4 else "",
        "python": ".".join(map(str, sys.version_info[:3])),
        "agent": _digest(agent_path(home, request["agent"])) == request["agent"],
    }


def start(request: Fields, body: bytes) -> Fields:
    """{lease_path, home, id, agent, address} and perhaps the agent's file (packed by zlib) -> {pid}."""
    home = request["home"]
    path = agent_path(home, request["agent"])
    if (_read(os.path.join(home, STATE, OWNER)) or {}).get("id") != request["id"]:
        raise MachineRefused("the machine was given back meanwhile", "given-back")
    if body:
        _put(path, _unpacked(request, body), 0o700)
    arguments = [sys.executable, "-S", "-E", path, "serve", "--home", home, "--address", request["address"], "--daemon"]
    done = subprocess.run(
        arguments,
        env=_environment(request["id"]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=START_S,
    )
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise MachineRefused(f"the agent did not start: {said[-1] if said else done.returncode}", "agent")
    return {"pid": int(done.stdout)}


def remove(request: Fields, body: bytes) -> Fields:
    """{lease, lease_path, home, id, agent} and perhaps the agent's file -> {removed}, or {need: agent} to be asked again."""
    home = _home(request)
    state = os.path.join(home, STATE)
    path = agent_path(home, request["agent"])
    if body:
        path = f"/tmp/podway-remove-{os.getpid()}.pyz"
        _put(path, _unpacked(request, body), 0o600)
    elif _digest(path) != request["agent"]:
        return {"need": "agent"}
    try:
        sys.path.insert(0, path)
        # Only here, on the machine, and only now does the name lead somewhere: into the agent's file.
        from podway_agent import processes  # type: ignore[import-not-found]

        left = processes.kill_hosts([request["id"]], KILL_S)
        if left:
            raise MachineRefused(f"processes are still alive: {left}", "alive")
        if os.path.isdir(state) and CONTAINERS_USED in os.listdir(state):
            from podway_agent import container

            container.remove([request["id"]], container.as_root())
        holder, note = _read(request["lease_path"]), _read(os.path.join(state, OWNER))
        if holder is None or _same(holder, request["lease"]):
            if note is None or note.get("id") == request["id"]:
                _remove_files(home, state)
                mark = _mark(request["id"])
                _change_authorized_keys(lambda lines: [line for line in lines if not line.endswith(f" {mark}")])
            with contextlib.suppress(FileNotFoundError):
                os.unlink(request["lease_path"])
    finally:
        if body:
            os.unlink(path)
    return {"removed": True}


def trust(request: Fields) -> Fields:
    """{id, line} -> {trusted}: the line is in authorized_keys, with the host's mark, until `remove`."""
    line = f"{request['line']} {_mark(request['id'])}"
    _change_authorized_keys(lambda lines: lines if line in lines else [*lines, line])
    return {"trusted": True}


def _mark(host_id: str) -> str:
    return f"podway:{host_id}"


def _change_authorized_keys(change: Callable[[list[str]], list[str]]) -> None:
    """Rewrite the login's authorized_keys; a file that holds nothing any more goes."""
    path = os.path.realpath(os.path.expanduser("~/.ssh/authorized_keys"))
    folder = os.path.dirname(path)
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            before = file.read().splitlines()
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        before, mode = [], 0o600
    after = change(before)
    if after == before:
        return
    os.makedirs(folder, 0o700, exist_ok=True)
    if after:
        _put(path, "".join(f"{line}\n" for line in after).encode("utf-8", "surrogateescape"), mode)
    else:
        os.unlink(path)
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # only if nothing else is in it


def _unpacked(request: Fields, body: bytes) -> bytes:
    """The agent's file, as it was before it was sent."""
    with contextlib.suppress(zlib.error):
        data = zlib.decompress(body)
        if hashlib.sha256(data).hexdigest() == request["agent"]:
            return data
    raise MachineRefused("the agent's file arrived damaged", "damaged")


def _home(request: Fields) -> str:
    given = request.get("home") or "~"
    home = os.path.expanduser(given)
    if not os.path.isabs(home):
        raise MachineRefused(f"home {given} is not an absolute path here", "home")
    return os.path.normpath(home)


def _environment(host_id: str) -> dict[str, str]:
    """What the agent and so every job starts with: a login's PATH, as a person finds it there."""
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "USER", "LOGNAME", "SHELL") if name in os.environ}
    path = os.environ.get("PATH", os.defpath)
    with contextlib.suppress(OSError, subprocess.SubprocessError, UnicodeDecodeError):
        asked = subprocess.run(
            ["bash", "-lc", 'printf "\\036%s" "$PATH"'],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=5.0,
        )
        path = asked.stdout.decode().rpartition("\036")[2] or path
    return dict(kept, PATH=path, PODWAY_HOST_ID=host_id)


def _take(path: str, lease: Fields) -> Fields | None:
    """Take the lease; None when it is ours now, or whose it is."""
    while True:
        temporary = f"{path}.{os.getpid()}"
        try:
            _put(temporary, json.dumps(lease).encode("ascii"), 0o644)
            os.link(temporary, path)
            return None
        except FileExistsError:
            holder = _read(path)
            if holder is not None:
                return None if _same(holder, lease) else holder
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _same(holder: Fields, lease: Fields) -> bool:
    return bool(holder.get("owner") == lease["owner"] and holder.get("cluster") == lease["cluster"])


def _read(path: str) -> Fields | None:
    """The JSON in a file; None if there is no file, and who owns it if it cannot be read."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read().decode("utf-8", "replace"))
        return found if isinstance(found, dict) else {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        with contextlib.suppress(OSError):
            return {"who": f"user id {os.stat(path).st_uid} of the machine"}
        return None


def _agent_lives(state: str) -> bool:
    """Whether somebody holds the agent's lock."""
    try:
        lock = os.open(os.path.join(state, "agent.lock"), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(lock)


def _remove_files(home: str, state: str) -> None:
    _unmount(state)
    owner = _read(os.path.join(state, OWNER)) or {}
    made = [path for path in owner.get("made") or () if isinstance(path, str)]
    _remove_synced(state)
    workdir = os.path.join(home, WORKDIR)
    if workdir in made:
        _remove_tree(workdir)
    if os.path.isdir(state):
        for name in os.listdir(state):
            if name in AGENT_FILES or name == OWNER or name.startswith(AGENT_PREFIXES):
                _remove_tree(os.path.join(state, name))
    for folder in [state, *([home] if home in made else [])]:
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # only if nothing else is in it


def _unmount(state: str) -> None:
    """Buckets whose mounts were killed a moment ago (podway.storage.render says what they leave here)."""
    mounts = os.path.join(state, "mounts")
    for name in os.listdir(mounts) if os.path.isdir(mounts) else ():
        for kind, command in (("target", ["fusermount3", "-uz"]), ("made", ["rmdir"])):
            try:
                with open(os.path.join(mounts, name, kind), encoding="utf-8", errors="surrogateescape") as file:
                    paths = file.read().splitlines()
            except FileNotFoundError:
                continue
            for path in paths:
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    subprocess.run([*command, path], stderr=subprocess.DEVNULL, timeout=10.0)


def _remove_synced(state: str) -> None:
    """Remove the files that were synced and are as they were put; what a job has changed or added is its result."""
    # As above.
    from podway_agent.place import Place  # type: ignore[import-not-found]
    from podway_agent.records import AppliedRecord, fingerprint_of  # type: ignore[import-not-found]

    applied = os.path.join(state, "applied")
    for name in os.listdir(applied) if os.path.isdir(applied) else ():
        if not name.endswith(".json"):
            continue
        with open(os.path.join(applied, name), "rb") as file:
            record = AppliedRecord.decode(file.read())
        try:
            place = Place(record.base)
        except OSError:
            continue  # the tree is gone
        with place:
            for path, (_, fingerprint) in record.files.items():
                found = place.stat(path)
                if found is not None and fingerprint is not None and list(fingerprint_of(found)) == list(fingerprint):
                    place.remove_file(path)
            for path, (kind, _, target) in sorted(record.others.items(), reverse=True):
                if kind != "dir" and place.link_target(path) == target:
                    place.remove_file(path)
                else:
                    place.remove_empty(path)
        if record.root == "dir":
            with contextlib.suppress(OSError):
                os.rmdir(record.base)


def _remove_tree(path: str) -> None:
    def again(function: Any, name: str, error: object) -> None:
        """A job may leave read-only folders behind; they are still ours to delete."""
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(name), 0o700)
            os.chmod(name, 0o700)
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(name)

    try:
        folder = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if folder:
        shutil.rmtree(path, onerror=again)
    else:
        os.unlink(path)


def _put(path: str, data: bytes, mode: int) -> None:
    """The file, whole or not at all; never through a link that somebody left in /tmp."""
    temporary = f"{path}.new.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def _answer() -> Fields:
    request: Fields = json.loads(sys.stdin.buffer.readline().decode("ascii"))
    body = sys.stdin.buffer.read(request["size"])
    with _alone(request["lease_path"]):
        if request["op"] in ("claim", "trust"):
            return claim(request) if request["op"] == "claim" else trust(request)
        return start(request, body) if request["op"] == "start" else remove(request, body)


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """One of these at a time on a machine: a start whose caller was killed must not overlap the removal that follows.

    The mutex is a socket's abstract name (unix(7)): it leaves no file, and goes with the process however that ends.
    """
    until = time.monotonic() + ALONE_S
    with socket.socket(socket.AF_UNIX) as mutex:
        while True:
            try:
                mutex.bind("\0" + name)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise
                time.sleep(0.02)
        yield


def main() -> None:
    """Do what the input says, answer one line."""
    began = time.monotonic()
    try:
        reply = _answer()
    except MachineRefused as error:
        reply = {"error": str(error), "code": error.code}
    except subprocess.TimeoutExpired:
        reply = {"error": f"the agent did not start within {START_S:g} s", "code": "agent"}
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        where = "" if not error.filename else f" ({os.fsdecode(error.filename)})"
        reply = {"error": f"{error.strerror}{where}", "code": "no-space" if full else "io"}
    reply["seconds"] = round(time.monotonic() - began, 3)
    sys.stdout.write(f"\n{REPLY}{json.dumps(reply)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
