"""The end-to-end tests of tests/e2e/test_kubernetes.py, word for word, on real controllers."""

import pytest

from tests.e2e.test_kubernetes import (
    test_a_life,
    test_a_preempted_node_brings_the_job_back,
    test_the_second_says_why_it_waits_and_runs_after,
)

pytestmark = pytest.mark.kubernetes

__all__ = [
    "test_a_life",
    "test_a_preempted_node_brings_the_job_back",
    "test_the_second_says_why_it_waits_and_runs_after",
]
