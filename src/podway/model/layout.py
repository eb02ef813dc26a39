"""Where the arrays of a model lie on a mesh of chips, and the bytes that makes on each of them (no jax).

1. `MeshShape` says how many chips each mesh axis has.
2. `Rules` say which mesh axes each logical axis of the parameter table (`params.py`) is split over; `TRAIN_RULES` and
   `SERVE_RULES` are the two in use.
3. `spec_on(axes, dims, mesh, rules)` joins the two for one array. A mesh axis is used once in an array, and only where
   it divides the dimension: XLA would pad an uneven shard and jax refuses to place one, so what does not divide is kept
   whole on every chip of that axis, and `kept_whole` says so in words. So 8 key/value heads over tensor=16 are
   replicated: each chip computes all of them and uses its own. No array is ever padded, and the bytes counted here are
   the bytes of the real arrays (`tests/model/test_decoder.py` holds this on a mesh of CPU devices).
"""

from math import prod

import msgspec

from podway.errors import UserError
from podway.model.params import Param, params
from podway.model.shape import ModelShape

# Mesh axes from the slowest network to the fastest: `slices` crosses the data-centre network, `tensor` wants the nearest
# neighbours. This is the order of the axes in the jax mesh as well.
AXES = ("slices", "data", "fsdp", "expert", "context", "tensor")

Axes = tuple[str | None, ...]  # one logical axis a dimension; None: never split
Spec = tuple[str | tuple[str, ...] | None, ...]  # PartitionSpec(*spec) is the same thing in jax


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The mesh axes that each logical axis is split over. A logical axis that is not named here is never split."""

    # of parameters
    layers: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()
    head_dim: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    router: tuple[str, ...] = ()
    norm: tuple[str, ...] = ()
    # of activations, beside heads, kv_heads, mlp and vocab
    batch: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    act_embed: tuple[str, ...] = ()
    # Columns of an expert's MLP on one chip are a multiple of this; where they would not be, experts are split instead. 1: never.
    expert_columns: int = 1

    def of(self, axis: str | None) -> tuple[str, ...]:
        wanted: tuple[str, ...] = getattr(self, axis) if axis else ()
        return wanted


# Training. Weights are split over fsdp along d_model and over tensor along what each chip can own (heads, MLP columns,
# vocabulary). Tokens are split over everything but tensor; `expert` holds different experts and different tokens. The
# residual stream is split over tensor along d_model too, so that saved activations shrink with it.
TRAIN_RULES = Rules(
    embed=("fsdp",),
    heads=("tensor",),
    kv_heads=("tensor",),
    mlp=("tensor",),
    vocab=("tensor",),
    experts=("expert",),
    batch=("slices", "data", "fsdp", "expert"),
    length=("context",),
    act_embed=("tensor",),
)

# Serving. Nothing is gathered for a step: weights stay where they are used, so only tensor and expert split them. Experts are
# split by their columns, so that all chips read a part of each one that is chosen, but only into whole lanes of a TPU: the
# compiler would copy the matrices of all layers into a layout that is padded.
SERVE_RULES = Rules(
    heads=("tensor",),
    kv_heads=("tensor",),
    mlp=("tensor",),
    vocab=("tensor",),
    experts=("expert",),
    batch=("slices", "data"),
    expert_columns=128,
)


class MeshShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """Chips along each mesh axis, over all slices. The product is the number of chips (jax devices)."""

    slices: int = 1  # whole copies of the model's shards, over the data-centre network
    data: int = 1  # the same, inside a slice
    fsdp: int = 1  # weights and optimizer state split, gathered layer by layer
    expert: int = 1  # experts split
    context: int = 1  # the sequence split
    tensor: int = 1  # heads, MLP columns and vocabulary split
    # The box of neighbouring chips (x, y[, z[, core]]) in the torus that one tensor group fills; None: jax decides.
    tile: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        least = min(self.slices, self.data, self.fsdp, self.expert, self.context, self.tensor)
        for axis in (
            AXES if least < 1 else ()
        ):  # a search of the planner makes thousands of meshes: what is right is seen at once
            if self.size(axis) < 1:
                raise UserError(f"mesh axis {axis} is {self.size(axis)}", "each axis of a mesh has at least 1 chip")
        if self.tile is not None and (prod(self.tile) != self.tensor or min(self.tile, default=0) < 1):
            raise UserError(
                f"a tile of {'x'.join(map(str, self.tile))} chips cannot hold tensor={self.tensor}",
                f"the sizes of the tile must multiply to {self.tensor}",
            )

    def size(self, axis: str) -> int:
        value = getattr(self, axis)
        assert isinstance(value, int)
        return value

    @property
    def chips(self) -> int:
        return self.slices * self.data * self.fsdp * self.expert * self.context * self.tensor

    def __str__(self) -> str:
        text = ",".join(f"{axis}={self.size(axis)}" for axis in AXES if self.size(axis) > 1)
        return text or "data=1"


def parse_mesh(text: str, *, chips: int | None = None, tile: tuple[int, ...] | None = None) -> MeshShape:
    """'fsdp=16,tensor=16' -> MeshShape. With `chips` known, one axis may be '*' and takes what is left."""
    sizes: dict[str, int] = {}
    rest: str | None = None
    for part in text.replace(" ", "").split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in sizes or axis == rest:
            problem = f"{axis!r} twice" if axis in AXES else f"an axis {axis!r}"
            raise UserError(f"mesh {text!r} has {problem}", "write axis=size with commas; axes: " + ", ".join(AXES))
        if size == "*" and rest is None and chips is not None:
            rest = axis
        elif size.isascii() and size.isdigit() and 0 < int(size) < 2**31:
            sizes[axis] = int(size)
        else:
            hint = "a size is a whole number above 0" + ("; one axis may be '*'" if chips is not None else "")
            raise UserError(f"mesh {text!r}: {axis} is {size!r}", hint)
    used = prod(sizes.values())
    if chips is not None and (chips % used if rest else chips != used):
        raise UserError(
            f"mesh {text!r} needs {'a multiple of ' if rest else ''}{used} chips, and there are {chips}",
            "the sizes of the axes must multiply to the number of chips",
        )
    if chips is not None and rest:
        sizes[rest] = chips // used
    return MeshShape(**sizes, tile=tile)


def spec_for(axes: Axes, rules: Rules) -> Spec:
    """The mesh axes that the rules want for each dimension; a mesh axis goes to the first dimension that asks for it."""
    taken: set[str] = set()
    spec: list[str | tuple[str, ...] | None] = []
    for axis in axes:
        wanted = tuple(m for m in rules.of(axis) if m not in taken)
        taken.update(wanted)
        spec.append(wanted if len(wanted) > 1 else wanted[0] if wanted else None)
    return tuple(spec)


def spec_on(axes: Axes, dims: tuple[int, ...], mesh: MeshShape, rules: Rules) -> Spec:
    """As `spec_for`, for an array of these dimensions on this mesh: mesh axes that do not divide are left out."""
    spec: list[str | tuple[str, ...] | None] = []
    rules = _for_experts(axes, dims, mesh, rules)
    for dim, want in zip(dims, spec_for(axes, rules), strict=True):
        kept: tuple[str, ...] = ()
        for axis in _each(want):
            if dim % prod(mesh.size(a) for a in (*kept, axis)) == 0:
                kept = (*kept, axis)
        spec.append(kept if len(kept) > 1 else kept[0] if kept else None)
    return tuple(spec)


def _for_experts(axes: Axes, dims: tuple[int, ...], mesh: MeshShape, rules: Rules) -> Rules:
    """The rules with experts split in place of their columns, where a chip would get too few columns of each."""
    if rules.expert_columns == 1 or "experts" not in axes or "mlp" not in axes:
        return rules
    count, columns = dims[axes.index("experts")], dims[axes.index("mlp")]
    over = prod(mesh.size(axis) for axis in rules.mlp)
    whole = columns % (over * rules.expert_columns) == 0
    if over == 1 or whole or count % (over * prod(mesh.size(axis) for axis in rules.experts)):
        return rules
    return msgspec.structs.replace(rules, experts=(*rules.experts, *rules.mlp), mlp=())


def shard_dims(axes: Axes, dims: tuple[int, ...], mesh: MeshShape, rules: Rules) -> tuple[int, ...]:
    """The dimensions of the piece of an array that one chip holds."""
    spec = spec_on(axes, dims, mesh, rules)
    return tuple(dim // prod(mesh.size(a) for a in _each(part)) for dim, part in zip(dims, spec, strict=True))


def shard_shape(param: Param, mesh: MeshShape, rules: Rules) -> tuple[int, ...]:
    """The dimensions of the piece of a parameter that one chip holds."""
    return shard_dims(param.axes, param.dims, mesh, rules)


def params_per_chip(shape: ModelShape, mesh: MeshShape, rules: Rules) -> int:
    """Parameters that one chip holds; every chip holds as many."""
    return sum(prod(shard_shape(param, mesh, rules)) for param in params(shape))


def bytes_per_chip(shape: ModelShape, mesh: MeshShape, rules: Rules, bytes_each: float) -> int:
    """Bytes on each chip for one copy of the parameters at `bytes_each` (4: float32, 2: bfloat16, 1: int8)."""
    return round(params_per_chip(shape, mesh, rules) * bytes_each)


def kept_whole(shape: ModelShape, mesh: MeshShape, rules: Rules) -> tuple[str, ...]:
    """One line for each parameter that a mesh axis should have split and does not divide."""
    lines = []
    for param in params(shape):
        wanted = spec_for(param.axes, _for_experts(param.axes, param.dims, mesh, rules))
        fits = spec_on(param.axes, param.dims, mesh, rules)
        for axis, dim, want, fit in zip(param.axes, param.dims, wanted, fits, strict=True):
            lost = [a for a in _each(want) if a not in _each(fit) and mesh.size(a) > 1]
            lines += [f"{param.name}: {axis} {dim} does not divide over {a}={mesh.size(a)}, kept whole" for a in lost]
    return tuple(lines)


def kv_repeats(heads: int, kv_heads: int, tensor: int) -> int:
    """How often each key/value head is repeated so that every chip of a tensor group has those of its own queries.

    1 where kv_heads divides over the group, and where the query heads do not divide either (all stay whole).
    """
    if heads % tensor:
        return 1
    shared = heads // kv_heads
    return next(r for r in range(1, shared + 1) if shared % r == 0 and kv_heads * r % tensor == 0)


def _each(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return part if isinstance(part, tuple) else (part,) if part else ()


def tile_order(bounds: tuple[int, ...], tile: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The chips of a torus, group after group: each run of prod(tile) chips is one contiguous box of that size.

    Both the boxes and the chips inside a box go in row-major order, so (4, 2, 2) and (2, 2, 4) are the same number of
    chips with different neighbours.
    """
    padded = tile + (1,) * (len(bounds) - len(tile))
    if len(padded) != len(bounds) or any(b % t for b, t in zip(bounds, padded, strict=True)):
        raise UserError(
            f"a tile of {'x'.join(map(str, tile))} does not divide a slice of {'x'.join(map(str, bounds))}",
            "each size of the tile must divide the size of the slice in the same direction",
        )
    boxes = _grid(tuple(b // t for b, t in zip(bounds, padded, strict=True)))
    inside = _grid(padded)
    return tuple(
        tuple(b * t + i for b, t, i in zip(box, padded, place, strict=True)) for box in boxes for place in inside
    )


def _grid(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    places: list[tuple[int, ...]] = [()]
    for size in sizes:
        places = [(*place, i) for place in places for i in range(size)]
    return places
