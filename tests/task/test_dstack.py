"""dstack files: tasks, services, dev environments, and what is refused or noted by name."""

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from podway.errors import UserError
from podway.task.read import read_task_text
from podway.task.task import (
    Autostop,
    DevEnvironment,
    FileMount,
    Git,
    LocalDir,
    Placement,
    RateLimit,
    Recovery,
    Registry,
    RoutedWorker,
    Scaling,
    ServedModel,
    Task,
    Volume,
)

from .reading import flags, only, read, refused, types


def task(text: str = "", **given: object) -> Task:
    return read(f"type: task\ncommands: [x]\n{text}", **given)


def task_error(text: str, **given: object) -> str:
    error = refused(f"type: task\ncommands: [x]\n{text}", **given)
    return f"{error.what} | {error.hint}"


def service(text: str) -> Task:
    return read(f"type: service\nport: 8000\ncommands: [x]\n{text}")


def test_defaults() -> None:
    found = task()
    assert (found.kind, found.dialect, found.slices, found.shell) == ("task", "dstack", 1, "bash")
    assert found.autostop == Autostop(idle_minutes=5, down=True, wait_for="jobs")
    assert (found.recovery, found.max_duration_s, found.stop_duration_s) == (None, None, 300)
    assert found.resources[0].spot == "no"


@pytest.mark.parametrize("kind", ["fleet", "gateway", "volume", "preset"])
def test_types_that_are_no_runs_say_what_to_use(kind: str) -> None:
    error = refused(f"type: {kind}\nname: x\nbackend: gcp\n")
    assert error.what.startswith(f"f.yaml:1:7: type: a {kind} cannot be run")


def test_unknown_types_and_keys() -> None:
    assert refused("type: tsk\ncommands: [x]").hint == "did you mean `task`?"
    error = refused("type: service\nprot: 8000\ncommands: [x]")
    assert error.what == "f.yaml:2:1: prot: unknown key"
    assert error.hint == "did you mean `port`?"
    assert "`port` is required" in refused("type: service\ncommands: [x]").what
    assert "unknown key" in task_error("ide: vscode")


@pytest.mark.parametrize(
    ("written", "version"),
    [("3.11", "3.11"), ('"3.11"', "3.11"), ("3.10", "3.10"), ("3.1", "3.10"), ("3.9", "3.9"), ("3.15", "3.15")],
)
def test_python(written: str, version: str) -> None:
    assert task(f"python: {written}").python == version


def test_python_image_and_docker_exclude_each_other() -> None:
    assert "not a known value" in task_error("python: 2.7")
    assert "an image has its own Python" in task_error("python: 3.11\nimage: a")
    assert "keep one of" in task_error("docker: true\nimage: a")


def test_env_list_and_mapping() -> None:
    found = task("env: [A=1, B=, 'C=x=y', D]", local_env={"D": "from-me"})
    assert found.env == {"A": "1", "B": "", "C": "x=y", "D": "from-me"}
    assert task("env: {A: 1, B: true}").env == {"A": "1", "B": "true"}
    assert task("env: [D]", env=("D=flag",), local_env={"D": "mine"}).env == {"D": "flag"}
    assert task("env: [D]", secrets=("D=s",)).secrets == {"D": "s"}


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ("[HF_TOKEN]", "the variable HF_TOKEN has no value"),
        ("[A=1, A=2]", "A is given twice"),
        ("[1A=x]", "not a variable name"),
        ("{1A: x}", "not a variable name"),
        ("['A=${{ secrets.S }}']", "--secret S"),
        ("['A=${{ env.B }}']", "has no value here"),
        ("['A=${{ secrets.S']", "without its"),
        ("x", "expected a list or a mapping"),
    ],
)
def test_wrong_env(env: str, says: str) -> None:
    assert says in task_error(f"env: {env}")


def test_secrets_in_env_make_the_variable_a_secret() -> None:
    found = task("env: ['A=Bearer ${{ secrets.S }}', 'B=$${{ secrets.S }}']", secrets=("S=x",))
    assert found.secrets == {"A": "Bearer x", "S": "x"}
    assert found.env == {"B": "${{ secrets.S }}"}


def run(found: Task) -> tuple[int, str]:
    done = subprocess.run([found.shell, "-c", found.run], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("commands", "code", "output"),
    [
        (["echo a", "echo b"], 0, "a\nb\n"),
        (["echo a", "sh -c 'exit 7'", "echo b"], 7, "a\n"),
        (["cd /", "pwd"], 0, "/\n"),
        (["X=1 # comment", "echo $X"], 0, "1\n"),
        (["false || echo rescued", "echo b"], 0, "rescued\nb\n"),
        (["false", "true || echo never"], 1, ""),
        (["true &", "wait", "echo b"], 0, "b\n"),
        (["set -e\nfalse\necho never", "echo never"], 1, ""),
        (["false\ntrue", "echo b"], 0, "b\n"),
        (["cat <<END\ntext\nEND", "echo b"], 0, "text\nb\n"),
        (["f() { echo $1; }", "f x"], 0, "x\n"),
        (["echo a; sh -c 'exit 3'", "echo never"], 3, "a\n"),
        (["echo ${HOME:+h}", "echo b"], 0, "h\nb\n"),
        (["", "echo b", "  "], 0, "b\n"),
    ],
)
def test_commands_run_in_one_shell_and_stop_at_the_first_failure(commands: list[str], code: int, output: str) -> None:
    found = read(f"type: task\ncommands: {json.dumps(commands)}\n")
    assert run(found) == (code, output)
    assert run(read(f"type: task\nshell: sh\ncommands: {json.dumps(commands)}\n")) == (code, output)


def test_folded_commands_are_one_line() -> None:
    found = read(
        """
        type: task
        commands:
          - cd vllm
          - vllm serve $MODEL
              --tensor-parallel-size 4
              --port 8000
        """
    )
    assert found.run == "cd vllm || exit\nvllm serve $MODEL --tensor-parallel-size 4 --port 8000\n"


def test_entrypoint_gets_the_commands_as_arguments() -> None:
    found = read("type: task\nimage: i\nentrypoint: /bin/server --fast\ncommands: [--model, 'a b']")
    assert found.run == "/bin/server --fast --model 'a b'\n"
    assert "close the quotes" in task_error('entrypoint: "\'"')
    assert "nothing to run" in refused("type: task").what
    assert read("type: task\nimage: i").run == ""


def test_run_args() -> None:
    found = read("type: task\ncommands: ['echo ${{ run.args }}']", run_args=("a b", "--c"))
    assert run(found) == (0, "a b --c\n")
    assert read("type: task\ncommands: ['echo ${{run.args}}!']").run == "echo !\n"
    assert "no place for arguments" in task_error("", run_args=("a",))
    assert "$S" in refused("type: task\ncommands: ['x ${{ secrets.S }}']").hint
    assert "$DSTACK_NODES_IPS" in refused("type: task\ncommands: ['${{ groups[1].nodes[0].IP_ADDRESS }}']").hint
    first = read("type: task\ncommands: ['ping ${{ groups[0].nodes[0].IP_ADDRESS }}']")
    assert first.run == "ping $DSTACK_MASTER_NODE_IP\n"
    assert "has no value here" in refused("type: task\ncommands: ['${{ nonsense }}']").what


def test_ports() -> None:
    assert task("ports: [8080, '80:8080', '*:9000', {container_port: 1, local_port: 2}]").ports == (
        "8080:8080",
        "80:8080",
        "*:9000",
        "2:1",
    )
    for bad in ("0", "70000", "a", "80:80:80", "':80'"):
        assert "not a port" in task_error(f"ports: [{bad}]")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "retry: true",
            Recovery(events=("no-capacity", "interruption", "error"), max_restarts_on_errors=1000, duration_s=3600),
        ),
        ("retry: false", None),
        ("retry: {on_events: [no-capacity], duration: 4h}", Recovery(events=("no-capacity",), duration_s=14_400)),
        (
            "retry: {duration: 90}",
            Recovery(events=("no-capacity", "interruption", "error"), max_restarts_on_errors=1000, duration_s=90),
        ),
    ],
)
def test_retry(text: str, expected: Recovery | None) -> None:
    assert task(text).recovery == expected


def test_profile() -> None:
    found = task(
        """
resources: {gpu: v6e-8}
spot_policy: auto
max_price: 4.5
max_duration: 2h
stop_duration: off
idle_duration: off
creation_policy: reuse
stop_criteria: master-done
startup_order: master-first
reservation: r
tags: {a: b}
priority: 7
"""
    )
    (one,) = found.resources
    assert (one.spot, one.max_hourly_cost, one.labels) == ("auto", 4.5, {"a": "b"})
    assert only(found).reservation == "r"
    assert (found.max_duration_s, found.stop_duration_s, found.autostop) == (7200, 86_400, None)
    assert (found.reuse_only, found.stop_when, found.priority, found.tags) == (True, "head-done", 7, {"a": "b"})
    assert [note.partition(":")[0] for note in found.notes] == ["startup_order", "stop_duration"]
    assert task("idle_duration: 0").autostop == Autostop(idle_minutes=0, down=True, wait_for="jobs")
    assert task("termination_policy: dont-destroy").autostop is None
    assert task("termination_idle_time: 2m").autostop == Autostop(idle_minutes=2, down=True, wait_for="jobs")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("retry: {on_events: []}", "no event"),
        ("retry: {on_events: [crash]}", "not a known value"),
        ("max_duration: soon", "a duration"),
        ("max_duration: 1.5h", "a duration"),
        ("max_price: -1", "too small"),
        ("spot_policy: never", "not a known value"),
        ("priority: 101", "too large"),
        ("schedule: {cron: '* * * *'}", "cron"),
        ("working_dir: ../elsewhere", "is not below the repository"),
        ("shell: fish", "not a shell"),
        ("backends: [aws]", "aws has no TPUs"),
        ("backends: [gpc]", "not a cloud"),
        ("regions: us-east5", "expected a list"),
        ("regions: [us-east1]\navailability_zones: [us-east5-b]", "not in a region"),
        ("nodes: 0", "too small"),
        ("resources: {cpu: arm:4}", "x86"),
        ("resources: {memory: 8XB}", "not a memory size"),
        ("resources: {cpu: 8..4}", "backwards"),
        ("resources: {disk: ..}", "empty"),
        ("name: Not-Lower", "not a run name"),
    ],
)
def test_wrong_values(text: str, says: str) -> None:
    assert says in task_error(text)


def test_places_multiply_alternatives() -> None:
    found = task("resources: {gpu: v6e-8}\nbackends: [gcp, aws]\navailability_zones: [us-east5-b, us-east1-d]")
    assert [one.placement for one in found.resources] == [
        Placement(provider="gcp", region="us-east5", zone="us-east5-b"),
        Placement(provider="gcp", region="us-east1", zone="us-east1-d"),
    ]
    assert found.notes == ("backends[1]: aws has no TPUs Podway can reach",)
    assert task("regions: [us-east5]", infra="local").resources[0].placement == Placement(provider="local")


def test_host_resources() -> None:
    (one,) = task("resources: {cpu: 2.., memory: 8GB..16GB, disk: 100GB.., shm_size: 8GB}").resources
    assert (one.cpus, one.memory, one.disk_gb) == ("2+", "8..16", 100)
    assert task("resources: {cpu: {arch: x86, count: 4}}").resources[0].cpus == "4"
    assert task("resources: {cpu: 'x86:4..', disk: {size: 1TB}}").resources[0].disk_gb == 1024
    assert task("resources: {gpu: v6e-8, cpu: 4}").notes == (
        "resources.cpu: the hosts of a TPU slice come in one size",
    )


def test_instance_types_may_name_slices() -> None:
    assert types(task("instance_types: [v6e-8, v5litepod-8]")) == ["v6e-8", "v5litepod-8"]
    assert types(task("resources: {gpu: tpu}\ninstance_types: [v6e-8]")) == ["v6e-8"]
    assert "none of these types" in task_error("resources: {gpu: v6e-4}\ninstance_types: [v6e-8]")
    assert task("instance_types: [n1-standard-4]").resources[0].instance_type == "n1-standard-4"


def test_tpus_flag() -> None:
    assert only(task("resources: {gpu: H100}", tpus="v5e-8")).type == "v5litepod-8"
    assert task("resources: {gpu: H100}", tpus="none").resources[0].accelerator is None
    assert task_error("", tpus="v5e-9").startswith("--tpus: ")


def test_volumes() -> None:
    found = task("volumes: ['v:/a', '/h:/b', {name: w, path: /c}, {instance_path: /i, path: /d, optional: true}]")
    assert found.volumes == (
        Volume(path="/a", name="v"),
        Volume(path="/b", instance_path="/h"),
        Volume(path="/c", name="w"),
        Volume(path="/d", instance_path="/i", optional=True),
    )
    for bad in ("'v:a'", "v", "{path: /a}", "{name: v, instance_path: /i, path: /a}", "'v-${{ run.id }}:/a'"):
        assert "f.yaml:3:" in task_error(f"volumes: [{bad}]")


def test_repos_and_files(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "f.txt").touch()
    here = {"cwd": str(tmp_path)}
    code = LocalDir(path=str(tmp_path / "code"))
    assert task("repos: [code]", **here).workdir == code
    assert task("repos: ['code:/work']", **here).file_mounts == (FileMount(target="/work", source=code),)
    assert task("repos: [https://github.com/a/b.git]").workdir == Git(url="https://github.com/a/b.git")
    assert task("repos: ['git@github.com:a/b.git:/w']").file_mounts == (
        FileMount(target="/w", source=Git(url="git@github.com:a/b.git")),
    )
    assert task("repos: [{url: u, branch: b, hash: h}]").workdir == Git(url="u", ref="b", hash="h")
    noted = task("repos: [{local_path: code, branch: b}]", **here)
    assert noted.workdir == code and "branch" in noted.notes[0]
    assert "one repository" in task_error("repos: [a, b]")
    assert "keep one of them" in task_error("repos: [{branch: b}]")
    file = LocalDir(path=str(tmp_path / "f.txt"))
    assert task("files: [f.txt, 'f.txt:/etc/x', {local_path: f.txt, path: y}]", **here).file_mounts == (
        FileMount(target="f.txt", source=file),
        FileMount(target="/etc/x", source=file),
        FileMount(target="y", source=file),
    )
    assert "no such file" in task_error("files: [missing]", **here)
    assert "local:remote" in task_error("files: ['a:b:c']", **here)
    assert "leads out of" in task_error("files: ['f.txt:../../x']", **here)


@pytest.mark.parametrize("name", ["a b", "x;reboot", "-v", "$(id)", "é"])
def test_an_image_has_a_name(name: str) -> None:
    assert "is not the name of an image" in task_error(f'image: "{name}"')


def test_the_user_of_an_image() -> None:
    assert task("image: i\nuser: '1000:100'").user == "1000:100"
    plain = task("user: me")
    assert plain.user is None and plain.notes == ("user: without an image, commands run as the user of the host",)


def test_registry_auth_keeps_the_password_a_secret() -> None:
    found = task(
        "image: i\nenv: [U=me]\nregistry_auth: {username: '${{ env.U }}', password: '${{ secrets.P }}'}",
        secrets=("P=pw",),
    )
    assert found.registry == Registry(username="me", password_secret="PODWAY_REGISTRY_PASSWORD")
    assert found.secrets["PODWAY_REGISTRY_PASSWORD"] == "pw"
    assert found.shell == "sh" and found.resources[0].image == "docker:i"
    assert "stored and shown" in task_error("registry_auth: {username: '${{ secrets.P }}', password: x}")
    assert "--secret P" in task_error("registry_auth: {username: u, password: '${{ secrets.P }}'}")


def test_groups_that_are_alike_are_one_run() -> None:
    groups = "type: task\ngroups:\n- {name: a, nodes: 2, commands: [x], resources: {gpu: v6e-8}}\n"
    found = read(groups)
    assert (found.slices, found.run, types(found)) == (2, "x\n", ["v6e-8"])
    assert read(groups + "- {name: b, nodes: 1, commands: [x], resources: {gpu: v6e-8}}\n").slices == 3
    assert "different machines" in refused(groups + "- {name: b, commands: [y]}\n").what
    assert "beside groups" in refused(groups + "nodes: 3\n").what
    assert "no group" in refused("type: task\ngroups: []\n").what


def test_the_nodes_of_groups_that_differ_run_their_own_commands() -> None:
    """One gang: the script is the same on every host, and chooses by the slice it is on."""
    text = """
type: task
groups:
- {name: head, nodes: 1, commands: ['echo head for ${{ groups[1].nodes[1].IP_ADDRESS }}'], ports: [8265]}
- {name: workers, nodes: 2, commands: ['false', 'echo never'], ports: [8000]}
- {nodes: 1, commands: ['echo ask ${{ groups[0].nodes[0].IP_ADDRESS }}']}
"""
    found = read(text, tpus="v6e-8")
    assert found.slices == 4 and found.ports == ("8265:8265",)
    assert "groups[1].ports: ports are forwarded from the first node only" in found.notes
    addresses = [f"10.0.0.{number}" for number in range(8)]  # two hosts a slice

    def run(slice_id: int) -> tuple[int, str]:
        env = {
            "PODWAY_SLICE_ID": str(slice_id),
            "DSTACK_NODES_NUM": "8",
            "DSTACK_NODES_IPS": "\n".join(addresses),
            "DSTACK_MASTER_NODE_IP": addresses[0],
            "PATH": os.environ["PATH"],
        }
        ended = subprocess.run(["sh", "-c", found.run], env=env, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout.strip()

    assert run(0) == (0, "head for 10.0.0.4")
    assert run(1) == run(2) == (1, "")
    assert run(3) == (0, "ask 10.0.0.0")
    assert "not a node of this run" in refused(text.replace("nodes[1]", "nodes[2]"), tpus="v6e-8").what
    assert "say how many nodes" in refused(text, tpus="v6e-8", num_nodes=2).what


ROUTED = """
type: service
port: 80
model: m
env: [A=1]
groups:
- {commands: [route], router: {type: smg}, resources: {cpu: 4}}
- {name: first, replicas: 1..4, scaling: {metric: rps, target: 3}, resources: {gpu: H200}, image: some/image,
   commands: [sglang --disaggregation-mode prefill --disaggregation-bootstrap-port=8998]}
- {name: then, replicas: 2, resources: {gpu: H200}, python: '3.12',
   commands: ["vllm --kv '{\\"kv_connector\\":\\"Nixl\\",\\"kv_role\\":\\"kv_consumer\\"}' grpc_server"]}
"""


def test_replica_groups_behind_a_router() -> None:
    """Each with its own commands and machines; --tpus takes the place of the GPUs, and a router stays on a host without chips."""
    found = read(ROUTED, tpus="v6e-8")
    assert found.service is not None and found.env == {"A": "1"}
    router, first, then = found.service.groups
    assert (router.name, router.router, router.run, router.shell) == ("0", "smg", "route\n", "bash")
    assert [one.resources[0].accelerator for one in (router,)] == [None] and router.probes == ()
    assert [one.resources[0].accelerator.type for one in (first, then)] == ["v6e-8", "v6e-8"]  # type: ignore[union-attr]
    assert first.scaling == Scaling(min_replicas=1, max_replicas=4, target_qps=3)
    assert (first.shell, first.resources[0].image) == ("sh", "docker:some/image")
    assert first.worker == RoutedWorker(role="prefill", engine="sglang", bootstrap_port=8998) and first.probes == ()
    assert then.worker == RoutedWorker(
        role="decode", protocol="grpc", engine="vllm", kv_connector="Nixl", kv_role="kv_consumer"
    )
    assert (then.python, then.scaling.min_replicas) == ("3.12", 2)
    assert not any("one size" in note for note in found.notes)
    dynamo = read(ROUTED.replace("type: smg", "type: dynamo"), tpus="v6e-8").service
    assert dynamo and dynamo.router and dynamo.router.router == "dynamo"
    whole = read(ROUTED.replace("--disaggregation-mode prefill ", ""), tpus="v6e-8").service
    assert whole and whole.groups[1].probes[0].path == "/v1/chat/completions"  # it answers by itself
    assert msgspec.json.decode(msgspec.json.encode(found), type=Task) == found  # as it goes to the server


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("resources: {cpu: 4}}", "replicas: 2}", "a service has one router"),
        ("router: {type: smg}, ", "", "only the prefill of a request work behind a router only"),
        ("name: then", "name: first", "several groups are called first"),
        ("name: then", "name: Then", "cannot be the name of a group"),
        ("name: then", "router: smg", "a second router"),
        ("type: smg", "type: nginx", "smg, sglang, dynamo"),
        ("port: 80", "port: 80\nrouter: {type: sglang}", "a gateway of dstack's ran this router"),
        ("port: 80", "port: 80\nreplicas: [{commands: [x]}]", "`groups` is given too"),
        ("port: 80", "port: 80\ncommands: [x]", "beside groups"),
        ("1..4", "1..", "the most replicas"),
        ("commands: [route]", "commands: []", "nothing to run"),
    ],
)
def test_replica_groups_that_cannot_be(old: str, new: str, says: str) -> None:
    error = refused(ROUTED.replace(old, new, 1), tpus="v6e-8")
    assert any(says in f"{one.what} {one.hint}" for one in (error, *error.others)), error


def test_a_secret_in_the_header_of_a_probe_stays_there_by_name() -> None:
    text = "type: service\nport: 80\ncommands: [x]\nprobes: [{type: http, headers: [{name: A, value: 'k ${{ secrets.K }}'}]}]"
    found = read(text, secrets=("K=hidden",))
    assert found.service and found.service.probes[0].headers == {"A": "k ${K}"} and found.secrets == {"K": "hidden"}
    assert "--secret K" in refused(text).hint


def test_paths_of_older_files() -> None:
    """A working directory below the repository, and a volume whose path ends with a slash."""
    assert task("working_dir: examples/x/").working_dir == "~/sky_workdir/examples/x"
    (volume,) = task("volumes: ['/cache/:/root/.cache/']").volumes
    assert (volume.instance_path, volume.path) == ("/cache", "/root/.cache")


def test_service_scaling_and_groups() -> None:
    assert service("").service.scaling == Scaling()  # type: ignore[union-attr]
    assert service("replicas: 3").service.scaling == Scaling(min_replicas=3, max_replicas=3)  # type: ignore[union-attr]
    scaled = service("replicas: ..4\nscaling: {metric: rps, target: 2, window: 5m, scale_up_delay: 10}").service
    assert scaled and scaled.scaling == Scaling(
        min_replicas=0, max_replicas=4, target_qps=2, window_s=300, up_delay_s=10
    )
    group = (
        "type: service\nport: 80\n{}:\n- {{count: 1..2, commands: [x], resources: {{gpu: v6e-8}}, "
        "scaling: {{metric: rps, target: 1}}}}\n"
    )
    for key in ("replicas", "groups"):
        found = read(group.format(key))
        assert found.service and found.service.scaling.max_replicas == 2 and types(found) == ["v6e-8"]
        two = read(group.format(key) + "- {count: 1, commands: [y], resources: {gpu: v5litepod-4}}\n").service
        assert two and [one.run for one in two.groups] == ["x\n", "y\n"] and two.router is None
    alone = refused("type: service\nport: 80\ngroups: [{commands: [x], router: sglang}]")
    assert "nothing is behind this router" in alone.what


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("replicas: 0..4", "needs `scaling`"),
        ("replicas: 1..", "the most replicas"),
        ("replicas: 2\nscaling: {metric: rps, target: 1}", "needs a range"),
        ("scaling: {metric: rps, target: 1}", "needs a range"),
        ("replicas: 0..2\nscaling: {metric: cpu, target: 1}", "not a known value"),
        ("replicas: 0..2\nscaling: {metric: rps}", "`target` is required"),
        ("replicas: 0..2\nscaling: {metric: rps, target: 1, window: 45}", "30s, 60s or 300s"),
        ("model: {name: m, format: vllm}", "not a known value"),
        ("model: {format: tgi}", "`name` is required"),
        ("model: {name: m, chat_template: x}", "only models of format tgi"),
        ("model: {name: m, format: tgi, prefix: /x}", "has no prefix"),
        ("rate_limits: [{rps: 1}, {rps: 2}]", "a second limit for /"),
        ("rate_limits: [{rps: 1, key: {type: header}}]", "go together"),
        ("rate_limits: [{rps: 1, prefix: x}]", "begins with /"),
        ("probes: [{type: http, url: x}]", "not a path"),
        ("probes: [{type: http, body: x}]", "GET request has no body"),
        ("probes: [{type: http, timeout: 0}]", "at least a second"),
        ("probes: [{type: tcp}]", "not a known value"),
        ("probes: [{url: /}]", "`type` is required"),
        ("env: {S: x}\nprobes: [{type: http, url: '/${{ env.NOPE }}'}]", "has no value here"),
        ("probes: [{type: http, url: '/${{ secrets.S }}'}]", "cannot be used here"),
    ],
)
def test_wrong_services(text: str, says: str) -> None:
    error = refused(f"type: service\nport: 8000\ncommands: [x]\n{text}")
    assert says in f"{error.what} | {error.hint}"


def test_models_and_their_default_probe() -> None:
    named = service("model: org/m").service
    assert named and named.model == ServedModel(name="org/m")
    (probe,) = named.probes
    assert (probe.method, probe.path, probe.timeout_s, probe.interval_s) == ("POST", "/v1/chat/completions", 30, 15)
    assert '"max_tokens":1' in (probe.body or "") and '"model":"org/m"' in (probe.body or "")
    assert service("model: org/m\nprobes: []").service.probes == ()  # type: ignore[union-attr]
    tgi = service("model: {type: chat, name: m, format: tgi, eos_token: e}").service
    assert tgi and tgi.model == ServedModel(name="m", format="tgi", eos_token="e") and tgi.probes == ()
    assert service("model: {name: m, prefix: api/}").service.model.prefix == "/api"  # type: ignore[union-attr]


def test_service_fields() -> None:
    found = service(
        "https: false\nauth: false\nstrip_prefix: false\nrate_limits: [{rps: 2, key: {type: ip_address}}]\ngateway: true"
    )
    assert found.service is not None
    assert (found.service.https, found.service.auth, found.service.strip_prefix) == (False, False, False)
    assert found.service.rate_limits == (RateLimit(rps=2),)
    assert found.notes == ("gateway: Podway's server is the gateway",)
    assert read("type: service\nport: '80:8000'\ncommands: [x]").service.port == 8000  # type: ignore[union-attr]


def test_dev_environments() -> None:
    found = read(
        "type: dev-environment\nide: vscode\nversion: 1.80.2\ninit: [echo hi]\ninactivity_duration: 2h\nports: [80]"
    )
    assert found.dev == DevEnvironment(ide="vscode", version="1.80.2", inactivity_s=7200)
    assert found.run == "echo hi\n"
    assert read("type: dev-environment").dev == DevEnvironment()
    assert refused("type: dev-environment\nide: emacs").hint.startswith("one of: vscode")
    assert "no entrypoint" in refused("type: dev-environment\nentrypoint: x").what
    assert "unknown key" in refused("type: dev-environment\ncommands: [x]").what


def test_fields_without_effect_are_noted() -> None:
    found = task(
        "nvcc: true\nprivileged: true\nuser: root\nfleets: [f]\nutilization_policy: {min_gpu_utilization: 1, time_window: 5m}"
    )
    assert [note.partition(":")[0] for note in found.notes] == [
        "nvcc",
        "privileged",
        "utilization_policy",
        "user",
    ]
    assert found.pools == ("f",)


def test_flags(tmp_path: Path) -> None:
    found = task("name: ab\nnodes: 4", name="cd", num_nodes=2, workdir=str(tmp_path), use_spot=True, run="echo")
    assert (found.name, found.slices, found.run, found.resources[0].spot) == ("cd", 2, "echo", "yes")
    assert found.workdir == LocalDir(path=str(tmp_path))
    assert task_error("", num_nodes=0).startswith("--num-nodes: ")
    assert task_error("", name="A").startswith("--name: ")
    assert task_error("", workdir="missing").startswith("--workdir: no such directory")


def test_setup_of_old_versions() -> None:
    assert read("type: dev-environment\nsetup: [a]\ninit: [b]").run == "a || exit\nb\n"
    assert task("setup: [a]").notes == ("setup: dstack ignores it too; put it into `commands`",)
    assert "no place for arguments" in refused("type: dev-environment", run_args=("a",)).what


def test_a_dialect_may_be_demanded() -> None:
    with pytest.raises(UserError, match="`type` is missing"):
        read_task_text("run: x", overrides=flags(), dialect="dstack")
    with pytest.raises(UserError, match="type: unknown key"):
        read_task_text("type: task", overrides=flags(), dialect="skypilot")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("commands: [echo]\nresources: {gpu: v5litepod-4}", "task"),
        ("commands: [echo]\nport: 8000", "service"),
        ("ide: vscode\nname: dev", "dev-environment"),
    ],
)
def test_a_file_without_its_type_is_known_by_its_keys(text: str, kind: str) -> None:
    error = refused(text)
    assert error.what == "f.yaml:1:1: this is a dstack file, and its `type` is missing"
    assert error.hint == f"add `type: {kind}`"


def test_a_file_with_keys_of_both_is_skypilots() -> None:
    assert "commands: unknown key" in refused("run: echo\ncommands: [echo]").what


def test_a_volume_of_skypilot_is_not_a_task() -> None:
    error = refused("name: v\ntype: k8s-pvc\ninfra: k8s\nsize: 10Gi")
    assert error.what == "f.yaml:2:7: type: a k8s-pvc volume of SkyPilot is not a task"
    assert "`nonsense` is not a type of dstack file" in refused("type: nonsense").what


def test_a_gpu_file_is_told_so_first() -> None:
    error = refused("type: task\ncommands: [x]\nresources: {gpu: 24GB..}")
    assert "resources.gpu: this is a GPU file: `24GB..` asks for GPUs by memory" in error.what
    assert error.hint.startswith("--tpus v6e-8 runs it on a TPU")
    assert "GPU file" not in refused("type: task\ncommands: [x]\nresources: {gpu: trilium-8}").what


def test_files_above_the_file(tmp_path: Path) -> None:
    base = tmp_path / "repo" / "jobs"
    base.mkdir(parents=True)
    (base.parent / "x").touch()
    (tmp_path / "y").touch()
    text = "type: task\ncommands: [x]\nfiles: [../x]"
    (mount,) = read_task_text(text, base=base, overrides=flags()).file_mounts
    assert (mount.target, mount.source) == ("~/x", LocalDir(path=str(base.parent / "x")))
    with pytest.raises(UserError, match="above the home on a host") as caught:
        read_task_text(text.replace("../x", "../../y"), base=base, overrides=flags())
    assert caught.value.hint == "say where it goes: ../../y:y"


def test_instance_types_with_gpus_are_refused_without_tpus() -> None:
    assert "--tpus v6e-8" in refused("type: task\ncommands: [x]\ninstance_types: [g5.xlarge]").hint
    chosen = read("type: task\ncommands: [x]\ninstance_types: [g5.xlarge]", tpus="v6e-8")
    assert types(chosen) == ["v6e-8"]
    assert any("g5.xlarge" in note for note in chosen.notes)
