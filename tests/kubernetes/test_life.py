"""The end-to-end tests of the small Kubernetes, word for word, on real controllers; and how a setup fails there."""

from pathlib import Path

import pytest
from tools.bench.own_kubernetes import OwnKubernetes

from tests.e2e.harness import Podway
from tests.e2e.test_kubernetes import (
    test_a_life,
    test_a_preempted_node_brings_the_job_back,
    test_buckets_are_mounted_in_the_pods,
    test_the_second_says_why_it_waits_and_runs_after,
    test_volumes_outlive_clusters,
)
from tests.e2e.test_kubernetes_one_shot import (
    RUN,
    podway,
    test_exit_42_begins_again_and_keeps_both_logs,
    test_it_runs_to_its_end_with_ranks_secrets_and_exit_codes,
)

pytestmark = pytest.mark.kubernetes

__all__ = [
    "test_a_life",
    "test_a_preempted_node_brings_the_job_back",
    "test_buckets_are_mounted_in_the_pods",
    "test_exit_42_begins_again_and_keeps_both_logs",
    "test_it_runs_to_its_end_with_ranks_secrets_and_exit_codes",
    "test_the_second_says_why_it_waits_and_runs_after",
    "test_volumes_outlive_clusters",
]


def test_a_setup_that_fails(own: OwnKubernetes, pod: Podway, tmp_path: Path) -> None:
    """It has the state that it has on every provider, with the rank, its code and its last words."""
    task = tmp_path / "task.yaml"
    task.write_text("setup: '[ $PODWAY_RANK != 2 ] || { echo no such package; exit 9; }'\nrun: sleep 1000\n")
    said = podway(pod, *RUN, "-c", "sets-up", str(task), code=100)
    assert "rank 2" in said and "setup on" in said and "exited with code 9" in said and "no such package" in said
    assert pod.client.jobs("sets-up")[-1].state == "FAILED_SETUP"
