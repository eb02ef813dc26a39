"""Large files on their way to the server: what changed of them, and what had not arrived when the server was killed."""

import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from podway.server import api
from podway.server.uploading import NoProgress, upload
from podway.task.task import LocalDir, Task
from tests.e2e.harness import Podway

pytestmark = pytest.mark.e2e
SIZE = 24 << 20


class Counting:
    """The server as a client sees it, with the bytes of each pack; the server is killed after `kill_after` of them."""

    def __init__(self, pod: Podway, kill_after: int = 0) -> None:
        self.pod, self.kill_after = pod, kill_after
        self.sent: list[int] = []

    def missing(self, digests: Iterable[str]) -> api.DigestsReply:
        return self.pod.client.missing(digests)

    def content_blocks(self, digest: str) -> api.BlocksReply:
        return self.pod.client.content_blocks(digest)

    def upload(self, pack: Iterable[bytes]) -> None:
        self.sent.append(0)
        self.pod.client.upload(self._counted(pack))

    def _counted(self, pack: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pack:
            self.sent[-1] += len(piece)
            yield piece
            if self.kill_after and self.sent[-1] > self.kill_after:
                self.kill_after = 0
                self.pod.kill_server()
                (self.pod.home / "server.json").unlink()
                self.pod.start()


def test_an_upload_goes_on_after_the_server_was_killed(pod: Podway, tmp_path: Path) -> None:
    pod.start()
    (tmp_path / "work").mkdir()
    content = random.Random(1).randbytes(SIZE)
    (tmp_path / "work/weights").write_bytes(content)
    task = Task(run="true", workdir=LocalDir(path=str(tmp_path / "work")))
    server = Counting(pod, kill_after=SIZE * 3 // 4)
    (tree,) = upload(server, NoProgress(), task)
    whole, rest, manifest = server.sent
    assert whole > SIZE * 3 // 4 and rest < SIZE * 3 // 4 and manifest < 1000
    assert pod.client.missing([tree.manifest]).missing == []
    kept = [path for path in (pod.home / "blobs").iterdir() if path.stat().st_size == SIZE]
    assert [path.read_bytes() == content for path in kept] == [True]


def test_of_a_changed_file_the_changed_blocks_go_up(pod: Podway, tmp_path: Path) -> None:
    pod.start()
    (tmp_path / "work").mkdir()
    content = bytearray(random.Random(2).randbytes(SIZE))
    (tmp_path / "work/weights").write_bytes(content)
    task = Task(run="true", workdir=LocalDir(path=str(tmp_path / "work")))
    upload(Counting(pod), NoProgress(), task)
    content[SIZE // 2 : SIZE // 2 + 100] = os.urandom(100)
    content[1000:1000] = b"inserted"
    (tmp_path / "work/weights").write_bytes(content)
    server = Counting(pod)
    upload(server, NoProgress(), task)
    assert sum(server.sent) < 500_000
    kept = [path.read_bytes() for path in (pod.home / "blobs").iterdir() if path.stat().st_size == SIZE + 8]
    assert kept == [bytes(content)]
