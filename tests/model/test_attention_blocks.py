"""The blocks that the attention kernel is given by default: against compiled cycles, and where they must be smaller."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.model.attention_blocks import MOST_PARTS, SIZES, Blocks, choose_blocks
from podway.plan.chips import device_of
from podway.plan.kernels import _table, blocks_of, kernel_cycles
from podway.train.devices import generation_of

GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


def cycles(generation: str, size: int, fused: bool, length: int) -> float:
    """Of one head, forward and backward, with the sum of dq's parts."""
    device, walk = device_of(generation), blocks_of(size, length, length)
    found = sum(kernel_cycles(generation, part, walk, fused=fused, d_head=128) for part in ("forward", "backward"))
    parts = (length / size + 1) * length * 128 * 2 / device.hbm_bandwidth * device.clock * device.cores
    return found + (parts if fused else 0.0)


@pytest.mark.parametrize("length", [2048, 4096, 8192, 16384, 32768])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_choice_is_the_fastest_that_is_known(generation: str, length: int) -> None:
    """Of the compiled kernels that may write dq in that many parts; within 2 %, so that memory may decide between equals."""
    known = {(size, fused) for name, size, fused, width in _table() if (name, width) == (generation, 128)}
    allowed = [(size, fused) for size, fused in known if not fused or length // size <= MOST_PARTS]
    chosen = choose_blocks(Blocks(generation=generation), queries=length, keys=length, d_head=128)
    assert chosen is not None
    best = min(cycles(generation, size, fused, length) for size, fused in allowed)
    assert cycles(generation, chosen.size, chosen.fused, length) <= 1.02 * best


@pytest.mark.parametrize("generation", ["v6e", "tpu7x"])
def test_a_block_of_scores_takes_no_more_cycles_than_the_goal(generation: str) -> None:
    """512 x 512 computed scores of 8,192 tokens, forward and backward: 4,457 and 4,997 with blocks of 512 and two kernels."""
    size, fused = choose_blocks(Blocks(generation=generation), queries=8192, keys=8192, d_head=128) or (0, False)
    walk = blocks_of(size, 8192, 8192)
    both = sum(kernel_cycles(generation, part, walk, fused=fused, d_head=128) for part in ("forward", "backward"))
    assert both / walk.computed * (512 / size) ** 2 <= 2700


@given(
    st.sampled_from([*GENERATIONS, None]), st.integers(1, 2**11), st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([64, 128, 192, 256]), st.sampled_from([None, 128, 1024, 4096]),
)  # fmt: skip
def test_blocks_divide_the_sequence(
    generation: str | None, tiles: int, context: int, d_head: int, window: int | None
) -> None:
    queries = 128 * tiles
    chosen = choose_blocks(
        Blocks(generation=generation), queries=queries, keys=queries * context, d_head=d_head, window=window
    )
    assert chosen is not None and chosen.size in SIZES and queries % chosen.size == 0
    assert not chosen.fused or queries * context // chosen.size <= MOST_PARTS


def test_what_is_asked_for_is_taken() -> None:
    long = {"queries": 2**17, "keys": 2**17, "d_head": 128}
    assert choose_blocks(Blocks(512, True, "v6e"), **long) == (512, True)
    assert choose_blocks(Blocks(None, False, "v6e"), queries=8192, keys=8192, d_head=128) == (2048, False)
    assert choose_blocks(Blocks(generation="v6e"), **long) == (2048, False), "64 parts of dq would be memory"
    assert choose_blocks(Blocks(1024), queries=1536, keys=1536, d_head=128) is None
    assert choose_blocks(Blocks(generation="v6e"), queries=8192, keys=8192, d_head=128, window=512) == (512, False)
    assert choose_blocks(Blocks(), queries=8192, keys=8192, d_head=128) == (512, False), "no TPU that is known"


def test_a_device_is_known_by_the_name_that_jax_gives_it() -> None:
    assert [generation_of(kind) for kind in ("TPU v6 lite", "TPU v5", "TPU7x", "cpu")] == ["v6e", "v5p", "tpu7x", None]
