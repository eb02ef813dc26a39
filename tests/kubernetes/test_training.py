"""Real jax over two pretended slices that Kueue admitted, and what exit codes lead to."""

from pathlib import Path

import pytest
from tools.bench.own_kubernetes import CLUSTER_QUEUE, NAMESPACE, OwnKubernetes

from podway.providers.gke.api import Fields
from tests.e2e.harness import Podway
from tests.e2e.test_kubernetes import podway

pytestmark = pytest.mark.kubernetes

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
    assert admitted(own) == [(CLUSTER_QUEUE, "32")]
    pools = {one["spec"]["nodeName"].rsplit("-", 1)[0]: _slice(one) for one in own.pods()}
    assert sorted(pools) == ["pool-0", "pool-1"] and sorted(pools.values()) == ["0", "1"], (
        "a slice has a pool to itself"
    )
    assert all(pools[one["spec"]["nodeName"].rsplit("-", 1)[0]] == _slice(one) for one in own.pods())


def admitted(own: OwnKubernetes) -> list[tuple[str, str]]:
    """Of each Workload that Kueue lets run: its queue, and how many chips it has."""
    workloads = own.admin.read_items(f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/workloads", {})
    found = []
    for one in workloads:
        given = one["status"]["admission"]
        chips = [part["resourceUsage"]["google.com/tpu"] for part in given["podSetAssignments"]]
        assert any(c["type"] == "Admitted" and c["status"] == "True" for c in one["status"]["conditions"])
        found.append((given["clusterQueue"], *chips))
    return found


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
    assert admitted(own) == [(CLUSTER_QUEUE, "16")]
    assert "attempt 2" in said and "attempt 3" not in said, said
    assert (
        "the last words" in said
        and "rank 3" in said
        and "exit code 1" in said.replace("exited with code 1", "exit code 1")
    ), said
