"""Blobs from host to host."""

import ast
import os
import socket
from pathlib import Path

import pytest
from file_trees import Host, Tree, scanned, snapshot

from podway.hosts.agent import apply as apply_module
from podway.hosts.agent import files, manifests, packs, peers, place, records
from podway.hosts.agent.phase import RequestRefused


@pytest.fixture
def served(tmp_path: Path):
    """A host that has one tree in place and serves it: (host, scan, "address:port")."""
    host = Host(tmp_path / "peer")
    scan = scanned(tmp_path / "t", {b"f": ("file", 0o644, b"content"), b"g": ("file", 0o644, b"")})
    host.bring(scan)
    reply, _ = host.call("files.listen", address="127.9.1.1", token="secret")
    assert host.call("files.listen", address="127.9.1.1", token="second")[0] == reply
    yield host, scan, f"127.9.1.1:{reply['port']}"
    peers.close(str(host.state))


@pytest.mark.parametrize("token", ["secret", "second"])
def test_a_host_pulls_from_a_peer(tmp_path: Path, served, token: str) -> None:
    _, scan, peer = served
    host = Host(tmp_path / "home")
    where = {"dest": "~/w", "manifest_id": scan.manifest.id}
    reply, _ = host.call("files.pull", token=token, **{"from": peer}, **where)
    assert reply["left"] == 0 and reply["bytes"] == len(scan.manifest.encode()) + 7 + 3 * packs.FRAME.size
    assert host.call("files.apply", **where)[0]["applied"]
    assert snapshot(tmp_path / "home/w") == snapshot(tmp_path / "peer/w")
    assert host.call("files.pull", token=token, **{"from": peer}, **where)[0] == {"bytes": 0, "left": 0}


def test_a_pull_in_parts(tmp_path: Path) -> None:
    peer = Host(tmp_path / "peer")
    tree: Tree = {b"%d" % n: ("file", 0o644, os.urandom(1000)) for n in range(20)}
    scan = scanned(tmp_path / "t", tree)
    peer.bring(scan)
    port = peer.call("files.listen", address="127.9.1.2", token="t")[0]["port"]
    host, lefts = Host(tmp_path / "home"), []
    fields = {"from": f"127.9.1.2:{port}", "token": "t", "dest": "~/w", "manifest_id": scan.manifest.id, "limit": 5000}
    while not lefts or lefts[-1]:
        lefts.append(host.call("files.pull", **fields)[0]["left"])
    peers.close(str(peer.state))
    assert len(lefts) >= 4 and lefts == sorted(lefts, reverse=True)
    host.bring(scan)
    assert snapshot(tmp_path / "home/w") == tree


def test_a_wrong_token_gets_nothing(tmp_path: Path, served) -> None:
    _, scan, peer = served
    host = Host(tmp_path / "home")
    fields = {"from": peer, "token": "guess", "dest": "~/w", "manifest_id": scan.manifest.id}
    reply, _ = host.call("files.pull", **fields)
    assert reply["left"] == -1 and "the token is not valid here" in reply["failed"]
    assert list((host.state / "incoming").iterdir()) == []


def test_a_token_dies(tmp_path: Path, served, monkeypatch: pytest.MonkeyPatch) -> None:
    peer_host, scan, peer = served
    listener = peers._listeners[(str(peer_host.state), "127.9.1.1")]
    listener.tokens["secret"] = 0.0
    host = Host(tmp_path / "home")
    fields = {"from": peer, "token": "secret", "dest": "~/w", "manifest_id": scan.manifest.id}
    assert "the token is not valid here" in host.call("files.pull", **fields)[0]["failed"]


def _talk(peer: str, line: bytes) -> bytes:
    address, _, port = peer.rpartition(":")
    with socket.create_connection((address, int(port)), 5) as connection:
        connection.settimeout(5)
        with connection.makefile("rwb") as stream:
            stream.readline()
            stream.write(line)
            stream.flush()
            connection.shutdown(socket.SHUT_WR)
            return stream.read()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{}\n",
        b"garbage\n",
        b'{"op":"files.fetch","path":"/etc/passwd"}\n',
        b'{"op":"files.blobs","digests":["../x"],"mac":""}\n',
    ],
)
def test_peers_answer_one_thing_only(served, line: bytes) -> None:
    _, scan, peer = served
    assert b"root:" not in _talk(peer, line)
    digest = scan.manifest.entries[0].sha256
    answer = _talk(peer, b'{"op":"files.blobs","digests":["%s"],"mac":"00"}\n' % digest.encode())
    assert b"the token is not valid here" in answer and b"content" not in answer


def test_a_peer_whose_file_was_written_to_does_not_pass_it_on(
    tmp_path: Path, served, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer_host, scan, peer = served
    (peer_host.home / "w/f").write_bytes(b"CONTENT")
    host = Host(tmp_path / "home")
    fields = {"from": peer, "token": "secret", "dest": "~/w", "manifest_id": scan.manifest.id}
    assert "has not all of the tree" in host.call("files.pull", **fields)[0]["failed"]
    # Even if the peer does not notice, the one who pulls does.
    monkeypatch.setattr(records, "fingerprint_of", lambda found: None)
    true = records.AppliedRecord.decode
    monkeypatch.setattr(records.AppliedRecord, "decode", staticmethod(lambda data: _unmarked(true(data))))
    assert "is not what its digest" in host.call("files.pull", **fields)[0]["failed"]
    assert len(list((host.state / "incoming").iterdir())) <= 2


def _unmarked(record: records.AppliedRecord) -> records.AppliedRecord:
    record.files = {path: (digest, None) for path, (digest, _) in record.files.items()}
    return record


def test_an_address_of_somebody_else_is_refused(tmp_path: Path) -> None:
    host = Host(tmp_path / "home")
    with pytest.raises(RequestRefused, match=r"cannot listen on 192\.0\.2\.1"):
        host.call("files.listen", address="192.0.2.1", token="t")


def test_the_host_side_is_python_3_8() -> None:
    for module in (apply_module, files, manifests, packs, peers, place, records):
        ast.parse(Path(module.__file__).read_text(), feature_version=(3, 8))
