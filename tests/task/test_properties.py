"""What must hold for every file: clean errors only, and no unknown key unseen."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.errors import UserError
from podway.task import dstack_keys, skypilot_keys
from podway.task.read import read_task_text
from podway.task.shapes import Either, ListOf, MapOf, Shape, Table

from . import golden, seeds
from .fuzz import OVERRIDES, fuzz, outcome
from .reading import steady

KEYS = sorted({*skypilot_keys.TASK.keys, *dstack_keys.SERVICE.keys, *dstack_keys.TASK.keys, "type"})
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | st.text(max_size=12) | st.binary(max_size=6)
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=15,
)


@steady
@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_a_user_error(data: bytes) -> None:
    outcome(data)


@steady
@given(st.text(max_size=200))
def test_no_text_raises_anything_but_a_user_error(text: str) -> None:
    try:
        read_task_text(text, name="f.yaml", overrides=OVERRIDES)
    except UserError as error:
        assert error.hint


@steady
@given(st.dictionaries(st.sampled_from(KEYS), TREES, max_size=5))
def test_no_tree_raises_anything_but_a_user_error(tree: dict[str, Any]) -> None:
    outcome(yaml.dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass"))


def test_fuzz_500() -> None:
    found = fuzz(500, seed=1)
    assert found["task"] >= 30 and found["refused"] >= 200, found


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_fuzz_10_000() -> None:
    found = fuzz(10_000, seed=2)
    assert found["task"] >= 600 and found["refused"] >= 4000, found


FILES = [*(golden.FILES / name for name in golden.NAMES), *(seeds.EXAMPLES / name for _, _, name in seeds.FILES)]


def _tables(shape: Shape, value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of every mapping of a file in which keys are known, and others are mistakes."""
    match shape:
        case Table(keys=keys) if isinstance(value, dict):
            below = [found for key, one in value.items() for found in _tables(keys[key].shape, one, (*path, key))]
            return [path, *below]
        case MapOf(value=inner) if isinstance(value, dict):
            return [found for key, one in value.items() for found in _tables(inner, one, (*path, key))]
        case ListOf(item=item) if isinstance(value, list):
            return [found for i, one in enumerate(value) for found in _tables(item, one, (*path, i))]
        case Either(options=options):
            return next((found for option in options if (found := _tables(option, value, path))), [])
        case _:
            return []


def _places() -> list[Any]:
    found = []
    for file in FILES:
        tree = yaml.safe_load(file.read_text())
        shape = dstack_keys.TABLES[tree["type"]] if "type" in tree else skypilot_keys.TASK
        found += [
            pytest.param(tree, path, id=f"{file.name}:{'.'.join(map(str, path))}") for path in _tables(shape, tree)
        ]
    return found


@pytest.mark.parametrize(("tree", "path"), _places())
@settings(steady, max_examples=5)
@given(name=st.text("abcdefgh_", min_size=3, max_size=10).map(lambda text: "zz" + text))
def test_an_unknown_key_at_any_level_is_reported_with_its_line(
    tree: dict[str, Any], path: tuple[Any, ...], name: str
) -> None:
    changed = yaml.safe_load(yaml.safe_dump(tree))
    below = changed
    for step in path:
        below = below[step]
    below[name] = 1
    text = yaml.safe_dump(changed, sort_keys=False)
    line = next(number for number, row in enumerate(text.splitlines(), 1) if f"{name}: 1" in row)
    with pytest.raises(UserError) as caught:
        read_task_text(text, name="f.yaml", overrides=OVERRIDES)
    assert caught.value.what.startswith(f"f.yaml:{line}:")
    assert caught.value.what.endswith(f"{name}: unknown key")
