"""Read Hugging Face safetensors into sharded jax arrays, holding one piece of one array at a time.

1. `Checkpoint` opens the files of a directory (one, or many with an index) without reading any tensor, and holds the
   names, shapes and dtypes against the parameter table: what is missing, left over or misshaped is named at once.
2. For each parameter and each device of this host, `Checkpoint.read` copies just the rows and columns that the device
   holds, layer after layer, out of the memory-mapped files.
3. The piece goes to the device (and to every other device of this host that holds the same piece) and is let go, before
   the next one is read.

So a host needs memory for one device's piece of one stacked parameter, beside what the devices hold. Writing is in
`export.py`.
"""

import itertools
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from podway.errors import UserError
from podway.model.decoder import Tree
from podway.model.hf import read_config
from podway.model.layout import TRAIN_RULES, Rules
from podway.model.mesh import named_sharding
from podway.model.params import Param, nest, params
from podway.model.quantized_tensors import Float8, Tensor, dequantized
from podway.model.shape import ModelShape

HostArray = npt.NDArray[np.generic]
Block = tuple[slice, ...]  # the part of an array that a device holds

# Where the decoder lies inside a checkpoint: alone, or as the language model of a multimodal one (two generations of
# names), or saved without its head.
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
# Tensors beside the decoder's that change nothing for text: rope tables of old files, and the vision side of Gemma 3.
_BESIDE = ("rotary_emb.inv_freq", "vision_tower.", "multi_modal_projector.")
_FLOATS = ("F32", "BF16", "F16")
_READERS = 8  # threads that copy layers out of the files; copying releases the interpreter


def load_weights(
    folder: Path,
    shape: ModelShape,
    *,
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules = TRAIN_RULES,
    dtype: DTypeLike | None = None,
) -> Tree:
    """The parameters in `folder`, laid out over `mesh` (default: one device), in `dtype` (default: as stored)."""
    checkpoint = Checkpoint(folder, shape)
    leaves = {}
    with ThreadPoolExecutor(_READERS) as pool:
        for param in params(shape):
            where: Sharding = SingleDeviceSharding(jax.local_devices()[0])
            if mesh is not None:
                where = named_sharding(mesh, param.axes, param.dims, rules)
            leaves[param.name] = _place(checkpoint, param, where, dtype, pool)
    return nest(leaves)


def _place(
    checkpoint: "Checkpoint", param: Param, where: Sharding, dtype: DTypeLike | None, pool: ThreadPoolExecutor
) -> jax.Array:
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, block in where.addressable_devices_indices_map(param.dims).items():
        assert block is not None
        bounds = tuple(part.indices(dim)[:2] for part, dim in zip(block, param.dims, strict=True))
        holders.setdefault(bounds, []).append(device)
    pieces = []
    for bounds, devices in holders.items():
        piece = checkpoint.read(param, tuple(slice(*b) for b in bounds), dtype, pool)
        pieces += [jax.device_put(piece, device).block_until_ready() for device in devices]
    return jax.make_array_from_single_device_arrays(param.dims, where, pieces)


class Checkpoint:
    """The tensors of one directory, checked against a shape and not yet read."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self.folder = folder
        self.files = {name: _open(folder / name) for name in _file_names(folder)}
        stored = {
            name: _stored(folder / place, file, name)
            for place, file in self.files.items()
            for name in file.keys()  # noqa: SIM118 (no mapping)
        }
        config = read_config(folder) if (folder / "config.json").exists() else {}
        self.tensors = dequantized(stored, config)
        self.prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in self.tensors), _PREFIXES[0])
        self._check(shape)

    def hf_name(self, param: Param, **places: int) -> str:
        name = param.hf.format(**places)
        if name.startswith("model."):
            return self.prefix + name.removeprefix("model.")
        return self.prefix.removesuffix("model.") + name if self.prefix == "language_model.model." else name

    def read(self, param: Param, block: Block, dtype: DTypeLike | None, pool: ThreadPoolExecutor) -> HostArray:
        """The part of a parameter inside `block`, from all the tensors it is stacked of."""
        stack, inner = block[: param.stacked], block[param.stacked :]
        lengths = [part.stop - part.start for part in block]
        places = list(itertools.product(*(range(part.start, part.stop) for part in stack)))
        names = [self.hf_name(param, **dict(zip(("layer", "expert"), place, strict=False))) for place in places]
        kind = np.dtype(dtype) if dtype is not None else _numpy_dtype(self.tensors[names[0]])
        whole = np.empty((len(names), *lengths[param.stacked :]), kind)

        def copy(i: int) -> None:
            tensor = self.tensors[names[i]]
            whole[i] = _cut(tensor if param.rows is None else _Rows(tensor, param.rows[0]), param, inner)

        list(pool.map(copy, range(len(names))))
        return whole.reshape(lengths)

    def _check(self, shape: ModelShape) -> None:
        wanted = {}
        for param in params(shape):
            counts = [range(dim) for dim in param.dims[: param.stacked]]
            for place in itertools.product(*counts):
                name = self.hf_name(param, **dict(zip(("layer", "expert"), place, strict=False)))
                outputs, *inputs = param.hf_dims
                wanted[name] = (param.rows[1] if param.rows else outputs, *inputs)
        _refuse(
            self.folder, "lacks", wanted.keys() - self.tensors.keys(), "is it the model that its config.json names?"
        )
        # A tied model has no head of its own; some files hold a copy of the embedding under that name.
        beside = {n for n in self.tensors if n.endswith("lm_head.weight") or any(part in n for part in _BESIDE)}
        unknown = self.tensors.keys() - wanted.keys() - beside
        _refuse(self.folder, "has unknown", unknown, "its config.json describes another model")
        for name, dims in wanted.items():
            tensor = self.tensors[name]
            if tuple(tensor.get_shape()) != dims:
                raise UserError(
                    f"{self.folder}: {name} is {tuple(tensor.get_shape())}, and config.json makes it {dims}",
                    "the weights and the config.json are of different models",
                )
            if tensor.get_dtype() not in _FLOATS:
                raise UserError(
                    f"{self.folder}: {name} is stored as {tensor.get_dtype()}",
                    "it is quantized in a way that its config.json does not say: take the bfloat16 one",
                )


class _Rows:
    """The rows of a tensor from one on."""

    def __init__(self, tensor: Tensor, begin: int) -> None:
        self._tensor, self._begin = tensor, begin

    def __getitem__(self, part: tuple[slice, ...]) -> HostArray:
        rows = slice(part[0].start + self._begin, part[0].stop + self._begin)
        found: HostArray = self._tensor[(rows, *part[1:])]
        return found


def _refuse(folder: Path, verb: str, names: Iterable[str], hint: str) -> None:
    some = sorted(names)
    if some:
        more = f" and {len(some) - 4} more" if len(some) > 4 else ""
        raise UserError(f"{folder} {verb} {', '.join(some[:4])}{more}", hint)


def _file_names(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            raise UserError(f"{index} is not an index of safetensors files", "download it again") from None
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise UserError(f"{index} names files outside its directory", "download it again")
        return names
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"]
    old = "; convert its .bin files to safetensors first" if any(folder.glob("*.bin")) else ""
    raise UserError(f"no weights in {folder}", f"it must hold model.safetensors or an index of several files{old}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except FileNotFoundError:
        raise UserError(f"{path} is missing", "the index names it: download it again") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}", "download it again") from None


def _stored(path: Path, file: Any, name: str) -> Tensor:
    tensor: Tensor = file.get_slice(name)
    return Float8(path, name) if tensor.get_dtype() == "F8_E4M3" else tensor


def _numpy_dtype(tensor: Tensor) -> np.dtype[np.generic]:
    kind = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[tensor.get_dtype()]
    return np.dtype(jax.numpy.dtype(kind))


def _cut(tensor: "Tensor | _Rows", param: Param, inner: Block) -> HostArray:
    """The part `inner` of one Hugging Face tensor, with the dimensions that the table gives it.

    The file has each group of dimensions (inputs, outputs) flattened to one, outputs first. Cutting the first dimension
    of a group is a range of that one; the others are cut after it is folded out again.
    """
    dims, split = param.dims[param.stacked :], param.inputs
    if not split and param.hf_dims == dims:
        return np.asarray(tensor[inner])
    groups = [(dims[:split], inner[:split])] if split else []
    groups.append((dims[split:], inner[split:]))
    ranges = [slice(b[0].start * prod(d[1:]), b[0].stop * prod(d[1:])) for d, b in groups]
    part = np.asarray(tensor[tuple(reversed(ranges))])
    part = _transposed(part) if split else part
    folded = part.reshape([size for d, b in groups for size in (b[0].stop - b[0].start, *d[1:])])
    return folded[tuple(cut for _, b in groups for cut in (slice(None), *b[1:]))]


def _transposed(matrix: HostArray) -> HostArray:
    """The transpose, in rows: block by block, which stays in the cache and is three times as fast as in one go."""
    rows, columns = matrix.shape
    step = 512
    out = np.empty((columns, rows), matrix.dtype)
    for i in range(0, rows, step):
        for j in range(0, columns, step):
            out[j : j + step, i : i + step] = matrix[i : i + step, j : j + step].T
    return out
