"""HBM of a step: the state is that of the real arrays, the rest follows the policy."""

import msgspec
import pytest

from podway.errors import UserError
from podway.model.families import find_model, known_models
from podway.model.layout import TRAIN_RULES, MeshShape, params_per_chip
from podway.model.params import count, params
from podway.plan.chips import device_of
from podway.plan.memory import GIB, adapter_params, factored_params, held_params, train_memory
from podway.plan.training import MAXTEXT_2023, PODWAY, REMAT, Adapters, Training
from podway.plan.working_set import misaligned

LIMIT = device_of("v6e").hbm_limit


@pytest.mark.parametrize("name", known_models())
def test_planned_parameters_are_those_of_the_layout(name: str) -> None:
    shape = known_models()[name]
    for fsdp in (1, 2, 3, 8, 24, 256):
        for expert in (1, 2, 4):
            for tensor in (1, 2, 8, 16):
                mesh = MeshShape(fsdp=fsdp, expert=expert, tensor=tensor)
                assert held_params(shape, fsdp, expert, tensor) == params_per_chip(shape, mesh, TRAIN_RULES)


@pytest.mark.parametrize(("model", "tensor", "per_chip"), [("64b", 1, 4), ("128b", 16, 2)])
def test_twice_the_batch_of_the_large_jobs_does_not_fit(model: str, tensor: int, per_chip: int) -> None:
    """The compiler says so too."""
    mesh = MeshShape(fsdp=256 // tensor, tensor=tensor)
    memory = train_memory(find_model(model), mesh, Training(seq=2048, batch=256 * per_chip), device_of("v5e").hbm_limit)
    assert not memory.fits
    assert memory.excess.startswith("OOM by ")


def test_remat_policies_keep_less_and_less() -> None:
    shape, mesh = find_model("llama3.1-8b"), MeshShape(fsdp=16)
    saved = [train_memory(shape, mesh, Training(seq=8192, batch=16, remat=r), LIMIT).saved for r in REMAT]
    assert saved == sorted(saved, reverse=True) and len(set(saved)) == len(saved)
    layer_inputs = 32 * 8192 * 4096 * 2
    assert saved[-1] == layer_inputs


def test_named_tensors_may_be_joined() -> None:
    shape, mesh = find_model("llama3.1-8b"), MeshShape(fsdp=16)
    joined = train_memory(shape, mesh, Training(seq=8192, batch=16, remat="qkv+context"), LIMIT).saved
    assert joined == 32 * 8192 * 2 * (4096 + (32 + 8 + 8 + 32) * 128)


def test_state_by_optimizer() -> None:
    shape, mesh = find_model("llama3.1-8b"), MeshShape(fsdp=16)
    held = held_params(shape, 16, 1, 1)
    adamw = train_memory(shape, mesh, Training(seq=128, batch=16), LIMIT)
    # float32 weights and their bfloat16 copy, two moments, bfloat16 gradients
    assert (adamw.weights, adamw.optimizer, adamw.gradients) == (6 * held, 8 * held, 2 * held)
    small = train_memory(shape, mesh, Training(seq=128, batch=16, moments="bfloat16", params="bfloat16"), LIMIT)
    assert (small.weights, small.optimizer) == (2 * held, 4 * held)
    factored = train_memory(shape, mesh, Training(seq=128, batch=16, optimizer="adafactor"), LIMIT)
    assert 0 < factored.optimizer < 0.02 * adamw.optimizer
    summed = train_memory(shape, mesh, Training(seq=128, batch=32, microbatches=2), LIMIT)
    assert summed.gradients == 6 * held  # the float32 sum beside the part that is added


def test_maxtext_keeps_no_copy_and_float32_gradients() -> None:
    shape, mesh = find_model("32b"), MeshShape(fsdp=256)
    held = held_params(shape, 256, 1, 1)
    memory = train_memory(shape, mesh, Training(seq=2048, batch=256, program=MAXTEXT_2023), LIMIT)
    assert memory.weights + memory.optimizer + memory.gradients == 16 * held


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix() -> None:
    shape = find_model("tiny-llama3")
    matrices = [p for p in params(shape) if sorted(p.dims)[-2:-1] >= [128]]
    assert not matrices  # nothing is as wide as 128 in two dimensions, so all of it is kept
    assert factored_params(shape, 1, 1, 1) == count(shape)
    assert factored_params(find_model("llama3.1-8b"), 1, 1, 1) < 0.01 * count(find_model("llama3.1-8b"))


def test_lora_freezes_the_base() -> None:
    shape, mesh = find_model("llama3.1-8b"), MeshShape(fsdp=8)
    wide = Training(seq=128, batch=8, adapters=Adapters(rank=16))
    narrow = Training(seq=128, batch=8, adapters=Adapters(rank=16, base="int8"))
    thin = adapter_params(shape, Adapters(rank=16))
    held = held_params(shape, 8, 1, 1)
    bf16, int8 = (train_memory(shape, mesh, t, LIMIT) for t in (wide, narrow))
    assert bf16.weights == 2 * held + 6 * thin
    ends = 2 * 128_256 * 4096 / 8 + 65 * 4096  # embeddings and norms stay bfloat16; norms are on every device
    assert int8.weights == held + ends + 6 * thin
    assert bf16.gradients == 2 * thin and bf16.optimizer == 8 * thin
    # q, o: 4096 + 4096; k, v: 4096 + 1024; whole on every device
    assert thin == 16 * 32 * (2 * 8192 + 2 * 5120)


def test_the_fuller_one_of_two_moments_counts() -> None:
    shape, mesh = find_model("llama3.1-8b"), MeshShape(fsdp=16)
    memory = train_memory(shape, mesh, Training(seq=8192, batch=16), LIMIT)
    kept = memory.weights + memory.optimizer + memory.saved
    assert memory.early == 0, "beside the logits there are no gradients of layers yet"
    assert memory.total == kept + max(memory.logits, memory.gradients + memory.temp)
    summed = train_memory(shape, mesh, Training(seq=8192, batch=32, microbatches=2), LIMIT)
    assert summed.early == pytest.approx(summed.gradients * 4 / 6), "but the sum over microbatches is"


def test_logits_are_cut_as_the_trainer_cuts_them() -> None:
    shape, mesh = find_model("qwen3-0.6b"), MeshShape(fsdp=8)
    v5e = device_of("v5e").hbm_limit
    cut = train_memory(shape, mesh, Training(seq=4096, batch=8), v5e).logits
    # 151,936 columns in float32: 512 tokens take 297 MiB, 1024 would take more than a 32nd of 16 GiB.
    chunk = 4 * 512 * 151_936
    assert cut == chunk + 151_936 * 1024 * (2 + 4) + 8 * 4096 * 1024
    (later,) = (
        train_memory(shape, mesh, Training(seq=4096, batch=8), v5e, device=device_of(name)).logits for name in ["tpu7x"]
    )
    assert later == cut + chunk / 2, "tpu7x writes their gradient down"


def test_an_output_matrix_that_is_gathered_in_another_tiling_takes_two_places() -> None:
    """3072 / 16 = 192 lanes of a tied matrix are no whole tiles, 2048 / 16 = 128 are; v5p gathers into the tiling that is used."""
    step, v6e = Training(seq=4096, batch=32), device_of("v6e")
    for model, d_model, twice in (("llama3.2-3b", 3072, 1), ("llama3.2-1b", 2048, 0)):
        shape, mesh = find_model(model), MeshShape(fsdp=16)
        there, elsewhere = (
            train_memory(shape, mesh, step, v6e.hbm_limit, device=device).logits for device in (v6e, device_of("v5p"))
        )
        assert there - elsewhere == twice * 2 * 128_256 * d_model


def test_the_gradient_of_the_output_matrix_waits_for_the_end_of_the_step() -> None:
    """On v6e, where it is summed last; elsewhere if it is the embedding's too. With little room left the compiler does not wait."""
    mesh, step = MeshShape(fsdp=16), Training(seq=8192, batch=32)
    shape = find_model("llama3.1-8b")
    v6e, v5p = (train_memory(shape, mesh, step, LIMIT, device=device_of(name)).temp for name in ("v6e", "v5p"))
    residuals = 2 * 16_384 * (2 * 128 * 32 - 0.25 * 2 * 14_336)
    assert v6e - v5p == pytest.approx(4 * 4096 * 128_256 + residuals)
    roomy = train_memory(shape, mesh, step, LIMIT, device=device_of("v6e"))
    tight = train_memory(shape, mesh, step, int(roomy.total / 0.9), device=device_of("v6e"))
    assert tight.total < roomy.total


def test_few_matrices_of_a_layer_exist_at_once() -> None:
    shape, step = find_model("64b"), Training(seq=2048, batch=128)
    memory = train_memory(shape, MeshShape(fsdp=64), step, LIMIT, device=device_of("v5p"))
    matrix = 2 * 10_240 * 32_768
    assert memory.temp < 4 * 10_240 * 32_768 + 3 * matrix + 2 * 4096 * (7 * 10_240 + 2 * 32_768)


def test_where_nothing_is_computed_again_gathered_weights_stay() -> None:
    shape, mesh = find_model("llama3.2-1b"), MeshShape(fsdp=8)
    training = Training(seq=2048, batch=8, remat="none")
    whole = 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192) * 2
    saved = train_memory(shape, mesh, training, LIMIT).saved
    alone = train_memory(shape, MeshShape(data=8), training, LIMIT).saved
    assert saved - alone == whole


def test_narrow_heads_fill_whole_lanes() -> None:
    shape, mesh = find_model("llama3.2-1b"), MeshShape(fsdp=8)  # 32 heads of 64
    kept, full = (
        train_memory(shape, mesh, Training(seq=2048, batch=8, remat=r), LIMIT) for r in ("save_context", "full")
    )
    assert kept.saved - full.saved == 16 * 2048 * 32 * 128 * 2


def test_shards_of_20_rows_are_misaligned_and_of_40_are_not() -> None:
    assert misaligned(find_model("16b"), MeshShape(fsdp=256))
    assert not misaligned(find_model("32b"), MeshShape(fsdp=256))
    assert not misaligned(find_model("16b"), MeshShape(fsdp=1))


def test_what_only_the_compiler_can_tell_is_neither_yes_nor_no() -> None:
    shape, mesh = find_model("llama3.1-8b"), MeshShape(fsdp=16)
    total = train_memory(shape, mesh, Training(seq=8192, batch=32), LIMIT).total
    verdicts = [
        train_memory(shape, mesh, Training(seq=8192, batch=32), int(total / share)).verdict
        for share in (0.99, 1.05, 1.2)
    ]
    assert verdicts == ["fits", "close", "does not fit"]


def test_a_step_that_offloads_holds_what_its_late_gradients_are_made_of() -> None:
    """The compiler gives the demo's step 23.59 GiB (docs/measurements/rehearsed-steps.json.gz)."""
    shape, mesh = find_model("llama3.2-1b"), MeshShape(fsdp=8)
    step = Training(seq=4096, batch=1024, microbatches=4, offload=("residual", "qkv", "context"))
    assert train_memory(shape, mesh, step, LIMIT).total / 2**30 == pytest.approx(23.59, rel=0.05)
    plain = Training(seq=4096, batch=256)
    late, early = (train_memory(shape, mesh, plain, LIMIT, device=device_of(name)).temp for name in ("tpu7x", "v5p"))
    assert late > early


def test_slices_that_share_the_state_keep_a_part_of_it() -> None:
    """Llama 3.2 1B on 2 x v5litepod-16: 3.27 GiB compiled with copies, 2.95 shared."""
    shape, mesh, device = find_model("llama3.2-1b"), MeshShape(slices=2, fsdp=16), device_of("v5e")
    copied, shared = (
        train_memory(shape, mesh, Training(seq=2048, batch=64, state_over_slices=one), device.hbm_limit, device=device)
        for one in (False, True)
    )
    assert copied.total / GIB == pytest.approx(3.27, rel=0.05) and shared.total / GIB == pytest.approx(2.95, rel=0.05)
    assert shared.optimizer == pytest.approx(copied.optimizer / 2, rel=0.01)
    with pytest.raises(UserError, match="share the state"):
        Training(seq=128, batch=1, state_over_slices=True, adapters=Adapters(rank=8))


def test_one_backward_kernel_writes_its_parts_of_dq() -> None:
    """Eight of the queries' size at 8192 tokens in blocks of 1024; beside two kernels there are none."""
    shape, mesh, device = find_model("llama3.1-70b"), MeshShape(fsdp=64), device_of("v5p")
    one, two = (
        train_memory(
            shape,
            mesh,
            Training(
                seq=8192, batch=64, remat="save_context", program=msgspec.structs.replace(PODWAY, attention_fused=fused)
            ),
            device.hbm_limit,
            device=device,
        ).temp
        for fused in (None, False)
    )
    queries = 8192 * shape.heads * shape.d_head * 2
    assert one - two == pytest.approx(3 * queries, rel=0.01)


def test_a_full_step_on_v6e_lets_no_gradient_wait() -> None:
    """Llama 3.1 70B, 128 x 8192, offloaded: 24.10 GiB compiled with the scheduler's flags, 28.2 without."""
    shape, mesh, device = find_model("llama3.1-70b"), MeshShape(fsdp=64), device_of("v6e")
    step = Training(seq=8192, batch=128, offload=("residual", "qkv", "context"))
    plain = msgspec.structs.replace(step, program=msgspec.structs.replace(PODWAY, reschedules=()))
    now, before = (train_memory(shape, mesh, one, device.hbm_limit, device=device).total / GIB for one in (step, plain))
    assert now == pytest.approx(24.10, rel=0.05) and before == pytest.approx(28.2, rel=0.05)
