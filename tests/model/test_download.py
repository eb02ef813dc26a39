"""Models by their ids and by gs:// addresses: downloaded, continued, found again, and every refusal in a sentence."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from podway.errors import UserError
from podway.model.download import fetch, is_address
from tests.model.hub import Hub, running

MODEL = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 50_000,
    "pytorch_model.bin": b"not wanted",
    "original/params.json": b"not wanted either",
}
# huggingface_hub reads its environment when it is imported: each case is a process of its own.
SCRIPT = """
import json, sys
from podway.errors import UserError
from podway.model.download import fetch
lines = []
try:
    folder = fetch(sys.argv[1], weights=sys.argv[2] == "all", log=lines.append)
    found = {p.name: p.stat().st_size for p in folder.iterdir()}
    print(json.dumps({"folder": str(folder), "files": found, "log": lines}))
except UserError as error:
    print(json.dumps({"what": error.what, "hint": error.hint}))
"""


def ask(hub: Hub | str, home: Path, name: str, what: str = "all", **environment: str) -> dict[str, object]:
    url = hub if isinstance(hub, str) else hub.url
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, what],
        capture_output=True, text=True, timeout=300, check=False,
        env={"HF_ENDPOINT": url, "HF_HOME": str(home), "HOME": str(home), "PATH": "/usr/bin:/bin", "HF_HUB_DISABLE_XET": "1"}
        | environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def test_only_what_is_read_is_downloaded_and_the_next_time_nothing(tmp_path: Path) -> None:
    with running(Hub({"a/small": MODEL})) as hub:
        small = ask(hub, tmp_path, "a/small", "configuration")
        assert set(small["files"]) == {"config.json", "tokenizer.json"}
        whole = ask(hub, tmp_path, "a/small@main")
        assert whole["folder"] == small["folder"] == f"{tmp_path}/hub/models--a--small/snapshots/{hub.commit}"
        assert whole["files"]["model.safetensors"] == 12_800_000
        assert set(whole["files"]) == {"config.json", "tokenizer.json", "model.safetensors"}
        before = len(hub.asked)
        again = ask(hub, tmp_path, "a/small")
        assert again["files"] == whole["files"] and not again["log"]
        assert not [one for one in hub.asked[before:] if "resolve" in one[1]], "no file is asked for twice"
    found = ask(hub, tmp_path, "a/small")  # the hub is gone now
    assert found["files"] == whole["files"]


def test_a_broken_connection_is_resumed(tmp_path: Path) -> None:
    with running(Hub({"a/small": MODEL})) as hub:
        hub.break_after = 11 << 20
        whole = ask(hub, tmp_path, "a/small")
        assert Path(str(whole["folder"]), "model.safetensors").read_bytes() == MODEL["model.safetensors"]
        first, second = hub.fetched("model.safetensors")
        assert first == "" and second.startswith("bytes=") and 0 < int(second[6:].rstrip("-")) <= 11 << 20


def test_what_a_lost_hub_leaves_is_told_in_one_sentence(tmp_path: Path) -> None:
    with running(Hub({"a/small": MODEL})) as hub:
        hub.break_after, hub.refuse_after_break = 11 << 20, True
        lost = ask(hub, tmp_path, "a/small")
        assert lost["what"] == f"{hub.url} answered 500 for a/small" and "complete files are kept" in lost["hint"]
        url = hub.url
    part = ask(url, tmp_path, "a/small")
    assert part["what"] == (
        f"a/small could not be downloaded: {url} cannot be reached, and only a part of it is in the cache"
    )
    with running(Hub({"a/small": MODEL})) as hub:  # back again
        whole = ask(hub, tmp_path, "a/small")
        assert Path(str(whole["folder"]), "model.safetensors").read_bytes() == MODEL["model.safetensors"]
        assert hub.fetched("model.safetensors") == [""] and not hub.fetched("tokenizer.json"), "only what is missing"


def test_wrong_ids_gated_models_and_no_network(tmp_path: Path) -> None:
    with running(
        Hub({"a/small": MODEL, "a/gated": MODEL, "a/empty": {"README.md": b""}}, frozenset({"a/gated"}))
    ) as hub:
        wrong = ask(hub, tmp_path, "a/other")
        assert wrong["what"] == f"a/other: no such directory, and no such model at {hub.url}"
        assert ask(hub, tmp_path, "a/small@v9")["what"] == "a/small@v9: the model has no such revision"
        gated = ask(hub, tmp_path, "a/gated")
        assert (
            gated["what"] == "a/gated is gated"
            and f"{hub.url}/a/gated" in gated["hint"]
            and "HF_TOKEN" in gated["hint"]
        )
        assert "no access" in ask(hub, tmp_path, "a/gated", HF_TOKEN="hf_other")["what"]
        assert "model.safetensors" in ask(hub, tmp_path, "a/gated", HF_TOKEN="hf_allowed")["files"]
        assert ask(hub, tmp_path, "a/empty")["what"] == "a/empty holds no config.json"
        offline = ask(hub, tmp_path, "a/new", HF_HUB_OFFLINE="1")
        assert offline["what"] == "a/new could not be downloaded: HF_HUB_OFFLINE is set, and it is not in the cache"
    nobody = ask("http://127.0.0.1:9", tmp_path, "a/new")
    assert nobody["what"] == (
        "a/new could not be downloaded: http://127.0.0.1:9 cannot be reached, and it is not in the cache"
    )


def test_which_names_are_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_address("Qwen/Qwen3-8B") and is_address("Qwen/Qwen3-8B@refs/pr/1") and is_address("gs://b/model")
    for name in ("llama3-8b", "./a/b", "/a/b", "~/a", "a/b/c", "../a", "a/b@", "a b/c", "a/b\n"):
        assert not is_address(name), name
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert not is_address("a/b") and fetch("a/b") == Path("a/b"), "a folder goes first"


def test_a_model_in_a_bucket_is_downloaded_once_and_a_broken_one_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blob:
        def __init__(self, name: str, data: bytes) -> None:
            self.name, self.data, self.size, self.generation = name, data, len(data), 7

        def download_to_file(self, file: IO[bytes], start: int, **_: object) -> None:
            asked.append((self.name, start))
            cut = breaks and self.name.endswith(".safetensors")
            file.write(self.data[start : start + 1000] if cut else self.data[start:])
            if cut:
                raise ConnectionError("reset")

    def listed(bucket: str, prefix: str) -> list[Blob]:
        assert bucket == "mine"
        return [Blob(f"out/{name}", data) for name, data in MODEL.items() if f"out/{name}".startswith(prefix)]

    asked: list[tuple[str, int]] = []
    breaks = True
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("podway.model.download.bucket_client", lambda: SimpleNamespace(list_blobs=listed))
    with pytest.raises(UserError, match=r"cannot download gs://mine/out/model.safetensors: reset"):
        fetch("gs://mine/out", log=lambda _: None)
    breaks = False
    folder = fetch("gs://mine/out/", log=lambda _: None)
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert ("out/model.safetensors", 1000) in asked
    before = len(asked)
    assert fetch("gs://mine/out", log=lambda _: None) == folder and len(asked) == before
    with pytest.raises(UserError, match=r"no config\.json in gs://mine/elsewhere"):
        fetch("gs://mine/elsewhere")
