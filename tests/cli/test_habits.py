"""What SkyPilot and dstack users type: it works, or the answer names the Podway command to type."""

import re
import shlex

import pytest

from podway.cli import habits
from podway.cli.index import VERBS, podway
from podway.control.records import ENDED
from tests.cli import records
from tests.cli.conftest import Run
from tests.cli.stub import POOL, Stub

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
}


@pytest.fixture(autouse=True)
def demo(stub: Stub) -> None:
    stub.add(records.cluster("demo"))
    stub.pools = [POOL]
    stub.past = [records.cluster("gone-1", state="GONE", hosts=[])]
    stub.jobs["demo"] = [records.job(1), records.job(2, state="RUNNING", ended=None)]


@pytest.mark.parametrize("typed", WORKS)
def test_works(run: Run, typed: str) -> None:
    result = run(*shlex.split(typed))
    assert result.code == 0, result
    assert WORKS[typed] in result.out
    if "-s" in typed.split():
        assert not any(state in result.out for state in ENDED)


@pytest.mark.parametrize("typed", ANSWERED)
def test_answered(run: Run, typed: str) -> None:
    result = run(*shlex.split(typed))
    assert result.code == 2 and result.out == ""
    assert ANSWERED[typed] in result.err


@pytest.mark.parametrize("typed", ["lsx", "foo", "batch", "event"])
def test_no_guess_is_better_than_a_wild_one(run: Run, typed: str) -> None:
    result = run(typed)
    assert result.code == 2 and "Did you mean" not in result.err


def test_the_tables_name_commands_that_exist() -> None:
    with podway.make_context("podway", [], resilient_parsing=True) as ctx:
        for words in habits.WORDS.values():
            command = podway.get_command(ctx, words[0])
            assert command is not None, words
            if len(words) > 1 and not words[1].startswith("-"):
                assert words[1] in command.commands, words  # type: ignore[attr-defined]
        told = " ".join((*habits.ANSWERS.values(), *habits.OPTION_ANSWERS.values()))
        for verb in re.findall(r"podway ([a-z]+)", told):
            assert verb in VERBS, verb
        for verb, option in habits.OPTION_ANSWERS:
            command = podway.get_command(ctx, verb)
            assert command is not None
            known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            assert option not in known, f"{verb} {option} works now"
    assert not set(habits.WORDS) & set(habits.ANSWERS)
    assert not {words[0] for words in (*habits.WORDS, *habits.ANSWERS)} & set(VERBS)


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
