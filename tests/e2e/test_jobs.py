"""Jobs as a person meets them: the gang, the queue, hostile processes, secrets, autostop, JAX over every host."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podway.errors import ProviderError, UserError
from podway.hosts.blobs import BlobStore
from podway.hosts.link import AgentLink, connect_local
from podway.hosts.manifest import FileTree
from podway.hosts.sync import sync
from podway.hosts.tree import scan
from podway.task.task import Autostop, Task
from tests.conftest import wait_until
from tests.e2e.harness import FOUR_HOSTS, Podway, counting, files_with, numbered_lines, task, without_prefix
from tests.long import every

HOSTILE = {
    "ignores SIGTERM": "trap '' TERM HUP INT; while :; do sleep 0.2; done",
    "double fork": "(setsid bash -c 'trap \"\" TERM; sleep 1000' &) & sleep 1000",
    "nohup": "nohup sleep 1000 >/dev/null 2>&1 & disown; sleep 1000",
    "cleared environment": "env -i setsid sleep 1000 & sleep 1000",
    "stopped": "sleep 1000 & kill -STOP $!; sleep 1000",
    "forks for ever": "spawn() { while :; do sleep 0.05 & wait $!; done; }; trap '' TERM; spawn & spawn & wait",
}


@pytest.mark.parametrize("kind", every(2, HOSTILE))
def test_cancel_leaves_nothing_of_a_hostile_job(pod: Podway, kind: str) -> None:
    pod.start()
    grace = 1
    pod.client.launch(task(HOSTILE[kind], stop_duration_s=grace), cluster="c")
    wait_until(lambda: any("started run" in event.text for event in pod.client.events("c")))
    before = {process.pid for process in pod.host_processes() if "serve" in process.info["cmdline"]}
    time.sleep(0.3)
    begun = time.monotonic()
    pod.client.cancel("c")
    assert pod.finished("c", 1) == "CANCELLED"
    took = time.monotonic() - begun
    left = [process.info["cmdline"] for process in pod.host_processes() if process.pid not in before]
    assert left == []
    assert took < grace + 2, f"cancel took {took:.1f} s"
    pod.down("c")


def test_first_failure_stops_the_rest_and_is_named(pod: Podway) -> None:
    pod.start()
    command = "if [ $PODWAY_RANK = 2 ]; then echo about to fail; exit 7; fi; sleep 1000"
    pod.client.launch(task(command, tpu=FOUR_HOSTS, stop_duration_s=1), cluster="c")
    frames = list(pod.client.watch("c", 1))
    end = frames[-1]
    assert end.state == "FAILED"
    assert "worker2 (rank 2" in end.reason and "code 7" in end.reason
    assert "about to fail" in end.tail
    codes = {exit.rank: exit.code for exit in pod.client.job("c", 1).exits}
    assert codes[2] == 7 and set(codes) == {0, 1, 2, 3}
    pod.down("c")


def test_failed_setup_never_runs(pod: Podway) -> None:
    pod.start()
    pod.client.launch(task("touch ~/ran", setup="[ $SKYPILOT_SETUP_NODE_RANK = 0 ]"), cluster="c")
    assert pod.finished("c", 1) == "FAILED_SETUP"
    assert not list(pod.home.glob("local/c/host-*/ran"))
    pod.down("c")


def test_queue_is_first_come_first_served_and_one_at_a_time(pod: Podway) -> None:
    pod.start()
    command = "echo start >> ~/order; sleep 0.8; echo end >> ~/order"
    pod.client.launch(task(command), cluster="c")
    for _ in range(3):
        pod.client.exec("c", task(command))
    beside = pod.client.run("c", "echo beside")
    assert pod.finished("c", beside.job or 0) == "SUCCEEDED"
    assert pod.client.job("c", 4).state == "PENDING"
    assert pod.finished("c", 4) == "SUCCEEDED"
    order = (pod.home / "local" / "c" / "host-0" / "order").read_text().split()
    assert order == ["start", "end"] * 4
    pod.down("c")


def test_the_waiting_job_of_the_highest_priority_is_next(pod: Podway) -> None:
    pod.start()
    pod.client.launch(task("until [ -e ~/go ]; do sleep 0.1; done"), cluster="c")
    for word, priority in (("low", -5), ("plain", 0), ("high", 5)):
        pod.client.exec("c", task(f"echo {word} >> ~/order", priority=priority))
    assert [job.priority for job in pod.client.jobs("c")] == [0, -5, 0, 5]
    pod.client.run("c", "touch ~/go")
    assert pod.finished("c", 2) == "SUCCEEDED"
    assert (pod.home / "local" / "c" / "host-0" / "order").read_text().split() == ["high", "plain", "low"]
    pod.down("c")


def test_a_waiting_job_can_be_cancelled(pod: Podway) -> None:
    pod.start()
    pod.client.launch(task("sleep 1000", stop_duration_s=1), cluster="c")
    second = pod.client.exec("c", task("touch ~/never")).job or 0
    pod.client.cancel("c", [second])
    assert pod.finished("c", second) == "CANCELLED"
    assert pod.client.job("c", 1).state in ("RUNNING", "SETTING_UP", "PENDING")
    pod.down("c")


def test_time_limit(pod: Podway) -> None:
    pod.start()
    pod.client.launch(task("sleep 1000", max_duration_s=1, stop_duration_s=1), cluster="c")
    assert pod.finished("c", 1) == "CANCELLED"
    assert "max_duration" in pod.client.job("c", 1).reason
    pod.down("c")


def test_secrets_reach_the_job_and_nothing_else(pod: Podway) -> None:
    pod.start()
    value = "s3cr3t-value-42"
    pod.client.launch(task('echo "token is $TOK"; [ ${#TOK} = 15 ]', secrets={"TOK": value}), cluster="c")
    text = pod.log_text("c", 1)
    assert pod.finished("c", 1) == "SUCCEEDED"
    assert "token is ***" in text and value not in text
    assert files_with(pod.home, value) == []
    pod.down("c")


def test_environment_of_a_multislice_job(pod: Podway) -> None:
    pod.start()
    names = "PODWAY_RANK PODWAY_SLICE_ID TPU_WORKER_ID MEGASCALE_SLICE_ID MEGASCALE_NUM_SLICES SKYPILOT_NUM_NODES"
    pod.client.launch(task(f'for v in {names}; do printf "%s " ${{!v}}; done; echo', slices=2), cluster="c")
    lines = without_prefix(pod.log_text("c", 1))
    assert set(lines) == {f"{r} {r // 2} {r % 2} {r // 2} 2 4 " for r in range(4)}
    pod.down("c")


def test_autostop_stops_and_autodown_takes_down(pod: Podway) -> None:
    pod.start()
    pod.client.launch(task("true"), cluster="c", autostop=Autostop(idle_minutes=0.01))
    wait_until(lambda: pod.client.cluster("c").state == "STOPPED", 30, "autostop")
    pod.client.start("c")
    wait_until(lambda: pod.client.cluster("c").state == "UP", 30, "the start")
    pod.client.autostop("c", Autostop(idle_minutes=0.01, down=True))
    wait_until(lambda: pod.client.clusters() == [], 30, "autodown")
    assert pod.host_processes() == []


def test_binary_output_and_progress_bars(pod: Podway) -> None:
    pod.start()
    command = r"""printf 'bad \xff\xfe bytes\n'; for i in 1 2 3; do printf '\r%d%%' $i; done; printf '\rdone\n'; printf 'no newline'"""
    pod.client.launch(task(command, tpu="v6e-8"), cluster="c")
    text = pod.log_text("c", 1)
    assert "bad �� bytes" in text and "no newline" in text
    assert ") done" in text and "1%" not in text
    raw = b"".join(pod.client.output("c", 1, 0, "run"))
    assert raw.startswith(b"bad \xff\xfe bytes\n")
    pod.down("c")


def test_tail_rank_and_collapse(pod: Podway) -> None:
    pod.start()
    together = "touch ~/here; until [ $(ls ~/../host-*/here | wc -l) = 4 ]; do sleep 0.05; done"
    pod.client.launch(task(f"{together}; echo same; " + counting("run", 20), tpu=FOUR_HOSTS), cluster="c")
    assert pod.finished("c", 1) == "SUCCEEDED"
    shown = [frame.text for frame in pod.client.watch("c", 1) if frame.kind == "log"]
    assert "".join(shown).count("same") == 1 and "(all 4 hosts) same" in "".join(shown)
    one = without_prefix(pod.log_text("c", 1, rank=3))
    assert set(one) == {"same", *(f"run 3 line {n}" for n in range(20))}
    assert len(pod.log_text("c", 1, tail=5).splitlines()) == 5
    assert without_prefix(pod.log_text("c", 1)) == numbered_lines(4, {"run": 20}) + without_prefix("(x) same\n" * 4)
    pod.down("c")


def test_jax_sees_every_chip_of_the_slice(pod: Podway) -> None:
    pytest.importorskip("jax")
    pod.start()
    code = "import jax; jax.distributed.initialize(); print('devices', jax.device_count(), jax.local_device_count())"
    pod.client.launch(task(f'{sys.executable} -c "{code}"', tpu=FOUR_HOSTS), cluster="c")
    text = pod.log_text("c", 1)
    assert pod.finished("c", 1, 90) == "SUCCEEDED", text
    assert text.count("devices 16 4") == 4
    pod.down("c")


def test_two_servers_on_one_database_do_not_act_twice(pod: Podway, tmp_path: Path, postgres: str) -> None:
    """Both serve; each job runs once, whichever server it was sent to; when one dies the other takes over."""
    pod.start(PODWAY_DB=postgres)
    other = Podway(pod.home.parent / "other")
    (other.home / "local").symlink_to(pod.home / "local")  # both reach the same hosts
    (pod.home / "local").mkdir(exist_ok=True)
    (other.home / "secret.key").write_bytes((pod.home / "secret.key").read_bytes())
    other.start(PODWAY_DB=postgres, PODWAY_HOME=str(other.home))
    try:
        theirs = _client_of(other.home)
        pod.client.launch(task("echo once >> ~/count"), cluster="c")
        for number in range(2, 6):
            (theirs if number % 2 else pod.client).exec("c", task("echo once >> ~/count"))
        wait_until(lambda: all(j.ended for j in theirs.jobs("c")), 60, "the jobs")
        assert [j.state for j in pod.client.jobs("c")] == ["SUCCEEDED"] * 5
        assert (pod.home / "local" / "c" / "host-0" / "count").read_text().split() == ["once"] * 5
        pod.kill_server()
        sixth = theirs.exec("c", task("echo after"))
        wait_until(lambda: theirs.job("c", sixth.job or 0).state == "SUCCEEDED", 60, "the other server")
        theirs.down("c")
        wait_until(lambda: theirs.clusters() == [], 60, "down")
        assert pod.host_processes() == []
    finally:
        other.close()


def _client_of(home: Path):  # type: ignore[no-untyped-def]
    import json

    from podway.server.client import Client

    found = json.loads((home / "server.json").read_text())
    return Client(found["url"], found["token"])


def test_the_head_may_decide_for_all(pod: Podway) -> None:
    """dstack's stop_criteria: master-done."""
    pod.start()
    pod.client.launch(task("[ $PODWAY_RANK = 0 ] || sleep 1000", stop_when="head-done", stop_duration_s=1), cluster="c")
    assert pod.finished("c", 1) == "SUCCEEDED"
    assert not [p for p in pod.host_processes() if "sleep" in p.info["cmdline"]]
    pod.down("c")


def test_a_command_beside_the_queue_is_seen_through_on_every_host(pod: Podway) -> None:
    pod.start()
    pod.client.launch(task("true"), cluster="c")
    beside = pod.client.run("c", "if [ $PODWAY_RANK = 0 ]; then exit 4; fi; sleep 0.5; echo seen through")
    text = pod.log_text("c", beside.job or 0)
    assert "seen through" in text
    assert pod.finished("c", beside.job or 0) == "FAILED"
    assert [exit.code for exit in pod.client.job("c", beside.job or 0).exits] == [4, 0]
    pod.down("c")


def test_a_task_without_chips_runs_beside_the_one_that_has_them(pod: Podway) -> None:
    """A benchmark beside the server it measures; it is a gang like any other."""
    pod.start()
    pod.client.launch(task("touch ~/serving; sleep 1000", stop_duration_s=1), cluster="c")
    wait_until(lambda: pod.client.job("c", 1).state == "RUNNING")
    beside = pod.client.exec("c", Task(run="ls ~/serving; [ $PODWAY_RANK = 0 ] && exit 3; sleep 1000"))
    assert pod.finished("c", beside.job or 0) == "FAILED"
    assert pod.client.job("c", 1).state == "RUNNING"
    waits = pod.client.exec("c", task("echo next"))
    assert pod.client.job("c", waits.job or 0, wait=1).state == "PENDING"
    pod.client.cancel("c", [1])
    assert pod.finished("c", waits.job or 0) == "SUCCEEDED"
    pod.down("c")


def test_an_open_shell_keeps_a_cluster_awake(pod: Podway) -> None:
    pod.start()
    pod.client.launch(task("true"), cluster="c")
    assert pod.finished("c", 1) == "SUCCEEDED"
    how = pod.client.shell("c", 0, "echo here; exec sleep 30")
    with subprocess.Popen(how.argv, env=how.env, cwd=how.cwd, stdout=subprocess.PIPE) as shell:
        assert shell.stdout and shell.stdout.readline() == b"here\n"
        pod.client.autostop("c", Autostop(idle_minutes=0.01))
        time.sleep(2)
        state = pod.client.cluster("c").state
        shell.kill()
    assert state == "UP"
    pod.client.autostop("c", Autostop(idle_minutes=0.02))
    wait_until(lambda: pod.client.cluster("c").state == "STOPPED", 30, "autostop")
    pod.down("c")


@pytest.mark.parametrize("target", ["~/../../escaped", "/escaped", "~/a/../../../escaped", "../../escaped"])
def test_no_tree_leaves_the_home_of_a_simulated_host(pod: Podway, tmp_path: Path, target: str) -> None:
    """Neither by the API, whose caller names the target of each tree, nor past it, by the agent."""
    pod.start()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("x")
    blobs = BlobStore(pod.home / "blobs")
    manifest = scan(tmp_path / "tree").manifest
    tree = FileTree(target=target, manifest=blobs.put(manifest.encode()))
    with pytest.raises(UserError, match="file_mounts"):
        pod.client.launch(task("true"), cluster="c", files=(tree,))
    pod.client.launch(task("true"), cluster="c")
    assert pod.finished("c", 1) == "SUCCEEDED"

    async def past_the_server() -> None:
        home = pod.home / "local/c/host-0"
        link = AgentLink(connect_local(home), address="127.0.0.1")
        try:
            await sync([link], manifest, target, blobs)
        finally:
            link.close()

    with pytest.raises(ProviderError, match=r"leads out of the home|must begin with"):
        asyncio.run(past_the_server())
    assert not list(pod.home.rglob("escaped")) and not Path("/escaped").exists()
    pod.down("c")
