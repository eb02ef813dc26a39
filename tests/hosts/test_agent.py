"""The agent from outside, as a bundle: starting, following, ending jobs; what a script finds around it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from agent_host import PYTHONS, Host, Refusal, alive, pids_in, until

from podway.hosts.agent import output, wire
from podway.hosts.bundle import bundle


@pytest.fixture(params=PYTHONS, ids=lambda python: Path(python).name)
def host(request, tmp_path):
    with Host(tmp_path, request.param) as host:
        yield host


def test_hello_says_who_it_is(host, request):
    hello = host.call("hello")
    if "python3.8" in request.node.name:
        assert hello["python"].startswith("3.8.")
    assert hello["version"] == bundle().sha256
    assert hello["protocol"] == wire.PROTOCOL
    assert hello["pid"] == host.pid == int((host.state / "agent.pid").read_text())
    assert hello["home"] == str(host.home)
    assert abs(hello["time"] - time.time()) < 60
    assert host.state.stat().st_mode & 0o777 == 0o700
    assert (host.state / "agent.sock").stat().st_mode & 0o777 == 0o600


def test_a_job_from_start_to_end(host):
    before = time.time_ns()
    started = host.start("echo one; echo two >&2; sleep 0.2; echo three; exit 3")
    assert started["state"] == "running" and not started["existing"]
    reply, printed = host.output()
    assert printed == b"one\ntwo\nthree\n"
    assert (reply["state"], reply["code"], reply["signal"], reply["pid"]) == ("exited", 3, None, started["pid"])
    assert before / 1e9 < reply["started"] < reply["ended"] < time.time()
    status = host.call("status", job="job", phase="run")
    assert status["output_size"] == len(printed) and status["code"] == 3 and status["max_rss"] > 1 << 20
    (first, _), (last, when) = host.follow()[0]["times"][0], host.follow()[0]["times"][-1]
    assert first < last == len(printed) and before < when < time.time_ns()


def test_the_pid_is_the_users_process(host):
    started = host.start("exec sleep 30")
    until(lambda: Path(f"/proc/{started['pid']}/comm").read_text() == "sleep\n")
    assert host.call("status", job="job", phase="run")["pid"] == started["pid"]


@pytest.mark.parametrize(
    ("script", "code", "number"), [("exit 0", 0, None), ("exit 255", 255, None), ("kill -SEGV $$", None, 11)]
)
def test_exit_codes_and_signals(host, script, code, number):
    reply, _ = host.run(script)
    assert (reply["code"], reply["signal"]) == (code, number)


def test_every_offset_and_limit_gives_the_same_bytes_with_times(host):
    _, whole = host.run("for i in 1 2 3 4 5 6 7 8; do echo line $i; sleep 0.01; done")
    ends = {end for end, _ in host.follow()[0]["times"]}
    for limit in (1, 3, 7, 1 << 20):
        found, stamps = b"", []
        while len(found) < len(whole):
            reply, body = host.follow(offset=len(found), limit=limit)
            assert 0 < len(body) <= limit and reply["next"] == len(found) + len(body)
            assert reply["times"][-1][0] == reply["next"]
            assert all(end > len(found) and (end in ends or end == reply["next"]) for end, _ in reply["times"])
            stamps += [when for _, when in reply["times"]]
            found += body
        assert found == whole and stamps == sorted(stamps)
        assert reply["end"]


def test_a_long_poll_of_silence_ends_in_time(host):
    host.start("sleep 30")
    began = time.monotonic()
    reply, body = host.follow(wait=0.3)
    assert body == b"" and not reply["end"] and reply["state"] == "running"
    assert 0.3 <= time.monotonic() - began < 20  # the job sleeps longer


def test_a_long_poll_is_quick(host):
    host.start("mkfifo gate; echo ready; read < gate; echo now; sleep 30")
    offset = len(host.printed(b"ready\n"))
    heard: list[float] = []

    def listen():
        assert host.follow(offset=offset, wait=10)[1] == b"now\n"
        heard.append(time.monotonic())

    thread = threading.Thread(target=listen)
    thread.start()
    time.sleep(0.1)
    with (host.home / "gate").open("w") as gate:
        gate.write("go\n")
    told = time.monotonic()
    thread.join(10)
    assert heard[0] - told < 8  # milliseconds on an idle machine; never the poll's ten seconds


def test_absent_phases_and_offsets_beyond_the_end(host):
    reply, body = host.follow("nobody", wait=0.05)
    assert (reply["state"], reply["end"], reply["next"], body) == ("absent", False, 0, b"")
    assert host.call("status", job="nobody", phase="run")["state"] == "absent"
    host.run("echo hi")
    reply, body = host.follow(offset=1000)
    assert body == b"" and reply["end"] and reply["output_size"] == 3


def test_start_is_idempotent_even_at_once(host):
    answers: list[dict] = []
    script = "touch ran/$$; sleep 0.2; echo done"
    (host.home / "ran").mkdir()
    threads = [threading.Thread(target=lambda: answers.append(host.start(script))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len({answer["pid"] for answer in answers}) == 1
    assert sorted(answer["existing"] for answer in answers) == [False] + [True] * 7
    host.output()
    again = host.start(script)
    assert again["existing"] and again["state"] == "exited" and again["code"] == 0
    assert len(pids_in(host.home / "ran")) == 1


def test_binary_output_is_kept_byte_for_byte(host):
    noise = bytes(range(256)) * 300
    (host.home / "noise").write_bytes(noise)
    _, printed = host.run("cat noise; printf 'no newline'")
    assert printed == noise + b"no newline"


def test_what_a_script_finds_around_it(host):
    (host.home / "look.sh").write_text(
        "umask; pwd; ls /proc/self/fd | wc -l; cat <&0 | wc -c\n"
        "(yes; echo yes=$? >&2) | head -n 1\n"
        "grep -E '^Sig(Blk|Ign)' /proc/self/status\n"
        "[ $(ps -o sid= -p $$) = $$ ] && echo own session\n"
    )
    old = os.umask(0o022)
    try:
        host.restart()
    finally:
        os.umask(old)
    _, printed = host.run("source ~/look.sh", cwd="~/a/b")
    lines = printed.decode().split("\n")
    assert lines[:4] == ["0022", f"{host.home}/a/b", "4", "0"]  # `ls` itself opens the fourth descriptor
    assert "yes=141" in lines and "own session" in lines
    signals = [int(line.split()[1], 16) for line in lines if line.startswith("Sig")]
    assert len(signals) == 2 and not any(
        mask & 0x7FFFFFFF for mask in signals
    )  # the C library keeps 32 and 33 to itself


def test_the_environment(host):
    env = {"GREETING": "hé\nllo", "PODWAY_JOB": "someone-else"}
    host.start("env -0", env=env, secrets={"TOKEN": "x"})
    _, printed = host.output()
    found = dict(entry.split("=", 1) for entry in printed.decode().split("\0") if entry)
    assert found["HOME"] == str(host.home) and found["GREETING"] == "hé\nllo" and found["TOKEN"] == "x"
    assert found["PODWAY_JOB"] == "job" and found["PODWAY_HOST_ID"] == host.host_id
    assert not [name for name in found if name.startswith("PYTEST")]


def test_secrets_are_in_no_file_and_no_argument(host):
    secret = "hf_" + "Zq7" * 12
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBg\n-----END KEY-----\n"
    script = 'echo "token $TOKEN."; sleep 0.2; printf %s "${TOKEN:0:9}"; sleep 0.2; echo "${TOKEN:9}"; echo "$KEY" | sed -n 2p'
    host.start(script, secrets={"TOKEN": secret, "KEY": key})
    arguments = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in host.processes())
    _, printed = host.output()
    assert printed == b"token ***.\n***\n***\n"
    stored = b"".join(path.read_bytes() for path in host.state.rglob("*") if path.is_file())
    for hidden in (secret, secret[:9], "MIIEvQIBADANBg"):
        assert hidden.encode() not in stored and hidden.encode() not in arguments


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"interpreter": ["no-such-shell"]}, 127, b"no-such-shell"),
        ({"cwd": "/proc/nowhere"}, 127, b"/proc/nowhere"),
        ({"cwd": "/dev/null/x"}, 126, b"/dev/null"),
    ],
)
def test_what_cannot_start_says_so_in_its_output(host, fields, code, said):
    reply, printed = host.run("echo hi", **fields)
    assert reply["code"] == code
    assert printed.startswith(b"podway: cannot start the script: ") and said in printed


def test_another_interpreter(host):
    reply, printed = host.run("import sys; print('from', 'python'); sys.exit(4)", interpreter=[sys.executable, "-S"])
    assert (reply["code"], printed) == (4, b"from python\n")


@pytest.mark.parametrize(
    "fields",
    [
        {"job": "../up", "script": ""},
        {"job": "", "script": ""},
        {"job": "a" * 129, "script": ""},
        {"job": "job", "script": 7},
        {"job": "job", "script": "", "env": {"A": 1}},
        {"job": "job", "script": "", "env": {"A=B": "1"}},
        {"job": "job", "script": "", "env": ["A"]},
        {"job": "job", "script": "", "secrets": {"A": "\0"}},
        {"job": "job", "script": "", "secrets": {"A": "\ud800"}},
        {"job": "job", "script": "\ud800"},
        {"job": "job", "script": "", "cwd": 3},
        {"job": "job", "script": "", "interpreter": "bash"},
    ],
)
def test_bad_starts_are_refused(host, fields):
    with pytest.raises(Refusal) as refusal:
        host.call("start", phase="run", **fields)
    assert refusal.value.code == "bad-request"
    assert host.call("jobs")["jobs"] == []


def test_nothing_outlives_a_phase_and_its_last_words_are_kept(host):
    script = """
        mkdir pids
        (trap 'echo polite; exit' TERM; touch pids/$BASHPID; echo up1; while :; do sleep 0.05; done) &
        (trap '' TERM HUP; touch pids/$BASHPID; echo up2; exec setsid sleep 60) &
        while [ $(ls pids | wc -l) -lt 2 ]; do sleep 0.02; done
        sleep 0.1
        echo main ends
    """
    began = time.monotonic()
    reply, printed = host.run(script)
    assert reply["code"] == 0 and 1.5 < time.monotonic() - began < 30  # the grace of an end, not the sleep
    assert b"polite\n" in printed.partition(b"main ends\n")[2]
    assert not [pid for pid in pids_in(host.home / "pids") if alive(pid)]


def test_one_phases_end_leaves_the_others_alone(host):
    host.start("echo up; sleep 30", phase="long")
    host.printed(b"up", phase="long")
    host.start("sleep 30 & echo short", phase="short")
    assert host.output(phase="short")[1] == b"short\n"
    assert host.call("status", job="job", phase="long")["state"] == "running"
    listed = {(job["phase"], job["state"]) for job in host.call("jobs")["jobs"]}
    assert listed == {("long", "running"), ("short", "exited")}


def test_usage_counts_the_living_and_the_dead(host):
    busy = "python3 -c 'x=bytearray(50<<20)\nimport time\nt=time.process_time()\nwhile time.process_time()-t<0.3: pass'"
    host.start(f"{busy}; echo burnt; {busy} & sleep 30; wait")
    host.printed(b"burnt")
    used = until(lambda: (got := host.call("usage", job="job"))["cpu_s"] > 0.5 and got)
    assert used["rss"] > 1 << 20 and used["processes"] >= 2 and used["max_rss"] > 1 << 20
    host.call("cancel", job="job", grace=0, wait=10)
    used = host.call("usage", job="job")
    assert used["cpu_s"] > 0.5 and used["rss"] == 0 and used["max_rss"] > 50 << 20


def test_forget(host):
    host.start("echo hi; sleep 30")
    with pytest.raises(Refusal) as refusal:
        host.call("forget", job="job")
    assert refusal.value.code == "running"
    host.call("cancel", job="job", grace=0, wait=10)
    assert host.call("forget", job="job")["forgotten"]
    assert not host.call("forget", job="job")["forgotten"]
    assert host.call("jobs")["jobs"] == [] and not list(host.state.glob("trash*"))
    assert host.run("echo again")[1] == b"again\n"


def test_sweep_kills_what_ended_jobs_left(host):
    host.run("echo hi", job="ended")
    host.start("echo up; sleep 60", job="runs")
    host.printed(b"up", job="runs")
    marks = {"PATH": os.environ["PATH"], "PODWAY_HOST_ID": host.host_id}
    strays = [
        subprocess.Popen(["sleep", "60"], env={**marks, **more}, start_new_session=True)
        for more in ({"PODWAY_JOB": "ended"}, {"PODWAY_JOB": "runs"}, {})
    ]
    try:
        until(lambda: {stray.pid for stray in strays} <= host.processes())
        assert host.call("sweep")["killed"] == [strays[0].pid]
        assert strays[0].wait(5) == -9 and strays[1].poll() is None and strays[2].poll() is None
        assert host.call("status", job="runs", phase="run")["state"] == "running"
    finally:
        for stray in strays:
            stray.kill()
            stray.wait()


def test_chips_tells_whether_libtpu_left_its_lock(host):
    reply = host.call("chips")
    assert isinstance(reply["holders"], list)
    assert (reply["lockfile"] is not None) == os.path.exists("/tmp/libtpu_lockfile")  # noqa: PTH110


def test_shutdown_ends_all_jobs_and_the_agent(host):
    for number in range(3):
        host.start("trap '' TERM; echo up; sleep 60; sleep 60", job=f"job{number}")
        host.printed(b"up", job=f"job{number}")
    assert host.call("shutdown", grace=0.2)["gone"]
    until(lambda: not host.processes())


def test_shutdown_can_keep_jobs_for_the_next_agent(host):
    host.start("sleep 0.5; echo still here")
    host.call("shutdown", keep_jobs=True)
    until(lambda: not alive(host.pid))
    host.start_agent()
    assert host.output()[1] == b"still here\n"


def test_there_is_one_agent_per_home(host):
    first = host.pid
    assert host.start_agent() == first
    foreground = subprocess.run(host.command[:-1], capture_output=True, text=True, timeout=120)
    assert foreground.returncode == 3 and str(first) in foreground.stderr


def test_a_home_too_deep_for_a_socket_path(tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with Host(deep) as host:
        assert host.run("echo deep")[1] == b"deep\n"


def test_the_agent_may_be_started_by_relative_paths(tmp_path):
    bundle().write(tmp_path / "agent.pyz")
    with Host(tmp_path) as host:
        host.kill_agent()
        host.command = ["env", "-C", str(tmp_path), sys.executable, "agent.pyz", "serve", "--home", "home", "--daemon"]
        host.start_agent()
        assert host.call("hello")["home"] == str(host.home)
        assert host.run("pwd")[1] == f"{host.home}\n".encode()


def test_runners_come_from_the_file_the_agent_began_from(host):
    host.bundle.unlink()
    host.bundle.write_bytes(b"something else")
    assert host.run("echo same")[1] == b"same\n"


def test_requests_over_stdin_and_stdout(host):
    call = [*host.command[:4], "call", "--home", str(host.home)]
    requests = wire.encode({"op": "hello"}) + wire.encode({"op": "status", "job": "x", "phase": "y"})
    done = subprocess.run(call, input=requests, capture_output=True, timeout=120)
    first, second = (wire.decode(line)[0] for line in done.stdout.splitlines())
    assert first["pid"] == host.pid and second["state"] == "absent" and done.returncode == 0
    done = subprocess.run([*call[:-1], "/nowhere"], input=requests, capture_output=True, timeout=120)
    assert done.returncode == 1 and wire.decode(done.stdout)[0]["code"] == "no-agent"


@pytest.mark.parametrize(
    "words", [[], ["serve"], ["serve", "--home"], ["dance", "--home", "x"], ["serve", "--hme", "x"]]
)
def test_a_wrong_command_line_gets_the_usage(tmp_path, words):
    bundle().write(tmp_path / "agent.pyz")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "agent.pyz"), *words], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 2 and done.stderr.startswith("usage:")


def test_a_disk_that_takes_no_more_costs_output_and_not_the_job(tmp_path):
    limit = 64 << 10
    with Host(tmp_path, prefix=("prlimit", f"--fsize={limit}")) as host:
        reply, printed = host.run("head -c 200000 /dev/zero; exit 5")
        assert (reply["state"], reply["code"]) == ("exited", 5)
        assert printed == b"\0" * limit and reply["output_lost"] == 200000 - limit


def test_a_start_that_the_disk_refuses_can_be_made_again(host):
    def limit(size: str) -> None:
        subprocess.run(["prlimit", f"--pid={host.pid}", f"--fsize={size}:unlimited"], check=True, timeout=120)

    for room in ("4", "30"):  # not even for the script; for the script but not for what the runner writes
        limit(room)
        with pytest.raises(Refusal) as refusal:
            host.start("echo hi")
        assert refusal.value.code == "io" and "too large" in str(refusal.value)
        assert host.call("status", job="job", phase="run")["state"] == "absent"
    limit("unlimited")
    assert host.run("echo hi")[1] == b"hi\n"


def test_fifty_megabytes_take_little_memory(host):
    size = 50 << 20
    host.start(f"head -c {size} /dev/zero; echo full; sleep 60", secrets={"S": "not-in-there"})
    offset = 0
    while True:
        _reply, body = host.follow(offset=offset, limit=output.MAX_READ, wait=5)
        offset += len(body)
        if body.endswith(b"full\n"):
            break
    assert offset == size + 5
    for pid in (host.pid, host.runner()):
        peak = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
        assert int(peak.split()[1]) < 60 << 10
