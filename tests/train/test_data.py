"""Batches are a pure function of config, step and host; and what can be wrong is said before step 0."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podway.errors import UserError
from podway.train.data import Batch, Data, DataConfig, open_data
from tests.model.test_tokenizer import make_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
NAMES = {"inputs", "targets", "segment_ids", "positions", "loss_mask"}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """120 numbered documents of different lengths in three files."""
    for part in range(3):
        lines = [json.dumps({"text": f"<{part * 40 + n:03}>" + "x" * (n % 17)}) for n in range(40)]
        (tmp_path / f"part-{part}.jsonl").write_text("\n".join(lines))
    return tmp_path


def opened(config: DataConfig, *, batch: int = 4, seq: int = 32, **more: Any) -> Data:
    return open_data(config, batch=batch, seq=seq, **({"process": 0, "processes": 1} | more))


def files(corpus: Path, **more: Any) -> DataConfig:
    return DataConfig(**({"paths": (f"{corpus}/*.jsonl",), "cache": str(corpus / "cache")} | more))


def same(one: Batch, other: Batch) -> bool:
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def joined(parts: list[Batch]) -> Batch:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def text(batch: Batch) -> str:
    return bytes(batch["inputs"][batch["segment_ids"] > 0].astype(np.uint8)).decode()


@pytest.mark.parametrize("config", [DataConfig(), DataConfig(seed=7)])
def test_synthetic_data(config: DataConfig) -> None:
    data = opened(config, vocab=1000)
    batch = data.batch(5)
    assert batch.keys() == NAMES
    assert all(array.shape == (4, 32) for array in batch.values())
    assert batch["inputs"].dtype == np.int32
    assert batch["loss_mask"].dtype == np.float32
    assert (batch["inputs"][:, 1:] == batch["targets"][:, :-1]).all()
    assert batch["inputs"].max() > 900
    assert batch["inputs"].max() < 1000
    assert same(batch, opened(config, vocab=1000).batch(5))
    assert not same(batch, data.batch(6))
    held = list(data.eval_batches(3))
    assert len(held) == 3
    assert not same(held[0], data.batch(0))
    assert data.epoch(100) == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    step=st.integers(0, 10_000),
    hosts=st.sampled_from([1, 2, 3, 4, 6, 12]),
    packing=st.sampled_from(["concat", "best_fit", "none"]),
    weights=st.sampled_from([(), (0.7, 0.3)]),
    synthetic=st.booleans(),
)
def test_the_global_batch_does_not_depend_on_hosts(
    corpus: Path, step: int, hosts: int, packing: Any, weights: tuple[float, ...], synthetic: bool
) -> None:
    paths = (f"{corpus}/part-[01].jsonl", f"{corpus}/part-2.jsonl")
    config = DataConfig() if synthetic else files(corpus, paths=paths, packing=packing, weights=weights)
    whole = opened(config, batch=12)
    parts = [opened(config, batch=12, process=host, processes=hosts) for host in range(hosts)]
    expected = whole.batch(step)
    assert same(joined([part.batch(step) for part in parts]), expected)
    assert same(whole.rows(step, range(3, 7)), {name: array[3:7] for name, array in expected.items()})


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
def test_an_epoch_has_every_document_once_and_the_next_in_another_order(corpus: Path, packing: Any) -> None:
    data = opened(files(corpus, packing=packing), batch=1, seq=24)
    rows = round(1 / data.epoch(1))
    assert data.epoch(rows) == 1
    epochs = [joined([data.batch(step) for step in range(first, first + rows)]) for first in (0, rows)]
    for epoch in epochs:
        assert Counter(text(epoch)) == Counter("".join(f"<{n:03}>" + "x" * (n % 40 % 17) + "\0" for n in range(120))), (
            "every byte once"
        )
    assert not same(*epochs)
    orderly = opened(files(corpus, packing=packing, seed=None), batch=1, seq=24)
    assert text(orderly.batch(0)).startswith("<000>")
    assert same(orderly.batch(0), orderly.batch(rows))


def test_resuming_is_a_number(corpus: Path) -> None:
    config = files(corpus)
    with opened(config).prefetch(0) as through, opened(config).prefetch(6) as resumed:
        batches = [next(through) for _ in range(10)]
        assert all(same(next(resumed), batch) for batch in batches[6:])
    with opened(config, process=1, processes=2).prefetch(3) as other:
        assert same(next(other), {name: array[2:] for name, array in batches[3].items()})


def test_mixtures_keep_their_weights(corpus: Path) -> None:
    paths = (f"{corpus}/part-0.jsonl", f"{corpus}/part-1.jsonl")
    data = opened(files(corpus, paths=paths, weights=(3, 1), packing="none"), batch=40, seq=32)
    firsts = Counter()
    for step in range(50):
        for row in data.batch(step)["inputs"]:
            firsts[int(bytes(row[1:4].astype(np.uint8)).decode()) // 40] += 1
    assert firsts[0] + firsts[1] == 2000
    assert abs(firsts[0] - 1500) < 60
    assert "75.0% of rows" in data.describe()
    assert data.epoch(50) == pytest.approx(1500 / 40, rel=0.01)


@pytest.mark.parametrize("packing", ["concat", "none"])
def test_held_out_documents_are_whole_and_never_trained_on(corpus: Path, packing: Any) -> None:
    data = opened(files(corpus, eval_fraction=0.25, packing=packing), batch=1, seq=24)
    rows = round(1 / data.epoch(1))
    trained = text(joined([data.batch(step) for step in range(rows)]))
    held = text(joined(list(data.eval_batches())))
    number = range(120)
    in_training = {n for n in number if f"<{n:03}>" in trained.replace("\0", "")} if packing == "none" else set()
    if packing == "none":
        in_held = {n for n in number if f"<{n:03}>" in held}
        assert not in_training & in_held
        assert in_training | in_held == set(number)
        assert max(in_held) == 119
    assert len(held) / (len(held) + len(trained)) == pytest.approx(0.25, abs=0.03)
    assert "held out" in data.describe()


def test_one_long_document_is_split_within(tmp_path: Path) -> None:
    config = DataConfig(paths=(f"{EXAMPLES}/us-constitution.txt",), eval_fraction=0.1, cache=str(tmp_path), seed=None)
    data = opened(config, batch=8, seq=128)
    held = text(joined(list(data.eval_batches())))
    whole = (EXAMPLES / "us-constitution.txt").read_text()
    assert held == whole[-len(held) + 1 :] + "\0"
    assert len(held) == pytest.approx(len(whole) / 10, rel=0.01)


def test_evaluation_sees_every_row_once_on_any_number_of_hosts(corpus: Path) -> None:
    config = files(corpus, eval_fraction=1.0, packing="none")
    whole = list(opened(config, batch=50).eval_batches())
    assert len(whole) == 3
    assert sum(int(batch["segment_ids"].any(axis=1).sum()) for batch in whole) == 120
    halves = [list(opened(config, batch=50, process=host, processes=2).eval_batches()) for host in range(2)]
    assert all(same(joined([a, b]), c) for a, b, c in zip(*halves, whole, strict=True))
    assert len(list(opened(config, batch=50).eval_batches(2))) == 2
    assert list(opened(files(corpus), batch=4).eval_batches()) == []
    with pytest.raises(UserError, match="held out"):
        opened(config, batch=50).batch(0)


def test_the_same_batch_again_for_measurements(corpus: Path) -> None:
    data = opened(files(corpus, reuse_batch=True))
    assert same(data.batch(0), data.batch(17))


def test_a_file_tokenizer_and_wide_tokens(corpus: Path, tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "tokenizer", post=True)
    data = opened(files(corpus, tokenizer=str(folder), packing="none"), vocab=270)
    batch = data.batch(0)
    assert (batch["inputs"][:, 0] == 0).all(), "each document begins with the begin token"
    lengths = (batch["segment_ids"] > 0).sum(axis=1)
    assert all(row[length - 1] == 1 for row, length in zip(batch["inputs"], lengths, strict=True))


def test_tokens_added_to_a_tokenizer_count_only_when_they_are_used(corpus: Path, tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "tokenizer")
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["<image>"])
    made.save(str(folder / "tokenizer.json"))
    config = files(corpus, tokenizer=str(folder))
    assert opened(config, vocab=270).batch(0)
    (corpus / "part-9.jsonl").write_text(json.dumps({"text": "see <image>"}))
    with pytest.raises(UserError, match="holds token 270"):
        opened(config, vocab=270)


def test_chats_learn_answers(tmp_path: Path) -> None:
    config = DataConfig(
        paths=(f"{EXAMPLES}/tpu-questions.jsonl",),
        form="chat",
        template="chatml",
        cache=str(tmp_path),
        eval_fraction=0.1,
    )
    data = opened(config, batch=8, seq=512, vocab=256)
    batch = data.batch(0)
    learned = bytes(batch["targets"][batch["loss_mask"] > 0].astype(np.uint8)).decode()
    assert "<|im_start|>user" not in learned
    assert learned.count("<|im_end|>") > 8
    assert "chip" in learned
    assert "best_fit" in data.describe()
    everything = opened(msgspec.structs.replace(config, loss_on="all"), batch=8, seq=512).batch(0)
    assert everything["loss_mask"].sum() > batch["loss_mask"].sum() * 1.5


@pytest.mark.parametrize(
    ("settings_", "more", "what", "hint"),
    [
        ({"paths": ("/nowhere/*.txt",)}, {}, "no file matches /nowhere/*.txt", "check the"),
        ({"tokenizer": "/nowhere"}, {}, "no tokenizer at /nowhere", "bytes"),
        ({}, {"vocab": 32000}, "no tokenizer is given for a model of 32000", "data.tokenizer"),
        ({"tokenizer": "bytes"}, {"vocab": 100}, "bytes has 256 tokens, but the model knows 100", "own tokenizer"),
        ({"field": "body"}, {}, "part-0.jsonl:1: there is no field 'body'", "one of text"),
        ({}, {"batch": 7, "processes": 2}, "7 rows does not split over 2", "multiple"),
        ({}, {"batch": 4000}, "too few for a batch of 4000", "more data"),
        ({"form": "chat", "field": "messages"}, {}, "no field 'messages'", "text"),
        ({"form": "chat", "template": "/nowhere"}, {}, "cannot read /nowhere", "chatml"),
    ],
)
def test_what_is_wrong_is_said_before_step_0(
    corpus: Path, settings_: dict[str, Any], more: dict[str, Any], what: str, hint: str
) -> None:
    with pytest.raises(UserError) as caught:
        opened(files(corpus, **settings_), **more)
    assert what in caught.value.what
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("settings_", "what"),
    [
        ({"paths": ("a", "b"), "weights": (1.0,)}, "1 numbers for 2 paths"),
        ({"paths": ("a",), "weights": (0.0,)}, "above 0"),
        ({"paths": ("a",), "weights": (float("nan"),)}, "above 0"),
        ({"paths": ("a",), "kind": "synthetic"}, "synthetic"),
        ({"kind": "jsonl"}, "data.paths is empty"),
    ],
)
def test_configs_that_contradict_themselves(settings_: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        DataConfig(**settings_)


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="pathz"):
        msgspec.convert({"pathz": []}, DataConfig)


def test_data_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    config = DataConfig(paths=(str(tmp_path / "empty.txt"),), cache=str(tmp_path / "cache"))
    with pytest.raises(UserError, match="no text in"):
        opened(config)
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "q" * 100, "completion": "a"}))
    config = DataConfig(paths=(str(tmp_path / "long.jsonl"),), form="chat", cache=str(tmp_path / "cache"))
    with pytest.raises(UserError, match="nothing is left to train on"):
        opened(config)


def test_a_run_imports_no_jax_for_its_data() -> None:
    import subprocess
    import sys

    code = "import sys, podway.train.data; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
