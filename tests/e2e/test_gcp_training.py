"""A spot slice is taken away in the middle of training: the job comes back elsewhere and goes on from its checkpoint in a bucket."""

import re
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from podway.sandbox.running import Running, running_sandbox
from podway.task.task import Recovery, Task
from tests.conftest import wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_recovery_cloud import living, start, stock_out, wanted

ROOT = Path(__file__).parents[2]
STEPS = 40
STEP = re.compile(r"completed step: (\d+),.* (loss: [\d.]+, grad_norm: [\d.]+)")


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Running]:
    packages = Path(jax.__file__).parent.parent
    shared = tuple(word for path in {packages, ROOT} for word in ("--share", str(path)))
    with running_sandbox(tmp_path / "sandbox", options=shared) as running:
        yield running


def training(cloud: Running, output: str) -> Task:
    """The trainer as it is, a moment longer over each step so that it can be met in its middle."""
    words = (
        f"precision.compute=float32 model.kernel=reference batch.sequences=4 batch.length=32 schedule.steps={STEPS} "
        f"checkpoint.every=5 logging.tensorboard=false output=gs://runs/{output}"
    )
    where = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "STORAGE_EMULATOR_HOST": cloud.rest,  # the host's own token is what gcsfs shows there
        "TENSORSTORE_GCS_HTTP_URL": cloud.rest,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": cloud.token,
        "GOOGLE_CLOUD_PROJECT": "sandbox",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else it asks over gRPC with TLS, which the sandbox has not
        "PODWAY_TEST_PAUSE": "0.3",
        # The hosts are given these directories to read; their python3 is this machine's.
        "PYTHONPATH": ":".join(map(str, (Path(jax.__file__).parent.parent, ROOT, ROOT / "src"))),
    }
    exports = " ".join(f"{name}='{value}'" for name, value in where.items())
    return wanted(f"{exports} python3 -m tests.e2e.slow_train {words}", spot=True, recovery=Recovery())


def losses(text: str) -> dict[int, str]:
    """The loss and the size of the gradient told for each step; of a step that was done twice, the later one."""
    return {int(step): loss for step, loss in STEP.findall(text)}


@pytest.mark.soak
def test_preempted_in_mid_training_the_losses_are_the_same(
    pod: Podway, cloud: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = pytest.importorskip("google.cloud.storage")
    pytest.importorskip("gcsfs")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.storage)
    bucket = storage.Client(project="sandbox").create_bucket("runs")
    start(pod, cloud, tmp_path)
    for name in ("whole", "cut"):
        pod.client.launch(training(cloud, name), cluster=name)
        if name == "cut":
            wait_until(lambda: len(losses(pod.log_text("cut", 1, follow=False))) > 17, 240, "step 17")
            wait_until(lambda: any("/15/" in b.name for b in bucket.list_blobs(prefix="cut/")), 60, "a checkpoint")
            zone = pod.client.cluster("cut").order.zone
            node = next(one for one in living(cloud) if one["kind"] == "node")
            cloud.command("POST", "preempt", {"node": node["name"]})
            wait_until(lambda: pod.client.cluster("cut").recovering, 90, "the recovery")
            stock_out(cloud, zone or "")
        assert pod.finished(name, 1, 200) == "SUCCEEDED", pod.log_text(name, 1)[-3000:]
        if name == "whole":
            pod.client.down(name)
            wait_until(lambda: pod.client.cluster("whole").state == "GONE", 60)
    text = pod.log_text("cut", 1)
    assert re.search(r"resumed from step (10|15|20)", text), text[-3000:]
    assert pod.client.job("cut", 1).attempt == 2 and pod.client.cluster("cut").order.zone != zone
    assert losses(text) == losses(pod.log_text("whole", 1)) and len(losses(text)) == STEPS
    pod.client.down("cut")
    wait_until(lambda: all(one["kind"] == "bucket" for one in living(cloud)), 90, "a cloud with nothing but the bucket")
