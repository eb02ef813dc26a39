"""Reading /proc: who is who, who belongs, who holds a device, and killing all of a host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid

import pytest
from agent_host import alive, until
from hypothesis import given
from hypothesis import strategies as st

from podway.hosts.agent import processes

FIELDS = "S 10 11 12 0 -1 4194304 1 2 3 4 100 50 30 20 20 0 7 0 777 1000 5 18446744073709551615 0 0"


@given(st.binary(max_size=15))
def test_any_name_a_process_gives_itself_is_read_past(name):
    process = processes.Process(5, b"5 (" + name + b") " + FIELDS.encode())
    assert (process.pid, process.ppid, process.pgrp, process.session) == (5, 10, 11, 12)
    assert (process.start, process.threads, process.state) == (777, 7, b"S")
    tick = os.sysconf("SC_CLK_TCK")
    assert process.cpu_s == pytest.approx(150 / tick) and process.waited_s == pytest.approx(50 / tick)


def test_a_zombie_is_dead_unless_it_has_threads():
    child = subprocess.Popen(["true"])
    try:
        until(lambda: (it := processes.read(child.pid)) and it.state == b"Z")
        assert not alive(child.pid) and child.pid not in processes.snapshot()
    finally:
        child.wait()
    assert processes.read(child.pid) is None or not alive(child.pid)
    half_dead = processes.Process(5, b"5 (x) " + FIELDS.replace("S", "Z", 1).encode())
    assert half_dead.alive


@given(st.dictionaries(st.integers(1, 30), st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_descendants_are_all_that_hang_below(parents, roots):
    procs = {
        pid: processes.Process(pid, f"{pid} (x) ".encode() + FIELDS.replace(" 10 ", f" {ppid} ", 1).encode())
        for pid, ppid in parents.items()
    }
    found = processes.descendants(procs, roots)
    # The definition: the smallest set with each child of a root or of a member.
    expected: set[int] = set()
    while True:
        more = {pid for pid, ppid in parents.items() if ppid in roots or ppid in expected}
        if more == expected:
            break
        expected = more
    assert found == expected


def test_marks_environment_and_identity():
    mark = uuid.uuid4().hex
    env = {**os.environ, "PODWAY_JOB": mark, "LONG": "x" * 100_000}
    child = subprocess.Popen(["sleep", "60"], env=env)
    try:
        procs = until(
            lambda: (now := processes.snapshot()) and processes.environ(child.pid).get("PODWAY_JOB") == mark and now
        )
        assert processes.with_variable(procs, "PODWAY_JOB", mark) == {child.pid}
        assert processes.with_variable(procs, "PODWAY_JOB", mark[:-1]) == set()
        assert processes.with_variable(procs, "WAY_JOB", mark) == set()
        start = procs[child.pid].start
        assert processes.is_running(child.pid, start) and not processes.is_running(child.pid, start + 1)
        assert {child.pid} <= processes.descendants(procs, [os.getpid()])
        assert {os.getpid(), os.getppid()} <= processes.ancestors(procs, child.pid)
    finally:
        child.kill()
        child.wait()
    assert not processes.is_running(child.pid, start)


def test_who_holds_a_device(tmp_path):
    with (tmp_path / "accel0").open("w") as held:
        assert held.fileno() and processes.device_holders((f"{tmp_path}/accel",)) == [
            (os.getpid(), f"{tmp_path}/accel0")
        ]
    assert processes.device_holders((f"{tmp_path}/accel",)) == []


def test_a_group_that_is_not_all_ours_is_not_killed_as_a_group():
    ours = subprocess.Popen(["sleep", "60"])  # in the group of this very test
    try:
        processes.kill(processes.snapshot(), {ours.pid})
        assert ours.wait(5) == -signal.SIGKILL
    finally:
        ours.kill()
        ours.wait()


def test_killing_a_host_spares_its_killer(tmp_path):
    host_id = uuid.uuid4().hex
    code = f"""
import subprocess, sys
sys.path.insert(0, {str(processes.__file__.rsplit("/podway/", 1)[0])!r})
from podway.hosts.agent import processes
stray = subprocess.Popen(["sleep", "60"])
print(stray.pid, processes.kill_hosts([{host_id!r}], 50.0), flush=True)
"""
    began = time.monotonic()
    env = {**os.environ, "PODWAY_HOST_ID": host_id}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, timeout=60)
    pid, left = done.stdout.split(" ", 1)
    assert left.strip() == "[]" and not alive(int(pid)) and time.monotonic() - began < 40
