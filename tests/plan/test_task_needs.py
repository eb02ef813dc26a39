"""What a task file asks of a slice."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.catalog.slices import find_slice
from podway.errors import UserError
from podway.model.families import find_model
from podway.plan.plans import evaluate
from podway.plan.task_needs import (
    LENGTH,
    POLICY,
    SHAPE,
    Command,
    command_of,
    commands_in,
    misfit_reason,
    needs_of,
    settings_of,
    training_of,
)
from podway.rehearse.rehearsal import training_settings
from podway.task.task import Accelerator, LocalDir, Resources, Task
from podway.train.config import TrainConfig


def words(script: str, **env: str) -> list[tuple[str, ...]]:
    return [(found.verb, *found.words) for found in commands_in(script, env)]


def test_commands_of_a_script() -> None:
    script = """
    cd ~/x && FOO=1 podway train model.name=$MODEL \\
        batch.length=${LEN:-512} "data.paths=[a b]" ; echo podway train
    exec podway serve "$MODEL" --tp 8 | tee log
    python3 -m podway.train config.yaml
    # podway train not=this
    """
    assert words(script, MODEL="llama3.1-8b") == [
        ("train", "model.name=llama3.1-8b", "batch.length=512", "data.paths=[a b]"),
        ("serve", "llama3.1-8b", "--tp", "8"),
        ("train", "config.yaml"),
    ]


@given(st.text(max_size=200))
def test_no_script_breaks_the_reader(script: str) -> None:
    for found in commands_in(script, {"A": "podway train"}):
        assert found.verb in ("train", "serve")


def task(run: str, tpu: str = "v6e-8", **more: object) -> Task:
    resources = (Resources(accelerator=Accelerator(type=tpu)),)
    return Task(run=run, resources=resources, **more)  # type: ignore[arg-type]


def test_needs_of_training() -> None:
    needs = needs_of(task("podway train model.name=llama3.1-8b batch.sequences=16 batch.length=4096"))
    assert needs is not None
    assert (needs.model, needs.kind, needs.seq, needs.batch) == ("llama3.1-8b", "train", 4096, 16)
    tuned = needs_of(task("podway train model.name=x model.weights=x lora.rank=8 lora.base=int8 lora.targets='[q, v]'"))
    assert tuned is not None and tuned.kind == "finetune" and tuned.adapters is not None
    assert (tuned.adapters.rank, tuned.adapters.base, tuned.adapters.targets) == (8, "int8", ("q", "v"))


def test_needs_of_serving_and_of_neither() -> None:
    served = needs_of(task("podway serve llama3.1-70b --quantize int8 --kv=fp8"))
    assert served is not None and served.kind == "serve" and served.model == "llama3.1-70b"
    assert (served.precision.weights, served.precision.kv) == ("int8", "fp8")
    assert needs_of(task("python train.py")) is None and command_of(task("")) is None


def test_a_config_file_and_words_over_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {name: llama3.1-8b}\nbatch:\n  length: 2048\n  sequences: 8\nlora: {targets: [q, o]}\n"
    )
    found = settings_of(Command(verb="train", words=("run.yaml", "batch.length=4096")), tmp_path)
    assert found == {"model.name": "llama3.1-8b", "batch.length": "4096", "batch.sequences": "8", "lora.targets": "q,o"}
    needs = needs_of(task("podway train run.yaml", workdir=LocalDir(path=str(tmp_path))))
    assert needs is not None and needs.seq == 2048
    with pytest.raises(UserError, match=r"nowhere.yaml, which is not here"):
        settings_of(Command(verb="train", words=("nowhere.yaml",)), tmp_path)


def test_the_step_of_settings() -> None:
    settings = {
        "mesh.shape": "fsdp=*,tensor=2",
        "batch.per_device": "2",
        "remat.policy": "custom",
        "remat.save": "[qkv, context]",
    }
    mesh, training = training_of(settings, 16, slices=2)
    assert (mesh.slices, mesh.fsdp, mesh.tensor) == (2, 4, 2)
    assert (training.batch, training.seq, training.remat) == (32, LENGTH, "qkv+context")


def test_defaults_are_the_trainers() -> None:
    config = TrainConfig()
    assert (config.batch.length, config.mesh.shape, config.remat.policy) == (LENGTH, SHAPE, POLICY)


def test_why_a_task_does_not_fit() -> None:
    big = task("podway train model.name=llama3.1-70b batch.sequences=8 batch.length=4096")
    assert "OOM by" in (misfit_reason(big, find_slice("v6e-8")) or "")
    assert misfit_reason(task("podway train model.name=llama3.2-1b batch.sequences=8"), find_slice("v6e-8")) is None
    assert misfit_reason(task("podway train model.name=unheard-of"), find_slice("v6e-8")) is None, (
        "the trainer says it better"
    )
    assert misfit_reason(task("echo"), find_slice("v6e-8")) is None


def test_the_attention_kernel_of_the_settings_is_planned_and_compiled() -> None:
    asked = {
        "model.name": "llama3.1-8b",
        "batch.length": "8192",
        "model.attention_block": "1024",
        "model.attention_fused": "true",
    }
    mesh, training = training_of(asked, 16)
    assert (training.program.attention_block, training.program.attention_fused) == (1024, True)
    words = training_settings(mesh, training)
    assert {"model.attention_block=1024", "model.attention_fused=true"} <= set(words)
    shape, slice = find_model("llama3.1-8b"), find_slice("v6e-16")
    small = asked | {"model.attention_block": "512", "model.attention_fused": "false"}
    plain = evaluate(shape, slice, mesh, training_of(small, 16)[1])
    assert evaluate(shape, slice, mesh, training).time.attention < 0.8 * plain.time.attention


def test_settings_that_name_no_blocks_leave_the_choice_to_the_trainer() -> None:
    mesh, training = training_of({"batch.length": "8192"}, 16)
    assert not any(word.startswith("model.attention") for word in training_settings(mesh, training))
    chosen = training.program.attention_blocks("v6e", seq=8192, context=1, d_head=128)
    assert (chosen.size, chosen.fused) == (2048, True)
