"""Files of pools and fleets: how many workers, what each is, and machines over ssh."""

import pytest

from podway.errors import UserError
from podway.task.environment import Overrides
from podway.task.pools import PoolSize, PoolSpec
from podway.task.read import read_pool, read_task_text
from podway.task.ssh_fleets import SshFleet

SKY = "resources: {accelerators: tpu-v6e-8}\nsetup: echo hi\n"
FLEET = "type: fleet\nname: fl\nresources: {gpu: v6e-8}\n"


def pool(text: str, **flags: str) -> PoolSpec:
    found = read_pool("f.yaml", text.encode(), Overrides(**flags))  # type: ignore[arg-type]
    assert isinstance(found, PoolSpec)
    return found


def refused(text: str) -> str:
    with pytest.raises(UserError) as error:
        read_pool("f.yaml", text.encode())
    return f"{error.value.what}\n{error.value.hint}"


def test_a_skypilot_pool() -> None:
    found = pool(f"name: p\npool: {{workers: 3}}\n{SKY}")
    assert (found.name, found.task.setup, found.task.run) == ("p", "echo hi", "")
    assert found.task.resources[0].accelerator is not None and found.task.resources[0].accelerator.type == "v6e-8"
    assert found.size == PoolSize(workers=3, max_workers=3, idle_s=300)
    grows = pool(f"pool: {{min_workers: 0, max_workers: 4, downscale_delay_seconds: 60}}\n{SKY}")
    assert grows.size == PoolSize(workers=0, max_workers=4, idle_s=60) and grows.name is None
    assert read_pool("f.yaml", SKY.encode()) is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("pool: {workers: 1}\nrun: x", "run nothing by themselves"),
        ("pool: {}", "how many workers"),
        ("pool: {workers: 1, max_workers: 2}", "keep workers, or the two others"),
        ("pool: {min_workers: 3, max_workers: 2}", "below min_workers"),
        ("pool: {wrkers: 1}", "workers"),
        ("pool: {workers: -1}", "workers"),
        ("type: fleet\nname: f", "nodes"),
        (f"{FLEET}nodes: 3..1", "nodes"),
        (f"{FLEET}nodes: {{min: 3, target: 1, max: 4}}", "min <= target <= max"),
        (f"{FLEET}nodes: 0", "not possible"),
        (f"{FLEET}nodes: 1\nssh_config: {{hosts: [a]}}", "remove `nodes`"),
        ("type: fleet\nname: fl\nssh_config: {hosts: []}", "no machine"),
        ("type: fleet\nssh_config: {hosts: [a]}", "no name"),
        ("type: fleet\nname: fl\nnods: 2", "did you mean `nodes`"),
    ],
)
def test_what_is_wrong_is_said(text: str, part: str) -> None:
    assert part in refused(text)


def test_a_fleet_is_a_pool() -> None:
    found = pool(f"{FLEET}nodes: 2")
    assert (found.name, found.size, found.task.slices) == ("fl", PoolSize(workers=2, max_workers=2, idle_s=259200), 1)
    assert pool(f"{FLEET}nodes: 0..2\nidle_duration: 1h").size == PoolSize(workers=0, max_workers=2, idle_s=3600)
    assert pool(f"{FLEET}nodes: 0..2\nidle_duration: off").size.idle_s is None
    aimed = pool(f"{FLEET}nodes: {{min: 1, target: 2, max: 3}}").size
    assert (aimed.workers, aimed.first_workers, aimed.max_workers) == (1, 2, 3)
    together = pool(f"{FLEET}nodes: 2\nplacement: cluster")
    assert (together.size.max_workers, together.task.slices) == (1, 2)
    assert any("always kept" in note for note in pool(f"{FLEET}nodes: 2\nidle_duration: 1h").task.notes)
    noted = pool(f"{FLEET}nodes: 1\nblocks: 4\nenv: [A=b]\nmax_duration: 1h").task.notes
    assert [note.partition(":")[0] for note in noted] == ["blocks", "env", "max_duration"]


def test_a_fleet_over_ssh_is_a_list_of_machines() -> None:
    text = (
        "type: fleet\nname: lab\nssh_config:\n  user: me\n  identity_file: ~/.ssh/id\n"
        "  hosts: [10.0.0.1, {hostname: 10.0.0.2, port: 2222, internal_ip: 192.168.0.2}]\n"
        "  proxy_jump: {hostname: gate, user: you, port: 23}\n"
    )
    found = read_pool("f.yaml", text.encode(), Overrides(tpus="v6e-1"))
    assert isinstance(found, SshFleet) and found.notes == ()
    assert found.machines == {
        "user": "me",
        "identity_file": "~/.ssh/id",
        "jump": "you@gate:23",
        "accelerator": "v6e-1",
        "hosts": ["10.0.0.1", {"address": "10.0.0.2", "port": 2222, "internal_address": "192.168.0.2"}],
    }


def test_a_pool_is_not_a_task() -> None:
    for text in ("pool: {workers: 1}\nsetup: x", f"{FLEET}nodes: 1"):
        with pytest.raises(UserError) as error:
            read_task_text(text)
        assert "podway apply -f FILE" in error.value.hint
    assert read_task_text("type: task\ncommands: [x]\nfleets: [a, b]").pools == ("a", "b")
