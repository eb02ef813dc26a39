"""Models that are planned and not run: sizes as published, read from config.json, refused by name where something would run."""

import json
from pathlib import Path

import pytest

from podway.errors import UserError
from podway.model.families import find_model, find_planned_model
from podway.model.flops import attention_flops_per_token
from podway.model.params import active_count, count, kv_count, params
from podway.model.planned_families import planned_models
from podway.model.shape import layer_kinds

# Parameters of the checkpoints' own tensors, as their hub pages count them: DeepSeek V3 without the biases of its 58 routers, one for
# each of 256 experts, which are not trained by gradients; Llama 4 without the 871,932,416 of its vision tower.
TENSORS = {
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama4-scout": 108_641_793_536 - 871_932_416,
    "llama4-maverick": 401_583_781_376 - 871_932_416,
}
# Billions, as publishers state them, and what they leave out of the active ones: the input embedding (DeepSeek-V3's README_WEIGHTS.md:
# 36.6 with 0.9 for the output; GPT-OSS's model card), or nothing (Llama 4's and Gemma 4's cards). DeepSeek V2: arXiv 2405.04434.
PUBLISHED = {
    "deepseek-v2-lite": (15.7, 2.4, True),
    "deepseek-v2": (236, 21, True),
    "deepseek-v3": (671, 36.6, True),
    "gpt-oss-20b": (20.91, 3.61, True),
    "gpt-oss-120b": (116.83, 5.13, True),
    "llama4-scout": (108, 17, False),
    "llama4-maverick": (401, 17, False),
    "gemma4-31b": (30.7, 30.7, False),
    "gemma4-26b-a4b": (25.2, 3.8, False),
}


@pytest.mark.parametrize("name", planned_models())
def test_sizes_are_those_that_are_published(name: str) -> None:
    shape, (total, active, without_input) = planned_models()[name], PUBLISHED[name]
    assert count(shape) == TENSORS.get(name, count(shape))
    assert count(shape) / 1e9 == pytest.approx(total, rel=0.003)
    counted = active_count(shape) - without_input * shape.vocab * shape.d_model
    assert counted / 1e9 == pytest.approx(active, rel=0.025)
    assert sum(kind.layers for kind in layer_kinds(shape)) == shape.layers
    assert len({param.name for param in params(shape)}) == len(params(shape))


def test_kinds_of_layers() -> None:
    dense, routed = layer_kinds(planned_models()["deepseek-v3"])
    assert (dense.layers, dense.experts, dense.d_ff) == (3, None, 18_432)
    assert routed.layers == 58 and routed.experts is not None and routed.experts.d_ff_shared == 2048
    kinds = {
        (kind.layers, kind.experts is None, kind.attention.window)
        for kind in layer_kinds(planned_models()["llama4-maverick"])
    }
    assert kinds == {(24, True, 8192), (12, False, 8192), (12, False, None)}
    local, full = layer_kinds(planned_models()["gemma4-31b"])
    assert (local.layers, local.d_head, local.kv_heads) == (50, 256, 16)
    assert (full.layers, full.d_head, full.kv_heads, full.attention.window) == (10, 512, 4, None)


def test_the_cache_of_a_latent_is_one_vector_a_layer() -> None:
    assert kv_count(planned_models()["deepseek-v3"]) == 61 * (512 + 64)


def test_chunks_see_half_of_themselves() -> None:
    scout = planned_models()["llama4-scout"]
    seen = attention_flops_per_token(scout, 65_536) / (4 * scout.heads * scout.d_head)
    assert seen == 36 * 4096 + 12 * 32_768


def test_a_config_of_the_hub_is_read(tmp_path: Path) -> None:
    """As it is written there: with the text model nested, and keys that sizes do not depend on."""
    text = {
        "model_type": "gemma4_text", "hidden_size": 5376, "num_hidden_layers": 60, "num_attention_heads": 32,
        "num_key_value_heads": 16, "num_global_key_value_heads": 4, "intermediate_size": 21_504, "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "rope_parameters": {}, "max_position_embeddings": 262_144,
    }  # fmt: skip
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert count(find_planned_model(str(tmp_path))) == count(planned_models()["gemma4-31b"])
    with pytest.raises(UserError, match="and does not run it"):
        find_model(str(tmp_path))
    text["hidden_size_per_layer_input"] = 256
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is not planned"):
        find_planned_model(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-ai/DeepSeek-V3",
        "openai/gpt-oss-120b",
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "google/gemma-4-31B-it",
    ],
)
def test_names_of_the_hub(name: str) -> None:
    find_planned_model(name)
    with pytest.raises(UserError, match="does not run it"):
        find_model(name)


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_nope_head_dim", "n_routed_experts"])
@pytest.mark.parametrize("value", [None, 0, -1, "8", True, 1e9])
def test_a_wrong_key_is_named(key: str, value: object, tmp_path: Path) -> None:
    config = {
        "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "vocab_size": 256, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert find_planned_model(str(file)).latent is not None
    file.write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=key):
        find_planned_model(str(file))
