"""How a Hugging Face `config.json` says where positions enter: `rope_theta`, `rope_scaling`, `rope_parameters` <-> `Rope` (no jax).

Old files have `rope_theta` and, for long contexts, `rope_scaling`; new ones have all of it in `rope_parameters`, for each kind of
layer where kinds differ. Where a file leaves a figure out, it is the one that transformers 5 would compute.
"""

import math

from podway.errors import UserError
from podway.model.hf_keys import Config, ConfigKeys, Keys
from podway.model.shape import (
    Family,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

_KNOWN = "default, linear, llama3, yarn, longrope"


def read_rope(keys: Keys, family: Family) -> Rope:
    """The rotary embedding that a file describes."""
    parameters = keys.part("rope_parameters")
    by_kind = "full_attention" in parameters or "sliding_attention" in parameters
    everywhere = Keys(parameters, {}).part("full_attention") if by_kind else parameters
    local = Keys(parameters, {}).part("sliding_attention") if by_kind else {}
    if _scaling(local, keys) is not None:
        raise UserError("config.json: scaled rope on sliding layers is not supported", "set their rope_type to default")
    local_theta = None
    if family == "gemma3":
        local_theta = Keys(local, {"rope_theta": keys.number("rope_local_base_freq")}).number("rope_theta")
    outside = {key: keys.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    return Rope(
        theta=Keys(everywhere, outside).number("rope_theta"),
        local_theta=local_theta,
        scaling=_scaling(everywhere or keys.part("rope_scaling"), keys),
        part=Keys(everywhere, outside).number("partial_rotary_factor"),
    )


def _scaling(rope: Config, whole: Keys) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    keys = Keys(rope, {})
    if kind in ("default", None):
        return None
    if kind == "linear":
        return LinearScaling(factor=keys.number("factor"))
    if kind == "llama3":
        return Llama3Scaling(
            factor=keys.number("factor"),
            low_freq_factor=keys.number("low_freq_factor"),
            high_freq_factor=keys.number("high_freq_factor"),
            original_max_position=keys.whole("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _yarn(rope, whole)
    if kind in ("longrope", "su"):  # the name of Phi 3's first files
        return _longrope(rope, whole)
    raise UserError(f"config.json: rope scaling {kind!r} is not supported", f"known: {_KNOWN}")


def _original(rope: Config, whole: Keys) -> int:
    """The context that the model was first trained on."""
    own = whole.get("original_max_position_embeddings") or whole.get("max_position_embeddings")
    return Keys(rope, {"original_max_position_embeddings": own}).whole("original_max_position_embeddings")


def _yarn(rope: Config, whole: Keys) -> YarnScaling:
    original = _original(rope, whole)
    keys = Keys(
        rope,
        {
            "factor": whole.whole("max_position_embeddings") / original,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,
        },
    )
    factor = keys.number("factor")
    given, weight, weight_all = (keys.optional_number(k) for k in ("attention_factor", "mscale", "mscale_all_dim"))
    magnitude = _yarn_magnitude(factor, 1.0)
    if weight and weight_all:
        magnitude = _yarn_magnitude(factor, weight) / _yarn_magnitude(factor, weight_all)
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        beta_fast=keys.number("beta_fast"),
        beta_slow=keys.number("beta_slow"),
        truncate=keys.flag("truncate"),
        magnitude=given or magnitude,
    )


def _yarn_magnitude(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(rope: Config, whole: Keys) -> LongScaling:
    original = _original(rope, whole)
    factor = whole.whole("max_position_embeddings") / original
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongScaling(
        short=_factors(rope, "short_factor"),
        long=_factors(rope, "long_factor"),
        original_max_position=original,
        magnitude=Keys(rope, {}).optional_number("attention_factor") or magnitude,
    )


def _factors(rope: Config, key: str) -> tuple[float, ...]:
    found = rope.get(key)
    if not isinstance(found, list) or not all(isinstance(x, int | float) and 0 < x < 1e30 for x in found):
        raise UserError(
            f"config.json: {key!r} is not a list of numbers above 0", "longrope has one for each pair of channels"
        )
    return tuple(float(x) for x in found)


def rope_words(rope: Rope) -> ConfigKeys:
    """The keys that describe a rotary embedding, in the older spelling."""
    words: ConfigKeys = {"rope_theta": rope.theta, "rope_scaling": _scaling_words(rope.scaling)}
    if rope.local_theta is not None:
        words["rope_local_base_freq"] = rope.local_theta
    if rope.part != 1.0:
        words["partial_rotary_factor"] = rope.part
    if isinstance(rope.scaling, LongScaling):
        words["original_max_position_embeddings"] = rope.scaling.original_max_position
    return words


def _scaling_words(scaling: RopeScaling | None) -> ConfigKeys | None:
    if scaling is None:
        return None
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, LongScaling):
        return {
            "rope_type": "longrope",
            "short_factor": list(scaling.short),
            "long_factor": list(scaling.long),
            "attention_factor": scaling.magnitude,
        }
    words: ConfigKeys = {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_max_position}
    if isinstance(scaling, YarnScaling):
        own = {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        return {"rope_type": "yarn", **words, **own, "attention_factor": scaling.magnitude}
    own = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    return {"rope_type": "llama3", **words, **own}
