"""Compiled programs are kept where they can be read back, and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import sys
import jax
from podway.model.compiled import keep_programs
asked, otherwise = (word or None for word in sys.argv[1:])
keep_programs(asked, otherwise)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.jit(lambda x: x * 2)(3.0)
"""


def compile_in(folders: dict[str, Path], devices: int) -> list[str]:
    """Which of the folders (asked, environment, otherwise) a program went to."""
    env = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    if "environment" in folders:
        env["JAX_COMPILATION_CACHE_DIR"] = str(folders["environment"])
    words = [str(folders.get(name, "")) for name in ("asked", "otherwise")]
    subprocess.run([sys.executable, "-c", COMPILE, *words], env=env, check=True, timeout=100)
    return [name for name, folder in folders.items() if folder.exists() and any(folder.iterdir())]


@pytest.mark.parametrize(
    "named", [("asked", "environment", "otherwise"), ("environment", "otherwise"), ("otherwise",)], ids=lambda n: n[0]
)
def test_the_folder_is_the_first_that_is_named(named: tuple[str, ...], tmp_path: Path) -> None:
    assert compile_in({name: tmp_path / name for name in named}, devices=1) == [named[0]]


def test_nothing_is_kept_of_several_cpu_devices(tmp_path: Path) -> None:
    assert compile_in({name: tmp_path / name for name in ("asked", "environment", "otherwise")}, devices=2) == []
