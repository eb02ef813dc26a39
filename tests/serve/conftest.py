"""CPU devices for meshes, and compiled programs kept from run to run. Must run before jax starts."""

import os

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", ".cache/jax")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
