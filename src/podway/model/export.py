"""Write parameters as Hugging Face safetensors, one tensor in memory at a time.

1. `_files` deals the tensors, in the order of the layers, to files of at most `max_file_bytes`.
2. Each tensor is fetched from the devices (from all hosts of a slice, together), turned to the order that Hugging Face
   stores, and appended to its file. Host 0 writes; the others only take part in the fetching.
3. config.json, the index and the tokenizer's files go beside them, and the directory gets its name last: a directory
   with that name is complete.
"""

import itertools
import json
import operator
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache, reduce
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from podway.errors import UserError
from podway.model.decoder import Tree
from podway.model.hf import read_config, shape_from_hf, shape_to_hf
from podway.model.params import Param, params
from podway.model.shape import ModelShape

_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.tiktoken",
    "chat_template*", "generation_config.json",
)  # fmt: skip
# What the tokenizer and generation need of the model the training started from; the rest follows from the shape.
_KEPT_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


class _Tensor(NamedTuple):
    name: str
    param: Param
    place: tuple[int, ...]  # layer, expert
    dtype: np.dtype[np.generic]

    @property
    def bytes(self) -> int:
        return prod(self.param.hf_dims) * self.dtype.itemsize


def save_weights(
    tree: Tree,
    shape: ModelShape,
    folder: Path,
    *,
    source: Path | None = None,
    template: str | None = None,
    dtype: DTypeLike | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write `folder` as a Hugging Face model, in `dtype` (default: as it is). Call it on every host.

    `source` is the directory that the model came from: its tokenizer and token ids go along. `template` is the chat template that
    it was trained with, where that is not the source's own.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already", "give a new directory, or remove this one")
    config = _config(shape, source, _leaf(tree, params(shape)[0]).dtype if dtype is None else dtype)
    files = _files(tree, shape, dtype, max_file_bytes)
    writes = jax.process_index() == 0
    draft = folder.with_name(f".{folder.name}.partial")
    try:
        if writes:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        for name, tensors in files.items():
            _write(draft / name if writes else None, tensors, tree)
        if writes:
            _finish(draft, folder, files, config, source, template)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise UserError(f"cannot write {folder}: {error}", "free some space there, or give another directory") from None
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"podway: {folder.name} is written")


def _config(shape: ModelShape, source: Path | None, dtype: DTypeLike | None) -> dict[str, object]:
    config = read_config(source) if source is not None and (source / "config.json").exists() else {}
    same = bool(config) and "text_config" not in config and shape_from_hf(config) == shape
    if not same:
        config = {key: config[key] for key in _KEPT_KEYS if key in config} | shape_to_hf(shape)
    for of_the_source in ("dtype", "quantization_config"):
        config.pop(of_the_source, None)
    return config | {"torch_dtype": np.dtype(dtype).name}


def _leaf(tree: Tree, param: Param) -> jax.Array:
    leaf: Any = tree
    for part in param.name.split("/"):
        leaf = leaf[part]
    assert leaf.shape == param.dims, f"{param.name} is {leaf.shape}, the table says {param.dims}"
    array: jax.Array = leaf
    return array


def _files(tree: Tree, shape: ModelShape, dtype: DTypeLike | None, max_file_bytes: int) -> dict[str, list[_Tensor]]:
    groups: list[list[_Tensor]] = [[]]
    for tensor in _tensors(tree, shape, dtype):
        last = groups[-1]
        if last and last[-1].name != tensor.name and sum(t.bytes for t in last) + tensor.bytes > max_file_bytes:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _tensors(tree: Tree, shape: ModelShape, dtype: DTypeLike | None) -> Iterator[_Tensor]:
    """All tensors, those of one layer together."""
    found = []
    for order, param in enumerate(params(shape)):
        kind = np.dtype(_leaf(tree, param).dtype if dtype is None else dtype)
        if kind.name not in _CODES:
            raise UserError(f"weights in {kind.name} cannot be exported", "choose one of " + ", ".join(_CODES))
        for place in itertools.product(*(range(dim) for dim in param.dims[: param.stacked])):
            name = param.hf.format(**dict(zip(("layer", "expert"), place, strict=False)))
            layer = place[0] if place else -1 if param.name == "embed" else shape.layers
            found.append(((layer, order, place), _Tensor(name, param, place, kind)))
    return (tensor for _, tensor in sorted(found, key=lambda pair: pair[0]))


def _write(path: Path | None, tensors: list[_Tensor], tree: Tree) -> None:
    """One safetensors file: the length of the header, the header, then the tensors one after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        rows, *columns = tensor.param.hf_dims
        begin, at = at, at + tensor.bytes
        if tensor.param.rows:  # it shares a tensor with those beside it, whose rows lie one after the other
            rows = tensor.param.rows[1]
            begin -= tensor.bytes // tensor.param.hf_dims[0] * tensor.param.rows[0]
        span = [begin, at]
        header[tensor.name] = {"dtype": _CODES[tensor.dtype.name], "shape": [rows, *columns], "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    if path is None:
        for tensor in tensors:
            _fetch(tensor, tree)
        return
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            _append(file, _fetch(tensor, tree))
        file.flush()
        os.fsync(file.fileno())


def _append(file: BinaryIO, array: npt.NDArray[np.generic]) -> None:
    file.write(np.ascontiguousarray(array).view(np.uint8).data)


def _fetch(tensor: _Tensor, tree: Tree) -> npt.NDArray[np.generic]:
    """One tensor on this host, as Hugging Face stores it."""
    array = _leaf(tree, tensor.param)
    if array.is_fully_addressable:
        host = np.asarray(array[tensor.place])
    else:  # the place is an argument of the program, so that one program fetches all the tensors of a parameter
        whole = NamedSharding(array.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined, no-untyped-call]
        host = np.asarray(_picker(whole)(array, tensor.place).addressable_data(0))
    flat = host.astype(tensor.dtype, copy=False)
    if not tensor.param.inputs:
        return flat.reshape(tensor.param.hf_dims)
    outputs, inputs = tensor.param.hf_dims
    return flat.reshape(inputs, outputs).T


@cache
def _picker(where: NamedSharding) -> Callable[[jax.Array, tuple[int, ...]], jax.Array]:
    """A program that lays the tensor at (layer, expert) out like `where`; layers first, as no device lacks one."""
    return jax.jit(lambda array, place: reduce(operator.getitem, place, array), out_shardings=where)


def _finish(
    draft: Path,
    folder: Path,
    files: dict[str, list[_Tensor]],
    config: dict[str, object],
    source: Path | None,
    template: str | None,
) -> None:
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if len(files) > 1:
        total = sum(tensor.bytes for tensors in files.values() for tensor in tensors)
        places = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (draft / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    if source is not None:
        for pattern in _TOKENIZER_FILES:
            for file in source.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, draft / file.name)
    if template is not None:
        (draft / "chat_template.jinja").write_text(template)
    if folder.exists():
        folder.rmdir()  # empty, or save_weights would have refused
    draft.rename(folder)
