"""The order in which chips share a sequence, and the mask that knows it."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from podway.model.attention import Pattern, reference
from podway.model.splash_masks import PlacedMask
from podway.model.zigzag import is_even, places, restored, spread
from tests.model.test_attention import inputs, segments


def test_chips_take_an_early_and_a_late_piece() -> None:
    assert places(16, 2).tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]
    assert places(4, 1).tolist() == [0, 1, 2, 3]
    assert is_even(16, 8)
    assert not is_even(16, 16)
    assert not is_even(16, 1)


@pytest.mark.parametrize("chips", [1, 2, 3, 4])
def test_restoring_undoes_spreading(chips: int) -> None:
    x = jnp.arange(2 * 24 * 3).reshape(2, 24, 3)
    there = spread(x, chips)
    np.testing.assert_array_equal(there, np.asarray(x)[:, places(24, chips)])
    np.testing.assert_array_equal(restored(there, chips), x)


def test_the_reference_sees_places_and_not_the_order() -> None:
    q, k, v = inputs(24, d_head=8)
    pattern, seg = Pattern(0.3, 1.5, 5), segments(24)
    found = reference(*(spread(x, 3) for x in (q, k, v)), spread(seg, 3), pattern, 3)
    np.testing.assert_allclose(restored(found, 3), reference(q, k, v, seg, pattern), atol=1e-6)


def blocks(mask: splash_mask.Mask, size: int) -> np.ndarray:
    count = range(mask.shape[0] // size)
    cut = [slice(i * size, (i + 1) * size) for i in count]
    return np.array([[mask[rows, columns] for columns in cut] for rows in cut])


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40, 100])
def test_the_mask_is_that_of_jax(window: int | None) -> None:
    theirs: splash_mask.Mask = splash_mask.CausalMask((64, 64))
    if window is not None:
        theirs = splash_mask.LocalMask((64, 64), (window - 1, 0), 0)
    ours = PlacedMask(places(64, 1), window)
    for size in (8, 16, 64):
        np.testing.assert_array_equal(blocks(ours, size), blocks(theirs, size))
    dealt = PlacedMask(places(64, 4), window)
    whole = blocks(ours, 64)[0, 0]
    np.testing.assert_array_equal(blocks(dealt, 64)[0, 0], whole[places(64, 4)])


@pytest.mark.parametrize("chips", [2, 4, 8])
def test_chips_have_the_same_blocks_to_compute(chips: int) -> None:
    computed = blocks(PlacedMask(places(1024, chips), None), 16).any(axis=(2, 3))
    of_each = computed.reshape(chips, -1).sum(axis=1)
    assert set(of_each) == {64 * 65 // 2 // chips}
