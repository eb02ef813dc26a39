"""Cancel against processes that do not want to go: afterwards nothing of the job runs, within grace + 2 s."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from agent_host import Host, Refusal, alive, pids_in, until

GRACE_S = 0.5
PYTHON = f"{sys.executable} -S -E"

# Each writes the pids it has as names of files in ~/pids, and "up" once all of them are there.
HOSTILE = {
    "plain": "touch pids/$$; echo up; sleep 60",
    "ignores SIGTERM": "trap '' TERM HUP INT; touch pids/$$; echo up; while :; do sleep 1; done",
    "nohup and setsid": """
        nohup setsid bash -c 'touch pids/$$; exec sleep 60' &
        (setsid bash -c 'trap "" TERM; touch pids/$$; sleep 60; sleep 60' &)
        while [ $(ls pids | wc -l) -lt 2 ]; do sleep 0.02; done; echo up; sleep 60""",
    "daemon with closed descriptors": f"""
        {PYTHON} - <<'END'
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
        os.closerange(0, 64)
        os.close(os.open("pids/%d" % os.getpid(), os.O_CREAT))
        time.sleep(60)
    os._exit(0)
os.wait()
END
        while [ $(ls pids | wc -l) -lt 1 ]; do sleep 0.02; done; echo up; sleep 60""",
    "environment cleared": """
        (env -i /bin/bash -c 'trap "" TERM; cd '"$PWD"'; setsid /bin/bash -c "touch pids/\\$\\$; exec sleep 60"' &)
        while [ $(ls pids | wc -l) -lt 1 ]; do sleep 0.02; done; echo up; sleep 60""",
    "stopped": """
        (touch pids/$BASHPID; kill -STOP $BASHPID) & (trap '' TERM; touch pids/$BASHPID; kill -STOP $BASHPID) &
        while [ $(ls pids | wc -l) -lt 2 ]; do sleep 0.02; done; echo up; kill -STOP $$""",
    "stops its runner": "trap '' TERM; touch pids/$$; kill -STOP $PPID; sleep 60; sleep 60",
    "forks and exits for ever": """
        hop() { trap '' TERM; local me=$1; rm -f pids/$me; : > pids/$BASHPID; (sleep 0.01; hop $BASHPID) & }
        hop none; while [ $(ls pids | wc -l) -lt 1 ]; do sleep 0.02; done; echo up; sleep 60""",
    "quick hopper": f"""
        {PYTHON} - <<'END' &
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.close(os.open("pids/%d" % os.getpid(), os.O_CREAT))
while True:
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(0.002)
END
        while [ $(ls pids | wc -l) -lt 1 ]; do sleep 0.02; done; echo up; sleep 60""",
    "fork bomb": f"""
        {PYTHON} - <<'END' &
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.close(os.open("pids/%d" % os.getpid(), os.O_CREAT))
for depth in range(7):
    os.fork()
os.setpgid(0, 0)
while True:
    if os.fork() == 0:
        time.sleep(0.3)
        os._exit(0)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
    time.sleep(0.1)
END
        while [ $(ls pids | wc -l) -lt 1 ]; do sleep 0.02; done; sleep 0.3; echo up; sleep 60""",
    "only a thread is left": f"""
        exec {PYTHON} -c '
import ctypes, os, signal, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.close(os.open("pids/%d" % os.getpid(), os.O_CREAT))
threading.Thread(target=time.sleep, args=(60,)).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
'""",
}


@pytest.fixture
def host(tmp_path):
    with Host(tmp_path) as host:
        (host.home / "pids").mkdir()
        yield host


@pytest.mark.parametrize("script", HOSTILE.values(), ids=HOSTILE.keys())
def test_after_cancel_nothing_of_the_job_runs(host, script):
    host.start(script)
    if "STOP $PPID" in script:
        until(lambda: pids_in(host.home / "pids"))
        time.sleep(0.1)
    else:
        host.printed(b"up\n")
    runner = host.runner()
    began = time.monotonic()
    reply = host.call("cancel", job="job", grace=GRACE_S, wait=20)
    assert time.monotonic() - began < GRACE_S + 9.0  # the grace of the cancel, and not its wait
    assert reply == {"ok": True, "gone": True, "left": []}
    assert not [pid for pid in [runner, *pids_in(host.home / "pids")] if alive(pid)]
    assert host.processes() == {host.pid}
    status = host.call("status", job="job", phase="run")
    assert status["state"] == "exited" and (status["signal"] or status["code"])


def test_a_script_runs_only_once_its_start_was_told(host):
    """Or one that stops its runner at once looks as if it had not started, and runs on beside the retry."""
    for number in range(10):
        job = f"job{number}"
        recorded = host.state / "jobs" / job / "run" / "runner.json"
        script = f'read -r line < {recorded}; echo "$line" > {job}; touch {job}-read; kill -STOP $PPID; sleep 60'
        host.start(script, job, interpreter=["dash"])
        until((host.home / f"{job}-read").exists)
        assert "user_pid" in (host.home / job).read_text()
        assert host.call("cancel", job=job, grace=0, wait=20)["gone"]


def test_a_polite_job_ends_by_itself_and_is_not_waited_for_longer(host):
    host.start("trap 'echo saving; sleep 0.3; echo saved; exit 7' TERM; echo up; while :; do sleep 0.05; done")
    host.printed(b"up\n")
    began = time.monotonic()
    assert host.call("cancel", job="job", grace=20, wait=19)["gone"]
    assert time.monotonic() - began < 19
    reply, printed = host.output()
    assert printed.endswith(b"saving\nsaved\n") and reply["code"] == 7


def test_each_process_gets_sigterm_once_and_its_whole_grace(host):
    # The main process goes at once; its child takes longer than the grace of a normal end, which must not apply.
    host.start(
        "(n=0; trap 'n=$((n+1))' TERM; echo up; for i in $(seq 260); do sleep 0.01; done; echo terms=$n) &\n"
        "trap 'exit 0' TERM; while :; do sleep 0.05; done"
    )
    host.printed(b"up\n")
    assert host.call("cancel", job="job", grace=60, wait=50)["gone"]
    assert b"terms=1\n" in host.output()[1]


def test_cancel_covers_all_phases_and_forbids_new_ones(host):
    for phase in ("setup", "run"):
        host.start("trap '' TERM; echo up; sleep 60; sleep 60", phase=phase)
        host.printed(b"up\n", phase=phase)
    host.start("echo other; sleep 60", job="other")
    host.printed(b"other\n", job="other")
    assert host.call("cancel", job="job", grace=0, wait=10)["gone"]
    assert host.call("status", job="other", phase="run")["state"] == "running"
    with pytest.raises(Refusal) as refusal:
        host.start("echo late", phase="late")
    assert refusal.value.code == "cancelled"


def test_cancel_of_a_job_that_is_not_there_keeps_it_from_starting(host):
    assert host.call("cancel", job="later", grace=5, wait=5) == {"ok": True, "gone": True, "left": []}
    with pytest.raises(Refusal) as refusal:
        host.start("echo hi", job="later")
    assert refusal.value.code == "cancelled"


def test_cancel_goes_on_without_its_caller_and_says_what_is_left(host):
    started = host.start("trap '' TERM; echo up; while :; do sleep 1; done")
    host.printed(b"up\n")
    reply = host.call("cancel", job="job", grace=2.5, wait=0.3)
    assert not reply["gone"] and started["pid"] in reply["left"]
    until(lambda: not alive(started["pid"]))
    assert host.call("cancel", job="job", grace=60, wait=10)["gone"]


def test_a_second_cancel_may_shorten_the_grace(host):
    host.start("trap '' TERM; echo up; while :; do sleep 1; done")
    host.printed(b"up\n")
    assert not host.call("cancel", job="job", grace=60, wait=0)["gone"]
    assert host.call("cancel", job="job", grace=0, wait=15)["gone"]


def test_cancel_goes_on_after_the_agent_was_killed(host):
    started = host.start("trap '' TERM; echo up; while :; do sleep 1; done")
    host.printed(b"up\n")
    assert not host.call("cancel", job="job", grace=1, wait=0)["gone"]
    host.restart()
    until(lambda: not alive(started["pid"]))
    assert host.output()[0]["signal"] == 9
    assert host.call("cancel", job="job", grace=1, wait=15)["gone"]


def test_cancel_at_any_instant_of_a_start(host):
    for number in range(12):
        job = f"job{number}"
        early = threading.Timer(number * 0.006, host.call, ["cancel"], {"job": job, "grace": 20, "wait": 0})
        early.start()
        try:
            host.start("echo up; sleep 60; echo no", job=job)
        except Refusal as refusal:
            assert refusal.code == "cancelled"
        began = time.monotonic()
        assert host.call("cancel", job=job, grace=20, wait=19)["gone"]
        # SIGTERM is never lost, also not between fork and exec: else this would take the whole grace.
        assert time.monotonic() - began < 19
        early.join()
    assert host.processes() == {host.pid}


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to set up a user who may sudo"
)
def test_what_a_job_started_with_sudo_is_ended_too(tmp_path):
    """The agent of a plain user, a job whose process is root's, and a `sudo` that lets the user be root."""
    nobody = 65534
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders may not be entered by another user
        home = Path(folder)
        os.chown(home, nobody, nobody)
        home.chmod(0o755)
        shutil.copy(shutil.which("setpriv") or "", home / "as-root")
        (home / "as-root").chmod(0o4755)
        (home / "bin").mkdir()
        (home / "bin" / "sudo").write_text(f'#!/bin/sh\n[ "$1" = -n ] && shift\nexec {home}/as-root --reuid 0 "$@"\n')
        (home / "bin" / "sudo").chmod(0o755)
        python = shutil.which("python3", path="/usr/bin:/bin") or pytest.skip("needs a python3 that others may run")
        drop = (
            "env",
            f"PATH={home}/bin:/usr/bin:/bin",
            "setpriv",
            f"--reuid={nobody}",
            f"--regid={nobody}",
            "--clear-groups",
        )
        with Host(home, python, prefix=drop) as host:
            (host.home / "pids").mkdir(mode=0o777)
            (host.home / "pids").chmod(0o777)
            host.start("trap '' TERM; sudo bash -c 'trap \"\" TERM; touch pids/$$; echo up; sleep 60; sleep 60'")
            host.printed(b"up\n")
            (pid,) = pids_in(host.home / "pids")
            assert os.stat(f"/proc/{pid}").st_uid == 0 and os.stat(f"/proc/{host.pid}").st_uid == nobody  # noqa: PTH116
            assert host.call("cancel", job="job", grace=GRACE_S, wait=10)["gone"]
            assert not alive(pid)
