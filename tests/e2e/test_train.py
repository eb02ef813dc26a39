"""Training on a simulated slice: a host's rank is killed in the middle, the task is run again, and no number differs.

The two runs (one that is broken and resumed, one that is not) have 4 hosts of 4 chips each, in one cluster.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from podway.task.task import Task
from tests.conftest import HURRY, wait_until
from tests.e2e.harness import FOUR_HOSTS, Podway, task

STEPS, SAVED_EVERY = 14, 4


def training(output: Path, cache: Path, pause: float = 0) -> Task:
    """A run of 14 steps that saves every 4; `pause` holds the data back, so that the run can be met in its middle."""
    words = [
        "precision.compute=float32", "batch.sequences=16", "batch.length=16", f"schedule.steps={STEPS}",
        "schedule.kind=cosine", "optimizer.rate=0.01", "mesh.shape=data=2,fsdp=4,tensor=2", "remat.policy=none",
        f"checkpoint.every={SAVED_EVERY}", f"compile.cache={cache}", "logging.tensorboard=false", f"output={output}",
    ]  # fmt: skip
    slow = f"PODWAY_TEST_PAUSE={pause} " if pause else ""
    module = "tests.e2e.slow_train" if pause else "podway.train"
    run = f'export XLA_FLAGS="$XLA_FLAGS {HURRY}" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.3\n'
    run += f"cd {Path(__file__).parents[2]} && exec env {slow}{sys.executable} -m {module} {' '.join(words)}"
    return task(run, tpu=FOUR_HOSTS, stop_duration_s=1)


def journal(output: Path) -> list[dict[str, Any]]:
    file = output / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def saved(output: Path) -> list[int]:
    folder = output / "checkpoints"
    return sorted(int(step.name) for step in folder.iterdir() if step.name.isdigit()) if folder.exists() else []


@pytest.mark.soak
@pytest.mark.timeout(900)  # a minute of two cores; much more where others use them too
def test_a_killed_rank_resumes_bit_equal(pod: Podway, tmp_path: Path) -> None:
    pod.start()
    whole, broken, cache = tmp_path / "whole", tmp_path / "broken", tmp_path / "cache"
    pod.client.launch(training(whole, cache), cluster="c")
    assert pod.finished("c", 1, 300) == "SUCCEEDED", pod.log_text("c", 1)[-3000:]

    pod.client.exec("c", training(broken, cache, pause=0.3))
    wait_until(
        lambda: len(journal(broken)) > SAVED_EVERY + 1 and saved(broken) != [], 300, "a few steps and a checkpoint"
    )
    ranks = [one for one in pod.host_processes() if "tests.e2e.slow_train" in (one.info["cmdline"] or [])]
    victim = next(one for one in ranks if one.environ().get("PODWAY_RANK") == "2")
    os.kill(victim.pid, signal.SIGKILL)
    assert pod.finished("c", 2, 100) == "FAILED"
    assert len(ranks) == 4 and "rank 2" in pod.client.job("c", 2).reason
    reached, last = len(journal(broken)), saved(broken)[-1]
    assert SAVED_EVERY < reached < STEPS
    assert reached - last < 2 * SAVED_EVERY  # one checkpoint may have been on its way

    pod.client.exec("c", training(broken, cache))
    assert pod.finished("c", 3, 300) == "SUCCEEDED", pod.log_text("c", 3)[-3000:]
    assert f"resumed from step {last} in" in pod.log_text("c", 3)
    unbroken = {row["step"]: row for row in journal(whole)}
    assert {row["step"] for row in journal(broken)} == set(unbroken) == set(range(STEPS))
    for row in journal(broken):  # what came after the checkpoint and before the kill is there twice
        same = unbroken[row["step"]]
        assert (row["loss"], row["grad_norm"]) == (same["loss"], same["grad_norm"]), row["step"]
    pod.down("c")
