"""The names people give to TPU slices, read into a generation and a size or a topology.

A name is `[tpu-]GENERATION-SIZE[:1]` or `[tpu-]GENERATION-AxB[xC]`, in any case: `v6e-8`, `tpu-v5litepod-16`,
`Trillium-4x4`; or a GKE label and its chips, `tpu-v6e-slice:8`. This file knows only how names are written; which
sizes exist is for `slices`.
"""

import re

import msgspec

from podway.catalog.generations import GENERATIONS
from podway.errors import UserError

# Every way a generation is called, to its name here. A leading `tpu-` or `tpu` may stand before each of them.
ALIASES: dict[str, str] = {
    **{name: name for name in GENERATIONS},
    "v5litepod": "v5e",  # the Cloud TPU API
    "v5lite": "v5e",
    "v5-lite": "v5e",
    "trillium": "v6e",
    "7x": "tpu7x",
    "v7x": "tpu7x",
    "ironwood": "tpu7x",
}

# GKE's node labels of a generation; SkyPilot files for Kubernetes name a host by one and its chips: `tpu-v6e-slice:8`.
GKE_LABELS: dict[str, str] = {
    "tpu-v3-device": "v3",
    "tpu-v3-slice": "v3",
    "tpu-v4-podslice": "v4",
    "tpu-v5-lite-device": "v5e",
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
    "tpu7x": "tpu7x",
}

# Nine digits are more than any slice needs, and keep int() cheap on hostile input.
_NAME = re.compile(r"(?P<generation>.+?)-(?P<size>[0-9]{1,9}(?:x[0-9]{1,9}){0,5})(?::(?P<count>[0-9]{1,9}))?")
_TOPOLOGY = re.compile(r"[0-9]{1,9}(?:x[0-9]{1,9}){1,5}")
# Written like a TPU even if no such generation exists: `tpu-…`, `v9-8`, `v6-8`; not `v100` (a GPU).
_LIKE_A_TPU = re.compile(r"tpu.*|v[0-9]{1,2}[a-z]{0,8}(-.*)?")


class SliceName(msgspec.Struct, frozen=True, kw_only=True):
    """A name as written: the generation, and how many cores or chips, or which topology; neither for a bare `v6e`."""

    generation: str
    count: int | None = None
    topology: tuple[int, ...] | None = None
    host_chips: int | None = None  # a GKE label counts the chips of one host, not those of the slice


def find_generation(text: str) -> str | None:
    """The generation that `text` names (`v6e`, `tpu-v6e`, `Trillium`), or None."""
    word = text.strip().lower()
    if word in GKE_LABELS:
        return GKE_LABELS[word]
    for form in (word, word.removeprefix("tpu-"), word.removeprefix("tpu")):
        if form in ALIASES:
            return ALIASES[form]
    return None


def is_tpu_name(text: str) -> bool:
    """Whether `text` is written as a TPU, real or not: `v6e-8`, `v6e-9`, `tpu-v9-8`, a bare `v6e`; not `A100`."""
    word = text.strip().lower()
    name = _NAME.fullmatch(word)
    known = name is not None and find_generation(name["generation"]) is not None
    return known or word.startswith("tpu-") or find_generation(word.partition(":")[0]) is not None


def looks_like_tpu(text: str) -> bool:
    """Whether `text` may be a misspelt TPU (`v6ee-8`, `trilium-8`, `tpu9`) and not a GPU (`A100:8`)."""
    word = text.strip().lower()
    name = _NAME.fullmatch(word)
    generation = name["generation"] if name else word
    return bool(_near(generation)) or _LIKE_A_TPU.fullmatch(generation) is not None


def parse_topology(text: str) -> tuple[int, ...]:
    """`4x4` -> (4, 4)."""
    word = text.strip().lower()
    if not _TOPOLOGY.fullmatch(word):
        raise UserError(
            f"Topology {_shown(text)} is not of the form AxB or AxBxC.",
            "Write chips along each axis, such as 4x4 or 4x4x8; `podway tpus` shows what exists.",
        )
    return tuple(int(axis) for axis in word.split("x"))


def parse_name(text: str) -> SliceName:
    """Reads the name of a slice; a UserError says what is wrong with it."""
    word = text.strip().lower()
    if not word:
        raise UserError("No TPU is named.", "Name a slice such as v6e-8; `podway tpus` lists them.")
    if generation := find_generation(word):
        return SliceName(generation=generation)
    label, _, chips = word.partition(":")
    if label in GKE_LABELS and re.fullmatch("[0-9]{1,9}", chips):
        return SliceName(generation=GKE_LABELS[label], host_chips=int(chips))
    name = _NAME.fullmatch(word)
    if name is None:
        raise _unknown(text, word)
    generation = find_generation(name["generation"])
    if generation is None:
        raise _unknown(text, name["generation"])
    if int(name["count"] or 1) != 1:
        raise UserError(
            f"{_shown(text)} asks for {int(name['count'])} slices in the name of one.",
            f"Name the slice {word.partition(':')[0]} and ask for several with `num_nodes` (or `nodes`).",
        )
    if "x" in name["size"]:
        return SliceName(generation=generation, topology=parse_topology(name["size"]))
    return SliceName(generation=generation, count=int(name["size"]))


def _unknown(text: str, generation: str) -> UserError:
    """The error for a name whose generation does not exist: the nearest one, or that it is no TPU at all."""
    known = f"Generations: {', '.join(GENERATIONS)}"
    near = _near(generation)
    if near:
        nearest = list(dict.fromkeys(ALIASES[alias] for alias in near))
        return UserError(
            f"{_shown(text)} does not name a TPU that exists.",
            f"Did you mean {' or '.join(nearest)}? `podway tpus {nearest[0]}` lists its slices. {known}.",
        )
    if _LIKE_A_TPU.fullmatch(generation):
        return UserError(
            f"{_shown(text)} does not name a TPU that exists.",
            f"{known}; a slice is named like v6e-8. `podway tpus` lists them.",
        )
    return UserError(
        f"{_shown(text)} is not a TPU, and Podway runs TPUs only.",
        "Name a slice such as v6e-8; `podway tpus` lists them with their memory, speed and price.",
    )


def _near(generation: str) -> list[str]:
    """The aliases that a word may be a misspelling of."""
    import difflib  # 2 ms that only an error should pay

    return difflib.get_close_matches(generation.removeprefix("tpu-"), ALIASES, n=2) if generation != "tpu" else []


def _shown(text: str) -> str:
    """What the person wrote, on one line and of bearable length."""
    quoted = repr(text.strip())
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}…'"
