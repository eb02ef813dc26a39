"""Models that Podway plans for by name and does not run, with what their own `config.json` says (no jax).

`tests/model/test_planned_families.py` holds each to its published parameter count. To add a model: one row here; to add an
architecture: `hf_planned.py`.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from podway.model.hf_keys import ConfigKeys
from podway.model.hf_planned import PLANNED, PLANNED_TYPES
from podway.model.shape import ModelShape

_MLA: ConfigKeys = {
    "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "max_position_embeddings": 163_840,
}  # fmt: skip
_GPT_OSS: ConfigKeys = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "vocab_size": 201_088, "num_experts_per_tok": 4, "sliding_window": 128,
}  # fmt: skip
_LLAMA4: ConfigKeys = {
    "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "vocab_size": 202_048, "attention_chunk_size": 8192,
    "num_experts_per_tok": 1,
}  # fmt: skip
_GEMMA4: ConfigKeys = {
    "model_type": "gemma4_text", "vocab_size": 262_144, "head_dim": 256, "global_head_dim": 512, "sliding_window": 1024,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "max_position_embeddings": 262_144,
}  # fmt: skip

_CONFIGS: dict[str, ConfigKeys] = {
    "deepseek-v2-lite": _MLA | {
        "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": None, "intermediate_size": 10_944,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "vocab_size": 102_400,
    },
    "deepseek-v2": _MLA | {
        "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "q_lora_rank": 1536, "intermediate_size": 12_288,
        "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "vocab_size": 102_400,
    },
    "deepseek-v3": _MLA | {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536, "intermediate_size": 18_432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "vocab_size": 129_280,
    },
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "llama4-scout": _LLAMA4 | {"num_local_experts": 16, "interleave_moe_layer_step": 1},
    "llama4-maverick": _LLAMA4 | {"num_local_experts": 128, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 16_384},
    "gemma4-31b": _GEMMA4 | {
        "hidden_size": 5376, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "intermediate_size": 21_504,
    },
    "gemma4-26b-a4b": _GEMMA4 | {
        "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_global_key_value_heads": 2, "intermediate_size": 2112, "enable_moe_block": True, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704,
    },
}  # fmt: skip


@cache
def planned_models() -> Mapping[str, ModelShape]:
    """Every name that can be planned for and not run."""
    return MappingProxyType({name: PLANNED[PLANNED_TYPES[keys["model_type"]]](keys) for name, keys in _CONFIGS.items()})
