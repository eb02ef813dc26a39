"""The models Podway knows by name, and `find_model`, which forgives how people write those names.

A row holds what the model's own `config.json` says (the base checkpoint where the tuned one differs), so that a name can
be planned for without a download. Weights on disk are always read with the `config.json` beside them, never with a row.
`tests/model/test_families.py` holds every row to its published parameter count. To add a model: one row here.
"""

import difflib
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from msgspec.structs import replace

from podway.errors import UserError
from podway.model.hf import read_config, shape_from_hf
from podway.model.planned_families import planned_models
from podway.model.shape import (
    PLANNED_ONLY,
    Attention,
    Embedding,
    Experts,
    Family,
    LinearScaling,
    Llama3Scaling,
    ModelShape,
    Norm,
    Rope,
)


def _llama(
    layers: int, d_model: int, heads: int, kv_heads: int, d_ff: int, vocab: int, max_position: int, rope: Rope,
    *, family: Family = "llama", tied: bool = False, window: int | None = None, experts: Experts | None = None,
) -> ModelShape:  # fmt: skip
    """Llama, Mistral and Mixtral: d_head = d_model / heads, eps 1e-5."""
    return ModelShape(
        family=family, layers=layers, d_model=d_model, heads=heads, kv_heads=kv_heads, d_head=d_model // heads,
        d_ff=d_ff, vocab=vocab, max_position=max_position, norm=Norm(eps=1e-5), rope=rope,
        attention=Attention(window=window), embedding=Embedding(tied=tied), experts=experts,
    )  # fmt: skip


def _qwen2(
    layers: int, d_model: int, heads: int, kv_heads: int, d_ff: int, vocab: int, max_position: int,
    *, tied: bool = False, eps: float = 1e-6, experts: Experts | None = None,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        family="qwen2-moe" if experts else "qwen2", layers=layers, d_model=d_model, heads=heads, kv_heads=kv_heads,
        d_head=d_model // heads, d_ff=d_ff, vocab=vocab, max_position=max_position, norm=Norm(eps=eps),
        rope=Rope(theta=1e6), attention=Attention(qkv_bias=True), embedding=Embedding(tied=tied), experts=experts,
    )  # fmt: skip


def _qwen3(
    layers: int,
    d_model: int,
    heads: int,
    kv_heads: int,
    d_ff: int,
    *,
    tied: bool = False,
    experts: Experts | None = None,
) -> ModelShape:
    return ModelShape(
        family="qwen3-moe" if experts else "qwen3", layers=layers, d_model=d_model, heads=heads, kv_heads=kv_heads,
        d_head=128, d_ff=d_ff, vocab=151_936, max_position=40_960, rope=Rope(theta=1e6),
        attention=Attention(qk_norm=True), embedding=Embedding(tied=tied), experts=experts,
    )  # fmt: skip


def _gemma2(layers: int, d_model: int, heads: int, kv_heads: int, d_head: int, d_ff: int, query: int) -> ModelShape:
    return ModelShape(
        family="gemma2", layers=layers, d_model=d_model, heads=heads, kv_heads=kv_heads, d_head=d_head, d_ff=d_ff,
        vocab=256_000, max_position=8192, activation="gelu-gated", block="sandwich", norm=Norm(plus_one=True),
        attention=Attention(softcap=50.0, query_scale=query, window=4096, windowed=(True, False)),
        embedding=Embedding(tied=True, scale=d_model**0.5, logit_softcap=30.0),
    )  # fmt: skip


def _gemma3(
    layers: int, d_model: int, heads: int, kv_heads: int, d_head: int, d_ff: int, query: int,
    *, vocab: int = 262_208, window: int = 1024, max_position: int = 131_072, stretch: float | None = 8.0,
) -> ModelShape:  # fmt: skip
    scaling = LinearScaling(factor=stretch) if stretch else None
    return ModelShape(
        family="gemma3", layers=layers, d_model=d_model, heads=heads, kv_heads=kv_heads, d_head=d_head, d_ff=d_ff,
        vocab=vocab, max_position=max_position, activation="gelu-gated", block="sandwich", norm=Norm(plus_one=True),
        rope=Rope(theta=1e6, local_theta=10_000.0, scaling=scaling),
        attention=Attention(qk_norm=True, query_scale=query, window=window, windowed=(True,) * 5 + (False,)),
        embedding=Embedding(tied=True, scale=d_model**0.5),
    )  # fmt: skip


def _parallel(layers: int, d_model: int, heads: int, d_ff: int) -> ModelShape:
    """The 16B-128B jobs, with the dimensions of the day they were published (October 2023).

    The scripts that are still published build other models, since the defaults beneath them changed in 2024. Then: one
    norm (root mean square, as T5's) feeds attention and a plain ReLU MLP side by side, the embedding is tied with
    logits / sqrt(d_model), and under the flash kernel no position enters but causality.
    """
    return ModelShape(
        family="podway", layers=layers, d_model=d_model, heads=heads, kv_heads=heads, d_head=256, d_ff=d_ff,
        vocab=32_768, max_position=2048, activation="relu", block="parallel", rope=None,
        embedding=Embedding(tied=True, logit_scale=d_model**-0.5),
    )  # fmt: skip


_LLAMA3 = Rope(theta=500_000.0)
_LLAMA31 = Rope(theta=500_000.0, scaling=Llama3Scaling(factor=8.0))
_LLAMA32 = Rope(theta=500_000.0, scaling=Llama3Scaling(factor=32.0))


_PUBLISHED: dict[str, ModelShape] = {
    "llama2-7b": _llama(32, 4096, 32, 32, 11_008, 32_000, 4096, Rope()),
    "llama2-13b": _llama(40, 5120, 40, 40, 13_824, 32_000, 4096, Rope()),
    "llama2-70b": _llama(80, 8192, 64, 8, 28_672, 32_000, 4096, Rope()),
    "llama3-8b": _llama(32, 4096, 32, 8, 14_336, 128_256, 8192, _LLAMA3),
    "llama3-70b": _llama(80, 8192, 64, 8, 28_672, 128_256, 8192, _LLAMA3),
    "llama3.1-8b": _llama(32, 4096, 32, 8, 14_336, 128_256, 131_072, _LLAMA31),
    "llama3.1-70b": _llama(80, 8192, 64, 8, 28_672, 128_256, 131_072, _LLAMA31),
    "llama3.1-405b": _llama(126, 16_384, 128, 8, 53_248, 128_256, 131_072, _LLAMA31),
    "llama3.2-1b": _llama(16, 2048, 32, 8, 8192, 128_256, 131_072, _LLAMA32, tied=True),
    "llama3.2-3b": _llama(28, 3072, 24, 8, 8192, 128_256, 131_072, _LLAMA32, tied=True),
    "llama3.3-70b": _llama(80, 8192, 64, 8, 28_672, 128_256, 131_072, _LLAMA31),
    "mistral-7b": _llama(32, 4096, 32, 8, 14_336, 32_000, 32_768, Rope(), family="mistral", window=4096),
    "mistral-7b-v0.3": _llama(32, 4096, 32, 8, 14_336, 32_768, 32_768, Rope(theta=1e6), family="mistral"),
    "mixtral-8x7b": _llama(
        32, 4096, 32, 8, 14_336, 32_000, 32_768, Rope(theta=1e6), family="mixtral",
        experts=Experts(count=8, per_token=2, d_ff=14_336, balance=0.02),
    ),
    "mixtral-8x22b": _llama(
        56, 6144, 48, 8, 16_384, 32_000, 65_536, Rope(theta=1e6), family="mixtral",
        experts=Experts(count=8, per_token=2, d_ff=16_384),
    ),
    "qwen1.5-moe-a2.7b": _qwen2(
        24, 2048, 16, 16, 5632, 151_936, 8192,
        experts=Experts(count=60, per_token=4, d_ff=1408, normalise=False, d_ff_shared=5632),
    ),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, 151_936, 32_768, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, 151_936, 131_072, tied=True),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11_008, 151_936, 32_768, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18_944, 152_064, 131_072),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13_824, 152_064, 131_072, eps=1e-5),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27_648, 152_064, 131_072, eps=1e-5),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29_568, 152_064, 131_072, eps=1e-5),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12_288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17_408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25_600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 6144, experts=Experts(count=128, per_token=8, d_ff=768)),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 4, 12_288, experts=Experts(count=128, per_token=8, d_ff=1536)),
    "gemma2-2b": _gemma2(26, 2304, 8, 4, 256, 9216, 256),
    "gemma2-9b": _gemma2(42, 3584, 16, 8, 256, 14_336, 256),
    "gemma2-27b": _gemma2(46, 4608, 32, 16, 128, 36_864, 144),
    "gemma3-1b": _gemma3(
        26, 1152, 4, 1, 256, 6912, 256, vocab=262_144, window=512, max_position=32_768, stretch=None
    ),
    "gemma3-4b": _gemma3(34, 2560, 8, 4, 256, 10_240, 256),
    "gemma3-12b": _gemma3(48, 3840, 16, 8, 256, 15_360, 256),
    "gemma3-27b": _gemma3(62, 5376, 32, 16, 128, 21_504, 168),
    "16b": _parallel(32, 5120, 32, 32_768),
    "32b": _parallel(32, 10_240, 32, 32_768),
    "64b": _parallel(64, 10_240, 32, 32_768),
    "128b": _parallel(64, 10_240, 64, 65_536),
}  # fmt: skip


# A few hundred kilobytes each, with every mechanism of the family they are named after: for tests, demos and the
# simulated slice. A vocabulary of 256 makes every byte a token.
_TINY = {
    "tiny-llama2": "llama2-7b",
    "tiny-llama3": "llama3.1-8b",
    "tiny-llama3.2": "llama3.2-1b",
    "tiny-mistral": "mistral-7b",
    "tiny-mixtral": "mixtral-8x7b",
    "tiny-qwen2.5": "qwen2.5-7b",
    "tiny-qwen2-moe": "qwen1.5-moe-a2.7b",
    "tiny-qwen3": "qwen3-8b",
    "tiny-qwen3-moe": "qwen3-30b-a3b",
    "tiny-gemma2": "gemma2-2b",
    "tiny-gemma3": "gemma3-4b",
    "tiny-parallel": "16b",
}


def _shrunk(shape: ModelShape) -> ModelShape:
    """The same model in two layers (three for Gemma 3's rhythm of windows), 64 wide, with a context of 512."""
    a, rope, experts, d_model = shape.attention, shape.rope, shape.experts, 64
    windowed = (True, True, False) if len(a.windowed) > 2 else a.windowed
    if rope and isinstance(rope.scaling, Llama3Scaling):
        rope = replace(rope, scaling=replace(rope.scaling, original_max_position=64))
    return replace(
        shape,
        layers=max(2, len(windowed)), d_model=d_model, heads=4, kv_heads=4 if shape.kv_heads == shape.heads else 2,
        d_head=16, d_ff=128, vocab=256, max_position=512, rope=rope,
        attention=replace(
            a, query_scale=24 if a.query_scale else None, window=16 if a.window else None, windowed=windowed
        ),
        embedding=replace(
            shape.embedding,
            scale=d_model**0.5 if shape.embedding.scale != 1.0 else 1.0,
            logit_scale=d_model**-0.5 if shape.embedding.logit_scale != 1.0 else 1.0,
        ),
        experts=experts
        and replace(
            experts, count=4, per_token=2, d_ff=128 if experts.d_ff == shape.d_ff else 96,
            d_ff_shared=64 if experts.d_ff_shared else 0,
        ),
    )  # fmt: skip


@cache
def known_models() -> Mapping[str, ModelShape]:
    """Every name that can be planned, trained and served, in the order people are shown."""
    return MappingProxyType(_PUBLISHED | {name: _shrunk(_PUBLISHED[of]) for name, of in _TINY.items()})


def find_model(name: str) -> ModelShape:
    """The shape of a model that can be run: a known name, a Hugging Face id of such a model, a directory or file with a config.json."""
    shape = find_planned_model(name)
    if shape.family in PLANNED_ONLY:
        raise UserError(
            f"Podway plans for {name} and does not run it: its trainer and engine have no {shape.family} decoder",
            "`podway plan train` and `podway plan serve` take it",
        )
    return shape


def find_planned_model(name: str) -> ModelShape:
    """As `find_model`, and the models that can be planned for alone."""
    # os.path answers False to names that no file can have; Path.is_dir would raise for some of them.
    if name.endswith(".json") or os.path.isdir(name):  # noqa: PTH112
        return shape_from_hf(read_config(Path(name)))
    if name.startswith((".", "/", "~")):
        raise UserError(f"no directory {name}", "give a directory with a config.json and weights")
    return known_model(name)


def known_model(name: str) -> ModelShape:
    """The shape of a known name alone: a server opens no file of its own that somebody else names."""
    shapes = {**known_models(), **planned_models()}
    by_squeezed = {_squeezed(known): known for known in shapes}
    found = by_squeezed.get(_squeezed(name))
    if found is None:
        near = difflib.get_close_matches(_squeezed(name), by_squeezed, n=3, cutoff=0.6)
        names = (
            "did you mean " + " or ".join(by_squeezed[n] for n in near) if near else "known: " + ", ".join(_PUBLISHED)
        )
        raise UserError(f"unknown model {name!r}", f"{names}; a directory with a config.json works as well", status=404)
    return shapes[found]


# What people add to a name without changing the shape.
_DECORATION = re.compile(
    r"-(instruct|chat|it|pt|hf|base|text|thinking|fp8|awq|gptq|2507|v0\.1|v0\.2|17b-16e|17b-128e)(?=-|$)|^meta-|-qat.*$"
)


def _squeezed(name: str) -> str:
    """'meta-llama/Llama-3.1-8B-Instruct' -> 'llama3.18b'; the names above are squeezed alike."""
    last = name.strip().lower().rstrip("/").rsplit("/", 1)[-1].replace("_", "-").replace(" ", "-")
    return _DECORATION.sub("", last).replace("-", "")
