"""The jobs in examples/ are runs that fit the slices they ask for."""

import os
import shlex
from pathlib import Path
from string import Template

import pytest

from podway.catalog.slices import find_slice
from podway.model.families import find_model
from podway.task.environment import Overrides
from podway.task.read import read_task
from podway.train.checks import check_fit, check_kernel, resolve_mesh
from podway.train.settings import read_config

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS = sorted([*EXAMPLES.glob("train-*.yaml"), *EXAMPLES.glob("finetune-*.yaml"), *EXAMPLES.glob("largest-job-*.yaml")])


@pytest.mark.parametrize("slices", [1, 2, 32])
@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_the_run_fits_its_slice(path: Path, slices: int) -> None:
    given = {"HF_TOKEN": "x", "OUT": "gs://some-bucket/run"}
    task = read_task(path, overrides=Overrides(local_env=given, env=("HF_TOKEN", "OUT"), cwd=str(EXAMPLES)))
    assert isinstance(task.run, str)
    line = next(line for line in task.run.replace("\\\n", " ").splitlines() if line.strip().startswith("podway train"))
    line = Template(line).safe_substitute(task.env)
    words = [os.path.expandvars(word) for word in shlex.split(line)[2:]]
    config = read_config(None, words)
    (resources,) = task.resources
    assert resources.accelerator is not None
    tpu = find_slice(resources.accelerator.type)
    name = "llama3.1-8b" if "/" in config.model.name else config.model.name
    if slices > 1 and not path.stem.startswith("largest"):
        return  # only those jobs are meant for several
    mesh = resolve_mesh(config, tpu.chips * slices, slices)
    check_fit(config, find_model(name), mesh)
    check_kernel(config, "tpu", mesh)
    assert mesh.slices == slices


def test_there_are_seven() -> None:
    assert len(JOBS) == 7
