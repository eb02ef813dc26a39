"""The kernel that sums and norms: it must make what the decoder's own sum and norm make."""

import jax.numpy as jnp
import numpy as np
import pytest

from podway.model.decoder import rms_norm
from podway.model.shape import Norm
from podway.serve.norm_nvidia import add_norm


@pytest.mark.parametrize("width", [64, 48])  # a power of two, and not
@pytest.mark.parametrize("plus_one", [False, True])
def test_it_makes_the_sum_and_its_norm(width: int, plus_one: bool) -> None:
    rng = np.random.default_rng(1)
    x, added = (jnp.asarray(rng.normal(size=(1, 3, width)), jnp.bfloat16) for _ in range(2))
    weight = jnp.asarray(rng.normal(size=width), jnp.float32)
    norm = Norm(eps=1e-5, plus_one=plus_one)
    total, normed = add_norm(x, added, weight, norm, interpret=True)
    np.testing.assert_array_equal(total.astype(np.float32), (x + added).astype(np.float32))
    expected = rms_norm(x + added, weight, norm).astype(np.float32)
    np.testing.assert_allclose(normed.astype(np.float32), expected, rtol=1e-2, atol=1e-2)
