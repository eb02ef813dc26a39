"""How many cycles a kernel takes, by the instructions that libtpu scheduled for it: one bundle of a TensorCore is one cycle.

With `LIBTPU_INIT_ARGS` of `DUMP` the compiler writes the final bundles of every kernel as text. A line of it is

    0x4a8 LB: >> { ... }

with `LB` where a loop's body begins and a `>` for each loop around it; a bundle without instructions is written without them. What a
kernel waits for (transfers) is in no bundle: where it is bound by those, its bytes say so.
"""

import re
from pathlib import Path

import msgspec

_LINE = re.compile(r"\s*(?:0x[0-9a-f]+|0) +(?:(\w\w):|:) *(>*) *\{(\})?")


def dump_flags(folder: Path) -> str:
    """What libtpu is told, so that it writes bundles into a folder."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"


class Loop(msgspec.Struct, frozen=True):
    """Bundles of a loop's body (or of the whole kernel) outside the loops in it, and those loops."""

    bundles: int
    loops: tuple["Loop", ...] = ()


class _Open:
    def __init__(self) -> None:
        self.bundles = 0
        self.loops: list[_Open] = []

    def closed(self) -> Loop:
        return Loop(self.bundles, tuple(loop.closed() for loop in self.loops))


def read_bundles(text: str) -> Loop:
    """The loops of a kernel. Both ways of a condition are counted."""
    path = [_Open()]
    for line in text.splitlines():
        found = _LINE.match(line)
        if not found:
            continue
        depth = len(found[2])
        if found[1] == "LB":
            path = path[:depth]
            path[-1].loops.append(_Open())
            path.append(path[-1].loops[-1])
        elif not found[3]:
            path = path[: depth + 1]
        path[-1].bundles += 1
    return path[0].closed()


def kernel_loops(folder: Path, name: str) -> Loop:
    """The loops of the kernel of this name, which was compiled into the folder."""
    for path in folder.glob("*final_bundles.txt"):
        if name in path.name and "schedule-analysis" not in path.name:
            return read_bundles(path.read_text())
    raise SystemExit(f"the compiler wrote no bundles of {name} into {folder}")
