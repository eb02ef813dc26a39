import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from podway.errors import UserError
from podway.model.families import find_model, known_models
from podway.model.hf import read_config, shape_from_hf, shape_to_hf
from podway.model.shape import ModelShape

# What lies on the hub, less the keys that say nothing of the shape. Gemma 3's leaves out all that equals the defaults.
HUB: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    },
    "llama2-7b": {
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_scaling": None, "vocab_size": 32000,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
        "vocab_size": 32000,
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 131072, "max_window_layers": 28, "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "gemma2-27b": {
        "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "head_dim": 128, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 4608, "intermediate_size": 36864, "max_position_embeddings": 8192, "num_attention_heads": 32,
        "num_hidden_layers": 46, "num_key_value_heads": 16, "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
    },
    "gemma3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_files_of_the_hub_are_the_named_rows(name: str) -> None:
    assert shape_from_hf(HUB[name]) == find_model(name)


@pytest.mark.parametrize("name", known_models())
def test_every_shape_survives_the_round_trip_through_json(name: str) -> None:
    shape = find_model(name)
    assert shape_from_hf(json.loads(json.dumps(shape_to_hf(shape)))) == shape


def test_both_spellings_of_rope_are_read() -> None:
    config = dict(HUB["llama3.1-8b"])
    scaling, theta = config.pop("rope_scaling"), config.pop("rope_theta")
    assert shape_from_hf(config | {"rope_parameters": scaling | {"rope_theta": theta}}) == find_model("llama3.1-8b")


def test_qwen_windows_start_at_a_layer() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 26}
    shape = shape_from_hf(HUB["qwen2.5-7b"] | windows)
    assert shape.layer_windows == (None,) * 26 + (64, 64)
    assert shape_from_hf(shape_to_hf(shape)) == shape


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"architectures": None, "model_type": "t5"}, "t5"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"hidden_size": 4097}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "key/value"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "longrope"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "long_factor"),
        ({"partial_rotary_factor": 0.001}, "turned"),
        ({"rope_scaling": 7}, "rope_scaling"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        shape_from_hf(HUB["llama3.1-8b"] | change)
    assert error.value.hint


def test_a_missing_key_is_named() -> None:
    config = {key: value for key, value in HUB["llama2-7b"].items() if key != "intermediate_size"}
    with pytest.raises(UserError, match="'intermediate_size' is missing"):
        shape_from_hf(config)


def test_a_shape_that_its_family_cannot_say_is_refused() -> None:
    odd = replace(find_model("llama3-8b"), block="parallel")
    with pytest.raises(UserError, match="cannot express"):
        shape_to_hf(odd)
    assert shape_from_hf(shape_to_hf(replace(odd, family="podway"))) == replace(odd, family="podway")


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 200_000])
def test_a_file_that_is_no_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError):
        read_config(tmp_path)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=6,
)
KEYS = sorted(
    {key for config in HUB.values() for key in config}
    | {"rope_parameters", "layer_types", "text_config", "num_local_experts", "query_pre_attn_scalar", "attention_bias"}
)


@given(st.sampled_from(sorted(HUB)), st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=3))
def test_any_change_is_a_shape_or_a_user_error(name: str, change: dict[str, Any]) -> None:
    try:
        shape = shape_from_hf(HUB[name] | change)
    except UserError as error:
        assert error.hint
    else:
        assert isinstance(shape, ModelShape)
        assert shape_from_hf(shape_to_hf(shape)) == shape


@given(ANYTHING.filter(lambda value: isinstance(value, dict)))
def test_a_podway_file_holds_a_shape_or_nothing(shape: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        shape_from_hf({"architectures": ["PodwayForCausalLM"], "shape": shape})
