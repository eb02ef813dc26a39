"""stop, start, down and autostop."""

from pathlib import Path

import msgspec
import pytest

from podway.errors import UserError
from tests.cli import records
from tests.cli.conftest import Run, on_terminal
from tests.cli.stub import Stub


@pytest.fixture
def three(stub: Stub) -> Stub:
    stub.add(records.cluster("exp-1"), records.cluster("exp-2"), records.cluster("other"))
    return stub


def test_down_waits_until_nothing_is_left(run: Run, three: Stub) -> None:
    result = run("down", "exp-*", "-y")
    assert result.code == 0
    assert result.out.splitlines() == [f"✓ Cluster exp-{n} is gone: nothing of it is left." for n in (1, 2)]
    assert three.clusters["exp-1"].state == "GONE"
    assert three.clusters["other"].state == "UP"


def test_all_of_them(run: Run, three: Stub) -> None:
    assert run("down", "--all").out.count("is gone") == 3


@pytest.mark.parametrize("verb", ["stop", "start", "down"])
def test_names_or_all_but_one_of_them(run: Run, three: Stub, verb: str) -> None:
    assert "Give the names of clusters, or --all." in run(verb).err
    assert run(verb, "-a", "exp-1").code == 2
    assert run(verb, "nope-*") == (
        1,
        "",
        "Error: there is no cluster 'nope-*'\n  clusters there are: exp-1, exp-2, other\n",
    )


def test_stop_then_start(run: Run, three: Stub) -> None:
    assert run("stop", "exp-1").out == "✓ Cluster exp-1 is stopped; start it again with: podway start exp-1.\n"
    assert run("stop", "exp-1").out == "Nothing to stop.\n"
    assert run("start", "exp-1").out == "✓ Cluster exp-1 is up.\n"
    assert run("start", "-a").out == "Nothing to start.\n"


def test_one_that_cannot_stops_no_other(run: Run, three: Stub) -> None:
    three.refuse["/exp-1/stop"] = UserError(
        "cluster exp-1 cannot be stopped: it is a pod", "podway down exp-1", status=409
    )
    result = run("stop", "-a")
    assert result.code == 1
    assert result.out.count("is stopped") == 2
    assert result.err == "Error: cluster exp-1 cannot be stopped: it is a pod\n  podway down exp-1\n"


def test_a_start_that_ends_in_nothing_is_told(run: Run, three: Stub) -> None:
    three.clusters["exp-1"] = msgspec.structs.replace(three.clusters["exp-1"], state="STOPPED", reason="no capacity")
    move = three.move

    def doomed(name: str, state: str, coming: str, goal: str) -> object:
        return move(name, state, "GONE", goal)

    three.move = doomed  # type: ignore[method-assign,assignment]
    result = run("start", "exp-1")
    assert result.code == 1
    assert result.err.startswith("Error: cluster exp-1 is GONE: no capacity\n")


def test_a_cluster_made_anew_meanwhile_is_not_waited_for(run: Run, three: Stub) -> None:
    move = three.move

    def replaced(name: str, state: str, coming: str, goal: str) -> object:
        answer = move(name, state, coming, goal)
        three.coming[name] = []
        three.clusters[name] = records.cluster(name, id="another")
        return answer

    three.move = replaced  # type: ignore[method-assign,assignment]
    assert run("down", "exp-1").out == "✓ Cluster exp-1 is gone: nothing of it is left.\n"


def test_a_terminal_is_asked(home: Path, three: Stub) -> None:
    code, shown = on_terminal("down", "exp-*", typed="n\n")
    assert code == 1
    assert "Terminating 2 cluster(s): exp-1, exp-2. Proceed? [Y/n]: " in shown
    assert three.clusters["exp-1"].state == "UP"
    code, shown = on_terminal("down", "exp-1", typed="\n")
    assert code == 0
    assert "Cluster exp-1 is gone" in shown


def test_autostop(run: Run, three: Stub) -> None:
    assert run("autostop", "other").out == "Cluster other will be stopped after 5m without a job.\n"
    assert run("autostop", "other", "-i", "90", "--down").out == (
        "Cluster other will be taken down after 1h 30m without a job.\n"
    )
    assert run("autostop", "other", "--cancel").out == "Cluster other stays up until you stop it.\n"
    assert three.asked("POST", "/v1/clusters/other/autostop") == [
        {"autostop": {"idle_minutes": 5}},
        {"autostop": {"idle_minutes": 90, "down": True}},
        {"autostop": None},
    ]
    assert run("autostop", "other", "--cancel", "-i", "3").code == 1
    assert run("autostop", "other", "-i", "-3").code == 2
    assert run("autostop", "nope").code == 1
