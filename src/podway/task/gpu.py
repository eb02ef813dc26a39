"""dstack's `gpu` grammar, answered with TPU slices.

`gpu` is tokens split by `:` in any order: a vendor (`google`, `tpu`), names (`v5litepod-4,v5litepod-8`), memory
(`16GB..`), a count (`1`, `1..2`); or a mapping with these as keys; or a list of either. To dstack a slice is *one*
accelerator with the HBM of all its chips, and so it is here: memory is compared with the whole slice, and a count must
allow 1.
"""

from typing import Any

import msgspec

from podway.catalog.names import looks_like_tpu
from podway.catalog.slices import Slice, all_slices, find_slice, is_tpu_name
from podway.errors import UserError
from podway.task.fields import Field, GpuFile, NotHere
from podway.task.values import Range, count_range, memory_range

_VENDORS = {
    "google": "google",
    "tpu": "google",
    **{name: name for name in ("nvidia", "amd", "intel", "tt", "tenstorrent")},
}


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One gpu request: what is None was not said."""

    vendor: str | None = None
    names: tuple[str, ...] = ()
    memory: Range | None = None
    count: Range | None = None


def slices_for(field: Field, notes: list[str]) -> list[str] | None:
    """The slices that satisfy a gpu request, by name; None when it asks for no accelerator."""
    specs = [(one, read_gpu(one)) for one in (field.items() if field.is_list else [field])]
    if not specs:
        raise field.error("no accelerator is named", "name a slice such as v5litepod-8, or remove the key")
    found: list[str] = []
    refused: list[NotHere] = []
    for one, spec in specs:
        if _asks_for_none(spec):
            return None
        try:
            found += [name for name in _matching(one, spec, refused) if name not in found]
        except NotHere as error:
            refused.append(error)
    if not found:
        raise refused[0]
    notes += [error.note for error in refused]
    return found


def read_gpu(field: Field) -> GpuSpec:
    return _from_mapping(field) if field.is_mapping else _from_text(field)


def _from_text(field: Field) -> GpuSpec:
    text = field.text().replace(" ", "")
    parts: dict[str, Any] = {}
    value: Any
    for token in text.split(":"):
        if not token:
            raise field.error(f"{field.found} has an empty part", "write names, memory and count with `:` between")
        if token.lower() in _VENDORS:
            kind, value = "vendor", _VENDORS[token.lower()]
        elif token[0].isalpha():
            kind, value = "names", tuple(token.split(","))
            if not all(value):
                raise field.error(
                    f"{field.found} has an empty name", "write names with `,` between: v5litepod-4,v5litepod-8"
                )
        elif any(letter.isalpha() for letter in token):
            kind, value = "memory", memory_range(field.part(token))
        else:
            kind, value = "count", count_range(field.part(token))
        if kind in parts:
            raise field.error(f"{field.found} gives {kind} twice", "keep one of them")
        parts[kind] = value
    return GpuSpec(**parts)


def _from_mapping(field: Field) -> GpuSpec:
    vendor, name, capability = field.get("vendor"), field.get("name"), field.get("compute_capability")
    if capability:
        raise GpuFile(capability, "compute_capability is a property of NVIDIA GPUs")
    if vendor and vendor.text().lower() not in _VENDORS:
        raise vendor.error(f"{vendor.found} is not a vendor", "write google or tpu")
    memory, total, count = field.get("memory"), field.get("total_memory"), field.get("count")
    if memory and total:
        raise total.error("memory is given too, and a slice is one accelerator", "keep one of them")
    each = name.items() if name and name.is_list else [name] if name else []
    amount = memory or total
    return GpuSpec(
        vendor=_VENDORS[vendor.text().lower()] if vendor else None,
        names=tuple(word for one in each for word in one.words().split(",")),
        memory=memory_range(amount) if amount else None,
        count=count_range(count) if count else None,
    )


def _asks_for_none(spec: GpuSpec) -> bool:
    says_what = spec.vendor or spec.names or spec.memory
    return spec.count is not None and (spec.count.high == 0 or (spec.count.low == 0 and not says_what))


def _matching(field: Field, spec: GpuSpec, refused: list[NotHere]) -> list[str]:
    if spec.vendor not in (None, "google"):
        raise GpuFile(field, f"{spec.vendor} makes no TPUs, and Podway runs TPUs only")
    if not (spec.vendor or spec.names):
        by = "by memory" if spec.memory else "by number"
        raise GpuFile(field, f"{field.found} asks for GPUs {by}, and Podway runs TPUs only")
    if spec.names:
        named = [(name, _named(field, name, refused)) for name in spec.names]
        if any(found for _, found in named):
            _check_count(field, spec)
        fitting = [name for name, found in named if found and _fits(found, spec.memory)]
        if not fitting and any(found for _, found in named):
            raise field.error(
                f"none of {', '.join(spec.names)} has {spec.memory}GB of HBM", "change the memory or the name"
            )
        return fitting
    _check_count(field, spec)
    types = dict.fromkeys(one.accelerator_type for one in all_slices() if _fits(one, spec.memory))
    if not types:
        raise field.error(f"no slice has {spec.memory}GB of HBM", "`podway tpus` lists the slices with their memory")
    return list(types)


def _check_count(field: Field, spec: GpuSpec) -> None:
    if spec.count and not spec.count.holds(1):
        raise field.error(
            f"a count of {spec.count} is not possible: a slice is one accelerator",
            "remove the count; for several slices of a task set `nodes`",
        )


def _named(field: Field, name: str, refused: list[NotHere]) -> Slice | None:
    try:
        return find_slice(name)
    except UserError as error:
        what = error.what.rstrip(".")
        if is_tpu_name(name):
            raise field.error(what, error.hint) from None
        refused.append(NotHere(field, what, error.hint) if looks_like_tpu(name) else GpuFile(field, what))
        return None


def _fits(found: Slice, memory: Range | None) -> bool:
    return memory is None or memory.holds(found.hbm_bytes / 2**30)
