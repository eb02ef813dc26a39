"""Hugging Face `config.json` of models that Podway plans for and does not run: DeepSeek V2 and V3, GPT-OSS, Llama 4, Gemma 4 (no jax).

Each architecture has a function from its keys to a `ModelShape` that holds what sizes follow from: parameters, products, saved
activations, the cache. What changes the function of the weights but no size (how a router scores, how positions are scaled) is
left out, since nothing here is ever computed. Keys and defaults are those of transformers 5.
"""

from collections.abc import Callable

from podway.errors import UserError
from podway.model.hf_keys import Config, ConfigKeys, Keys
from podway.model.shape import Attention, Embedding, Experts, FullLayers, Latent, ModelShape, Norm, Rope

_ALWAYS: ConfigKeys = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 131_072}


def _deepseek(config: Config) -> ModelShape:
    keys = Keys(config, _ALWAYS | {"q_lora_rank": None, "n_shared_experts": 1, "first_k_dense_replace": 0})
    if keys.get("moe_layer_freq") not in (None, 1):
        raise UserError(
            f"config.json: 'moe_layer_freq' is {keys.get('moe_layer_freq')!r}, which is not planned", "it must be 1"
        )
    rope, heads, width = (
        keys.whole("qk_rope_head_dim"),
        keys.whole("num_attention_heads"),
        keys.whole("moe_intermediate_size"),
    )
    shared = 0 if keys.get("n_shared_experts") in (None, 0) else keys.whole("n_shared_experts")
    return ModelShape(
        family="deepseek",
        layers=keys.whole("num_hidden_layers"),
        d_model=keys.whole("hidden_size"),
        heads=heads,
        kv_heads=heads,
        d_head=keys.whole("qk_nope_head_dim") + rope,
        d_ff=keys.whole("intermediate_size"),
        vocab=keys.whole("vocab_size"),
        max_position=keys.whole("max_position_embeddings"),
        norm=Norm(eps=keys.number("rms_norm_eps")),
        embedding=Embedding(tied=keys.flag("tie_word_embeddings")),
        latent=Latent(
            kv_rank=keys.whole("kv_lora_rank"),
            d_rope=rope,
            d_value=keys.whole("v_head_dim"),
            q_rank=None if keys.get("q_lora_rank") is None else keys.whole("q_lora_rank"),
        ),
        experts=Experts(
            count=keys.whole("n_routed_experts"),
            per_token=keys.whole("num_experts_per_tok"),
            d_ff=width,
            d_ff_shared=shared * width,
            shared_gate=False,
            dense_first=0 if keys.get("first_k_dense_replace") == 0 else keys.whole("first_k_dense_replace"),
        ),
    )


def _gpt_oss(config: Config) -> ModelShape:
    keys = Keys(
        config, _ALWAYS | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
    )
    layers = keys.whole("num_hidden_layers")
    kinds = keys.get("layer_types") or ["sliding_attention", "full_attention"]
    return ModelShape(
        family="gpt-oss",
        layers=layers,
        d_model=keys.whole("hidden_size"),
        heads=keys.whole("num_attention_heads"),
        kv_heads=keys.whole("num_key_value_heads"),
        d_head=keys.whole("head_dim"),
        d_ff=keys.whole("intermediate_size"),
        vocab=keys.whole("vocab_size"),
        max_position=keys.whole("max_position_embeddings"),
        norm=Norm(eps=keys.number("rms_norm_eps")),
        attention=Attention(
            qkv_bias=True, out_bias=True, sinks=True, window=keys.whole("sliding_window"), windowed=_windowed(kinds)
        ),
        embedding=Embedding(tied=keys.flag("tie_word_embeddings")),
        experts=Experts(
            count=keys.whole("num_local_experts"),
            per_token=keys.whole("num_experts_per_tok"),
            d_ff=keys.whole("intermediate_size"),
            bias=True,
        ),
    )


def _llama4(config: Config) -> ModelShape:
    defaults = {"rms_norm_eps": 1e-5, "attention_chunk_size": 8192, "interleave_moe_layer_step": 1, "head_dim": None}
    keys = Keys(config, _ALWAYS | defaults | {"num_experts_per_tok": 1, "no_rope_layer_interval": 4})
    d_model, heads, width = (
        keys.whole("hidden_size"),
        keys.whole("num_attention_heads"),
        keys.whole("intermediate_size"),
    )
    # A layer without positions sees all tokens before it; the others see those of their chunk.
    turned = keys.get("no_rope_layers") or [1] * (keys.whole("no_rope_layer_interval") - 1) + [0]
    every = keys.whole("interleave_moe_layer_step")
    return ModelShape(
        family="llama4",
        layers=keys.whole("num_hidden_layers"),
        d_model=d_model,
        heads=heads,
        kv_heads=keys.whole("num_key_value_heads"),
        d_head=d_model // heads if keys.get("head_dim") is None else keys.whole("head_dim"),
        d_ff=width if keys.get("intermediate_size_mlp") is None else keys.whole("intermediate_size_mlp"),
        vocab=keys.whole("vocab_size"),
        max_position=keys.whole("max_position_embeddings"),
        norm=Norm(eps=keys.number("rms_norm_eps")),
        attention=Attention(
            window=keys.whole("attention_chunk_size"), windowed=tuple(bool(one) for one in turned), chunked=True
        ),
        embedding=Embedding(tied=keys.flag("tie_word_embeddings")),
        experts=Experts(
            count=keys.whole("num_local_experts"),
            per_token=keys.whole("num_experts_per_tok"),
            d_ff=width,
            d_ff_shared=width,
            shared_gate=False,
            every=every,
        ),
    )


def _gemma4(config: Config) -> ModelShape:
    keys = Keys(
        config,
        _ALWAYS
        | {"vocab_size": 262_144, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": None}
        | {"tie_word_embeddings": True, "sliding_window": 512, "attention_k_eq_v": False, "enable_moe_block": False}
        | {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0},
    )
    for name, what in (
        ("hidden_size_per_layer_input", "an embedding of its own"),
        ("num_kv_shared_layers", "shared keys"),
    ):
        if keys.get(name):
            raise UserError(
                f"config.json: 'gemma4' with {what} in each layer ({name!r} is {keys.get(name)!r}) is not planned",
                "the 31B and 26B-A4B models are",
            )
    d_model, shared = keys.whole("hidden_size"), keys.flag("attention_k_eq_v")
    kv_heads = keys.whole("num_key_value_heads")
    full_heads = (
        keys.whole("num_global_key_value_heads") if shared and keys.get("num_global_key_value_heads") else kv_heads
    )
    experts = None
    if keys.flag("enable_moe_block"):  # beside the plain MLP, which every token passes
        experts = Experts(
            count=keys.whole("num_experts"),
            per_token=keys.whole("top_k_experts"),
            d_ff=keys.whole("moe_intermediate_size"),
            d_ff_shared=keys.whole("intermediate_size"),
            shared_gate=False,
        )
    return ModelShape(
        family="gemma4",
        layers=keys.whole("num_hidden_layers"),
        d_model=d_model,
        heads=keys.whole("num_attention_heads"),
        kv_heads=kv_heads,
        d_head=keys.whole("head_dim"),
        d_ff=keys.whole("intermediate_size"),
        vocab=keys.whole("vocab_size"),
        max_position=keys.whole("max_position_embeddings"),
        activation="gelu-gated",
        block="sandwich",
        norm=Norm(eps=keys.number("rms_norm_eps")),
        rope=Rope(theta=1e6, local_theta=10_000.0),
        attention=Attention(
            qk_norm=True,
            window=keys.whole("sliding_window"),
            windowed=_windowed(keys.get("layer_types") or ["sliding_attention"] * 5 + ["full_attention"]),
        ),
        embedding=Embedding(tied=keys.flag("tie_word_embeddings"), scale=d_model**0.5),
        experts=experts,
        full_layers=FullLayers(d_head=keys.whole("global_head_dim"), kv_heads=full_heads, keys_are_values=shared),
    )


def _windowed(kinds: object) -> tuple[bool, ...]:
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or not kinds or any(kind not in known for kind in kinds):
        raise UserError(
            f"config.json: 'layer_types' is {kinds!r}",
            "it must name 'sliding_attention' or 'full_attention' for each layer",
        )
    return tuple(kind == "sliding_attention" for kind in kinds)


PLANNED: dict[str, Callable[[Config], ModelShape]] = {
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
    "GptOssForCausalLM": _gpt_oss,
    "Llama4ForCausalLM": _llama4,
    "Llama4ForConditionalGeneration": _llama4,  # its `text_config`
    "Gemma4ForCausalLM": _gemma4,
    "Gemma4ForConditionalGeneration": _gemma4,
}
PLANNED_TYPES = {
    "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM", "gpt_oss": "GptOssForCausalLM",
    "llama4": "Llama4ForConditionalGeneration", "llama4_text": "Llama4ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration", "gemma4_text": "Gemma4ForCausalLM",
}  # fmt: skip
