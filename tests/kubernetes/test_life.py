"""The end-to-end tests of the small Kubernetes, word for word, on real controllers."""

import pytest

from tests.e2e.test_kubernetes import (
    test_a_life,
    test_a_preempted_node_brings_the_job_back,
    test_the_second_says_why_it_waits_and_runs_after,
)
from tests.e2e.test_kubernetes_one_shot import (
    test_exit_42_begins_again_and_keeps_both_logs,
    test_it_runs_to_its_end_with_ranks_secrets_and_exit_codes,
)

pytestmark = pytest.mark.kubernetes

__all__ = [
    "test_a_life",
    "test_a_preempted_node_brings_the_job_back",
    "test_exit_42_begins_again_and_keeps_both_logs",
    "test_it_runs_to_its_end_with_ranks_secrets_and_exit_codes",
    "test_the_second_says_why_it_waits_and_runs_after",
]
