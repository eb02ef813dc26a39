"""Activations in host memory, quantised products, and what is refused by name."""

import msgspec
import pytest
from click.testing import CliRunner

from podway.catalog.slices import find_slice
from podway.cli.index import podway
from podway.errors import UserError
from podway.model.families import find_model
from podway.model.layout import MeshShape
from podway.plan.plans import evaluate
from podway.plan.search import PlanOptions, search_train
from podway.plan.task_needs import training_of
from podway.plan.training import MAXTEXT_2023, PROGRAMS, Training
from podway.rehearse.rehearsal import rehearse_training, training_settings
from podway.train.settings import read_config

SHAPE, SLICE, MESH = find_model("llama3.1-70b"), find_slice("v6e-64"), MeshShape(fsdp=64)


def step(**changes: object) -> Training:
    return msgspec.structs.replace(Training(seq=8192, batch=128), **changes)


def test_offloading_takes_hbm_and_recomputation_away_and_costs_host_memory() -> None:
    kept = evaluate(SHAPE, SLICE, MESH, step())
    outside = evaluate(SHAPE, SLICE, MESH, step(offload=("residual", "qkv", "context")))
    assert outside.memory.saved < kept.memory.saved / 5
    assert outside.memory.host > 20 * 2**30 and not kept.memory.host
    assert outside.time.attention < kept.time.attention  # the kernel's result comes back from the host


def test_transfers_that_nothing_hides_are_waited_for() -> None:
    small, slice = find_model("llama3.2-1b"), find_slice("v5e-16")
    slow = evaluate(small, slice, MeshShape(fsdp=16), Training(seq=2048, batch=64, offload=("residual", "mlp_in")))
    assert slow.time.host > 0 and slow.time.total > slow.time.host


def test_host_memory_has_an_end() -> None:
    plan = evaluate(SHAPE, SLICE, MESH, step(batch=128 * 16, offload=("residual", "qkv", "context", "mlp_in")))
    assert not plan.memory.fits and "host memory" in plan.memory.excess


def test_the_search_offers_it_where_it_is_faster() -> None:
    best = search_train(SHAPE, PlanOptions(seq=8192, batch=128), [SLICE]).plans[0]
    assert best.training.offload and best.mesh.fsdp == 64


def test_the_trainer_is_told_the_same() -> None:
    words = training_settings(MESH, step(remat="qkv+context", offload=("residual", "qkv")))
    config = read_config(None, ["model.name=llama3.1-70b", *words])
    assert (config.remat.policy, config.remat.save) == ("custom", ("context",))
    assert config.remat.offload == ("residual", "qkv")


@pytest.mark.parametrize(("compute", "slice"), [("int8", "v6e-64"), ("fp8", "tpu7x-128")])
def test_quantised_products_are_faster_where_the_unit_is(compute: str, slice: str) -> None:
    where = find_slice(slice)
    mesh = MeshShape(fsdp=where.devices)
    plain = evaluate(SHAPE, where, mesh, step())
    quick = evaluate(SHAPE, where, mesh, step(compute=compute))
    assert 0.45 < quick.time.matrix / plain.time.matrix < 0.9
    assert quick.mfu < 1 and quick.kind == "quantised"


def test_a_unit_without_the_mode_gains_nothing() -> None:
    v4 = find_slice("v4-128")
    plain, asked = (evaluate(SHAPE, v4, MESH, step(compute=name)) for name in ("bfloat16", "int8"))
    assert plain.time.matrix == asked.time.matrix


def test_quantised_products_are_trained_as_planned() -> None:
    asked = rehearse_training("llama3.1-70b", SLICE, MESH, step(compute="int8"), fast=True)
    config = read_config(None, ["model.name=llama3.1-70b", *asked.settings])
    assert config.precision.products == "int8"
    assert training_of(dict(word.split("=", 1) for word in asked.settings), SLICE.devices, 1)[1].compute == "int8"
    plain, quick = (evaluate(SHAPE, SLICE, MESH, step(compute=name)) for name in ("bfloat16", "int8"))
    gathers = [
        {t.direction: t.seconds for t in one.time.traffic if t.axis == "fsdp"}["gather"] for one in (plain, quick)
    ]
    assert gathers[1] < gathers[0]


def test_what_podway_cannot_train_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="no program of maxtext-2023 with fp8 products"):
        rehearse_training("llama3.1-70b", SLICE, MESH, step(compute="fp8", program=MAXTEXT_2023), fast=True)
    for changed in (step(program=MAXTEXT_2023, remat="minimal"), step(program=MAXTEXT_2023, microbatches=2)):
        with pytest.raises(UserError, match="maxtext-2023 has one microbatch"):
            rehearse_training("llama3.1-70b", SLICE, MESH, changed, fast=True)
    with pytest.raises(UserError, match="no program of maxtext-v6e"):
        rehearse_training("llama3.1-70b", SLICE, MESH, step(program=PROGRAMS["maxtext-v6e"]), fast=True)
    with pytest.raises(UserError, match="offload 'norms' is not known"):
        step(offload=("norms",))
    words = ["plan", "train", "llama3.1-8b", "--tpu", "v6e-256", "--slices", "2", "--mesh", "fsdp=512"]
    with pytest.raises(UserError, match="axes over several slices are not planned"):
        CliRunner().invoke(podway, words, catch_exceptions=False)


@pytest.mark.parametrize("mesh", ["fsdp=16", "slices=2,fsdp=16", "slices=2,fsdp=*"])
def test_a_mesh_of_one_slice_or_of_all_is_the_same(mesh: str) -> None:
    words = ["plan", "train", "llama3.2-1b", "--tpu", "v6e-16", "--slices", "2", "--seq", "2048", "--batch", "256"]
    pages = [CliRunner().invoke(podway, [*words, "--mesh", text], catch_exceptions=False) for text in (mesh, "fsdp=*")]
    assert pages[0].output == pages[1].output and pages[0].exit_code == 0
    with pytest.raises(UserError, match="is for 4 slices, and --slices is 2"):
        CliRunner().invoke(podway, [*words, "--mesh", "slices=4,fsdp=16"], catch_exceptions=False)
