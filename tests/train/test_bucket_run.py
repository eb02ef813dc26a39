"""A run whose text and checkpoints lie in a bucket, through Google's, gcsfs's and tensorstore's own clients."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from podway.sandbox.running import running_sandbox
from tests.train.running import EXACT, environment

storage = pytest.importorskip("google.cloud.storage")
pytest.importorskip("gcsfs")


@pytest.mark.long
@pytest.mark.timeout(600)  # twenty seconds of one core; much more where others use it too
def test_text_and_checkpoints_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_sandbox(tmp_path / "cloud", hosts="none") as cloud:
        where = {
            "STORAGE_EMULATOR_HOST": cloud.storage,  # Google's client and gcsfs
            "TENSORSTORE_GCS_HTTP_URL": cloud.rest,  # tensorstore, which orbax writes arrays with
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": cloud.token,
            "GOOGLE_CLOUD_PROJECT": "sandbox",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else it asks over gRPC with TLS, which the sandbox has not
        }
        for name, value in where.items():
            monkeypatch.setenv(name, value)
        bucket = storage.Client(project="sandbox").create_bucket("runs")
        bucket.blob("text/poem.txt").upload_from_string("the sea, the sea, the open sea. " * 200)

        def train(steps: int) -> str:
            words = (
                *EXACT, "data.paths=[gs://runs/text]", f"data.cache={tmp_path}/cache", "batch.sequences=2",
                "batch.length=32", "schedule.kind=constant", f"schedule.steps={steps}", "checkpoint.keep=1",
                "logging.tensorboard=false", "output=gs://runs/first", f"checkpoint.export={str(steps == 3).lower()}",
            )  # fmt: skip
            command = [sys.executable, "-m", "podway.train", *words]
            env = environment(**where, XDG_CACHE_HOME=str(tmp_path / "cache"))
            done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280)
            assert done.returncode == 0, done.stderr[-2000:]
            return done.stdout

        assert "resumed" not in train(2)
        assert "resumed from step 2 in gs://runs/first" in train(3)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # the host is gone: what is not in the bucket is lost
        lines = bucket.blob("first/metrics.jsonl").download_as_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
        names = {blob.name.removeprefix("first/") for blob in bucket.list_blobs(prefix="first/")}
        assert {"settings.yaml", "run.json", "model/config.json", "model/model.safetensors"} <= names
        assert not (tmp_path / "out").exists()
        assert "this run is finished: 3 steps" in train(3)
        kept = {blob.name.split("/")[2] for blob in bucket.list_blobs(prefix="first/checkpoints/")}
        assert kept == {"3"}
