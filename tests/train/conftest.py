"""CPU only, a compiler that hurries, and programs that are compiled once and kept between runs of the tests.

All must be said before jax starts; processes that the tests start inherit them.
"""

import os
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "jax-tests"
HURRY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {HURRY}".strip()
