"""tools/kubernetes/build: what it is cached by, and how it ends where its sources are not available. `go` is a script here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tools.bench.own_kubernetes import ROOT

UNAVAILABLE = 69
RELEASES = "src/podway/providers/gke/prepare/releases.py"


@pytest.fixture
def builder(tmp_path: Path) -> Path:
    """A copy, so that what it is made of can be changed."""
    (tmp_path / RELEASES).parent.mkdir(parents=True)
    shutil.copy(ROOT / RELEASES, tmp_path / RELEASES)
    return Path(shutil.copytree(ROOT / "tools" / "kubernetes", tmp_path / "tools" / "kubernetes"))


def build(builder: Path, *, go: str | None) -> subprocess.CompletedProcess[str]:
    programs = builder.parent / "programs"
    programs.mkdir(exist_ok=True)
    for name in (
        "bash",
        "cat",
        "chmod",
        "cp",
        "cut",
        "dirname",
        "flock",
        "mkdir",
        "mv",
        "rm",
        "sed",
        "sha256sum",
        "timeout",
        "touch",
    ):
        if not (programs / name).exists():
            (programs / name).symlink_to(shutil.which(name) or name)
    if go is not None:
        (programs / "go").write_text(f"#!/bin/sh\n{go}\n")
        (programs / "go").chmod(0o755)
    env = {"PATH": str(programs), "HOME": str(builder.parent), "XDG_CACHE_HOME": str(builder.parent / "cache")}
    bash = os.path.realpath(programs / "bash")
    return subprocess.run([bash, str(builder / "build")], env=env, capture_output=True, text=True, timeout=60)


# Modules have the files that are copied; `go build -o FILE` writes FILE, a program that does nothing, and notes that it was called.
GO = r"""
modules=$HOME/modules
case "$1" in
mod) made=$modules/${3:-none}/config/components
     mkdir -p "$made/webhook" "$made/crd/bases" "$made/manager"
     touch "$made/webhook/manifests.yaml" "$made/crd/bases/a.yaml" ;;
env) echo "$modules" ;;
build) echo x >> "$HOME/compiled"
       while [ "$1" != -o ]; do shift; done
       echo "#!/bin/sh" > "$2"; chmod +x "$2" ;;
esac
"""


def compiled(builder: Path) -> int:
    return len((builder.parent / "compiled").read_text().splitlines())


def test_what_was_built_is_found_again_and_a_change_of_its_sources_builds_anew(builder: Path) -> None:
    versions = builder.parent.parent / RELEASES
    first = build(builder, go=GO)
    assert first.returncode == 0, first.stderr
    assert {"servers", "jobset", "kueue", "crds", "webhooks", "releases"} <= {
        one.name for one in Path(first.stdout.strip()).iterdir()
    }
    assert build(builder, go="exit 1").stdout == first.stdout and compiled(builder) == 4
    for path in (
        builder / "servers" / "main.go",
        builder / "servers" / "go.mod",
        builder / "servers" / "go.sum",
        versions,
    ):
        path.write_text(path.read_text().replace('KUEUE_VERSION = "v', 'KUEUE_VERSION = "v9') + "# changed\n")
        changed = build(builder, go=GO)
        assert changed.returncode == 0 and changed.stdout != first.stdout
        first = changed
    assert compiled(builder) == 20


def test_without_go_or_its_module_proxy_one_line_says_so(builder: Path) -> None:
    without = build(builder, go=None)
    assert without.returncode == UNAVAILABLE
    assert without.stderr.splitlines() == [
        "tools/kubernetes/build: Kubernetes could not be fetched: Go is not installed (https://go.dev/dl)"
    ]
    refused = 'echo "go: downloading" >&2; echo "go: dial tcp: connection refused" >&2; exit 1'
    offline = build(builder, go=refused)
    assert offline.returncode == UNAVAILABLE and offline.stdout == ""
    assert offline.stderr.splitlines() == [
        "tools/kubernetes/build: Kubernetes could not be fetched: go: dial tcp: connection refused"
    ]


def test_what_does_not_compile_fails_and_is_tried_again(builder: Path) -> None:
    failing = GO.replace("while", 'echo "main.go:1: syntax error" >&2; exit 1; while')
    for _ in range(2):
        done = build(builder, go=failing)
        assert done.returncode not in (0, UNAVAILABLE) and "syntax error" in done.stderr
