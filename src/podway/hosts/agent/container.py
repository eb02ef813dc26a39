"""The image of a job on this host: pulled once, kept as one container for each image, and removed with the host.

Nothing of a job runs in a container runtime. Docker or podman only pulls the image and keeps the container's files; the process that
becomes the job enters them by itself (enter.py), and so stays a descendant of its runner: signals, exit codes, output, network, devices
and the proof that nothing is left are the same with an image and without. What setup installs, the next job finds.

With Docker a shell that sleeps, a child of Docker's daemon, holds the files, and its mount namespace is entered. podman mounts the
files itself, without any process. Containers carry the host's id as a label, by which `remove` finds all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time

from . import pull

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .wire import Fields

LABEL = "podway.host"
HOST_ROOT = "/.podway-host"  # where a container sees its host, until the job begins
RUNTIMES = ("docker", "podman")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,500}\Z")
_HOLD = "trap 'exit 0' TERM; while :; do sleep 86400 & wait; done"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_QUICK_S = 120.0


class NoContainer(Exception):
    """There will be no container; one sentence for the person who reads the log."""


class Image:
    """What the image says of itself (OCI image configuration)."""

    def __init__(self, name: str, inspected: Fields) -> None:
        config = inspected.get("Config") or {}
        self.name = name
        self.env = dict(entry.partition("=")[::2] for entry in config.get("Env") or ())
        self.user = str(config.get("User") or "")
        self.cwd = str(config.get("WorkingDir") or "/")
        self.command = [*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())]
        self.architecture = str(inspected.get("Architecture") or "")


class HostContainer:
    """One image on one host. `ready` gives what enter.py needs: the process to enter, or the directory."""

    def __init__(self, image: str, host: str, registry: Fields | None) -> None:
        if not _IMAGE.match(image):
            raise NoContainer(f"{image!r:.200} is not the name of an image")
        self._registry = registry
        self._host = host
        self._runtime = find_runtime()
        self._name = "podway-" + hashlib.sha256(f"{host}\0{image}".encode()).hexdigest()[:20]
        self._wanted = image

    def ready(self) -> tuple[Image, int | str]:
        """The image, and the pid whose mount namespace holds the container's files (Docker) or their directory (podman)."""
        with _one_at_a_time():
            image = self._image()
            return image, self._holder(image) if self._runtime == "docker" else self._mounted(image)

    def _image(self) -> Image:
        """The image, pulled if this host does not have it."""
        names = [self._wanted]
        if self._runtime == "podman" and not pull.registry_of(self._wanted):
            # podman asks nobody for a short name; Docker's meaning of it is what everybody writes.
            names.append(f"docker.io/{'' if '/' in self._wanted else 'library/'}{self._wanted}")
        for name in names:
            found = self._inspect("image", name)
            if found is not None:
                break
        else:
            name = names[-1]
            why = pull.pull(self._runtime, name, self._registry)
            if why:
                raise NoContainer(why)
            found = self._inspect("image", name)
            if found is None:
                raise NoContainer(f"{self._runtime} pulled {name} and does not have it")
        image = Image(name, found)
        here = _MACHINES.get(os.uname().machine)
        if here and image.architecture and image.architecture != here:
            raise NoContainer(f"the image {name} is built for {image.architecture}, and this host is {here}")
        return image

    def _holder(self, image: Image) -> int:
        """Docker: the process that keeps the container's files mounted, started if it does not run."""
        state = (self._inspect("container", self._name) or {}).get("State")
        if state is None:
            self._make(image)
        elif not state.get("Running"):
            self._must("start", self._name)
        state = (self._inspect("container", self._name) or {}).get("State") or {}
        pid = int(state.get("Pid") or 0)
        if not pid or not os.path.exists(f"/proc/{pid}/ns/mnt"):
            raise NoContainer(f"the container of {image.name} does not run: {state.get('Error') or 'it ended at once'}")
        return pid

    def _make(self, image: Image) -> None:
        command = ["run", "-d", "--name", self._name, "--label", f"{LABEL}={self._host}", "--network", "host"]
        command += ["--user", "0", "--workdir", "/", "--entrypoint", "sh"]
        said = ""
        # A slave sees what the host mounts later (buckets); a host whose root is not shared has no slaves.
        for propagation in (":rslave", ""):
            done = _run([self._runtime, *command, "-v", f"/:{HOST_ROOT}{propagation}", image.name, "-c", _HOLD])
            if done.returncode == 0:
                return
            said = done.stderr
            _run([self._runtime, "rm", "-f", self._name])
        if '"sh": executable file not found' in said:
            raise NoContainer(f"the image {image.name} has no sh, which runs what the task says")
        raise NoContainer(f"docker cannot start a container of {image.name}: {pull.last_line(said)}")

    def _mounted(self, image: Image) -> str:
        """podman: the directory with the container's files."""
        if self._inspect("container", self._name) is None:
            self._must("create", "--name", self._name, "--label", f"{LABEL}={self._host}", "--network", "host",
                       image.name, "sh")  # fmt: skip
        return self._must("mount", self._name).strip()

    def _inspect(self, kind: str, name: str) -> Fields | None:
        done = _run([self._runtime, "inspect", "--type", kind, name])
        try:
            found = json.loads(done.stdout) if done.returncode == 0 else []
        except ValueError:
            raise NoContainer(f"{self._runtime} inspect gives no answer: {pull.last_line(done.stderr)}") from None
        return found[0] if found else None

    def _must(self, *arguments: str) -> str:
        done = _run([self._runtime, *arguments])
        if done.returncode:
            raise NoContainer(f"{self._runtime} {arguments[0]} failed: {pull.last_line(done.stderr)}")
        return done.stdout


def find_runtime(prefix: tuple[str, ...] = ()) -> str:
    """docker where its daemon answers, else podman; `prefix` is what makes a command root's."""
    found = [name for name in RUNTIMES if shutil.which(name)]
    said = ""
    if "docker" in found:
        done = _run([*prefix, "docker", "version", "--format", "{{.Server.Version}}"])
        if done.returncode == 0:
            return "docker"
        said = pull.last_line(done.stderr)
    if "podman" in found:
        return "podman"
    if found:
        raise NoContainer(f"Docker does not answer on this host: {said}")
    raise NoContainer("this host has neither Docker nor podman, and the task has an image: install one of them there")


def remove(hosts: list[str], prefix: tuple[str, ...] = ()) -> None:
    """Remove every container of these hosts; images stay, as the next cluster may want them."""
    for runtime in RUNTIMES:
        if not shutil.which(runtime):
            continue
        for host in hosts:
            done = _run([*prefix, runtime, "ps", "-aq", "--filter", f"label={LABEL}={host}"])
            for name in done.stdout.split() if done.returncode == 0 else ():
                if runtime == "podman":
                    _run([*prefix, runtime, "umount", "-f", name])
                _run([*prefix, runtime, "rm", "-f", name])


def as_root() -> tuple[str, ...]:
    """What to put before a command for it to run as root."""
    return () if os.geteuid() == 0 else ("sudo", "-n")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """The hosts of a simulated slice share a machine, and jobs share a host: one of them pulls, and the rest find the image."""
    place = next((place for place in ("/run/lock", "/tmp") if os.access(place, os.W_OK)), "/tmp")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        lock = os.open(f"{place}/podway-images-{os.geteuid()}.lock", flags, 0o600)
    except OSError:  # somebody else's file: then two may pull the same, that is all
        yield
        return
    try:
        began = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            if began and time.monotonic() - began > pull.TELL_S:
                print("podway: waiting for an image that another job pulls on this machine", flush=True)
                began = 0.0
        yield
    finally:
        os.close(lock)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=_QUICK_S,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer in {_QUICK_S:g} s")
    except OSError as error:  # no sudo, most likely
        return subprocess.CompletedProcess(command, 127, "", str(error))
