"""Manifests, links and requests that mean harm, or nothing at all."""

import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from file_trees import MEMORY, Host, Tree, build, scanned, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.hosts.agent import packs
from podway.hosts.agent.phase import RequestRefused
from podway.hosts.tree import TreeEntry, TreeManifest


def _forced(host: Host, manifest: TreeManifest, contents: list[bytes] = ()) -> tuple[dict, bytes]:  # type: ignore[assignment]
    data = manifest.encode()
    for blob in [data, *contents]:
        name = packs.digest_of(io.BytesIO(blob))
        host.call("files.put", packs.FRAME.pack(bytes.fromhex(name), len(blob)) + blob)
    return host.call("files.apply", dest="~/w", manifest_id=manifest.id)


ENTRY_F = {"kind": "file", "mode": 0o644, "size": 1, "sha256": packs.digest_of(io.BytesIO(b"x"))}


@pytest.mark.parametrize(
    "path", ["/etc/evil", "../evil", "d/../../evil", "l/evil", "\\x2e\\x2e/evil", "", "d//evil", "n\0ul"]
)
def test_no_manifest_writes_outside(tmp_path: Path, path: str) -> None:
    host = Host(tmp_path / "home")
    outside = tmp_path / "outside"
    outside.mkdir()
    entries = (
        TreeEntry(path="d", kind="dir", mode=0o755),
        TreeEntry(path="l", kind="link", target=str(outside)),
        TreeEntry(path=path, **ENTRY_F),
    )
    with pytest.raises(RequestRefused):
        _forced(host, TreeManifest(entries=entries), [b"x"])
    assert list(outside.iterdir()) == [] and not (tmp_path / "evil").exists() and not (tmp_path / "home/w").exists()


def test_links_that_jobs_plant_are_not_followed(tmp_path: Path) -> None:
    host, outside = Host(tmp_path / "home"), tmp_path / "outside"
    tree: Tree = {b"d": ("dir", 0o755), b"d/f": ("file", 0o644, b"mine"), b"d/g": ("file", 0o644, b"g")}
    scan = scanned(tmp_path / "1", tree)
    build(outside, {b"f": ("file", 0o644, b"theirs"), b"g": ("file", 0o644, b"g"), b"sub": ("dir", 0o755)})
    before = snapshot(outside)
    host.bring(scan)
    shutil.rmtree(tmp_path / "home/w/d")
    (tmp_path / "home/w/d").symlink_to(outside)
    host.bring(scan)  # the link stands where a directory must go
    assert snapshot(tmp_path / "home/w") == tree and snapshot(outside) == before
    shutil.rmtree(tmp_path / "home/w/d")
    (tmp_path / "home/w/d").symlink_to(outside)
    host.bring(
        scanned(tmp_path / "2", {b"x": ("file", 0o644, b"x")})
    )  # d/f and d/g are deleted, but not through the link
    assert snapshot(outside) == before


def test_from_a_link_to_a_directory_and_back(tmp_path: Path) -> None:
    host, outside = Host(tmp_path / "home"), tmp_path / "outside"
    outside.mkdir()
    link: Tree = {b"d": ("link", os.fsencode(outside))}
    folder: Tree = {b"d": ("dir", 0o755), b"d/f": ("file", 0o644, b"f")}
    for n, tree in enumerate([link, folder, link, folder]):
        host.bring(scanned(tmp_path / f"t{n}", tree))
        assert snapshot(tmp_path / "home/w") == tree
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("dest", ["~/.podway", "~/.podway/incoming", "~/x/../.podway/jobs", "~/link/jobs"])
def test_the_agents_own_state_is_no_destination(tmp_path: Path, dest: str) -> None:
    host = Host(tmp_path / "home")
    (tmp_path / "home/link").symlink_to(".podway")
    with pytest.raises(RequestRefused, match=r"podway's own state"):
        host.bring(scanned(tmp_path / "t", {b"f": ("file", 0o644, b"f")}), dest)


@pytest.mark.parametrize(
    "tree", [{b".podway": ("link", b"/x")}, {b".podway": ("dir", 0o755), b".podway/agent.sock": ("file", 0o644, b"")}]
)
def test_the_agents_own_state_is_not_overwritten(tmp_path: Path, tree: Tree) -> None:
    host = Host(tmp_path / "home")
    with pytest.raises(RequestRefused, match="would overwrite podway's own state"):
        host.bring(scanned(tmp_path / "t", tree), "~")
    host.bring(scanned(tmp_path / "u", {b".bashrc": ("file", 0o644, b"x")}), "~")
    assert (tmp_path / "home/.bashrc").read_bytes() == b"x"


@pytest.mark.parametrize("dest", [None, 3, "", "w", "./w", "~root/w", "a\0b", "~x"])
def test_impossible_destinations(tmp_path: Path, dest: object) -> None:
    host = Host(tmp_path / "home")
    scan = scanned(tmp_path / "t", {})
    with pytest.raises(RequestRefused, match=r"(must begin with / or ~/|only ~/ is known)"):
        host.bring(scan, dest)  # type: ignore[arg-type]


TEXT = st.text(
    st.sampled_from("ab~.\0\\é\udcff"), max_size=8
)  # no '/' and no ':': no reading of all of this machine, no calls
JSON = st.recursive(st.none() | st.booleans() | st.integers() | TEXT, lambda inner: st.lists(inner, max_size=3))
FIELDS = ["dest", "manifest_id", "digest", "offset", "total", "from", "token", "address", "port", "path", "limit"]


@settings(max_examples=200)
@given(
    st.sampled_from(["missing", "put", "pull", "apply", "fetch", "list"]),
    st.dictionaries(st.sampled_from(FIELDS), JSON),
    st.binary(max_size=60),
)
def test_no_request_is_a_traceback(op: str, fields: dict[str, Any], body: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        host = Host(Path(folder))
        fields.pop("op", None)
        try:
            host.call("files." + op, body, **fields)
        except RequestRefused as error:
            assert "\n" not in str(error)
