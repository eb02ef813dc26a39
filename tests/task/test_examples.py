"""The examples, the seeds' own files among them, are read unmodified; golden files hold what they are read as."""

import msgspec
import pytest

from podway.task.environment import Overrides
from podway.task.read import read_task
from podway.task.task import Bucket, FileMount, Task

from . import golden, seeds

EXAMPLES = seeds.EXAMPLES.parent
FILES = sorted(path for path in EXAMPLES.rglob("*.y*ml"))


# What a file declares without a value, for its reader to give.
GIVEN = {"finetune-llama.yaml": ("OUT=gs://some-bucket/run",)}


def read(name: str, **given: str) -> Task:
    overrides = Overrides(
        env=("HF_TOKEN", *GIVEN.get(name, ())), local_env={"HF_TOKEN": "hf_x"}, cwd=str(EXAMPLES), **given
    )  # type: ignore[arg-type]
    return read_task(EXAMPLES / name, overrides=overrides)


@pytest.mark.skipif(not seeds.DOCUMENTS.is_dir(), reason="the seed documents are not beside this repository")
def test_seed_files_are_those_of_the_documents() -> None:
    for name, text in seeds.expected().items():
        assert (seeds.EXAMPLES / name).read_text() == text, name
    blocks = {path.name: len(seeds.extract(path.read_text())) for path in seeds.DOCUMENTS.glob("*.txt")}
    assert sum(blocks.values()) == len(seeds.FILES), "a YAML block of a document is missing from FILES"


def test_all_examples_are_there() -> None:
    names = {str(path.relative_to(seeds.EXAMPLES)) for path in FILES if path.is_relative_to(seeds.EXAMPLES)}
    assert names == {name for _, _, name in seeds.FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_example_is_read(path: "seeds.Path") -> None:
    task = read(str(path.relative_to(EXAMPLES)))
    assert msgspec.json.decode(msgspec.json.encode(task), type=Task) == task
    assert not task.notes


def accelerator(task: Task) -> tuple[str, bool, str | None]:
    (one,) = task.resources
    assert one.accelerator is not None
    return one.accelerator.type, one.accelerator.tpu_vm, one.accelerator.runtime_version


def test_seed_tasks_mean_what_the_documents_say() -> None:
    train = read("seeds/train-llama3-8b.yaml")
    assert accelerator(train) == ("v6e-8", True, None)
    assert train.env == {"HF_TOKEN": "hf_x"}
    assert accelerator(read("seeds/train-llama3-8b.yaml", tpus="tpu-v6e-32")) == ("v6e-32", True, None)
    assert accelerator(read("seeds/tpu-vm-resources.yaml")) == ("v6e-8", True, "v2-alpha-tpuv6e")
    node = read("seeds/tpu-node-resources.yaml")
    assert accelerator(node) == ("v2-8", False, "2.12.0")
    assert node.resources[0].instance_type == "n1-highmem-8"
    mnist = read("seeds/tpu_node_mnist.yaml")
    assert (mnist.name, accelerator(mnist)) == ("mnist-tpu-node", ("v2-8", False, "2.12.0"))
    assert mnist.file_mounts == (FileMount(target="/dataset", source=Bucket(uri="gs://mnist-tpu-node", create=True)),)


def test_seed_services_and_environments() -> None:
    dev = read("seeds/tpu/.dstack.yml")
    assert (dev.name, dev.kind, dev.python, accelerator(dev)[0]) == ("vscode-tpu", "dev-environment", "3.11", "v2-8")
    optimum = read("seeds/optimum-tpu/service.dstack.yml")
    assert optimum.service and optimum.service.model and optimum.service.model.format == "tgi"
    assert optimum.resources[0].image == "docker:dstackai/optimum-tpu:llama31"
    vllm = read("seeds/vllm/service-tpu.dstack.yml")
    assert vllm.run.splitlines()[-1] == (
        "vllm serve $MODEL_ID --tensor-parallel-size 4 --max-model-len $MAX_MODEL_LEN --port 8000"
    )
    assert vllm.env["DATE"] == "20240828" and accelerator(vllm)[0] == "v5litepod-4"
    assert read("seeds/optimum-tpu/train.dstack.yml").run.count("\n") == 10


@pytest.mark.parametrize("name", golden.NAMES)
def test_full_files_are_read_as_recorded(name: str) -> None:
    """A change here is a change of meaning: `python -m tests.task.golden` records it."""
    assert golden.recorded(golden.read(name)) == (golden.FILES / name).with_suffix(".json").read_text()
