"""A step by part: what it must do whatever the constants are."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.catalog.slices import find_slice
from podway.model.families import find_model
from podway.model.flops import flops_per_token
from podway.model.layout import MeshShape
from podway.model.planned_families import planned_models
from podway.plan.chips import device_of
from podway.plan.network import place
from podway.plan.plans import evaluate
from podway.plan.products import layer_products, needed_again
from podway.plan.steptime import step_time
from podway.plan.training import MAXTEXT_2023, Adapters, Training

V5E = find_slice("v5e-256")


def test_parts_add_up_and_no_time_is_negative() -> None:
    plan = evaluate(find_model("128b"), V5E, MeshShape(slices=4, fsdp=16, tensor=16), Training(seq=2048, batch=1024))
    assert sum(plan.time.parts.values()) == pytest.approx(plan.time.total)
    assert min(plan.time.parts.values()) >= 0


@settings(max_examples=40)
@given(
    model=st.sampled_from(["llama3.1-8b", "32b", "mixtral-8x7b", "gemma2-9b", "qwen3-30b-a3b"]),
    slice=st.sampled_from(["v4-128", "v5e-64", "v5p-128", "v6e-64", "tpu7x-64"]),
    tensor=st.sampled_from([1, 2, 4]),
    rows=st.integers(1, 4),
    remat=st.sampled_from(["none", "minimal", "save_all_but_mlp", "save_context", "full"]),
)
def test_no_step_is_faster_than_its_flops(model: str, slice: str, tensor: int, rows: int, remat: str) -> None:
    shape, found = find_model(model), find_slice(slice)
    groups = found.devices // tensor
    training = Training(seq=4096, batch=groups * rows, remat=remat)
    plan = evaluate(shape, found, MeshShape(fsdp=groups, tensor=tensor), training)
    assert 0 < plan.mfu < 1
    assert plan.model_flops == flops_per_token(shape, 4096) * training.tokens


def test_computing_more_again_takes_longer() -> None:
    shape, mesh = find_model("llama3.1-8b"), MeshShape(fsdp=256)
    times = [
        evaluate(shape, V5E, mesh, Training(seq=4096, batch=256, remat=remat)).time.total
        for remat in ("none", "minimal", "save_all_but_mlp", "save_attention", "full")
    ]
    assert times == sorted(times) and len(set(times)) == 5


def test_what_is_computed_again() -> None:
    full = Training(seq=1, batch=1)
    assert needed_again(find_model("32b"), full) >= {"q", "k", "v", "up"}
    assert not needed_again(find_model("32b"), full) & {"o", "down"}  # a parallel block ends in both
    assert "o" in needed_again(find_model("llama3.1-8b"), full)  # the MLP stands on attention
    assert "down" not in needed_again(find_model("llama3.1-8b"), full)
    assert "down" in needed_again(find_model("gemma2-9b"), full)  # a norm stands on it
    assert not needed_again(find_model("gemma2-9b"), Training(seq=1, batch=1, remat="none"))


def test_full_remat_of_the_32b_job_costs_7_2_flops_a_parameter() -> None:
    shape = find_model("32b")
    products = layer_products(shape, MeshShape())
    again = needed_again(shape, Training(seq=1, batch=1))
    flops = sum(p.flops(1) * (4 if p.name in again else 3) for p in products)
    assert flops / sum(p.weights for p in products) == pytest.approx(7.17, abs=0.02)


def test_experts_multiply_only_the_tokens_sent_to_them() -> None:
    shape = find_model("mixtral-8x7b")
    for expert in (1, 4):
        wide = [p for p in layer_products(shape, MeshShape(expert=expert)) if p.name == "experts_up"]
        assert wide[0].flops(8) == 2 * 8 * 2 * 4096 * 14336  # 2 of 8 experts for each of 8 tokens


def test_gathers_hide_behind_products_and_reductions_do_not() -> None:
    plan = evaluate(find_model("64b"), V5E, MeshShape(fsdp=256), Training(seq=2048, batch=512, program=MAXTEXT_2023))
    gather, reduce = plan.time.traffic
    assert gather.direction == "gather" and gather.exposed < 0.1 * gather.seconds
    assert reduce.exposed == reduce.seconds
    # float32 and all-reduced: four times the bytes of one bfloat16 gather, which happens twice
    assert reduce.seconds == pytest.approx(2 * gather.seconds, rel=0.01)


def test_scattering_bfloat16_ring_by_ring_takes_half_of_all_reducing_float32() -> None:
    shape, mesh = find_model("64b"), MeshShape(fsdp=256)
    ours = evaluate(shape, V5E, mesh, Training(seq=2048, batch=512)).time.traffic[1]
    theirs = evaluate(shape, V5E, mesh, Training(seq=2048, batch=512, program=MAXTEXT_2023)).time.traffic[1]
    assert ours.seconds == pytest.approx(theirs.seconds / 2, rel=0.01)


def test_misaligned_shards_cost_copies() -> None:
    theirs = Training(seq=2048, batch=1536, program=MAXTEXT_2023)
    slow = evaluate(find_model("16b"), V5E, MeshShape(fsdp=256), theirs).time
    even = evaluate(find_model("32b"), V5E, MeshShape(fsdp=256), msgspec.structs.replace(theirs, batch=1024)).time
    assert slow.relayout > 0.5 and even.relayout == 0
    ours = evaluate(find_model("16b"), V5E, MeshShape(fsdp=256), Training(seq=2048, batch=1536)).time
    assert ours.relayout == 0  # Podway's compiled program copies nothing there


def test_more_slices_lose_a_little_each() -> None:
    shape = find_model("32b")
    mfus = [
        evaluate(shape, V5E, MeshShape(slices=n, fsdp=256), Training(seq=2048, batch=1024 * n)).mfu
        for n in (1, 2, 8, 32)
    ]
    assert mfus == sorted(mfus, reverse=True) and mfus[-1] > 0.8 * mfus[0]


def test_lora_skips_the_gradients_of_matrices() -> None:
    shape, mesh = find_model("llama3.1-8b"), MeshShape(fsdp=256)
    whole = evaluate(shape, V5E, mesh, Training(seq=2048, batch=256))
    lora = evaluate(shape, V5E, mesh, Training(seq=2048, batch=256, adapters=Adapters(rank=16)))
    assert lora.time.matrix < 0.8 * whole.time.matrix
    assert lora.model_flops == pytest.approx(whole.model_flops * 2 / 3)


def test_long_windows_cost_less_than_full_attention() -> None:
    gemma, device = find_model("gemma3-4b"), device_of("v5e")
    mesh = MeshShape(fsdp=256)
    short, long = (
        step_time(gemma, mesh, Training(seq=seq, batch=256), device, place(mesh, V5E)).attention / seq
        for seq in (4096, 32768)
    )
    assert long < 3 * short  # five of six layers see 1024 tokens, however long the sequence


def test_sums_over_a_tensor_group_are_all_reduced() -> None:
    """Twice the bytes of a scatter in the programs of Podway's trainer; along an axis of v5e, rings of one link each."""
    shape, slice = find_model("llama3.2-1b"), find_slice("v6e-16")
    plan = evaluate(shape, slice, MeshShape(fsdp=8, tensor=2), Training(seq=2048, batch=32))
    moved = {(one.axis, one.direction): one.seconds for one in plan.time.traffic}
    assert moved["tensor", "reduce"] > 1.5 * moved["tensor", "gather"]
    v5e = evaluate(shape, find_slice("v5litepod-16"), MeshShape(fsdp=4, tensor=4), Training(seq=2048, batch=32))
    ringed = {(one.axis, one.direction): one.seconds for one in v5e.time.traffic}
    assert ringed["tensor", "gather"] > ringed["tensor", "reduce"]


@pytest.mark.parametrize("name", planned_models())
def test_models_of_several_kinds_of_layers(name: str) -> None:
    shape, slice = planned_models()[name], find_slice("v5p-512")
    plan = evaluate(shape, slice, MeshShape(fsdp=slice.devices), Training(seq=4096, batch=slice.devices))
    assert 0.02 < plan.mfu < 0.9 and plan.memory.total > 0
    assert sum(plan.time.parts.values()) == pytest.approx(plan.time.total)
    assert plan.model_flops == flops_per_token(shape, 4096) * plan.training.tokens
