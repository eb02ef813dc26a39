"""stop, start, down and autostop."""

from pathlib import Path

import msgspec
import pytest

from podway.cli import cost
from podway.errors import UserError
from podway.server.api import EventView, OrphanView
from tests.cli import records
from tests.cli.conftest import Run, on_terminal
from tests.cli.stub import VOLUME, Stub


@pytest.fixture
def three(stub: Stub) -> Stub:
    stub.add(records.cluster("exp-1"), records.cluster("exp-2"), records.cluster("other"))
    return stub


def test_down_waits_until_nothing_is_left(run: Run, three: Stub) -> None:
    result = run("down", "exp-*", "-y")
    assert result.code == 0
    assert result.out.splitlines() == [f"✓ Cluster exp-{n} is deleted." for n in (1, 2)]
    assert three.clusters["exp-1"].state == "GONE"
    assert three.clusters["other"].state == "UP"


def test_all_of_them(run: Run, three: Stub) -> None:
    assert run("down", "--all").out.count("is deleted") == 3


@pytest.mark.parametrize("verb", ["stop", "start", "down"])
def test_names_or_all_but_one_of_them(run: Run, three: Stub, verb: str) -> None:
    assert "Give the names of clusters, or --all." in run(verb).err
    assert run(verb, "-a", "exp-1").code == 2
    assert run(verb, "nope-*") == (
        1,
        "",
        "Error: there is no cluster 'nope-*'\n  existing clusters: exp-1, exp-2, other\n",
    )


def test_an_unknown_name_does_not_keep_the_others(run: Run, three: Stub) -> None:
    result = run("down", "-y", "exp-1", "nope", "other", "nada-*")
    assert result.code == 1
    assert result.out.count("is deleted") == 2
    assert "there is no cluster 'nope'" in result.err and "there is no cluster 'nada-*'" in result.err
    assert [name for name in three.clusters if three.asked("DELETE", f"/v1/clusters/{name}")] == ["exp-1", "other"]
    assert run("stop", "exp-2", "nope").code == run("start", "exp-2", "nope").code == 1
    assert three.clusters["exp-2"].state == "UP"


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
    assert run("down", "exp-1").out == "✓ Cluster exp-1 is deleted.\n"


def test_a_terminal_is_asked(home: Path, three: Stub) -> None:
    code, shown = on_terminal("down", "exp-*", typed="n\n")
    assert code == 1
    assert "Deleting 2 cluster(s): exp-1, exp-2. Proceed? [Y/n]: " in shown
    assert three.clusters["exp-1"].state == "UP"
    code, shown = on_terminal("down", "exp-1", typed="\n")
    assert code == 0
    assert "Cluster exp-1 is deleted" in shown


def test_autostop_promises_what_is_arranged(run: Run, three: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podway.cli.autostop.CONFIRM_S", 0.3)
    promise = "Its head host does this even while no server runs.\n"
    for changes, told in (
        ({"autostop_armed": True}, promise),
        ({"autostop_armed": False}, "Warning: its head host has not confirmed."),
        ({"state": "INIT"}, "its head host is told once it is up"),
    ):
        three.add(records.cluster("other", self_teardown=True, **changes))
        out = run("autostop", "other", "--down").out
        assert told in out and (told == promise or promise not in out)


def test_autostop(run: Run, three: Stub) -> None:
    assert run("autostop", "other").out == "Cluster other will be stopped after 5m of idle time.\n"
    assert run("autostop", "other", "-i", "90", "--down").out == (
        "Cluster other will be taken down after 1h 30m of idle time.\n"
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


def orphan(**changes: object) -> OrphanView:
    made = OrphanView(
        provider="gcp",
        kind="node",
        name="projects/p/locations/us-east5-b/nodes/lost-1",
        cluster="lost",
        zone="us-east5-b",
        condition="ready",
        accelerator_type="v6e-8",
        created=records.NOW - 3600,
        hourly_cost=21.6,
    )
    return msgspec.structs.replace(made, **changes)


def test_orphans_are_shown_and_purged(run: Run, stub: Stub) -> None:
    stub.orphans = [orphan()]
    assert "1 resource belong" in run("status").err
    shown = run("status", "--refresh").out
    assert "nodes/lost-1" in shown and "gcp/us-east5-b" in shown and "podway down --purge" in shown
    result = run("down", "--purge", "-y")
    assert result.code == 0 and "Deleted 1 resource; none are left." in result.out
    assert run("down", "--purge", "-y").out == "No orphaned resources.\n"
    assert "use it without names" in run("down", "--purge", "demo").err


def test_purge_asks_first(stub: Stub) -> None:
    stub.orphans = [orphan()]
    code, shown = on_terminal("down", "--purge", typed="n\n")
    assert code == 1 and "Deleting 1 resource" in shown
    assert stub.asked("DELETE", "/v1/orphans") == []


def test_a_deletion_that_fails_is_told_while_it_goes_on(run: Run, three: Stub) -> None:
    error = EventView(id=7, time=1.0, job=None, kind="error", text="PERMISSION_DENIED: no", detail={})
    three.later_events["exp-1"] = [error]
    result = run("down", "exp-1", "-y")
    assert result.code == 0
    assert "├── exp-1: PERMISSION_DENIED: no (retrying; after Ctrl-C the server goes on)" in result.out


def test_one_that_was_asked_for_before_is_told_what_it_waits_for(run: Run, three: Stub) -> None:
    error = EventView(id=7, time=1.0, job=None, kind="error", text="no answer", detail={})
    three.events["exp-1"] = [error]
    assert "no answer" not in run("down", "exp-1", "-y").out  # it may have been about anything
    three.clusters["exp-2"] = msgspec.structs.replace(three.clusters["exp-2"], goal="gone", state="TERMINATING")
    three.events["exp-2"] = [error]
    assert "├── exp-2: no answer (retrying;" in run("down", "exp-2", "-y").out


def test_cost_counts_volumes() -> None:
    """A disk bills for as long as it exists, attached or not."""
    made = msgspec.structs.replace(VOLUME, created=records.NOW - 730 * 3600, hourly_cost=20.0 / 730, used_by=None)
    shown = cost.page([], records.NOW, (), [made, msgspec.structs.replace(made, name="odd", hourly_cost=None)])
    assert "VOLUME (unused)" in shown and "disk 200 GB pd-balanced" in shown and "$20.00" in shown
    assert "Billing now: $0.03/h, and 1 at an unknown price (0 clusters, 0 orphans, 2 volumes)" in shown
    assert "Total: $20.00, and 1 at an unknown price" in shown


def test_cost_counts_orphans(stub: Stub) -> None:
    paid = records.cluster(simulated=False, hourly_cost=10.0, cost=5.0, order=records.order(provider="gcp"))
    shown = cost.page([paid], records.NOW, [orphan()])
    assert "Billing now: $31.60/h (1 cluster, 1 orphan)" in shown
    assert "ORPHAN" in shown and "Total: $26.60" in shown
    assert "Nothing is billing now." in cost.page([records.cluster()], records.NOW)
