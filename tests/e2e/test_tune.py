"""`podway tune` on a simulated slice: one job measures every candidate, survives one that runs out of memory, and the fastest is
written as settings that `podway train` reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from podway.train.settings import read_config
from tests.e2e.harness import Podway

TOO_LONG = "batch.length=1048576 remat.policy=none"  # attention alone would take terabytes


@pytest.mark.long
@pytest.mark.timeout(1500)  # a minute of two cores; much more where others use them too
def test_candidates_are_measured_and_one_out_of_memory_is_survived(pod: Podway, tmp_path: Path) -> None:
    pod.start()
    words = ["tiny-llama3", "--tpu", "v5p-16", "--seq", "128", "--batch", "16", "--mesh", "fsdp=4,tensor=2"]
    words += ["--top", "1", "--steps", "4", "--no-rehearse", "--yes", "--try", TOO_LONG, "--try", "remat.policy=full"]
    done = subprocess.run(
        [sys.executable, "-m", "podway.cli.main", "tune", *words, "--write", str(tmp_path / "tuned.yaml")],
        env={**os.environ, "PODWAY_HOME": str(pod.home)}, capture_output=True, text=True, timeout=1400, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:4]]
    assert [row[0] for row in rows] == ["1", "2", "3"] and all(row[1] == "fsdp=4,tensor=2" for row in rows)
    assert done.stdout.splitlines()[2].endswith("out of memory")
    assert sum("fastest" in row for row in rows) == 1
    best = next(row for row in rows if "fastest" in row)
    tuned = read_config(str(tmp_path / "tuned.yaml"))
    assert tuned.mesh.shape == "fsdp=4,tensor=2" and tuned.batch.sequences == 16
    assert tuned.remat.policy == best[4] and tuned.schedule.steps == 100  # the number of steps is the next run's own
