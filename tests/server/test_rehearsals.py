"""Rehearsals that the server runs: the real compiler, in a process of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.testclient import TestClient

from podway.extras import installed
from podway.server.page_api import RehearsalBody
from podway.server.rehearsals import MOST_OPEN, command_of
from tests.server.in_process import server_in

TOKEN = "test-token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
BODY = {"model": "tiny-llama3", "slice": "v6e-8", "mesh": "fsdp=8", "batch": 8, "seq": 512}
needs_compiler = pytest.mark.skipif(not installed("rehearse"), reason="libtpu is not installed")


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv("PODWAY_HOME", str(tmp_path))
    with server_in(tmp_path, TOKEN) as client:
        yield client


def ask(web: TestClient, **changes: Any) -> dict[str, Any]:
    answer = web.post("/v1/rehearsals", json={**BODY, **changes}, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def followed(web: TestClient, key: str) -> list[dict[str, Any]]:
    answer = web.get(f"/v1/rehearsals/{key}", headers=HEADERS)
    return [json.loads(line) for line in answer.text.splitlines()]


@needs_compiler
@pytest.mark.timeout(600)
def test_a_step_is_compiled_and_a_wrong_one_is_explained(web: TestClient) -> None:
    good, bad = ask(web), ask(web, remat="no-such-policy")
    seen = followed(web, good["id"])
    assert {"lowering", "compiling"} & {one["stage"] for one in seen}
    end = seen[-1]
    assert end["state"] == "done" and end["compiled"]["fits"] and end["compiled"]["step_s"] > 0, end
    assert 0 < end["compiled"]["bytes"] < end["compiled"]["limit"] and end["compiled"]["buffers"]
    end = followed(web, bad["id"])[-1]
    assert end["state"] == "failed" and "no-such-policy" in end["note"]
    assert len(web.get("/v1/rehearsals", headers=HEADERS).json()["rehearsals"]) == 2


@needs_compiler
@pytest.mark.timeout(600)
def test_they_wait_for_each_other_are_bounded_and_can_be_cancelled(web: TestClient) -> None:
    keys = [ask(web, batch=8 * (1 + number))["id"] for number in range(MOST_OPEN)]
    assert web.post("/v1/rehearsals", json=BODY, headers=HEADERS).status_code == 429
    states = [one["state"] for one in web.get("/v1/rehearsals", headers=HEADERS).json()["rehearsals"]]
    assert states.count("running") <= 1
    for key in reversed(keys):
        assert web.delete(f"/v1/rehearsals/{key}", headers=HEADERS).json()["state"] == "cancelled"
        assert followed(web, key)[-1]["ended"] is not None
    left = [one for one in psutil.Process().children(recursive=True) if "rehearse" in " ".join(one.cmdline())]
    psutil.wait_procs(left, timeout=60)
    assert not [one for one in left if one.is_running()]


def test_another_persons_rehearsal_is_not_there(web: TestClient) -> None:
    made = web.post("/v1/tokens", json={"user": "eve"}, headers=HEADERS).json()["token"]
    theirs = {"Authorization": f"Bearer {made}"}
    key = ask(web)["id"]
    assert web.get(f"/v1/rehearsals/{key}", headers=theirs).status_code == 404
    assert web.delete(f"/v1/rehearsals/{key}", headers=theirs).status_code == 404
    assert web.get("/v1/rehearsals", headers=theirs).json()["rehearsals"] == []
    web.delete(f"/v1/rehearsals/{key}", headers=HEADERS)


@pytest.mark.parametrize("word", ["--full", "-o", "x y", "a;b", "$(id)"])
def test_what_a_person_writes_stays_one_word(word: str, tmp_path: Path) -> None:
    body = RehearsalBody(model=word, slice=word, mesh=word, batch=1, remat=word)
    words = command_of(body, tmp_path)
    assert words[-2:] == ["--", word]
    assert [one for one in words[5:-2] if not one.startswith("--")] == ["-o", "json"]
