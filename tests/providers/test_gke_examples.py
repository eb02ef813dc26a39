"""The published 16B to 128B jobs on GKE: the same programs that are rehearsed, in JobSets that the API takes."""

import os
from pathlib import Path

import msgspec
import pytest

from podway import read_task
from podway.catalog.slices import find_slice
from podway.cli.manifests import as_yaml
from podway.control.choosing import order_of
from podway.providers import Offer
from podway.providers.gke.manifests import JobSetContext
from podway.providers.gke.one_shot import render_one_shot
from podway.providers.gke.render import render
from podway.providers.gke.settings import GkeSettings
from podway.sandbox.kubernetes.schemas import problems, schema

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SETTINGS = GkeSettings(
    queue="multislice-queue", priority_class="medium", service_account="trainer", pull_secret="login"
)
CONTEXT = JobSetContext(owner="ab12cd34", context="east", namespace="default", settings=SETTINGS)


@pytest.mark.parametrize("name", ["16b", "32b", "64b", "128b"])
@pytest.mark.parametrize("slices", [1, 32])
def test_the_published_jobs(name: str, slices: int) -> None:
    """What runs is what `docs/measurements/rehearsed-jobs.json` was made of: the example that is rehearsed, on the same slice.

    PODWAY_REWRITE_GOLDEN=1 after a wanted change.
    """
    task = read_task(EXAMPLES / "gke" / f"largest-job-{name}.yaml")
    rehearsed = read_task(EXAMPLES / f"largest-job-{name}.yaml")
    assert task.run == rehearsed.run
    assert task.resources[0].accelerator == rehearsed.resources[0].accelerator
    tpu = find_slice("v5litepod-256")
    offer = Offer(provider="gke", accelerator_type=tpu.accelerator_type, topology=tpu.topology_text, slices=slices)
    order = order_of(offer, task.resources[0])
    against = schema("jobsets")
    assert against is not None
    for request in (render(CONTEXT, name, order), render_one_shot(CONTEXT, name, order, task, "ada")):
        config, jobset = (dict(step.body) for step in request.steps)
        assert problems(jobset, against) == []
        (job,) = jobset["spec"]["replicatedJobs"]
        assert (job["replicas"], job["template"]["spec"]["completions"]) == (slices, 64)
        assert len(msgspec.json.encode(config)) < 1 << 20  # what a ConfigMap may hold
    text = as_yaml(msgspec.to_builtins(request), task)
    golden = EXAMPLES.parent / "tests" / "golden" / "gke" / f"largest-job-{name}.yaml"
    if slices == 1 and os.environ.get("PODWAY_REWRITE_GOLDEN"):
        golden.write_text(text)
    assert slices != 1 or text == golden.read_text()
