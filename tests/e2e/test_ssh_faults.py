"""What befalls machines of one's own: a full disk, a clock that is wrong, and who looks for secrets afterwards; and an inventory."""

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.sandbox.hosts import pool_text
from podway.sandbox.hosts.netns import NetnsHosts
from tests.conftest import wait_until
from tests.e2e.harness import Podway, files_with, without_prefix
from tests.e2e.test_ssh import SECRET, lab, made, podway, task

__all__ = ["lab", "made"]  # fixtures: four machines in a pool, and nothing left on them

FILL = "head -c 200m /dev/zero > /root/filler 2>/dev/null; truncate -s -{room} /root/filler"
SKEW = """
#define _GNU_SOURCE
#include <time.h>
#include <sys/time.h>
#include <sys/syscall.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += SECONDS;
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    now->tv_sec = t.tv_sec; now->tv_usec = t.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *into) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (into) *into = t.tv_sec;
    return t.tv_sec;
}
"""


def test_an_inventory_takes_the_place_of_a_pool(pod: Podway, lab: NetnsHosts, tmp_path: Path) -> None:
    inventory = tmp_path / "machines.yaml"
    inventory.write_text(pool_text(lab, "v6e-16"))
    pod.start()
    words = ["launch", "-y", "-c", "c", "--provider", "ssh", "--inventory", str(inventory), "--tpus", "v6e-16"]
    shown = podway(pod, *words, "echo here is $(hostname)")
    assert all(f"here is h{rank}" in shown for rank in range(4))
    assert "ssh/machines" in podway(pod, "status")
    inventory.unlink()  # as a person tidies up; the cluster keeps a copy
    assert podway(pod, "ssh", "c", "-w", "2", "--", "hostname").strip() == "h2"
    podway(pod, "down", "-y", "c")
    wait_until(lambda: pod.client.clusters() == [], 30, "the end of the cluster")
    assert "no such file" in podway(pod, *words, "true", code=1)
    assert "lists machines for ssh" in podway(
        pod, "launch", "--inventory", str(inventory), "--infra", "gcp", "x", code=1
    )


def test_a_full_disk_under_the_files_names_the_host_and_passes(pod: Podway, lab: NetnsHosts, tmp_path: Path) -> None:
    """The files do not fit on one machine: its name is said, nothing runs anywhere; with room they go where they should."""
    source = tmp_path / "work"
    source.mkdir()
    (source / "data").write_bytes(bytes(range(256)) * (8 << 12))
    pod.start()
    podway(pod, "launch", "-y", "-c", "c", "--infra", "ssh/lab", "--tpus", "v6e-16", "true")
    lab.run(2, FILL.format(room="1M"))
    shown = podway(pod, "exec", "c", "--workdir", str(source), "echo never", code=100)
    assert f"the disk of host 2 ({lab.hosts[2].address}) is full" in shown and "free some space there" in shown, shown
    assert "never" not in shown.replace("echo never", "") and "Traceback" not in shown
    for index in range(4):
        (agent,) = lab.processes(index)
        assert "agent-" in agent
    lab.run(2, "rm /root/filler")
    shown = podway(pod, "exec", "c", "--workdir", str(source), "stat -c size=%s data")
    assert "size=8388608" in shown
    podway(pod, "down", "-y", "c")
    wait_until(lambda: pod.client.clusters() == [], 30, "the end of the cluster")


def test_a_full_disk_before_the_launch_leaves_nothing_anywhere(pod: Podway, lab: NetnsHosts) -> None:
    pod.start()
    lab.run(1, FILL.format(room="4k"))
    shown = podway(pod, "launch", "-y", "-c", "c", "--infra", "ssh/lab", "--tpus", "v6e-16", "true", code=100)
    assert f"the disk of {lab.hosts[1].address} is full" in shown and "Traceback" not in shown
    wait_until(lambda: pod.client.clusters() == [], 30, "the end of the cluster")
    lab.run(1, "rm /root/filler")  # that nothing else is there is what the fixture looks at


def test_a_job_that_fills_its_own_disk_ends_with_what_it_said(pod: Podway, lab: NetnsHosts) -> None:
    pod.start()
    fill = "[ $PODWAY_RANK != 1 ] || head -c 200m /dev/zero > ~/filler; echo rank $PODWAY_RANK exits with $?"
    pod.client.launch(task(f"echo begun; {fill}; [ $PODWAY_RANK != 1 ] || exit 3; sleep 60"), cluster="c")
    assert pod.finished("c", 1, 60) == "FAILED"
    job = pod.client.job("c", 1)
    assert f"(rank 1, {lab.hosts[1].address})" in (job.reason or "") and "code 3" in (job.reason or "")
    assert "No space left on device" in pod.log_text("c", 1)
    for index in range(4):
        wait_until(lambda index=index: len(lab.processes(index)) == 1, 20, "the end of the other ranks")
    lab.run(1, "rm /root/filler")
    pod.down("c")


def test_secrets_are_nowhere_on_a_host_after_a_job(pod: Podway, lab: NetnsHosts) -> None:
    """Every file the machine has of its own, every argument and environment of every process; and the server's files."""
    pod.start()
    podway(pod, "launch", "-y", "-c", "c", "--infra", "ssh/lab", "--tpus", "v6e-16", "--secret", f"TOK={SECRET}",
           "echo token $TOK; echo $TOK >&2; (setsid sleep 300 >/dev/null 2>&1 &) ; [ ${#TOK} = 20 ]")  # fmt: skip
    assert "token ***" in podway(pod, "logs", "c", "1", "--no-follow")
    for index in range(4):
        found = leaks(lab, index, SECRET)
        assert found == [], f"host {index}: {found}"
    assert files_with(pod.home, SECRET) == []
    podway(pod, "down", "-y", "c")
    wait_until(lambda: pod.client.clusters() == [], 30, "the end of the cluster")
    for index in range(4):
        assert leaks(lab, index, SECRET) == []


def leaks(lab: NetnsHosts, index: int, secret: str) -> list[str]:
    """Where on a machine a text is: all that was ever written there lies above the root it shares with this machine."""
    root = lab.files(index)
    own = [lab.written(index), *(root / name for name in ("root", "tmp", "run"))]
    found = [str(path) for place in own for path in files_with(place, secret)]
    for process in (root / "proc").iterdir():
        if process.name.isdigit():
            for name in ("cmdline", "environ"):
                try:
                    if secret.encode() in (process / name).read_bytes():
                        found.append(f"{name} of {process.name}")
                except OSError:
                    continue  # it has ended
    return found


@pytest.fixture
def an_hour_ahead(lab: NetnsHosts, tmp_path: Path) -> Iterator[int]:
    """Machine 3's clock is an hour fast, for every program there: a library before libc, from its own /etc/ld.so.preload.

    (Linux has time namespaces, but not for this clock.)
    """
    if shutil.which("cc") is None:
        pytest.skip("a C compiler is missing (tools/system-packages installs it for root)")
    (tmp_path / "skew.c").write_text(SKEW.replace("SECONDS", "3600"))
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", tmp_path / "skew.so", tmp_path / "skew.c"], check=True)
    root = lab.files(3)
    (root / "run/skew.so").write_bytes((tmp_path / "skew.so").read_bytes())
    (root / "etc/ld.so.preload").write_text("/run/skew.so\n")
    try:
        ahead = float(lab.run(3, "date +%s.%N")) - time.time()
        assert 3590 < ahead < 3610
        yield 3
    finally:
        (root / "etc/ld.so.preload").unlink()


def test_a_clock_that_is_wrong_does_not_disorder_the_log(pod: Podway, lab: NetnsHosts, an_hour_ahead: int) -> None:
    """All ranks count together; the one whose clock is an hour fast is read beside the others, not after them."""
    pod.start()
    # One place for all of them to meet at: each second of the monotonic clock, which is the machine's and not the host's.
    beat = "python3 -c 'import time; n = time.monotonic(); time.sleep(1 - n % 1); print(int(n) + 1)'"
    lines = f"for i in 1 2 3 4 5; do t=$({beat}); echo rank $PODWAY_RANK beat $t; done"
    pod.client.launch(task(lines), cluster="c")
    watched = pod.log_text("c", 1)
    assert pod.finished("c", 1) == "SUCCEEDED"
    kept = pod.log_text("c", 1)
    pod.down("c")
    for text in (watched, kept):  # while it ran, and from the archive
        beats = [int(n) for n in re.findall(r"beat (\d+)", text)]
        assert len(beats) == 4 * 5 and sum(without_prefix(text).values()) == 4 * 5
        # Two beats of room for a rank that is held up; by its clock alone, one of them would come after all the others.
        assert all(beat >= max(beats[: at + 1]) - 2 for at, beat in enumerate(beats)), text
