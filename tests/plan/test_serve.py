"""Serving: what fits, how fast, how many."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.catalog.slices import all_slices, find_slice, slices_of
from podway.errors import UserError
from podway.model.families import find_model
from podway.model.planned_families import planned_models
from podway.plan.batching import Simulated, simulate
from podway.plan.engine_costs import Engine, Precision, cached_share, engine_of, kv_bytes_per_token
from podway.plan.evidence import serving_limit
from podway.plan.published_rows import rows_of
from podway.plan.serve import (
    Load,
    ServePlan,
    evaluate_serve,
    search_serve,
    serve_notes,
    step_of,
    weights_per_device,
)

LLAMA8, LLAMA70 = find_model("llama3.1-8b"), find_model("llama3.1-70b")
V6E8 = find_slice("v6e-8")
LOAD = Load(prompt=1000, output=250, rate=4.0)


def planned(rate: float, **others: float) -> ServePlan:
    plan = evaluate_serve(LLAMA70, V6E8, 8, Load(prompt=1000, output=250, rate=rate, **others), Precision())
    assert isinstance(plan, ServePlan), plan
    return plan


def test_bytes_are_those_of_the_arithmetic() -> None:
    assert kv_bytes_per_token(LLAMA8, 1, "bfloat16") == 128 * 1024  # facts: 128 KiB a token
    assert kv_bytes_per_token(LLAMA8, 8, "int8") == 8 * 1024
    assert kv_bytes_per_token(LLAMA70, 16, "bfloat16") == 80 * 2 * 128 * 2  # 8 heads repeated over 16 chips: one each
    assert weights_per_device(LLAMA8, 1, "bfloat16") == pytest.approx(16.06e9, rel=0.001)


def test_int8_is_for_the_matrices_of_layers() -> None:
    half = weights_per_device(LLAMA8, 1, "bfloat16") - weights_per_device(LLAMA8, 1, "int8")
    assert half == pytest.approx(6.98e9, rel=0.001)  # all but the embeddings
    mixture = find_model("mixtral-8x7b")
    saved = weights_per_device(mixture, 1, "bfloat16") - weights_per_device(mixture, 1, "int8")
    assert saved < 0.05 * weights_per_device(mixture, 1, "bfloat16")  # experts stay as they are


def test_budget_is_that_of_the_engine() -> None:
    from podway.model.layout import MeshShape
    from podway.plan.serve import HBM_FOR_SERVING, scratch_per_device
    from podway.serve.build import Options, budget

    for shape, tensor in ((LLAMA8, 1), (LLAMA8, 8), (LLAMA70, 8), (find_model("qwen3-30b-a3b"), 4)):
        for stored, option in (("bfloat16", "none"), ("int8", "int8")):
            limit = 31 * 2**30
            options = Options(quantize=option, backend="tpu", dtype="bfloat16", max_len=8192)
            engine, _ = budget(shape, options, MeshShape(tensor=tensor), limit)
            weights = weights_per_device(shape, tensor, stored)
            room = limit * HBM_FOR_SERVING - weights - scratch_per_device(shape, tensor)
            assert weights == pytest.approx(engine.weights, rel=0.001)
            assert room / kv_bytes_per_token(shape, tensor, "bfloat16") == pytest.approx(engine.kv_tokens, rel=0.01)


def test_windowed_layers_forget() -> None:
    assert cached_share(LLAMA8, 8192) == 1.0
    gemma = find_model("gemma3-27b")
    assert cached_share(gemma, 1024) == 1.0
    assert cached_share(gemma, 32_768) < 0.25


def test_a_decode_step_reads_the_weights_and_the_cache() -> None:
    load = Load(prompt=1024, output=2, rate=1)
    alone = step_of(LLAMA8, find_slice("v6e-1"), 1, load, Precision(), 1, bare=True)
    assert alone == pytest.approx(7.5e9 * 2 / (1.638e12 * 0.87), rel=0.02)  # embeddings are looked up, not read
    many = step_of(LLAMA8, find_slice("v6e-1"), 1, load, Precision(), 64, bare=True)
    assert many - alone == pytest.approx(63 * 1025 * 128 * 1024 / (1.638e12 * 0.87), rel=0.02)


def test_more_requests_need_more_replicas_and_wait_longer() -> None:
    few, some, many = planned(0.5), planned(4), planned(40)
    assert few.replicas == some.replicas == 1 < many.replicas
    assert few.batch < some.batch and few.tpot < some.tpot
    assert few.dollars_per_million is not None and many.dollars_per_million is not None
    assert many.dollars_per_million < few.dollars_per_million


def test_a_promise_that_cannot_be_kept_is_a_reason() -> None:
    late = evaluate_serve(LLAMA70, V6E8, 8, Load(prompt=1000, output=250, rate=4, ttft=0.01), Precision())
    assert isinstance(late, str) and late.startswith("TTFT of ")
    slow = evaluate_serve(LLAMA70, V6E8, 8, Load(prompt=1000, output=250, rate=4, tpot=0.001), Precision())
    assert isinstance(slow, str) and slow.startswith("TPOT of ")


def test_what_does_not_fit_is_a_reason() -> None:
    assert "weights" in str(evaluate_serve(LLAMA70, V6E8, 2, LOAD, Precision()))
    long = Load(prompt=120_000, output=1000, rate=1)
    full = evaluate_serve(LLAMA8, find_slice("v5e-1"), 1, long, Precision(weights="int8"))
    assert "KV cache of one request" in str(full)


def test_search_ranks_by_cost_and_explains_the_rest() -> None:
    plans, rejected = search_serve(LLAMA70, LOAD, all_slices(), Precision())
    priced = [plan.dollars_per_hour for plan in plans if plan.dollars_per_hour is not None]
    assert priced == sorted(priced) and plans[-1].dollars_per_hour is None
    assert ("v5litepod-1", "OOM") in {(name, reason[:3]) for name, reason in rejected}
    small, _ = search_serve(LLAMA8, LOAD, slices_of("v5e"), Precision(weights="int8", kv="int8"))
    assert small[0].slice.accelerator_type == "v5litepod-1"


@pytest.mark.parametrize("wrong", [{"prompt": 0}, {"output": 0}, {"rate": 0.0}, {"ttft": -1.0}])
def test_impossible_loads(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Load(**({"prompt": 10, "output": 10, "rate": 1.0} | wrong))  # type: ignore[arg-type]


@settings(max_examples=40)
@given(
    model=st.sampled_from(["llama3.2-1b", "llama3.1-70b", "mixtral-8x7b", "gemma3-4b", "qwen3-30b-a3b"]),
    slice=st.sampled_from([s.accelerator_type for s in all_slices() if s.chips <= 64][::3]),
    prompt=st.integers(1, 20_000),
    output=st.integers(1, 5_000),
    rate=st.floats(0.001, 500),
    weights=st.sampled_from(["bfloat16", "int8"]),
)
def test_any_load_gets_a_plan_or_a_reason(
    model: str, slice: str, prompt: int, output: int, rate: float, weights: str
) -> None:
    load, precision = Load(prompt=prompt, output=output, rate=rate), Precision(weights=weights)
    plans, rejected = search_serve(find_model(model), load, [find_slice(slice)], precision)
    for plan in plans:
        assert plan.tpot >= plan.tpot_limit > 0 and plan.ttft > 0
        assert plan.replicas * plan.capacity >= rate
        assert plan.kv_tokens >= 1 and plan.weights_bytes < plan.hbm_limit
        assert plan.slices * plan.per_slice >= plan.replicas
    assert plans or rejected


def test_the_limit_is_what_no_engine_beats() -> None:
    for row in (row for row in rows_of("serving") if row["tpot_ms"]):
        assert serving_limit(row) < float(row["tpot_ms"]), row["row"]


def test_a_true_bound_is_below_every_step() -> None:
    for tensor in (1, 2, 8):
        engine = engine_of(LLAMA8, V6E8, tensor, Precision(), weights_per_device(LLAMA8, tensor, "bfloat16"))
        for batch in (1, 16, 256):
            assert engine.limit_seconds(batch, 1000 * batch) < engine.seconds(batch, 1000 * batch)


def engine() -> Engine:
    return engine_of(LLAMA8, find_slice("v6e-1"), 1, Precision(), weights_per_device(LLAMA8, 1, "bfloat16"))


def run(rate: float, **changes: int) -> Simulated:
    given = {"prompt": 1000, "output": 100, "slots": 64, "kv_tokens": 80_000, "chunk": 2048} | changes
    return simulate(engine(), rate=rate, requests=150, **given)  # type: ignore[arg-type]


def test_a_simulation_is_the_same_twice_and_waits_grow_with_the_load() -> None:
    assert run(2.0) == run(2.0)
    quiet, busy = run(0.5), run(8.0)
    assert quiet.ttft[0] < busy.ttft[0] and quiet.tpot[0] < busy.tpot[0] and quiet.batch < busy.batch
    for one in (quiet, busy):
        assert one.ttft[0] <= one.ttft[1] <= one.ttft[2] and one.tpot[0] <= one.tpot[1] <= one.tpot[2]


def test_a_request_alone_waits_for_its_prompt_and_its_steps() -> None:
    alone = simulate(
        engine(), rate=1e-3, prompt=1000, output=100, slots=64, kv_tokens=80_000, chunk=2048, fixed=True, requests=5
    )
    assert alone.ttft[0] == pytest.approx(engine().seconds(0, 0, 1000, 1000))
    assert alone.tpot[0] == pytest.approx(engine().seconds(1, 1050), rel=0.01)


def test_throughput_ends_at_the_capacity_of_the_batch() -> None:
    flooded = run(1000.0)
    assert flooded.output_tokens_per_second < run(1e9).output_tokens_per_second * 1.1
    assert run(1000.0, slots=4).output_tokens_per_second < flooded.output_tokens_per_second
    assert run(1000.0, kv_tokens=5_000).output_tokens_per_second < flooded.output_tokens_per_second


def test_a_target_is_kept_by_more_replicas_and_the_cheapest_slice_wins() -> None:
    load = Load(prompt=1000, output=250, rate=20.0, ttft=1.0, tpot=0.05)
    plans, _ = search_serve(LLAMA70, load, slices_of("v6e"), Precision("auto", "auto"), simulate_best=True)
    best = plans[0]
    assert best.simulated is not None
    assert best.simulated.ttft[2] <= 1.0 and best.simulated.tpot[2] <= 0.05
    assert best.precision == Precision("int8", "fp8"), "the engine reads no int8 cache on a TPU"
    assert best.dollars_per_hour == min(plan.dollars_per_hour or 1e9 for plan in plans)
    strict, _ = search_serve(
        LLAMA70,
        Load(prompt=1000, output=250, rate=20.0, ttft=0.15),
        [V6E8],
        Precision("int8", "fp8"),
        simulate_best=True,
    )
    assert all(plan.replicas >= best.replicas for plan in strict)


def test_an_int8_cache_is_only_planned_where_it_is_asked_for() -> None:
    load = Load(prompt=1000, output=250, rate=1.0)
    plans, _ = search_serve(LLAMA8, load, slices_of("v6e"), Precision("auto", "auto"))
    assert plans and all(plan.precision.kv in ("bfloat16", "fp8") for plan in plans)
    asked, _ = search_serve(LLAMA8, load, slices_of("v6e"), Precision("int8", "int8"))
    assert asked and "refuses an int8 cache" in serve_notes(LLAMA8, Precision("int8", "int8"))[0]


# Maverick's 40 heads split 8 ways at most, and 8 chips do not hold it.
@pytest.mark.parametrize("name", [name for name in planned_models() if name != "llama4-maverick"])
def test_models_that_are_only_planned_can_be_served_on_paper(name: str) -> None:
    shape = planned_models()[name]
    plans, _ = search_serve(
        shape, Load(prompt=1000, output=250, rate=1.0), slices_of("v5p"), Precision("bfloat16", "bfloat16")
    )
    assert plans and all(plan.tpot >= plan.tpot_limit > 0 and plan.kv_tokens > 0 for plan in plans)
    assert "planned, not served" in serve_notes(shape, Precision())[0]


def test_a_latent_cache_is_small() -> None:
    """DeepSeek V3: 61 layers of 576 numbers, on every device of a group whole."""
    assert kv_bytes_per_token(planned_models()["deepseek-v3"], 8, "bfloat16") == 61 * 576 * 2
