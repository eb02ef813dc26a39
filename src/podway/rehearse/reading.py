"""From libtpu's text of a compiled program to a `Program`: what each instruction does, in numbers.

Asynchronous collectives are written in two ways: as instructions (`all-gather-start` … `-done`), and as fusions
(`async-collective-start` … `-done`) between which other fusions carry on with a piece of the collective while they compute.
Both become an op that starts and an op that waits. What slices exchange is written as a `send` to the host and a `recv` from it,
joined by the name of their rendezvous: the send starts the exchange, the end of the recv waits for it.
"""

import re

from podway.model.expert_dispatch import FURTHER_ROUNDS
from podway.rehearse.costs import COLLECTIVES, FREE, flops_of, hbm_bytes, product_dtype
from podway.rehearse.fabric import Fabric
from podway.rehearse.hlo import Computation, Instruction, Module, read_module, trips
from podway.rehearse.kernels import attention_of, grouped_of, is_kernel
from podway.rehearse.program import Kind, Op, Program

_CALLS = ("calls", "to_apply", "called_computations")
_PLACES = {"while", "body", "closed_call", "shard_map", "checkpoint", "jit", ""}


def read_program(text: str, fabric: Fabric) -> Program:
    """The program of a text that libtpu printed."""
    return program_of(read_module(text), fabric, complete='"estimated_cycles":"' in text)


def program_of(module: Module, fabric: Fabric, *, complete: bool) -> Program:
    """The program of a text that was read already; `complete`: it was compiled to the end."""
    return Program(ops=_block(module, module.entry, fabric), complete=complete, unread=module.unread)


def _block(module: Module, here: Computation, fabric: Fabric) -> tuple[Op, ...]:
    found: list[Op] = []
    for one in here:
        if one.opcode == "while":
            body = module.called(one, "body")
            blocks = (_block(module, body, fabric),) if body else ()
            turns = 0 if FURTHER_ROUNDS in one.op_name else trips(module, one, here)
            found.append(Op(name=one.name, kind="loop", turns=turns, blocks=blocks))
        elif one.opcode == "conditional":
            ways = tuple(_block(module, way, fabric) for way in _ways(module, one))
            found.append(Op(name=one.name, kind="branch", blocks=ways))
        elif one.opcode == "call" and (inner := module.called(one, "to_apply")) is not None:
            found += _block(module, inner, fabric)
        elif one.opcode in ("send", "recv", "send-done", "recv-done") and (key := _rendezvous(one, here)) is not None:
            found += _between_slices(module, one, key, fabric)
        elif is_done(one):
            found.append(Op(name=one.name, kind="wait", what=source_of(module, one), waits_for=started_by(one, here)))
        elif one.opcode == "async-start" and not one.operands:
            continue  # only set up: its data come with an `async-update`
        elif one.opcode not in FREE and one.target != "AllocateBuffer":
            found.append(_op(module, here, one, fabric))
    return tuple(found)


def _rendezvous(one: Instruction, here: Computation) -> str | None:
    """The name under which slices exchange something; None where a transfer is not an exchange between slices."""
    begun = here.get(one.operands[0]) if one.opcode.endswith("-done") and one.operands else one
    while begun is not None and begun.opcode == "get-tuple-element":
        begun = here.get(begun.operands[0])
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', begun.text) if begun is not None else None
    return found[1] if found else None


def _between_slices(module: Module, one: Instruction, key: str, fabric: Fabric) -> list[Op]:
    if one.opcode == "recv-done":
        return [Op(name=one.name, kind="wait", what=source_of(module, one), waits_for=f"rendezvous {key}")]
    if one.opcode != "send":
        return []  # a recv only says where the answer goes, and a send is over when the answer is there
    kind = re.search(r'_xla_megascale_transfer_type="([A-Z_]*)"', one.text)
    exchange = fabric.between_slices(one, kind[1].lower().replace("_", "-") if kind else "all-reduce")
    shape = str(max(one.shapes, key=lambda s: s.bytes)) if one.shapes else ""
    return [
        Op(
            name=f"rendezvous {key}",
            kind="collective",
            what=source_of(module, one),
            shape=shape,
            exchange=exchange,
            starts=True,
        )
    ]


def _op(module: Module, here: Computation, one: Instruction, fabric: Fabric) -> Op:
    what = source_of(module, one)
    shape = str(max(one.shapes, key=lambda s: s.bytes)) if one.shapes else ""
    if (found := collective_of(module, here, one)) is not None:
        inner, kind, starts = found
        exchange = fabric.exchange_of(inner, kind)
        return Op(name=one.name, kind="collective", what=what, shape=shape, exchange=exchange, starts=starts)
    moved = hbm_bytes(module, here, one)
    if one.opcode.endswith("-start"):
        if any(part.space == HOST_SPACE for part in one.shapes):
            return _host_transfer(one, what)
        return Op(name=one.name, kind="prefetch", what=what, shape=shape, bytes=moved, starts=True)
    if is_kernel(one):
        attention, grouped = (
            attention_of(here, one),
            grouped_of(here, one, fabric.slice.generation, 1 / fabric.spare_rows),
        )
        role: Kind = "matrix" if grouped else "kernel"
        moved /= fabric.spare_rows if grouped else 1
        return Op(name=one.name, kind=role, what=what, shape=shape, bytes=moved, attention=attention, grouped=grouped)
    flops = flops_of(module, here, one)
    return Op(
        name=one.name, kind="matrix" if flops else "memory", what=what, shape=shape, flops=flops, bytes=moved,
        dtype=product_dtype(module, here, one) if flops else "", cycles=one.cycles, shuffled=_shuffled(here, one),
    )  # fmt: skip


HOST_SPACE, _FEW = 5, 4096


def _host_transfer(one: Instruction, what: str) -> Op:
    """A slice of a stack in host memory that is fetched, or written: what lies in HBM of it goes over the link to the host."""
    kept = max((part for part in one.shapes if part.space == 0), key=lambda part: part.bytes, default=None)
    size = float(kept.bytes) if kept is not None else 0.0
    # A copy names its result first, every other start after its operands; indices and flags are a few bytes.
    arrays = [part for part in one.shapes if part.bytes > _FEW]
    result = arrays[0 if one.opcode == "copy-start" else -1] if arrays else None
    out = result is not None and result.space == HOST_SPACE
    text = str(kept) if kept is not None else ""
    return Op(
        name=one.name, kind="prefetch", what=what, shape=text, bytes=size, host="out" if out else "in", starts=True
    )


def _shuffled(here: Computation, one: Instruction) -> float:
    """Elements of a copy whose tiles are not those of its source (a weight gathered from shards of a few rows)."""
    source = here.get(one.operands[0]) if one.opcode == "copy" and one.operands else None
    if source is None or not source.shapes or not one.shapes:
        return 0.0
    before, after = source.shapes[0], one.shapes[0]
    return float(after.elements) if len(after.tile) > 1 and before.tile != after.tile else 0.0


def _ways(module: Module, one: Instruction) -> list[Computation]:
    found = re.search(r"branch_computations=\{([^}]*)\}", one.text)
    names = re.findall(r"%([\w.\-]+)", found[1]) if found else []
    names += [name for key in ("true_computation", "false_computation") if (name := one.attribute(key))]
    return [module.computations[name] for name in names if name in module.computations]


def source_of(module: Module, one: Instruction) -> str:
    """Where an instruction comes from, in the words of the model: the end of jax's path."""
    path = one.op_name
    if not path and (inner := module.called(one)) is not None:
        path = next((i.op_name for i in inner if i.op_name and i.opcode in ("convolution", "dot")), "")
        path = path or next((i.op_name for i in inner if i.op_name), "")
    parts = [part for part in path.split("/") if part not in _PLACES and "(" not in part and part != "pallas_call"]
    again = "computed again, " if "rematted_computation" in path else ""
    parts = [part for part in parts if part != "rematted_computation"]
    side = f"{again}backward" if "transpose(" in path else "forward" if "jvp(" in path else ""
    return " ".join(filter(None, (side, *parts[-1:])))


def is_done(one: Instruction) -> bool:
    """Whether the chip waits here for what was started before."""
    return one.opcode.endswith("-done") or one.name.startswith("async-collective-done")


def started_by(done: Instruction, here: Computation) -> str:
    """The name of the op that a done waits for: the same number, or what its first operand leads back to."""
    if done.name.startswith("async-collective-done"):
        return done.name.replace("-done", "-start", 1)
    one: Instruction | None = here.get(done.operands[0]) if done.operands else None
    while one is not None and one.opcode == "get-tuple-element":
        one = here.get(one.operands[0])
    return one.name if one is not None else ""


def collective_of(module: Module, here: Computation, one: Instruction) -> tuple[Instruction, str, bool] | None:
    """(the collective, its kind, whether it only starts here) of an instruction; None where it is none.

    It may lie inside a fusion. A fusion that computes while a collective goes on holds a piece of it, which is counted where
    it was started. One that a SparseCore runs is set up by `async-start` and given its data by `async-update`.
    """
    plain = one.opcode.removesuffix("-start")
    if plain in COLLECTIVES:
        return one, plain, one.opcode != plain
    if one.opcode == "async-update":
        begun = here.get(one.operands[0])
        inner = module.called(begun) if begun else None
    elif one.opcode in ("fusion", "async-start"):
        inner = module.called(one)
    else:
        return None
    if inner is None or inner.name.startswith("async_collective_fusion"):
        return None
    found = _collective_in(module, inner)
    starts = one.name.startswith("async-collective-start") or one.opcode.startswith("async-")
    return None if found is None else (found, found.opcode, starts)


def _collective_in(module: Module, inner: Computation) -> Instruction | None:
    for part in inner:
        if part.opcode in COLLECTIVES:
            return part
        deeper = next((c for key in _CALLS if (c := module.called(part, key)) is not None), None)
        if deeper is not None and (found := _collective_in(module, deeper)) is not None:
            return found
    return None
