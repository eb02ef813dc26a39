import json
import resource
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from podway.errors import UserError
from podway.model import weights
from podway.model.decoder import init
from podway.model.export import save_weights
from podway.model.families import find_model
from podway.model.layout import TRAIN_RULES, parse_mesh
from podway.model.mesh import make_mesh
from podway.model.params import params
from podway.model.weights import load_weights

FIXTURES = sorted(path.parent for path in Path(__file__).parent.glob("fixtures/*/model.safetensors"))


def same(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda folder: folder.name)
def test_hugging_face_files_round_trip_bit_equal(folder: Path, tmp_path: Path) -> None:
    shape = find_model(str(folder))
    save_weights(load_weights(folder, shape), shape, tmp_path / "out", source=folder)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert find_model(str(tmp_path / "out")) == shape
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("name", ["tiny-qwen2.5", "tiny-qwen2-moe", "tiny-parallel"])
def test_a_tree_round_trips_through_many_files_and_a_mesh(
    name: str, tmp_path: Path, eight_devices: list[jax.Device]
) -> None:
    """bfloat16; d_ff = d_model, where a forgotten transposition would not show in the shapes."""
    shape = replace(find_model(name), d_ff=64)
    tree = init(shape, jax.random.key(3), jnp.bfloat16)
    save_weights(tree, shape, tmp_path / "out", max_file_bytes=50_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    assert same(load_weights(tmp_path / "out", shape), tree)
    for text in ("fsdp=2,tensor=4", "data=2,expert=4"):
        mesh = make_mesh(parse_mesh(text), eight_devices)
        assert same(load_weights(tmp_path / "out", shape, mesh=mesh), tree)
    spread = load_weights(tmp_path / "out", shape, mesh=make_mesh(parse_mesh("fsdp=2,tensor=4"), eight_devices))
    save_weights(spread, shape, tmp_path / "again")
    assert same(load_weights(tmp_path / "again", shape), tree)


def test_a_model_carries_the_chat_template_it_was_trained_with(tmp_path: Path) -> None:
    shape, source = find_model("tiny-llama3"), tmp_path / "source"
    source.mkdir()
    (source / "chat_template.jinja").write_text("the source's own")
    tree = init(shape, jax.random.key(3))
    save_weights(tree, shape, tmp_path / "kept", source=source)
    save_weights(tree, shape, tmp_path / "own", source=source, template="{{ messages }}")
    assert (tmp_path / "kept" / "chat_template.jinja").read_text() == "the source's own"
    assert (tmp_path / "own" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_host_reads_only_what_its_devices_hold(
    tmp_path: Path, eight_devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block is read once, whatever the number of replicas, and no piece is larger than one device's."""
    shape = find_model("tiny-llama3")
    save_weights(init(shape, jax.random.key(3)), shape, tmp_path / "out")
    read: list[tuple[str, int]] = []
    plain = weights.Checkpoint.read

    def spy(self: Any, param: Any, block: Any, dtype: Any, pool: Any) -> Any:
        piece = plain(self, param, block, dtype, pool)
        read.append((param.name, piece.size))
        return piece

    monkeypatch.setattr(weights.Checkpoint, "read", spy)
    load_weights(tmp_path / "out", shape, mesh=make_mesh(parse_mesh("data=4,fsdp=2"), eight_devices), rules=TRAIN_RULES)
    for param in params(shape):
        sizes = [size for name, size in read if name == param.name]
        halves = 2 if "embed" in param.axes else 1
        assert sizes == [param.size // halves] * halves


def test_the_dtype_can_be_changed_both_ways(tmp_path: Path) -> None:
    shape = find_model("tiny-qwen3")
    tree = init(shape, jax.random.key(3), jnp.float32)
    save_weights(tree, shape, tmp_path / "half", dtype=jnp.bfloat16)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)
    assert same(load_weights(tmp_path / "half", shape), half)
    assert same(
        load_weights(tmp_path / "half", shape, dtype=jnp.float32),
        jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half),
    )
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_tokenizer_goes_along_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES[0], source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "training_args.bin", "README.md"):
        (source / name).write_text(name)
    shape = find_model(str(source))
    save_weights(load_weights(source, shape), shape, tmp_path / "out", source=source)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", ""])
def test_the_language_model_inside_another_is_found(tmp_path: Path, prefix: str) -> None:
    gemma = next(folder for folder in FIXTURES if folder.name == "gemma3")
    shape = find_model(str(gemma))
    tensors = {prefix + name.removeprefix("model."): x for name, x in load_file(gemma / "model.safetensors").items()}
    tensors["vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert same(load_weights(tmp_path, shape), load_weights(gemma, shape))


def broken(tmp_path: Path, change: Any) -> tuple[Path, Any]:
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES[0], folder, dirs_exist_ok=True)
    shape = find_model(str(folder))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder, shape


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NORM), rf"lacks {NORM}"),
        (lambda t: [t.pop(name) for name in list(t) if "layers.1" in name], "and [0-9]+ more"),
        (lambda t: t.update({"model.layers.9.odd": np.zeros(3, np.float32)}), r"has unknown model\.layers\.9\.odd"),
        (lambda t: t.update({NORM: np.zeros(7, np.float32)}), r"is \(7,\), and config.json makes it"),
        (lambda t: t.update({NORM: np.zeros(t[NORM].shape, np.int8)}), "stored as I8"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: Any, words: str) -> None:
    folder, shape = broken(tmp_path, change)
    with pytest.raises(UserError, match=words) as error:
        load_weights(folder, shape)
    assert error.value.hint


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no weights"):
        load_weights(tmp_path, find_model("tiny-llama3"))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError) as error:
        load_weights(tmp_path, find_model("tiny-llama3"))
    assert "convert" in error.value.hint


@pytest.mark.parametrize(
    "index", ["{", "{}", '{"weight_map": {"a": "../b.safetensors"}}', '{"weight_map": {"a": "b"}}']
)
def test_a_wrong_index(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError):
        load_weights(tmp_path, find_model("tiny-llama3"))


def test_a_directory_in_use_is_not_overwritten(tmp_path: Path) -> None:
    shape = find_model("tiny-llama3")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    with pytest.raises(UserError, match="exists already"):
        save_weights(init(shape, jax.random.key(0)), shape, tmp_path / "out")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """The kernel refuses to write more than 60 kB to a file, as it would on a full disk."""
    shape = find_model("tiny-llama3")
    tree = init(shape, jax.random.key(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(UserError, match="cannot write") as error:
            save_weights(tree, shape, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "space" in error.value.hint
    assert list(tmp_path.iterdir()) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_a_damaged_file_is_a_user_error_or_loads(tmp_path: Path, data: st.DataObject) -> None:
    """Cut anywhere, or with bytes changed in the header."""
    shape = find_model(str(FIXTURES[0]))
    good = (FIXTURES[0] / "model.safetensors").read_bytes()
    if data.draw(st.booleans()):
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    else:
        header = 8 + int.from_bytes(good[:8], "little")
        at = data.draw(st.integers(0, header - 1))
        bad = good[:at] + data.draw(st.binary(min_size=1, max_size=4)) + good[at + 4 :]
    (tmp_path / "model.safetensors").write_bytes(bad)
    try:
        weights.Checkpoint(tmp_path, shape)
    except UserError as error:
        assert error.hint
