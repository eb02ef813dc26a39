"""What a remat policy keeps on the chip, and what goes to host memory."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from podway.model.remat import remat_policy

NAMED = SimpleNamespace(name="name")  # the primitive behind a name: the policy asks for no more of it


@pytest.mark.parametrize(("shape", "kept"), [((1, 32, 128), True), ((2, 32, 128), False), ((1, 32, 128, 64), False)])
def test_row_statistics_of_a_single_sequence_stay_on_the_chip(shape: tuple[int, ...], kept: bool) -> None:
    """libtpu fails to compile their way to host memory."""
    value = jax.ShapeDtypeStruct(shape, jnp.float32)  # type: ignore[no-untyped-call]
    assert (remat_policy(offload=("context",))(NAMED, value, name="context") is True) == kept
    assert remat_policy(offload=("qkv",))(NAMED, value, name="context") is not True
