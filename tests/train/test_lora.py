"""LoRA: the loss falls, the base stays bit-equal, the merged model is the adapted one."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from podway.errors import UserError
from podway.model import decoder
from podway.model.adapter_files import read_adapter
from podway.train import lora
from podway.train.adapter import save_adapter
from podway.train.state import start_state
from tests.long import every
from tests.train.running import batch, program, steps

EXPERTS = ("experts_gate", "experts_up", "experts_down")
WORDS = ["lora.rank=4", "lora.base=float32", "optimizer.rate=0.02", "lora.targets=[q, v, o, up, down]"]


@pytest.mark.parametrize("base", every(2, ["int8", "float32"]))
def test_the_loss_falls_and_the_base_stays(base: str) -> None:
    made = program([*WORDS, f"lora.base={base}"])
    with jax.set_mesh(made.mesh):
        before = jax.device_get(start_state(made).frozen)
    state, metrics = steps(made, 4, 8, same=True)
    assert float(metrics[-1].loss) < float(metrics[0].loss) - 0.3
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(state.frozen)), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    if base == "int8":
        assert before["layers"]["q"].dtype == np.int8


def test_only_adapters_are_trained() -> None:
    state, _ = steps(program(WORDS), 2, 1)
    assert set(state.trained["layers"]) == {f"{n}_lora_{x}" for n in ("q", "v", "o", "up", "down") for x in "ab"}
    assert set(state.trained) == {"layers"}


def test_it_starts_at_the_base_model() -> None:
    _, full = steps(program(), 4, 1)
    _, adapted = steps(program(WORDS), 4, 1)
    assert float(full[0].loss) == pytest.approx(float(adapted[0].loss), rel=1e-6)


@pytest.mark.parametrize(("base", "tolerance"), every(2, [("int8", 1e-3), ("float32", 1e-4)]))
def test_merged_weights_are_the_adapted_model(base: str, tolerance: float) -> None:
    made = program([*WORDS, f"lora.base={base}"])
    state, _ = steps(made, 4, 3, same=True)
    tokens = batch(made, 2)["inputs"]
    compute = decoder.Compute(dtype=jnp.float32, kernel="reference", project=lora.projection(made.config.lora))
    plain = decoder.Compute(dtype=jnp.float32, kernel="reference")
    tree = lora.joined(state.trained, state.frozen)
    adapted = decoder.forward(tree, tokens, made.shape, compute).hidden_BSD
    merged = lora.merge(state.trained, state.frozen, made.config.lora, made.shape)
    assert set(merged["layers"]) == set(decoder.abstract(made.shape)["layers"])
    apart = jnp.abs(adapted - decoder.forward(merged, tokens, made.shape, plain).hidden_BSD)
    assert jnp.max(apart) < tolerance


def test_int8_is_near_the_weights() -> None:
    made = program([*WORDS, "lora.base=int8"])
    with jax.set_mesh(made.mesh):
        tree = decoder.init(made.shape, jax.random.key(0))
        frozen = lora.freeze(tree, made.config.lora, made.shape)
    back = lora.merge(lora.init(made.config.lora, made.shape, jax.random.key(1)), frozen, made.config.lora, made.shape)
    for name in ("q", "down"):
        apart = jnp.max(jnp.abs(back["layers"][name] - tree["layers"][name]))
        assert apart < jnp.max(jnp.abs(tree["layers"][name])) / 127


def test_a_matrix_that_the_model_lacks_is_named() -> None:
    made = program()
    with pytest.raises(UserError, match="no matrix 'qq'"):
        lora.targets_of(program(["lora.rank=2", "lora.targets=[qq]"]).config.lora, made.shape)


def test_experts_are_adapted_and_kept_in_int8(tmp_path: Path) -> None:
    words = ["model.name=tiny-mixtral", "lora.rank=4", "lora.base=int8", "optimizer.rate=0.02"]
    words += ["lora.targets=[q, experts_gate, experts_down]"]
    made = program(words)
    state, metrics = steps(made, 4, 8, same=True)
    assert float(metrics[-1].loss) < float(metrics[0].loss) - 0.1
    kept = state.frozen["layers"]
    assert {kept[name].dtype for name in EXPERTS} == {jnp.dtype(jnp.int8)}
    tree = decoder.init(made.shape, jax.random.key(made.config.model.seed))
    merged = lora.merge(state.trained, state.frozen, made.config.lora, made.shape)
    for name in EXPERTS:
        rounded = 1.01 * jnp.max(kept[f"{name}_int8_scale"]) / 2
        is_base = jnp.max(jnp.abs(merged["layers"][name] - tree["layers"][name])) < rounded
        assert is_base == (name == "experts_up")
    widen = lora.widening(made.config.lora)
    compute = decoder.Compute(
        dtype=jnp.float32, kernel="reference", project=lora.projection(made.config.lora), widen=widen
    )
    plain = decoder.Compute(dtype=jnp.float32, kernel="reference")
    tokens = batch(made, 2)["inputs"]
    adapted = decoder.forward(lora.joined(state.trained, state.frozen), tokens, made.shape, compute).hidden_BSD
    assert jnp.max(jnp.abs(adapted - decoder.forward(merged, tokens, made.shape, plain).hidden_BSD)) < 1e-3

    save_adapter(state.trained, made.config, made.shape, tmp_path / "adapter")
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert {"experts.0.w1", "experts.3.w2", "q_proj"} <= set(about["target_modules"])
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    one = tensors["base_model.model.model.layers.1.block_sparse_moe.experts.2.w2.lora_B.weight"]
    assert np.array_equal(one.T, np.asarray(state.trained["layers"]["experts_down_lora_b"])[1, 2])
    again = program([*words, f"lora.adapter={tmp_path}/adapter"])
    with jax.set_mesh(again.mesh):
        started = start_state(again)
    for name, leaf in state.trained["layers"].items():
        assert np.array_equal(np.asarray(started.trained["layers"][name]), np.asarray(leaf)), name
    with pytest.raises(UserError, match=r"experts\.0\.w1\.lora_A\.weight"):  # the server has no adapters of experts
        read_adapter(tmp_path / "adapter", made.shape)


def test_an_adapter_goes_out_and_comes_back_in(tmp_path: Path) -> None:
    made = program(WORDS)
    state, _ = steps(made, 4, 3, same=True)
    save_adapter(state.trained, made.config, made.shape, tmp_path / "adapter")
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["r"] == 4 and about["target_modules"] == ["down_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (4, 64)
    again = program([*WORDS, f"lora.adapter={tmp_path}/adapter"])
    with jax.set_mesh(again.mesh):
        started = start_state(again)
    for name, leaf in state.trained["layers"].items():
        assert np.array_equal(np.asarray(started.trained["layers"][name]), np.asarray(leaf)), name


@pytest.mark.parametrize(
    ("word", "reason"),
    [("lora.rank=8", "has r 4"), ("lora.alpha=3", "has lora_alpha 16.0"), ("lora.targets=[q]", "has target_modules")],
)
def test_another_adapter_is_refused(tmp_path: Path, word: str, reason: str) -> None:
    made = program(WORDS)
    with jax.set_mesh(made.mesh):
        save_adapter(start_state(made).trained, made.config, made.shape, tmp_path / "adapter")
    other = program([*WORDS, word, f"lora.adapter={tmp_path}/adapter"])
    with jax.set_mesh(other.mesh), pytest.raises(UserError, match=reason):
        start_state(other)
