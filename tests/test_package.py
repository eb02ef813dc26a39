"""The wheel as a user gets it: what is in it, and every verb in an environment that holds it and its core dependencies alone.

The environment is made without the network: the wheel is built by the setuptools at hand, and the core dependencies are links to
the packages these tests run with.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from podway.cli.index import VERBS
from podway.extras import EXTRAS
from podway.version import __version__
from tests.conftest import processes_of, wait_until

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRA_PACKAGES = {"jax", "optax", "tokenizers", "asyncssh", "grpc", "google", "psycopg", "matplotlib", "numpy"}


def run(*argv: str | Path, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(word) for word in argv], capture_output=True, text=True, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git knows: nothing that lies about in a checkout can get into it."""
    place = tmp_path_factory.mktemp("wheel")
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT, check=True).stdout
    source = place / "source"
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir")
    built = run(sys.executable, "-m", "pip", "wheel", *options, place, source)
    assert built.returncode == 0, built.stderr
    return next(place.glob("*.whl"))


class Installation(NamedTuple):
    """The empty environment, with a home of its own."""

    bin: Path
    home: Path

    def podway(self, *words: str, seconds: float = 300.0, **environment: str) -> "subprocess.CompletedProcess[str]":
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        env = {**kept, "HOME": str(self.home), "PODWAY_HOME": str(self.home / "podway"), **environment}
        done = run(self.bin / "podway", *words, env=env, cwd=self.home, timeout=seconds, stdin=subprocess.DEVNULL)
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return done


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    place = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", "--without-pip", place / "venv", check=True)
    python = place / "venv" / "bin" / "python"
    packages = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", check=True).stdout.strip())
    for dependency in core_dependencies():
        link(dependency, packages)
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install")
    done = run(*pip, "--no-deps", "--no-index", "--quiet", wheel)
    assert done.returncode == 0, done.stderr
    (place / "home").mkdir()
    here = Installation(place / "venv" / "bin", place / "home")
    yield here
    here.podway("down", "--all", "--yes")
    here.podway("server", "stop")
    wait_until(lambda: not processes_of(place / "home" / "podway"), what="the end of all processes")


def core_dependencies() -> list[Distribution]:
    """What `pip install podway` installs, by the metadata of the packages at hand."""
    found: dict[str, Distribution] = {}
    wanted = [Requirement(line) for line in PROJECT["dependencies"]]
    while wanted:
        requirement = wanted.pop()
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name.lower() not in found:
            dist = found[requirement.name.lower()] = distribution(requirement.name)
            wanted += [Requirement(line) for line in dist.requires or ()]
    return list(found.values())


def link(dist: Distribution, packages: Path) -> None:
    for top in {file.parts[0] for file in dist.files or () if file.parts[0] not in ("..", "__pycache__")}:
        if not (packages / top).exists():
            (packages / top).symlink_to(Path(str(dist.locate_file(top))))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    package = {name for name in inside if ".dist-info/" not in name}
    tracked = run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", "src/podway", cwd=ROOT
    ).stdout.split()
    assert package == {name.removeprefix("src/") for name in tracked if (ROOT / name).is_file()}
    assert {Path(name).name for name in inside - package} == {
        *("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "LICENSE")
    }


def test_the_metadata_tells_what_an_index_shows(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
    metadata = HeaderParser().parsestr(archive.read(name).decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {line.partition(",")[0] for line in metadata.get_all("Project-URL", [])} == {
        *("Homepage", "Documentation", "Changelog", "Issues")
    }
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata["Keywords"] and metadata["Summary"] and metadata["Requires-Python"] == ">=3.11"
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_source_archive_has_what_the_wheel_is_built_from(tmp_path: Path) -> None:
    code = "import setuptools.build_meta as backend, sys; print(backend.build_sdist(sys.argv[1]))"
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copyfile(ROOT / name, source / name)
    shutil.copytree(ROOT / "src" / "podway", source / "src" / "podway", ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-c", code, tmp_path, cwd=source, check=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "src/podway/py.typed", "src/podway/catalog/slices.csv"} <= names


def test_every_extra_is_known_by_what_it_brings() -> None:
    assert set(EXTRAS) == set(PROJECT["optional-dependencies"]) - {
        "dev",
        "docs",
        "tpu",
        "cuda",
        "gateway",
    }  # gateway: only faster with it


def test_the_environment_is_empty(installed: Installation) -> None:
    code = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n)))"
    done = run(installed.bin / "python", "-I", "-c", code, "podway", *sorted(EXTRA_PACKAGES), check=True)
    assert done.stdout.split() == ["podway"]


@pytest.mark.e2e
def test_it_launches_a_job_on_a_simulated_slice(installed: Installation) -> None:
    words = (
        "launch",
        "-y",
        "--raw",
        "-c",
        "first",
        "--tpus",
        "v4-16",
        "echo hello from host $PODWAY_RANK of $PODWAY_NUM_HOSTS",
    )
    done = installed.podway(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hello from host 0 of 2" in done.stdout and "hello from host 1 of 2" in done.stdout
    assert installed.podway("down", "-y", "first").returncode == 0


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_its_help(installed: Installation, verb: str) -> None:
    done = installed.podway(verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"podway {verb}" in done.stdout


# A command line that needs an extra, the extra it must name, and what it needs in the environment.
NEEDS_EXTRA: dict[str, tuple[str, dict[str, str]]] = {
    "train model.name=tiny-llama3 schedule.steps=1": ("train", {}),
    "train --check model.name=tiny-llama3": ("train", {}),
    "serve tiny-llama3 --random": ("serve", {}),
    "rehearse train tiny-llama3 --tpu v6e-4 --seq 128": ("rehearse", {}),
    "rehearse serve tiny-llama3 --tpu v6e-4": ("rehearse", {}),
    "plan train llama3.1-8b --seq 8192 --tpu v6e-16 --plot out.svg": ("plot", {}),
    "sandbox up": ("sandbox", {}),
    "launch -y --infra gcp --tpus v6e-8 hostname": ("gcp", {"PODWAY_GCP_PROJECT": "p"}),
    "launch -y --inventory machines.yaml --tpus v6e-8 hostname": ("ssh", {}),
    "server run --foreground --db postgresql://nobody@127.0.0.1:1/none": ("postgres", {"PODWAY_HOME": "other"}),
}


@pytest.mark.e2e
@pytest.mark.parametrize("line", NEEDS_EXTRA)
def test_a_missing_extra_is_named_in_one_line(installed: Installation, line: str) -> None:
    (installed.home / "machines.yaml").write_text("hosts: [127.0.0.1]\n")
    extra, environment = NEEDS_EXTRA[line]
    done = installed.podway(*line.split(), **environment)
    refused = 2 if line.startswith("server run") else 1  # the server's own code for what it was started with
    assert done.returncode == refused, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines[-1] == f"  pip install 'podway[{extra}]'", done.stderr
    assert re.fullmatch(r"Error: .* needs .*, which (is|are) not installed( on the server)?", lines[-2]), done.stderr


# Command lines that the core installation carries out alone.
RUNS_ALONE = (
    "--version",
    "tpus v6e",
    "status",
    "queue",
    "cost",
    "check examples.yaml",
    "plan train llama3.1-8b --seq 8192 --tpu v6e-16",
    "server status",
    "completion bash",
)


@pytest.mark.e2e
@pytest.mark.parametrize("line", RUNS_ALONE)
def test_the_core_installation_is_enough(installed: Installation, line: str) -> None:
    (installed.home / "examples.yaml").write_text("resources:\n  accelerators: tpu-v6e-8\nrun: hostname\n")
    done = installed.podway(*line.split())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.e2e
def test_bench_needs_no_extra_but_a_server(installed: Installation) -> None:
    done = installed.podway("bench", "serve", "--url", "http://127.0.0.1:9", "--num-prompts", "1")
    assert done.returncode == 1 and done.stderr.startswith("Error: "), done.stderr
