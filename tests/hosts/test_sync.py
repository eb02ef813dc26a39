"""One tree to many hosts: once from the server, then among themselves."""

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from file_trees import MEMORY, Host, Tree, build, scanned, snapshot

from podway.errors import ProviderError, UserError
from podway.hosts import link as link_module
from podway.hosts.agent import peers
from podway.hosts.agent.phase import RequestRefused
from podway.hosts.blobs import BlobStore
from podway.hosts.bundle import bundle
from podway.hosts.sync import Progress, SyncReport, sync
from podway.hosts.tree import Scan, TreeEntry, TreeManifest, scan

OVERHEAD = 1.05


class Link:
    """A link to a host in this process; the traffic between hosts is real."""

    def __init__(self, host: Host, address: str) -> None:
        self.host = host
        self.address = address
        self.calls: list[str] = []
        self.received = 0
        self.before: Callable[[str], None] = lambda op: None

    async def call(
        self, op: str, *, body: bytes = b"", timeout: float | None = None, **fields: Any
    ) -> link_module.AgentReply:
        self.calls.append(op)
        self.received += len(body)
        try:
            await asyncio.to_thread(self.before, op)
            reply, answer = await asyncio.to_thread(self.host.call, op, body, **fields)
        except RequestRefused as error:
            raise link_module.AgentRefused(str(error), code=error.code) from None
        return link_module.AgentReply(fields=reply, body=answer)


class Slice:
    """Hosts, and a server's store with one tree in it."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.folder = folder
        self.blobs = BlobStore(folder / "blobs")
        self.links = [Link(Host(folder / f"host{n}"), f"127.9.0.{n + 1}") for n in range(hosts)]
        self.progress: list[Progress] = []

    def upload(self, tree: Tree, name: str = "tree") -> Scan:
        found = scanned(self.folder / name, tree)
        self.blobs.put_pack(found.pack(self.blobs.missing(found.manifest.sizes)))
        return found

    def sync(self, found: Scan, **options: Any) -> SyncReport:
        for link in self.links:
            link.calls.clear()
            link.received = 0
        report = asyncio.run(
            sync(self.links, found.manifest, "~/w", self.blobs, progress=self.progress.append, **options)
        )
        assert report.server_bytes == sum(link.received for link in self.links)
        return report

    def places(self) -> list[Tree]:
        return [snapshot(link.host.home / "w") for link in self.links]


@pytest.fixture
def eight() -> Iterator[Slice]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        hosts = Slice(Path(folder), 8)
        yield hosts
        for link in hosts.links:
            peers.close(str(link.host.state))


TREE: Tree = {
    b"code": ("dir", 0o755),
    **{b"code/%d.py" % n: ("file", 0o644, b"module %d\n" % n * 50) for n in range(200)},
    b"run.sh": ("file", 0o755, b"#!/bin/sh\n"),
    b"odd \xff\n": ("file", 0o600, b""),
    b"link": ("link", b"code/1.py"),
    b"empty": ("dir", 0o700),
    b"weights": ("file", 0o644, os.urandom(10 << 20)),
    b"twin": ("file", 0o644, b"module 7\n" * 50),
}


def size_of(found: Scan) -> int:
    return sum(found.manifest.sizes.values()) + len(found.manifest.encode())


def test_the_server_sends_a_tree_once(eight: Slice) -> None:
    found = eight.upload(TREE)
    report = eight.sync(found)
    assert eight.places() == [TREE] * 8
    assert size_of(found) <= report.server_bytes <= size_of(found) * OVERHEAD
    assert 7 * size_of(found) <= report.peer_bytes <= 7 * size_of(found) * OVERHEAD
    assert [link.calls.count("files.put") > 0 for link in eight.links] == [True] + [False] * 7
    assert (report.hosts, report.changed_hosts, report.notes) == (8, 8, ())
    stages = [progress.stage for progress in eight.progress]
    assert stages == sorted(stages, key=["send", "spread", "apply"].index)
    last = {progress.stage: progress for progress in eight.progress}
    assert all(progress.done == progress.total for progress in last.values())


def test_nothing_to_do_is_one_short_call(eight: Slice) -> None:
    found = eight.upload(TREE)
    eight.sync(found)
    report = eight.sync(found)
    assert (report.server_bytes, report.peer_bytes, report.changed_hosts) == (0, 0, 0)
    assert [link.calls for link in eight.links] == [["files.missing"]] * 8
    (eight.links[4].host.home / "w/code/5.py").write_bytes(b"edited on the host")
    assert (eight.sync(found).changed_hosts, eight.places()) == (1, [TREE] * 8)


def test_a_change_sends_the_change(eight: Slice) -> None:
    eight.sync(eight.upload(TREE))
    new = {**TREE, b"code/3.py": ("file", 0o644, b"edited"), b"new": ("file", 0o644, b"new")}
    del new[b"twin"]
    found = eight.upload(new, "new")
    report = eight.sync(found)
    assert eight.places() == [new] * 8
    assert report.server_bytes < 8 * len(found.manifest.encode()) // 4 and report.peer_bytes == 0
    assert [link.calls for link in eight.links] == [["files.missing", "files.apply"]] * 8
    assert (report.written, report.deleted) == (16, 8)


def test_a_new_host_gets_all_from_its_peers(eight: Slice) -> None:
    found = eight.upload(TREE)
    everyone, eight.links = eight.links, eight.links[:5]
    eight.sync(found)
    eight.links = everyone
    report = eight.sync(found)
    assert eight.places() == [TREE] * 8
    assert report.server_bytes == 0
    assert report.changed_hosts == 3


def test_holders_multiply(eight: Slice) -> None:
    """No host serves more than its share: the first serves two at a time, and those serve on."""
    served: dict[str, int] = {}
    for link in eight.links:
        true = link.host.call

        def call(op: str, body: bytes = b"", true=true, **fields: Any) -> tuple[dict, bytes]:
            if op == "files.pull":
                served[fields["from"]] = served.get(fields["from"], 0) + 1
            return true(op, body, **fields)

        link.host.call = call  # type: ignore[method-assign]
    eight.sync(eight.upload(TREE))
    assert sum(served.values()) == 7 and len(served) >= 3


def test_a_holder_nobody_reaches(eight: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second host listens where nobody can connect: its clients turn to others, and the server sends no more for it."""
    true = eight.links[1].host.call

    def call(op: str, body: bytes = b"", **fields: Any) -> tuple[dict, bytes]:
        reply, answer = true(op, body, **fields)
        return ({"port": 1}, b"") if op == "files.listen" else (reply, answer)

    monkeypatch.setattr(eight.links[1].host, "call", call)
    found = eight.upload(TREE)
    report = eight.sync(found)
    assert eight.places() == [TREE] * 8
    assert report.server_bytes <= size_of(found) * OVERHEAD
    assert all("127.9.0.2:1" in note for note in report.notes)


def test_a_host_that_reaches_nobody_is_sent_to_directly(eight: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    true = eight.links[3].host.call

    def call(op: str, body: bytes = b"", **fields: Any) -> tuple[dict, bytes]:
        return true(op, body, **({**fields, "from": "127.9.0.99:1"} if op == "files.pull" else fields))

    monkeypatch.setattr(eight.links[3].host, "call", call)
    found = eight.upload(TREE)
    report = eight.sync(found)
    assert eight.places() == [TREE] * 8
    assert size_of(found) * 2 <= report.server_bytes <= size_of(found) * 2 * OVERHEAD
    assert len(report.notes) == 2 and all(note.startswith("host 3 could not") for note in report.notes)


def test_hosts_that_cannot_serve_at_all(eight: Slice) -> None:
    for link in eight.links:
        link.address = "192.0.2.7"  # nobody's: listening fails
    found = eight.upload({b"f": ("file", 0o644, b"small")})
    report = eight.sync(found)
    assert eight.places() == [{b"f": ("file", 0o644, b"small")}] * 8
    assert report.peer_bytes == 0 and len(report.notes) > 0


class Dies:
    """A link that is lost from a certain call on."""

    def __init__(self, op: str, after: int = 0) -> None:
        self.op = op
        self.after = after

    def __call__(self, op: str) -> None:
        if op == self.op:
            self.after -= 1
        if self.after < 0:
            raise ProviderError("no connection to the host agent")


@pytest.mark.parametrize("op", ["files.missing", "files.put", "files.pull", "files.apply"])
@pytest.mark.parametrize("which", [0, 5])
def test_a_dead_host_is_named_and_the_others_are_done(eight: Slice, op: str, which: int) -> None:
    found = eight.upload(TREE)
    eight.links[which].before = Dies(op, after=2 if op == "files.put" else 0)
    touched = op in ("files.missing", "files.apply") or (op == "files.put") == (which == 0)
    if touched:
        with pytest.raises(ProviderError, match=rf"host {which} \(127\.9\.0\.{which + 1}\).*no connection") as caught:
            eight.sync(found)
        assert caught.value.transient
        places = eight.places()
        assert [tree == TREE for tree in places] == [n != which for n in range(8)]
    eight.links[which].before = lambda op: None
    report = eight.sync(found)
    assert eight.places() == [TREE] * 8
    assert report.server_bytes < (size_of(found) if touched else size_of(found) * OVERHEAD)
    assert report.changed_hosts == (1 if touched else 8)


def test_what_arrived_is_not_sent_again(eight: Slice) -> None:
    found = eight.upload({b"%d" % n: ("file", 0o644, os.urandom(2 << 20)) for n in range(8)})
    eight.links = eight.links[:1]
    eight.links[0].before = Dies("files.put", after=3)
    with pytest.raises(ProviderError):
        eight.sync(found)
    eight.links[0].before = lambda op: None
    report = eight.sync(found)
    assert report.server_bytes < size_of(found) * 0.8


def test_a_job_that_changed_what_was_to_be_reused(eight: Slice) -> None:
    """Between the question and the apply a file vanishes whose content the new tree needs."""
    eight.sync(eight.upload({b"a": ("file", 0o644, b"the content")}))
    found = eight.upload({b"b": ("file", 0o644, b"the content")}, "new")
    link = eight.links[2]

    def vanish(op: str) -> None:
        if op == "files.apply" and link.calls.count("files.apply") == 1:
            (link.host.home / "w/a").write_bytes(b"THE CONTENT")

    link.before = vanish
    eight.sync(found)
    assert eight.places() == [{b"b": ("file", 0o644, b"the content")}] * 8
    assert link.calls[-3:] == ["files.apply", "files.pull", "files.apply"]


def test_a_damaged_copy_on_the_server_is_found(eight: Slice) -> None:
    found = eight.upload({b"f": ("file", 0o644, b"content"), b"g": ("file", 0o644, b"good")})
    digest = next(entry.sha256 for entry in found.manifest.entries if entry.path == "f")
    (eight.blobs.root / digest).write_bytes(b"c0ntent")
    with pytest.raises(UserError, match="1 of the files the server had kept were damaged"):
        eight.sync(found)
    assert eight.blobs.missing(found.manifest.sizes) == [digest]
    eight.upload({b"f": ("file", 0o644, b"content"), b"g": ("file", 0o644, b"good")}, "again")
    eight.sync(found)
    assert eight.places()[7] == {b"f": ("file", 0o644, b"content"), b"g": ("file", 0o644, b"good")}


def test_contents_that_were_never_uploaded(eight: Slice) -> None:
    found = scanned(eight.folder / "t", {b"f": ("file", 0o644, b"content")})
    with pytest.raises(UserError, match="never uploaded"):
        eight.sync(found)


def test_a_refusal_reaches_the_user(eight: Slice) -> None:
    (eight.links[6].host.home / "w").write_text("in the way")
    with pytest.raises(ProviderError, match=r"host 6 .*is a file on the host") as caught:
        eight.sync(eight.upload(TREE))
    assert not caught.value.transient


def test_no_hosts_and_an_empty_tree(tmp_path: Path) -> None:
    none = Slice(tmp_path / "none", 0)
    assert none.sync(none.upload({})).hosts == 0
    one = Slice(tmp_path / "one", 1)
    one.sync(one.upload({}))
    assert one.places() == [{}]


def test_sixty_four_hosts(tmp_path: Path) -> None:
    hosts = Slice(tmp_path, 64)
    found = hosts.upload({b"f": ("file", 0o644, os.urandom(1 << 20)), b"g": ("file", 0o644, b"g")})
    try:
        report = hosts.sync(found)
    finally:
        for link in hosts.links:
            peers.close(str(link.host.state))
    places = hosts.places()
    assert places == [places[0]] * 64 and len(places[0]) == 2
    assert size_of(found) <= report.server_bytes <= size_of(found) * OVERHEAD


# With real agents --------------------------------------------------------------------------------------------------------


def test_real_agents(tmp_path: Path) -> None:
    """The same through the agents as they run on hosts: processes, sockets and all."""
    program, marks = tmp_path / "agent.pyz", [f"sync-{os.getpid()}-{n}" for n in range(3)]
    bundle().write(program)
    build(tmp_path / "tree", TREE)
    found = scan(tmp_path / "tree")
    blobs = BlobStore(tmp_path / "blobs")
    blobs.put_pack(found.pack(found.manifest.sizes))

    async def go() -> tuple[SyncReport, SyncReport]:
        links = []
        for n, mark in enumerate(marks):
            home = tmp_path / f"host{n}"
            home.mkdir()
            environment = {"PATH": os.environ["PATH"], "PODWAY_HOST_ID": mark}
            await link_module.start_local_agent(program, home, f"127.9.2.{n + 1}", environment)
            links.append(link_module.AgentLink(link_module.connect_local(home), address=f"127.9.2.{n + 1}"))
        try:
            first = await sync(links, found.manifest, "~/w", blobs)
            return first, await sync(links, found.manifest, "~/w", blobs)
        finally:
            for link in links:
                link.close()

    try:
        first, second = asyncio.run(go())
    finally:
        for mark in marks:
            assert asyncio.run(link_module.kill_local_host(mark)) == []
    assert [snapshot(tmp_path / f"host{n}/w") for n in range(3)] == [TREE] * 3
    assert size_of(found) <= first.server_bytes <= size_of(found) * OVERHEAD
    assert first.peer_bytes >= 2 * size_of(found)
    assert (second.server_bytes, second.peer_bytes, second.changed_hosts) == (0, 0, 0)
    assert (tmp_path / "host0/w").stat().st_mode & 0o777 == 0o755


def test_time_limits_grow_with_the_number_of_files(tmp_path: Path) -> None:
    """A host that takes 10 ms for each of 100,000 small files is slow, not silent."""
    limits: dict[str, float] = {}

    class Noting:
        address = "127.0.0.1"

        async def call(self, op: str, *, body: bytes = b"", timeout: float | None = None, **fields: object) -> object:
            limits[op] = timeout or 0.0
            reply = {"in_place": False, "known": True, "applied": True, "written": 0, "deleted": 0}
            return link_module.AgentReply(fields=reply, body=b"")

    entries = tuple(
        TreeEntry(path=f"f{number}", kind="file", mode=0o644, size=1, sha256=f"{number:064x}")
        for number in range(100_000)
    )
    asyncio.run(sync([Noting()], TreeManifest(entries=entries), "~/x", BlobStore(tmp_path / "blobs")))  # type: ignore[list-item]
    assert min(limits["files.missing"], limits["files.apply"]) > 1000


def test_how_far_a_sync_is_can_be_read() -> None:
    assert str(Progress(stage="send", done=1 << 20, total=3 << 20)) == "1.0 MiB of 3.0 MiB are on the first host"
    assert str(Progress(stage="spread", done=3, total=64)) == "3 of 64 hosts have it"
    assert str(Progress(stage="apply", done=1, total=1)) == "1 of 1 host are done"


def test_of_a_large_file_that_changed_little_every_host_gets_a_few_blocks(eight: Slice) -> None:
    eight.sync(eight.upload(TREE))
    content = bytearray(TREE[b"weights"][2])
    content[4_000_000:4_000_100] = os.urandom(100)
    content[9_000_000:9_000_000] = b"and some more"
    new = {**TREE, b"weights": ("file", 0o644, bytes(content))}
    report = eight.sync(eight.upload(new, "new"))
    assert eight.places() == [new] * 8
    assert report.server_bytes < 8 * 100_000 and report.peer_bytes == 0
    assert [link.calls for link in eight.links] == [["files.missing", "files.apply"]] * 8


def test_a_host_whose_file_a_job_has_changed_gets_it_whole(eight: Slice) -> None:
    eight.sync(eight.upload(TREE))
    (eight.links[3].host.home / "w/weights").write_bytes(b"a job's work")
    new = {**TREE, b"weights": ("file", 0o644, TREE[b"weights"][2] + b"more")}
    report = eight.sync(eight.upload(new, "new"))
    assert eight.places() == [new] * 8 and report.peer_bytes > len(TREE[b"weights"][2])
    assert [link.calls for link in eight.links if link is not eight.links[3]].count(
        ["files.missing", "files.apply"]
    ) >= 5


def test_a_large_file_goes_on_where_it_stopped(eight: Slice) -> None:
    eight.links = eight.links[:1]
    found = eight.upload({b"weights": ("file", 0o644, os.urandom(40 << 20))})
    eight.links[0].before = Dies("files.put", after=8)  # the manifest, and seven pieces of 4 MiB
    with pytest.raises(ProviderError):
        eight.sync(found)
    eight.links[0].before = lambda op: None
    report = eight.sync(found)
    assert report.server_bytes < (13 << 20)
    assert eight.places()[0][b"weights"][2] == (eight.folder / "tree/weights").read_bytes()
