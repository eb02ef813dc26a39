"""Listing objects page by page, for any names and pages, and taking uploads apart; pure."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from podway.sandbox.ledger import Ledger
from podway.sandbox.status import ApiError
from podway.sandbox.storage.buckets import Buckets, Content
from podway.sandbox.storage.uploads import split_multipart

PLACE = Path(tempfile.mkdtemp(prefix="podway-buckets-"))
NAMES = st.sets(st.text("ab/-", min_size=1, max_size=6), max_size=12)


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left() -> Iterator[None]:
    yield
    shutil.rmtree(PLACE, ignore_errors=True)


def buckets_with(names: set[str], place: Path) -> Buckets:
    buckets = Buckets(place, Ledger())
    buckets.make("p", {"name": "bucket"}, 0.0)
    content = Content(path=place / "podway-no-such-object", size=0, md5="", crc32c="")
    for name in names:
        buckets.put("bucket", name, content, {}, {}, 0.0)
    return buckets


@settings(max_examples=60)
@given(NAMES, st.text("ab/", max_size=2), st.sampled_from(["", "/"]), st.integers(1, 4))
def test_pages_are_the_whole(names: set[str], prefix: str, delimiter: str, size: int) -> None:
    buckets = buckets_with(names, PLACE)
    query = {"prefix": prefix, "delimiter": delimiter}
    items, prefixes, token = buckets.list_of("bucket", query)
    assert not token
    inside = [name for name in sorted(names) if name.startswith(prefix)]
    folders = {prefix + name[len(prefix) :].split("/")[0] + "/" for name in inside if "/" in name[len(prefix) :]}
    assert set(prefixes) == (folders if delimiter else set())
    assert [item.name for item in items] == [name for name in inside if not delimiter or "/" not in name[len(prefix) :]]
    pages: list[str] = []
    token = ""
    while True:
        some, more, token = buckets.list_of("bucket", {**query, "maxResults": str(size), "pageToken": token})
        assert len(some) + len(more) <= size
        pages += [*[item.name for item in some], *more]
        if not token:
            break
    assert sorted(pages) == sorted([*[item.name for item in items], *prefixes])


@settings(max_examples=60)
@given(
    st.binary(max_size=40), st.sampled_from([b"\r\n", b"\n"]), st.sampled_from(['"{}"', "'{}'", "{}"]), st.booleans()
)
def test_an_upload_in_two_parts_keeps_every_byte(data: bytes, newline: bytes, quotes: str, headers: bool) -> None:
    mark = "===x7=="
    start = b"--" + mark.encode()
    kind = b"Content-Type: text/plain" + newline if headers else b""
    lines = [start, b"Content-Type: application/json", b"", b'{"name": "n"}', start]
    body = newline.join(lines) + newline + kind + newline + data + newline + start + b"--"
    found = split_multipart("multipart/related; boundary=" + quotes.format(mark), body)
    assert found == ("text/plain" if headers else "application/octet-stream", {"name": "n"}, data)


@settings(max_examples=60)
@given(st.binary(max_size=60), st.text(max_size=20))
def test_any_upload_is_taken_apart_or_refused(body: bytes, boundary: str) -> None:
    for content_type in (boundary, f"multipart/related; boundary={boundary}", "multipart/related; boundary=a"):
        try:
            split_multipart(content_type, b"--a\r\n" + body)
        except ApiError as error:
            assert error.status == "INVALID_ARGUMENT"
