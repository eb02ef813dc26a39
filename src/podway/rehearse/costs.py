"""What one instruction of a compiled program does: FLOPs of its products, and bytes that it moves through HBM.

1. TPU programs hold products as `convolution`s. `product_flops` counts the pairs that are really multiplied: where a
   batched product is written as a convolution over padded positions, padding counts nothing.
2. `hbm_bytes` counts operands and results that lie in HBM (memory space 0), with the padding of their tiles. An operand
   that is only sliced counts as its slices, and a stack that is updated in place as the update; so a loop over layers
   moves each layer once and not the stack of all layers.
3. A fusion that carries a piece of an asynchronous collective passes the gathered array through: only what its own
   product reads and writes is counted.
"""

import re
from functools import lru_cache
from math import prod

from podway.rehearse.hlo import Computation, Instruction, Module, Shape
from podway.rehearse.program import ProductDtype

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all",
    "copy-done", "opt-barrier", "optimization-barrier", "add-dependency",
}  # fmt: skip
_BYTES: dict[str, ProductDtype] = {
    "s8": "int8",
    "u8": "int8",
    "f8e4m3fn": "fp8",
    "f8e5m2": "fp8",
    "f8e4m3b11fnuz": "fp8",
}
_THROUGH = {"bitcast", "reshape", "get-tuple-element", "copy", "opt-barrier"}


def flops_of(module: Module, here: Computation, one: Instruction) -> float:
    """FLOPs of the products in an instruction, those of the computations it calls included."""
    if one.opcode in ("convolution", "dot"):
        return product_flops(one, here)
    if one.opcode in ("fusion", "call"):
        inner = module.called(one) or module.called(one, "to_apply")
        return sum(flops_of(module, inner, part) for part in inner) if inner else 0.0
    return 0.0


def product_dtype(module: Module, here: Computation, one: Instruction) -> ProductDtype:
    """What the products in an instruction multiply, where that is less than bfloat16."""
    if one.opcode in ("convolution", "dot"):
        kinds = {_BYTES.get(here[name].shapes[0].dtype, "") for name in one.operands[:2]}
        return kinds.pop() if len(kinds) == 1 else ""
    inner = (module.called(one) or module.called(one, "to_apply")) if one.opcode in ("fusion", "call") else None
    if inner is None:
        return ""
    return next((kind for part in inner if (kind := product_dtype(module, inner, part))), "")


def product_flops(one: Instruction, here: Computation) -> float:
    """2 for each pair of numbers that is multiplied and added."""
    left, right = (here[name].shapes[0] for name in one.operands[:2])
    if one.opcode == "dot":
        inner = _numbers(one.text, "lhs_contracting_dims")
        return 2.0 * one.shapes[0].elements * prod(left.dims[d] for d in inner)
    return _convolution_flops(one, left, right)


def _convolution_flops(one: Instruction, left: Shape, right: Shape) -> float:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.text)
    if labels is None:
        return 0.0
    into, kernel, out = labels[1], labels[2], labels[3]
    found = re.search(r"batch_group_count=(\d+)", one.text)
    groups = int(found[1]) if found else 1
    result = one.shapes[0]
    total = 2.0 * result.dims[out.index("b")] * result.dims[out.index("f")] * right.dims[kernel.index("i")]
    if groups > 1:
        total = total * left.dims[into.index("b")] / groups / result.dims[out.index("b")]
    window = _window(one.text)
    for axis in sorted(set(into) - {"b", "f"}):
        at = int(axis)
        total *= _pairs(
            left.dims[into.index(axis)], right.dims[kernel.index(axis)], result.dims[out.index(axis)],
            window.get("stride", {}).get(at, 1), window.get("pad", {}).get(at, 0),
            window.get("lhs_dilate", {}).get(at, 1), window.get("rhs_dilate", {}).get(at, 1),
        )  # fmt: skip
    return total


def _window(text: str) -> dict[str, dict[int, int]]:
    """`window={size=1x4 pad=0_0x3_3 rhs_reversal=…}` -> {"pad": {0: 0, 1: 3}, …}; of pad only what stands before."""
    found = re.search(r"window=\{([^}]*)\}", text)
    parts: dict[str, dict[int, int]] = {}
    for key, sizes in re.findall(r"(\w+)=([0-9_x\-]+)", found[1] if found else ""):
        parts[key] = {at: int(size.split("_")[0]) for at, size in enumerate(sizes.split("x"))}
    return parts


@lru_cache(maxsize=4096)
def _pairs(size: int, kernel: int, out: int, stride: int, pad: int, dilated: int, spread: int) -> int:
    """How many (result, kernel) positions along one axis meet a real element of the input."""
    if kernel == 1 and pad == 0 and dilated == 1:
        return min(out, -(-size // stride))
    reach = (size - 1) * dilated + 1
    if dilated == 1 and stride == 1 and spread == 1:
        return sum(max(0, min(reach, at - pad + kernel) - max(0, at - pad)) for at in range(out))
    return sum(
        1
        for at in range(out)
        for k in range(kernel)
        if 0 <= (place := at * stride + k * spread - pad) < reach and place % dilated == 0
    )


def _numbers(text: str, key: str) -> list[int]:
    found = re.search(rf"{key}=\{{([0-9,]*)\}}", text)
    return [int(d) for d in found[1].split(",") if d] if found else []


def hbm_bytes(module: Module, here: Computation, one: Instruction) -> float:
    """Bytes between the chip and HBM."""
    if one.opcode in FREE:
        return 0.0
    if one.opcode == "copy-start":
        return float(sum(shape.bytes for shape in one.shapes[:2] if shape.space == 0))
    if one.opcode == "async-start":
        return _slice_bytes(one)
    inner = module.called(one) if one.opcode == "fusion" else None
    if inner is None:
        return _plain_bytes(here, one)
    passing = _passing(inner)
    total = 0.0
    for number, name in enumerate(one.operands):
        parameter = inner.parameters.get(number)
        outer = here.get(name)
        if parameter is None or outer is None or parameter.name in passing or _in_chip(parameter):
            continue
        total += _read(module, inner, parameter)
    root = inner.root
    for name in root.operands if root.opcode == "tuple" else (root.name,):
        if name not in passing and inner[name].opcode != "parameter":
            total += _written(module, inner, inner[name])
    return total


def _slice_bytes(one: Instruction) -> float:
    """Of a slice that is fetched beside other work: a start names the whole array it takes, the piece it makes, and a flag."""
    arrays = [shape for shape in one.shapes if shape.dims]
    if not arrays:
        return 0.0
    piece = min(arrays, key=lambda shape: shape.bytes)
    return float(piece.bytes * sum(shape.space == 0 for shape in (arrays[0], arrays[-1])))


def _in_chip(one: Instruction) -> bool:
    return bool(one.shapes) and one.shapes[0].space != 0


def _plain_bytes(here: Computation, one: Instruction) -> float:
    written = sum(shape.bytes for shape in one.shapes if shape.space == 0)
    if one.opcode == "dynamic-update-slice":
        update = here.get(one.operands[1])
        return 2.0 * update.shapes[0].bytes if update and one.shapes[0].space == 0 else 0.0
    if one.opcode in ("dynamic-slice", "slice", "gather", "broadcast", "iota"):
        return float(written) * (1 if one.opcode in ("broadcast", "iota") else 2)
    operands = (here.get(name) for name in dict.fromkeys(one.operands))
    read = sum(shape.bytes for o in operands if o is not None for shape in o.shapes if shape.space == 0)
    return float(written + read)


def _passing(inner: Computation) -> set[str]:
    """Values of a fusion that belong to an asynchronous collective, not to what the fusion computes."""
    carriers = [i for i in inner if i.opcode in COLLECTIVES or i.target.startswith("AsyncCollective")]
    names = {i.name for i in carriers}
    for one in carriers:
        names |= {name for name in one.operands if inner[name].opcode == "parameter"}
    if not carriers:
        return names
    # The buffer that a gather fills is handed on from parameter to result and read by nothing.
    for parameter in inner.parameters.values():
        users = inner.users.get(parameter.name, [])
        if all(user.opcode == "tuple" or user.name in names for user in users):
            names.add(parameter.name)
    return names


def _read(module: Module, inner: Computation, value: Instruction) -> float:
    """Bytes that a fusion reads of one of its parameters."""
    whole = float(sum(shape.bytes for shape in value.shapes))
    total = 0.0
    for user in inner.users.get(value.name, []):
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            total += user.shapes[0].bytes if user.operands[0] == value.name else whole
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            total += 0.0
        elif user.opcode in _THROUGH:
            total += _read(module, inner, user)
        elif user.opcode == "fusion" and (deeper := module.called(user)) is not None:
            places = [n for n, name in enumerate(user.operands) if name == value.name]
            total += sum(_read(module, deeper, deeper.parameters[n]) for n in places if n in deeper.parameters)
        elif user.opcode != "tuple":
            return whole
    return min(total, whole)


def _written(module: Module, inner: Computation, value: Instruction) -> float:
    """Bytes that a fusion writes of one of its results."""
    if _in_chip(value):
        return 0.0
    one = value
    while one.opcode in _THROUGH and one.operands and one.operands[0] in inner.instructions:
        one = inner[one.operands[0]]
    if one.opcode == "dynamic-update-slice":
        update = inner.get(one.operands[1])
        return float(update.shapes[0].bytes) if update else 0.0
    if one.opcode == "fusion" and (deeper := module.called(one)) is not None and deeper.root.opcode != "tuple":
        return _written(module, deeper, deeper.root)
    return float(sum(shape.bytes for shape in value.shapes if shape.space == 0))
