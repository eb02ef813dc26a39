"""docs/finetune-llama.md in miniature: examples/finetune-llama.yaml on a spot slice of the sandbox, with its output in a bucket.

The slice is preempted in the middle; the job comes back and goes on from its checkpoint, evaluates, exports the adapter and the merged
model, and `podway serve` answers in chat form from the bucket's address.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest

from podway.sandbox.running import Running, running_sandbox
from tests.conftest import free_port, wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_gcp_training import losses
from tests.e2e.test_recovery_cloud import living, start

ROOT = Path(__file__).parents[2]
PACKAGES = Path(jax.__file__).parent.parent
STEPS = 16
TINY = (
    "model.weights=null data.tokenizer=bytes data.template=chatml batch.sequences=4 batch.length=256 mesh.shape=data=1 "
    f"precision.compute=float32 model.kernel=reference schedule.steps={STEPS} checkpoint.every=4 evaluation.every=8 "
    "optimizer.rate=1e-2 logging.tensorboard=false"
)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """What `pip install` would bring to a host: `podway`, whose trainer takes a moment longer over each step."""
    place = tmp_path / "programs"
    place.mkdir(mode=0o755)
    (place / "podway").write_text('#!/bin/sh\nshift\nexec python3 -m tests.e2e.slow_train "$@"\n')
    (place / "podway").chmod(0o755)
    return place


@pytest.fixture
def cloud(tmp_path: Path, programs: Path) -> Iterator[Running]:
    shared = tuple(word for path in {PACKAGES, ROOT, programs} for word in ("--share", str(path)))
    with running_sandbox(tmp_path / "sandbox", options=shared) as running:
        yield running


def settings(cloud: Running, programs: Path) -> dict[str, str]:
    """Those of the example, and what a host of the sandbox needs to find its bucket."""
    return {
        "HF_TOKEN": "",
        "OUT": "gs://runs/tuned",
        "MODEL": "tiny-llama3",
        "FLAGS": TINY,
        "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": ":".join(map(str, (PACKAGES, ROOT, ROOT / "src"))),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "STORAGE_EMULATOR_HOST": cloud.rest,  # the host's own token is what gcsfs shows there
        "TENSORSTORE_GCS_HTTP_URL": cloud.rest,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": cloud.token,
        "GOOGLE_CLOUD_PROJECT": "sandbox",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else it asks over gRPC with TLS, which the sandbox has not
        "PODWAY_TEST_PAUSE": "0.5",
    }


@contextmanager
def served(model: str, home: Path) -> Iterator[str]:
    """`podway serve` of a model, once it answers."""
    port = free_port()
    words = ["serve", model, "--port", str(port), "--max-len", "256", "--max-seqs", "1"]
    with open(home / "serve.log", "wb") as log:
        env = {**os.environ, "XDG_CACHE_HOME": str(home / "cache")}
        process = subprocess.Popen([sys.executable, "-m", "podway.cli.main", *words], env=env, stdout=log, stderr=log)
    try:
        wait_until(lambda: answers(port) or process.poll() is not None, 240, "the model")
        assert process.poll() is None, (home / "serve.log").read_text()[-3000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(120)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@pytest.mark.soak
def test_preempted_tuned_exported_and_asked(
    pod: Podway, cloud: Running, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = pytest.importorskip("google.cloud.storage")
    pytest.importorskip("gcsfs")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.storage)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "sandbox")
    bucket = storage.Client(project="sandbox").create_bucket("runs")
    start(pod, cloud, tmp_path)
    example = ROOT / "examples" / "finetune-llama.yaml"
    pod.client.launch(example, cluster="tune", infra="gcp", env=settings(cloud, programs))

    def begun() -> bool:
        return any(
            blob.name.endswith("/4/commit_success.txt") for blob in bucket.list_blobs(prefix="tuned/checkpoints")
        )

    wait_until(lambda: begun() or pod.client.job("tune", 1).ended, 240, "a whole checkpoint")
    assert begun(), pod.log_text("tune", 1)[-3000:]
    node = next(one for one in living(cloud) if one["kind"] == "node")
    cloud.command("POST", "preempt", {"node": node["name"]})
    assert pod.finished("tune", 1, 300) == "SUCCEEDED", pod.log_text("tune", 1)[-3000:]

    text = pod.log_text("tune", 1)
    assert pod.client.job("tune", 1).attempt == 2 and re.search(r"resumed from step (4|8|12)", text), text[-3000:]
    told = losses(text)
    assert sorted(told) == list(range(STEPS)), text[-3000:]
    evaluated = [float(loss) for loss in re.findall(r"evaluation after step \d+: loss: ([\d.]+)", text)]
    assert len(evaluated) >= 2 and evaluated[-1] < evaluated[0]
    names = {blob.name.removeprefix("tuned/") for blob in bucket.list_blobs(prefix="tuned/")}
    assert {"adapter/adapter_model.safetensors", "model/model.safetensors", "model/chat_template.jinja"} <= names
    pod.client.down("tune")

    with served("gs://runs/tuned/model", tmp_path) as url:
        question = {"messages": [{"role": "user", "content": "How many chips does v6e-8 have?"}], "max_tokens": 8}
        body = json.dumps(question).encode()
        with urllib.request.urlopen(f"{url}/v1/chat/completions", body, timeout=300) as reply:
            answer = json.load(reply)
    assert answer["choices"][0]["message"]["role"] == "assistant" and answer["usage"]["completion_tokens"] > 0
    wait_until(lambda: all(one["kind"] == "bucket" for one in living(cloud)), 90, "a cloud with nothing but the bucket")
