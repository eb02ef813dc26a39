"""Every way to split a step over devices gives the numbers of one device."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from podway.model.families import find_model
from podway.model.hf import shape_to_hf
from podway.model.layout import parse_mesh
from podway.model.mesh import make_mesh
from podway.train.sharding import manual_part, rings_of
from tests.train.running import environment

ROOT = Path(__file__).parents[2]
AXES = ("data", "fsdp", "context", "tensor")  # slices are data over another network: the same program

SOME = (
    "data=16", "fsdp=16", "slices=2,data=2,fsdp=4", "context=16", "tensor=16", "fsdp=4,tensor=4",
    "data=2,context=2,tensor=4", "data=2,fsdp=2,context=2,tensor=2",
)  # fmt: skip


def factorisations(left: int, axes: tuple[str, ...] = AXES) -> list[dict[str, int]]:
    if len(axes) == 1:
        return [{axes[0]: left}]
    sizes = [s for s in (1, 2, 4, 8, 16) if left % s == 0 and s <= left]
    return [{axes[0]: s, **rest} for s in sizes for rest in factorisations(left // s, axes[1:])]


def in_words(meshes: list[dict[str, int]]) -> list[str]:
    return [",".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) for mesh in meshes]


def wide(folder: Path, name: str) -> str:
    """A tiny model that every axis of 16 can split: 16 heads (over 2 of keys and values), 16 experts; its directory."""
    shape = replace(find_model(name), heads=16, d_head=4)
    if shape.experts:
        shape = replace(shape, d_ff=32, experts=replace(shape.experts, count=16, d_ff=32))
    (folder / "config.json").write_text(json.dumps(shape_to_hf(shape)))
    return str(folder)


def agree(words: str, meshes: Sequence[str], tolerance: float) -> float:
    """Hold every mesh to one device; the largest relative difference that was met."""
    command = [sys.executable, "-m", "tests.train.mesh_process", words, "data=1", *meshes]
    done = subprocess.run(command, env=environment(16), cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    alone = found.pop("data=1")
    assert list(found) == list(meshes)
    for mesh, numbers in found.items():
        assert numbers == pytest.approx(alone, rel=tolerance), mesh
    return max(abs(a - b) / abs(b) for numbers in found.values() for a, b in zip(numbers, alone, strict=True))


@pytest.mark.timeout(900)  # a minute of one core; much more where others use it too
def test_meshes_agree_with_one_device(tmp_path: Path) -> None:
    agree(f"model.name={wide(tmp_path, 'tiny-llama3')}", SOME, 2e-5)


@pytest.mark.long
@pytest.mark.timeout(900)  # half a minute of one core; much more where others use it too
def test_experts_agree_with_one_device() -> None:
    # A weight at which the balance loss is a tenth of the whole: how experts are used is counted over all devices.
    words = "model.name=tiny-mixtral loss.balance=0.2"
    agree(words, ["fsdp=4,expert=4", "data=2,expert=2,tensor=2"], 1e-4)
    agree(f"{words} model.expert_dispatch=gather", ["fsdp=2,expert=2,tensor=2"], 1e-4)
    agree(
        "model.name=tiny-mixtral lora.rank=4 lora.targets=[v,experts_up,experts_down]",
        ["fsdp=2,expert=2,tensor=2"],
        1e-4,
    )
    agree(f"{words} batch.microbatches=2", ["data=8", "fsdp=4,context=2"], 1e-4)


@pytest.mark.long
def test_accumulation_lora_and_unrolling_on_a_mesh() -> None:
    agree("batch.microbatches=2 compile.unroll=true", ["data=2,fsdp=4,tensor=2"], 2e-5)
    agree("lora.rank=4 lora.base=int8 batch.microbatches=4", ["fsdp=4"], 1e-4)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_slices_that_share_the_state_agree_with_one_device() -> None:
    agree("mesh.state_over_slices=true batch.microbatches=2", ["slices=2,data=2,fsdp=2", "slices=4,tensor=2"], 2e-5)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_quantized_products_on_a_mesh() -> None:
    """Near one device's: a device rounds the gradients of its own sequences."""
    agree("precision.products=int8", ["fsdp=2,tensor=2"], 5e-3)


@pytest.mark.timeout(600)
def test_the_tpu_kernel_agrees_where_heads_and_sequences_are_split() -> None:
    agree("model.kernel=splash model.name=tiny-llama2", ["fsdp=2,context=2,tensor=2"], 1e-4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_factorisation_of_sixteen_agrees(tmp_path: Path) -> None:
    meshes = in_words(factorisations(16))
    assert len(meshes) == 35
    print("largest difference", agree(f"model.name={wide(tmp_path, 'tiny-llama3')}", meshes, 2e-5))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_factorisation_with_experts_agrees(tmp_path: Path) -> None:
    meshes = in_words([mesh for mesh in factorisations(16, (*AXES, "expert")) if mesh["expert"] > 1])
    assert len(meshes) == 35
    words = f"model.name={wide(tmp_path, 'tiny-mixtral')} loss.balance=0.2"
    print("largest difference", agree(words, meshes, 1e-4))


class Chip:
    """As much of a TPU device as the order of a mesh asks for."""

    platform, device_kind, process_index, core_on_chip = "tpu", "TPU v4", 0, 0

    def __init__(self, place: tuple[int, ...]) -> None:
        self.coords, self.slice_index = place, 0


def test_rings_follow_the_torus() -> None:
    def mesh(places: list[tuple[int, ...]]) -> object:
        devices = np.array([Chip(place) for place in places], dtype=object)
        return SimpleNamespace(axis_names=("fsdp",), shape={"fsdp": len(places)}, devices=devices)

    torus = [(x, y, 0) for x in range(16) for y in range(16)]
    cube = [(x, y, z) for x in range(4) for y in range(4) for z in range(8)]
    assert rings_of(mesh(torus)) == (16, 16)  # type: ignore[arg-type]
    assert rings_of(mesh(cube)) == (4, 4, 8)  # type: ignore[arg-type]
    assert rings_of(mesh([(x, 0, 0) for x in range(8)])) == (8,)  # type: ignore[arg-type]
    snake = [(0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 0)]  # turns a corner: no two straight lines
    assert rings_of(mesh(snake)) in ((4,), (2, 2))  # type: ignore[arg-type]


def test_the_tile_decides_who_is_whose_neighbour() -> None:
    """(4,2,2) and (2,2,4) are both 16 chips of a 4x4x4 cube, and different ones."""
    chips = [Chip((x, y, z)) for z in range(4) for y in range(4) for x in range(4)]

    def first_group(tile: tuple[int, ...]) -> set[tuple[int, ...]]:
        made = make_mesh(parse_mesh("fsdp=4,tensor=16", tile=tile), chips)  # type: ignore[arg-type]
        return {device.coords for device in made.devices.reshape(4, 16)[0]}

    flat, tall = first_group((4, 2, 2, 1)), first_group((2, 2, 4, 1))
    assert flat == {(x, y, z) for x in range(4) for y in range(2) for z in range(2)}
    assert tall == {(x, y, z) for x in range(2) for y in range(2) for z in range(4)}


def test_only_batch_axes_are_taken_by_hand() -> None:
    assert manual_part((("slices", "data", "fsdp", "expert"), "context")) == manual_part(
        (("slices", "data", "fsdp"), None)
    )
