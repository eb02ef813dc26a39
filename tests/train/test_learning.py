"""A small model learns a real text to a stated loss; LoRA teaches it answers it has not seen, on a base that stays."""

import hashlib
from pathlib import Path

import pytest

from tests.train.running import EXACT, journal, train

DATA = Path(__file__).parents[2] / "examples" / "data"
FULL_SPEED = {"XLA_FLAGS": ""}  # here steps count, and not compilation
STATED = 1.9  # nats a byte on the held-out tenth; 5.5 at the start, about 2.9 for the frequencies of bytes alone


@pytest.mark.long
@pytest.mark.timeout(1200)  # a minute of one core; much more where others use it too
def test_text_then_answers(tmp_path: Path) -> None:
    shared = (
        *EXACT,
        "remat.policy=none",
        f"data.cache={tmp_path}/cache",
        "logging.tensorboard=false",
    )
    base = train(
        *shared, f"data.paths=[{DATA / 'us-constitution.txt'}]", "data.eval_fraction=0.1", "batch.sequences=8",
        "batch.length=128", "schedule.steps=200", "schedule.warmup=10", "optimizer.rate=5e-3", "evaluation.every=200",
        "checkpoint.save=false", "checkpoint.export=true", "checkpoint.export_dtype=float32",
        f"output={tmp_path}/base", timeout=580, **FULL_SPEED,
    )  # fmt: skip
    assert base.returncode == 0, base.stderr[-2000:]
    held_out = [row["eval_loss"] for row in journal(tmp_path / "base") if "eval_loss" in row]
    assert held_out[-1] < STATED

    weights = tmp_path / "base" / "model" / "model.safetensors"
    before = hashlib.sha256(weights.read_bytes()).hexdigest()
    tuned = train(
        *shared, f"model.name={weights.parent}", f"model.weights={weights.parent}", "batch.sequences=8",
        "batch.length=256",
        f"data.paths=[{DATA / 'tpu-questions.jsonl'}]", "data.form=chat", "data.template=chatml", "data.tokenizer=bytes",
        "data.eval_fraction=0.2", "schedule.steps=50", "schedule.warmup=5", "optimizer.rate=1e-2", "optimizer.decay=0",
        "evaluation.every=10", "lora.rank=8", "lora.targets=[q, k, v, o, gate, up, down]", "lora.base=float32",
        "checkpoint.save=false", f"output={tmp_path}/tuned", timeout=580, **FULL_SPEED,
    )  # fmt: skip
    assert tuned.returncode == 0, tuned.stderr[-2000:]
    rows = journal(tmp_path / "tuned")
    answers = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert answers[-1] < 1.0 < 3.0 < next(row["loss"] for row in rows)
    assert answers == sorted(answers, reverse=True)
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == before
