"""`ssh NAME` of pods with the real OpenSSH programs, through the API server: the image has no sshd, and no sftp-server is used."""

import contextlib
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.sandbox.kubernetes.running import NodePool, RunningKubernetes, running_kubernetes, why_no_namespaces
from podway.server.shell import write_login
from tests.conftest import wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_kubernetes import podway
from tests.e2e.test_ssh_names import free_port, running, ssh

__all__ = ["running"]


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningKubernetes]:
    why_not = why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    pools = (NodePool(name="pool-0", accelerator_type="v4-16"),)
    with running_kubernetes(tmp_path_factory.mktemp("kubernetes"), pools, network=97) as running:
        yield running


@pytest.fixture
def cluster(kubernetes: RunningKubernetes, pod: Podway, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningKubernetes]:
    if shutil.which("ssh") is None:
        pytest.skip("ssh is not installed (tools/system-packages installs it for root)")
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))
    pod.start()
    yield kubernetes
    for one in pod.client.clusters():
        pod.client.down(one.name)
    wait_until(lambda: kubernetes.left() == {}, 60, "an empty cluster")


def launch(pod: Podway, gpus: str = "tpu-v4-16") -> None:
    podway(pod, "launch", "-y", "--infra", "k8s", "--gpus", gpus, "-c", "exp", "true")
    wait_until((pod.home / "ssh" / "hosts" / "exp").exists, 60, "the entry")


def run_programs(pod: Podway, tmp_path: Path, worker: str) -> None:
    """What people and editors do with a host."""
    said = ssh(pod, worker, "pwd; echo $HOME $PODWAY_RANK; echo noise >&2; exit 3", code=3)
    rank = worker.removeprefix("exp-worker")
    assert said.split() == ["/podway/home", "/podway/home", rank]
    assert ssh(pod, "exp", "hostname; echo $PODWAY_RANK").endswith("\n0\n")
    assert ssh(pod, "exp", "bash", "-s", data=b"cat >&2 <<< noise; echo $((40 + 2))\n") == "42\n"
    assert ssh(pod, "-tt", worker, "tty && [ -t 0 ] && exit 5", code=5).startswith("/dev/pts/")
    ssh(pod, "exp-worker7", "true", code=255)
    blob = os.urandom(3_000_000)
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "blob").write_bytes(blob)
    (tmp_path / "tree" / "a file with spaces").write_text("words\n")
    (tmp_path / "tree" / "run").write_text("#!/bin/sh\necho it runs\n")
    (tmp_path / "tree" / "run").chmod(0o755)
    ssh(pod, "-q", "-r", "-p", str(tmp_path / "tree"), f"{worker}:sky_workdir/", program="scp")
    assert ssh(pod, worker, "sky_workdir/tree/run; cat 'sky_workdir/tree/a file with spaces'") == "it runs\nwords\n"
    ssh(pod, "-q", "-r", f"{worker}:sky_workdir/tree", str(tmp_path / "back"), program="scp")
    assert (tmp_path / "back" / "deep" / "blob").read_bytes() == blob
    assert (tmp_path / "back" / "run").stat().st_mode & 0o777 == 0o755
    ssh(pod, "-q", f"{worker}:nothing", str(tmp_path / "no"), program="scp", code=1)
    batch = "mkdir d\nrename sky_workdir/tree/run d/run\nln -s d/run link\nls -l d\nchmod 600 d/run\nrm link\nrm d/run\nrmdir d\n"
    listed = ssh(pod, "-q", "-b", "-", worker, program="sftp", data=batch.encode())
    assert "-rwxr-xr-x" in listed and "d/run" in listed
    assert ssh(pod, worker, "ls -A . | grep -v -e podway -e sky_workdir", code=1) == ""
    # As many bytes as there are through stdin and stdout at once, with their end.
    assert ssh(pod, worker, "cat | md5sum", data=blob) == ssh(pod, worker, "md5sum < sky_workdir/tree/deep/blob")
    if shutil.which("rsync"):
        shell = f"ssh -F {pod.home}/ssh/config"
        words = ["rsync", "-a", "-e", shell, str(tmp_path / "tree") + "/", f"{worker}:copied/"]
        subprocess.run(words, check=True, timeout=240)
        assert ssh(pod, worker, "cat copied/deep/blob | wc -c") == "3000000\n"


def forward_port(pod: Podway, worker: str) -> None:
    """To a server on the pod's loopback; where none listens, the connection ends, and ssh goes on."""
    port, local, nobody = free_port(), free_port(), free_port()
    serving = f"cd $(mktemp -d) && echo here > rank && exec python3 -u -m http.server {port} --bind 127.0.0.1"
    config = str(pod.home / "ssh" / "config")
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(running("ssh", "-tt", "-F", config, worker, serving))
        assert child.stdout is not None and b"Serving" in child.stdout.readline()
        words = ("-L", f"{local}:localhost:{port}", "-L", f"{nobody}:localhost:1")
        stack.enter_context(running("ssh", "-N", "-F", config, *words, worker))
        wait_until(lambda: _answers(local) == b"here\n", 60, "the forwarded port")
        assert _answers(nobody) == b""
        assert _answers(local) == b"here\n"


def _answers(port: int) -> bytes:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/rank", timeout=60) as reply:
            return bytes(reply.read())
    except OSError:
        return b""


@pytest.mark.long
def test_a_pod_is_a_host_to_openssh(cluster: RunningKubernetes, pod: Podway, tmp_path: Path) -> None:
    launch(pod)
    run_programs(pod, tmp_path, "exp-worker1")
    for path in (pod.home / "ssh").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    podway(pod, "down", "-y", "exp")
    wait_until(lambda: not (pod.home / "ssh" / "hosts" / "exp").exists(), 60, "the end of the entry")


@pytest.mark.long
def test_ports_of_a_pod(cluster: RunningKubernetes, pod: Podway, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a team's server says of a pod: its entry leads through the caller's own KUBECONFIG."""
    launch(pod)
    forward_port(pod, "exp-worker1")
    monkeypatch.setenv("PODWAY_HOME", str(pod.home))
    write_login(pod.client.host_login("exp", 1), "exp", 1)
    lines = (pod.home / "ssh" / "logins" / "exp.1").read_text()
    assert "ssh-proxy exp 1" in lines and "KUBECONFIG" not in lines
