"""`ssh NAME` with the real OpenSSH client: simulated hosts, and hosts of a team's server with certificates that live minutes."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.sandbox.hosts import make_hosts, pool_text, why_no_hosts
from podway.sandbox.hosts.netns import NetnsHosts, why_no_namespaces
from podway.server.client import Client
from podway.task.task import Accelerator, Autostop, Placement, Resources, Task
from tests.conftest import wait_until
from tests.e2e.harness import Podway, task

LIMIT_S = 240


@pytest.fixture(autouse=True)
def _openssh() -> None:
    if shutil.which("ssh") is None:
        pytest.skip("ssh is not installed (tools/system-packages installs it for root)")


def ssh(pod: Podway, *words: str, program: str = "ssh", code: int = 0, data: bytes = b"") -> str:
    """What an OpenSSH program prints with the entries of this Podway."""
    done = subprocess.run(
        [program, "-F", str(pod.home / "ssh" / "config"), *words], input=data, capture_output=True, timeout=LIMIT_S
    )
    assert done.returncode == code, (done.stdout + done.stderr).decode(errors="replace")
    return done.stdout.decode(errors="replace")


def entry(pod: Podway, name: str) -> Path:
    return pod.home / "ssh" / "hosts" / name


def up(pod: Podway, name: str = "c", **more: object) -> None:
    pod.start()
    pod.client.launch(task("true", **more), cluster=name)
    assert pod.finished(name, 1) == "SUCCEEDED"
    wait_until(entry(pod, name).exists, what="the entry")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def running(*words: str) -> Iterator["subprocess.Popen[bytes]"]:
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield child
    finally:
        child.terminate()
        child.communicate(timeout=LIMIT_S)


def test_a_simulated_host_is_a_host_to_openssh(pod: Podway, tmp_path: Path) -> None:
    up(pod)
    home = pod.home / "local/c/host-1"
    said = ssh(pod, "c-worker1", "pwd; echo $HOME $PODWAY_RANK $TPU_WORKER_ID; exit 3", code=3)
    assert said.split() == [str(home), str(home), "1", "1"]
    assert ssh(pod, "c", "echo $PODWAY_RANK") == ssh(pod, "c-worker0", "echo $PODWAY_RANK") == "0\n"
    # What editors do first, and what is left of a program that a signal ended.
    assert ssh(pod, "c", "bash", "-s", data=b"cat >&2 <<< noise; echo $((40 + 2))\n") == "42\n"
    assert ssh(pod, "-tt", "c-worker1", "tty && [ -t 0 ] && exit 5", code=5).startswith("/dev/pts/")
    ssh(pod, "c", "kill -9 $$", code=255)
    ssh(pod, "c-worker7", "true", code=255)
    blob = os.urandom(5_000_000)
    (tmp_path / "blob").write_bytes(blob)
    there = str(tmp_path / "blob")
    ssh(pod, "-q", there, "c:up", program="scp")
    ssh(pod, "-q", "-O", there, "c:old", program="scp")
    ssh(pod, "-q", "c:up", str(tmp_path / "down"), program="scp")
    ssh(pod, "-q", "-O", "c:old", str(tmp_path / "old"), program="scp")
    assert (tmp_path / "down").read_bytes() == (tmp_path / "old").read_bytes() == blob
    assert (
        ssh(pod, "c", "cat; cat up", data=blob).encode(errors="replace")[:9]
        == blob.decode(errors="replace").encode()[:9]
    )
    if shutil.which("rsync"):
        shell = f"ssh -F {pod.home}/ssh/config"
        subprocess.run(["rsync", "-a", "-e", shell, there, "c-worker1:sky_workdir/"], check=True, timeout=LIMIT_S)
        assert (home / "sky_workdir" / "blob").read_bytes() == blob
    for path in (pod.home / "ssh").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    pod.down("c")
    wait_until(lambda: not entry(pod, "c").exists(), what="the end of the entry")


def test_ports_of_a_simulated_host(pod: Podway) -> None:
    """Two hosts with a server each on the same port: each is reached at its own."""
    up(pod)
    port = free_port()
    serving = (
        f"cd $(mktemp -d) && echo $PODWAY_RANK > rank && exec python3 -u -m http.server {port} --bind $PODWAY_HOST_IP"
    )
    config = str(pod.home / "ssh" / "config")
    with contextlib.ExitStack() as stack:
        for rank in (0, 1):
            child = stack.enter_context(running("ssh", "-tt", "-F", config, f"c-worker{rank}", serving))
            assert child.stdout is not None and b"Serving" in child.stdout.readline()
        for rank in (0, 1):
            local = free_port()
            way = f"{local}:localhost:{port}"
            stack.enter_context(running("ssh", "-N", "-F", config, "-L", way, f"c-worker{rank}"))
            wait_until(lambda: _answers(local) == b"%d\n" % rank, what="the forwarded port")  # noqa: B023
    pod.down("c")


def _answers(port: int) -> bytes:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/rank", timeout=30) as reply:
            return bytes(reply.read())
    except OSError:
        return b""


def test_idle_time_counts_from_the_end_of_the_last_connection(pod: Podway) -> None:
    """And what a connection left running is no connection."""
    up(pod)
    with running("ssh", "-F", str(pod.home / "ssh" / "config"), "c-worker1", "echo here; cat") as session:
        assert session.stdout is not None and session.stdout.readline() == b"here\n"
        pod.client.autostop("c", Autostop(idle_minutes=0.05))
        active = pod.client.cluster("c")
        wait_until(lambda: len(pod.client.events("c")) > 0 and session.poll() is None, what="the session")
        with contextlib.suppress(AssertionError):
            wait_until(lambda: pod.client.cluster("c").state != "UP", 1.5, "nothing")
        assert pod.client.cluster("c").state == "UP" and active.state == "UP"
        ssh(pod, "c", "setsid -f sleep 300 >/dev/null 2>&1 < /dev/null")
    wait_until(lambda: pod.client.cluster("c").state == "STOPPED", 60, "autostop")
    wait_until(lambda: not entry(pod, "c").exists(), what="the end of the entry")
    pod.client.start("c")
    wait_until(entry(pod, "c").exists, what="the entry of the started cluster")
    assert ssh(pod, "c", "echo $PODWAY_RANK") == "0\n"
    pod.down("c")


@pytest.fixture
def lab(pod: Podway) -> Iterator[NetnsHosts]:
    why_not = why_no_hosts() or why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    with make_hosts(2, separate=True) as hosts:
        assert isinstance(hosts, NetnsHosts)
        (pod.home / "ssh").mkdir()
        (pod.home / "ssh" / "lab.yaml").write_text(pool_text(hosts, "v4-16"))
        yield hosts
        for index in range(2):
            assert hosts.processes(index) == []
            assert hosts.run(index, "ls -A /root /tmp").split() == ["/root:", "/tmp:"]


def test_a_team_member_logs_in_with_a_certificate(pod: Podway, lab: NetnsHosts, tmp_path: Path) -> None:
    """Ada has no key on the hosts and none of the server's files; what her ssh uses ends with her right to the cluster."""
    pod.start()
    where = Placement(provider="ssh", region="lab")
    wanted = Task(run="true", resources=(Resources(accelerator=Accelerator(type="v4-16"), placement=where),))
    pod.client.info()
    url = pod.client._connection.address
    ada, home = Client(url, pod.client.make_token("ada")), tmp_path / "ada"
    assert ada.launch(wanted, cluster="c").created
    assert pod.finished("c", 1) == "SUCCEEDED"
    environment = {**os.environ, "PODWAY_HOME": str(home)}

    def podway(*words: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "podway.cli.main", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    token = pod.client.make_token("ada", name="laptop")
    podway("login", url, "--token", token)
    assert podway("ssh", "c", "-w", "1", "--", "hostname; echo $TPU_WORKER_ID").split() == ["h1", "1"]
    config = str(home / "ssh" / "config")
    words = ["ssh", "-F", config, "c-worker1", "hostname"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "h1\n", done.stderr
    certificate = home / "ssh" / "logins" / "c.1-cert.pub"
    said = subprocess.run(["ssh-keygen", "-L", "-f", certificate], capture_output=True, text=True).stdout
    assert "podway user=ada cluster=c" in said
    texts = [path.read_text() for path in (home / "ssh").rglob("*") if path.is_file()]
    assert not any(str(pod.home) in text or str(lab.key) in text for text in texts)
    assert "cert-authority,principals=" in lab.run(1, "cat /root/.ssh/authorized_keys")
    # A certificate for another cluster, or one that is over, opens nothing.
    key = str(home / "ssh" / "id_ed25519")
    direct = [
        "ssh",
        "-i",
        key,
        "-o",
        "IdentitiesOnly=yes",
        "-o",
        "IdentityAgent=none",
        "-o",
        "StrictHostKeyChecking=no",
    ]
    direct += [
        "-o",
        f"UserKnownHostsFile={tmp_path}/none",
        "-o",
        "BatchMode=yes",
        f"root@{lab.hosts[1].address}",
        "true",
    ]
    (home / "ssh" / "id_ed25519-cert.pub").unlink(missing_ok=True)
    assert subprocess.run(direct, capture_output=True, timeout=LIMIT_S).returncode == 255
    pod.client.revoke("ada")
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 255 and "Error:" in done.stderr
    pod.client.down("c")
    wait_until(lambda: pod.client.cluster("c").state == "GONE", 60, "the end of the cluster")
