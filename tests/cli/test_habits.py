"""What users of SkyPilot, dstack, XPK, kubectl, gcloud and Slurm type: it works, or the answer names the Podway command to type."""

import re
import shlex

import click
import pytest

from podway.cli import habits
from podway.cli.index import VERBS, podway
from podway.control.records import ENDED
from tests.cli import records
from tests.cli.conftest import Run
from tests.cli.stub import POOL, Stub
from tests.long import every

# typed -> what is shown, by a command that works
WORKS = {
    "jobs queue": "Job queue of cluster demo",
    "jobs queue -s": "RUNNING",
    "queue -s": "RUNNING",
    "queue --skip-finished demo": "RUNNING",
    "show-gpus": "v6e",
    "offer": "v6e",
    "gpus list": "v6e",
    "ls": "demo",
    "volumes ls": "data",
    "fleet": "workers-1",
    "fleet list": "workers-1",
    "fleet get workers-1": "workers-1-2  BUSY",
    "fleet delete -y workers-1": "being taken down",
    "jobs pool status workers-1": "workers-1-2  BUSY",
    "jobs pool ls": "workers-1",
    "jobs pool down -y workers-1": "being taken down",
    "ps -a": "gone-1",
    "status -a": "gone-1",
    "status --ip demo": "127.20.0.1",
    "api status": "SERVER",
    "cost-report": "demo",
    "exec -c demo -d hostname": "Job submitted",
    "exec demo -d hostname": "Job submitted",
    "jobs launch -y -d --infra local --tpus v6e-16 hostname": "Job submitted",
    "launch -y -d --cloud local --tpus v6e-16 hostname": "Job submitted",
    "sky status": "demo",
    "sky jobs queue": "Job queue of cluster demo",
    "dstack ps": "demo",
    "status -u": "demo",
    "status --all-users --no-show-services": "demo",
    "queue -u -v": "RUNNING",
    "jobs queue --refresh": "RUNNING",
    "start -f demo": "Nothing to start",
    "cost-report -a": "demo",
    "show-gpus -a": "v6e",
    "show-gpus --all-regions": "v6e",
    "offer --gpu v6e": "v6e-16",
    "offer --gpu=v6e-16": "TPU v6e",
    "offer --json": '"v6e-16"',
    "prices": "v6e",
    "get pods": "demo",
    "get nodes": "demo",
    "get jobs": "RUNNING",
    "describe demo": "demo",
    "describe pod demo": "demo",
    "squeue": "RUNNING",
    "sinfo": "demo",
    "workload list": "demo",
    "job ls": "RUNNING",
    "compute tpus tpu-vm list": "demo",
    "compute tpus accelerator-types list": "v6e",
    "volume ls": "data",
    "volumes list": "data",
    "pool ls": "workers-1",
    "pool delete -y workers-1": "being taken down",
    "fleet list -v": "workers-1",
    "hosts": "demo",
    "help": "Usage: podway",
    "help launch": "Usage: podway launch",
    "pause demo": "is stopped",
    "resume demo": "Nothing to start",
    "terminate -y demo": "is deleted",
    "rm -y demo": "is deleted",
}
# typed -> the command that the answer names
ANSWERED = {
    "jobs logs 1": "podway logs CLUSTER [JOB]",
    "jobs cancel 1": "podway cancel CLUSTER [JOB]",
    "jobs": "podway launch",
    "tpunode": "podway dev",
    "gpunode -y": "podway dev",
    "storage ls": "gcloud storage ls",
    "init": "podway launch FILE",
    "logs -d demo": "podway status -v",
    "logs --diagnose demo": "podway status -v",
    "status --endpoints demo": "podway services",
    "volumes apply": "podway volume list",
    "secrets set A b": "--secret NAME=VALUE",
    "project list": "podway server members",
    "local up": "--infra local",
    "launch --fast x.yaml": "podway exec CLUSTER FILE",
    "launch --num-slices 2 hostname": "--num-nodes",
    "launch --tpu-type v6e-16 hostname": "--tpus v6e-8",
    "launch --spot hostname": "--use-spot",
    "launch --dry-run hostname": "--dryrun",
    "launch --docker-image python:3.12 hostname": "--image NAME",
    "launch --reservation r hostname": "accelerator_args",
    "launch --max-restarts 3 hostname": "job_recovery",
    "launch --memory 32+ x.yaml": "--tpus v6e-8",
    "launch -s x.yaml": "-d (return",
    "launch --max-price 3 x.yaml": "max_hourly_cost",
    "apply -f x.yaml -e A=b": "--env NAME=VALUE",
    "apply -f x.yaml --gpu v6e-8": "--tpus v6e-8",
    "apply": "podway apply -f FILE",
    "exec demo --async hostname": "-d (return",
    "exec -it demo -- bash": "podway ssh CLUSTER",
    "start -i 10 demo": "podway autostop CLUSTER -i 30",
    "down -u": "podway down --all",
    "autostop -a -i 5": "podway autostop CLUSTER",
    "cancel -u": "podway cancel CLUSTER --all",
    "stop demo -x": "podway cancel CLUSTER --all",
    "delete -f x.yaml": "podway down NAME",
    "logs demo --worker 0": "--rank 3",
    "logs -n 10 demo": "--tail 10",
    "logs --replica 0 demo": "podway service logs",
    "attach demo --port 8080:8080": "ssh -L",
    "ps --last 5": "podway ps -a",
    "dashboard --port 1": "podway server status",
    "run . -f x.yaml": "podway apply -f FILE",
    "fleet create x.yaml": "podway pool apply -p NAME FILE",
    "gateway list": "podway services",
    "gateway create": "podway services",
    "pool logs workers-1": "podway logs POOL-1",
    "volume apply x.yaml": "podway apply -f FILE",
    "volume get data": "podway volume list",
    "workload create --workload w --tpu-type v6e-16": "podway launch --infra k8s",
    "cluster create --cluster c": "podway gke prepare",
    "compute tpus tpu-vm create c": "podway launch -c NAME",
    "tpu-vm ssh c": "podway ssh NAME",
    "scale --replicas=3 deployment/llama": "podway service scale",
    "rollout restart llama": "podway service status",
    "port-forward demo 8080:80": "podway attach CLUSTER",
    "cp a demo:x": "scp FILE CLUSTER:",
    "get demo": "podway status",
    "kill demo": "podway cancel CLUSTER",
    "auth login": "gcloud auth application-default login",
    "sbatch x.sh": "podway launch -d FILE",
    "scancel 1": "podway cancel CLUSTER",
    "restart demo": "podway stop NAME",
    "wait demo": "podway logs CLUSTER JOB",
    "token create ann": "podway server token USER",
    "vscode demo": "podway dev",
    "jupyter": "--jupyter",
    "quota": "podway doctor gcp",
    "-V": "podway --version",
    "plan llama3.1-8b": "podway plan train MODEL",
    "plan train --model llama3.1-8b": "podway plan train MODEL",
}


@pytest.fixture(autouse=True)
def demo(stub: Stub) -> None:
    stub.add(records.cluster("demo"))
    stub.pools = [POOL]
    stub.past = [records.cluster("gone-1", state="GONE", hosts=[])]
    stub.jobs["demo"] = [records.job(1), records.job(2, state="RUNNING", ended=None)]


@pytest.mark.parametrize("typed", every(3, WORKS))
def test_works(run: Run, typed: str) -> None:
    result = run(*shlex.split(typed))
    assert result.code == 0, result
    assert WORKS[typed] in result.out
    if "-s" in typed.split():
        assert not any(state in result.out for state in ENDED)


@pytest.mark.parametrize("typed", every(3, ANSWERED))
def test_answered(run: Run, typed: str) -> None:
    result = run(*shlex.split(typed))
    assert result.code == 2 and result.out == ""
    assert ANSWERED[typed] in result.err


@pytest.mark.parametrize("typed", ["lsx", "foo", "batch", "event"])
def test_no_guess_is_better_than_a_wild_one(run: Run, typed: str) -> None:
    result = run(typed)
    assert result.code == 2 and "Did you mean" not in result.err


def options_of(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_an_option_of_the_command_to_run_is_left_alone(run: Run) -> None:
    """It may be the program's own: never taken for another tool's word, and the way to pass it on is told."""
    result = run("launch", "python", "train.py", "--spot")
    assert result.code == 2 and "put it after --" in result.err
    assert run("launch", "python", "train.py", "--json").code == 2


def test_the_tables_name_commands_that_exist() -> None:
    with podway.make_context("podway", [], resilient_parsing=True) as ctx:
        for words in filter(None, habits.WORDS.values()):
            command = podway.get_command(ctx, words[0])
            assert command is not None, words
            if len(words) > 1 and isinstance(command, click.Group):
                assert words[1] in command.commands, words
        told = " ".join((*habits.ANSWERS.values(), *habits.OPTION_ANSWERS.values()))
        for verb in re.findall(r"podway ([a-z]+)", told):
            assert verb in VERBS, verb
        for verb, option in habits.OPTION_ANSWERS:
            command = podway if verb == "podway" else podway.get_command(ctx, verb.split()[0])
            assert command is not None
            command = command.commands[verb.split()[1]] if " " in verb else command  # type: ignore[attr-defined]
            assert option not in options_of(command), f"{verb} {option} works now"
        for verb, options in habits.DROPPED.items():
            command = podway.get_command(ctx, verb.split()[0])
            assert command is not None
            known = options_of(command.commands[verb.split()[1]] if " " in verb else command)  # type: ignore[attr-defined]
            assert not known & set(options), f"{verb} {known & set(options)} works now"
        assert not set(habits.WORDS) & set(habits.ANSWERS)
        for words in (*habits.WORDS, *habits.ANSWERS):
            if words[0] in VERBS:  # a command of a group that has none of this name
                command = podway.get_command(ctx, words[0])
                assert isinstance(command, click.Group), words
                assert not words[1:] or words[1] not in command.commands, words


def test_one_address_is_of_one_cluster(run: Run, stub: Stub) -> None:
    assert run("status", "--ip").code == 2
    stub.add(records.cluster("down", state="STOPPED", hosts=[]))
    result = run("status", "--ip", "down")
    assert result.code == 1 and "has no hosts now: it is STOPPED" in result.err


def test_useful_commands_are_shown_once(run: Run, stub: Stub) -> None:
    assert "Cluster name:" not in run("exec", "demo", "-d", "hostname").out


def test_a_pool_goes_with_all_clusters_and_by_its_name(run: Run, stub: Stub) -> None:
    """It would replace its workers."""
    assert "Pool workers-1 is being taken down." in run("down", "--all", "-y").out
    assert run("down", "workers-1", "-y").out == "Pool workers-1 is being taken down.\n"
