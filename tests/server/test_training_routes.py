"""The metrics of a training run over HTTP, and the plan of the same step."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from podway.control.archive import Archive
from podway.control.records import ClusterState, Job, JobState
from podway.control.store import open_store, sqlite_url
from podway.hosts.blobs import BlobStore
from podway.hosts.manifest import FileTree
from podway.hosts.tree import scan
from podway.task.task import Task
from tests.control.samples import cluster, job
from tests.server.in_process import server_in

TOKEN = "test-token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
TRAIN = "podway train model.name=llama3.1-8b mesh.shape=fsdp=16 batch.sequences=16 batch.length=2048"


def step(number: int) -> str:
    return f"completed step: {number}, seconds: 0.5, Tokens/s/device: 10.0, loss: {9 - number}.0, grad_norm: 1.0\n"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[TestClient]:
    with server_in(tmp_path, TOKEN) as client:
        yield client


def add(place: Path, ended: Job, output: dict[str, str]) -> None:
    """A job that has ended, with what its first rank printed in each phase."""
    store = open_store(sqlite_url(place / "p.db"))
    if store.find("demo") is None:
        store.add_cluster(cluster(state=ClusterState.UP))
    store.add_job(ended)
    store.engine.dispose()
    archive = Archive(place / "logs")
    archive.close(ended)
    for label, text in output.items():
        (archive.place(ended) / f"0.{label}").write_text(text)


def frames(web: TestClient, query: str = "") -> list[dict[str, Any]]:
    answer = web.get(f"/v1/clusters/demo/jobs/1/metrics{query}", headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_metrics_of_every_attempt_and_from_a_cursor_on(web: TestClient, tmp_path: Path) -> None:
    ended = job(
        state=JobState.SUCCEEDED,
        task=Task(run=TRAIN),
        attempt=2,
        pids={"setup": [1], "run": [2], "run-2": [3]},
        ended=2000.0,
    )
    first = "hello\n" + "".join(map(step, range(5))) + "completed st"
    add(tmp_path, ended, {"setup": step(99), "run": first, "run-2": "".join(map(step, range(3, 8)))})
    found = frames(web)
    assert found[0]["devices"] == 16 and found[-1]["ended"]
    told = [(frame["attempt"], [one["step"] for one in frame["steps"]]) for frame in found if frame["steps"]]
    assert told == [(1, [0, 1, 2, 3, 4]), (2, [3, 4, 5, 6, 7])]
    again = frames(web, f"?cursor={found[1]['cursor']}&follow=false")
    assert [one["step"] for frame in again for one in frame["steps"]] == [3, 4, 5, 6, 7]
    assert web.get("/v1/clusters/demo/jobs/1/metrics?cursor=x", headers=HEADERS).status_code == 400


def test_the_plan_of_a_run_is_told(web: TestClient, tmp_path: Path) -> None:
    add(tmp_path, job(state=JobState.SUCCEEDED, task=Task(run=TRAIN), ended=2000.0), {})
    found = web.get("/v1/clusters/demo/jobs/1/planned", headers=HEADERS).json()
    assert found["model"] == "llama3.1-8b" and found["plan"]["axes"] == {"fsdp": 16} and found["plan"]["batch"] == 16
    assert 0 < found["plan"]["mfu"] < 1 and sum(found["classes"].values()) == pytest.approx(
        found["plan"]["step_s"], rel=0.3
    )
    runs = web.get("/v1/runs", headers=HEADERS).json()["runs"]
    assert [(run["cluster"], run["job"], run["model"]) for run in runs] == [("demo", 1, "llama3.1-8b")]


def test_settings_come_from_the_jobs_own_files_and_never_from_the_servers(web: TestClient, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "run.yaml").write_text("model: {name: llama3.1-8b}\nbatch: {sequences: 16, length: 2048}\n")
    looked, blobs = scan(folder), BlobStore(tmp_path / "blobs")
    blobs.put_pack(looked.pack(looked.manifest.sizes))
    tree = FileTree(target="~/sky_workdir", manifest=blobs.put(looked.manifest.encode()), kind="workdir")
    add(
        tmp_path, job(state=JobState.SUCCEEDED, task=Task(run="podway train run.yaml"), files=(tree,), ended=2000.0), {}
    )
    (tmp_path / "outside.yaml").write_text("model: {name: secret-name}\n")
    outside = Task(run=f"podway train {tmp_path / 'outside.yaml'}")
    add(tmp_path, job(2, state=JobState.SUCCEEDED, task=outside, files=(tree,), ended=2000.0), {})
    add(tmp_path, job(3, state=JobState.SUCCEEDED, task=Task(run="echo hello"), ended=2000.0), {})
    answers = [web.get(f"/v1/clusters/demo/jobs/{n}/planned", headers=HEADERS).json() for n in (1, 2, 3)]
    assert answers[0]["model"] == "llama3.1-8b" and answers[0]["plan"]["seq"] == 2048
    assert answers[1]["code"] == "not_planned" and "secret-name" not in json.dumps(answers[1])
    assert answers[2]["code"] == "not_training"


def test_a_model_is_a_name_or_a_config_and_never_a_file_of_the_server(web: TestClient, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256,
              "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "head_dim": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (str(tmp_path), str(tmp_path / "config.json"), ".", "src"):
        answer = web.post("/v1/plan", json={"model": model, "tpu": "v6e-8"}, headers=HEADERS)
        assert answer.status_code == 404 and "unknown model" in answer.text, answer.text
    found = web.post("/v1/plan", json={"config": config, "tpu": "v6e-8"}, headers=HEADERS).json()
    assert found["parameters"] > 1e9 and found["plans"]
    body = {"model": str(tmp_path), "slice": "v6e-8", "mesh": "fsdp=8", "batch": 8}
    assert web.post("/v1/rehearsals", json=body, headers=HEADERS).status_code == 404
