"""500 steps of a real text with products in int8 and in fp8 end near the loss of bfloat16."""

from pathlib import Path

import pytest

from tests.train.running import journal, train

TEXT = Path(__file__).parents[2] / "examples" / "data" / "us-constitution.txt"
LAST = 50  # steps whose mean is compared: single steps differ by their text
# int8 has 7 bits of the largest number of its row, fp8 3 of each number: forward it is four times as coarse, and the loss shows it.
APART = {"int8": 0.005, "fp8": 0.02}


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_quantized_products_learn_as_well(tmp_path: Path) -> None:
    """The loss of training, and of the part that was held out."""
    found = {}
    for kind in ("null", "int8", "fp8"):
        run = train(
            f"precision.products={kind}", "precision.compute=bfloat16", "remat.policy=none", f"data.cache={tmp_path}/cache",
            f"data.paths=[{TEXT}]", "data.eval_fraction=0.1", "batch.sequences=8", "batch.length=128", "schedule.steps=500",
            "schedule.warmup=10", "optimizer.rate=2e-3", "evaluation.every=500", "logging.tensorboard=false",
            "checkpoint.save=false", f"output={tmp_path}/{kind}", timeout=900, XLA_FLAGS="",
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-2000:]
        rows = journal(tmp_path / kind)
        losses = [row["loss"] for row in rows if "loss" in row]
        assert len(losses) == 500
        found[kind] = (sum(losses[-LAST:]) / LAST, [row["eval_loss"] for row in rows if "eval_loss" in row][-1])
    for kind in ("int8", "fp8"):
        for quantized, plain in zip(found[kind], found["null"], strict=True):
            assert quantized == pytest.approx(plain, rel=APART[kind]), found
