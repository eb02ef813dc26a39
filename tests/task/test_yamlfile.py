"""YAML with positions, and every trap of YAML that must end in a clean line."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.task.fields import Field
from podway.task.read import read_task
from podway.task.yamlfile import MAX_BYTES, MAX_DEPTH, Mapping, Scalar, parse

from .reading import refused, steady


def field(text: str) -> Field:
    (document,) = parse(text, "f.yaml")
    return Field("f.yaml", document)


def test_values_know_their_place() -> None:
    root = field("a: 1\nb:\n  - x\n  - {c: d}\n")
    c = root.entries()["b"].items()[1].entries()["c"]
    assert c.path == "b[1].c"
    assert (c.node.line, c.node.column) == (4, 9)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("x", "str"),
        ("'1'", "str"),
        ("1", "int"),
        ("1.5", "float"),
        ("yes", "bool"),
        ("~", "null"),
        ("2024-01-01", "timestamp"),
    ],
)
def test_scalars_keep_text_and_kind(text: str, kind: str) -> None:
    node = field(f"a: {text}").entries()["a"].node
    assert isinstance(node, Scalar)
    assert (node.kind, node.text) == (kind, text.strip("'"))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + last] * 9)}]\n" for last, name in zip("abcdefgh", "bcdefghi", strict=True)
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 200))


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", ":3:1:", "`a` is given twice: here and at line 1, column 1"),
        ("run: x\n\tb: 1\n", ":2:", "tab"),
        (b"\trun: x\n", ":1:", "tab"),
        ("a: &x [*x]", ":1:8:", "inside its own anchor"),
        ("a: *x", ":1:4:", "has no anchor"),
        (BOMB, "", "too large when its aliases are expanded"),
        (CHAIN, "", "too large when its aliases are expanded"),
        ("[" * 100_000, ":1:", f"more than {MAX_DEPTH} deep"),
        ("- " * 5_000, ":1:", f"more than {MAX_DEPTH} deep"),
        ("{a: " * 5_000, ":1:", f"more than {MAX_DEPTH} deep"),
        ("a: !!python/object:os.system x", ":1:4:", "!!python/object:os.system"),
        ("a: !mine {b: c}", ":1:4:", "!mine"),
        ("? [a]\n: b", ":1:3:", "a key must be a word"),
        ("~: b", ":1:1:", "a key is empty"),
        ("a: {<<: 5}", ":1:9:", "merges mappings only"),
        ("a: 'x", ":1:", "not valid YAML"),
        ("a: b: c", ":1:5:", "not valid YAML"),
        ("a: \x07", ":1:4:", "U+0007"),
        (b"a: 1\nb: \xe9\n", ":2:4:", "not UTF-8"),
        (b"\xff\xfea\x00", ":1:1:", "UTF-16"),
        ("", ":1:1:", "empty"),
        ("# nothing\n---\n", ":1:1:", "empty"),
        ("- a\n- b\n", ":1:1:", "not a list"),
        ("hello", ":1:1:", "not `hello`"),
        ("run: a\n---\nrun: b\n", ":3:1:", "holds 2 tasks (at lines 1, 3)"),
        ("name: p\n---\nrun: a\n---\nrun: b\n", ":5:1:", "a SkyPilot pipeline: the file holds 2 tasks (at lines 3, 5)"),
        ("name: p\nexecution: serial\n---\nrun: a\n---\nrun: b\n", ":6:1:", "pipeline: the file holds 2 tasks"),
        ("name: p\nexecution: parallel\n---\nrun: a\n---\nrun: b\n", ":6:1:", "job group: the file holds 2 tasks"),
        ("type: task\n---\ntype: service\n", ":3:1:", "holds 2 dstack configurations (at lines 1, 3)"),
        (b"a" * (MAX_BYTES + 7), "", f"{MAX_BYTES + 7:,} bytes"),
        (f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 5_000)}]\n", "", "too large when its aliases are expanded"),
        (f"a: &a {{k: &k {'x' * 1000}}}\nb: [{'*a, ' * 2_200}]\n", "", "too large when its aliases are expanded"),
        ("\n".join(f"k{i}: x" for i in range(60_000)), ":1:1:", "more than 50,000 values in one file"),
    ],
)
def test_traps_end_in_a_clean_line(text: str | bytes, where: str, says: str) -> None:
    error = refused(text)
    assert error.what.startswith("f.yaml" + where)
    assert says in error.what


def test_bom_merge_keys_and_header_are_read() -> None:
    (document,) = parse(b"\xef\xbb\xbfa: 1", "f")
    assert isinstance(document, Mapping)
    merged = field("d: &d {x: 1, y: 2}\ne: {<<: *d, y: 3}\nf: {<<: [*d, {z: 9}]}\n").plain()
    assert merged["e"] == {"x": 1, "y": 3}
    assert merged["f"] == {"x": 1, "y": 2, "z": 9}


@pytest.mark.parametrize("path", [".", "/nonexistent/x.yaml", "", "x" * 5000, "a\0b"])
def test_paths_that_are_no_files(path: str) -> None:
    with pytest.raises(UserError) as caught:
        read_task(path)
    assert caught.value.hint


def test_unreadable_file_is_a_clean_error(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    with pytest.raises(UserError, match=r"loop\.yaml"):
        read_task(loop)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abcdef_-", min_size=1, max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


@steady
@given(TREES.filter(lambda tree: tree is not None and tree != ""))
def test_parse_agrees_with_the_yaml_library(tree: object) -> None:
    """Trees the library writes are read back with the same values, whatever quotes it chose."""
    text = yaml.safe_dump(tree, allow_unicode=True)
    documents = parse(text, "f")
    if yaml.safe_load(text) is None:
        assert documents == []
    else:
        assert Field("f", documents[0]).plain() == yaml.safe_load(text)


def test_the_size_of_a_file_is_told_truly(tmp_path: Path) -> None:
    large = tmp_path / "large.yaml"
    large.write_bytes(b"a" * (3 * MAX_BYTES))
    with pytest.raises(UserError, match=f"the file has {3 * MAX_BYTES:,} bytes"):
        read_task(large)


@pytest.mark.parametrize(
    "text",
    [
        "file_mounts:\n" + "".join(f"  ~/{i}: ${{A}}\n" for i in range(30)),
        f"file_mounts: {{~/x: '{'${A}' * 30}'}}\n",
    ],
)
def test_variables_do_not_swell_a_file_without_bound(text: str) -> None:
    error = refused(f"envs: {{A: {'x' * 100_000}}}\nrun: x\n{text}")
    assert "too large when its variables are expanded" in error.what


def test_a_file_of_variables_does_not_swell_without_bound(tmp_path: Path) -> None:
    doubling = tmp_path / "doubling.env"
    doubling.write_text("A0=xxxxxxxx\n" + "".join(f"A{i}=${{A{i - 1}}}${{A{i - 1}}}\n" for i in range(1, 60)))
    assert "characters" in refused("run: x", env_files=(str(doubling),)).what
