"""LoRA adapters as PEFT keeps them: `adapter_config.json` and `adapter_model.safetensors` in a folder (no jax).

Letters: L layers, r rank.

PEFT has two matrices for each layer and matrix, `….lora_A.weight` (r, inputs) and `….lora_B.weight` (outputs, r); here they are
stacked over the layers and turned, a (L, inputs..., r) and b (L, r, outputs...). The trainer writes such folders and goes on from
them; the server adds their products to those of the model.
"""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from podway.errors import UserError
from podway.extras import load
from podway.model.params import Param, params
from podway.model.shape import ModelShape

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_NAMES = ("q", "k", "v", "o", "gate", "up", "down", "shared_gate", "shared_up", "shared_down")
# Settings of PEFT that change what an adapter means, with the values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "use_dora": (False,), "bias": ("none",), "modules_to_save": ([],), "rank_pattern": ({},), "alpha_pattern": ({},),
    "fan_in_fan_out": (False,), "lora_bias": (False,), "trainable_token_indices": ([], {}),
}  # fmt: skip

Matrix = NDArray[np.float32]


class Adapter(NamedTuple):
    """An adapter as it was read; `pairs` has a and b of each matrix, with alpha / rank in b."""

    rank: int
    pairs: dict[str, tuple[Matrix, Matrix]]


def matrices(shape: ModelShape) -> dict[str, Param]:
    """The matrices of a layer that adapters can stand beside: those that the decoder multiplies by through `project`."""
    table = {param.name.removeprefix("layers/"): param for param in params(shape)}
    return {name: table[name] for name in _NAMES if name in table}


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.generic]]]:
    """The configuration and the tensors of an adapter."""
    safetensors: Any = load("safetensors", "serve", "a LoRA adapter")  # an engine without adapters does without
    load_file = load("safetensors.numpy", "serve", "a LoRA adapter").load_file
    try:
        about = json.loads((folder / CONFIG_FILE).read_text())
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise UserError(
            f"cannot read the adapter in {folder}: {error}", f"it needs {CONFIG_FILE} and {WEIGHTS_FILE}"
        ) from None
    return about if isinstance(about, dict) else {}, tensors


def read_adapter(folder: Path, shape: ModelShape) -> Adapter:
    """An adapter for this model, whatever matrices it has; what it asks for and nobody does here is refused by name."""
    about, tensors = read_files(folder)
    rank, scale = _rank(about, folder)
    left = dict(tensors)
    pairs: dict[str, tuple[Matrix, Matrix]] = {}
    for name, param in matrices(shape).items():
        if param.rows:
            continue  # a part of a tensor that PEFT adapts as a whole: refused below, where the file has it
        inward, outward = param.dims[1 : 1 + param.inputs], param.dims[1 + param.inputs :]
        a = np.zeros((param.dims[0], prod(inward), rank), np.float32)
        b = np.zeros((param.dims[0], rank, prod(outward)), np.float32)
        found = False
        for layer, (module, inputs, outputs) in enumerate(modules(param)):
            names = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
            if not any(one in left for one in names):
                continue  # this layer is as the model has it
            a[layer] = tensor_of(left, names[0], (rank, inputs), folder).T
            b[layer] = tensor_of(left, names[1], (outputs, rank), folder).T * scale
            left.pop(names[0]), left.pop(names[1])
            found = True
        if found:
            pairs[name] = a.reshape(-1, *inward, rank), b.reshape(-1, rank, *outward)
    if left or not pairs:
        some = ", ".join(sorted(left)[:3]) or "nothing"
        raise UserError(
            f"the adapter in {folder} holds {some}, which is not beside a matrix of this model",
            f"give an adapter of this very model; matrices that can have one: {', '.join(matrices(shape))}",
        )
    if not all(np.isfinite(one).all() for pair in pairs.values() for one in pair):
        raise UserError(f"the adapter in {folder} holds numbers that are not finite", "export it again")
    return Adapter(rank, pairs)


def _rank(about: dict[str, Any], folder: Path) -> tuple[int, float]:
    """The rank, and what the product is multiplied by."""
    rank, alpha = about.get("r"), about.get("lora_alpha")
    if about.get("peft_type") != "LORA" or not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise UserError(
            f"{folder / CONFIG_FILE} is not the configuration of a LoRA adapter",
            "it needs peft_type LORA, r and lora_alpha",
        )
    for key, neutral in _NEUTRAL.items():
        value = about.get(key)
        if value is not None and value not in neutral:
            raise UserError(f"the adapter in {folder} has {key} {str(value)[:60]}", "only plain LoRA is done here")
    return rank, float(alpha) / (rank**0.5 if about.get("use_rslora") else rank)


def modules(param: Param) -> Iterator[tuple[str, int, int]]:
    """(PEFT's name of the module, inputs, outputs) of each layer, and of each expert in it."""
    if param.rows:
        raise UserError(
            f"{param.name} is a part of {param.hf.rpartition('.')[0]} in Hugging Face's files, so PEFT has no adapter for it",
            "export the merged model instead, or choose lora.targets that are whole: o, down",
        )
    stacks, inward, outward = param.split_dims
    for layer, *expert in np.ndindex(*stacks):
        module = param.hf.format(layer=layer, expert=expert[0] if expert else 0).removesuffix(".weight")
        yield f"base_model.model.{module}", prod(inward), prod(outward)


def tensor_of(
    tensors: dict[str, NDArray[np.generic]], name: str, dims: tuple[int, int], folder: Path
) -> NDArray[np.float32]:
    """A tensor of these dimensions, in float32."""
    found = tensors.get(name)
    if found is None or found.shape != dims:
        what = "is missing" if found is None else f"is {list(found.shape)} and must be {list(dims)}"
        raise UserError(f"{name} {what} in {folder}", "give an adapter of this very model")
    return found.astype(np.float32)
