"""`jax.devices()` on a simulated slice shows every chip, as on a pod, and no program waits for ranks that never come."""

import re
import shlex
import subprocess

import pytest

from podway.task.task import Task
from tests.e2e.harness import FOUR_HOSTS, Podway, task

# One write for each line: Gloo writes to the same stream, and would come between the parts of a print.
SEEN = "os.write(1, f'seen {jax.process_index()} {jax.device_count()} {jax.local_device_count()}\\n'.encode())"
SUM = """
from jax.experimental import multihost_utils
total = int(multihost_utils.process_allgather(jax.numpy.array([jax.process_index()])).sum())
os.write(1, f'sum {total}\\n'.encode())
"""


def python(program: str) -> str:
    return f"python - <<'EOF'\nimport jax, os, sys, time\n{program}\nEOF\n"


@pytest.mark.timeout(600)
def test_every_chip_is_seen_and_nobody_waits_in_vain(pod: Podway) -> None:
    pod.start()

    def run(script: str) -> list[str]:
        """What the ranks print, sorted; the job must succeed. Gloo writes its lines in pieces, so others may stand in one of them."""
        reply = pod.client.exec("c", task(script, tpu=FOUR_HOSTS))
        state = pod.finished("c", reply.job or 0, 240)
        log = pod.log_text("c", reply.job or 0)
        assert state == "SUCCEEDED", log
        return sorted(re.findall(r"seen \d+ \d+ \d+|sum \d+|local \d+|child \d+|[^)]*jax\.devices\(\) shows.*", log))

    pod.client.launch(task("true", tpu=FOUR_HOSTS), cluster="c")
    assert pod.finished("c", 1) == "SUCCEEDED"
    everything = [f"seen {rank} 16 4" for rank in range(4)]
    # Without a call, with a collective; then one program after the other.
    assert run(python(SEEN + SUM) + python(SEEN)) == sorted([*everything * 2, *["sum 6"] * 4])
    # With the call.
    assert run(python(f"jax.distributed.initialize()\n{SEEN}{SUM}")) == sorted([*everything, *["sum 6"] * 4])
    # Ranks end in any order, whether or not the coordinator's is the first.
    for first in (0, 3):
        late = f"{SEEN}\nif jax.process_index() != {first}: time.sleep(3)\nprint('local', int(jax.numpy.ones(3).sum()))"
        assert run(python(late)) == sorted([*everything, *["local 3"] * 4])
    # One rank alone uses JAX, while the others have ended.
    alone = run(f"[ $PODWAY_RANK = 2 ] || exit 0\n{python(SEEN)}")
    assert "seen 0 4 4" in alone and any("jax.devices() shows the chips of this host" in line for line in alone)
    # A second process on a host has only that host's chips.
    child = "import jax; print('child', jax.device_count())"
    spawn = f"import subprocess; print(subprocess.run([sys.executable, '-c', {child!r}], text=True, stdout=-1).stdout.strip())"
    assert run(python(f"{SEEN}\n{spawn}")) == sorted([*everything, *["child 4"] * 4])
    # A shell on one host: the others run nothing.
    how = pod.client.shell("c", 0, python(SEEN))
    shell = subprocess.run(how.argv, env=how.env, cwd=how.cwd, capture_output=True, text=True, timeout=120)
    assert shell.stdout == "seen 0 4 4\n", shell.stderr
    # On every host, bypassing the queue.
    beside = pod.client.run("c", f"python -c {shlex.quote(f'import jax, os; {SEEN}')}")
    assert pod.finished("c", beside.job or 0, 120) == "SUCCEEDED"
    assert all(line in pod.log_text("c", beside.job or 0) for line in everything)
    pod.down("c")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_one_host_needs_nobody(pod: Podway) -> None:
    pod.start()
    pod.client.launch(Task(run=python(SEEN), resources=task("", tpu="v6e-4").resources), cluster="c")
    assert pod.finished("c", 1, 120) == "SUCCEEDED"
    assert "seen 0 4 4" in pod.log_text("c", 1)
    pod.down("c")
