"""Where compiled programs are kept between runs.

jax keys a program by its text, the devices and the versions, so a folder may serve many models and machines.

Not on several CPU devices. A program that XLA's CPU compiler has just made runs its collectives in one order on every
device; the same program read back from the folder begins those that do not depend on each other in any order. Ten devices
then wait in one collective, six in another, until XLA ends the process after 40 s (jax 0.10.2, every time: a step with
experts over 16 devices). So there each run compiles for itself.
"""

import os
from pathlib import Path

import jax


def keep_programs(asked: Path | str | None, otherwise: Path | None = None) -> None:
    """Compiled programs go to the folder that was asked for, or the environment's, or this other one, and come from it.

    Call when jax knows all of its devices."""
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)  # type: ignore[no-untyped-call]
        return
    folder = asked or os.environ.get("JAX_COMPILATION_CACHE_DIR") or otherwise
    if folder:  # jax makes it; it may be a bucket
        jax.config.update("jax_compilation_cache_dir", str(folder))  # type: ignore[no-untyped-call]
