"""Managed recovery on simulated hosts: the hosts are lost in mid-run, and the job comes back with its number and all its logs."""

import contextlib
import json
import shutil
import signal
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from podway import crash
from podway.task.task import Recovery
from tests.conftest import wait_until
from tests.e2e.harness import TWO_HOSTS, Podway, task

RECOVER_POINTS = [p for p in crash.POINTS if p.startswith(("again.", "recover."))]
BETWEEN = (
    "again.before-clear",
    "recover.before-save",
    "recover.jobs-marked",
)  # beside points that are walked each time

# Counts on from where it stood, as a trainer with its checkpoint does; the place outlives the hosts. A step is kept whole or not at
# all: killed between the truncation of a file and its writing, it would begin anew.
STEPS = """
state=$KEPT/step-$PODWAY_RANK
for i in $(seq $(cat $state 2>/dev/null || echo 0) {last}); do
  echo "attempt $PODWAY_ATTEMPT job $PODWAY_JOB_ID step $i"
  echo $((i + 1)) > $state.new && mv $state.new $state
  sleep 0.05
done
"""


def steps(kept: Path, last: int, recovery: Recovery = Recovery(), **more: object):  # type: ignore[no-untyped-def]
    kept.mkdir(exist_ok=True)
    return task(STEPS.format(last=last), env={"KEPT": str(kept)}, recovery=recovery, **more)


def lose(pod: Podway, cluster: str) -> None:
    """The machines go at once and leave nothing, as preempted ones do."""
    place = pod.home / "local" / cluster
    gone = place.with_name(f"{cluster}.gone")
    place.rename(gone)  # from here on nobody can start an agent there again
    wait_until(lambda: not pod.kill_all_in(place), 30, "nothing to be left, also of what was forked meanwhile")
    shutil.rmtree(gone, ignore_errors=True)


def reached(kept: Path, step: int) -> bool:
    """Whether both ranks have done this step."""
    files = [kept / f"step-{rank}" for rank in range(2)]
    return all(file.exists() and int(file.read_text()) >= step for file in files)


def kept_lines(pod: Podway) -> bool:
    """Whether the server has copied the beginning of the first attempt's output."""
    copies = [list(pod.home.glob(f"logs/*/1/{rank}.run")) for rank in range(2)]
    return all(copy and b" step 0\n" in copy[0].read_bytes() for copy in copies)


def steps_seen(text: str, rank: int) -> list[int]:
    """The steps a rank printed, in the order of the log."""
    mine = [line for line in text.splitlines() if f"rank={rank}," in line and " step " in line]
    return [int(line.rsplit(" ", 1)[1]) for line in mine]


def check(pod: Podway, text: str, last: int) -> None:
    """Steps are in the log in order, from the first to the last; what was done again is the step that was interrupted."""
    for rank in range(2):
        seen = steps_seen(text, rank)
        assert seen == sorted(seen) and set(seen) >= {0, last}, seen
        assert len(seen) - len(set(seen)) <= 1


def test_lost_hosts_are_made_anew_and_the_job_goes_on(pod: Podway, tmp_path: Path) -> None:
    pod.start()
    kept = tmp_path / "kept"
    launched = pod.client.launch(steps(kept, 60, setup="echo setting up $PODWAY_ATTEMPT"), cluster="c")
    wait_until(lambda: reached(kept, 20), 30, "step 20")
    wait_until(lambda: kept_lines(pod), 20, "a copy of the output")
    lose(pod, "c")
    assert pod.finished("c", launched.job or 0, 60) == "SUCCEEDED"
    text = pod.log_text("c", 1)
    assert "attempt 1 job 1" in text and "attempt 2 job 1" in text
    assert "setting up 1" in text and "setting up 2" in text
    assert text.index("setting up 1") < text.index("attempt 1") < text.index("setting up 2") < text.index("attempt 2")
    assert {0, 60} <= set(steps_seen(text, 0))
    told = " | ".join(event.text for event in pod.client.events("c"))
    assert "lost its hosts: its hosts disappeared" in told and "is recovering" in told
    view = pod.client.job("c", 1)
    assert (view.attempt, [e.code for e in view.exits]) == (2, [0, 0])
    pod.down("c")
    assert "attempt 1" in pod.log_text("c", 1) and "attempt 2" in pod.log_text("c", 1)


def test_a_watcher_sees_both_attempts(pod: Podway, tmp_path: Path) -> None:
    """One stream from the first line to the last, while the hosts go away under it."""
    pod.start()
    kept = tmp_path / "kept"
    pod.client.launch(steps(kept, 50), cluster="c")
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.append(pod.log_text("c", 1)))
    reader.start()
    wait_until(lambda: reached(kept, 20), 30, "step 20")
    lose(pod, "c")
    reader.join(60)
    assert not reader.is_alive()
    check(pod, seen[0], 50)
    assert pod.client.job("c", 1).state == "SUCCEEDED"
    pod.down("c")


def test_one_killed_host_is_an_interruption(pod: Podway, tmp_path: Path) -> None:
    pod.start()
    kept = tmp_path / "kept"
    pod.client.launch(steps(kept, 60), cluster="c")
    wait_until(lambda: reached(kept, 15), 30, "step 15")
    pod.kill_all_in(pod.home / "local" / "c" / "host-1")
    assert pod.finished("c", 1, 60) == "SUCCEEDED"
    assert pod.client.job("c", 1).attempt == 2
    pod.down("c")


# The second rank dies with its host; the first sees that before anyone else does, and ends by itself.
MISSES_THE_OTHER = """
[ $PODWAY_ATTEMPT = 1 ] || exit 0
if [ $PODWAY_RANK = 1 ]; then echo $$ > $KEPT/pid.new && mv $KEPT/pid.new $KEPT/pid; sleep 600; fi
while [ ! -e $KEPT/pid ]; do sleep 0.1; done
touch $KEPT/seen
while [ -e /proc/$(cat $KEPT/pid)/exe ]; do sleep 0.05; done
exit 1
"""


def test_a_rank_that_ends_because_another_host_died_is_an_interruption(pod: Podway, tmp_path: Path) -> None:
    pod.start()
    pod.client.launch(task(MISSES_THE_OTHER, env={"KEPT": str(tmp_path)}, recovery=Recovery()), cluster="c")
    wait_until(lambda: (tmp_path / "seen").exists(), 60, "both ranks")
    pod.kill_all_in(pod.home / "local" / "c" / "host-1")
    assert pod.finished("c", 1, 60) == "SUCCEEDED", pod.client.job("c", 1).reason
    assert pod.client.job("c", 1).attempt == 2
    pod.down("c")


def test_errors_begin_again_on_the_same_hosts_as_often_as_allowed(pod: Podway, tmp_path: Path) -> None:
    pod.start()
    recovery = Recovery(events=("interruption", "error"), max_restarts_on_errors=2)
    flaky = task("echo try $PODWAY_ATTEMPT; test $PODWAY_ATTEMPT = 3", recovery=recovery)
    pod.client.launch(flaky, cluster="c")
    assert pod.finished("c", 1) == "SUCCEEDED"
    tries = [number for number in (1, 2, 3) if f"try {number}" in pod.log_text("c", 1)]
    assert tries == [1, 2, 3]
    hopeless = task("echo no $PODWAY_ATTEMPT; exit 7", recovery=recovery)
    second = pod.client.launch(hopeless, cluster="c").job or 0
    assert pod.finished("c", second) == "FAILED"
    view = pod.client.job("c", second)
    assert view.attempt == 3 and "exited with code 7" in view.reason
    assert (
        len([e for e in pod.client.events("c") if e.text.startswith("Starting")]) == 1
    )  # one set of hosts for all of it
    pod.down("c")


def test_a_recovering_job_can_be_cancelled(pod: Podway, tmp_path: Path) -> None:
    pod.start()
    recovery = Recovery(events=("error",), max_restarts_on_errors=100)
    pod.client.launch(task("exit 1", recovery=recovery), cluster="c")
    wait_until(lambda: pod.client.job("c", 1).attempt >= 2, 20, "a second attempt")
    pod.client.cancel("c")
    assert pod.finished("c", 1) == "CANCELLED"
    pod.down("c")


def test_without_recovery_a_lost_cluster_fails_its_job(pod: Podway) -> None:
    pod.start()
    pod.client.launch(task("sleep 1000"), cluster="c")
    wait_until(lambda: any("started run" in event.text for event in pod.client.events("c")))
    lose(pod, "c")
    assert pod.finished("c", 1) == "FAILED_DRIVER"
    assert "its hosts disappeared" in pod.client.job("c", 1).reason
    wait_until(lambda: pod.client.cluster("c").state == "GONE", 20)
    assert pod.host_processes() == []


@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=pytest.mark.soak) if p in BETWEEN else p for p in RECOVER_POINTS]
)
def test_killed_while_recovering(pod: Podway, tmp_path: Path, point: str) -> None:
    """The next server goes on with it: one cluster, one job, every step in order."""
    pod.start(crash_at=point)
    kept = tmp_path / "kept"
    plain = steps(kept, 120)
    # However slow the machine is, the hosts are lost before the last step.
    held = plain.run.replace("sleep 0.05", "sleep 0.05; until [ $i -lt 60 -o -e $KEPT/go ]; do sleep 0.1; done")
    pod.client.launch(msgspec.structs.replace(plain, run=held), cluster="c")
    wait_until(lambda: reached(kept, 5), 30, "step 5")
    wait_until(lambda: kept_lines(pod), 20, "a copy of the output")
    if point in ("recover.before-save", "recover.saved", "again.before-clear", "again.after-clear"):
        # There is a rank lost, and a cluster to delete; else the whole cluster is lost, and nothing is left of it.
        pod.kill_all_in(pod.home / "local" / "c" / "host-1")
    else:
        lose(pod, "c")
    (kept / "go").touch()
    wait_until(lambda: pod.child.poll() is not None, 80, "the crash")
    assert pod.child.returncode == -signal.SIGKILL
    assert pod.finished("c", 1, 60) == "SUCCEEDED"
    assert pod.client.job("c", 1).attempt == 2
    assert len(pod.client.clusters()) == 1
    check(pod, pod.log_text("c", 1), 120)
    pod.down("c")
    assert not [place.name for place in (pod.home / "local").iterdir() if not place.name.startswith("agent")]


@pytest.mark.soak
@pytest.mark.parametrize("tpu", ["v6e-1", TWO_HOSTS])
def test_training_goes_on_from_its_checkpoint_with_the_same_losses(pod: Podway, tmp_path: Path, tpu: str) -> None:
    """The cluster is lost in the middle of training, and the losses are those of a run that was left alone."""
    pytest.importorskip("jax")
    pod.start()
    words = "batch.sequences=8 batch.length=32 schedule.steps=60 checkpoint.every=10 logging.tensorboard=false"
    command = f"{sys.executable} -m podway.train model.kernel=reference precision.compute=float32 {words}"
    pod.client.launch(task(f"{command} output={tmp_path}/whole", tpu=tpu), cluster="whole")
    assert pod.finished("whole", 1, 300) == "SUCCEEDED", pod.log_text("whole", 1)[-3000:]
    pod.down("whole")
    pod.client.launch(task(f"{command} output={tmp_path}/cut", tpu=tpu, recovery=Recovery()), cluster="c")
    wait_until(lambda: len(losses(tmp_path / "cut")) > 25, 300, "step 25")
    lose(pod, "c")
    assert pod.finished("c", 1, 300) == "SUCCEEDED", pod.log_text("c", 1)[-3000:]
    assert pod.client.job("c", 1).attempt == 2
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 60
    pod.down("c")


def losses(output: Path) -> dict[int, float]:
    """The loss of each step; of a step that was done twice, the later one."""
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    with contextlib.suppress(ValueError):  # the last line may be half written
        return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}
    return {}
