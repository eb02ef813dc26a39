"""64 pods on a real control plane: launch to output beside the time a bare JobSet takes, and the logs of 64 x 10,000 lines.

`make bench-kubernetes`, as root, with Go. The nodes are pretended (`own_kubernetes.py`): all pods are processes of this machine, so
that the figures tell what Podway adds to JobSet here, not how fast a TPU node starts.
"""

import os
import subprocess
import sys
import tempfile
import time

from tools.bench.own_kubernetes import NAMESPACE, OwnKubernetes, build, own_kubernetes

from podway.order import Order
from podway.providers.gke.manifests import Container, JobSetContext, Restarts, jobset
from podway.sandbox.kubernetes.nodes import NodePool

PODS, LINES = 64, 10_000
SLICE = "v6e-256"
JOBSETS = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets"
ORDER = Order(accelerator_type=SLICE, topology="16x16", provider="gke", hosts_per_slice=PODS, chips_per_host=4)
MOST_S = 900.0


def main() -> None:
    """Prints the table."""
    load = os.getloadavg()[0]
    with own_kubernetes(build(), (NodePool(name="pool-0", accelerator_type=SLICE),), installed=("jobset",)) as own:
        first, last = _bare(own)
        print(f"bare JobSet of {PODS} pods: first ended after {first:.1f} s, all after {last:.1f} s", flush=True)
        with tempfile.TemporaryDirectory() as home:
            env = {**os.environ, "PODWAY_HOME": home, "KUBECONFIG": str(own.kubeconfig)}
            try:
                for what, figure in _podway(env):
                    print(f"{what}: {figure}", flush=True)
            finally:
                _run(env, "down", "-y", "big")
                _run(env, "server", "stop")
    print(f"load of the machine: {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} cores")


def _bare(own: OwnKubernetes) -> tuple[float, float]:
    """When the first and the last of the pods of a JobSet that says one word have ended."""
    context = JobSetContext(owner="bench", context="real", namespace=NAMESPACE)
    container = Container(image="python:3.12", command=("bash", "-c", "echo hello"), grace_s=1)
    body = jobset(context, "bare", ORDER, container, Restarts())
    begun, first = time.monotonic(), None
    own.admin.call("POST", JOBSETS, body)
    while time.monotonic() - begun < MOST_S:
        ended = sum((one.get("status") or {}).get("phase") == "Succeeded" for one in own.pods())
        first = first or (time.monotonic() - begun if ended else None)
        if ended == PODS and first is not None:
            last = time.monotonic() - begun
            own.admin.call("DELETE", f"{JOBSETS}/{body['metadata']['name']}", {"propagationPolicy": "Background"})
            while own.pods():
                time.sleep(0.2)
            return first, last
        time.sleep(0.1)
    raise RuntimeError("the bare JobSet did not end")


def _podway(env: dict[str, str]) -> list[tuple[str, str]]:
    words = (
        "launch",
        "--raw",
        "-y",
        "--infra",
        "k8s",
        "--gpus",
        f"tpu-{SLICE}",
        "-c",
        "big",
        "echo hello from $PODWAY_RANK",
    )
    first, last, lines = _timed(env, words, "hello from")
    assert lines == PODS, lines
    found = [("podway launch", f"first output after {first:.1f} s, output of all {PODS} after {last:.1f} s")]
    first, last, lines = _timed(env, ("exec", "big", "--raw", "echo hello from $PODWAY_RANK"), "hello from")
    assert lines == PODS, lines
    found.append(("podway exec on it", f"first output after {first:.1f} s, output of all {PODS} after {last:.1f} s"))
    first, last, lines = _timed(env, ("exec", "big", "--raw", f"seq -f 'line %g' {LINES}"), "line ")
    assert lines == PODS * LINES, lines
    found.append(
        (f"logs of {PODS} x {LINES:,} lines", f"all {lines:,} shown after {last:.1f} s, {lines / last:,.0f} lines/s")
    )
    return found


def _timed(env: dict[str, str], words: tuple[str, ...], mark: str) -> tuple[float, float, int]:
    """When the first and the last line with a mark were printed, and how many there were."""
    begun, first, last, lines = time.monotonic(), 0.0, 0.0, 0
    command = [sys.executable, "-m", "podway.cli.main", *words]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if mark in line and line.startswith("("):
                last = time.monotonic() - begun
                first, lines = first or last, lines + 1
    return first, last, lines


def _run(env: dict[str, str], *words: str) -> None:
    subprocess.run([sys.executable, "-m", "podway.cli.main", *words], env=env, capture_output=True, timeout=MOST_S)


if __name__ == "__main__":
    main()
