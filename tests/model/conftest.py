"""Eight CPU devices for the whole session, enough for every mesh in these tests, and a compiler that hurries.

Both must be said before jax starts: small programs are compiled here by the dozen and each runs once.
"""

import os

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
).strip()

import jax
import pytest

jax.config.update("jax_platforms", "cpu")  # even where a TPU or its library is at hand
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def eight_devices() -> list[jax.Device]:
    devices = jax.devices()
    assert len(devices) >= 8, "something started jax before tests/model/conftest.py asked for 8 devices"
    return devices[:8]
