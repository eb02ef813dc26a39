"""How long a program takes: the interval, what overlaps, and links that are shared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.catalog.slices import find_slice
from podway.plan.kernels import STEP_CYCLES, kernel_of
from podway.rehearse.fabric import Fabric
from podway.rehearse.program import Attention, Exchange, Op, Program
from podway.rehearse.timeline import estimate

V5E = Fabric(find_slice("v5litepod-256"))
PEAK = V5E.device.peak_bf16
GATHER = Exchange(kind="all-gather", moved=1e9, box=(16, 16), stride=(1, 1))


def run(*ops: Op, complete: bool = False) -> float:
    return estimate(Program(ops=ops, complete=complete), V5E).point


def product(seconds: float, **more: int | str) -> Op:
    """A product that takes so long at the rate that large products reach."""
    return Op(name="dot", kind="matrix", flops=seconds * V5E.device.matrix_rate, **more)  # type: ignore[arg-type]


def test_products_of_bytes_have_a_rate_of_their_own() -> None:
    plain, quick = product(1.0), product(1.0, dtype="int8")
    assert run(plain) / run(quick) == pytest.approx(V5E.device.peak_int8 / PEAK)
    assert run(product(1.0, dtype="fp8")) == run(plain), "v5e has no mode for it"


numbers = st.floats(min_value=0, max_value=1e15, allow_nan=False)
plain_ops = st.builds(
    Op,
    name=st.just("op"),
    kind=st.sampled_from(["matrix", "memory"]),
    flops=st.one_of(st.just(0.0), numbers),
    bytes=st.floats(min_value=0, max_value=1e11),
    cycles=st.one_of(st.none(), st.integers(min_value=1, max_value=10**9)),
)
exchanges = st.builds(
    Op,
    name=st.sampled_from(["a", "b"]),
    kind=st.just("collective"),
    exchange=st.builds(
        Exchange,
        kind=st.sampled_from(["all-gather", "all-reduce", "reduce-scatter", "all-to-all"]),
        moved=st.floats(min_value=0, max_value=1e10),
        box=st.sampled_from([(16, 16), (16, 1), (1, 16), (4, 4)]),
        stride=st.just((1, 1)),
    ),
    starts=st.booleans(),
)
waits = st.builds(Op, name=st.just("w"), kind=st.just("wait"), waits_for=st.sampled_from(["a", "b", "none"]))
blocks = st.lists(st.one_of(plain_ops, exchanges, waits), max_size=8).map(tuple)
looped = st.builds(
    Op, name=st.just("l"), kind=st.just("loop"), turns=st.integers(0, 50), blocks=blocks.map(lambda b: (b,))
)


@given(ops=st.lists(st.one_of(plain_ops, exchanges, waits, looped), max_size=10).map(tuple), complete=st.booleans())
def test_the_point_lies_in_the_interval(ops: tuple[Op, ...], complete: bool) -> None:
    found = estimate(Program(ops=ops, complete=complete), V5E)
    assert 0 <= found.low <= found.point * (1 + 1e-9)
    assert found.point <= found.high * (1 + 1e-9)
    assert sum(found.parts.values()) == pytest.approx(found.point, rel=1e-6, abs=1e-12)


@given(ops=blocks, turns=st.integers(0, 100))
def test_a_loop_is_its_body_times_its_turns(ops: tuple[Op, ...], turns: int) -> None:
    loop = Op(name="l", kind="loop", turns=turns, blocks=(ops,))
    assert run(loop) == pytest.approx(turns * run(*ops), rel=1e-9)


def test_what_runs_beside_a_product_costs_nothing_until_it_takes_longer() -> None:
    alone = V5E.seconds(GATHER)
    start = Op(name="g", kind="collective", exchange=GATHER, starts=True)
    done = Op(name="d", kind="wait", waits_for="g")
    assert run(start, product(2 * alone), done) == pytest.approx(2 * alone)
    assert run(start, product(alone / 2), done) == pytest.approx(alone)
    waited_for = Op(name="g", kind="collective", exchange=GATHER)
    assert run(waited_for, product(alone)) == pytest.approx(2 * alone)


def test_two_transfers_share_a_link_or_not() -> None:
    def both(first: tuple[int, int], second: tuple[int, int]) -> float:
        ops = [
            Op(name=name, kind="collective", starts=True,
               exchange=Exchange(kind="collective-permute", moved=1e9, hops=1, lane=lane))
            for name, lane in (("a", first), ("b", second))
        ]  # fmt: skip
        waits = [Op(name=f"{n}-done", kind="wait", waits_for=n) for n in ("a", "b")]
        return run(*ops, *waits)

    one = 1e9 / V5E.device.link_bandwidth
    assert both((0, 0), (0, 1)) == pytest.approx(one), "the two directions of an axis"
    assert both((0, 0), (1, 0)) == pytest.approx(one), "two axes"
    assert both((0, 0), (0, 0)) == pytest.approx(2 * one)


def test_cycles_of_the_compiler_bound_the_estimate_from_above_and_are_not_taken_at_their_word() -> None:
    flops = 1e12
    ideal = flops / PEAK
    cycles = int(1.5 * ideal * V5E.device.clock)
    found = estimate(Program(ops=(Op(name="d", kind="matrix", flops=flops, cycles=cycles),), complete=True), V5E)
    assert found.high == pytest.approx(1.5 * ideal, rel=1e-6)
    assert found.point == pytest.approx(flops / V5E.device.matrix_rate)
    odd = int(10 * ideal * V5E.device.clock)  # a shape the matrix unit is bad at: no overstatement explains this
    found = estimate(Program(ops=(Op(name="d", kind="matrix", flops=flops, cycles=odd),), complete=True), V5E)
    assert found.point == pytest.approx(10 / 1.83 * ideal, rel=1e-6)


def test_a_copy_into_another_tiling_is_bound_by_the_vector_unit() -> None:
    elements = 32768 * 5120.0
    copy = Op(name="c", kind="memory", bytes=3 * 2 * elements, shuffled=elements)
    assert run(copy) == pytest.approx(19_857_408 / V5E.device.clock, rel=0.01)  # what libtpu expects for this copy


def test_cycles_of_a_megacore_are_of_both_cores_together() -> None:
    """The largest product of Llama 3.1 8B on a v5p-16, as libtpu 0.0.51 gave it: 1.23 times its FLOPs over the chip's peak."""
    v5p = Fabric(find_slice("v5p-16"))
    flops = 6.16e13
    cycles = int(1.23 * flops / v5p.device.peak_bf16 * v5p.device.clock)
    found = estimate(Program(ops=(Op(name="d", kind="matrix", flops=flops, cycles=cycles),), complete=True), v5p)
    assert found.low == pytest.approx(flops / v5p.device.peak_bf16)
    assert found.low < found.point < found.high == pytest.approx(1.23 * found.low)


def test_attention_takes_the_cycles_of_its_blocks() -> None:
    a = Attention(part="forward", d_head=128, size=512, grid=1000, computed=500, rows=50)
    loop = kernel_of("v5e", 512, False, 128).forward
    ahead = (500 * loop.body + 50 * loop.ends + 1000 * (loop.step + STEP_CYCLES)) / V5E.device.clock
    assert run(Op(name="k", kind="kernel", attention=a)) == pytest.approx(ahead)


def test_kernels_and_loops_that_are_not_known_are_said() -> None:
    ops = (
        Op(name="paged_attention.3", kind="kernel", bytes=1e9),
        Op(name="l", kind="loop", turns=None, blocks=((product(1.0),),)),
    )
    found = estimate(Program(ops=ops, complete=True, unread=2), V5E)
    assert any("paged_attention" in note for note in found.notes)
    assert any("counted once" in note for note in found.notes) and any("2 lines" in note for note in found.notes)
    assert found.point == pytest.approx(1.0 + 1e9 / V5E.device.hbm_bandwidth)


def test_slices_exchange_over_the_data_centre_network() -> None:
    across = Exchange(kind="all-reduce", moved=1e9, box=(1, 1), stride=(1, 1), slices=2)
    assert V5E.seconds(across) == pytest.approx(1e9 / (V5E.device.dcn_bandwidth or 0))
    assert V5E.lanes(across) == ((-1, 0),)
