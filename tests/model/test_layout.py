from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.model.families import find_model, known_models
from podway.model.layout import (
    AXES,
    SERVE_RULES,
    TRAIN_RULES,
    MeshShape,
    Rules,
    bytes_per_chip,
    kept_whole,
    kv_repeats,
    params_per_chip,
    parse_mesh,
    shard_shape,
    spec_for,
    spec_on,
    tile_order,
)
from podway.model.params import count, params

SIZES = st.sampled_from([1, 2, 3, 4, 8, 16])
MESHES = st.fixed_dictionaries(dict.fromkeys(AXES, SIZES)).map(lambda sizes: MeshShape(**sizes))
RULES = st.sampled_from([TRAIN_RULES, SERVE_RULES])
MODELS = st.sampled_from(sorted(known_models())).map(find_model)


def test_the_rules_of_training() -> None:
    assert spec_for(("layers", "embed", "heads", "head_dim"), TRAIN_RULES) == (None, "fsdp", "tensor", None)
    assert spec_for(("batch", "length", "act_embed"), TRAIN_RULES) == (
        ("slices", "data", "fsdp", "expert"), "context", "tensor",
    )  # fmt: skip


def test_a_mesh_axis_is_given_once() -> None:
    rules = Rules(vocab=("tensor",), mlp=("tensor", "fsdp"))
    assert spec_for(("vocab", "mlp"), rules) == ("tensor", "fsdp")


def test_what_does_not_divide_is_kept_whole_and_said() -> None:
    shape, mesh = find_model("llama3.1-8b"), MeshShape(fsdp=16, tensor=16)
    k = next(param for param in params(shape) if param.name == "layers/k")
    assert spec_on(k.axes, k.dims, mesh, TRAIN_RULES) == (None, "fsdp", None, None)
    assert shard_shape(k, mesh, TRAIN_RULES) == (32, 256, 8, 128)
    assert kept_whole(shape, mesh, TRAIN_RULES) == (
        "layers/k: kv_heads 8 does not divide over tensor=16, kept whole",
        "layers/v: kv_heads 8 does not divide over tensor=16, kept whole",
    )


def test_bytes_of_a_job_that_ran() -> None:
    """16B over fsdp=256 with 12 bytes a parameter: 0.76 GB a chip."""
    state = bytes_per_chip(find_model("16b"), MeshShape(fsdp=256), TRAIN_RULES, 12)
    assert state == pytest.approx(0.76e9, rel=0.01)


@given(MODELS, MESHES, RULES)
def test_shards_cover_every_parameter_exactly(shape, mesh, rules) -> None:  # type: ignore[no-untyped-def]
    for param in params(shape):
        spec = spec_on(param.axes, param.dims, mesh, rules)
        used = [axis for part in spec for axis in (part if isinstance(part, tuple) else (part,)) if axis]
        assert len(used) == len(set(used))
        pieces = prod(mesh.size(axis) for axis in used)
        assert prod(shard_shape(param, mesh, rules)) * pieces == param.size
    assert count(shape) / mesh.chips <= params_per_chip(shape, mesh, rules) <= count(shape)


@given(MESHES)
def test_a_mesh_reads_back_as_it_prints(mesh: MeshShape) -> None:
    assert parse_mesh(str(mesh)) == mesh
    assert parse_mesh(str(mesh), chips=mesh.chips) == mesh


def test_one_axis_takes_what_is_left() -> None:
    assert parse_mesh("fsdp=*,tensor=16", chips=256) == MeshShape(fsdp=16, tensor=16)


@pytest.mark.parametrize(
    ("text", "chips"),
    [("fsdp=3,tensor=*", 256), ("fsdp=4", 8), ("fsdp=*,data=*", 8), ("fsdp=0", None), ("fsdp=*", None), ("model=4", 4),
     ("fsdp=2,fsdp=2", 4), ("", None), ("fsdp", None), ("fsdp=9999999999", None), ("fsdp=²", None)],
)  # fmt: skip
def test_a_wrong_mesh_is_refused(text: str, chips: int | None) -> None:
    with pytest.raises(UserError) as error:
        parse_mesh(text, chips=chips)
    assert error.value.hint


@given(st.text(max_size=40), st.none() | st.integers(1, 4096))
def test_any_text_is_a_mesh_or_a_user_error(text: str, chips: int | None) -> None:
    try:
        mesh = parse_mesh(text, chips=chips)
    except UserError:
        return
    assert chips is None or mesh.chips == chips


@pytest.mark.parametrize("sizes", [{"fsdp": 0}, {"tensor": 16, "tile": (4, 2)}, {"tile": ()}, {"tile": (-1, -1)}])
def test_an_impossible_mesh_is_refused(sizes: dict[str, object]) -> None:
    with pytest.raises(UserError):
        MeshShape(**sizes)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4))
def test_tiles_are_contiguous_boxes(pairs: list[tuple[int, int]]) -> None:
    tile, bounds = tuple(t for t, _ in pairs), tuple(t * n for t, n in pairs)
    order = tile_order(bounds, tile)
    assert len(set(order)) == len(order) == prod(bounds)
    for start in range(0, len(order), prod(tile)):
        box = order[start : start + prod(tile)]
        assert box[0] == min(box)
        for axis, size in enumerate(tile):
            span = [place[axis] for place in box]
            assert max(span) - min(span) == size - 1


def test_two_tiles_of_sixteen_have_different_neighbours() -> None:
    tall, flat = tile_order((8, 8, 8), (2, 2, 4)), tile_order((8, 8, 8), (4, 2, 2))
    assert set(tall[:16]) != set(flat[:16])


def test_a_tile_that_does_not_divide_the_slice() -> None:
    with pytest.raises(UserError, match="3x2"):
        tile_order((4, 4, 4), (3, 2))


@given(
    st.sampled_from([(32, 8), (64, 8), (16, 16), (14, 2), (8, 1), (32, 4)]), st.sampled_from([1, 2, 4, 7, 8, 16, 32])
)
def test_repeated_key_heads_divide_and_still_share(heads: tuple[int, int], tensor: int) -> None:
    h, g = heads
    repeats = kv_repeats(h, g, tensor)
    assert h % (g * repeats) == 0
    assert g * repeats % tensor == 0 or h % tensor != 0
    assert repeats == 1 or (g * repeats // 2) % tensor != 0 or repeats % 2
