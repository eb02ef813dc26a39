"""Eight CPU devices for the whole session, enough for every mesh in these tests. Said before jax starts."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")  # even where a TPU or its library is at hand
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def eight_devices() -> list[jax.Device]:
    devices = jax.devices()
    assert len(devices) >= 8, "something started jax before tests/model/conftest.py asked for 8 devices"
    return devices[:8]
