"""status, queue and cost: their tables, their JSON, and what they say when there is nothing."""

import json

from hypothesis import given
from hypothesis import strategies as st

from podway.cli import cost, queue, status, tables
from podway.cli.tables import table
from podway.task.task import Autostop
from tests.cli import records
from tests.cli.conftest import Run
from tests.cli.records import NOW
from tests.cli.stub import Stub


def test_status_table() -> None:
    clusters = [
        records.cluster("demo"),
        records.cluster("exp-1", state="STOPPED", autostop=Autostop(idle_minutes=10), created=NOW - 7300),
        records.cluster("big", infra="gcp/us-east5-b", autostop=Autostop(idle_minutes=60, down=True), created=NOW - 2),
    ]
    assert status.page(clusters, NOW).splitlines() == [
        "NAME   INFRA              RESOURCES       STATUS   AUTOSTOP   LAUNCHED",
        "demo   local (simulated)  1x[tpu-v6e-16]  UP       -          3 mins ago",
        "exp-1  local (simulated)  1x[tpu-v6e-16]  STOPPED  10m        2 hrs ago",
        "big    gcp/us-east5-b     1x[tpu-v6e-16]  UP       1h (down)  just now",
    ]


def test_status_verbose() -> None:
    clusters = [records.cluster("demo", open_jobs=2), records.cluster("new", hosts=[], state="INIT", reason="no quota")]
    lines = status.page(clusters, NOW, verbose=True).splitlines()
    assert lines[0].split()[6:] == ["USER", "HOSTS", "HEAD_IP", "JOBS", "REASON"]
    assert lines[1].split()[-5:] == ["ada", "4", "127.20.0.1", "2", "-"]
    assert lines[2].endswith("ada   4      -           0     no quota")


def test_status_without_clusters(run: Run, stub: Stub) -> None:
    assert run("status").out == "No existing clusters.\n"
    assert run("ps").out == "No existing clusters.\n"
    assert json.loads(run("status", "-o", "json").out) == []


def test_status_by_name_and_pattern(run: Run, stub: Stub) -> None:
    stub.add(records.cluster("exp-1"), records.cluster("exp-2"), records.cluster("other"))
    names = [row["name"] for row in json.loads(run("status", "exp-*", "-o", "json").out)]
    assert names == ["exp-1", "exp-2"]
    assert run("status", "-v", "other").out.count("\n") == 2
    assert "No orphaned resources." in run("status", "-r", "other").out
    result = run("status", "exp-1", "nope")
    assert result.code == 1
    assert result.err == "Error: there is no cluster 'nope'\n  existing clusters: exp-1, exp-2, other\n"


def test_a_name_cannot_steer_the_terminal(run: Run, stub: Stub) -> None:
    stub.add(records.cluster("x", reason="\x1b[2Jgone\n"))
    assert "\\x1b[2Jgone\\n" in run("status", "-v").out


def test_queue_table() -> None:
    jobs = [
        records.job(1),
        records.job(2, name=None, state="RUNNING", ended=None),
        records.job(3, state="PENDING", started=None, ended=None),
        records.job(4, name="run", exclusive=False, submitted=NOW - 1),
    ]
    assert queue.page(jobs, NOW).splitlines() == [
        "ID  NAME   USER  SUBMITTED  STARTED    DURATION  RESOURCES           STATUS",
        "4   run    ada   just now   1 min ago  1m 5s     bypasses the queue  SUCCEEDED",
        "3   train  ada   1 min ago  -          -         1x[tpu-v6e-16]      PENDING",
        "2   -      ada   1 min ago  1 min ago  1m 35s    1x[tpu-v6e-16]      RUNNING",
        "1   train  ada   1 min ago  1 min ago  1m 5s     1x[tpu-v6e-16]      SUCCEEDED",
    ]


def test_queue_shows_priorities_where_there_are_any() -> None:
    jobs = [records.job(1, state="PENDING", started=None, ended=None, priority=7), records.job(2)]
    head, second, first = queue.page(jobs, NOW).splitlines()
    assert head.split() == [*queue.HEADERS[:-2], "PRIORITY", *queue.HEADERS[-2:]]
    assert second.split()[-3:] == ["0", "1x[tpu-v6e-16]", "SUCCEEDED"]
    assert first.split()[-3:] == ["7", "1x[tpu-v6e-16]", "PENDING"]


def test_queue_of_every_cluster_or_some(run: Run, stub: Stub) -> None:
    assert run("queue").out == "No existing clusters.\n"
    stub.add(records.cluster("a"), records.cluster("b"))
    stub.jobs["a"] = [records.job(1, cluster="a")]
    text = run("queue").out
    assert text.startswith("Job queue of cluster a\nID  NAME")
    assert text.endswith("\n\nJob queue of cluster b\nNo jobs.\n")
    assert run("queue", "b").out == "Job queue of cluster b\nNo jobs.\n"
    assert [row["cluster"] for row in json.loads(run("queue", "-o", "json").out)] == ["a"]
    assert run("queue", "c").code == 1


def test_cost_table() -> None:
    paid = {"simulated": False, "infra": "gcp/us-east5-b"}
    clusters = [
        records.cluster("gone", state="GONE", created=NOW - 90000, billed_s=7500, hourly_cost=43.2, cost=90.0, **paid),
        records.cluster("odd", hourly_cost=None, cost=None, created=NOW - 500, **paid),
        records.cluster("demo"),
    ]
    assert cost.page(clusters, NOW).splitlines() == [
        "NAME  LAUNCHED    DURATION  RESOURCES       STATUS      COST/hr            COST (est.)",
        "demo  3 mins ago  3m 10s    1x[tpu-v6e-16]  UP          $0.00 (simulated)  $0.00 (simulated)",
        "odd   8 mins ago  3m 10s    1x[tpu-v6e-16]  UP          -                  -",
        "gone  1 day ago   2h 5m     1x[tpu-v6e-16]  TERMINATED  $43.20             $90.00",
        "",
        "Billing now: $0.00/h, and 1 at an unknown price (1 cluster, 0 orphans)",
        "Total: $90.00, and 1 at an unknown price",
    ]


def test_cost_asks_for_past_clusters(run: Run, stub: Stub) -> None:
    stub.volumes = []
    assert run("cost").out == "No existing clusters.\n"
    stub.past = [records.cluster("gone", state="GONE")]
    assert [row["name"] for row in json.loads(run("cost", "--days", "1", "-o", "json").out)] == ["gone"]
    assert run("cost", "--days", "-1").code == 2


WIDE = (("NAME", "INFRA", "RESOURCES", "STATUS"), [("a-long-name", "gcp/us-east5-b", "1x[tpu-v6e-16]", "UP")] * 2)


def test_a_narrow_terminal_loses_the_least_important_columns() -> None:
    headers, rows = WIDE
    whole = table(headers, rows, drop=("INFRA", "RESOURCES"))  # no terminal: all of it
    assert whole.splitlines()[0].split() == list(headers)
    assert table(headers, rows, drop=("INFRA", "RESOURCES"), room=40).splitlines() == [
        "NAME         RESOURCES       STATUS",
        "a-long-name  1x[tpu-v6e-16]  UP",
        "a-long-name  1x[tpu-v6e-16]  UP",
    ]
    assert table(headers, rows, drop=("INFRA", "RESOURCES"), room=20).splitlines()[1] == "a-long-name  UP"
    assert table(headers, rows, room=30).splitlines()[1].count("…") == 3


@given(
    st.lists(st.lists(st.text(max_size=40), min_size=4, max_size=4), max_size=5),
    st.integers(30, 200),
    st.lists(st.sampled_from(WIDE[0]), max_size=3, unique=True),
)
def test_no_line_is_longer_than_the_terminal(rows: list[list[str]], room: int, drop: list[str]) -> None:
    shown = table(WIDE[0], rows, drop=drop, room=room).split("\n")
    assert len(shown) == len(rows) + 1
    assert all(tables._width(line) <= room for line in shown)
