"""launch, exec and apply, from the words typed to the exit code."""

import json
from pathlib import Path

import pytest

from podway.errors import UserError
from podway.hosts.tree import TreeManifest
from podway.server.api import Frame
from tests.cli import records
from tests.cli.conftest import Run, on_terminal
from tests.cli.stub import Stub

LAUNCH = "/v1/launch"
GOOD = [
    Frame(kind="event", text="submitted", event=1, state="PENDING"),
    Frame(kind="event", text="Starting v6e-16 (4 hosts, simulated on this machine)", event=2),
    Frame(kind="event", text="is up: v6e-16", event=3, state="UP"),
    Frame(kind="event", text="is being set up", event=4, state="SETTING_UP"),
    Frame(kind="event", text="Syncing ~/sky_workdir", event=5),
    Frame(kind="log", text="(setup, pid=7) pip install\n", cursor="a"),
    Frame(kind="event", text="is running", event=6, state="RUNNING"),
    Frame(kind="log", text="(head, rank=0, pid=8) hi\n(worker1, rank=1, pid=9, ip=127.20.0.2) hi\n", cursor="b"),
    Frame(kind="end", state="SUCCEEDED"),
]
BAD = [
    Frame(kind="log", text="(head, rank=0, pid=8) hi\n", cursor="a"),
    Frame(kind="end", state="FAILED", reason="run on worker2 (rank 2, 127.20.0.3) exited with code 7", tail="oh\nno"),
]

STORY = """\
Considered resources (1 slice):
INFRA         TPU     TOPOLOGY  HOSTS  CHIPS  COST ($/h)  NOTE                                      CHOSEN
local (here)  v6e-16  4x4           4     16        0.00  simulated; the real slice costs $43.20/h  ✔

⚙︎ Launching cluster demo: v6e-16 (4 hosts) on local (here). Simulated; the real slice costs $43.20/h.
├── Starting v6e-16 (4 hosts, simulated on this machine)
✓ Cluster up: demo.
⚙︎ Job submitted, ID: 1
├── Syncing ~/sky_workdir
└── Job started. Streaming logs... (Ctrl-C to exit log streaming; job will not be killed)
(setup, pid=7) pip install
(head, rank=0, pid=8) hi
(worker1, rank=1, pid=9, ip=127.20.0.2) hi
✓ Job finished (status: SUCCEEDED).

Useful commands
Cluster name: demo
├── To run more on it:      podway exec demo FILE
├── To see its jobs:        podway queue demo
├── To open a shell on it:  podway ssh demo
└── To delete it:           podway down demo
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def test_the_story_of_a_launch(run: Run, stub: Stub) -> None:
    stub.frames = GOOD
    result = run("launch", "-c", "demo", "--tpus", "v6e-16", "echo hi")
    assert result == (0, STORY, "")
    (body,) = stub.asked("POST", LAUNCH)
    assert body["options"]["cluster"] == "demo"
    assert body["task"]["run"] == "echo hi"
    assert body["task"]["resources"][0]["accelerator"] == {"type": "v6e-16"}


def test_a_name_is_made_up_once(run: Run, stub: Stub) -> None:
    stub.frames = GOOD
    assert run("launch", "echo", "hi").code == 0
    assert stub.asked("POST", LAUNCH)[0]["options"]["cluster"] == "podway-ada-1234"


def test_failure_names_the_rank_and_shows_its_last_lines(run: Run, stub: Stub) -> None:
    stub.frames = BAD
    result = run("launch", "-c", "demo", "false")
    assert result.code == 100
    assert (
        "ERROR: Job 1 failed: run on worker2 (rank 2, 127.20.0.3) exited with code 7 (status: FAILED)\n"
        "Last lines of output:\n  oh\n  no\n" in result.out
    )


@pytest.mark.parametrize(("state", "code"), [("CANCELLED", 103), ("FAILED_SETUP", 100), ("FAILED_DRIVER", 100)])
def test_exit_code_follows_the_end(run: Run, stub: Stub, state: str, code: int) -> None:
    stub.frames = [Frame(kind="end", state=state, reason="why not")]
    result = run("launch", "-c", "demo", "true")
    assert result.code == code
    assert "why not" in result.out


def test_json_is_one_document_and_the_rest_is_on_stderr(run: Run, stub: Stub) -> None:
    stub.frames = BAD
    result = run("launch", "-c", "demo", "-o", "json", "false")
    assert result.code == 100
    assert json.loads(result.out) == {
        "cluster": "demo",
        "cluster_id": "id-demo",
        "job": 1,
        "created": True,
        "then": [],
        "notes": [],
        "state": "FAILED",
        "reason": "run on worker2 (rank 2, 127.20.0.3) exited with code 7",
    }
    assert "(head, rank=0, pid=8) hi" in result.err


def test_dryrun_prints_the_request_and_starts_nothing(run: Run, stub: Stub) -> None:
    result = run("launch", "--dryrun", "-c", "demo", "true")
    assert result.code == 0
    assert json.loads(result.out)["name"] == "demo"
    assert "Considered resources" in result.err
    assert [path for _, path, _ in stub.calls] == ["/v1/preview"]


def test_detached_returns_with_the_job_id(run: Run, stub: Stub) -> None:
    result = run("launch", "-d", "-c", "demo", "true")
    assert result.code == 0
    assert "⚙︎ Job submitted, ID: 1\n" in result.out
    assert "├── To follow it:           podway logs demo 1\n" in result.out
    assert not any(path.endswith("/watch") for _, path, _ in stub.calls)
    document = json.loads(run("launch", "-d", "-c", "demo", "-o", "json", "true").out)
    assert (document["job"], document["state"]) == (1, None)


def test_only_the_cluster(run: Run, stub: Stub) -> None:
    stub.launch_job = None
    result = run("launch", "-c", "demo", "--tpus", "v6e-16")
    assert result.code == 0
    assert "✓ Cluster up: demo.\n" in result.out
    assert "Job" not in result.out
    assert stub.asked("POST", LAUNCH)[0]["task"].get("run", "") == ""


def test_an_existing_cluster_is_used_and_the_queue_told(run: Run, stub: Stub) -> None:
    stub.add(records.cluster())
    stub.jobs["demo"] = [records.job(1), records.job(2, state="RUNNING", ended=None), records.job(3, state="PENDING")]
    stub.launch_job = 3
    stub.frames = GOOD[5:]
    result = run("launch", "-c", "demo", "true")
    assert result.out.startswith(
        "⚙︎ Using the existing cluster demo.\n⚙︎ Job submitted, ID: 3\n├── Waiting for 1 job ahead of this one.\n└── Job started."
    )


def test_the_jobs_ahead_are_counted_by_priority(run: Run, stub: Stub) -> None:
    stub.add(records.cluster())
    running = records.job(1, state="RUNNING", ended=None)
    waiting = [records.job(n, state="PENDING", priority=p) for n, p in ((2, 0), (3, 9), (4, 5), (5, 9))]
    stub.jobs["demo"] = [running, *waiting]
    stub.launch_job = 4
    stub.frames = GOOD[5:]
    assert "Waiting for 3 jobs ahead of this one." in run("launch", "-c", "demo", "true").out


def test_a_job_beside_the_queue_waits_for_nobody(run: Run, stub: Stub) -> None:
    stub.add(records.cluster())
    stub.jobs["demo"] = [
        records.job(2, state="RUNNING", ended=None),
        records.job(3, state="PENDING", ended=None, exclusive=False),
    ]
    stub.launch_job = 3
    stub.frames = GOOD[5:]
    assert "ahead of it" not in run("exec", "demo", "true").out


def test_flags_become_the_request(run: Run, stub: Stub) -> None:
    stub.frames = GOOD
    flags = ["--down", "-i", "10", "--no-setup", "--raw", "-n", "job", "--num-nodes", "2", "--use-spot", "--env", "A=1"]
    assert run("launch", "-c", "demo", "--gpus", "tpu-v6e-8", "--infra", "local", *flags, "true").code == 0
    (body,) = stub.asked("POST", LAUNCH)
    assert body["options"]["autostop"] == {"idle_minutes": 10, "down": True}
    assert body["options"]["setup"] is False
    task = body["task"]
    assert (task["name"], task["slices"], task["env"]) == ("job", 2, {"A": "1"})
    assert (task["resources"][0]["spot"], task["resources"][0]["placement"]) == ("yes", {"provider": "local"})
    (query,) = stub.asked("GET", "/v1/clusters/demo/jobs/1/watch")
    assert query["raw"] == "true"


def test_down_alone_means_when_the_jobs_are_done(run: Run, stub: Stub) -> None:
    run("launch", "-d", "-c", "demo", "--down", "true")
    assert stub.asked("POST", LAUNCH)[0]["options"]["autostop"] == {"idle_minutes": 0, "down": True}


def test_a_long_list_of_offers_is_cut_but_shows_the_chosen(run: Run, stub: Stub) -> None:
    stub.offers = [
        records.offer(
            provider="gcp", zone=f"z{n}", hourly_cost=None if n == 0 else n, note="", chosen=n == 15, spot=n > 9
        )
        for n in range(20)
    ]
    out = run("launch", "--dryrun", "true").err
    assert "gcp (z0)   v6e-16        4x4           4     16           -  -\n" in out
    assert "gcp (z15)  v6e-16[spot]  4x4           4     16       15.00  -     ✔\n... and 9 more\n" in out


def test_files_go_up_once(run: Run, stub: Stub, here: Path) -> None:
    (here / "src").mkdir()
    (here / "src" / "a.py").write_text("print(1)")
    (here / "src" / "b.bin").write_bytes(bytes(300_000))
    (here / "one.txt").write_text("one")
    (here / "task.yaml").write_text("workdir: src\nfile_mounts:\n  ~/one.txt: one.txt\nrun: ls\n")
    stub.frames = GOOD
    result = run("launch", "-c", "demo", "task.yaml")
    assert f"✓ Synced workdir: {here}/src -> ~/sky_workdir (2 files, 293.0 KiB; 293.0 KiB new)\n" in result.out
    assert f"✓ Synced mount: {here}/one.txt -> ~/one.txt (1 file, 3 B; 3 B new)\n" in result.out
    trees = stub.asked("POST", LAUNCH)[0]["files"]
    assert [(tree["target"], tree["kind"], tree["count"]) for tree in trees] == [
        ("~/sky_workdir", "workdir", 2),
        ("~/one.txt", "mount", 1),
    ]
    manifest = TreeManifest.decode(stub.blobs.read(trees[0]["manifest"]))
    assert [(entry.path, stub.blobs.size(entry.sha256)) for entry in manifest.entries] == [
        ("a.py", 8),
        ("b.bin", 300_000),
    ]
    sent = len(stub.asked("POST", "/v1/files"))
    assert "; nothing new)" in run("exec", "demo", "task.yaml").out
    assert len(stub.asked("POST", "/v1/files")) == sent
    (body,) = stub.asked("POST", "/v1/clusters/demo/jobs")
    assert [tree["kind"] for tree in body["files"]] == ["workdir"]


def test_packs_are_bounded(run: Run, stub: Stub, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podway.server.uploading.PACK_BYTES", 100_000)
    for number in range(6):
        (here / f"{number}.bin").write_bytes(bytes([number]) * 40_000)
    run("launch", "-d", "-c", "demo", "--workdir", ".", "true")
    assert len(stub.asked("POST", "/v1/files")) == 3 + 1  # two files in a pack, and the manifest
    assert stub.blobs.missing([entry.sha256 for entry in _manifest(stub).entries]) == []


def _manifest(stub: Stub) -> TreeManifest:
    return TreeManifest.decode(stub.blobs.read(stub.asked("POST", LAUNCH)[0]["files"][0]["manifest"]))


def test_notes_of_the_file_are_told(run: Run, stub: Stub, here: Path) -> None:
    (here / "task.yaml").write_text("event_callback: echo done\nrun: ls\n")
    result = run("launch", "-d", "-c", "demo", "task.yaml")
    assert result.code == 0
    assert result.err.startswith("Note: ")
    assert "event_callback" in result.err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["launch", "nope.yaml"], "nope.yaml: no such file"),
        (["launch", "--tpus", "v6e-7", "ls"], "--tpus: There is no v6e-7"),
        (["launch", "--env", "9=1", "ls"], "--env 9: not a variable name"),
        (["exec", "nope", "ls"], "there is no cluster 'nope'"),
        (["exec", "demo", ""], "the command is empty"),
        (["apply", "-f", "nope.yml"], "nope.yml: no such file"),
    ],
)
def test_mistakes_are_told(run: Run, stub: Stub, here: Path, words: list[str], what: str) -> None:
    result = run(*words)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"Error: {what}")


def test_a_server_that_refuses_is_heard(run: Run, stub: Stub) -> None:
    stub.refuse["/v1/launch"] = UserError("no quota", "ask for some", status=409)
    result = run("launch", "-c", "demo", "true")
    assert result.code == 1
    assert result.err == "Error: no quota\n  ask for some\n"


def test_a_log_that_cannot_be_followed_is_an_error(run: Run, stub: Stub) -> None:
    stub.frames = [Frame(kind="end", reason="the archive is gone")]
    result = run("launch", "-c", "demo", "true")
    assert result.code == 1
    assert result.err.startswith("Error: the archive is gone\n")


def test_apply_names_the_cluster_after_the_file(run: Run, stub: Stub, here: Path) -> None:
    stub.frames = GOOD
    text = "type: task\nname: tpu-job\ncommands: ['echo ${{ run.args }}']\nresources: {gpu: v6e-8}\n"
    (here / "x.dstack.yml").write_text(text)
    assert run("apply", "-f", "x.dstack.yml", "-y", "--", "--lr", "1").code == 0
    assert run("apply", "-f", "-", typed=text).code == 0
    first, second = stub.asked("POST", LAUNCH)
    assert first["options"]["cluster"] == second["options"]["cluster"] == "tpu-job"
    assert first["task"]["run"].strip() == "echo --lr 1"


def test_exec_of_a_command_after_dashes(run: Run, stub: Stub) -> None:
    stub.add(records.cluster())
    stub.frames = GOOD[5:]
    assert run("exec", "demo", "--", "python", "-c", "print('a b')", "--lr", "1").code == 0
    (body,) = stub.asked("POST", "/v1/clusters/demo/jobs")
    assert body["task"]["run"] == """python -c 'print('"'"'a b'"'"')' --lr 1"""


def test_on_a_terminal_it_asks_and_spins(home: Path, stub: Stub) -> None:
    stub.frames = GOOD
    code, shown = on_terminal("launch", "-c", "demo", "true", typed="y\n")
    assert code == 0
    assert "Launching a new cluster 'demo'. Proceed? [Y/n]: " in shown
    assert "\x1b[32m✓\x1b[0m Job finished (status: SUCCEEDED)." in shown
    assert stub.asked("GET", "/v1/clusters/demo/jobs/1/watch")[0]["colour"] == "true"


def test_a_changed_offer_is_shown_and_sent_as_shown(run: Run, stub: Stub) -> None:
    stub.frames, stub.offers = GOOD, [records.offer()]
    stub.moves_to = ["there", "elsewhere"]
    result = run("launch", "-y", "-c", "demo", "true")
    assert result.code == 0
    assert [body["agreed"] for body in stub.asked("POST", LAUNCH)] == ["here", "there", "elsewhere"]
    assert result.err.count("Note: the offer has changed") == 2
    for zone in ("here", "there", "elsewhere"):
        assert f"local ({zone})" in result.out


def test_a_changed_offer_is_asked_about_again(home: Path, stub: Stub) -> None:
    stub.frames, stub.offers = GOOD, [records.offer()]
    stub.moves_to = ["there"]
    code, shown = on_terminal("launch", "-c", "demo", "true", typed="y\nn\n")
    assert code == 1 and shown.count("Proceed?") == 2 and shown.endswith("Nothing was done.\r\n")
    assert len(stub.asked("POST", LAUNCH)) == 1


def test_on_a_terminal_no_means_no(home: Path, stub: Stub) -> None:
    code, shown = on_terminal("launch", "-c", "demo", "true", typed="n\n")
    assert code == 1
    assert shown.endswith("Nothing was done.\r\n")
    assert stub.asked("POST", LAUNCH) == []
    code, shown = on_terminal("launch", "-d", "-y", "-c", "demo", "true")
    assert code == 0
    assert "Proceed?" not in shown


def test_where_and_how_long_to_try(run: Run, stub: Stub) -> None:
    stub.frames = GOOD
    words = ("--tpus", "v6e-16", "--zone", "us-east5-b", "-r", "--valid-until", "6h")
    assert run("launch", "-y", "-c", "demo", *words, "true").code == 0
    (body,) = stub.asked("POST", LAUNCH)
    assert (body["options"]["retry_until_up"], body["options"]["valid_until_s"]) == (True, 21600.0)
    place = body["task"]["resources"][0]["placement"]
    assert place == {"provider": "gcp", "region": "us-east5", "zone": "us-east5-b"}


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--valid-until", "soon"), "--valid-until 'soon' is not a duration"),
        (("--valid-until", "0h"), "--valid-until '0h' is not a duration"),
        (("--infra", "gcp/us-east5", "--zone", "us-east5-b"), "--infra gcp/us-east5 names a location"),
        (("--zone", "us-east5-b", "--region", "us-west1"), "us-east5-b is not in the region us-west1"),
        (("--model", "llama3-8b"), "--model is for --tpus auto"),
        (("--tpus", "auto"), "model name"),
    ],
)
def test_mistakes_about_the_place_are_told(run: Run, stub: Stub, words: tuple[str, ...], what: str) -> None:
    result = run("launch", "-y", *words, "true")
    assert result.code == 1 and what in result.err and stub.asked("POST", LAUNCH) == []


def test_a_slice_is_picked_for_the_model(run: Run, stub: Stub) -> None:
    stub.frames = GOOD
    result = run("launch", "-y", "-c", "demo", "--tpus", "auto", "podway serve llama3-8b")
    assert result.code == 0
    chosen = stub.asked("POST", LAUNCH)[0]["task"]["resources"][0]["accelerator"]["type"]
    assert f"Chosen slice to serve llama3-8b: {chosen}." in result.err


def test_a_step_that_cannot_fit_is_told_before_anything_is_made(run: Run, stub: Stub) -> None:
    stub.frames = GOOD
    big = "podway train model.name=llama3-70b batch.length=8192 batch.sequences=512"
    result = run("launch", "-y", "-c", "demo", "--tpus", "v6e-16", big)
    assert "Warning: this does not fit: llama3-70b on v6e-16" in result.err
    assert result.code == 0


def test_failover_and_recovery_are_told_as_they_happen(run: Run, stub: Stub) -> None:
    failed = "Could not get v6e-16 in us-east5-a: no capacity. Trying v6e-16 in us-east5-b"
    stub.frames = [
        GOOD[0],
        Frame(kind="event", text=failed, event=2, state="INIT"),
        GOOD[2],
        GOOD[6],
        Frame(kind="log", text="(head, rank=0, pid=8) one\n", cursor="a"),
        Frame(kind="event", text="is recovering: its hosts were preempted", event=7, state="RECOVERING"),
        Frame(kind="event", text="is up: v6e-16", event=8, state="UP"),
        Frame(kind="log", text="(run-2, head, rank=0, pid=8) two\n", cursor="b"),
        Frame(kind="end", state="SUCCEEDED"),
    ]
    out = run("launch", "-y", "-c", "demo", "--tpus", "v6e-16", "true").out
    assert f"├── {failed}" in out
    assert "⚙︎ Job 1 is recovering: its hosts were preempted" in out
    assert out.count("Cluster up: demo.") == 2 and out.count("Job submitted, ID: 1") == 1


def test_the_tasks_of_a_pipeline_are_shown_one_after_the_other(run: Run, stub: Stub, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("name: p\n---\nname: prep\nrun: a\n---\nrun: b\n")
    stub.add(records.cluster())
    stub.launch_job, stub.launch_then = 3, [4]
    stub.frames = GOOD[5:]
    result = run("launch", "-c", "demo", str(path))
    assert result.code == 0
    assert [line for line in result.out.splitlines() if "Task" in line] == ["⚙︎ Task 1 of 2: prep", "⚙︎ Task 2 of 2: p-2"]
    assert run("launch", "-d", "-c", "demo", str(path)).out.splitlines()[1] == "⚙︎ Jobs submitted, IDs: 3, 4"
    assert "podway launch FILE" in run("exec", "demo", str(path)).err
