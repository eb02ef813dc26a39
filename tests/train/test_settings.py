"""Reading a run: files, words, and what is said about mistakes."""

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.train.config import TrainConfig
from podway.train.settings import print_config, read_config


def test_a_file_and_words_over_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {name: llama3.2-1b}\noptimizer:\n  rate: 1e-5\nmesh: {shape: 'fsdp=4,tensor=2', tile: [2]}\n"
    )
    config = read_config(str(file), ["schedule.steps=7", "optimizer.b2=0.99", "data.paths=[a.txt, b.txt]"])
    assert config.model.name == "llama3.2-1b"
    assert config.optimizer.rate == 1e-5  # which YAML 1.1 takes for text
    assert config.optimizer.b2 == 0.99
    assert config.mesh.shape == "fsdp=4,tensor=2" and config.mesh.tile == (2,)
    assert config.schedule.steps == 7 and config.data.paths == ("a.txt", "b.txt")


def test_what_is_printed_can_be_read_again() -> None:
    words = ["lora.rank=8", "lora.targets=[q, v]", "remat.policy=minimal", "mesh.shape=fsdp=2,tensor=2"]
    config = read_config(None, words)
    assert read_config(None, print_config(config).splitlines()) == config


def test_an_address_has_a_folder_of_its_own_to_be_copied_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    config, other = (read_config(None, [f"output=gs://bucket/{name}/"]) for name in ("run", "other"))
    assert config.checkpoints == "gs://bucket/run/checkpoints"
    assert config.folder.parent == Path("/cache/podway/outputs") and config.folder != other.folder
    assert read_config(None, ["output=here"]).checkpoints == "here/checkpoints"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("schedul.steps=3", "there is no setting 'schedul'\n  did you mean `schedule`?"),
        ("schedule.stps=3", "schedule has no setting 'stps'\n  did you mean `steps`?"),
        ("schedule.steps=many", "schedule.steps: Expected int, got str"),
        ("batch.sequences=0", "batch.sequences: Expected int >= 1"),
        ("optimizer.kind=sgd", "optimizer.kind: Invalid enum value 'sgd'"),
        ("steps", "'steps' is not a setting"),
        ("model.name.first=3", "model.name has no keys of its own"),
        ("batch={sequences: 3, per_device: 3}", "both given"),
        ("schedule={steps: 5, warmup: 9}", "do not fit in 5"),
        ("schedule.kind=wsd", "wsd has no decay"),
        ("data.kind=[", "not valid YAML"),
    ],
)
def test_mistakes_are_named(word: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        read_config(None, [word])
    assert said in str(caught.value)


def test_a_file_tells_the_place(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  name: x\n  wieghts: y\n")
    with pytest.raises(UserError, match=r"run.yaml:3:3: model has no setting 'wieghts'"):
        read_config(str(file))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_config(str(tmp_path / "none.yaml"))


def _rooms() -> list[str]:
    """Every record of the config, by path; '' is the config itself."""
    fields = msgspec.structs.fields(TrainConfig)
    return ["", *(f.name for f in fields if isinstance(f.type, type) and issubclass(f.type, msgspec.Struct))]


@given(room=st.sampled_from(_rooms()), key=st.from_regex(r"[a-z]{3,12}_zz", fullmatch=True), value=st.text(max_size=8))
def test_an_unknown_key_is_refused_everywhere(room: str, key: str, value: str) -> None:
    with pytest.raises(UserError):
        read_config(None, [f"{room}.{key}={value}" if room else f"{key}={value}"])


@given(st.text(max_size=40))
def test_any_word_is_a_setting_or_a_user_error(word: str) -> None:
    with contextlib.suppress(UserError):
        read_config(None, [word])


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("optimizer.kind=sgd", "one of: adamw, adafactor"),
        ("precision.compute=fp16", "one of: float32, bfloat16"),
        ("model.kernel=flash", "one of: reference, splash, cudnn"),
        ("schedule.steps=ten", "see docs/training.md for what it may be"),
    ],
)
def test_choices_are_named(word: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        read_config(None, [word])
    assert error.value.hint == hint


def test_a_setting_without_its_value_is_no_file() -> None:
    with pytest.raises(UserError) as error:
        read_config("schedule.steps")
    assert error.value.hint == "a setting has a value: schedule.steps=..."
