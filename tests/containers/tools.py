"""Real images for tests, made of busybox without a network, and a real registry that asks for a password.

Whether containers can be used is found out by using one: `why_no_containers` makes an image, mounts it, and enters it.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.conftest import wait_until

BUSYBOX = "/bin/busybox"
COMMANDS = (
    "sh",
    "sleep",
    "echo",
    "cat",
    "env",
    "ls",
    "id",
    "ps",
    "kill",
    "mkdir",
    "pwd",
    "touch",
    "yes",
    "stat",
    "seq",
    "nohup",
    "head",
)
USER, PASSWORD = "puller", "s3cr3t-pull"
_HTPASSWD = f"{USER}:$2b$04$fWTbEhgQzHpQ0I2X0atniOIfk0jqO..nz5njo6ZG8TC7UoQyvl8gq\n"
POLICY = '{"default":[{"type":"insecureAcceptAnything"}]}'
STORAGE = '[storage]\ndriver = "vfs"\ngraphroot = "{root}"\nrunroot = "{run}"\n'


class Store:
    """podman with images and containers of its own; `env` leads a process to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "storage.conf").write_text(STORAGE.format(root=folder / "storage", run=folder / "run"))
        (folder / "registries.conf").write_text("")
        self.env = {
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_REGISTRIES_CONF": str(folder / "registries.conf"),
            "DOCKER_HOST": f"unix://{folder}/no-docker",  # podman is what is tested, also where Docker runs
        }

    def podman(self, *arguments: str, given: bytes | None = None) -> str:
        env = {**os.environ, **self.env}
        done = subprocess.run(["podman", *arguments], input=given, env=env, capture_output=True, timeout=120)
        if done.returncode:
            raise RuntimeError(f"podman {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout.decode()

    def build(self, name: str, *changes: str) -> str:
        """An image of busybox; `changes` are lines of a Containerfile (USER, CMD, ENV, WORKDIR). Its name."""
        options = [word for change in changes for word in ("--change", change)]
        self.podman("import", *options, "-", name, given=root_archive())
        return name

    def containers(self) -> list[str]:
        return self.podman("ps", "-aq").split()

    def remove(self) -> None:
        self.podman("umount", "-af")
        self.podman("rm", "-af")

    def trust(self, registry: str) -> None:
        """Let a registry speak http."""
        (self.folder / "registries.conf").write_text(f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n')


@cache
def root_archive() -> bytes:
    """The files of the image, as a tar."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        for name in ("bin", "tmp", "etc", "home/app"):
            (root / name).mkdir(parents=True)
        (root / "tmp").chmod(0o1777)
        (root / "home/app").chmod(0o777)
        (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\napp:x:1234:1234::/home/app:/bin/sh\n")
        (root / "etc/group").write_text("root:x:0:\napp:x:1234:\nextra:x:77:app\n")
        (root / "etc/image-of-the-tests").write_text("busybox\n")
        shutil.copy(BUSYBOX, root / "bin/busybox")
        for command in COMMANDS:
            (root / "bin" / command).symlink_to("busybox")
        return subprocess.run(["tar", "-C", folder, "-c", "."], check=True, capture_output=True).stdout


@cache
def why_no_containers() -> str:
    """Why no container can be used here, or ''."""
    missing = [name for name in ("podman", "busybox") if not shutil.which(name)]
    if missing:
        return f"there is no container runtime: {' and '.join(missing)} missing (tools/system-packages installs them)"
    if os.geteuid() != 0:
        return "there is no container runtime for a user who is not root"
    with tempfile.TemporaryDirectory() as folder:
        try:
            store = Store(Path(folder) / "store")
            store.build("localhost/probe:1")
            store.podman("create", "--name", "probe", "--network", "host", "localhost/probe:1", "sh")
            root = store.podman("mount", "probe").strip()
            inside = subprocess.run(
                ["unshare", "-m", "chroot", root, "/bin/sh", "-c", "cat /etc/image-of-the-tests"],
                capture_output=True,
                text=True,
                timeout=60,
            )
            store.remove()
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            return f"the kernel has no containers for podman: {error}"
        return "" if inside.stdout == "busybox\n" else f"the kernel has no containers: {inside.stderr.strip()}"


@contextlib.contextmanager
def registry(folder: Path, address: str = "127.0.0.1") -> Iterator[str]:
    """A registry on this machine, whose images only USER with PASSWORD can pull and push: `address:port`."""
    with socket.create_server((address, 0)) as found:
        port = found.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "htpasswd").write_text(_HTPASSWD)
    (folder / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f"http: {{addr: '{address}:{port}'}}\nauth: {{htpasswd: {{realm: tests, path: {folder}/htpasswd}}}}\n"
    )
    with open(folder / "log", "wb") as log:
        serving = subprocess.Popen(["docker-registry", "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    try:
        wait_until(lambda: _answers(f"http://{address}:{port}/v2/"), 60, "the registry")
        yield f"{address}:{port}"
    finally:
        serving.kill()
        serving.wait(20)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=10).close()
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False
    return True
