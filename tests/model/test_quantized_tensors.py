"""Quantized checkpoints read as what they stand for: each format is packed here as its documentation says, word by word."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from podway.errors import UserError
from podway.model.families import find_model
from podway.model.quantized_tensors import Float8, dequantized
from podway.model.weights import load_weights

Array = npt.NDArray[Any]
Stored = dict[str, Array]
FIXTURE = Path(__file__).parent / "fixtures" / "llama3"


class InMemory:
    """An array that is cut like a tensor of a file."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def get_shape(self) -> list[int]:
        return list(self.array.shape)

    def get_dtype(self) -> str:
        names = {"float8_e4m3fn": "F8_E4M3", "int8": "I8", "int32": "I32", "float16": "F16", "int64": "I64"}
        return names.get(self.array.dtype.name, "F32")

    def __getitem__(self, part: Any) -> Array:
        found: Array = self.array[part]
        return found


def words(values: Array, bits: int, order: list[int] | None = None) -> Array:
    """Integers (rows, n) to words (rows, n * bits / 32): the k-th bits of a word are of column `order[k]` of its eight."""
    each = 32 // bits
    out = np.zeros((len(values), values.shape[1] // each), np.uint32)
    for row in range(len(values)):
        for word in range(out.shape[1]):
            for place in range(each):
                column = word * each + (order[place] if order else place)
                out[row, word] |= np.uint32(int(values[row, column]) << (bits * place))
    return out.view(np.int32)


def awq(matrix: Array, group: int) -> tuple[Stored, Array]:
    rng = np.random.default_rng(1)
    outputs, inputs = matrix.shape
    quantized = rng.integers(0, 16, (inputs, outputs))
    zeros, scales = rng.integers(0, 16, (inputs // group, outputs)), np.abs(rng.normal(size=(inputs // group, outputs)))
    scales = scales.astype(np.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    stored = {"qweight": words(quantized, 4, order), "qzeros": words(zeros, 4, order), "scales": scales}
    of = np.arange(inputs) // group
    return stored, ((quantized - zeros[of]) * scales[of].astype(np.float32)).T


def gptq(matrix: Array, group: int, *, bits: int = 4, shift: int = 1, sort: bool = False) -> tuple[Stored, Array]:
    rng = np.random.default_rng(2)
    outputs, inputs = matrix.shape
    quantized = rng.integers(0, 1 << bits, (inputs, outputs))
    zeros = rng.integers(1, 1 << bits, (inputs // group, outputs))
    scales = np.abs(rng.normal(size=zeros.shape)).astype(np.float16)
    of = rng.permutation(np.arange(inputs) // group) if sort else np.arange(inputs) // group
    stored = {"qweight": words(quantized.T, bits).T.copy(), "qzeros": words(zeros - shift, bits), "scales": scales}
    stored["g_idx"] = of.astype(np.int32)
    return stored, ((quantized - zeros[of]) * scales[of].astype(np.float32)).T


def packed(matrix: Array, group: int, *, bits: int = 4, zeros: bool = False) -> tuple[Stored, Array]:
    rng = np.random.default_rng(3)
    outputs, inputs = matrix.shape
    half = 1 << (bits - 1)
    quantized = rng.integers(-half, half, matrix.shape)
    scales = np.abs(rng.normal(size=(outputs, inputs // group))).astype(np.float32)
    zero = rng.integers(-half, half, scales.shape) if zeros else np.zeros(scales.shape, int)
    stored = {
        "weight_packed": words(quantized + half, bits),
        "weight_shape": np.array(matrix.shape),
        "weight_scale": scales,
    }
    if zeros:
        stored["weight_zero_point"] = words((zero + half).T, bits).T.copy()
    of = np.arange(inputs) // group
    return stored, (quantized - zero[:, of]) * scales[:, of]


def blocks(matrix: Array, block: int) -> tuple[Stored, Array]:
    weight = np.clip(matrix * 20, -400, 400).astype(ml_dtypes.float8_e4m3fn)
    rows, columns = (-(-size // block) for size in matrix.shape)
    scale = np.abs(np.random.default_rng(4).normal(size=(rows, columns))).astype(np.float32)
    whole = np.repeat(np.repeat(scale, block, 0), block, 1)[: matrix.shape[0], : matrix.shape[1]]
    return {"weight": weight, "weight_scale_inv": scale}, weight.astype(np.float32) * whole


def by_row(matrix: Array, kind: type) -> tuple[Stored, Array]:
    weight = np.clip(matrix * 20, -100, 100).astype(kind)
    scale = np.abs(np.random.default_rng(5).normal(size=(len(matrix), 1))).astype(np.float32)
    return {"weight": weight, "weight_scale": scale}, weight.astype(np.float32) * scale


def whole(matrix: Array, kind: type) -> tuple[Stored, Array]:
    stored, _ = by_row(matrix, kind)
    scale = np.float32(0.03)
    return {**stored, "weight_scale": np.array(scale)}, stored["weight"].astype(np.float32) * scale


FORMATS: dict[str, tuple[dict[str, Any], Callable[[Array], tuple[Stored, Array]]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "version": "GEMM"}, lambda m: awq(m, 8)),
    "gptq": ({"quant_method": "gptq", "bits": 4}, lambda m: gptq(m, 8)),
    "gptq-8": ({"quant_method": "gptq", "bits": 8}, lambda m: gptq(m, 16, bits=8)),
    "gptq-sorted": ({"quant_method": "gptq", "bits": 4}, lambda m: gptq(m, 8, sort=True)),
    "gptq-v2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, lambda m: gptq(m, 8, shift=0)),
    "packed": ({"quant_method": "compressed-tensors"}, lambda m: packed(m, 8)),
    "packed-8": ({"quant_method": "compressed-tensors"}, lambda m: packed(m, 16, bits=8)),
    "packed-zeros": ({"quant_method": "compressed-tensors"}, lambda m: packed(m, 8, zeros=True)),
    "int8": ({"quant_method": "compressed-tensors"}, lambda m: by_row(m, np.int8)),
    "float8": ({"quant_method": "compressed-tensors"}, lambda m: by_row(m, ml_dtypes.float8_e4m3fn)),
    "float8-whole": ({"quant_method": "fp8"}, lambda m: whole(m, ml_dtypes.float8_e4m3fn)),
    "float8-blocks": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, lambda m: blocks(m, 16)),
}


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_part_is_that_part_of_the_whole(name: str, data: st.DataObject) -> None:
    said, pack = FORMATS[name]
    matrix = np.random.default_rng(0).normal(size=(40, 48))
    stored, expected = pack(matrix)
    tensors = {f"layer.{key}": InMemory(array) for key, array in stored.items()}
    found = dequantized({**tensors, "norm.weight": InMemory(np.ones(4, np.float32))}, {"quantization_config": said})
    assert set(found) == {"layer.weight", "norm.weight"}
    assert list(found["layer.weight"].get_shape()) == [40, 48]
    cuts = []
    for size in matrix.shape:
        start = data.draw(st.integers(0, size - 1))
        cuts.append(slice(start, data.draw(st.integers(start + 1, size))))
    np.testing.assert_allclose(found["layer.weight"][tuple(cuts)], expected[tuple(cuts)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_loads_with_the_numbers_that_its_words_stand_for(name: str, tmp_path: Path) -> None:
    said, pack = FORMATS[name]
    plain, expected, quantized = load_file(FIXTURE / "model.safetensors"), {}, {}
    for key, array in plain.items():
        if array.ndim != 2 or "embed" in key or "lm_head" in key:
            expected[key] = quantized[key] = array
            continue
        stored, meant = pack(array.astype(np.float32))
        expected[key] = np.ascontiguousarray(meant, np.float32)
        quantized |= {key.removesuffix("weight") + part: np.ascontiguousarray(each) for part, each in stored.items()}
    quantized["model.layers.0.self_attn.k_proj.input_scale"] = np.ones(1, np.float32)  # of activations: not used
    quantized["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)
    config = json.loads((FIXTURE / "config.json").read_text())
    for folder, tensors, keys in (("q", quantized, {"quantization_config": said}), ("p", expected, {})):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **keys}))
    shape = find_model(str(tmp_path / "q"))
    found, wanted = (load_weights(tmp_path / folder, shape, dtype=np.float32) for folder in ("q", "p"))
    for part in wanted["layers"]:
        np.testing.assert_allclose(found["layers"][part], wanted["layers"][part], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("said", "words_of_the_error"),
    [
        ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes' are not read"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits is not read"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ's version 'gemv' is not read"),
    ],
)
def test_what_is_not_read_is_said(said: dict[str, Any], words_of_the_error: str) -> None:
    tensors = {f"layer.{key}": InMemory(array) for key, array in awq(np.zeros((40, 48)), 8)[0].items()}
    with pytest.raises(UserError, match=words_of_the_error):
        dequantized(tensors, {"quantization_config": said})


def test_eight_bit_floats_are_read_from_where_they_lie(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.float8_e4m3fn)
    save_file({"a": np.ones(3, np.float32), "b": array}, tmp_path / "x.safetensors")
    np.testing.assert_array_equal(Float8(tmp_path / "x.safetensors", "b")[1:3, 0:2], array[1:3, 0:2])
