"""kill -9 of the agent, of a runner, of both, at any instant: no byte is lost or repeated, and what is told is true."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest
from agent_host import Host, alive, pids_in, until

from podway.hosts.agent import processes
from podway.hosts.agent.wire import WireError


@pytest.fixture
def host(tmp_path):
    with Host(tmp_path) as host:
        (host.home / "pids").mkdir()
        yield host


def follow_through(host: Host, kills: int) -> bytes:
    """Follow by offset to the end, killing and restarting the agent `kills` times on the way."""
    printed, doomed = b"", 0
    while True:
        try:
            reply, body = host.follow(offset=len(printed), limit=10_000, wait=0.2)
        except (OSError, WireError, AssertionError):
            host.start_agent()
            continue
        printed += body
        if reply["end"]:
            assert reply["code"] == 9
            return printed
        if kills and len(printed) > 1000 and host.pid != doomed:
            kills, doomed = kills - 1, host.pid
            threading.Timer(0.01 * kills, os.kill, [doomed, signal.SIGKILL]).start()


def test_a_killed_agent_loses_and_repeats_nothing(host):
    script = "for i in $(seq 3000); do echo line $i; [ $((i % 30)) = 0 ] && sleep 0.02; done; exit 9"
    host.start(script)
    printed = follow_through(host, kills=4)
    assert printed == b"".join(b"line %d\n" % number for number in range(1, 3001))


def test_a_job_ends_rightly_while_no_agent_runs(host):
    started = host.start("sleep 0.3; echo bye; exit 6")
    host.kill_agent()
    until(lambda: not alive(started["pid"]))
    time.sleep(0.1)
    host.start_agent()
    reply, printed = host.output()
    assert (reply["state"], reply["code"], printed) == ("exited", 6, b"bye\n")


STUBBORN = """
    trap '' TERM
    touch pids/$$
    (setsid env -i /bin/bash -c 'touch pids/$$; exec /bin/sleep 60' &)
    (setsid bash -c 'trap "" TERM; touch pids/$$; sleep 60; sleep 60' &)
    while [ $(ls pids | wc -l) -lt 3 ]; do sleep 0.02; done
    echo up; sleep 60; sleep 60
"""


def lost(host: Host) -> None:
    reply, printed = host.output()
    assert (reply["state"], reply["signal"], reply["code"], reply["lost"]) == ("lost", 9, None, True)
    assert printed == b"up\n" and reply["end"]


def test_a_killed_runners_processes_are_killed_and_the_phase_is_lost(host):
    host.start(STUBBORN)
    host.printed(b"up\n")
    began = time.monotonic()
    os.kill(host.runner(), signal.SIGKILL)
    lost(host)
    assert time.monotonic() - began < 30  # its processes would have gone on for 60
    assert len(pids_in(host.home / "pids")) == 3
    assert not [pid for pid in pids_in(host.home / "pids") if alive(pid)]


def test_a_script_that_kills_its_runner(host):
    host.start("touch pids/$$; echo up; sleep 0.3; kill -9 $PPID; sleep 60")
    lost(host)
    assert not [pid for pid in pids_in(host.home / "pids") if alive(pid)]


def test_a_killed_runner_leaves_other_jobs_alone(host):
    for job in ("one", "two"):
        host.start("echo up; sleep 60", job=job)
        host.printed(b"up\n", job=job)
    other = host.call("status", job="two", phase="run")["pid"]
    os.kill(host.runner("one"), signal.SIGKILL)
    assert host.output("one")[0]["state"] == "lost"
    assert alive(other) and host.call("status", job="two", phase="run")["state"] == "running"


def test_a_runner_killed_after_the_agent_that_started_it(host):
    host.start("trap '' TERM; touch pids/$$; echo up; sleep 60; sleep 60")
    host.printed(b"up\n")
    host.restart()
    os.kill(host.runner(), signal.SIGKILL)
    lost(host)
    assert not [pid for pid in pids_in(host.home / "pids") if alive(pid)]


def test_runner_and_agent_killed_together(host):
    host.start("trap '' TERM; touch pids/$$; (setsid sleep 60 &); echo up; sleep 60; sleep 60")
    host.printed(b"up\n")
    runner = host.runner()
    host.kill_agent()
    os.kill(runner, signal.SIGKILL)
    until(lambda: not alive(runner))
    assert len(host.processes()) >= 2
    host.start_agent()
    lost(host)
    assert host.processes() == {host.pid}


def test_a_lost_job_can_be_cancelled_and_forgotten(host):
    host.start("echo up; sleep 60")
    host.printed(b"up\n")
    os.kill(host.runner(), signal.SIGKILL)
    assert host.call("cancel", job="job", grace=5, wait=10)["gone"]
    assert host.call("status", job="job", phase="run")["state"] == "lost"
    assert host.call("forget", job="job")["forgotten"]


@pytest.mark.parametrize("moment", range(10))
def test_an_agent_killed_at_any_instant_of_a_start_runs_it_at_most_once(host, moment):
    """From before the request is read to after the script runs: the next agent says what is true, and can go on."""
    threading.Timer(moment * 0.006, os.kill, [host.pid, signal.SIGKILL]).start()
    script = "touch pids/$$; echo hello; exit 3"
    for _ in range(2):
        try:
            host.start(script)
            break
        except (OSError, AssertionError, WireError):
            until(lambda: not alive(host.pid))
            host.start_agent()
    until(lambda: host.start_agent() and host.call("status", job="job", phase="run")["state"] == "exited")
    reply, printed = host.output()
    assert (reply["code"], printed) == (3, b"hello\n")
    assert len(pids_in(host.home / "pids")) == 1


def test_a_reused_pid_is_nobody_of_ours(host):
    """A runner.json whose pid is now another process': that one is neither believed nor killed."""
    host.start("echo up; sleep 60")
    host.printed(b"up\n")
    runner = host.runner()
    host.kill_agent()
    os.kill(runner, signal.SIGKILL)  # before its script: a runner that lives writes down how that ended
    until(lambda: not alive(runner))
    processes.send(host.processes(), signal.SIGKILL)
    until(lambda: not host.processes())
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        begun = host.state / "jobs/job/run/runner.json"
        text = begun.read_text().replace(f'"pid": {runner},', f'"pid": {bystander.pid},')
        text = text.replace('"user_pid": ', f'"user_pid": {bystander.pid}, "was": ')
        begun.write_text(text)
        host.start_agent()
        assert host.output()[0]["state"] == "lost"
        assert host.call("cancel", job="job", grace=0, wait=5)["gone"]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_killing_a_host_leaves_nothing(host):
    host.start(STUBBORN)
    host.printed(b"up\n")
    runner = host.runner()
    assert processes.kill_hosts([host.host_id], 10.0) == []
    assert not [pid for pid in [host.pid, runner, *pids_in(host.home / "pids")] if alive(pid)]
