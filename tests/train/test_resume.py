"""What a resumed run does with its data, and what a finished one says."""

from pathlib import Path

import pytest

from podway.errors import UserError
from podway.train.data import Data, DataConfig, open_data
from podway.train.saving import _next_row
from podway.train.settings import read_config
from tests.train.running import EXACT, journal, train

WORDS = (*EXACT, "batch.length=32", "schedule.kind=constant", "logging.tensorboard=false")


def opened(folder: Path, batch: int, **settings: object) -> Data:
    text = folder / "poem.txt"
    text.write_text("the sea, the sea, the open sea, the blue, the fresh, the ever free. " * 60)
    config = DataConfig(paths=(str(text),), cache=str(folder / "cache"), **settings)  # type: ignore[arg-type]
    return open_data(config, batch=batch, seq=32, process=0, processes=1, vocab=256)


def test_another_batch_size_goes_on_with_the_next_row(tmp_path: Path) -> None:
    before, after, whole = opened(tmp_path, 4), opened(tmp_path, 8), opened(tmp_path, 1)
    kept = {"row": before.first_row(5), "order": before.order}
    after.resume(5, _next_row(kept, after, 5, read_config(None)))
    rows = [row.tolist() for step in (5, 6) for row in after.batch(step)["inputs"]]
    assert rows == [whole.batch(number)["inputs"][0].tolist() for number in range(20, 36)]  # 5 steps of 4 came before
    assert after.epoch(5) == before.epoch(5)
    assert after.first_row(7) == 36


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"seed": 1}, "data.seed was 0 and is now 1"),
        ({"eval_fraction": 0.2}, "data.eval_fraction was 0.0 and is now 0.2"),
    ],
)
def test_another_order_is_refused_with_the_reason(tmp_path: Path, settings: dict[str, object], reason: str) -> None:
    before, after = opened(tmp_path, 4), opened(tmp_path, 4, **settings)
    kept = {"row": 20, "order": before.order}
    with pytest.raises(UserError, match=reason):
        _next_row(kept, after, 5, read_config(None))
    assert _next_row(kept, after, 5, read_config(None, ["checkpoint.restart_data=true"])) == 0
    assert (
        _next_row({"row": 12, "order": after.order}, after, 8, read_config(None, ["checkpoint.restart_data=true"]))
        == 12
    )


def test_a_finished_run_says_so_and_an_extended_one_goes_on(tmp_path: Path) -> None:
    words = (*WORDS, "batch.sequences=4", f"output={tmp_path}/out", "checkpoint.export=true")
    first = train(*words, "schedule.steps=2")
    assert first.returncode == 0, first.stderr[-2000:]
    assert "goodput: " in first.stdout and "train_goodput" in first.stdout
    assert journal(tmp_path / "out")[-1]["goodput"] is not None
    again = train(*words, "schedule.steps=2")
    assert again.returncode == 0, again.stderr[-2000:]
    assert "this run is finished: 2 steps" in again.stdout and "completed step" not in again.stdout
    other = train(*words, "schedule.steps=3")
    assert other.returncode == 1 and f"{tmp_path}/out/model exists already" in other.stderr


def test_settings_that_differ_are_printed_and_all_are_kept(tmp_path: Path) -> None:
    done = train(*WORDS, "batch.sequences=2", "schedule.steps=1", f"output={tmp_path}/out", "checkpoint.save=false")
    assert done.returncode == 0, done.stderr[-2000:]
    head = done.stdout[: done.stdout.index("mesh: ")].splitlines()[1:]
    assert "  batch.length=32" in head and not any("optimizer." in line for line in head)
    assert "billion" not in done.stdout and "GFLOP/s/device" in done.stdout
    kept = read_config(str(tmp_path / "out" / "settings.yaml"))
    assert kept.batch.length == 32 and kept.checkpoint.save is False
