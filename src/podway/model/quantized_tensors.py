"""Tensors of quantized checkpoints, read as the numbers they stand for.

A matrix `X.weight` may be stored as bytes with scales (fp8, int8) or as several small integers in each 32-bit word (AWQ, GPTQ,
compressed-tensors). `dequantized` finds such matrices by what is stored beside them and answers, for each, an object that is cut
like a tensor of a file: only the words that a part needs are read. What belongs to a matrix and is not one is left out.

    method               stored as
    fp8                  X.weight F8 (out, in); X.weight_scale_inv for blocks, or X.weight_scale
    compressed-tensors   X.weight F8 or I8 with X.weight_scale; or X.weight_packed I32 (out, in / n), scales (out, groups)
    awq                  X.qweight I32 (in, out / 8), X.qzeros (groups, out / 8), X.scales (groups, out)
    gptq                 X.qweight I32 (in / n, out), X.qzeros (groups, out / n), X.scales (groups, out), X.g_idx (in)
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from podway.errors import UserError

Array = npt.NDArray[Any]
KNOWN = ("fp8", "compressed-tensors", "awq", "gptq")
_BYTES = ("F8_E4M3", "I8")
# Stored beside a quantized matrix: parts of it, or figures of activations that Podway does not quantize.
_BESIDE = (
    "weight_packed", "weight_shape", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx", "qweight", "qzeros",
    "scales", "g_idx", "input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale",
)  # fmt: skip
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which column the n-th four bits of a word hold


class Tensor(Protocol):
    """A tensor that is cut before it is read, as safetensors has them."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, part: Any) -> Array: ...


def dequantized(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, the quantized matrices among them as what they stand for."""
    method = _method(config)
    if method is None:
        return dict(tensors)
    quantized: dict[str, Tensor] = {}
    for name in tensors:
        base, _, last = name.rpartition(".")
        if last == "qweight":
            quantized[base] = _words(tensors, base, method, config)
        elif last == "weight_packed":
            quantized[base] = _Packed(tensors, base)
        elif last == "weight" and tensors[name].get_dtype() in _BYTES:
            quantized[base] = _Scaled(tensors, base)
    kept = {name: tensor for name, tensor in tensors.items() if not _belongs(name, quantized)}
    return kept | {f"{base}.weight": tensor for base, tensor in quantized.items()}


def _method(config: Mapping[str, Any]) -> str | None:
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        return None
    method = found.get("quant_method")
    if method not in KNOWN:
        raise UserError(
            f"config.json: models quantized by {method!r} are not read",
            f"known: {', '.join(KNOWN)}; or take the bfloat16 one",
        )
    return str(method)


def _belongs(name: str, quantized: Mapping[str, Tensor]) -> bool:
    base, _, last = name.rpartition(".")
    scale_of_cache = last in ("k_scale", "v_scale")
    return scale_of_cache or (base in quantized and last in (*_BESIDE, "weight"))


class _Scaled:
    """Bytes with a scale for the matrix, for each row, or for each block."""

    def __init__(self, tensors: Mapping[str, Tensor], base: str) -> None:
        self._weight = tensors[f"{base}.weight"]
        rows, columns = self._weight.get_shape()
        scale = tensors.get(f"{base}.weight_scale_inv") or tensors.get(f"{base}.weight_scale")
        if scale is None:
            raise UserError(
                f"{base}.weight has no scale beside it", "the checkpoint is not complete: download it again"
            )
        self._scale = _grid(scale)
        zero = tensors.get(f"{base}.weight_zero_point")
        self._zero = None if zero is None else _grid(zero)
        self._block = tuple(map(_block, (rows, columns), self._scale.shape))

    def get_shape(self) -> list[int]:
        return self._weight.get_shape()

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, part: tuple[slice, slice]) -> Array:
        values = np.asarray(self._weight[part]).astype(np.float32)
        rows, columns = (np.arange(cut.start, cut.stop) // size for cut, size in zip(part, self._block, strict=True))
        if self._zero is not None:
            values -= self._zero[np.ix_(rows, columns)]
        values *= self._scale[np.ix_(rows, columns)]
        return values


class _Packed:
    """compressed-tensors' words along the inputs; a scale, and perhaps a zero, for each row and group of inputs."""

    def __init__(self, tensors: Mapping[str, Tensor], base: str) -> None:
        self._words = tensors[f"{base}.weight_packed"]
        self._dims = [int(size) for size in tensors[f"{base}.weight_shape"][:]]
        self._bits = _bits(base, self._words.get_shape()[1], self._dims[1])
        self._scale = _grid(tensors[f"{base}.weight_scale"])
        zero = tensors.get(f"{base}.weight_zero_point")
        offset = 1 << (self._bits - 1)
        # Zeros are packed along the outputs.
        self._zero = None if zero is None else _unpack(np.asarray(zero[:]).T, self._bits).T[: self._dims[0]] - offset
        self._groups = _groups(tensors.get(f"{base}.weight_g_idx"), self._dims[1], self._scale.shape[1])

    def get_shape(self) -> list[int]:
        return self._dims

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, part: tuple[slice, slice]) -> Array:
        rows, columns = part
        values = _cut_words(self._words, rows, columns, self._bits, packed=1) - (1 << (self._bits - 1))
        groups = self._groups[columns]
        if self._zero is not None:
            values -= self._zero[rows][:, groups]
        return values * self._scale[rows][:, groups]


class _Words:
    """AWQ's and GPTQ's words: inputs by outputs, a scale and a zero for each group of inputs and each output."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        base: str,
        bits: int,
        *,
        packed: int,
        order: tuple[int, ...] | None,
        shift: int,
    ) -> None:
        self._words = tensors[f"{base}.qweight"]
        self._bits, self._packed, self._order = bits, packed, order
        dims = list(self._words.get_shape())
        dims[packed] *= 32 // bits
        self._dims = dims[::-1]  # outputs first, as matrices are stored
        self._scale = np.asarray(tensors[f"{base}.scales"][:]).astype(np.float32)
        zeros = np.asarray(tensors[f"{base}.qzeros"][:])
        self._zero = (_unpack(zeros, bits, order)[:, : self._dims[0]] + shift).astype(np.float32)
        self._groups = _groups(tensors.get(f"{base}.g_idx"), self._dims[1], self._scale.shape[0])

    def get_shape(self) -> list[int]:
        return self._dims

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, part: tuple[slice, slice]) -> Array:
        rows, columns = part
        values = _cut_words(self._words, columns, rows, self._bits, packed=self._packed, order=self._order)
        groups = self._groups[columns]
        values -= self._zero[groups][:, rows]
        values *= self._scale[groups][:, rows]
        return values.T


def _words(tensors: Mapping[str, Tensor], base: str, method: str, config: Mapping[str, Any]) -> _Words:
    said = config["quantization_config"]
    bits = said.get("bits", said.get("w_bit", 4))
    if bits not in (2, 4, 8) or (method == "awq" and bits != 4):
        raise UserError(f"config.json: {method} with {bits!r} bits is not read", "4 bits are (and 2 or 8 of GPTQ)")
    if method == "awq":
        if str(said.get("version", "gemm")).lower() != "gemm":
            raise UserError(
                f"config.json: AWQ's version {said['version']!r} is not read", "take a model of version gemm"
            )
        return _Words(tensors, base, bits, packed=1, order=_AWQ_ORDER, shift=0)
    # GPTQ's first format stores each zero less one.
    return _Words(
        tensors, base, bits, packed=0, order=None, shift=0 if said.get("checkpoint_format") == "gptq_v2" else 1
    )


def _bits(base: str, words: int, columns: int) -> int:
    bits = next((bits for bits in (2, 4, 8) if -(-columns * bits // 32) == words), None)
    if bits is None:
        raise UserError(f"{base}.weight_packed has {words} words for {columns} columns", "2, 4 and 8 bits are read")
    return bits


def _block(size: int, parts: int) -> int:
    """How many rows or columns share a scale: all, one, or a power of two (the last block may be cut)."""
    each = -(-size // parts)
    return each if parts in (1, size) else 1 << (each - 1).bit_length()


def _grid(tensor: Tensor) -> Array:
    """A scale with two dimensions, whatever it is stored with."""
    found = np.asarray(tensor[:] if tensor.get_shape() else tensor[...]).astype(np.float32)
    return found.reshape(found.shape + (1,) * (2 - found.ndim)) if found.ndim < 2 else found


def _groups(index: Tensor | None, inputs: int, groups: int) -> Array:
    """The group of each input: as the file says (GPTQ sorts them by importance), or one after the other."""
    return np.arange(inputs) // -(-inputs // groups) if index is None else np.asarray(index[:]).astype(np.int64)


def _cut_words(
    words: Tensor, rows: slice, columns: slice, bits: int, *, packed: int, order: tuple[int, ...] | None = None
) -> Array:
    """Rows and columns of a matrix whose dimension `packed` is stored several to a word, as float32."""
    cuts, each = [rows, columns], 32 // bits
    wanted = cuts[packed]
    first = wanted.start // each
    cuts[packed] = slice(first, -(-wanted.stop // each))
    found = np.asarray(words[tuple(cuts)])
    values = _unpack(found, bits, order) if packed == 1 else _unpack(found.T, bits, order).T
    inner = slice(wanted.start - first * each, wanted.stop - first * each)
    return (values[:, inner] if packed == 1 else values[inner]).astype(np.float32)


def _unpack(words: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Words (rows, n) to the integers in them (rows, n * 32 / bits), lowest bits first unless `order` says where each belongs."""
    each = 32 // bits
    shifts = np.arange(each, dtype=np.uint32) * bits
    values = (words.astype(np.int32).view(np.uint32)[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
    if order is not None:
        values = values[:, :, np.argsort(order)]
    return values.reshape(len(words), -1).astype(np.int32)


@functools.lru_cache(maxsize=256)
def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where a file's data starts, and what it says of each tensor."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))


class Float8:
    """A tensor of eight-bit floats, which safetensors cannot cut for numpy: read from where it lies in the file."""

    def __init__(self, path: Path, name: str) -> None:
        start, header = _header(path)
        begin, end = header[name]["data_offsets"]
        self._dims = header[name]["shape"]
        raw = np.memmap(path, np.uint8, "r", start + begin, (end - begin,)) if end > begin else np.zeros(0, np.uint8)
        self._values = raw.view(ml_dtypes.float8_e4m3fn).reshape(self._dims)

    def get_shape(self) -> list[int]:
        return list(self._dims)

    def get_dtype(self) -> str:
        return "F8_E4M3"

    def __getitem__(self, part: Any) -> Array:
        found: Array = self._values[part]
        return found
