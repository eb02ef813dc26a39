"""What ignore files leave out, held to git itself."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_trees import MEMORY
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.hosts.agent.manifests import unquote
from podway.hosts.ignore import Rules, ignored
from podway.hosts.tree import scan

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
QUIET = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "HOME": "/nonexistent", "LC_ALL": "C"}

SEGMENTS = [
    b"a", b"b", b"ab", b"foo", b"*", b"**", b"***", b"a*", b"*b", b"*.txt", b"?", b"??", b"[ab]", b"[!a]", b"[^a]", b"a?b",
    b"[a-", b"[]a]", b"[a-c]", b"[c-a]", b"[\\]a]", b"[[:alpha:]]", b"[[:nope:]]", b"[[:alpha]", b"[![:digit:]]*",
    b"\\#x", b"\\!y", b"#x", b"a b", "é".encode(), b"\xff", b"x]", b"a**", b"**b", b"a**b", b"a\\*", b"\\a", b".git", b"[-a]",
    b"[a-]", b"[/a]", b"*\\b",
]  # fmt: skip
NAMES = [
    b"a",
    b"b",
    b"ab",
    b"a.txt",
    b"foo",
    b"foo.txt",
    b"#x",
    b"!y",
    b"a b",
    "é".encode(),
    b"x]",
    b"\xff",
    b"-",
    b"a*",
    b"1",
]


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    if draw(st.integers(0, 15)) == 0:
        return draw(
            st.sampled_from([b"", b"# c", b"/", b"//", b"!", b"!/", b"**/", b"/**", b"\\", b" ", b"a/\\", b"!#x"])
        )
    line = b"/".join(draw(st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=3)))
    line = draw(st.sampled_from([b"", b"", b"", b"/"])) + line + draw(st.sampled_from([b"", b"", b"", b"/"]))
    line = draw(st.sampled_from([b"", b"", b"", b"!"])) + line
    return line + draw(st.sampled_from([b"", b"", b"", b"", b" ", b"  ", b"\\ ", b"\t", b"\r"]))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[bytes, bool], dict[bytes, list[bytes]]]:
    """Paths (with whether each is a directory), and ignore files by the directory they are in."""
    paths: dict[bytes, bool] = {}
    folders = [b""]
    for _ in range(draw(st.integers(3, 16))):
        path = draw(st.sampled_from(folders)) + draw(st.sampled_from(NAMES))
        if path in paths:
            continue
        paths[path] = draw(st.booleans())
        if paths[path]:
            folders.append(path + b"/")
    some = draw(st.lists(st.sampled_from(folders), max_size=2))
    return paths, {folder: draw(st.lists(lines(), min_size=1, max_size=4)) for folder in {b"", *some}}


@pytest.fixture(scope="module")
def repository() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        subprocess.run(["git", "init", "-q", folder], check=True, env={**os.environ, **QUIET})
        yield Path(folder)


def _fill(root: Path, paths: dict[bytes, bool], ignore_files: dict[bytes, list[bytes]], name: str) -> None:
    for path, is_folder in paths.items():
        full = root / os.fsdecode(path)
        full.mkdir() if is_folder else full.touch()
    for folder, content in ignore_files.items():
        (root / os.fsdecode(folder) / name).write_bytes(b"\n".join(content))


def _asked(repository: Path, paths: list[bytes]) -> set[bytes]:
    """The paths that git ignores."""
    command = ["git", "-C", str(repository), "check-ignore", "--no-index", "-z", "--stdin"]
    done = subprocess.run(command, input=b"\0".join(paths), capture_output=True, env={**os.environ, **QUIET})
    assert done.returncode in (0, 1), done.stderr
    return set(done.stdout.split(b"\0")) - {b""}


@needs_git
@settings(max_examples=200)
@given(layouts())
def test_scan_leaves_out_what_git_ignores(
    repository: Path, layout: tuple[dict[bytes, bool], dict[bytes, list[bytes]]]
) -> None:
    paths, ignore_files = layout
    for item in repository.iterdir():
        if item.name != ".git":
            shutil.rmtree(item) if item.is_dir() else item.unlink()
    _fill(repository, paths, ignore_files, ".gitignore")
    everything = [*paths, *(folder + b".gitignore" for folder in ignore_files)]
    expected = set(everything) - _asked(repository, everything)
    got = {unquote(entry.path) for entry in scan(repository).manifest.entries}
    assert got == expected


@needs_git
def test_rules_from_around_the_tree(repository: Path, tmp_path: Path) -> None:
    root = tmp_path / "repo"
    (root / "sub/work/deep").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(root)], check=True, env={**os.environ, **QUIET})
    (root / ".gitignore").write_text("*.ckpt\n/sub/work/secret\nsub/work/deep/x\n")
    (root / "sub/.gitignore").write_text("!keep.ckpt\nwork/local\n")
    (root / ".git/info/exclude").write_text("scratch\n")
    for name in ["m.ckpt", "keep.ckpt", "secret", "local", "scratch", "deep/x", "deep/y", "plain"]:
        (root / "sub/work" / name).write_text(name)
    got = {entry.path for entry in scan(root / "sub/work").manifest.entries}
    assert got == {"keep.ckpt", "deep", "deep/y", "plain"}


@needs_git
def test_a_tree_its_repository_ignores_is_sent_whole(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, env={**os.environ, **QUIET})
    (tmp_path / ".gitignore").write_text("/out\n*.bin\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model.bin").write_text("x")
    assert [entry.path for entry in scan(tmp_path / "out").manifest.entries] == ["model.bin"]


def test_skyignore_replaces_gitignore(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".gitignore").write_text("kept\n")
    (tmp_path / ".skyignore").write_text("*.log\n")
    (tmp_path / "sub/.skyignore").write_text("!good.log\n")
    (tmp_path / "sub/.gitignore").write_text("also-kept\n")
    for name in ["kept", "a.log", "sub/good.log", "sub/b.log", "sub/also-kept"]:
        (tmp_path / name).write_text(name)
    got = {entry.path for entry in scan(tmp_path).manifest.entries}
    assert got == {
        ".gitignore", ".skyignore", "kept", "sub", "sub/.gitignore", "sub/.skyignore", "sub/also-kept", "sub/good.log",
    }  # fmt: skip


def test_git_itself_is_left_out_whatever_it_is(tmp_path: Path) -> None:
    (tmp_path / ".skyignore").write_text("!.git\n!*/\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_text("x")
    (tmp_path / "submodule").mkdir()
    (tmp_path / "submodule/.git").write_text("gitdir: ../.git/modules/submodule\n")
    (tmp_path / ".github").write_text("x")
    got = {entry.path for entry in scan(tmp_path).manifest.entries}
    assert got == {".skyignore", ".github", "submodule"}


@given(st.binary(max_size=80), st.binary(min_size=1, max_size=20).filter(lambda name: b"/" not in name), st.booleans())
def test_no_line_is_an_error(data: bytes, name: bytes, is_folder: bool) -> None:
    ignored([Rules.parse(data)], b"some/" + name, name, is_folder)
