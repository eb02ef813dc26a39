"""The bundle: the same bytes each time, nothing but the standard library, and old enough words for Python 3.8."""

from __future__ import annotations

import ast
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from agent_host import PYTHONS

from podway.hosts import bundle as bundling
from podway.hosts.bundle import PACKAGE, bundle


def sources() -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(bundle().data)) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}


def test_it_is_the_same_each_time_and_in_each_process():
    code = "import hashlib; from podway.hosts.bundle import bundle; print(hashlib.sha256(bundle().data).hexdigest(), bundle().sha256)"
    mine = [hashlib.sha256(bundle().data).hexdigest(), bundle().sha256]
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        told = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60
        )
        assert told.stdout.split() == mine


def test_the_hash_is_of_the_sources(tmp_path, monkeypatch):
    for name, text in sources().items():
        if name.startswith(PACKAGE):
            (tmp_path / Path(name).name).write_text(text)
    monkeypatch.setattr(bundling, "_SOURCES", tmp_path)
    assert bundling.bundle.__wrapped__() == bundle()
    (tmp_path / "wire.py").write_text(sources()[f"{PACKAGE}/wire.py"] + "# changed\n")
    assert bundling.bundle.__wrapped__().sha256 != bundle().sha256


@pytest.mark.parametrize("name", sources())
def test_every_module_is_python_3_8_and_imports_only_the_standard_library(name):
    tree = ast.parse(sources()[name], feature_version=(3, 8))
    if name != "__main__.py":
        assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= sys.stdlib_module_names
        if isinstance(node, ast.ImportFrom):
            assert node.level == 1 or (node.module or "").split(".")[0] in sys.stdlib_module_names | {PACKAGE}


@pytest.mark.parametrize("python", PYTHONS)
def test_every_module_imports_on_that_python(tmp_path, python):
    bundle().write(tmp_path / "agent.pyz")
    names = [name[:-3].replace("/", ".") for name in sources() if name.startswith(PACKAGE)]
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'agent.pyz')!r}); import {', '.join(names)}"
    subprocess.run([python, "-S", "-E", "-W", "error", "-c", code], check=True, timeout=60)


def test_it_is_written_whole_and_only_when_it_differs(tmp_path):
    path = tmp_path / "new" / "agent.pyz"
    bundle().write(path)
    assert path.read_bytes() == bundle().data and os.access(path, os.X_OK)
    before = path.stat()
    bundle().write(path)
    assert path.stat().st_ino == before.st_ino
    path.write_bytes(b"old")
    bundle().write(path)
    assert path.read_bytes() == bundle().data
    assert [found.name for found in path.parent.iterdir()] == ["agent.pyz"]
