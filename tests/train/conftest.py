"""CPU only, and programs that are compiled once and kept between runs of the tests.

Both must be said before jax starts; processes that the tests start inherit them.
"""

import os
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "jax-tests"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
