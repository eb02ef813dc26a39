"""CPU devices for meshes, and compiled programs kept from run to run. Must run before jax starts."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", ".cache/jax")

import jax
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    """For programs over several CPU devices, which must not come from the folder: see podway.model.compiled."""
    _use_folder(False)
    yield
    _use_folder(True)


def _use_folder(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()  # jax looks at the setting once
