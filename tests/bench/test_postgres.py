"""Two servers on one PostgreSQL, small: what is killed at random loses no job and runs none twice."""

import psutil
import pytest
from tools.bench import postgres as bench

pytestmark = pytest.mark.e2e


def judge(clusters: int, jobs: int, database: str) -> bench.LoadResult:
    result = bench.measure(clusters, jobs, 1, database)
    assert (result.twice, result.lost, result.cut) == (0, 0, 0), result
    left = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    assert [words for words in left if "tools.bench.endpoints" in words] == []
    return result


def test_a_few_jobs(postgres: str) -> None:
    judge(3, 12, postgres)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_clusters_and_two_thousand_jobs(postgres: str) -> None:
    assert judge(bench.CLUSTERS, bench.JOBS, postgres).kills > 5
