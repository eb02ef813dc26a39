"""From paths to texts: every kind of file, and every way in which one can be wrong."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.train import readers
from podway.train.readers import Item, read, text_of
from podway.train.sources import Kind, SourceFile, expand, group, kind_of, stamp
from podway.train.tf_example import parse_example

FIXTURES = Path(__file__).parent / "fixtures"
TEXTS = ["one", "two\nlines", "three: naïve 😀", ""]
RECORDS = [{"text": text, "n": number} for number, text in enumerate(TEXTS)]


def texts(path: str | Path, kind: Kind | None = None, field: str = "text") -> list[str]:
    found = []
    for file in expand(str(path), kind):
        found += [text_of(item, field) for item in read(file, Path(file.path))]
    return found


def write_jsonl(file: Path) -> None:
    file.write_text("\n".join(json.dumps(record) for record in RECORDS) + "\n\n")


def write_arrow(file: Path, *, stream: bool) -> None:
    table = pyarrow.Table.from_pylist(RECORDS)
    maker = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(file), "wb") as sink, maker(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_array_record(file: Path, records: list[bytes]) -> None:
    writer = ArrayRecordWriter(str(file), "group_size:2")
    for record in records:
        writer.write(record)
    writer.close()


def test_each_kind_gives_its_texts(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "d.json").write_text(json.dumps(RECORDS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "e.parquet", row_group_size=2)
    write_arrow(tmp_path / "f.arrow", stream=True)
    write_arrow(tmp_path / "g.feather", stream=False)
    write_array_record(tmp_path / "h.array_record", [json.dumps(record).encode() for record in RECORDS])
    for file in sorted(tmp_path.iterdir()):
        assert texts(file) == TEXTS, file.name
        assert texts(file, field="text") == TEXTS
    assert texts(tmp_path) == TEXTS * 8


def test_text_files_folders_and_globs(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    for name, text in [("b.txt", "B"), ("a.md", "A"), ("deep/er/c.txt", "C"), (".hidden/x.txt", "X"), ("d.py", "D")]:
        (tmp_path / name).write_text(text)
    assert texts(tmp_path) == ["A", "B", "C"], "sorted, without hidden files and files of no known kind"
    assert texts(f"{tmp_path}/*.txt") == ["B"]
    assert texts(f"{tmp_path}/**/*.txt") == ["B", "C"]
    assert texts(f"{tmp_path}/d.py", "text") == ["D"]


def test_a_saved_dataset_is_read_by_its_own_list() -> None:
    expected = ["The first document.", "A second one, a little longer.", "And the third."]
    assert texts(FIXTURES / "saved_dataset") == expected
    assert texts(FIXTURES / "saved_dataset", "hf") == expected
    assert texts(FIXTURES / "saved_splits") == expected[:2], "the split called train"
    assert texts(FIXTURES / "saved_splits" / "test") == expected[2:]


def test_long_text_comes_in_stretches_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_STRETCH", 100)
    whole = "".join(f"line {number} with some words\n\n" for number in range(60)) + "the end"
    (tmp_path / "a.txt").write_text(whole)
    items = list(read(expand(str(tmp_path / "a.txt"), None)[0], tmp_path / "a.txt"))
    assert "".join(str(item.value) for item in items) == whole
    assert [item.ends for item in items] == [False] * (len(items) - 1) + [True]
    assert len(items) > 10
    assert all(str(item.value).startswith(("line", "the end")) for item in items)


def example_message() -> Any:
    """tf.train.Example, declared to protobuf itself, so that the bytes are not of our own making."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, str | None, bool]) -> None:
        made = file.message_type.add(name=name)
        for title, number, kind, of, many in fields:
            made.field.add(name=title, number=number, type=kind, type_name=of, label=3 if many else 1)

    byte, whole, floating, inner = 12, 3, 2, 11
    message("BytesList", ("value", 1, byte, None, True))
    message("FloatList", ("value", 1, floating, None, True))
    message("Int64List", ("value", 1, whole, None, True))
    message(
        "Feature",
        ("bytes_list", 1, inner, ".t.BytesList", False),
        ("float_list", 2, inner, ".t.FloatList", False),
        ("int64_list", 3, inner, ".t.Int64List", False),
    )
    message("Entry", ("key", 1, 9, None, False), ("value", 2, inner, ".t.Feature", False))
    message("Features", ("feature", 1, inner, ".t.Entry", True))
    message("Example", ("features", 1, inner, ".t.Features", False))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


@given(
    st.dictionaries(st.text(min_size=1, max_size=5), st.binary(max_size=20), min_size=1), st.lists(st.integers(-9, 9))
)
def test_examples_of_tensorflow_are_read(features: dict[str, bytes], numbers: list[int]) -> None:
    example = example_message()()
    for name, value in features.items():
        example.features.feature.add(key=name).value.bytes_list.value.append(value)
    example.features.feature.add(key="numbers").value.int64_list.value.extend(numbers)
    example.features.feature.add(key="halves").value.float_list.value.extend([0.5, -1.5])
    expected = {**features, "numbers": numbers or None, "halves": [0.5, -1.5]}
    found = parse_example(example.SerializeToString())
    assert found is not None
    assert {k: (v or None if k == "numbers" else v) for k, v in found.items()} == expected


@given(st.binary(max_size=60))
def test_no_bytes_break_the_reader_of_examples(data: bytes) -> None:
    parse_example(data)


def test_array_records_of_examples_and_of_text(tmp_path: Path) -> None:
    example = example_message()()
    example.features.feature.add(key="text").value.bytes_list.value.append("grün".encode())
    write_array_record(tmp_path / "a.array_record", [example.SerializeToString(), b"plain text"])
    assert texts(tmp_path / "a.array_record") == ["grün", "plain text"]


BAD_FILES: list[tuple[str, bytes, str]] = [
    ("a.txt", b"fine\xff\xfe", "is not UTF-8"),
    ("a.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:-10], "cannot read"),
    ("a.txt.gz", b"not gzip", "cannot read"),
    ("a.jsonl.zst", b"not zstd", "cannot read"),
    ("a.jsonl", b'{"text": "x"}\n{"text": \n', ":2: not JSON"),
    ("a.jsonl", b"7\n", ":1: not a JSON object"),
    ("a.jsonl", b"\xff\xfe\n", ":1: not JSON"),
    ("a.json", b'[{"text": 1}', "is not JSON"),
    ("a.json", b"[7]", "[0]: not a JSON object"),
    ("a.jsonl", b'{"body": "x"}\n', "there is no field 'text'"),
    ("a.jsonl", b'{"text": [1]}\n', "is not text but list"),
    ("a.parquet", b"PAR1 nothing", "is not a whole parquet file"),
    ("a.arrow", b"ARROW1\0\0 nothing", "is not a whole arrow file"),
    ("a.arrow", b"nothing", "is not a whole arrow file"),
    ("a.array_record", b"nothing", "a.array_record"),
]


@pytest.mark.parametrize(("name", "content", "what"), BAD_FILES)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        texts(tmp_path / name)
    assert str(tmp_path / name) in caught.value.what
    assert what in caught.value.what
    assert caught.value.hint


def test_a_parquet_file_cut_short(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="whole parquet"):
        texts(tmp_path / "a.parquet")


@pytest.mark.parametrize("damage", [100, 40_000])
def test_a_damaged_array_record(tmp_path: Path, damage: int) -> None:
    file = tmp_path / "a.array_record"
    write_array_record(file, [os.urandom(500).hex().encode() for _ in range(200)])
    content = bytearray(file.read_bytes())
    content[damage : damage + 50] = bytes(50)
    file.write_bytes(content)
    with pytest.raises(UserError, match="array_record"):
        texts(file)


def test_the_hint_names_the_fields_that_are_there() -> None:
    with pytest.raises(UserError) as caught:
        text_of(Item("f:1", {"body": "x", "id": 1}), "text")
    assert "body, id" in caught.value.hint


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    for path in [f"{tmp_path}/none/*.txt", f"{tmp_path}/a.txt"]:
        with pytest.raises(UserError) as caught:
            expand(path, None)
        assert path in caught.value.what
        assert str(tmp_path) in caught.value.hint
    (tmp_path / "a.dat").write_text("x")
    for path in [tmp_path / "a.dat", tmp_path]:
        with pytest.raises(UserError) as caught:
            expand(str(path), None)
        assert "data.kind" in caught.value.hint


def test_datasets_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no state\.json"):
        expand(str(tmp_path), "hf")
    for state, what in [
        ("{]", "cannot read"),
        ("{}", "lists no data"),
        ('{"_indices_files": [1]}', "index over its rows"),
    ]:
        (tmp_path / "state.json").write_text(state)
        with pytest.raises(UserError, match=what):
            expand(str(tmp_path), None)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    with pytest.raises(UserError, match=r"gone\.arrow"):
        expand(str(tmp_path), None)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(UserError, match="no split called train, but test"):
        expand(str(tmp_path), None)


READ_IT = """
import sys
from pathlib import Path
from podway.errors import UserError
from podway.train.data import DataConfig, open_data
from podway.train.readers import read
from podway.train.sources import expand
(file,) = expand(sys.argv[1], None)
config = DataConfig(paths=(sys.argv[1],), cache=sys.argv[2])
for act in [lambda: list(read(file, Path(file.path))), lambda: open_data(config, batch=1, seq=1, process=0, processes=1)]:
    try:
        print(act())
    except UserError as error:
        print(error.what)
"""


def test_an_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("secret")
    (tmp_path / "a.txt").chmod(0)
    command = [sys.executable, "-c", READ_IT, str(tmp_path / "a.txt"), str(tmp_path / "cache")]
    if os.getuid() == 0:  # root may read everything, unless it gives that up
        command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"cannot read {tmp_path / 'a.txt'}: Permission denied\n" * 2


@given(st.lists(st.integers(0, 100 << 20), max_size=30))
def test_groups_keep_the_order_and_are_not_too_large(sizes: list[int]) -> None:
    files = [SourceFile(str(number), "text", size, "") for number, size in enumerate(sizes)]
    groups = group(files)
    assert [file for part in groups for file in part] == files
    assert all(len(part) == 1 or sum(file.size for file in part) <= 64 << 20 for part in groups)
    assert len(groups) <= 1 + sum(sizes) // (32 << 20)


def test_a_stamp_follows_name_size_and_version() -> None:
    file = SourceFile("a", "text", 1, "1")
    others = [file._replace(path="b"), file._replace(size=2), file._replace(version="2")]
    assert len({stamp([one]) for one in [file, *others]}) == 4


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.TXT", "text"), ("a.jsonl.gz", "jsonl"), ("a.gz", None), ("a", None), ("x/a.parquet", "parquet")],
)
def test_kinds_by_name(name: str, kind: Kind | None) -> None:
    assert kind_of(name) == kind
