"""The cache of tokens: made once, whole or not at all, and recreated when it is damaged."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podway.errors import UserError
from podway.model.tokenizer import ByteTokenizer
from podway.train import sources, token_cache
from podway.train.data import Batch, DataConfig, open_data
from podway.train.token_cache import Document, TokenCache, key_of


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("some text to train on, " * 50)
    return tmp_path / "a.txt"


def batch_of(text: Path, cache: Path) -> Batch:
    config = DataConfig(paths=(str(text),), cache=str(cache))
    return open_data(config, batch=2, seq=64, process=0, processes=1).batch(0)


def shards(cache: Path) -> list[Path]:
    return [place for place in cache.iterdir() if place.name != "seen"]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts were tokenized, call by call."""
    calls: list[int] = []
    plain = ByteTokenizer.encode

    def encode(self: ByteTokenizer, texts: list[str]) -> list[np.ndarray]:
        calls.append(len(texts))
        return plain(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    return calls


def test_tokens_are_made_once_and_follow_content(text: Path, tmp_path: Path, counted: list[int]) -> None:
    cache = tmp_path / "cache"
    first = batch_of(text, cache)
    assert len(counted) == 1
    assert (batch_of(text, cache)["inputs"] == first["inputs"]).all()
    assert len(counted) == 1, "found"
    copy = tmp_path / "moved.txt"
    shutil.copy(text, copy)
    os.utime(copy, (1, 1))
    batch_of(copy, cache)
    assert len(counted) == 1, "the same content under another name"
    text.write_text(text.read_text().replace("train", "strive"))
    assert (batch_of(text, cache)["inputs"] != first["inputs"]).any()
    assert len(counted) == 2
    assert len(shards(cache)) == 2


@pytest.mark.parametrize("damage", ["truncate", "garble", "missing", "empty", "swap"])
def test_a_damaged_shard_is_recreated(text: Path, tmp_path: Path, counted: list[int], damage: str) -> None:
    cache = tmp_path / "cache"
    first = batch_of(text, cache)
    (shard,) = shards(cache)
    if damage == "truncate":
        os.truncate(shard / "tokens.bin", 10)
    elif damage == "garble":
        (shard / "about.json").write_bytes(b'{"tokens": "many"')
    elif damage == "missing":
        (shard / "ends.bin").unlink()
    elif damage == "empty":
        shutil.rmtree(shard)
        shard.mkdir()
    else:
        (shard / "ends.bin").write_bytes(np.int64(3).tobytes())
    assert (batch_of(text, cache)["inputs"] == first["inputs"]).all()
    assert len(counted) == 2
    assert len(shards(cache)) == 1, "and nothing is left of the old one"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.lists(st.tuples(st.lists(st.integers(0, 70_000), max_size=6), st.booleans()), max_size=8))
def test_what_is_written_is_read(tmp_path: Path, parts: list[tuple[list[int], bool]]) -> None:
    cache = TokenCache(tmp_path / "cache")
    parts = [*parts, ([1], True)]
    documents = [Document(np.array(tokens, np.uint32), ends=ends) for tokens, ends in parts]
    shutil.rmtree(cache.place / "k", ignore_errors=True)
    shard = cache.write("k", documents, width=4, answers=False)
    assert shard.tokens.tolist() == [token for tokens, _ in parts for token in tokens]
    expected, total = [], 0
    for tokens, ends in parts:
        total += len(tokens)
        if ends and total > (expected[-1] if expected else 0):
            expected.append(total)
    assert shard.ends.tolist() == expected
    assert shard.about.largest == max(shard.tokens.tolist())


def test_many_at_once_make_one(text: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    found: list[Batch] = []
    threads = [threading.Thread(target=lambda: found.append(batch_of(text, cache))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all((one["inputs"] == found[0]["inputs"]).all() for one in found)
    assert len(shards(cache)) == 1


def test_who_is_killed_leaves_nothing_that_looks_whole(text: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from podway.train.token_cache import *\n"
        "import numpy as np\n"
        "def documents():\n"
        "    yield Document(np.arange(100, dtype=np.uint32))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "TokenCache(Path(sys.argv[1])).write('k', documents(), width=2, answers=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(cache)], check=False)
    assert done.returncode == -9
    assert TokenCache(cache).find("k") is None
    (left,) = shards(cache)
    assert left.name.startswith("partial-")
    for place in [*left.iterdir(), left]:
        os.utime(place, (1, 1))
    TokenCache(cache)
    assert not shards(cache), "what nobody has touched for a day is cleared away"


def test_notes_that_cannot_be_read_are_recreated(text: Path, tmp_path: Path) -> None:
    cache = TokenCache(tmp_path / "cache")
    known = cache.content_of("stamp", [text])
    (cache.place / "seen" / "stamp").write_text("torn")
    assert cache.content_of("stamp", [text]) == known
    assert (cache.place / "seen" / "stamp").read_text() == known


def test_keys_follow_every_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key_of("a", "b"), key_of("a", "c"), key_of("ab")}
    monkeypatch.setattr(token_cache, "_FORMAT", 99)
    keys.add(key_of("a", "b"))
    assert len(keys) == 4


def test_a_folder_that_cannot_be_written(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write tokens") as caught:
        batch_of(text, tmp_path / "file" / "cache")
    assert "data.cache" in caught.value.hint


FULL_DISK = """
import sys
from podway.errors import UserError
from podway.train.data import DataConfig, open_data
try:
    config = DataConfig(paths=(sys.argv[1],), cache=sys.argv[2])
    open_data(config, batch=1, seq=8, process=0, processes=1)
except UserError as error:
    print(error)
"""


def test_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_text("words and words\n" * 80_000)
    small = tmp_path / "small"
    small.mkdir()
    mounted = f'mount -t tmpfs -o size=1m tmpfs {small} && exec {sys.executable} -c "$0" "$@"'
    command = ["unshare", "-rm", "sh", "-c", mounted, FULL_DISK, str(tmp_path / "big.txt"), str(small)]
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert f"no space is left for tokens in {small}" in done.stdout, done.stderr
    assert "data.cache" in done.stdout


def test_a_second_start_does_not_read_the_text(text: Path, tmp_path: Path) -> None:
    first = batch_of(text, tmp_path / "cache")
    facts = text.stat()
    text.write_text(text.read_text().upper())  # as a file that was never touched: same size, same time
    os.utime(text, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert (batch_of(text, tmp_path / "cache")["inputs"] == first["inputs"]).all()


def test_hosts_begin_at_different_files_and_end_with_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_GROUP_BYTES", 100)
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(str(number) * 90)
    made: list[str] = []
    plain = ByteTokenizer.encode

    def encode(self: ByteTokenizer, texts: list[str]) -> list[np.ndarray]:
        made.append(texts[0][0])
        return plain(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    batches = []
    for host in range(2):  # each with a disk of its own
        config = DataConfig(paths=(f"{tmp_path}/*.txt",), cache=str(tmp_path / f"disk-{host}"))
        batches.append(open_data(config, batch=4, seq=64, process=host, processes=2).rows(0, range(4)))
    assert "".join(made) == "012345" + "345012"
    assert (batches[0]["inputs"] == batches[1]["inputs"]).all()
