"""Hugging Face `config.json` <-> `ModelShape` (no jax).

Reading: the architecture's name picks a row of `_ARCHITECTURES`. A key that the file leaves out has the default of
that row, because files are saved without the keys that equal the defaults of their `transformers` class (defaults as
of transformers 5.22). Old files say `rope_theta` and `rope_scaling`, new ones `rope_parameters`; both are read.
A key that the class does not have is ignored, as the class ignores it. Whatever else would change the model's function
and is not understood here (another rope rule, biases in the MLP, layers without experts, ...) is refused by name.

Writing: the older spelling, which every reader still knows. `shape_from_hf(shape_to_hf(s)) == s`, or it is refused.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from podway.decoding import from_plain
from podway.errors import UserError
from podway.model.hf_keys import Config, ConfigKeys, Keys
from podway.model.hf_planned import PLANNED, PLANNED_TYPES
from podway.model.hf_rope import read_rope, rope_words
from podway.model.shape import (
    Activation,
    Attention,
    Embedding,
    Experts,
    Family,
    ModelShape,
    Norm,
    Record,
    Rope,
    YarnScaling,
)

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu-gated", "gelu_pytorch_tanh": "gelu-gated"}


class _Architecture(Record, frozen=True, kw_only=True):
    family: Family
    model_type: str
    defaults: ConfigKeys


def _row(family: Family, model_type: str, heads: int, kv_heads: int | None, **others: Any) -> _Architecture:
    always = {
        "hidden_size": None, "intermediate_size": None, "num_hidden_layers": None, "head_dim": None,
        "vocab_size": 32_000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": False, "rope_theta": 10_000.0, "rope_scaling": None, "rope_parameters": None,
        "partial_rotary_factor": 1.0,
    }  # fmt: skip
    return _Architecture(
        family=family,
        model_type=model_type,
        defaults=always | {"num_attention_heads": heads, "num_key_value_heads": kv_heads} | others,
    )


# Keys that would make another function of the weights; any other value is refused.
_MUST_BE: ConfigKeys = {
    "mlp_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_bidirectional_attention": False,
}
_QWEN: ConfigKeys = {
    "vocab_size": 151_936, "max_position_embeddings": 32_768, "sliding_window": 4096, "use_sliding_window": False,
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_GEMMA: ConfigKeys = {
    "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": None, "tie_word_embeddings": True,
    "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
    "attn_logit_softcapping": None, "final_logit_softcapping": None,
}  # fmt: skip
_GEMMA3: ConfigKeys = {
    **_GEMMA, "vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1e6,
    "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6,
}  # fmt: skip

_ARCHITECTURES: dict[str, _Architecture] = {
    "LlamaForCausalLM": _row("llama", "llama", 32, None, attention_bias=False),
    "MistralForCausalLM": _row(
        "mistral", "mistral", 32, 8, max_position_embeddings=131_072, sliding_window=4096
    ),
    "MixtralForCausalLM": _row(
        "mixtral", "mixtral", 32, 8, max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=1e6,
        sliding_window=None, num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.001,
    ),
    "Qwen2ForCausalLM": _row("qwen2", "qwen2", 32, 32, **_QWEN),
    "Qwen2MoeForCausalLM": _row(
        "qwen2-moe", "qwen2_moe", 16, 16, **_QWEN, qkv_bias=True, num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, norm_topk_prob=False,
        router_aux_loss_coef=0.001,
    ),
    "Qwen3ForCausalLM": _row("qwen3", "qwen3", 32, 32, **_QWEN, head_dim=128, attention_bias=False),
    "Qwen3MoeForCausalLM": _row(
        "qwen3-moe", "qwen3_moe", 32, 4, **_QWEN, attention_bias=False, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=False, router_aux_loss_coef=0.001,
    ),
    "Phi3ForCausalLM": _row(
        "phi3", "phi3", 32, None, vocab_size=32_064, max_position_embeddings=4096, rms_norm_eps=1e-5,
        original_max_position_embeddings=4096, sliding_window=None, attention_bias=False,
    ),
    "Gemma2ForCausalLM": _row(
        "gemma2", "gemma2", 8, 4,
        **_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        vocab_size=256_000, max_position_embeddings=8192,
    ),
    "Gemma3ForCausalLM": _row("gemma3", "gemma3_text", 8, 4, **_GEMMA3),
    "Gemma3ForConditionalGeneration": _row("gemma3", "gemma3_text", 8, 4, **_GEMMA3),  # its `text_config`
    # Shapes that no class of `transformers` has: the file holds the ModelShape itself, under "shape".
    "PodwayForCausalLM": _row("podway", "podway", 1, 1),
}  # fmt: skip


def read_config(path: Path) -> ConfigKeys:
    """The config.json at `path`, or in the directory `path`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(f"no model at {path}: {file} does not exist", "give a directory with a config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {error}", "it must be the config.json of a model") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a JSON object", "it must be the config.json of a model")
    return config


def shape_from_hf(config: Config) -> ModelShape:
    """The shape that a config.json describes; an architecture Podway does not know is a UserError that lists those."""
    name = _architecture_name(config)
    if name == "PodwayForCausalLM":
        try:
            return from_plain(config.get("shape"), ModelShape)
        except msgspec.ValidationError as error:
            raise UserError(
                f'config.json: "shape" is not a model shape: {error}', "write it again with Podway"
            ) from None
    # transformers 5 may write the number of Qwen's experts by Mixtral's name for it.
    if "num_local_experts" in config:
        config = {"num_experts": config["num_local_experts"], **config}
    nested = config.get("text_config")
    text: Config = nested if isinstance(nested, dict) else config
    if name in PLANNED:
        return PLANNED[name](text)
    row = _ARCHITECTURES[name]
    _refuse_what_changes_the_model(text)
    keys = Keys({key: value for key, value in text.items() if key in row.defaults}, row.defaults)
    d_model, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    if keys.get("head_dim") is None and d_model % heads:
        raise UserError(
            f"config.json: hidden_size {d_model} is not a multiple of num_attention_heads {heads}", "set head_dim"
        )
    gemma, rope = row.family in ("gemma2", "gemma3"), read_rope(keys, row.family)
    return ModelShape(
        family=row.family,
        layers=keys.whole("num_hidden_layers"),
        d_model=d_model,
        heads=heads,
        kv_heads=heads if keys.get("num_key_value_heads") is None else keys.whole("num_key_value_heads"),
        d_head=d_model // heads if keys.get("head_dim") is None else keys.whole("head_dim"),
        d_ff=keys.whole("intermediate_size"),
        vocab=keys.whole("vocab_size"),
        max_position=_max_position(keys, rope),
        activation=_activation(keys, gemma),
        block="sandwich" if gemma else "sequential",
        norm=Norm(eps=keys.number("rms_norm_eps"), plus_one=gemma),
        rope=rope,
        attention=_attention(keys, row.family),
        embedding=Embedding(
            tied=keys.flag("tie_word_embeddings"),
            scale=d_model**0.5 if gemma else 1.0,
            logit_softcap=keys.optional_number("final_logit_softcapping"),
        ),
        experts=_experts(keys, row.family),
    )


def _max_position(keys: Keys, rope: Rope) -> int:
    """What the file says, or what YaRN makes of the original context: people add it to a file and leave the rest as it was."""
    said, scaling = keys.whole("max_position_embeddings"), rope.scaling
    return max(said, int(scaling.factor * scaling.original_max_position)) if isinstance(scaling, YarnScaling) else said


def _architecture_name(config: Config) -> str:
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name is None:  # some tools write only the model_type
        by_type = PLANNED_TYPES | {row.model_type: n for n, row in reversed(_ARCHITECTURES.items())}
        name = by_type.get(str(config.get("model_type")), config.get("model_type"))
    if not isinstance(name, str) or name not in (*_ARCHITECTURES, *PLANNED):
        raise UserError(
            f"config.json: architecture {name!r} is not one that Podway knows",
            f"known: {', '.join(_ARCHITECTURES)}; to plan for alone: {', '.join(PLANNED)}",
        )
    return name


def _refuse_what_changes_the_model(config: Config) -> None:
    for key, plain in _MUST_BE.items():
        if config.get(key) not in (plain, None):
            raise UserError(
                f"config.json: {key!r} is {config[key]!r}, which Podway does not support",
                f"Podway reads models where it is {plain!r}",
            )


def _activation(keys: Keys, gemma: bool) -> Activation:
    # Early Gemma files say hidden_act "gelu" and mean the tanh form, which hidden_activation spells out.
    word = keys.get("hidden_activation") if gemma and keys.get("hidden_activation") else keys.get("hidden_act")
    word = "gelu_pytorch_tanh" if gemma and word == "gelu" else word
    if not isinstance(word, str) or word not in _ACTIVATIONS:
        raise UserError(f"config.json: activation {word!r} is not supported", "known: " + ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[word]


def _attention(keys: Keys, family: Family) -> Attention:
    bias = keys.get("attention_bias") is not None and keys.flag("attention_bias")
    windowed = _windowed(keys, family)
    return Attention(
        qkv_bias=bias or family == "qwen2" or (family == "qwen2-moe" and keys.flag("qkv_bias")),
        out_bias=bias,
        qk_norm=family in ("qwen3", "qwen3-moe", "gemma3"),
        softcap=keys.optional_number("attn_logit_softcapping"),
        query_scale=keys.optional_number("query_pre_attn_scalar"),
        window=keys.whole("sliding_window") if any(windowed) else None,
        windowed=windowed if any(windowed) else (True,),
    )


def _windowed(keys: Keys, family: Family) -> tuple[bool, ...]:
    """Which layers have a window, as the shortest pattern that repeats over all of them."""
    layers = keys.whole("num_hidden_layers")
    kinds = keys.get("layer_types")
    if keys.get("sliding_window") is None or keys.get("use_sliding_window") is False:
        return (False,)
    if kinds is not None:
        known = ("sliding_attention", "full_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise UserError(
                f"config.json: 'layer_types' is {kinds!r}",
                "it must name 'sliding_attention' or 'full_attention' once for each layer",
            )
        marks = [kind == "sliding_attention" for kind in kinds]
    elif family in ("qwen2", "qwen3"):
        marks = [i >= keys.whole("max_window_layers") for i in range(layers)]
    elif family in ("gemma2", "gemma3"):
        period = keys.whole("sliding_window_pattern") if family == "gemma3" else 2
        marks = [(i + 1) % period != 0 for i in range(layers)]
    elif family == "qwen2-moe":
        raise UserError("config.json: 'use_sliding_window' is true without 'layer_types'", "say the kind of each layer")
    else:
        marks = [True] * layers
    return next(tuple(marks[:n]) for n in range(1, layers + 1) if all(m == marks[i % n] for i, m in enumerate(marks)))


def _experts(keys: Keys, family: Family) -> Experts | None:
    if family == "mixtral":
        return Experts(
            count=keys.whole("num_local_experts"),
            per_token=keys.whole("num_experts_per_tok"),
            d_ff=keys.whole("intermediate_size"),
            balance=_balance(keys),
        )
    if family in ("qwen2-moe", "qwen3-moe"):
        return Experts(
            count=keys.whole("num_experts"),
            per_token=keys.whole("num_experts_per_tok"),
            d_ff=keys.whole("moe_intermediate_size"),
            normalise=keys.flag("norm_topk_prob"),
            balance=_balance(keys),
            d_ff_shared=keys.whole("shared_expert_intermediate_size") if family == "qwen2-moe" else 0,
        )
    return None


def _balance(keys: Keys) -> float:
    """The weight of the balance loss, which may be 0."""
    return 0.0 if keys.get("router_aux_loss_coef") == 0 else keys.number("router_aux_loss_coef")


def shape_to_hf(shape: ModelShape) -> ConfigKeys:
    """The config.json of a shape; a shape that its family's class could not express is a UserError."""
    name, row = next((n, r) for n, r in _ARCHITECTURES.items() if r.family == shape.family)
    config: ConfigKeys = {"architectures": [name], "model_type": row.model_type}
    config |= {"shape": msgspec.to_builtins(shape)} if shape.family == "podway" else _keys_of(shape)
    if shape_from_hf(config) != shape:
        raise UserError(f"a {shape.family} config.json cannot express this shape", "give the shape the family 'podway'")
    return config


def _keys_of(shape: ModelShape) -> ConfigKeys:
    a, e, rope, gemma = shape.attention, shape.experts, shape.rope, shape.family in ("gemma2", "gemma3")
    words = {activation: word for word, activation in _ACTIVATIONS.items()}
    config: ConfigKeys = {
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_ff,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.d_head,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_position,
        "hidden_activation" if gemma else "hidden_act": words.get(shape.activation, shape.activation),
        "rms_norm_eps": shape.norm.eps,
        "tie_word_embeddings": shape.embedding.tied,
        "attention_bias": a.out_bias,
        **(rope_words(rope) if rope else {"rope_theta": None, "rope_scaling": None}),
        "sliding_window": a.window,
    }
    if gemma:
        config |= {
            "query_pre_attn_scalar": _tidy(a.query_scale),
            "attn_logit_softcapping": a.softcap,
            "final_logit_softcapping": shape.embedding.logit_softcap,
        }
    if shape.family.startswith("qwen"):
        config["use_sliding_window"] = a.window is not None
    if a.window is not None and shape.family not in ("mistral", "mixtral"):
        config["layer_types"] = ["sliding_attention" if w else "full_attention" for w in shape.layer_windows]
    if e:
        config |= {"num_local_experts" if shape.family == "mixtral" else "num_experts": e.count}
        config |= {"num_experts_per_tok": e.per_token, "router_aux_loss_coef": e.balance}
        if shape.family != "mixtral":
            config |= {"moe_intermediate_size": e.d_ff, "norm_topk_prob": e.normalise}
        if e.d_ff_shared:
            config |= {"shared_expert_intermediate_size": e.d_ff_shared, "qkv_bias": a.qkv_bias}
    return config


def _tidy(value: float | None) -> float | int | None:
    """224.0 -> 224, as the files spell whole numbers (transformers wants an int there)."""
    return int(value) if value is not None and value == int(value) else value
