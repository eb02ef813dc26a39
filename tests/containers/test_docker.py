"""The same with Docker's daemon, where there is one to start: what holds the files, a restart of it, and its removal."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.hosts.agent import container
from tests.conftest import wait_until
from tests.containers.tools import root_archive
from tests.hosts.agent_host import Host, until

OPTIONS = ("--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs")


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a daemon of our own, which has the image tiny:1."""
    if os.geteuid() != 0 or not (shutil.which("dockerd") and shutil.which("docker") and shutil.which("busybox")):
        pytest.skip("there is no container runtime: dockerd and busybox for root")
    place = tmp_path_factory.mktemp("docker")
    address = f"unix://{place}/sock"
    command = [
        "dockerd",
        *OPTIONS,
        "--data-root",
        str(place / "data"),
        "--exec-root",
        str(place / "exec"),
        "-H",
        address,
    ]
    with open(place / "log", "wb") as log:
        daemon = subprocess.Popen([*command, "--pidfile", str(place / "pid")], stdout=log, stderr=log)
    try:
        wait_until(lambda: daemon.poll() is not None or talk(address, "version").returncode == 0, 60, "dockerd")
        made = talk(address, "import", "--change", "USER app", "-", "tiny:1", given=root_archive())
        tried = talk(address, "run", "--rm", "--network", "host", "--entrypoint", "sh", "tiny:1", "-c", "exit 3")
        if made.returncode or tried.returncode != 3:
            pytest.skip(f"the kernel has no containers for Docker: {made.stderr!r} {tried.stderr!r}")
        yield address
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(240)
        # It leaves the namespace of the host's network mounted.
        for line in Path("/proc/mounts").read_text().splitlines():
            target = line.split()[1]
            if target.startswith(f"{place}/"):
                subprocess.run(["umount", "-l", target], check=True)


def talk(address: str, *words: str, given: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["docker", "-H", address, *words], input=given, capture_output=True, timeout=120)


def test_jobs_enter_what_docker_holds(docker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker)
    assert container.find_runtime() == "docker"
    seen = [["~/sky_workdir", "~/sky_workdir", False]]
    with Host(tmp_path) as host:

        def said(job: str, script: str, **more: str) -> tuple[int, str]:
            told = {"image": "tiny:1", "mounts": seen, **more}
            host.call(
                "start", job=job, phase="run", script=script, cwd="~/sky_workdir", interpreter=["sh"], container=told
            )
            reply = until(
                lambda: (one := host.call("status", job=job, phase="run", wait=5.0))["state"] == "exited" and one, 120
            )
            return reply["code"], (host.state / "jobs" / job / "run" / "output").read_text()

        assert said("a", "id -u; pwd; touch made; exit 4") == (4, f"1234\n{host.home}/sky_workdir\n")
        assert said("b", "echo kept > /etc/kept; ls -A /.podway-host", user="0") == (0, "")
        (holder,) = talk(docker, "ps", "-q").stdout.split()
        assert talk(docker, "stop", "-t", "0", holder.decode()).returncode == 0  # as after a restart of the host
        assert said("c", "cat /etc/kept") == (0, "kept\n")
        container.remove([host.host_id])
        assert talk(docker, "ps", "-aq").stdout == b""
