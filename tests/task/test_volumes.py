"""Files of type volume, and the volumes that tasks name."""

import pytest

from podway.errors import UserError
from podway.task.read import read_task_text
from podway.task.task import Placement
from podway.task.volumes import for_node, is_per_node, read_volume_text

FILE = "type: volume\nname: my-volume\nbackend: gcp\nregion: us-east5\navailability_zone: us-east5-b\nsize: 100GB\n"


def test_a_volume_file() -> None:
    spec = read_volume_text(FILE)
    assert spec is not None
    assert (spec.name, spec.size_gb) == ("my-volume", 100)
    assert spec.placement == Placement(provider="gcp", region="us-east5", zone="us-east5-b")
    assert read_volume_text("type: task\ncommands: [x]\n") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("type: volume\nname: v1\nbackend: aws\nsize: 1GB\n", "aws has no TPUs"),
        ("type: volume\nbackend: gcp\nsize: 1GB\n", "the volume has no name"),
        ("type: volume\nname: v1\nbackend: gcp\n", "neither a size nor a volume_id"),
        ("type: volume\nname: v1\nbackend: gcp\nsizes: 1GB\n", "unknown key"),
        (FILE.replace("us-east5-b", "nowhere"), "is not a zone"),
    ],
)
def test_mistakes(text: str, why: str) -> None:
    with pytest.raises(UserError) as caught:
        read_volume_text(text)
    assert why in str([caught.value.what, *(one.what for one in caught.value.others)])


def test_a_volume_is_not_run() -> None:
    with pytest.raises(UserError, match="a volume cannot be run") as caught:
        read_task_text(FILE)
    assert caught.value.hint == "create it with: podway apply -f FILE"


def test_a_volume_for_each_node() -> None:
    task = read_task_text("type: task\nnodes: 2\ncommands: [x]\nvolumes: ['v-${{dstack.node_rank}}:/d']\n")
    name = task.volumes[0].name
    assert name is not None and is_per_node(name) and for_node(name, 1) == "v-1"
    with pytest.raises(UserError, match="holds what is not known here"):
        read_task_text("type: task\ncommands: [x]\nvolumes: ['v-${{ run.id }}:/d']\n")


def test_a_directory_of_a_volume() -> None:
    task = read_task_text("run: x\nvolumes: {/data: {name: v, sub_path: train/./a}}\n")
    assert task.volumes[0].sub_path == "train/a"
    with pytest.raises(UserError, match="leads out of the volume"):
        read_task_text("run: x\nvolumes: {/data: {name: v, sub_path: ../a}}\n")


def test_a_claim_of_kubernetes_in_a_file_of_dstack() -> None:
    text = "type: volume\nbackend: kubernetes\nregion: gpu-cluster-a\nname: my-volume\n"
    found = read_volume_text(f"{text}claim_name: existing-pvc\n")
    assert found is not None
    assert (found.placement.provider, found.placement.region, found.disk_id) == ("gke", "gpu-cluster-a", "existing-pvc")
    made = read_volume_text(f"{text}size: 1TB\nstorage_class_name: nfs\naccess_modes: [ReadOnlyMany, ReadWriteMany]\n")
    assert made is not None and (made.disk_type, made.access_mode, made.disk_id) == ("nfs", "ReadWriteMany", None)
    with pytest.raises(UserError, match=r"claim_name: only volumes of kubernetes have it, and this one is of ssh"):
        read_volume_text("type: volume\nbackend: remote\nname: v\nclaim_name: x\n")
