"""`podway ssh` and `ssh NAME` through a real API server, in both ways in which that reaches a kubelet.

An API server of Kubernetes 1.36 passes the client's WebSocket on to a kubelet that declares to understand it. To any other kubelet, and
always before 1.36, it speaks SPDY and translates.
"""

import shutil
from pathlib import Path

import pytest
from tools.bench.own_kubernetes import OwnKubernetes

from podway.providers.gke.streams import CLOSING
from podway.sandbox.kubernetes.kubelet import SPDY
from podway.sandbox.kubernetes.nodes import WEBSOCKETS
from tests.e2e.harness import Podway
from tests.e2e.test_kubernetes import at_a_terminal, podway
from tests.e2e.test_kubernetes_ssh import forward_port, launch, run_programs

pytestmark = pytest.mark.kubernetes


def test_ssh_by_websocket_and_by_spdy(own: OwnKubernetes, pod: Podway) -> None:
    """Exit codes, stdin to its end, both outputs and a terminal are the same."""
    assert own.nodes is not None
    podway(pod, "launch", "-y", "--infra", "k8s", "--gpus", "tpu-v6e-4", "-c", "one", "echo up")
    text = "".join(f"line {number}\n" for number in range(20_000))
    try:
        for features, protocol in (([WEBSOCKETS], CLOSING), ([], SPDY)):
            own.nodes.declare(features)
            before = own.nodes.exec_protocols().count(protocol)
            assert podway(pod, "ssh", "one", "--", "echo out; echo err >&2; exit 3", code=3) == "out\nerr\n"
            assert podway(pod, "ssh", "one", "--", "cat; echo end", stdin=text) == f"{text}end\n"
            assert podway(pod, "ssh", "one", "--", "true", stdin=text) == ""
            at_a_terminal(pod, "one")
            assert own.nodes.exec_protocols().count(protocol) == before + 4
    finally:
        own.nodes.declare([WEBSOCKETS])


def test_openssh_by_websocket_and_by_spdy(own: OwnKubernetes, pod: Podway, tmp_path: Path) -> None:
    """ssh, scp, sftp, rsync and a forwarded port."""
    if shutil.which("ssh") is None:
        pytest.skip("ssh is not installed")
    assert own.nodes is not None
    launch(pod, "tpu-v6e-16")
    try:
        for features in ([WEBSOCKETS], []):
            own.nodes.declare(features)
            place = tmp_path / str(len(features))
            place.mkdir()
            podway(pod, "ssh", "exp", "-w", "1", "--", "rm -rf ~/copied ~/sky_workdir/tree")
            run_programs(pod, place, "exp-worker1")
            forward_port(pod, "exp-worker1")
    finally:
        own.nodes.declare([WEBSOCKETS])
