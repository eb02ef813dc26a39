"""Ranking, fitting, and the reasons for what is left out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.catalog.prices import price_of
from podway.catalog.slices import all_slices, find_slice, slices_of
from podway.errors import UserError
from podway.model.families import find_model
from podway.model.layout import MeshShape
from podway.plan.finetune import DEFAULT_SEQUENCES, finetune_template
from podway.plan.picking import Needs, pick_slice, slices_named
from podway.plan.plans import notes_on
from podway.plan.search import ROOM, PlanOptions, deadline_met, plan_train, search_train
from podway.plan.serve import Load
from podway.plan.training import REMAT, Adapters, Training

LLAMA = find_model("llama3.1-8b")


def test_every_plan_fits_with_room_and_divides_its_batch() -> None:
    search = search_train(LLAMA, PlanOptions(seq=8192), all_slices())
    assert len(search.plans) > 200
    for plan in search.plans:
        assert plan.memory.total <= ROOM * plan.memory.limit
        assert plan.training.rows_per_device(plan.mesh) >= 1
        assert plan.mesh.chips == plan.slice.devices
        assert 0 < plan.mfu < 1
    kinds = {plan.slice.accelerator_type for plan in search.plans}
    left_out = {one.slice for one in search.rejected}
    assert kinds.isdisjoint(left_out)
    assert kinds | left_out == {slice.accelerator_type for slice in all_slices()}


def test_cheapest_token_first_and_unknown_prices_last() -> None:
    costs = [plan.dollars_per_million_tokens for plan in search_train(LLAMA, PlanOptions(seq=8192), all_slices()).plans]
    known = [cost for cost in costs if cost is not None]
    assert known == sorted(known) and len(known) < len(costs)
    assert all(cost is None for cost in costs[len(known) :])


def test_one_slice_shows_every_mesh_fastest_first() -> None:
    search = search_train(LLAMA, PlanOptions(seq=8192), [find_slice("v6e-64")])
    rates = [plan.tokens_per_second for plan in search.plans]
    assert len(rates) > 5 and rates == sorted(rates, reverse=True)
    assert len({str(plan.mesh) for plan in search.plans}) > 2


def test_a_deadline_is_met_as_cheaply_as_possible() -> None:
    options = PlanOptions(seq=8192, tokens=15e12, days=30)
    search = search_train(LLAMA, options, [*slices_of("v6e"), *slices_of("v5p")[:12]])
    best = search.plans[0]
    assert deadline_met(best, options) and best.hours(15e12) <= 30 * 24
    in_time = [plan for plan in search.plans if deadline_met(plan, options)]
    assert best.dollars(15e12) == min(plan.dollars(15e12) or float("inf") for plan in in_time)
    assert best.slices > 1  # no single v6e slice is fast enough


def test_a_budget_buys_the_fastest() -> None:
    options = PlanOptions(seq=8192, tokens=1e12, budget=150e3)
    search = search_train(LLAMA, options, all_slices())
    best = search.plans[0]
    affordable = [plan for plan in search.plans if deadline_met(plan, options)]
    assert best.hours(1e12) == min(plan.hours(1e12) for plan in affordable)


def test_reasons_name_the_missing_memory() -> None:
    search = search_train(LLAMA, PlanOptions(seq=8192), slices_of("v5e"))
    reasons = {one.slice: one.reason for one in search.rejected}
    assert reasons["v5litepod-1"].startswith("OOM by ") and "weights and optimizer" in reasons["v5litepod-1"]
    assert "mostly" in reasons["v5litepod-8"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"days": 3.0}, "needs a number of tokens"),
        ({"tokens": -1.0}, "tokens is -1"),
        ({"remat": "some"}, "remat 'some' is not known"),
        ({"slices": 0}, "slices is 0"),
    ],
)
def test_nonsense_is_refused_at_once(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PlanOptions(seq=8192, **options)  # type: ignore[arg-type]


def test_a_model_that_fits_nowhere_says_what_came_closest() -> None:
    with pytest.raises(UserError, match=r"fits on none of 8 slices; closest is v6e-256: OOM by") as caught:
        plan_train(find_model("llama3.1-405b"), PlanOptions(seq=8192), slices_of("v6e"))
    assert "--slices" in caught.value.hint


def test_a_given_configuration_is_answered_as_it_is() -> None:
    mesh = MeshShape(fsdp=16, tensor=16)
    options = PlanOptions(seq=2048, batch=256, mesh=mesh, microbatches=1, remat="full")
    (plan,) = search_train(find_model("64b"), options, [find_slice("v5e-256")]).plans
    assert (plan.mesh.fsdp, plan.mesh.tensor, plan.training.microbatches) == (16, 16, 1)
    with pytest.raises(UserError, match="does not divide into 3 microbatches"):
        given = PlanOptions(seq=2048, batch=16, mesh=MeshShape(fsdp=8), microbatches=3)
        plan_train(LLAMA, given, [find_slice("v6e-8")])


def test_a_tile_is_kept() -> None:
    search = search_train(LLAMA, PlanOptions(seq=8192, tile=(4, 2, 1)), [find_slice("v4-512")])
    assert {plan.mesh.tile for plan in search.plans} == {(4, 2, 1)}
    with pytest.raises(UserError, match="does not divide the 4x8x8"):
        search_train(LLAMA, PlanOptions(seq=8192, tile=(8, 1, 1)), [find_slice("v4-512")])


def test_long_sequences_are_split_where_there_are_fewer_than_chips() -> None:
    search = search_train(LLAMA, PlanOptions(seq=131_072, batch=8), [find_slice("v6e-256")])
    assert search.plans[0].mesh.context > 1


def test_a_sequence_that_no_kernel_can_cut_is_said_to_be_that() -> None:
    with pytest.raises(UserError, match="1000 tokens cannot be cut into the attention kernel's blocks") as caught:
        search_train(LLAMA, PlanOptions(seq=1000, batch=512), [find_slice("v6e-16")])
    assert "--seq 1024" in caught.value.hint


def test_hints_leave_out_what_is_given() -> None:
    template = Training(seq=1, batch=1, optimizer="adafactor")
    with pytest.raises(UserError) as caught:
        options = PlanOptions(seq=8192, batch=1, remat="full", template=template)
        plan_train(find_model("llama3.1-70b"), options, [find_slice("v6e-8")])
    for word in ("adafactor", "--remat full", "--opt-dtype", "smaller --batch"):
        assert word not in caught.value.hint


def test_hints_name_only_what_helps() -> None:
    """Copies of weights that do not fit by themselves help nobody, and neither does a smaller step."""
    with pytest.raises(UserError, match="in weights and optimizer state alone") as caught:
        plan_train(find_model("llama3.1-70b"), PlanOptions(seq=8192, batch=512), [find_slice("v5e-16")])
    assert "--slices" not in caught.value.hint and "--batch" not in caught.value.hint
    with pytest.raises(UserError) as caught:  # 509 is a prime: no weights can be split over fsdp
        plan_train(LLAMA, PlanOptions(seq=1024, batch=509), [find_slice("v5e-8")])
    assert "a --batch that 8 divides" in caught.value.hint


def test_slices_without_multislice_are_not_joined() -> None:
    search = search_train(LLAMA, PlanOptions(seq=8192, slices=2), [find_slice("v3-128")])
    assert not search.plans and "cannot be joined" in search.rejected[0].reason


def test_policies_are_those_of_the_trainer() -> None:
    from podway.train.remat import POLICIES

    assert {name: saved for name, saved in REMAT.items() if name != "none"} == POLICIES


def test_adapters_are_those_of_the_trainer() -> None:
    from podway.train.config import LoraConfig

    assert Adapters(rank=1).targets == LoraConfig().targets


@settings(max_examples=30)
@given(
    model=st.sampled_from(["llama3.2-1b", "llama3.1-8b", "qwen3-30b-a3b", "gemma2-9b", "16b", "tiny-llama3"]),
    slice=st.sampled_from([s.accelerator_type for s in all_slices()[::5]]),
    seq=st.integers(1, 40_000),
    batch=st.none() | st.integers(1, 3000),
    microbatches=st.none() | st.integers(1, 40),
    slices=st.none() | st.integers(1, 40),
)
def test_any_request_gets_plans_or_one_clear_line(
    model: str, slice: str, seq: int, batch: int | None, microbatches: int | None, slices: int | None
) -> None:
    options = PlanOptions(seq=seq, batch=batch, microbatches=microbatches, slices=slices)
    try:
        plans = plan_train(find_model(model), options, [find_slice(slice)]).plans
    except UserError as error:
        assert "\n" not in error.what and error.hint
        return
    for plan in plans:
        assert plan.memory.fits and plan.time.total > 0
        assert batch is None or plan.training.batch == batch
        assert microbatches is None or plan.training.microbatches == microbatches
        assert plan.slices == (slices or 1)


def test_a_rejected_slice_says_why() -> None:
    assert search_train(LLAMA, PlanOptions(seq=8192), [find_slice("v6e-16")]).plans
    (rejected,) = search_train(LLAMA, PlanOptions(seq=8192), [find_slice("v5e-4")]).rejected
    assert rejected.reason.startswith("OOM by")


def test_notes_warn_of_what_is_not_split() -> None:
    mesh = MeshShape(fsdp=16, tensor=16)
    options = PlanOptions(seq=2048, batch=256, mesh=mesh, microbatches=1, remat="full")
    (plan,) = search_train(find_model("llama3.1-70b"), options, [find_slice("v5e-256")]).plans
    assert any(
        "kv_heads 8 does not divide over tensor=16" in note for note in notes_on(find_model("llama3.1-70b"), plan)
    )


def test_finetuning_needs_less_than_training() -> None:
    slices = slices_of("v5e")
    least = {}
    for name, template in {
        "all": finetune_template(rank=None, int8_base=False),
        "lora": finetune_template(rank=16, int8_base=False),
        "int8": finetune_template(rank=16, int8_base=True),
    }.items():
        search = search_train(LLAMA, PlanOptions(seq=2048, batch=DEFAULT_SEQUENCES, template=template), slices)
        least[name] = min(plan.chips for plan in search.plans)
    assert least["int8"] < least["lora"] < least["all"]
    with pytest.raises(UserError, match="int8 weights cannot be trained"):
        finetune_template(rank=None, int8_base=True)
    with pytest.raises(UserError, match="LoRA rank is 0"):
        Training(seq=1, batch=1, adapters=Adapters(rank=0))


def test_auto_takes_the_cheapest_slice_that_fits() -> None:
    chosen = pick_slice(Needs(model="llama3.1-8b", tpu="v6e"))
    assert chosen.accelerator_type == "v6e-8"
    served = pick_slice(
        Needs(model="llama3.1-8b", kind="serve", tpu="v5e", load=Load(prompt=1000, output=200, rate=0.5))
    )
    assert served.accelerator_type == "v5litepod-4"
    tuned = pick_slice(Needs(model="llama3.1-8b", kind="finetune", tpu="any", seq=2048, adapters=Adapters(rank=16)))
    assert (price_of(tuned) or 0) < (price_of(find_slice("v6e-8")) or 0)
    with pytest.raises(UserError, match="does not fit on v5litepod-1"):
        pick_slice(Needs(model="llama3.1-70b", tpu="v5e-1"))


def test_words_for_many_slices() -> None:
    assert slices_named("any") == all_slices()
    assert {s.generation for s in slices_named("Trillium")} == {"v6e"}
    assert [s.accelerator_type for s in slices_named("v5e-8")] == ["v5litepod-8"]
