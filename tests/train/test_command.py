"""A run from its command to its last words, in real processes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from podway.cli.train import command
from podway.errors import UserError
from podway.model.families import find_model
from podway.model.weights import load_weights
from tests.conftest import wait_until
from tests.train.running import EXACT, environment, journal, train
from tests.train.test_events import read_events

WORDS = (*EXACT, "batch.sequences=4", "batch.length=32", "schedule.kind=constant", "optimizer.rate=0.01")


def test_a_run_leaves_what_it_should(tmp_path: Path) -> None:
    text = tmp_path / "poem.txt"
    text.write_text("the sea, the sea, the open sea. " * 400)
    done = train(
        *WORDS, "schedule.steps=6", f"output={tmp_path}/out", f"data.paths=[{text}]", "data.eval_fraction=0.2",
        f"data.cache={tmp_path}/cache", "evaluation.every=3", "checkpoint.export=true", "checkpoint.export_dtype=float32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = journal(tmp_path / "out")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 5]
    assert "completed step: 5, seconds: " in done.stdout and "evaluation after step 2: loss: " in done.stdout
    block = done.stdout[done.stdout.index("***** train metrics *****") :].splitlines()
    said = {line.split("=")[0].strip(): line.split("=")[1].strip() for line in block[1:]}
    assert said["train_samples"] == "24"
    assert float(said["train_loss"]) == pytest.approx(sum(losses) / 6, abs=1e-4)
    events = read_events(next((tmp_path / "out" / "tensorboard").iterdir()))
    assert [values["learning/loss"] for _, values in events if "learning/loss" in values] == pytest.approx(losses)
    exported = load_weights(tmp_path / "out" / "model", find_model("tiny-llama3"))
    assert exported["embed"].shape == (256, 64)


def test_sigterm_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    words = (*WORDS, "schedule.steps=400", "schedule.warmup=200")
    whole = train(*words, f"output={tmp_path}/whole", "checkpoint.save=false", "logging.tensorboard=false")
    assert whole.returncode == 0, whole.stderr[-2000:]
    command = [sys.executable, "-m", "podway.train", *words, f"output={tmp_path}/cut", "logging.tensorboard=false"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        metrics = tmp_path / "cut" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, 200, "the first steps")
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143, said[-2000:]
    assert "asked to stop" in said
    done = len(journal(tmp_path / "cut"))
    assert 3 < done < 400
    again = train(*words, f"output={tmp_path}/cut", "logging.tensorboard=false")
    assert again.returncode == 0 and f"resumed from step {done}" in again.stdout
    rows = journal(tmp_path / "cut")
    assert [row["step"] for row in rows] == list(range(400))  # no step twice, none left out
    assert [row["loss"] for row in rows] == [row["loss"] for row in journal(tmp_path / "whole")]  # bit-equal


def test_adapters_alone_are_saved_and_the_merged_model_leaves(tmp_path: Path) -> None:
    words = (*WORDS, "lora.rank=4", "lora.base=float32", f"output={tmp_path}/out", "logging.tensorboard=false")
    first = train(*words, "schedule.steps=2")
    assert first.returncode == 0, first.stderr[-2000:]
    kept = sum(file.stat().st_size for file in (tmp_path / "out" / "checkpoints").rglob("*") if file.is_file())
    assert kept < 300_000  # the base alone has 4 x 100,000 bytes and its moments twice that
    again = train(*words, "schedule.steps=4", "checkpoint.export=true")
    assert again.returncode == 0 and "resumed from step 2" in again.stdout, again.stderr[-2000:]
    assert load_weights(tmp_path / "out" / "model", find_model("tiny-llama3"))["layers"]["q"].shape == (2, 64, 4, 16)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    done = train(
        *WORDS, "schedule.steps=9", "optimizer.rate=1e38", "optimizer.clip=0", f"output={tmp_path}",
        "checkpoint.save=false", "logging.tensorboard=false",
    )  # fmt: skip
    assert done.returncode == 1
    assert "was not a number in 3 steps" in done.stderr and "lower optimizer.rate" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model.name=lama3-8b",), "unknown model"),
        (("batch.sequences=3", "batch.microbatches=2"), "multiple of 2"),
        (("mesh.shape=fsdp=3",), "needs 3 chips"),
        (("data.paths=[/nowhere/*.txt]",), "/nowhere/*.txt"),
    ],
)
def test_bad_input_is_two_lines(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = train(*words, f"output={tmp_path}/out")
    assert done.returncode == 1
    assert said in done.stderr and "Traceback" not in done.stderr
    errors = done.stderr[done.stderr.index("Error: ") :].strip().splitlines()
    assert len(errors) == 2


def test_the_command_checks_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no setting 'stps'"):
        command.main(["schedule.stps=3"], standalone_mode=False)
    command.main(["--check", "model.name=llama3.1-8b", "lora.rank=8"], standalone_mode=False)
    assert "lora.rank=8" in capsys.readouterr().out
