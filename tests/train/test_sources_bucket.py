"""gs:// paths, read by Google's own client from a small server that speaks the storage API."""

import fnmatch
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

import numpy as np
import pytest

from podway.errors import UserError
from podway.train.data import DataConfig, open_data
from podway.train.sources import expand

pytest.importorskip("google.cloud.storage")
CONTENT = {"corpus/a.txt": b"alpha " * 40, "corpus/b.txt": b"beta " * 40, "corpus-2/c.txt": b"gamma", "corpus/": b""}


class Bucket(BaseHTTPRequestHandler):
    """Lists and gives the objects of one bucket called `mine`."""

    fetched: list[str] = []  # noqa: RUF012 - shared by all requests on purpose

    def do_GET(self) -> None:
        url = urlparse(self.path)
        asked = {key: values[0] for key, values in parse_qs(url.query).items()}
        parts = [unquote(part) for part in url.path.split("/") if part]
        if "mine" not in parts:
            self.answer(404, b'{"error": {"message": "no such bucket"}}')
        elif parts[-1] == "mine":
            self.answer(200, b'{"name": "mine", "location": "US"}')
        elif parts[-1] == "o":
            names = [n for n in CONTENT if n.startswith(asked.get("prefix", ""))]
            if "matchGlob" in asked:
                names = [n for n in names if fnmatch.fnmatch(n, asked["matchGlob"])]
            self.answer(200, json.dumps({"kind": "storage#objects", "items": [facts(n) for n in names]}).encode())
        elif asked.get("alt") == "media":
            self.fetched.append(parts[-1])
            self.media(CONTENT[parts[-1]])
        else:
            self.answer(200, json.dumps(facts(parts[-1])).encode())

    def media(self, content: bytes) -> None:
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        end = min(int(last) + 1 if last else len(content), len(content))
        body = content[int(first) : end]
        self.answer(206, body, {"Content-Range": f"bytes {first}-{end - 1}/{len(content)}"})

    def answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def facts(name: str) -> dict[str, str]:
    return {"name": name, "bucket": "mine", "size": str(len(CONTENT[name])), "generation": "7", "id": f"mine/{name}/7"}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Bucket]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "test")
    Bucket.fetched.clear()
    yield Bucket
    server.shutdown()
    server.server_close()
    thread.join()


def test_files_of_a_bucket_are_listed_by_prefix_and_glob(bucket: type[Bucket]) -> None:
    folder = [file.path for file in expand("gs://mine/corpus", None)]
    assert folder == ["gs://mine/corpus/a.txt", "gs://mine/corpus/b.txt"], "not the one that only begins alike"
    assert [file.path for file in expand("gs://mine/*/c.txt", None)] == ["gs://mine/corpus-2/c.txt"]
    assert [file.size for file in expand("gs://mine/corpus/a.txt", None)] == [240]


def test_data_from_a_bucket_is_fetched_once(bucket: type[Bucket], tmp_path: Path) -> None:
    config = DataConfig(paths=("gs://mine/corpus",), cache=str(tmp_path), seed=None)
    first = open_data(config, batch=2, seq=50, process=0, processes=1).batch(0)
    assert bytes(first["inputs"].astype(np.uint8).reshape(-1))[:12] == b"alpha alpha "
    assert sorted(bucket.fetched) == ["corpus/a.txt", "corpus/b.txt"]
    again = open_data(config, batch=2, seq=50, process=0, processes=1).batch(0)
    assert (again["inputs"] == first["inputs"]).all()
    assert len(bucket.fetched) == 2
    assert not list(tmp_path.glob("partial-*"))


def test_buckets_that_are_not_there(bucket: type[Bucket]) -> None:
    with pytest.raises(UserError, match="no file matches gs://mine/none"):
        expand("gs://mine/none", None)
    with pytest.raises(UserError, match="cannot list gs://other/x"):
        expand("gs://other/x", None)
