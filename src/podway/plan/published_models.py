"""Models of published results that no family of Podway holds: what the planner needs of them, and nothing to load.

The MaxText models are its defaults of 2023 scaled up (`global_parameter_scale`): attention and MLP side by side, heads of 128.
"""

from podway.errors import UserError
from podway.model.families import find_model
from podway.model.shape import Attention, Embedding, ModelShape, Norm, Rope


def _maxtext(*, layers: int, d_model: int, heads: int, d_ff: int, d_head: int, gated: bool, vocab: int) -> ModelShape:
    return ModelShape(
        family="podway", layers=layers, d_model=d_model, heads=heads, kv_heads=heads, d_head=d_head, d_ff=d_ff, vocab=vocab,
        max_position=2048, activation="silu-gated" if gated else "relu", block="parallel", norm=Norm(),
        rope=Rope() if gated else None, attention=Attention(), embedding=Embedding(tied=True),
    )  # fmt: skip


PUBLISHED_MODELS: dict[str, ModelShape] = {
    # MaxText 1xv4-128.sh @5ebcd67fe: scale=3 of 2048 wide, 8 heads of 256, MLP 8192, 16 layers
    "maxtext-22b": _maxtext(layers=48, d_model=6144, heads=24, d_ff=24576, d_head=256, gated=False, vocab=32768),
    # MaxText configs/v5p/{32b,128b}.sh: powers of two of 2048 wide, 16 heads of 128, gated MLP 7168, 16 layers
    "maxtext-32b": _maxtext(layers=32, d_model=8192, heads=64, d_ff=28672, d_head=128, gated=True, vocab=32768),
    "maxtext-128b": _maxtext(layers=64, d_model=8192, heads=128, d_ff=57344, d_head=128, gated=True, vocab=32768),
    # Brown et al. 2020 (arXiv 2005.14165), table 2.1; vocabulary as MaxText pads it
    "gpt3-175b": ModelShape(
        family="podway", layers=96, d_model=12288, heads=96, kv_heads=96, d_head=128, d_ff=49152, vocab=50304,
        max_position=2048, activation="gelu", block="sequential", norm=Norm(), rope=None, attention=Attention(),
        embedding=Embedding(tied=True),
    ),
}  # fmt: skip


def published_model(name: str) -> ModelShape:
    """A model by the name that a published result gives it."""
    try:
        return PUBLISHED_MODELS.get(name) or find_model(name)
    except UserError:
        raise UserError(f"no published model {name!r}", f"known: {', '.join(PUBLISHED_MODELS)}") from None
