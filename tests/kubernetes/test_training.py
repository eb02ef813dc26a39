"""Real jax over two pretended slices, and what exit codes lead to."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tools.bench.own_kubernetes import NAMESPACE, OwnKubernetes

from podway.providers.gke.api import Fields, NotFound
from tests.conftest import wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_kubernetes import podway

pytestmark = pytest.mark.kubernetes

JOBSETS = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets"
CONFIG_MAPS = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
# Every chip holds its number; the sum over all of them, of both slices, must reach every host.
ALL_REDUCE = """
import os

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

rank, hosts, address = int(os.environ["PODWAY_RANK"]), int(os.environ["PODWAY_NUM_HOSTS"]), os.environ["JAX_COORDINATOR_ADDRESS"]
jax.distributed.initialize(address, hosts, rank, coordinator_bind_address=address)
assert (hosts, jax.device_count(), jax.local_device_count()) == (8, 32, 4), jax.devices()
chips = sorted(jax.devices(), key=lambda chip: (chip.process_index, chip.id))
mesh = Mesh(np.array(chips).reshape(2, 16), ("slice", "chip"))
numbers = {chip: float(number) for number, chip in enumerate(chips)}
parts = [jax.device_put(np.array([numbers[chip]], np.float32), chip) for chip in jax.local_devices()]
spread = NamedSharding(mesh, PartitionSpec(("slice", "chip")))
whole = jax.make_array_from_single_device_arrays((32,), spread, parts)
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(whole)
print("rank", rank, "slice", os.environ["MEGASCALE_SLICE_ID"], "sum", int(total))
"""


def test_all_reduce_over_two_slices(own: OwnKubernetes, pod: Podway, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "all_reduce.py").write_text(ALL_REDUCE)
    (tmp_path / "task.yaml").write_text(
        """
num_nodes: 2
resources: {infra: k8s, accelerators: tpu-v6e-16}
workdir: work
envs: {JAX_PLATFORMS: cpu, XLA_FLAGS: --xla_force_host_platform_device_count=4}
run: python all_reduce.py
"""
    )
    said = podway(pod, "launch", "--raw", "-y", "-c", "two", str(tmp_path / "task.yaml"), seconds=600)
    for rank in range(8):
        assert f"rank {rank} slice {rank // 4} sum {sum(range(32))}" in said, said
    pools = {one["spec"]["nodeName"].rsplit("-", 1)[0]: _slice(one) for one in own.pods()}
    assert sorted(pools) == ["pool-0", "pool-1"] and sorted(pools.values()) == ["0", "1"], (
        "a slice has a pool to itself"
    )
    assert all(pools[one["spec"]["nodeName"].rsplit("-", 1)[0]] == _slice(one) for one in own.pods())


def _slice(found: Fields) -> str:
    return str(found["metadata"]["labels"]["jobset.sigs.k8s.io/job-index"])


def test_exit_codes_of_a_job(own: OwnKubernetes, pod: Podway, tmp_path: Path) -> None:
    """42 begins again where the task says so; 1 fails with the rank and its last lines."""
    (tmp_path / "task.yaml").write_text(
        """
resources:
  infra: k8s
  accelerators: tpu-v6e-16
  job_recovery: {strategy: FAILOVER, recover_on_exit_codes: [42]}
run: |
  echo attempt $PODWAY_ATTEMPT
  [ $PODWAY_RANK$PODWAY_ATTEMPT != 21 ] || exit 42
  [ $PODWAY_RANK$PODWAY_ATTEMPT != 32 ] || { echo the last words; exit 1; }
  [ $PODWAY_ATTEMPT = 1 ] || sleep 1000
"""
    )
    said = podway(pod, "launch", "-y", "-c", "codes", str(tmp_path / "task.yaml"), code=100, seconds=480)
    assert "attempt 2" in said and "attempt 3" not in said, said
    assert (
        "the last words" in said
        and "rank 3" in said
        and "exit code 1" in said.replace("exited with code 1", "exit code 1")
    ), said


@contextlib.contextmanager
def one_shot(own: OwnKubernetes, pod: Podway, tmp_path: Path, run: str) -> Iterator[str]:
    """Printed by --dryrun and sent as `kubectl apply` does; the JobSet's name. Deleted at the end."""
    lines = "".join(f"  {line}\n" for line in run.splitlines())
    (tmp_path / "task.yaml").write_text(
        f"""
resources:
  infra: k8s
  accelerators: tpu-v6e-16
  job_recovery: {{max_restarts_on_errors: 3}}
file_mounts: {{/kept: {{source: gs://{tmp_path.name.replace("_", "-")}, mode: MOUNT}}}}
run: |
{lines}"""
    )
    words = ("launch", "--one-shot", "--dryrun", "-c", "once", str(tmp_path / "task.yaml"))
    printed = subprocess.run(
        [sys.executable, "-m", "podway.cli.main", *words],
        env={**os.environ, "PODWAY_HOME": str(pod.home)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    objects = list(zip((CONFIG_MAPS, JOBSETS), yaml.safe_load_all(printed.stdout), strict=True))
    try:
        for path, body in objects:
            own.admin.call("POST", path, body)
        yield objects[1][1]["metadata"]["name"]
    finally:
        for path, body in objects:
            with contextlib.suppress(NotFound):
                own.admin.call("DELETE", f"{path}/{body['metadata']['name']}", {"propagationPolicy": "Background"})


def ended(own: OwnKubernetes, name: str) -> Fields | None:
    status: Fields = own.admin.call("GET", f"{JOBSETS}/{name}").get("status") or {}
    return status if status.get("terminalState") else None


def test_a_one_shot_run_restarts_after_exit_42(own: OwnKubernetes, pod: Podway, tmp_path: Path) -> None:
    run = "if [ $PODWAY_RANK = 2 ] && mkdir /kept/tried; then exit 42; fi\necho done on $PODWAY_RANK"
    with one_shot(own, pod, tmp_path, run) as name:
        status = wait_until(lambda: ended(own, name), 120, "the end")
        assert (status["terminalState"], status["restarts"]) == ("Completed", 1), status


def test_a_one_shot_run_fails_after_exit_1(own: OwnKubernetes, pod: Podway, tmp_path: Path) -> None:
    run = "[ $PODWAY_RANK != 2 ] || { echo the last words; exit 1; }\nsleep 1000"
    with one_shot(own, pod, tmp_path, run) as name:
        status = wait_until(lambda: ended(own, name), 120, "the end")
        assert (status["terminalState"], status.get("restarts", 0)) == ("Failed", 0), status
        failed = [one for one in own.pods() if one["status"]["phase"] == "Failed"]
        said = [one["status"]["containerStatuses"][0]["state"]["terminated"] for one in failed]
        assert any(one["exitCode"] == 1 and "the last words" in one["message"] for one in said), said
