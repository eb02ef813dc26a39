"""Several tasks in one file: what they share, and what is refused."""

import pytest

from podway.errors import UserError
from podway.task.read import read_tasks_text
from podway.task.task import Task

from .reading import flags, types

TPU = "resources: {accelerators: tpu-v6e-16}\n"


def read(text: str, **given: object) -> tuple[Task, ...]:
    return read_tasks_text(text, name="f.yaml", overrides=flags(**given))


def refusal(text: str, **given: object) -> str:
    with pytest.raises(UserError) as caught:
        read(text, **given)
    return f"{caught.value.what} | {caught.value.hint}"


def test_one_task_is_read_as_ever() -> None:
    (only,) = read("run: x\n")
    assert only.run == "x" and only.first_hosts is None


def test_the_tasks_share_the_cluster_of_the_one_that_asks_for_a_slice() -> None:
    prepare, train, last = read(
        f"name: p\n---\nname: prep\nrun: a\n---\nnum_nodes: 2\n{TPU}run: b\n---\nrun: c\nnum_nodes: 3\n"
    )
    assert [one.name for one in (prepare, train, last)] == ["prep", "p-2", "p-3"]
    assert all(types(one) == ["v6e-16"] and one.slices == 2 for one in (prepare, train, last))
    assert (prepare.first_hosts, train.first_hosts, last.first_hosts) == (1, None, 3)
    assert any("names no slice" in note for note in prepare.notes) and not train.notes


def test_flags_reach_every_task_and_each_keeps_its_image() -> None:
    first, second = read("run: a\n---\nresources: {image_id: docker:x}\nrun: b\n", tpus="v6e-8", env=("A=1",))
    assert types(first) == types(second) == ["v6e-8"] and first.env == second.env == {"A": "1"}
    assert (first.resources[0].image, second.resources[0].image) == (None, "docker:x")
    assert first.first_hosts is second.first_hosts is None


def test_alternatives_that_do_for_all_are_kept() -> None:
    either = "resources: {accelerators: [tpu-v6e-8, tpu-v5e-8]}\nrun: a\n"
    first, second = read(f"{either}---\nresources: {{accelerators: tpu-v5e-8}}\nrun: b\n")
    assert types(first) == types(second) == ["v5litepod-8"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{TPU}run: a\n---\nresources: {{accelerators: tpu-v6e-8}}\nrun: b\n", "v6e-8 where another asks for v6e-16"),
        (f"{TPU}run: a\n---\n{TPU}num_nodes: 2\nrun: b\n", "ask for 1 and 2 slices"),
        (f"{TPU}run: a\n---\nnum_nodes: 9\nrun: b\n", "asks for 9 nodes, and the cluster of its pipeline has 4"),
        ("run: a\n---\nservice: {replicas: 1, ports: 80, readiness_probe: /}\nrun: b\n", "a service cannot be part"),
        ("name: g\nexecution: parallel\n---\nrun: a\n---\nrun: b\n", "job group"),
        ("type: task\ncommands: [a]\n---\ntype: task\ncommands: [b]\n", "2 dstack configurations"),
    ],
)
def test_what_cannot_share_a_cluster_is_refused_where_it_stands(text: str, says: str) -> None:
    said = refusal(text)
    assert says in said and said.startswith("f.yaml:")
