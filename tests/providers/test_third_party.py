"""A provider in a package of its own (third_party/), which Podway has never heard of: installed, it is one like the others."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def install(source: Path, target: Path) -> None:
    """What an installer leaves behind for a pure package: its modules, and a dist-info with its entry points."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    for package in source.iterdir():
        if (package / "__init__.py").exists():
            shutil.copytree(package, target / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    about = target / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in points.items())])
        for group, points in project["entry-points"].items()
    ]
    (about / "entry_points.txt").write_text("\n".join(groups) + "\n")


def package_of(tmp_path: Path, name: str, code: str) -> Path:
    """A package `podway-NAME` whose module holds this code, installed."""
    source = tmp_path / "source"
    (source / f"podway_{name}").mkdir(parents=True)
    (source / "pyproject.toml").write_text(
        f'[project]\nname = "podway-{name}"\nversion = "0.3"\n'
        f'[project.entry-points."podway.providers"]\n{name} = "podway_{name}:ROW"\n'
    )
    (source / f"podway_{name}" / "__init__.py").write_text(code)
    install(source, tmp_path / "site")
    return tmp_path / "site"


def podway(site: Path, *arguments: str, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "podway.cli.main", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(HERE / "third_party", tmp_path / "site")
    return tmp_path / "site"


@pytest.mark.e2e
def test_it_passes_the_contract(site: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(site)}
    options = ["-o", "addopts=", "-p", "no:xdist", "-k", "shelf"]
    command = [sys.executable, "-m", "pytest", *options, "tests/providers/test_contract.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "9 passed, 1 skipped" in done.stdout  # it does not list resources


@pytest.mark.e2e
def test_launch_runs_a_job_on_it(site: Path, podway_home: Path) -> None:
    """By its name and by its alias; its row, not Podway, says that it is not simulated."""
    first = podway(
        site, "launch", "-y", "-c", "one", "--infra", "shelf", "--tpus", "v6e-8", "echo chips on $PODWAY_CLUSTER"
    )
    assert first.returncode == 0, first.stderr
    assert "chips on one" in first.stdout
    second = podway(
        site,
        "launch",
        "-y",
        "--raw",
        "-c",
        "two",
        "--infra",
        "rack",
        "--tpus",
        "v4-16",
        "echo rank $SKYPILOT_NODE_RANK",
    )
    assert second.returncode == 0, second.stderr
    each = "rank 0" in second.stdout and "rank 1" in second.stdout
    assert each or "(all 2 hosts) rank 0" in second.stdout  # shown once, where both come at once
    status = podway(site, "status").stdout
    assert "shelf" in status and "simulated" not in status
    stopped = podway(site, "stop", "one")
    assert stopped.returncode == 1 and "its hosts cannot be stopped" in stopped.stderr
    down = podway(site, "down", "-y", "one", "two")
    assert down.returncode == 0, down.stderr


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("raise RuntimeError('line one\\nline two')", "RuntimeError: line one line two"),
        ("def broken(:", "SyntaxError"),
        ("ROW = 3", "is a int, not a podway.provider_table.ProviderRow"),
        (
            "from podway.provider_table import ProviderRow as P\nROW = P(name='other', opens='a:b')",
            "row is named 'other'",
        ),
        (
            "from podway.provider_table import ProviderRow as P\nROW = P(name='lab', opens='a')",
            "not package.module:function",
        ),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_broken_package_is_named_in_one_line_and_breaks_nothing(
    tmp_path: Path, podway_home: Path, code: str, why: str
) -> None:
    site = package_of(tmp_path, "lab", code)
    named = podway(site, "launch", "-y", "--dryrun", "--infra", "lab", "--tpus", "v6e-8", "true")
    assert named.returncode == 1
    assert "provider lab of the package podway-lab 0.3 cannot be loaded" in named.stderr
    assert why in named.stderr and "Traceback" not in named.stderr
    assert len(named.stderr.strip().splitlines()) <= 2  # what is wrong, and what to do
    other = podway(site, "tpus", "v6e-8")
    assert other.returncode == 0 and "Traceback" not in other.stderr


@pytest.mark.parametrize("module", ["import nothing_of_that_name", "def open_provider(root):\n    return 1 / 0", ""])
def test_a_provider_that_cannot_be_opened_is_named_in_one_line(tmp_path: Path, podway_home: Path, module: str) -> None:
    """The row is good, the module behind it is not: that is found out on the server."""
    row = "from podway.provider_table import ProviderRow\nROW = ProviderRow(name='lab', opens='podway_lab.cloud:open_provider')"
    site = package_of(tmp_path, "lab", row)
    (site / "podway_lab" / "cloud.py").write_text(module)
    named = podway(site, "launch", "-y", "--infra", "lab", "--tpus", "v6e-8", "true")
    assert named.returncode == 1
    assert "provider lab (podway_lab.cloud:open_provider) cannot be opened" in named.stderr
    assert len(named.stderr.strip().splitlines()) <= 2 and "Traceback" not in named.stderr
    other = podway(site, "launch", "-y", "--dryrun", "--infra", "local", "--tpus", "v6e-8", "true")
    assert other.returncode == 0, other.stderr


def test_a_package_cannot_take_the_name_of_a_provider(tmp_path: Path, podway_home: Path) -> None:
    row = "from podway.provider_table import ProviderRow\nROW = ProviderRow(name='ssh', opens='nowhere:nothing')"
    site = package_of(tmp_path, "ssh", row)
    code = "from podway.provider_table import broken_rows, provider_rows; print(provider_rows()['ssh'].opens, broken_rows())"
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.startswith("podway.providers.ssh") and "there is a provider 'ssh' already" in said
